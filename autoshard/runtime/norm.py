"""The joint norm of a model's gradients, every element counted once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce

import torch
import torch.distributed as dist

from autoshard.placement import parse_layout
from autoshard.runtime.stage import Param, StageModule


def counts_here(stage: StageModule, param: Param) -> bool:
    """Whether this rank is the one, among those with the same piece of a parameter, that counts it."""
    replicated = [c for p, c in zip(parse_layout(param.layout), stage.world.coords) if not p.is_shard]
    return stage.stage == min(param.stages) and not any(replicated)


def clip_grad_norm(
    stage: StageModule, params: Mapping[str, Param], max_norm: float, norm_type: float = 2.0, scale: float = 1.0
) -> torch.Tensor:
    """See ``Sharded.clip_grad_norm_``; ``params`` is its catalogue, ``scale`` what gradients were multiplied with."""
    norm_type = float(norm_type)
    grads = [(param, p) for param, p in stage.held() if p.grad is not None]
    mine = [p.grad for param, p in grads if counts_here(stage, param)]
    dtype = reduce(torch.promote_types, (param.dtype for param in params.values() if param.requires_grad), torch.float32)
    if any(g.dtype.itemsize < 4 for g in mine):  # whose norm may be out of their own range
        mine = [torch.linalg.vector_norm(g, norm_type, dtype=torch.promote_types(g.dtype, torch.float32)) for g in mine]
    norm = torch.nn.utils.get_total_norm(mine, norm_type).to(stage.world.device, torch.float64) / scale
    if stage.world.mesh.size > 1:
        if math.isinf(norm_type):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=stage.world.everyone)
        else:
            norm = norm**norm_type
            dist.all_reduce(norm, group=stage.world.everyone)
            norm = norm ** (1.0 / norm_type)
    norm = norm.to(dtype)
    torch.nn.utils.clip_grads_with_norm_([p for _, p in grads], max_norm, norm)
    return norm
