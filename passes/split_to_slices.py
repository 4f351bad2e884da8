"""Multi-result views become one view a result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from autoshard.passes.edit import arguments, new_op, replace
from autoshard.program import Program, shape_of

aten = torch.ops.aten

SPLITS = {
    aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default, aten.unsafe_split.Tensor,
    aten.unsafe_chunk.default, aten.tensor_split.sections, aten.tensor_split.indices, aten.hsplit.int, aten.vsplit.int,
}  # fmt: skip

VIEWS = {aten.unbind.int, aten.broadcast_tensors.default}


def split_to_slices(program: Program) -> Program:
    """Replace split, chunk, unbind and broadcast_tensors by slices, selects and expands, made where they are read.

    before:  s = aten.split.Tensor(x, 32, 2); q = getitem(s, 0); k = getitem(s, 1)      # x: [8, 16, 64]
    after:   q = aten.slice.Tensor(x, 2, 0, 32); k = aten.slice.Tensor(x, 2, 32, 64)
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or not (node.target in SPLITS or node.target in VIEWS):
            continue
        for user in list(node.users):
            with graph.inserting_before(user):
                piece = new_op(graph, *one_of(node, user.args[1] % len(node.meta["val"])), like=node)
            replace(user, piece)
        graph.erase_node(node)
    return program


def one_of(node: fx.Node, index: int) -> tuple[Callable, tuple]:
    """The op, and its arguments, that makes one of the results."""
    x, pieces = node.args[0], node.meta["val"]
    if node.target is aten.broadcast_tensors.default:
        return aten.expand.default, (x[index], list(pieces[index].shape))
    if node.target in (aten.hsplit.int, aten.vsplit.int):
        dim = 1 if node.target is aten.hsplit.int and len(shape_of(x)) > 1 else 0
    else:
        dim = arguments(node)["dim"] % len(shape_of(x))
    if node.target is aten.unbind.int:
        return aten.select.int, (x, dim, index)
    start = sum(p.shape[dim] for p in pieces[:index])
    return aten.slice.Tensor, (x, dim, start, start + pieces[index].shape[dim])
