"""The ranks as threads of this process, in lockstep: no sockets, no waiting, the same answer every time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from autoshard.checking.lockstep import LocalGroup, Lockstep
from autoshard.checking.processes import Failure, ProcessError, Status, first_failure
from autoshard.checking.trial import Build, Compared, Trial, check, label, run_alone, run_rank
from autoshard.errors import IdError
from autoshard.mesh import Mesh
from autoshard.runtime.axis import Axis
from autoshard.runtime.feed import Feed
from autoshard.runtime.pipeline import Body, Leaves
from autoshard.runtime.stage import StageModule, Value
from autoshard.runtime.world import World, current_world
from autoshard.schedule import schedule_of


class Local:
    """Runs a trial in this process. ``timeout``: seconds for the ranks."""

    def __init__(self, trial: Trial, timeout: float):
        self.trial, self.timeout = trial, timeout
        self._alone: dict | None = None

    def close(self) -> None:
        """Nothing is held."""

    @property
    def alone(self) -> dict:
        """What ``run_alone`` gives."""
        if self._alone is None:
            with _undisturbed():
                self._alone = _told("the one-device run", partial(run_alone, self.trial))
        return self._alone

    def compare(self, mesh: Mesh, build: Build) -> Compared:
        """Run on ``mesh`` and compare with one device. ``build`` is called on every rank's thread, where ``open_world`` gives its World."""
        start, done, results = time.monotonic(), Compared(), None
        lockstep = Lockstep(mesh.size)
        with _undisturbed():
            try:
                results = run_ranks(lockstep, mesh, partial(_rank, self.trial, build, lockstep), self.timeout)
            except (ProcessError, IdError):
                _ = self.alone  # a model that fails on one device as well is no fault of sharding: that error is the one to tell
                raise
        done.mismatch, done.running = lockstep.mismatch, time.monotonic() - start
        if results is not None:
            done.collectives = [per_step for _, per_step in results]
            alone = self.alone
            done.random = alone["random"]
            with _undisturbed():
                by_rank = [result for result, _ in results]
                done.rows, done.excused = _told("the comparison", partial(check, self.trial, alone, mesh.size, by_rank.__getitem__))
        done.comparing = time.monotonic() - start - done.running
        return done


def _rank(trial: Trial, build: Build, lockstep: Lockstep, world: World) -> tuple[dict, int]:
    rank = world.rank
    return run_rank(trial, build, rank, world.everyone, nullcontext(lockstep.logs[rank]), lockstep.statuses[rank])


def _told(who: str, body: Callable[[Status], Any]) -> Any:
    """``body(status)``; an error says who failed, and in what."""
    status = Status(None)
    try:
        return body(status)
    except Exception as error:
        raise first_failure({who: Failure.of(error, status)}) from error


