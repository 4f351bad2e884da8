"""What a call of the sharded model returns for each tensor leaf of the model's result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autoshard.errors import RunError
from autoshard.placement import Placement, local_shape, parse_layout, parse_placement
from autoshard.runtime.pieces import join_one
from autoshard.runtime.stage import Output, StageModule
from autoshard.runtime.whole import is_whole, whole
from autoshard.runtime.world import World


class Lazy:
    """A result that lies in pieces on the ranks: nothing is sent before it is asked for.

    shape, dtype: those of the whole tensor.
    """

    def __init__(self, stage: StageModule, spec: Output, chunks: torch.Tensor | None, ran_backward: bool):
        """``chunks``: this rank's pieces of the micro-batches, stacked in a new dim 0; None if another stage has them."""
        self._world, self._spec, self._m, self._chunks, self._end = stage.world, spec, stage.microbatches, chunks, stage.last_place
        self._ran_backward = ran_backward
        self.dtype = spec.dtype
        self.shape = torch.Size(full_shape(spec, stage.microbatches))

    def to_local(self) -> torch.Tensor:
        """This rank's own pieces, those of several micro-batches one after the other. On a mesh with a pipeline, a collective along it."""
        return _guard(_over_time(self._stacked(), self._spec), self._spec, self._ran_backward)

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, on every rank: a collective, so all ranks must call it.

        Gradients flow through it unless the mesh has a pipeline or the batch is cut into micro-batches: those ran their backward in the
        call. RunError in backward then.
        """
        layout = tuple(Placement("S", p.dim + 1, p.blocks) if p.is_shard else p for p in parse_layout(self._spec.layout))
        stacked = whole(self._stacked(), layout, (self._m, *self._spec.shape), self._world)
        return _guard(_over_time(stacked, self._spec), self._spec, self._ran_backward)

    def _stacked(self) -> torch.Tensor:
        world, spec = self._world, self._spec
        if world.mesh.pipeline > 1:
            if self._chunks is None:
                local = local_shape(spec.shape, parse_layout(spec.layout), world.mesh.sizes, world.coords)
                chunks = torch.empty((self._m, *local), dtype=spec.dtype, device=world.device)
            else:
                chunks = self._chunks
            return from_last_stage(chunks, world, self._end)
        return self._chunks

    def __repr__(self) -> str:
        return f"Lazy(shape={tuple(self.shape)}, dtype={self.dtype}, micro-batch layout={self._spec.layout})"


def full_shape(spec: Output, microbatches: int) -> tuple[int, ...]:
    """The shape of an output for the whole batch."""
    time, shape = parse_placement(spec.time), list(spec.shape)
    if time.is_shard:
        shape[time.dim] *= microbatches
    return tuple(shape)


def from_last_stage(x: torch.Tensor, world: World, end: int) -> torch.Tensor:
    """``x`` of the last pipeline stage, on all stages; overwrites x on the others. ``end``: the last stage's ``StageModule.last_place``."""
    x = x.contiguous()
    dist.broadcast(x, group_src=end, group=world.pipeline)
    return x


def deliver(stage: StageModule, results: Sequence[Sequence[torch.Tensor]] | None, ran_backward: bool) -> list[torch.Tensor | Lazy]:
    """What stands for each entry of ``stage.outputs``.

    Scalars, and what every rank has, are plain tensors; everything else is Lazy.

    Args:
        results: the leaves that each micro-batch's forward gave; None on all stages but the last.
        ran_backward: the call ran backward already, so that gradients can't flow into these results any more.
    """
    delivered: list[torch.Tensor | Lazy] = []
    for i, spec in enumerate(stage.outputs):
        chunks = (
            None if results is None else torch.stack([leaves[i] for leaves in results]) if len(results) > 1 else results[0][i].unsqueeze(0)
        )
        lazy = Lazy(stage, spec, chunks, ran_backward)
        if not spec.shape and i != stage.loss:
            delivered.append(lazy.full_tensor())
        elif i == stage.loss:
            delivered.append(_loss(stage, spec, chunks))
        elif stage.world.mesh.pipeline == 1 and is_whole(parse_layout(spec.layout), stage.world):
            delivered.append(lazy.to_local())
        else:
            delivered.append(lazy)
    return delivered


def _loss(stage: StageModule, spec: Output, chunks: torch.Tensor | None) -> torch.Tensor:
    loss = torch.empty((), dtype=spec.dtype, device=stage.world.device) if chunks is None else _over_time(chunks, spec)
    return from_last_stage(loss, stage.world, stage.last_place) if stage.world.mesh.pipeline > 1 else loss


def _over_time(stacked: torch.Tensor, spec: Output) -> torch.Tensor:
    """Micro-batches' values, stacked in dim 0, as the value of the whole batch."""
    if stacked.shape[0] == 1:
        return stacked.squeeze(0)
    time = parse_placement(spec.time)
    if time.is_shard:
        return join_one(stacked.unbind(0), time.dim, time.blocks)
    return stacked.sum(0) if time.kind == "P" else stacked[0]


def _guard(x: torch.Tensor, spec: Output, ran_backward: bool) -> torch.Tensor:
    if ran_backward and spec.requires_grad and torch.is_grad_enabled():
        return _NoBackward.apply(x.requires_grad_())
    return x


class _NoBackward(torch.autograd.Function):
    """Turns a gradient that would be silently lost into an error."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise RunError(
            "gradients can't flow into this result: its backward ran inside the call, as the batch is cut into micro-batches",
            hint="compute the whole loss in the model or in loss_fn, or compile for a mesh without pipeline and with microbatches=1",
        )
