"""Sums parameters' gradients over the mesh once a step, in buckets, while backward still runs.

Written for torch 2.13. One private hook into autograd is used, as torch's own DistributedDataParallel does: ``queue_callback``, for a
function that runs when backward ends.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

BUCKET_BYTES = 25 * 2**20
_ALIGN = 16  # elements: every gradient of a bucket starts where vectorised kernels like it


class _Bucket:
    """Gradients that are reduced in one all-reduce."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.params: list[torch.nn.Parameter] = []
        self.missing = 0

    def launch(self, arrived: set[torch.nn.Parameter]) -> dist.Work | None:
        """Start the all-reduce of the gradients that exist. They become views of one flat buffer, so nothing is copied back."""
        params = [p for p in self.params if p in arrived]
        if not params:
            return None
        flat = params[0].grad if len(params) == 1 and params[0].grad.is_contiguous() else flatten(params)
        return dist.all_reduce(flat, group=self.group, async_op=True)


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


class GradientSync:
    """Reduces the gradients of parameters that are summands after backward.

    Args:
        entries: (parameter, group over which its gradient is summed), in the order of their first use in forward; backward makes the
            gradients ready in about the reverse order.
        every_backward: reduce at the end of each backward that reaches the parameters. Else the owner says which one is the last
            (``arm``), calls ``finish`` itself, and sees to it that ``.grad`` held nothing before.

    A backward adds to ``.grad`` the sum over ranks, whatever was there: only the new part is reduced. Parameters that got no gradient keep
    None; which those are is the same on all ranks, as they run one program. ``torch.autograd.grad`` returns summands, not sums.
    """

    def __init__(self, entries: Iterable[tuple[torch.nn.Parameter, dist.ProcessGroup]], every_backward: bool):
        self.entries = list(entries)
        self.every_backward = every_backward
        self.armed = every_backward
        self._buckets: list[_Bucket] = []
        self._of: dict[torch.nn.Parameter, _Bucket] = {}
        self._fill(self.entries, [])
        for param, _ in self.entries:
            param.register_post_accumulate_grad_hook(self._arrived)
            if every_backward:
                param.register_hook(self._keep_old(param))
        self._aside: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.reset()

    def _fill(self, used: list, unused: list) -> None:
        """Buckets: first used parameters, from the last in forward to the first; those that no backward reaches must hold up no other."""
        self._buckets = []
        for entries in (used, unused):
            filling: dict[tuple, tuple[_Bucket, int]] = {}
            for param, group in reversed(entries):
                key = (group, param.dtype)
                bucket, size = filling.get(key, (None, BUCKET_BYTES))
                nbytes = param.numel() * param.element_size()
                if bucket is None or size + nbytes > BUCKET_BYTES:
                    bucket, size = _Bucket(group), 0
                    self._buckets.append(bucket)
                filling[key] = (bucket, size + nbytes)
                bucket.params.append(param)
        self._of = {param: bucket for bucket in self._buckets for param in bucket.params}
        self._used = {param for param, _ in used}

    def reset(self) -> None:
        """Forget a backward that was broken off."""
        self._restore()
        self._queued = False
        self._arrivals: set[torch.nn.Parameter] = set()
        self._next = 0
        self._work: list[dist.Work] = []
        for bucket in self._buckets:
            bucket.missing = len(bucket.params)

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

    def _launch_next(self) -> None:
        work = self._buckets[self._next].launch(self._arrivals)
        self._next += 1
        if work is not None:
            self._work.append(work)

    def finish(self) -> None:
        """Reduce what is left, and wait for everything: ``.grad`` is then the sum over ranks."""
        while self._next < len(self._buckets):
            self._launch_next()
        for work in self._work:
            work.wait()
        if self._arrivals and self._arrivals != self._used:
            self._fill(
                [e for e in self.entries if e[0] in self._arrivals],
                [e for e in self.entries if e[0] not in self._arrivals],
            )
        self.armed = self.every_backward
        self.reset()

    def _restore(self) -> None:
        for param, old in self._aside.items():
            param.grad = old if param.grad is None else old.add_(param.grad)
        self._aside.clear()


@torch.no_grad()
def sum_over_stages(entries: Iterable[tuple[torch.nn.Parameter, dist.ProcessGroup]]) -> None:
    """Sum the gradients of parameters that several pipeline stages hold, over the group of their holders.

    A stage may have no gradient for one, if the use it makes of it has none; None stays only if no stage has one.

    Args:
        entries: in an order that is the same on all members of every group.
    """
    together: dict[tuple, list[torch.nn.Parameter]] = {}
    for param, group in entries:
        together.setdefault((group, param.dtype), []).append(param)
    for (group, dtype), params in together.items():
        has = torch.tensor([p.grad is not None for p in params], dtype=dtype, device=params[0].device)
        for p in params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        dist.all_reduce(has, group=group)
        dist.all_reduce(flatten(params), group=group)
        for p, count in zip(params, has.tolist()):
            if not count:
                p.grad = None