@contextmanager
def _undisturbed():
    """Random numbers, and the number of threads, are afterwards what they were."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def run_ranks(lockstep: Lockstep, mesh: Mesh, work: Callable[[World], Any], timeout: float) -> list[Any] | None:
    """What ``work(world)`` gives on every rank of ``mesh``; None if their collectives do not match (``lockstep.mismatch`` says how).

    Raises:
        AutoshardError: a rank raised it; its text says which, and in what.
        ProcessError: a rank raised anything else, or time is up.
    """

    def body(rank: int):
        world = local_world(lockstep, mesh, rank)
        current_world.set(world)  # of this thread
        return work(world)

    results = lockstep.run([partial(body, rank) for rank in range(mesh.size)], timeout)
    if lockstep.failed:
        rank, error = lockstep.failed
        raise first_failure({label(mesh, rank): Failure.of(error, lockstep.statuses[rank])}) from error
    if results is None and lockstep.mismatch is None:
        where = ", ".join(f"{label(mesh, rank)} in {status.stage}" for rank, status in enumerate(lockstep.statuses))
        raise ProcessError(f"still running after {timeout:g} s: {where}", hint="give verify a longer timeout= if the model is large")
    return results


def local_world(lockstep: Lockstep, mesh: Mesh, rank: int) -> World:
    """The World of one rank of a ``Lockstep``."""
    data, tensor, stage = mesh.coords(rank)
    groups: dict[tuple[int, ...], LocalGroup] = {}  # one object for one set of ranks: it counts their collectives

    def group(*members: tuple[int, int, int]) -> LocalGroup | None:
        ranks = tuple(sorted(mesh.rank(*at) for at in members))  # as torch has them
        return groups.setdefault(ranks, LocalGroup(lockstep, ranks, rank)) if len(ranks) > 1 else None

    every_d, every_t, every_p = range(mesh.data), range(mesh.tensor), range(mesh.pipeline)
    return _LocalWorld(
        mesh,
        rank,
        torch.device("cpu"),
        Axis("data", mesh.data, data, group(*((d, tensor, stage) for d in every_d))),
        Axis("tensor", mesh.tensor, tensor, group(*((data, t, stage) for t in every_t))),
        everyone=group(*((d, t, p) for p in every_p for d in every_d for t in every_t)),
        pipeline=group(*((data, tensor, p) for p in every_p)),
        joint=group(*((d, t, stage) for d in every_d for t in every_t)),
        scheduler=LocalPipeline,
        new_group=lambda stages: group(*((data, tensor, p) for p in stages)),
    )


class _LocalWorld(World):
    def __init__(self, *args, new_group: Callable[[tuple[int, ...]], LocalGroup | None], **kwargs):
        super().__init__(*args, **kwargs)
        self._new_group = new_group

    def holders(self, stages: tuple[int, ...]) -> LocalGroup | None:
        return self._new_group(stages)


class LocalPipeline:
    """All forwards, stage after stage, then all backwards. Arguments and ``run`` as those of ``runtime.pipeline.Pipeline``."""

    def __init__(self, stage: StageModule, before_last: Callable[[], None]):
        self.stage, self.before_last = stage, before_last
        self.bodies = [Body(stage, part) for part in stage.chunks]
        self.group: LocalGroup = stage.world.pipeline
        self.schedule = schedule_of(stage.schedule)

    def run(self, feeds: Sequence[Feed], training: bool) -> list[Leaves] | None:
        for body in self.bodies:
            body.start(feeds)
        with torch.set_grad_enabled(training):
            ran = {body: [self._forward(body, i) for i in range(len(feeds))] for body in self.bodies}
            for body in reversed(self.bodies) if training else ():
                for i, (received, sent) in enumerate(ran.pop(body)):
                    if i == len(feeds) - 1 and len(self.bodies) == 1:
                        self.before_last()
                    self._backward(body, received, sent)
        results = [body.finish() for body in self.bodies]
        return next((leaves for leaves in results if leaves is not None), None)

    def _forward(self, body: Body, microbatch: int):
        stage, receives = body.part.stage, body.part.receives
        received = [self._receive(value, stage - 1).requires_grad_(value.requires_grad) for value in receives]
        out = body(*received, microbatch=torch.tensor(microbatch))
        if not body.last:
            for x in out:
                self._send(x, stage + 1)
        return received, out if isinstance(out, tuple) else (out,)

    def _backward(self, body: Body, received: list[torch.Tensor], sent: tuple[torch.Tensor, ...]) -> None:
        stage = body.part.stage
        if body.last:
            gradients = [None]
        else:
            gradients = [self._receive(value, stage + 1) if value.requires_grad else None for value in body.part.sends]
        pairs = [(x, gradient) for x, gradient in zip(sent, gradients) if x.requires_grad]
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])
        for x in received:
            if x.requires_grad:
                self._send(torch.zeros_like(x) if x.grad is None else x.grad, stage - 1)

    def _send(self, x: torch.Tensor, stage: int) -> None:
        self.group.send([x], self.schedule.rank_of(stage, self.group.size()))

    def _receive(self, value: Value, stage: int) -> torch.Tensor:
        x = torch.empty(value.shape, dtype=value.dtype)
        self.group.recv([x], self.schedule.rank_of(stage, self.group.size()))
        return x
