"""Forked processes that can't outlive, or silently hang, the one that started them.

A fork starts in milliseconds, shares the model with its parent, and can run any function, closures included. It is sound because a
process here uses one thread: the thread pools of the parent do not exist in a fork. A parent that has run backward on a machine with
a GPU can't fork workers that run it too; torch says so when it happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoshard.errors import AutoshardError, RunError

POLL = 0.02  # seconds between looks at the processes
WATCH = 0.5  # seconds between looks at their logs
GRACE = 2.0  # seconds that other processes get to tell their own errors once one has failed
IDLE = 15.0  # seconds without any processor time spent, after which processes that wait on each other are taken to wait for ever
IDLE_SHARE = 0.004  # of a processor: what processes use that only wait
_ECHO = re.compile(r"Connection (closed|reset)|connection was|Broken pipe|Socket closed|Timed out waiting|gloo", re.IGNORECASE)


class ProcessError(RunError):
    """A process raised something that is not an AutoshardError, died, or ran too long. ``traceback`` is its own text, if it has one."""

    def __init__(self, what: str, traceback: str = "", hint: str | None = None):
        super().__init__(f"{what}\n{traceback.rstrip()}" if traceback else what, hint=hint)
        self.traceback = traceback


@dataclass
class Failure:
    """How a process failed; ``error`` is set if it was an AutoshardError."""

    time: float
    stage: str
    text: str
    traceback: str
    error: AutoshardError | None

    @classmethod
    def of(cls, error: BaseException, status: Status) -> Failure:
        text = "".join(traceback.format_exception_only(error)).strip()
        whole = "".join(traceback.format_exception(error))
        return cls(time.monotonic(), status.stage, text, whole, error if isinstance(error, AutoshardError) else None)


class Status:
    """What a process is doing, kept in a file where its parent can read it, if it has one."""

    def __init__(self, path: Path | None):
        self._path = path
        self.stage = "start"

    def __call__(self, stage: str) -> None:
        self.stage = stage
        if self._path:
            self._path.write_text(stage)


class Process:
    """A forked process that runs ``body(status)`` on one thread; its output goes to a file, its result or its failure to another."""

    def __init__(self, label: str, body: Callable[[Status], Any], folder: Path):
        if not hasattr(os, "fork"):
            raise RunError("verify needs a system that can fork processes (Linux or macOS)")
        self.label = label
        self._files = {kind: folder / f"{label.replace(' ', '_')}.{kind}" for kind in ("log", "result", "failure", "stage", "stack")}
        self._exit: int | None = None
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # python >= 3.12 warns of forks beside threads: see the module's text
            self.pid = os.fork()
        if self.pid == 0:
            self._child(body, parent)

    def _child(self, body: Callable[[Status], Any], parent: int) -> None:
        status, code = Status(self._files["stage"]), 1
        try:
            _die_with(parent)
            log = open(self._files["log"], "w", buffering=1)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.stdout = sys.stderr = log
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            faulthandler.enable(log)  # a crash is told in the log, not in the parent's output
            faulthandler.register(signal.SIGUSR1, file=open(self._files["stack"], "w"), all_threads=False)
            torch.set_num_threads(1)
            _write(self._files["result"], body(status))
            code = 0
        except BaseException as error:
            _write(self._files["failure"], Failure.of(error, status))
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(code)  # nothing of the parent's runs here: no exit handlers, no test framework

    @property
    def alive(self) -> bool:
        if self._exit is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._exit = os.waitstatus_to_exitcode(status)
        return self._exit is None

    def kill(self) -> None:
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)
            self._exit = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def failure(self) -> Failure | None:
        """How it failed, if it has ended so."""
        if self.alive or self._exit == 0:
            return None
        if self._files["failure"].exists():
            return pickle.loads(self._files["failure"].read_bytes())
        died = f"was ended by signal {-self._exit}" if self._exit < 0 else f"exited with status {self._exit}"
        log = self._files["log"].read_text().splitlines() if self._files["log"].exists() else []
        crash = next((i for i, line in enumerate(log) if line.startswith("Fatal Python error")), len(log))
        return Failure(time.monotonic(), self.stage, "\n".join([died, *log[max(0, crash - 5) : crash + 10]]), "", None)

    @property
    def result(self) -> Any:
        return pickle.loads(self._files["result"].read_bytes())

    @property
    def stage(self) -> str:
        return self._files["stage"].read_text() if self._files["stage"].exists() else "start"

    def stack(self) -> str:
        """Where it is now, innermost call first."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.1)
        return self._files["stack"].read_text() if self._files["stack"].exists() else ""


