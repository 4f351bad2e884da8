"""Multi-result views become one slice or select a result."""

from __future__ import annotations

import torch

from autoshard.passes.edit import arguments, new_op, replace
from autoshard.program import Program

aten = torch.ops.aten

SPLITS = {
    aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default, aten.unsafe_split.Tensor, aten.unsafe_chunk.default,
    aten.tensor_split.sections, aten.tensor_split.indices, aten.hsplit.int, aten.vsplit.int,
}  # fmt: skip


def split_to_slices(program: Program) -> Program:
    """Replace split, chunk and unbind by slices and selects, made where they are read.

    before:  s = aten.split.Tensor(x, 32, 2); q = getitem(s, 0); k = getitem(s, 1)      # x: [8, 16, 64]
    after:   q = aten.slice.Tensor(x, 2, 0, 32); k = aten.slice.Tensor(x, 2, 32, 64)
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in SPLITS and node.target is not aten.unbind.int:
            continue
        x, pieces = node.args[0], node.meta["val"]
        if node.target in (aten.hsplit.int, aten.vsplit.int):
            dim = 1 if node.target is aten.hsplit.int and x.meta["val"].dim() > 1 else 0
        else:
            dim = arguments(node)["dim"] % x.meta["val"].dim()
        for user in list(node.users):
            index = user.args[1] % len(pieces)
            with graph.inserting_before(user):
                if node.target is aten.unbind.int:
                    piece = new_op(graph, aten.select.int, (x, dim, index), like=node)
                else:
                    start = sum(p.shape[dim] for p in pieces[:index])
                    piece = new_op(graph, aten.slice.Tensor, (x, dim, start, start + pieces[index].shape[dim]), like=node)
            replace(user, piece)
        graph.erase_node(node)
    return program
