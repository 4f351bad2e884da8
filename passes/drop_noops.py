"""Drop ops that give back what they are given."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.passes.edit import arguments, replace
from autoshard.program import Program, is_getitem

aten = torch.ops.aten

ASSERTS = {aten._assert_tensor_metadata.default, aten._assert_async.msg, aten._assert_async.default, aten._assert_scalar.default}
COPIES = {
    aten.clone.default, aten.contiguous.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default,
    aten.lift.default, aten.positive.default,
}  # fmt: skip
SAME_SHAPE = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default, aten.expand_as.default,
    aten.flatten.using_ints, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.broadcast_to.default,
    aten.view_as.default, aten.repeat.default,
}  # fmt: skip
"""Ops that, when the shape stays, do nothing. (A slice of a negative step does not exist.)"""
CASTS = {aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default, aten.type_as.default}
DROPOUTS = {aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default}
NEUTRAL = {aten.add.Tensor: 0, aten.sub.Tensor: 0, aten.mul.Tensor: 1, aten.div.Tensor: 1, aten.pow.Tensor_Scalar: 1}


def drop_noops(program: Program) -> Program:
    """Drop asserts, copies, casts to the same dtype, dropout that is off, views to the same shape, adding 0 and multiplying by 1.

    A program is functional and for no device in particular, so copies and moves between devices mean nothing. Casts that remain
    become ``aten.to.dtype``.

    before:  _assert_tensor_metadata(x, dtype=float32)
             to = aten.to.dtype_layout(x, dtype=float32, device=cpu); y = aten.dropout(to, 0.0, True); z = aten.contiguous(y); return [z]
    after:   return [x]
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in ASSERTS:
            graph.erase_node(node)
        elif is_noop(node):
            replace(node, node.args[0])
        elif node.target in CASTS:
            node.target, node.args, node.kwargs = aten.to.dtype, (node.args[0], node.meta["val"].dtype), {}
    return program


def is_noop(node: fx.Node) -> bool:
    if node.target in COPIES:
        return True
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if source is None or is_getitem(node):
        return False
    if node.target is aten.detach.default:
        return not source.meta["grad"]
    if node.target in DROPOUTS:
        values = arguments(node)
        return not values["train"] or values["p"] == 0
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or before.dtype != after.dtype:
        return False
    if node.target in CASTS:
        return True
    if before.shape != after.shape:
        return False
    if node.target in NEUTRAL:
        other, neutral = node.args[1], NEUTRAL[node.target]
        return isinstance(other, (int, float)) and not isinstance(other, bool) and other == neutral and "rounding_mode" not in node.kwargs
    if node.target in (aten.transpose.int, aten.permute.default):
        return stays_in_order(node, before.dim())
    return node.target in SAME_SHAPE


def stays_in_order(node: fx.Node, rank: int) -> bool:
    if node.target is aten.transpose.int:
        return node.args[1] % max(rank, 1) == node.args[2] % max(rank, 1)
    return [d % rank for d in node.args[1]] == list(range(rank))
