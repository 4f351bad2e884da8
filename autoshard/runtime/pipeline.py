"""Runs the micro-batches of one step: in a plain loop, or over stages by a schedule of torch.distributed.pipelining (torch 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from autoshard.runtime.feed import Feed
from autoshard.runtime.split import first_inputs, then_weights
from autoshard.runtime.stage import Part, StageModule, Value
from autoshard.schedule import schedule_of

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
                self.stage.keys.microbatch = torch.tensor(i)
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
    """All stages, each on its own rank, or several on each. Arguments and ``run`` as for ``Loop``; leaves are known to the rank of the last
    stage only.

    ``before_last`` is called where a rank runs one stage; of several each has a last micro-batch of its own.
    """

    def __init__(self, stage: StageModule, before_last: Callable[[], None]):
        world, m = stage.world, stage.microbatches
        self.bodies = [Body(stage, part) for part in stage.chunks]
        stages = [_Stage(body, before_last if len(self.bodies) == 1 else None) for body in self.bodies]
        cls = getattr(pipelining, f"Schedule{schedule_of(stage.schedule).run_as(m, world.mesh.pipeline)}")
        self.schedule = cls(
            stages if issubclass(cls, PipelineScheduleMulti) else stages[0], m, loss_fn=lambda loss, _: loss, scale_grads=False
        )

    def run(self, feeds: Sequence[Feed], training: bool) -> list[Leaves] | None:
        for body in self.bodies:
            body.start(feeds)
        which = torch.arange(len(feeds))  # chunked by the schedule: each forward is told which micro-batch it is for
        target = torch.zeros(len(feeds)) if any(body.last for body in self.bodies) else None
        with torch.set_grad_enabled(training):
            if training:
                self.schedule.step(microbatch=which, target=target, return_outputs=False)
            else:
                self._forward_only(which, target)
        results = [body.finish() for body in self.bodies]
        return next((leaves for leaves in results if leaves is not None), None)

    def _forward_only(self, which: torch.Tensor, target: torch.Tensor | None) -> None:
        """What schedules of several stages a rank do not know how to leave out, is left out of their list of actions."""
        order = getattr(self.schedule, "pipeline_order_with_comms", None)
        if order is None:
            self.schedule.eval(microbatch=which, target=target, return_outputs=False)
            return
        forward = {
            rank: [action for action in actions if action.computation_type.name in ("FORWARD", "SEND_F", "RECV_F")]
            for rank, actions in order.items()
        }
        self.schedule.pipeline_order_with_comms = forward
        try:
            self.schedule.eval(microbatch=which, target=target, return_outputs=False)
        finally:
            self.schedule.pipeline_order_with_comms = order


class _Stage(PipelineStage):
    """Says when the last backward begins, and splits backwards so that all ranks run their collectives in the same order.

    Memory to receive in is there when it is needed: torch's own stage has it for all micro-batches all the time.
    """

    def __init__(self, body: Body, before_last: Callable[[], None] | None):
        stage, part = body.stage, body.part
        super().__init__(
            body,
            part.stage,
            stage.depth,
            stage.world.device,
            input_args=_examples(part.receives),
            output_args=(torch.empty((), device="meta"),) if body.last else _examples(part.sends),
            group=stage.world.pipeline,
        )
        self.before_last = before_last

    def _setup_forward_recv_info(self, num_microbatches, has_backward):
        with self._on_meta():
            super()._setup_forward_recv_info(num_microbatches, has_backward)

    def _create_grad_recv_info(self, act_send_info):
        with self._on_meta():
            return super()._create_grad_recv_info(act_send_info)

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        """What is made is on the meta device: it holds no memory, but has the shape of what does."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id):
        self._fill(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id):
        if self.has_backward and not self.is_last:
            self._fill(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs, mb_index):
        if any(tensor is None for tensor in next_stage_bwd_outputs):  # then zeros
            self._fill(self.grad_recv_info[mb_index])
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _fill(self, infos) -> None:
        for info in infos:
            if info.buffer is not None:
                info.buffer = torch.empty_like(info.buffer, device=self.device, requires_grad=False)

    def _empty(self, infos) -> None:
        """What was received is held by those who still need it."""
        for info in infos:
            if info.buffer is not None:
                info.buffer = torch.empty_like(info.buffer, device="meta", requires_grad=False)

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._empty(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        if last_backward and self.has_backward and self.before_last is not None:
            self.before_last()
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward)
        if self.has_backward and not self.is_last:
            self._empty(self.grad_recv_info[bwd_chunk_id])

    def backward_maybe_with_nosync(self, backward_type, bwd_kwargs, last_backward=False):
        stage, outputs = self.submod.stage, bwd_kwargs["stage_output"]
        if backward_type == "weight":
            return then_weights(bwd_kwargs["param_groups"] or []), None
        if backward_type == "input":
            bwd_kwargs["stage_output"] = ()  # of which nothing is needed later
            if not stage.recomputes:
                return first_inputs(outputs, bwd_kwargs["output_grads"], bwd_kwargs["input_values"], stage.leaves())
            bwd_kwargs = {**bwd_kwargs, "stage_output": outputs[0] if self.is_last else outputs}
        return super().backward_maybe_with_nosync("full", bwd_kwargs, last_backward=last_backward)


class Body(nn.Module):
    """What the schedule sees of a stage: received tensors in, tensors to send out; on the last stage, the loss out."""

    def __init__(self, stage: StageModule, part: Part):
        super().__init__()
        self.stage, self.part = stage, part
        self.last = part.stage == stage.depth - 1
        self.reads = frozenset(stage.reads(part.method))
        self.feeds: Sequence[Feed] = ()
        self.results: list[Leaves] = []

    def start(self, feeds: Sequence[Feed]) -> None:
        self.feeds, self.results = feeds, []

    def finish(self) -> list[Leaves] | None:
        results, self.feeds, self.results = self.results, (), []
        return results if self.last else None

    def forward(self, *received: torch.Tensor, microbatch: torch.Tensor):
        self.stage.keys.microbatch = torch.tensor(int(microbatch))
        fed = {name: x for name, x in self.feeds[int(microbatch)].items() if name in self.reads}
        out = self.stage(*received, method=self.part.method, **fed)
        if not self.last:
            return tuple((x if sent.requires_grad else x.detach()).contiguous() for x, sent in zip(out, self.part.sends))
        self.results.append(tuple(x.detach() for x in out))
        if self.stage.loss is None:
            return torch.zeros((), device=self.stage.world.device)
        return loss_share(self.stage, out)


def _examples(values: Sequence[Value]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(v.shape, dtype=v.dtype, device="meta").requires_grad_(v.requires_grad) for v in values)
