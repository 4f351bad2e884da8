"""From the global batch to what each forward of this rank is fed: micro-batches first, then this rank's piece of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autoshard.errors import RunError
from autoshard.placement import Placement, parse_layout, parse_placement
from autoshard.runtime.pieces import join_one, take, take_one
from autoshard.runtime.stage import StageModule

Feed = dict[str, torch.Tensor]


def feeds(stage: StageModule, batch: Mapping[str, torch.Tensor]) -> list[Feed]:
    """Keyword arguments of every micro-batch's forward, extras included.

    Args:
        batch: whole tensors of the global batch by the user's names.
    """
    inputs = [{name: _piece(stage, name, batch, i) for name in stage.inputs} for i in range(stage.microbatches)]
    wanted = {name for part in stage.chunks for name in stage.reads(part.method)}
    fed = [{name: x for name, x in one.items() if name in wanted} for one in inputs]
    for name, values in _extras(stage, inputs).items():
        for one, value in zip(fed, values):
            one[name] = value
    return fed


def _piece(stage: StageModule, name: str, batch: Mapping[str, torch.Tensor], index: int) -> torch.Tensor:
    spec, world = stage.inputs[name], stage.world
    tensor = batch[spec.name or name]
    if spec.batch_dim is not None:
        tensor = take_one(tensor, spec.batch_dim, 1, stage.microbatches, index)
    piece = take(tensor, parse_layout(spec.layout), world.mesh.sizes, world.coords)
    return piece.to(world.device, non_blocking=True).contiguous()


@torch.no_grad()
def _extras(stage: StageModule, inputs: Sequence[Feed]) -> dict[str, list[torch.Tensor]]:
    """Extra -> its value for each micro-batch."""
    if not stage.extras:
        return {}
    wanted = stage.reads("prologue")
    raw = [stage.prologue(**{name: one[name] for name in wanted}) for one in inputs]
    return {name: over_time([one[name] for one in raw], extra.conversion) for name, extra in stage.extras.items()}


def over_time(values: Sequence[torch.Tensor], conversion: str) -> list[torch.Tensor]:
    """Convert the micro-batches' values of a tensor without gradient along time, ``"P -> R"``: the same table as along an axis of ranks."""
    src, dst = (parse_placement(part) for part in conversion.split("->"))
    m = len(values)
    if m == 1 or src == dst:
        return list(values)
    whole = _whole(values, src)
    if dst.kind in ("R", "R*"):
        return [whole] * m
    if dst.is_shard:
        return [take_one(whole, dst.dim, dst.blocks, m, i).contiguous() for i in range(m)]
    raise RunError(f"no value without a gradient is converted {conversion!r} over the micro-batches")


def _whole(values: Sequence[torch.Tensor], src: Placement) -> torch.Tensor:
    if src.is_shard:
        return join_one(values, src.dim, src.blocks)
    if src.kind == "P":
        return sum(values[1:], start=values[0])
    return values[0]
