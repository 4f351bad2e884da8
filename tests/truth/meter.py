"""Measures the bytes of a process's live CPU tensors, kernels' own workspaces included, as the allocator sees them.

A CPU's allocator keeps no statistic, but tells torch's profiler of every allocation and release on the thread that is profiled. Gloo may
release what a collective worked on from a thread of its own: what was never seen to be released, and yet is gone in the end, is taken to
have gone when the next wait for a collective returned. Checked with torch 2.13, of which a private accessor of the profiler's raw events
is used.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

WAITED = "a collective is over"
PAUSE = 0.002  # seconds that gloo's thread gets to let go, so that most releases are seen


@dataclass
class Reading:
    """Bytes. peak: the most that were alive at once of those allocated while the meter ran. held: what was allocated before, and stays.

    largest: what made up the peak, as (bytes, the innermost calls within which they were allocated), largest first.
    """

    peak: int = 0
    held: int = 0
    largest: list[tuple[int, str]] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.held + self.peak


class _Change(NamedTuple):
    """An allocation (positive), a release (negative), or (0 bytes) the end of a wait."""

    time: int
    address: int
    nbytes: int = 0
    where: str = ""


def measure(work: Callable[[], object]) -> Reading:
    """Run ``work`` and read its peak. The release of what was allocated before is not seen."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as running, _marked_waits():
        work()
    changes = sorted(_changes(running.profiler.kineto_results.experimental_event_tree(), ()))
    return _replay(changes, _unseen(changes, _addresses()))


def _unseen(changes: list[_Change], there: set[int]) -> set[int]:
    """Numbers of the allocations whose release was not seen: what has their address now is another, or nothing in the end."""
    alive: dict[int, int] = {}
    unseen = set()
    for number, change in enumerate(changes):
        if change.nbytes > 0:
            unseen.update(alive[at] for at in (change.address,) if at in alive)
            alive[change.address] = number
        elif change.nbytes < 0:
            alive.pop(change.address, None)
    return unseen | {number for at, number in alive.items() if at not in there}


def _replay(changes: list[_Change], unseen: set[int]) -> Reading:
    """What the changes add up to, if those that were not seen to go go at the next end of a wait."""
    alive: dict[int, tuple[int, str]] = {}
    now, reading, snapshot, waiting = 0, Reading(), {}, []
    for number, change in enumerate(changes):
        if change.nbytes > 0:
            alive[change.address] = change.nbytes, change.where
            now += change.nbytes
            if number in unseen:
                waiting.append(change.address)
        elif change.nbytes < 0:
            now -= alive.pop(change.address, (0, ""))[0]
        else:
            now -= sum(alive.pop(at)[0] for at in waiting)
            waiting = []
        if now > reading.peak:
            reading.peak, snapshot = now, dict(alive)
    reading.largest = sorted(snapshot.values(), reverse=True)[:100]
    return reading


def _addresses() -> set[int]:
    """Where the storages of all tensors that Python knows begin."""
    found = set()
    for x in gc.get_objects():
        if type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu":
            found.update(t.untyped_storage().data_ptr() for t in (x, x.grad if x.is_leaf else None) if t is not None)
    return found


def _changes(events: Iterable, path: tuple[str, ...]) -> Iterator[_Change]:
    for event in events:
        fields = event.extra_fields
        if event.name == WAITED:
            yield _Change(event.end_time_ns, 0)
        elif hasattr(fields, "alloc_size"):
            yield _Change(event.start_time_ns, fields.ptr, fields.alloc_size, " / ".join(path[-4:]))
        yield from _changes(event.children, (*path, event.name))


@contextmanager
def _marked_waits() -> Iterator[None]:
    wait = dist.Work.wait

    def waited(work, *args):
        result = wait(work, *args)
        with record_function(WAITED):
            time.sleep(PAUSE)
        return result

    dist.Work.wait = waited
    try:
        yield
    finally:
        dist.Work.wait = wait