def wait_for(processes: list[Process], timeout: float, watch: Callable[[], Any] | None = None) -> Any:
    """Wait until all have ended well and return None; whatever happens, none is left alive.

    Args:
        timeout: seconds from now.
        watch: called every half second, and once something is wrong; if it returns something, that ends the wait and is returned.

    Raises:
        AutoshardError: of the class that a process raised; its text is preceded by which process and what it was doing.
        ProcessError: a process raised something else or died, time is up, or all wait for each other.
    """
    deadline = time.monotonic() + timeout
    next_look, idle = 0.0, _Idle()
    try:
        while any([p.alive for p in processes]):
            if any(p.failure for p in processes):
                break
            now = time.monotonic()
            if now >= next_look:
                next_look = now + WATCH
                found = watch() if watch else None
                if found is not None:
                    return found
                if now > deadline or idle.for_good([p.pid for p in processes if p.alive]):
                    raise _stuck([p for p in processes if p.alive], timeout if now > deadline else None)
            time.sleep(POLL)
        found = watch() if watch else None
        if found is not None:
            return found
        if any(p.failure for p in processes):
            grace = time.monotonic() + GRACE
            while any(p.alive for p in processes) and time.monotonic() < grace:
                time.sleep(POLL)
            raise first_failure({p.label: p.failure for p in processes if not p.alive and p.failure})
        return None
    finally:
        for process in processes:
            process.kill()


def first_failure(failures: dict[str, Failure]) -> AutoshardError:
    """The failure that came first; those that only tell of a lost peer come last."""
    label, failure = min(failures.items(), key=lambda item: (bool(_ECHO.search(item[1].text)), item[1].time))
    who = f"{label} failed in {failure.stage}"
    error = failure.error
    if error is None:
        return ProcessError(f"{who}: {failure.text}", failure.traceback)
    error.args = (f"{who}: {error}",)
    return error


def _stuck(alive: list[Process], timeout: float | None) -> ProcessError:
    names = ", ".join(f"{p.label} in {p.stage}" for p in alive)
    stacks = "\n".join(f"{p.label}:\n" + "\n".join(p.stack().splitlines()[1:9]) for p in alive[:4])
    if timeout is None:
        return ProcessError(f"all that still run wait for each other: {names}", stacks)
    return ProcessError(f"still running after {timeout:g} s: {names}", stacks, hint="give verify a longer timeout= if the model is large")


class _Idle:
    """Whether processes have used no processor time for so long that they must be waiting for each other."""

    def __init__(self):
        self.since: float | None = None
        self.used = 0.0

    def for_good(self, pids: list[int]) -> bool:
        now, used = time.monotonic(), _cpu_seconds(pids)
        if used is None:
            return False
        if self.since is None or used - self.used > IDLE * IDLE_SHARE * max(1, len(pids)) or used < self.used:
            self.since, self.used = now, used
        return now - self.since > IDLE


def _cpu_seconds(pids: list[int]) -> float | None:
    """Processor time the processes have used; None where the system does not tell."""
    total = 0.0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            return None
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _die_with(parent: int) -> None:
    """Have the system end this process when its parent ends, where it can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _write(path: Path, value: Any) -> None:
    try:
        data = pickle.dumps(value)
    except Exception:  # an error with fields that can't be pickled: its texts are enough
        value.error = None
        data = pickle.dumps(value)
    temporary = path.with_suffix(".part")
    temporary.write_bytes(data)
    temporary.rename(path)
