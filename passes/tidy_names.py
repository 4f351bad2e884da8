"""Name every value after the op that makes it."""

from __future__ import annotations

import copy

from torch import fx

from autoshard.program import Program


def tidy_names(program: Program) -> Program:
    """The graph again, with names numbered in order; emitted code and plans use them.

    before:  view_7 = aten.reshape(x, [8, 16]); slice_tensor_2 = aten.slice(view_7, 1, 0, 4)
    after:   reshape = aten.reshape(x, [8, 16]); slice_1 = aten.slice(reshape, 1, 0, 4)
    """
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for old in program.graph.nodes:
        args, kwargs = fx.map_arg((old.args, old.kwargs), lambda n: mapping[n])
        name = old.target.__name__.partition(".")[0] if old.op == "call_function" else old.name
        node = mapping[old] = graph.create_node(old.op, old.target, args, kwargs, name=name)
        node.meta = copy.copy(old.meta)
    program.graph = graph
    return program
