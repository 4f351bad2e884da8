"""Regions whose activations are not kept: backward computes them again from the region's inputs, and from what is kept inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from autoshard.runtime.keys import Keys
from autoshard.runtime.random import Streams
from autoshard.torch_private import TorchDispatchMode, pytree

aten = torch.ops.aten


def recompute(region: Callable, *inputs: Any) -> Any:
    """What ``region(*inputs)`` gives, without what backward would need of it: that is computed again when backward gets there.

    Random numbers are the same both times, and conversions inside run again, so that ranks must compute their regions in one order,
    as they do. Lines of the region under ``kept`` and ``once`` are computed in forward only.

    Args:
        region: a method of a ``StageModule``.
    """
    stage = region.__self__
    stage.recomputes = True
    run = _Run(stage.keys if stage.keys.count else stage.streams)  # all random numbers of emitted code come from there
    return checkpoint(region, *inputs, use_reentrant=False, context_fn=run.contexts, preserve_rng_state=False)


@contextmanager
def kept() -> Iterator[None]:
    """Results of the ops within are kept for backward, which does not compute them again."""
    with _lines(lambda x: x.detach(), lambda x: x, lambda func: True):
        yield


@contextmanager
def once() -> Iterator[None]:
    """Backward reads no result of the ops within, nor anything that is computed from them again: it leaves them out.

    Their place is taken by tensors of NaN that need no memory, so that a line that stands here by mistake is seen.
    """
    with _lines(lambda x: (x.shape, x.dtype, x.device), _nothing, lambda func: func in _ONCE):
        yield


_ONCE = {
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default),
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.gelu.default, aten.silu.default),
}
"""What is worth leaving out. Of the rest, some copies that autograd saves: of a matmul's operands, if they are not contiguous."""


class _Run:
    """One run of a region: what its lines leave behind in forward, in their order, for when they are met again."""

    def __init__(self, streams: Streams | Keys):
        self.streams = streams
        self.left: list = []
        self.met: Iterator | None = None  # what was left, while it is met again

    def contexts(self):
        """``context_fn`` of ``torch.utils.checkpoint.checkpoint``."""
        return tuple(self._in(random, again) for random, again in zip(self.streams.checkpoint_contexts(), (False, True)))

    @property
    def again(self) -> bool:
        return self.met is not None

    @contextmanager
    def _in(self, random, again: bool) -> Iterator[None]:
        self.met = iter(self.left) if again else None
        token = _current.set(self)
        try:
            with random:
                yield
        finally:
            _current.reset(token)


_current: ContextVar[_Run | None] = ContextVar("region", default=None)
_lines_of: ContextVar[_Lines | None] = ContextVar("lines", default=None)


@contextmanager
def _lines(
    leave: Callable[[torch.Tensor], Any], find: Callable[[Any], torch.Tensor], counts: Callable[[Callable], bool]
) -> Iterator[None]:
    run = _current.get()
    if run is None or torch.compiler.is_compiling():  # no gradient is wanted, or torch.compile decides what is computed again
        yield
        return
    lines = _Lines(run, leave, find, counts)
    token = _lines_of.set(lines)
    try:
        with lines:
            yield
        if run.again:  # random numbers that are not drawn again are skipped, for those that are
            run.streams.restore(next(run.met))
        else:
            run.left.append(run.streams.states())
    finally:
        _lines_of.reset(token)


class _Lines(TorchDispatchMode):
    """Runs the ops of some lines in forward; gives what they left behind when they are met again.

    Args:
        leave, find: from a result to what is left behind of it, and back.
        counts: whether that goes for an op; others run both times.
    """

    def __init__(self, run: _Run, leave, find, counts):
        super().__init__()
        self.run, self.leave, self.find, self.counts = run, leave, find, counts
        self.inside = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = func._schema
        is_view = not schema.is_mutable and any(a.alias_info is not None for a in schema.returns)
        if self.inside or is_view or not self.counts(func):
            return func(*args, **kwargs)
        if schema.is_mutable:  # what it writes to is as it left it
            return args[0] if self.run.again else func(*args, **kwargs)
        return self.result(lambda: func(*args, **kwargs))

    def result(self, compute: Callable[[], Any]) -> Any:
        """What ``compute`` gives in forward; it is not looked into."""
        if self.run.again:
            return pytree.tree_map_only(_Left, lambda x: self.find(x.value), next(self.run.met))
        self.inside = True
        try:
            out = compute()
        finally:
            self.inside = False
        self.run.left.append(pytree.tree_map_only(torch.Tensor, lambda x: _Left(self.leave(x)), out))
        return out


class _Left:
    """What a tensor left behind."""

    def __init__(self, value: Any):
        self.value = value


def whole_op(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """``compute()``, which counts as one op under ``kept`` and ``once``. For what ``torch.autograd.Function``s do."""
    lines = None if torch.compiler.is_compiling() else _lines_of.get()
    return compute() if lines is None else lines.result(compute)


def _nothing(like: tuple) -> torch.Tensor:
    shape, dtype, device = like
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)
