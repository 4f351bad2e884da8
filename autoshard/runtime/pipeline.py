"""Runs the micro-batches of one step: in a plain loop, or over stages by a schedule of torch.distributed.pipelining (torch 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from autoshard.runtime.feed import Feed
from autoshard.runtime.stage import StageModule, Value

Leaves = tuple[torch.Tensor, ...]


def loss_share(stage: StageModule, leaves: Leaves) -> torch.Tensor:
    """A micro-batch's part of the loss, from which backward starts: their sum is the loss of the whole batch, times its scale."""
    loss = leaves[stage.loss]
    if stage.loss_scale != 1.0:
        loss = loss.to(torch.promote_types(loss.dtype, torch.float32)) * stage.loss_scale
    return loss if stage.outputs[stage.loss].time == "P" else loss / stage.microbatches


class Loop:
    """One stage, micro-batch after micro-batch.

    Args:
        before_last: called before the last micro-batch's backward.
    """

    def __init__(self, stage: StageModule, before_last: Callable[[], None]):
        self.stage, self.before_last = stage, before_last

    def run(self, feeds: Sequence[Feed], training: bool) -> list[Leaves]:
        """The output leaves of each micro-batch, detached. ``training``: also run backward; gradients are added to ``.grad``."""
        results = []
        for i, feed in enumerate(feeds):
            with torch.set_grad_enabled(training):
                leaves = self.stage(**feed)
                if training:
                    loss = loss_share(self.stage, leaves)
                    if i == len(feeds) - 1:
                        self.before_last()
                    if loss.requires_grad:
                        loss.backward()
            results.append(tuple(leaf.detach() for leaf in leaves))
        return results


class Pipeline:
    """All stages, each on its own rank. Arguments and ``run`` as for ``Loop``; leaves are known on the last stage only.

    With fewer micro-batches than stages 1F1B is not defined; all forwards run before all backwards then.
    """

    def __init__(self, stage: StageModule, before_last: Callable[[], None]):
        world, m = stage.world, stage.microbatches
        self.stage = stage
        self.body = Body(stage)
        ends = _Stage(
            self.body,
            stage.stage,
            world.mesh.pipeline,
            world.device,
            input_args=_examples(stage.receives),
            output_args=(torch.empty((), device="meta"),) if self.body.last else _examples(stage.sends),
            group=world.pipeline,
        )
        ends.before_last = before_last
        schedule = Schedule1F1B if m >= world.mesh.pipeline else ScheduleGPipe
        self.schedule = schedule(ends, m, loss_fn=lambda loss, _: loss, scale_grads=False)

    def run(self, feeds: Sequence[Feed], training: bool) -> list[Leaves] | None:
        self.body.start(feeds)
        which = torch.arange(len(feeds))  # chunked by the schedule: each forward is told which micro-batch it is for
        target = torch.zeros(len(feeds)) if self.body.last else None
        with torch.set_grad_enabled(training):
            step = self.schedule.step if training else self.schedule.eval
            step(microbatch=which, target=target, return_outputs=False)
        return self.body.finish()


class _Stage(PipelineStage):
    """Says when the last backward begins."""

    before_last: Callable[[], None]

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        if last_backward and self.has_backward:
            self.before_last()
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)


class Body(nn.Module):
    """What the schedule sees of a stage: received tensors in, tensors to send out; on the last stage, the loss out."""

    def __init__(self, stage: StageModule):
        super().__init__()
        self.stage = stage
        self.last = stage.stage == stage.world.mesh.pipeline - 1
        self.feeds: Sequence[Feed] = ()
        self.results: list[Leaves] = []

    def start(self, feeds: Sequence[Feed]) -> None:
        self.feeds, self.results = feeds, []

    def finish(self) -> list[Leaves] | None:
        results, self.feeds, self.results = self.results, (), []
        return results if self.last else None

    def forward(self, *received: torch.Tensor, microbatch: torch.Tensor):
        out = self.stage(*received, **self.feeds[int(microbatch)])
        if not self.last:
            return tuple((x if sent.requires_grad else x.detach()).contiguous() for x, sent in zip(out, self.stage.sends))
        # received tensors are buffers that the next step fills again, so an output must not be one of them
        buffers = {x.untyped_storage().data_ptr() for x in received}
        self.results.append(tuple(x.detach().clone() if x.untyped_storage().data_ptr() in buffers else x.detach() for x in out))
        if self.stage.loss is None:
            return torch.zeros((), device=self.stage.world.device)
        return loss_share(self.stage, out)


def _examples(values: Sequence[Value]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(v.shape, dtype=v.dtype, device="meta").requires_grad_(v.requires_grad) for v in values)
