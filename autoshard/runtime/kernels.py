"""Embedding and cross-entropy whose vocabulary is sharded: a local op on this rank's piece, and small reductions.

The pieces of the vocabulary have ``torch.chunk`` sizes and may be uneven or empty. The logits, the largest activation of a language
model, are never gathered: only three numbers a position go round.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from autoshard.errors import IdError
from autoshard.runtime.axis import Axis
from autoshard.runtime.collectives import all_reduce, widths_of


def check_ids(ids: torch.Tensor, low: int, high: int, what: str, ignored: int | None = None) -> None:
    """Raise IdError unless all ids are from low to high, or ``ignored``. On a GPU a device-side assertion instead.

    Args:
        ids: of the whole batch, so that all ranks that have it raise the same.
        what: looks them up, for the error.
    """
    good = (ids >= low) & (ids <= high)
    if ignored is not None:
        good |= ids == ignored
    if good.is_cuda:
        torch._assert_async(good.all(), f"index out of range in {what}")
    elif not good.all():
        bad = ids[~good][0].item()
        allowed = f"{low} to {high}" + (f", or {ignored} to be ignored" if ignored is not None and not low <= ignored <= high else "")
        raise IdError(f"{bad} is out of range for {what}: its index must be {allowed}", hint="look for it in the batch")


def vocab_embedding(
    weight: torch.Tensor, ids: torch.Tensor, axis: Axis, size: int, padding_idx: int | None = None, scale_grad_by_freq: bool = False
) -> torch.Tensor:
    """``F.embedding`` of a table whose rows are sharded over ``axis``.

    Args:
        weight: this rank's rows, ``[piece of size, e]``.
        ids: integers in [0, size), any shape, the same on every rank of the axis.
        size: rows of the whole table.
        padding_idx: the row that gets no gradient (negative: from the end).

    Returns:
        This rank's summand ``[*ids.shape, e]`` (state P); nothing is sent.

    Raises:
        IndexError: an id is out of range, with eager's own message, on every rank of the axis.
    """
    _check((ids >= 0) & (ids < size), lambda: "index out of range in self")
    if padding_idx is not None and padding_idx < 0:
        padding_idx += size
    return _VocabEmbedding.apply(weight, ids, _start(axis, size), padding_idx, scale_grad_by_freq)


class _VocabEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids, start, padding_idx, scale_grad_by_freq):
        rows = weight.shape[0]
        ctx.save_for_backward(ids)
        ctx.rows, ctx.start, ctx.padding_idx, ctx.scale_grad_by_freq = rows, start, padding_idx, scale_grad_by_freq
        if rows == 0:
            return weight.new_zeros((*ids.shape, weight.shape[1]))
        elsewhere = (ids < start) | (ids >= start + rows)
        out = F.embedding((ids - start).masked_fill(elsewhere, 0), weight)
        return out.masked_fill_(elsewhere.unsqueeze(-1), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        skip = (ids < ctx.start) | (ids >= ctx.start + ctx.rows)
        if ctx.padding_idx is not None:
            skip |= ids == ctx.padding_idx
        local = (ids - ctx.start).masked_fill(skip, ctx.rows)  # one row more, that takes no gradient, stands for all the others
        rows = torch.ops.aten.embedding_dense_backward(grad, local, ctx.rows + 1, ctx.rows, ctx.scale_grad_by_freq)
        return rows[: ctx.rows], None, None, None, None


def vocab_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    axis: Axis,
    size: int,
    weight: torch.Tensor | None = None,
    reduction: str = "sum",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``F.cross_entropy`` of logits whose classes are sharded over ``axis``; the result is whole on each rank (state R).

    Args:
        logits: this rank's classes, ``[N, piece of size]`` or ``[N, piece, d...]`` (or ``[piece]``, for one label).
        labels: class numbers, ``[N]`` or ``[N, d...]``, the same on every rank of the axis.
        size: number of classes.
        weight: class weights ``[size]``, whole on each rank; takes no gradient.
        reduction: ``"sum"`` or ``"none"``.

    Raises:
        IndexError: a label is out of range, with eager's own message, on every rank of the axis.
        ValueError: another reduction.
    """
    if reduction not in ("sum", "none"):
        raise ValueError(f"reduction={reduction!r}: a sharded cross-entropy is summed ('sum') or left alone ('none')")
    ignored = labels == ignore_index
    good = ignored | ((labels >= 0) & (labels < size))
    _check(good, lambda: f"Target {labels[~good][0].item()} is out of bounds.")
    losses = _VocabCrossEntropy.apply(logits, labels, ignored, axis, size, weight, label_smoothing)
    return (losses.sum() if reduction == "sum" else losses).to(logits.dtype)


