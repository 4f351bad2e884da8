"""Sums parameters' gradients over the mesh once a step, in buckets, while backward still runs.

Written for torch 2.13. One private hook into autograd is used, as torch's own DistributedDataParallel does: ``queue_callback``, for a
function that runs when backward ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autoshard.runtime import collectives
from autoshard.runtime.zero import Rounded, Slots

BUCKET_BYTES = 25 * 2**20
_ALIGN = 16  # elements: every gradient of a bucket starts where vectorised kernels like it
_IN_FLIGHT = 2  # reduce-scatters that may run at once: each holds a buffer of whole gradients


@dataclass(frozen=True, eq=False)
class Entry:
    """What happens to the gradient of a leaf when backward has accumulated it.

    group: the ranks over which it is summed; None: this one has the sum.
    shard: of a weight of ZeRO level 1 or 2, of which this rank's piece is handed over to the optimizer's parameter, or of lower precision,
        of which all is.
    scatter: it is summed over the data axis too, and only this rank's piece of that sum is kept.
    cut: it needs no sum over data, and only this rank's piece is kept: a copy, of level 2.
    """

    leaf: torch.Tensor
    group: dist.ProcessGroup | None
    shard: Rounded | None = None
    scatter: bool = False
    cut: bool = False


class _Bucket:
    """Gradients that are reduced in one collective; this one in an all-reduce, or in none."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.entries: list[Entry] = []
        self.missing = 0
        self._launched: list[Entry] = []
        self._work: dist.Work | None = None

    def launch(self, arrived: set[torch.Tensor]) -> None:
        """Start to reduce the gradients that exist. They become views of one flat buffer, so nothing is copied back."""
        self._launched = [e for e in self.entries if e.leaf in arrived]
        if self._launched and self.group is not None:
            self._work = dist.all_reduce(_together([e.leaf for e in self._launched]), group=self.group, async_op=True)

    def finish(self) -> None:
        """Wait, and hand over the pieces."""
        if self._work is not None:
            self._work.wait()
        for entry in self._launched:
            if entry.shard is not None:
                gradient, entry.leaf.grad = entry.shard.own(entry.leaf.grad), None
                entry.shard.hand_over(gradient.clone() if entry.cut else gradient)
        self._launched, self._work = [], None


