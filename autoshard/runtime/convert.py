"""Conversions between the states that a value may have along one axis: every cell of ``placement.CONVERSIONS``.

The table is its own transpose: the gradient of a value in state S, R, P or R* is itself a value in state S, R, R* or P. So the
backward of ``src -> dst`` is the conversion of the gradient from dst's dual to src's dual, and one autograd function, with one small
primitive for each kind of step, is the whole table (to any order of derivative).
"""

from __future__ import annotations

from functools import cache

import torch

from autoshard.errors import PlacementError
from autoshard.placement import CONVERSIONS, R_STAR, P, Placement, R, parse_placement
from autoshard.runtime import collectives
from autoshard.runtime.axis import Axis
from autoshard.runtime.recompute import whole_op

_DUAL = {R: R, P: R_STAR, R_STAR: P}


def convert(x: torch.Tensor, text: str, axis: Axis, size: int | None = None) -> torch.Tensor:
    """Brings ``x`` from one state along ``axis`` to another; differentiable.

    Args:
        x: this rank's part of the value, in the source state.
        text: ``"S(1/2) -> R*"``: source and destination. Dims are those of x, blocks those that this rank sees.
        axis: the axis; along one of size 1 every conversion is the identity.
        size: for a source S(d), the size that dim d has when it is whole along this axis.

    Raises:
        PlacementError: the text can't be read, or x is not a piece of a dim of that size.
    """
    if axis.size == 1:
        return x
    src, dst = _states(text)
    if src == dst:  # two names of one layout: with the other axes' cuts, S(0/4) and S(0/2) can be the same pieces
        return x
    if src.is_shard:
        _check_piece(x, src, axis, size, text)
        whole = (*x.shape[: src.dim], size, *x.shape[src.dim + 1 :])
    else:
        whole = tuple(x.shape)
    return _Convert.apply(x, src, dst, axis, whole)


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, src, dst, axis, whole):
        ctx.cell = src, dst, axis, whole
        return whole_op(lambda: _run(x, src, dst, axis, whole))

    @staticmethod
    def backward(ctx, grad):
        src, dst, axis, whole = ctx.cell
        step = _Convert.apply if torch.is_grad_enabled() else _run
        return step(grad, _DUAL.get(dst, dst), _DUAL.get(src, src), axis, whole), None, None, None, None


def _run(x, src: Placement, dst: Placement, axis: Axis, whole: tuple[int, ...]) -> torch.Tensor:
    return _PRIMITIVES[CONVERSIONS[src.kind, dst.kind].forward](x, src, dst, axis, whole)


def _none(x, src, dst, axis, whole):
    return x.view_as(x)


def _divide(x, src, dst, axis, whole):
    if x.is_floating_point() or x.is_complex():
        return x / axis.size
    return x.clone() if axis.index == 0 else torch.zeros_like(x)  # integers: the first rank holds it all


def _slice(x, src, dst, axis, whole):
    # a copy: a view would keep the whole value in memory for as long as the piece is used
    shard = dst if dst.is_shard else src
    return collectives.cut(x, axis, shard.dim, shard.blocks).clone(memory_format=torch.contiguous_format)


def _pad(x, src, dst, axis, whole):
    return collectives.uncut(x, axis, src.dim, whole[src.dim], src.blocks)


def _all_reduce(x, src, dst, axis, whole):
    return collectives.all_reduce(x, axis)


def _all_gather(x, src, dst, axis, whole):
    return collectives.all_gather(x, axis, src.dim, whole[src.dim], src.blocks)


def _reduce_scatter(x, src, dst, axis, whole):
    return collectives.reduce_scatter(x, axis, dst.dim, dst.blocks)


def _all_to_all(x, src, dst, axis, whole):
    if src.dim == dst.dim:  # other blocks of one dim
        return _slice(_all_gather(x, src, dst, axis, whole), src, dst, axis, whole)
    return collectives.all_to_all(x, axis, (src.dim, src.blocks), (dst.dim, dst.blocks), whole[src.dim])


_PRIMITIVES = {
    "none": _none,
    "divide": _divide,
    "slice": _slice,
    "pad": _pad,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _states(text: str) -> tuple[Placement, Placement]:
    if torch.compiler.is_compiling():
        return tuple(Placement(*fields) for fields in _fields(text))
    return _parse(text)


@torch.compiler.assume_constant_result  # so torch.compile traces no parser, nor warns of its cache; it wants plain constants
def _fields(text: str) -> tuple[tuple[str, int, int], ...]:
    return tuple((state.kind, state.dim, state.blocks) for state in _parse(text))


@cache
def _parse(text: str) -> tuple[Placement, Placement]:
    ends = text.split("->")
    if len(ends) != 2:
        raise PlacementError(f"can't read the conversion {text!r}", hint='write "source -> destination", for example "S(1) -> R*"')
    src, dst = map(parse_placement, ends)
    return src, dst


def _check_piece(x: torch.Tensor, src: Placement, axis: Axis, size: int | None, text: str):
    if size is None:
        raise PlacementError(f"the conversion {text!r} needs the whole size of dim {src.dim}")
    if size % src.blocks or x.shape[src.dim] != src.blocks * collectives.widths_of(size // src.blocks, axis.size)[axis.index]:
        raise PlacementError(
            f"conversion {text!r} along {axis.name!r}: a tensor of shape {tuple(x.shape)} is not piece {axis.index} of {axis.size} "
            f"of a dim {src.dim} of size {size}"
        )
