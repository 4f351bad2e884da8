"""The ranks as processes of this machine: what a cluster runs, over gloo."""

from __future__ import annotations

import os
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from autoshard.checking.collectives import Log, Recorder, first_mismatch
from autoshard.checking.processes import Process, ProcessError, Status, wait_for
from autoshard.checking.trial import Build, Compared, Trial, check, label, run_alone, run_rank, warm_up
from autoshard.errors import IdError, RunError
from autoshard.mesh import Mesh


class Separate:
    """Runs a trial on processes. ``timeout``: seconds until everything is ended."""

    def __init__(self, trial: Trial, timeout: float):
        if dist.is_available() and dist.is_initialized():
            what = "verify starts its own processes, and this one is already part of a process group"
            raise RunError(what, hint="run it in plain python, without torchrun")
        self.trial, self.timeout = trial, timeout
        warm_up()
        self._temporary = tempfile.TemporaryDirectory(prefix="autoshard-verify-")
        self._folder = Path(self._temporary.name)
        self._alone: dict | None = None
        self._process = Process("the one-device run", self._run_alone, self._folder)

    def close(self) -> None:
        self._process.kill()
        self._temporary.cleanup()

    def _run_alone(self, status: Status) -> None:
        torch.save(run_alone(self.trial, status), self._folder / "alone.pt")

    @property
    def alone(self) -> dict:
        """What ``run_alone`` gave; waits for it."""
        if self._alone is None:
            wait_for([self._process], self.timeout)
            self._alone = torch.load(self._folder / "alone.pt", weights_only=False)
        return self._alone

    def compare(self, mesh: Mesh, build: Build) -> Compared:
        """Run on ``mesh`` and compare with one device."""
        start, done = time.monotonic(), Compared()
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            folder = Path(name)
            work = partial(_work, self.trial, build, mesh, folder, self.timeout)
            ranks = [Process(label(mesh, rank), partial(work, rank), folder) for rank in range(mesh.size)]
            logs = [Log(_log(folder, rank)) for rank in range(mesh.size)]

            def watch() -> str | None:
                return first_mismatch(logs) if any([log.refresh() for log in logs]) else None

            try:
                done.mismatch = wait_for(ranks, self.timeout, watch)
            except (ProcessError, IdError):
                _ = self.alone  # a model that fails on one device as well is no fault of sharding: that error is the one to tell
                raise
            done.running = time.monotonic() - start
            if done.mismatch is None:
                done.collectives = [rank.result for rank in ranks]
                done.random = self.alone["random"]
                checker = Process("the comparison", partial(self._check, mesh.size, folder), folder)
                wait_for([checker], self.timeout)
                done.rows, done.excused = checker.result
        done.comparing = time.monotonic() - start - done.running
        return done

    def _check(self, world: int, folder: Path, status: Status):
        return check(self.trial, self.alone, world, lambda rank: torch.load(_result(folder, rank), weights_only=False), status)


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.collectives"


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"


def _work(trial: Trial, build: Build, mesh: Mesh, folder: Path, timeout: float, rank: int, status: Status) -> int:
    """What one process does; returns its collectives a step."""
    status("joining the process group")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(mesh.size)}
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=mesh.size, timeout=limit)
    recorder = Recorder(_log(folder, rank), lambda: status.stage)
    result, per_step = run_rank(trial, build, rank, dist.group.WORLD, recorder, status)
    status("writing results")
    torch.save(result, _result(folder, rank))
    return per_step
