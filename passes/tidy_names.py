"""Name every value after the op that makes it."""

from __future__ import annotations

from torch import fx

from autoshard.program import Program, copied_node


def tidy_names(program: Program) -> Program:
    """The graph again, with names numbered in order; emitted code and plans use them.

    before:  view_7 = aten.reshape(x, [8, 16]); slice_tensor_2 = aten.slice(view_7, 1, 0, 4)
    after:   reshape = aten.reshape(x, [8, 16]); slice_1 = aten.slice(reshape, 1, 0, 4)
    """
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for old in program.graph.nodes:
        copied_node(graph, old, mapping, old.target.__name__.partition(".")[0] if old.op == "call_function" else old.name)
    program.graph = graph
    return program