class _VocabCrossEntropy(torch.autograd.Function):
    """Losses per position, in fp32 or wider. With p = softmax(x), W the sum of the weights w, s the smoothing and y the label,

    loss = a * (lse - x[y]) + b * (W * lse - sum(w * x))   where a = (1 - s) * w[y], b = s / size
    d loss / d x[c] = (a + b * W) * p[c] - a * (c == y) - b * w[c]
    """

    @staticmethod
    def forward(ctx, logits, labels, ignored, axis, size, weight, smoothing):
        dim = 1 if logits.dim() > 1 else 0
        start, classes = _start(axis, size), logits.shape[dim]
        top = logits.amax(dim) if classes else logits.new_full(labels.shape, -torch.inf)
        top = all_reduce(top, axis, "max").to(torch.promote_types(logits.dtype, torch.float32))  # eager sums half precision in fp32 too
        x = logits - top.unsqueeze(dim)

        elsewhere = ignored | (labels < start) | (labels >= start + classes)
        local = (labels - start).masked_fill(elsewhere, 0).unsqueeze(dim)
        picked = x.gather(dim, local).squeeze(dim).masked_fill(elsewhere, 0) if classes else torch.zeros_like(top)
        parts = [picked]
        if smoothing:
            parts.append((x if weight is None else x * _along(weight[start : start + classes], x, dim)).sum(dim))
        parts.append(x.exp_().sum(dim))
        picked, *rest, total = all_reduce(torch.stack(parts), axis)
        lse = total.log()  # less top, as x is

        a = torch.full_like(lse, 1 - smoothing) if weight is None else (1 - smoothing) * weight[labels.masked_fill(ignored, 0)].to(x.dtype)
        a = a.masked_fill(ignored, 0)
        loss = a * (lse - picked)
        b = torch.zeros_like(a)
        if smoothing:
            b = torch.full_like(a, smoothing / size).masked_fill(ignored, 0)
            loss = loss + b * (_total(weight, size) * lse - rest[0])
        ctx.save_for_backward(logits, top, lse, a, b, local, elsewhere, weight)
        ctx.dim, ctx.start, ctx.smoothing, ctx.size = dim, start, smoothing, size
        return loss.masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, top, lse, a, b, local, elsewhere, weight = ctx.saved_tensors
        dim, classes = ctx.dim, logits.shape[ctx.dim]
        if not classes:
            return torch.zeros_like(logits), None, None, None, None, None, None
        a, b = grad * a, grad * b
        out = (logits - top.unsqueeze(dim)).sub_(lse.unsqueeze(dim)).exp_().mul_((a + b * _total(weight, ctx.size)).unsqueeze(dim))
        out.scatter_add_(dim, local, a.masked_fill(elsewhere, 0).neg().unsqueeze(dim))
        if ctx.smoothing:
            b = b.unsqueeze(dim)
            out -= b if weight is None else b * _along(weight[ctx.start : ctx.start + classes], out, dim)
        return out.to(logits.dtype), None, None, None, None, None, None


def _start(axis: Axis, size: int) -> int:
    """The first row or class of this rank's piece."""
    return sum(widths_of(size, axis.size)[: axis.index])


def _total(weight: torch.Tensor | None, size: int):
    """The sum of the class weights."""
    return size if weight is None else weight.sum()


def _along(vector: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """``vector`` shaped to be broadcast along ``dim`` of x."""
    return vector.to(x.dtype).view(-1, *[1] * (x.dim() - 1 - dim))


def _check(good: torch.Tensor, message):
    """IndexError(message()) unless all are good. On a GPU, and compiled, a device-side assertion instead: no wait for the device."""
    if good.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(good.all(), "index out of range")
    elif not good.all():
        raise IndexError(message())
