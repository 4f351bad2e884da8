"""Collectives along one axis and one dim, with uneven pieces and blocked shards.

A dim cut in ``blocks`` blocks over k ranks is viewed as (blocks, rest), and rest is cut in pieces of ``torch.chunk`` sizes. Where the
library wants equal pieces they are padded on the way; padding never leaves these functions. Any dtype will do, also for non-contiguous
tensors and empty pieces. The argument is left alone, and is itself the result on an axis of size 1; other results are contiguous
(gloo's in-place all-reduce of a tensor with gaps in its memory is silently wrong).

Called eagerly these use ``torch.distributed``, which costs 20 to 40 microseconds a call less than the functional collectives; inside
``torch.compile`` they use the functional ones, which it can trace. Those are private to torch; no other file uses them; they were checked
with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # noqa: F401  (registers what torch.compile knows of the ops below)
import torch.nn.functional as F

from autoshard.placement import pieces
from autoshard.runtime.axis import Axis

_ops = torch.ops._c10d_functional
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the new name, or the old one
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def widths_of(size: int, k: int) -> tuple[int, ...]:
    """``placement.pieces``, without its cache where torch.compile would warn of it at every use."""
    return (pieces.__wrapped__ if torch.compiler.is_compiling() else pieces)(size, k)


def all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    """The sum (or ``"max"``) of ``x`` over the ranks of ``axis``; x has the same shape on all of them."""
    if axis.size == 1 or x.numel() == 0:
        return x
    if torch.compiler.is_compiling():
        return _ops.wait_tensor(_ops.all_reduce(x, op, axis.group.group_name))
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, _REDUCE[op], axis.group)
    return out


def all_gather(x: torch.Tensor, axis: Axis, dim: int, size: int, blocks: int = 1) -> torch.Tensor:
    """The whole of a value of which every rank holds its piece ``x`` of ``dim``; ``size`` is the whole size of that dim."""
    if axis.size == 1:
        return x
    widths = widths_of(size // blocks, axis.size)
    whole = _resized(x.shape, dim, size)
    if 0 in whole:
        return x.new_empty(whole)
    x = _pad(x, dim, blocks, widths[0]).contiguous()
    if torch.compiler.is_compiling():
        gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(x, axis.size, axis.group.group_name))
    else:
        gathered = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
        _all_gather_single(gathered, x, axis.group)
    if dim == 0 and blocks == 1:
        return gathered.narrow(0, 0, size)  # only the last pieces can be short, so all padding is at the end
    parts = [_narrow(part, dim, blocks, 0, width) for part, width in zip(gathered.chunk(axis.size), widths)]
    return _join(parts, dim, blocks, size)


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int, blocks: int = 1) -> torch.Tensor:
    """This rank's piece of ``dim`` of the sum of ``x`` over the ranks of ``axis``; x has the whole shape on each of them."""
    if axis.size == 1:
        return x
    if x.numel() == 0:
        return cut(x, axis, dim, blocks)
    widths = widths_of(x.shape[dim] // blocks, axis.size)
    x = _pad(x, dim, blocks, widths[0] * axis.size)
    if dim > 0 or blocks > 1:
        x = torch.cat([_narrow(x, dim, blocks, rank * widths[0], widths[0]) for rank in range(axis.size)])
    x = x.contiguous()
    if torch.compiler.is_compiling():
        mine = _ops.wait_tensor(_ops.reduce_scatter_tensor(x, "sum", axis.size, axis.group.group_name))
    else:
        mine = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
        _reduce_scatter_single(mine, x, group=axis.group)
    return _narrow(mine, dim, blocks, 0, widths[axis.index]).contiguous()


def all_gather_into(out: torch.Tensor, x: torch.Tensor, axis: Axis) -> None:
    """Fill ``out`` ``[k, ...]`` with the ``x`` ``[1, ...]`` of every rank of ``axis``, all of one shape. Not traced by torch.compile."""
    _all_gather_single(out, x, axis.group)


def start_reduce_scatter(out: torch.Tensor, x: torch.Tensor, axis: Axis) -> dist.Work:
    """Start to fill ``out`` ``[1, ...]`` with this rank's row of the sum of ``x`` ``[k, ...]`` over ``axis``. Both must be left alone until
    the work that is returned is done."""
    return _reduce_scatter_single(out, x, group=axis.group, async_op=True)


Cut = tuple[int, int, int]
"""How a value is cut along an axis: (dim, blocks, whole size of that dim)."""


def all_gather_together(xs: Sequence[torch.Tensor], cuts: Sequence[Cut], axis: Axis) -> list[torch.Tensor]:
    """``all_gather`` of several pieces of one dtype, in one collective. Not traced by torch.compile."""
    shapes = [_resized(x.shape, dim, blocks * widths_of(size // blocks, axis.size)[0]) for x, (dim, blocks, size) in zip(xs, cuts)]
    room = [shape.numel() for shape in shapes]
    padded = [_pad(x, dim, blocks, shape[dim] // blocks).reshape(-1) for x, (dim, blocks, _), shape in zip(xs, cuts, shapes)]
    mine = torch.cat(padded).unsqueeze(0)
    everyone = mine.new_empty((axis.size, mine.shape[1]))
    if mine.shape[1]:
        all_gather_into(everyone, mine, axis)
    out = []
    for rows, shape, (dim, blocks, size) in zip(everyone.split(room, 1), shapes, cuts):
        widths = widths_of(size // blocks, axis.size)
        out.append(_join([_narrow(row.view(shape), dim, blocks, 0, width) for row, width in zip(rows, widths)], dim, blocks, size))
    return out


def reduce_scatter_together(xs: Sequence[torch.Tensor], cuts: Sequence[Cut], axis: Axis) -> list[torch.Tensor]:
    """``reduce_scatter`` of several tensors of one dtype, in one collective. Not traced by torch.compile."""
    widths = [widths_of(size // blocks, axis.size) for _, blocks, size in cuts]
    padded = [_pad(x, dim, blocks, w[0] * axis.size) for x, (dim, blocks, _), w in zip(xs, cuts, widths)]
    rows = [
        [_narrow(x, dim, blocks, rank * w[0], w[0]) for x, (dim, blocks, _), w in zip(padded, cuts, widths)] for rank in range(axis.size)
    ]
    room = [part.numel() for part in rows[0]]
    sent = xs[0].new_empty((axis.size, sum(room)))
    places = [place.view(part.shape) for row, line in zip(rows, sent) for part, place in zip(row, line.split(room))]
    torch._foreach_copy_(places, [part for row in rows for part in row])
    mine = sent.new_empty((1, sent.shape[1]))
    if sent.shape[1]:
        start_reduce_scatter(mine, sent, axis).wait()
    parts = mine[0].split(room)
    return [
        _narrow(flat.view(part.shape), dim, blocks, 0, w[axis.index]).clone(memory_format=torch.contiguous_format)
        for flat, part, (dim, blocks, _), w in zip(parts, rows[0], cuts, widths)
    ]


def all_to_all(x: torch.Tensor, axis: Axis, src: tuple[int, int], dst: tuple[int, int], size: int) -> torch.Tensor:
    """Turns a shard of one dim into a shard of another: ``src`` and ``dst`` are (dim, blocks), and their dims differ.

    ``size`` is the whole size of src's dim.
    """
    if axis.size == 1:
        return x
    dim, blocks = src
    sends = [cut(x, axis, *dst, index=rank) for rank in range(axis.size)]
    mine = sends[axis.index].shape
    shapes = [_resized(mine, dim, blocks * width) for width in widths_of(size // blocks, axis.size)]
    sent, received = [part.numel() for part in sends], [shape.numel() for shape in shapes]
    flat = torch.cat([part.reshape(-1) for part in sends])
    if torch.compiler.is_compiling():
        out = _ops.wait_tensor(_ops.all_to_all_single(flat, received, sent, axis.group.group_name))
    else:
        out = flat.new_empty(sum(received))
        dist.all_to_all_single(out, flat, received, sent, axis.group)
    return _join([part.view(shape) for part, shape in zip(out.split(received), shapes)], dim, blocks, size)


def cut(x: torch.Tensor, axis: Axis, dim: int, blocks: int = 1, index: int | None = None) -> torch.Tensor:
    """This rank's piece (or that of rank ``index``) of ``dim`` of a value that is whole here: a view if blocks is 1. Sends nothing."""
    widths = widths_of(x.shape[dim] // blocks, axis.size)
    index = axis.index if index is None else index
    return _narrow(x, dim, blocks, sum(widths[:index]), widths[index])


def uncut(x: torch.Tensor, axis: Axis, dim: int, size: int, blocks: int = 1) -> torch.Tensor:
    """The whole shape with this rank's piece ``x`` in its place and zeros elsewhere. Sends nothing."""
    widths = widths_of(size // blocks, axis.size)
    whole = x.new_zeros(_resized(x.shape, dim, size))
    start, width = sum(widths[: axis.index]), widths[axis.index]
    if blocks == 1:
        whole.narrow(dim, start, width).copy_(x)
    else:
        place = whole.unflatten(dim, (blocks, size // blocks)).narrow(dim + 1, start, width)
        place.copy_(x.unflatten(dim, (blocks, width)))
    return whole


def _resized(shape: Sequence[int], dim: int, size: int) -> torch.Size:
    return torch.Size((*shape[:dim], size, *shape[dim + 1 :]))


def _narrow(x: torch.Tensor, dim: int, blocks: int, start: int, width: int) -> torch.Tensor:
    """``start : start + width`` of each block of ``dim``."""
    rest = x.shape[dim] // blocks
    if width == rest:
        return x
    if blocks == 1:
        return x.narrow(dim, start, width)
    return x.unflatten(dim, (blocks, rest)).narrow(dim + 1, start, width).flatten(dim, dim + 1)


def _pad(x: torch.Tensor, dim: int, blocks: int, width: int) -> torch.Tensor:
    """Each block of ``dim`` filled up with zeros to ``width``."""
    rest = x.shape[dim] // blocks
    if rest == width:
        return x
    after = 2 * (x.dim() - 1 - dim)
    if blocks == 1:
        return F.pad(x, [0] * after + [0, width - rest])
    return F.pad(x.unflatten(dim, (blocks, rest)), [0] * after + [0, width - rest]).flatten(dim, dim + 1)


def _join(parts: Sequence[torch.Tensor], dim: int, blocks: int, size: int) -> torch.Tensor:
    """The value of ``size`` in ``dim`` whose pieces are ``parts``."""
    if blocks == 1:
        return torch.cat(parts, dim)
    widths = widths_of(size // blocks, len(parts))
    return torch.cat([p.unflatten(dim, (blocks, w)) for p, w in zip(parts, widths)], dim + 1).flatten(dim, dim + 1)
