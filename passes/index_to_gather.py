"""An index that goes along with another one becomes a gather."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.passes.edit import new_op, replace
from autoshard.program import Program, shape_of

aten = torch.ops.aten
ARANGES = {aten.arange.default, aten.arange.start, aten.arange.start_step}


def index_to_gather(program: Program) -> Program:
    """``x[torch.arange(n), i]`` takes one row of each sample: no sample reads another's, but only a gather says so.

    before:  a = aten.arange(8); y = aten.index(x, [a, i])                         # x [8, 12, 32], i [8]
    after:   j = aten.where(aten.lt(i, 0), aten.add(i, 12), i)
             k = aten.expand(aten.reshape(j, [8, 1, 1]), [8, 1, 32])
             y = aten.reshape(aten.gather(x, 1, k), [8, 32])
    """
    for node in program.ops:
        if node.target is not aten.index.Tensor:
            continue
        x, indices = node.args
        at = [d for d, i in enumerate(indices) if i is not None]
        if len(at) != 2 or at[1] != at[0] + 1:
            continue
        rows, picked = (indices[d] for d in at)
        size, shape = shape_of(x)[at[0]], shape_of(picked)
        if picked.meta["val"].dtype in (torch.bool, torch.uint8) or shape[:1] != (size,):
            continue
        if is_count(rows, size) and shape_of(rows) == (size, *(1 for _ in shape[1:])):
            with program.graph.inserting_before(node):
                replace(node, gathered(program.graph, node, x, picked, at[0]))
    return program


def is_count(node: fx.Node, size: int) -> bool:
    """Whether a value is 0, 1, ... size - 1, whatever its shape."""
    while node.target in (aten.unsqueeze.default, aten.reshape.default, aten.to.dtype):
        node = node.args[0]
    if node.target not in ARANGES:
        return False
    start, end, step = (0, *node.args, 1) if len(node.args) == 1 else (*node.args, 1)[:3]
    return (start, end, step) == (0, size, 1)


def gathered(graph: fx.Graph, node: fx.Node, x: fx.Node, picked: fx.Node, dim: int) -> fx.Node:
    """The rows ``picked`` of dim + 1 for each entry of dim."""
    whole = shape_of(x)
    count = torch.Size(shape_of(picked)[1:]).numel()

    def op(target, *args):
        return new_op(graph, target, args, like=node)

    size = whole[dim + 1]
    index = op(aten.where.self, op(aten.lt.Scalar, picked, 0), op(aten.add.Tensor, picked, size), picked)
    index = op(aten.to.dtype, index, torch.int64) if index.meta["val"].dtype is not torch.int64 else index
    wide = [*whole[: dim + 1], count, *whole[dim + 2 :]]
    index = op(aten.reshape.default, index, [1] * dim + [whole[dim], count] + [1] * (len(whole) - dim - 2))
    if shape_of(index) != tuple(wide):
        index = op(aten.expand.default, index, wide)
    found = op(aten.gather.default, x, dim + 1, index)
    return found if shape_of(found) == shape_of(node) else op(aten.reshape.default, found, list(shape_of(node)))
