"""Batch norm by the statistics of a batch whose samples are cut over ranks."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from autoshard.runtime.axis import Axis
from autoshard.runtime.collectives import all_gather, all_reduce, widths_of


def batch_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, axis: Axis, size: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``torch.native_batch_norm`` in training of a batch of ``size`` samples, cut over ``axis``, in pieces that may be uneven.

    Args:
        x: this rank's samples, ``[piece of size, c, ...]``.
        weight, bias: ``[c]``, whole; their gradients are this rank's summands (state R*).

    Returns:
        This rank's samples, normed, and the mean and the reciprocal deviation of all samples, ``[c]``, whole and without gradient.
    """
    return _BatchNorm.apply(x, weight, bias, axis, size, eps)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, axis, size, eps):
        dims, each = [0, *range(2, x.dim())], x[0, 0].numel()
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # squares are summed around each rank's own mean: around 0 they would lose what the mean is larger than the deviation
        variances, means = torch.var_mean(wide, dims, correction=0)
        variances, means = all_gather(torch.stack([variances, means]).unsqueeze(0), axis, 0, axis.size).unbind(1)
        shares = torch.tensor(widths_of(size, axis.size), dtype=wide.dtype, device=x.device).unsqueeze(1) / size
        mean = (shares * means).sum(0)
        deviation = ((shares * (variances + (means - mean) ** 2)).sum(0) + eps).rsqrt()
        out = (wide - _along(mean, x)) * _along(deviation if weight is None else deviation * weight, x)
        out = out if bias is None else out + _along(bias, x)
        ctx.save_for_backward(x, weight, mean, deviation)
        ctx.axis, ctx.count, ctx.dims, ctx.has_bias = axis, size * each, dims, bias is not None
        ctx.mark_non_differentiable(mean, deviation)
        return out.to(x.dtype), mean, deviation

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        x, weight, mean, deviation = ctx.saved_tensors
        grad = grad.to(mean.dtype)
        normed = (x - _along(mean, x)) * _along(deviation, x)
        own = torch.stack([grad.sum(ctx.dims), (grad * normed).sum(ctx.dims)])
        shift, scale = all_reduce(own, ctx.axis) / ctx.count
        out = (grad - _along(shift, x) - normed * _along(scale, x)) * _along(deviation if weight is None else deviation * weight, x)
        grad_weight = None if weight is None else own[1].to(weight.dtype)
        grad_bias = own[0].to(x.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return out.to(x.dtype), grad_weight, grad_bias, None, None, None


def _along(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``vector`` shaped to be broadcast along the channels of x."""
    return vector.view(1, -1, *[1] * (x.dim() - 2))
