"""One form for sizes, dims, indices, factories and argument lists."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.passes.edit import arguments, schema, written
from autoshard.program import Program, shape_of

aten = torch.ops.aten

RESHAPES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int, aten.view_as.default,
    aten.reshape_as.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.ravel.default,
}  # fmt: skip
EXPANDS = {aten.expand.default, aten.expand_as.default, aten.broadcast_to.default}
PERMUTES = {
    aten.movedim.int, aten.movedim.intlist, aten.moveaxis.int, aten.moveaxis.intlist, aten.numpy_T.default, aten.mT.default,
    aten.adjoint.default,
}  # fmt: skip
SWAPS = {aten.swapaxes.default, aten.swapdims.default}
FILLS = {
    aten.ones.default: 1, aten.zeros.default: 0, aten.new_ones.default: 1, aten.new_zeros.default: 0, aten.ones_like.default: 1,
    aten.zeros_like.default: 0, aten.full.default: None, aten.new_full.default: None, aten.full_like.default: None,
    aten.scalar_tensor.default: None,
}  # fmt: skip
NAMES = {
    aten.__and__.Tensor: aten.bitwise_and.Tensor, aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.__xor__.Tensor: aten.bitwise_xor.Tensor, aten.__and__.Scalar: aten.bitwise_and.Scalar,
    aten.__or__.Scalar: aten.bitwise_or.Scalar, aten.__xor__.Scalar: aten.bitwise_xor.Scalar, aten.multiply.Tensor: aten.mul.Tensor,
    aten.subtract.Tensor: aten.sub.Tensor, aten.divide.Tensor: aten.div.Tensor, aten.true_divide.Tensor: aten.div.Tensor,
    aten.absolute.default: aten.abs.default, aten.negative.default: aten.neg.default, aten.concat.default: aten.cat.default,
    aten.concatenate.default: aten.cat.default, aten.clip.default: aten.clamp.default, aten.not_equal.Scalar: aten.ne.Scalar,
    aten.not_equal.Tensor: aten.ne.Tensor, aten.less.Tensor: aten.lt.Tensor, aten.less.Scalar: aten.lt.Scalar,
    aten.greater.Tensor: aten.gt.Tensor, aten.greater.Scalar: aten.gt.Scalar, aten.less_equal.Tensor: aten.le.Tensor,
    aten.less_equal.Scalar: aten.le.Scalar, aten.greater_equal.Tensor: aten.ge.Tensor, aten.greater_equal.Scalar: aten.ge.Scalar,
}  # fmt: skip
"""Two names of one op, by name."""
PLACE = ("device", "pin_memory", "layout", "memory_format")
"""Arguments about where a tensor lies in memory; the code that runs a program decides that."""
FULL = {aten.scaled_dot_product_attention.default, aten.cross_entropy_loss.default}
"""Ops written with every argument, so that their rules read them by position."""


def literal_sizes(program: Program) -> Program:
    """Write every size and index as the traced number, every dim from the front, and each op in one form.

    views -> ``aten.reshape`` (or ``expand``, ``permute``, ``transpose``, ``slice``); factories of one value -> ``aten.full``;
    aliases such as ``__and__`` -> the op that they name; no argument that says where a tensor lies; positional arguments first,
    trailing defaults left off.

    before:  v = aten.view(x, [-1, 32]); s = aten.slice(v, -1, 4, 9223372036854775807); o = aten.new_ones(s, [2], dtype=bool, device=cpu)
    after:   v = aten.reshape(x, [128, 32]); s = aten.slice(v, 1, 4, 32); o = aten.full([2], 1, dtype=bool)
    """
    for node in program.ops:
        if node.target in NAMES:
            node.target = NAMES[node.target]
        if node.target in RESHAPES:
            node.target, node.args, node.kwargs = aten.reshape.default, (node.args[0], list(shape_of(node))), {}
        elif node.target in EXPANDS:
            node.target, node.args, node.kwargs = aten.expand.default, (node.args[0], list(shape_of(node))), {}
        elif node.target in PERMUTES:
            node.target, node.args, node.kwargs = aten.permute.default, (node.args[0], permutation(node)), {}
        elif node.target in SWAPS:
            node.target = aten.transpose.int
        elif node.target is aten.narrow.default:
            x, dim, start, length = node.args
            start %= shape_of(x)[dim]
            node.target, node.args = aten.slice.Tensor, (x, dim, start, start + length)
        elif node.target in FILLS:
            fill(node)
        normalize(node)
    return program


def permutation(node: fx.Node) -> list[int]:
    """The permutation that an op makes, by looking at the dims of a tensor whose sizes tell them apart."""
    rank = len(shape_of(node.args[0]))
    probe = torch.empty(tuple(range(2, rank + 2)), device="meta")
    return [size - 2 for size in node.target(probe, *node.args[1:], **node.kwargs).shape]


def fill(node: fx.Node) -> None:
    values = arguments(node)
    value = FILLS[node.target]
    if value is None:
        value = values["s"] if "s" in values else values["fill_value"]
    node.target, node.args, node.kwargs = aten.full.default, (list(shape_of(node)), value), {"dtype": node.meta["val"].dtype}


def normalize(node: fx.Node) -> None:
    if not schema(node):
        return
    values = arguments(node)
    for name in PLACE:
        if name in values:
            values[name] = next(a.default_value for a in schema(node) if a.name == name)
    if node.target in (aten.slice.Tensor, aten.select.int, aten.slice_scatter.default, aten.select_scatter.default):
        literal_index(node, values)
    for name in ("dim", "dims", "dim0", "dim1", "axis"):
        if name in values and node.target is not aten.tile.default:  # its "dims" are how often each dim is repeated
            values[name] = from_front(values[name], dims_of(node))
    args, kwargs = written(node, values, full=node.target in FULL)
    if args != node.args:
        node.args = args
    if kwargs != node.kwargs:
        node.kwargs = kwargs


def dims_of(node: fx.Node) -> int:
    """How many dims the dims of an op count: those of its operand, or of its result where it adds one."""
    if node.target in (aten.unsqueeze.default, aten.stack.default):
        return len(shape_of(node))
    first = node.args[0][0] if isinstance(node.args[0], (list, tuple)) else node.args[0]
    return max(len(shape_of(first)), 1) if isinstance(first, fx.Node) else 1


def from_front(dim, rank: int):
    if isinstance(dim, bool) or dim is None:
        return dim
    if isinstance(dim, int):
        return dim % rank
    return [d % rank for d in dim] if isinstance(dim, (list, tuple)) and all(isinstance(d, int) for d in dim) else dim


def literal_index(node: fx.Node, values: dict) -> None:
    shape = shape_of(node.args[0])
    size = shape[values["dim"]]
    if "index" in values:
        values["index"] %= size
        return
    start, end = (size if v is None and n == "end" else v or 0 for n, v in (("start", values["start"]), ("end", values["end"])))
    start, end = (min(max(v + size if v < 0 else v, 0), size) for v in (start, end))
    values["start"], values["end"] = start, max(start, end)