class _Scatter(_Bucket):
    """A reduce-scatter over data, then, if there is a group, an all-reduce of the pieces."""

    def launch(self, arrived: set[torch.Tensor]) -> None:
        """Start to reduce the gradients that exist, and let go of them."""
        self._launched = [e for e in self.entries if e.leaf in arrived]
        if not self._launched:
            return
        shards = [e.shard for e in self._launched]
        self._slots, axis = Slots(shards), shards[0].axis
        self._sent, self._piece = self._slots.new(axis.size), self._slots.new(1)
        self._fill(shards)
        for shard in shards:
            shard.whole.grad = None
        self._work = collectives.start_reduce_scatter(self._piece, self._sent, axis)

    def _fill(self, shards: list[Rounded]) -> None:
        """Copy the gradients to where they are sent from; a function of its own, so that no view of them outlives it."""
        targets, sources = [], []
        for rank, row in enumerate(self._sent):
            for i, shard in enumerate(shards):
                part = shard.part(shard.whole.grad, rank)
                targets.append(self._slots.slot(row, i, part))
                sources.append(part)
        torch._foreach_copy_(targets, sources)

    def finish(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        piece, slots, self._sent, self._piece, self._work = self._piece, self._slots, None, None, None
        if self.group is not None:
            dist.all_reduce(piece, group=self.group)
        for i, entry in enumerate(self._launched):
            entry.shard.hand_over(slots.slot(piece[0], i, entry.shard.piece))
        self._launched = []


def flatten(params: list[torch.nn.Parameter]) -> torch.Tensor:
    """Move the gradients into one buffer; every ``.grad`` is then a view of it."""
    starts, size = [], 0
    for p in params:
        starts.append(size)
        size += -(-p.numel() // _ALIGN) * _ALIGN
    flat = params[0].grad.new_empty(size)
    views = [flat[start : start + p.numel()].view(p.shape) for start, p in zip(starts, params)]
    torch._foreach_copy_(views, [p.grad for p in params])
    for p, view in zip(params, views):
        p.grad = view
    return flat


def _together(params: list[torch.nn.Parameter]) -> torch.Tensor:
    """The gradients in one buffer."""
    return params[0].grad if len(params) == 1 and params[0].grad.is_contiguous() else flatten(params)


class GradientSync:
    """Reduces the gradients of parameters that are summands after backward.

    Args:
        entries: in the order of their first use in forward; backward makes the gradients ready in about the reverse order.
        every_backward: reduce at the end of each backward that reaches the parameters. Else the owner says which one is the last
            (``arm``, if there is one for all of them), calls ``finish`` itself, and sees to it that ``.grad`` held nothing before.

    A backward adds to ``.grad`` the sum over ranks, whatever was there: only the new part is reduced. Parameters that got no gradient keep
    None; which those are is the same on all ranks, as they run one program. ``torch.autograd.grad`` returns summands, not sums, and knows
    no pieces of weights of ZeRO level 1 and 2.
    """

    def __init__(self, entries: Iterable[Entry], every_backward: bool):
        self.entries = list(entries)
        self.every_backward = every_backward
        self.armed = every_backward
        self._scatters = any(entry.scatter for entry in self.entries)
        self._buckets: list[_Bucket] = []
        self._of: dict[torch.Tensor, _Bucket] = {}
        self._fill(self.entries, [])
        for entry in self.entries:
            entry.leaf.register_post_accumulate_grad_hook(self._arrived)
            if every_backward and entry.shard is None:
                entry.leaf.register_hook(self._keep_old(entry.leaf))
        self._aside: dict[torch.Tensor, torch.Tensor] = {}
        self.reset()

    def _fill(self, used: list, unused: list) -> None:
        """Buckets: first used parameters, from the last in forward to the first; those that no backward reaches must hold up no other.

        They are in the order in which backward fills them: one for few small parameters over other ranks is open for long.
        """
        order: dict[_Bucket, None] = {}
        for entries in (used, unused):
            filling: dict[tuple, tuple[_Bucket, int]] = {}
            for entry in reversed(entries):
                key = (entry.group, entry.scatter, entry.cut, entry.leaf.dtype)
                bucket, size = filling.get(key, (None, BUCKET_BYTES))
                nbytes = entry.leaf.numel() * entry.leaf.element_size()
                if bucket is None or size + nbytes > BUCKET_BYTES:
                    bucket, size = (_Scatter if entry.scatter else _Bucket)(entry.group), 0
                filling[key] = (bucket, size + nbytes)
                bucket.entries.append(entry)
                order.pop(bucket, None)
                order[bucket] = None
        self._buckets = list(order)
        self._of = {entry.leaf: bucket for bucket in self._buckets for entry in bucket.entries}
        self._used = {entry.leaf for entry in used}

    def reset(self) -> None:
        """Forget a backward that was broken off."""
        self._restore()
        self._queued = False
        self._arrivals: set[torch.Tensor] = set()
        self._next = self._done = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.entries)
        for entry in self.entries:
            if entry.shard is not None:
                entry.leaf.grad = None

    def arm(self) -> None:
        """The next backward is the last of this step."""
        self.armed = True

    def _keep_old(self, param):
        def hook(grad):
            if self.armed and param.grad is not None:
                self._aside[param] = param.grad
                param.grad = None
                self._queue()

        return hook

    def _queue(self) -> None:
        if not self._queued and self.every_backward:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def _arrived(self, param) -> None:
        if not self.armed:
            return
        self._queue()
        self._arrivals.add(param)
        self._of[param].missing -= 1
        # strictly in order: the ranks' collectives must match
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._launch_next()

    @torch.no_grad()
    def _launch_next(self) -> None:
        self._buckets[self._next].launch(self._arrivals)
        self._next += 1
        if self._scatters and self._next - self._done > _IN_FLIGHT:
            self._finish_next()

    @torch.no_grad()
    def _finish_next(self) -> None:
        self._buckets[self._done].finish()
        self._done += 1

    def finish(self) -> None:
        """Reduce what is left, and wait for everything: ``.grad`` is then the sum over ranks."""
        if not self.every_backward:  # also what arrived while this was not armed
            self._arrivals |= {entry.leaf for entry in self.entries if entry.leaf.grad is not None}
        while self._next < len(self._buckets):
            self._launch_next()
        while self._done < len(self._buckets):
            self._finish_next()
        if self._arrivals and self._arrivals != self._used:
            self._fill(
                [e for e in self.entries if e.leaf in self._arrivals],
                [e for e in self.entries if e.leaf not in self._arrivals],
            )
        self.armed = self.every_backward
        self.reset()

    def _restore(self) -> None:
        for param, old in self._aside.items():
            param.grad = old if param.grad is None else old.add_(param.grad)
        self._aside.clear()


@torch.no_grad()
def sum_over_stages(entries: Iterable[tuple[torch.nn.Parameter, torch.dtype, dist.ProcessGroup]]) -> None:
    """Sum the gradients of parameters that several pipeline stages hold, over the group of their holders.

    A stage may have no gradient for one, if the use it makes of it has none; None stays only if no stage has one.

    Args:
        entries: (parameter, dtype of its gradient, group), in an order that is the same on all members of every group.
    """
    together: dict[tuple, list[torch.nn.Parameter]] = {}
    for param, dtype, group in entries:
        together.setdefault((group, dtype, param.device), []).append(param)
    for (group, dtype, _), params in together.items():
        has = torch.tensor([p.grad is not None for p in params], dtype=dtype, device=params[0].device)
        for p in params:
            if p.grad is None:
                p.grad = torch.zeros_like(p, dtype=dtype)
        dist.all_reduce(has, group=group)
        dist.all_reduce(_together(params), group=group)
        for p, count in zip(params, has.tolist()):
            if not count:
                p.grad = None
