"""Attention with dropout on given numbers: torch's fused kernels draw their own."""

from __future__ import annotations

import math

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from autoshard.runtime.numbers import Numbers
from autoshard.runtime.random import dropout
from autoshard.runtime.recompute import whole_op

HALF = (torch.float16, torch.bfloat16)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    p: float,
    numbers: Numbers,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` with dropout ``p``, in the steps that its documentation gives.

    Nothing of the size of the weights ``[..., s, t]`` is kept: the mask is a function of its key, so backward computes all of it again.

    Args:
        numbers: of the shape of the weights.
    """
    rest = (p, numbers, is_causal, scale, enable_gqa)
    if torch.compiler.is_compiling():  # it traces this, but no gradient inside of a backward
        return checkpoint(_attend, query, key, value, attn_mask, *rest, use_reentrant=False, preserve_rng_state=False)
    return _Attention.apply(query, key, value, attn_mask, rest)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, attn_mask, rest):
        ctx.save_for_backward(query, key, value, attn_mask)
        ctx.rest = rest
        return whole_op(lambda: _attend(query, key, value, attn_mask, *rest))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        wanted = ctx.needs_input_grad[:4]
        with torch.enable_grad():
            inputs = [None if x is None else x.detach().requires_grad_(want) for x, want in zip(ctx.saved_tensors, wanted)]
            result = _attend(*inputs, *ctx.rest)
        found = iter(torch.autograd.grad(result, [x for x, want in zip(inputs, wanted) if want], gradient))
        return (*(next(found) if want else None for want in wanted), None)


def _attend(query, key, value, attn_mask, p, numbers, is_causal, scale, enable_gqa):
    dtype = query.dtype
    if dtype in HALF:
        query, key, value = query.float(), key.float(), value.float()
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale) @ key.transpose(-2, -1)
    blind = None
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    elif attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        blind = scores.isneginf().all(-1, keepdim=True)  # a query that sees nothing gets zeros
        scores = scores.masked_fill(blind, 0)
    weights = torch.softmax(scores, -1)
    if blind is not None:
        weights = weights.masked_fill(blind, 0)
    return (dropout(weights, p, numbers) @ value).to(dtype)
