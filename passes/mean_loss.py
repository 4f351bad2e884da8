"""Mean losses become a sum divided by a count."""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from autoshard.passes.edit import arguments, new_op, replace, written
from autoshard.program import Program, shape_of

aten = torch.ops.aten

MEAN, SUM = 1, 2
"""torch's numbers for reduction="mean" and "sum"."""
BY_CLASS = {aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default}
BY_ELEMENT = {
    aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default, aten.kl_div.default, aten.soft_margin_loss.default,
}  # fmt: skip


def mean_loss_to_sum(program: Program) -> Program:
    """Sums can be added over ranks and micro-batches; means can't, when each has its own number of valid labels.

    before:  loss = aten.cross_entropy_loss(logits, labels)                                   # mean, ignore_index -100
    after:   loss_sum = aten.cross_entropy_loss(logits, labels, None, 2, -100, 0.0)
             ne = aten.ne.Scalar(labels, -100); sum = aten.sum(ne); to = aten.to.dtype(sum, float32)
             loss = aten.div.Tensor(loss_sum, to)

    With class weights the count is the sum of the weights that the labels pick. Losses of half precision are summed in float32, since
    a sum is far larger than a mean. Losses by element (mse_loss and the like) are divided by their number of elements.
    """
    for node in program.ops:
        if (node.target in BY_CLASS or node.target in BY_ELEMENT) and arguments(node)["reduction"] == MEAN:
            rewrite(program.graph, node)
    return program


def rewrite(graph: fx.Graph, node: fx.Node) -> None:
    values = arguments(node)
    dtype = node.meta["val"].dtype
    half = dtype in (torch.float16, torch.bfloat16)
    with graph.inserting_before(node):
        first = next(iter(values))
        if half:
            values[first] = new_op(graph, aten.to.dtype, (values[first], torch.float32), like=node)
            if isinstance(values.get("weight"), fx.Node):
                values["weight"] = new_op(graph, aten.to.dtype, (values["weight"], torch.float32), like=node)
        values["reduction"] = SUM
        total = new_op(graph, node.target, *written(node, values, full=True), like=node)
        mean = new_op(graph, aten.div.Tensor, (total, count(graph, node, values)), like=node)
        if half:
            mean = new_op(graph, aten.to.dtype, (mean, dtype), like=node)
    replace(node, mean)


def count(graph: fx.Graph, node: fx.Node, values: dict) -> fx.Node | int:
    """What the sum is divided by: a node, or a number where the shapes decide it."""
    logits, target = (values[name] for name in list(values)[:2])
    if node.target in BY_ELEMENT:
        return prod(torch.broadcast_shapes(shape_of(logits), shape_of(target)))
    labels, dtype = target, logits.meta["val"].dtype
    if labels.meta["val"].is_floating_point():  # probabilities of the classes: every sample counts
        shape = shape_of(labels)
        return prod(shape) // shape[1 if len(shape) > 1 else 0]
    valid = new_op(graph, aten.ne.Scalar, (labels, values["ignore_index"]), like=node)
    if values["weight"] is None:
        number = new_op(graph, aten.sum.default, (valid,), like=node)
        return new_op(graph, aten.to.dtype, (number, dtype), like=node)
    safe = new_op(graph, aten.where.ScalarOther, (valid, labels, 0), like=node)
    picked = new_op(graph, aten.index.Tensor, (values["weight"], [safe]), like=node)
    kept = new_op(graph, aten.mul.Tensor, (picked, valid), like=node)
    return new_op(graph, aten.sum.default, (kept,), like=node)
