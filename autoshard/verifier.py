"""``autoshard.verify``: the sharded model on processes of this machine, against the model as it is."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from autoshard import compiler
from autoshard.checking.collectives import Log, first_mismatch
from autoshard.checking.compare import tolerance_of
from autoshard.checking.processes import Process, ProcessError, Status, wait_for
from autoshard.checking.report import Report
from autoshard.checking.trial import Trial, check, run_alone, run_rank, warm_up
from autoshard.errors import RunError
from autoshard.mesh import Mesh
from autoshard.planning.plan import Plan
from autoshard.target import load_target

Build = Callable[[nn.Module, Any], nn.Module]
TIMEOUT = 120.0
"""Seconds that a verification may take. Ranks that only wait for each other are found within 15 s."""


def verify(
    model_fn: Callable | nn.Module | str,
    mesh: Any,
    example_inputs: Any = None,
    *,
    steps: int = 3,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    loss_fn: Callable | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    plan: Plan | None = None,
    timeout: float = TIMEOUT,
    **options: Any,
) -> Report:
    """Train a few steps on ``mesh.size`` local processes (gloo, one thread each) and compare with one device.

    Compared are the loss of every step on every rank, every output of the first step on every rank, all gathered gradients of every
    step, parameters and buffers after every step of AdamW, the copies that ranks hold of one tensor, and the collectives that ranks
    start. What equal means, and what Adam does to rounding, is said in ``autoshard.checking.compare``.

    Args:
        model_fn: takes nothing and returns a model, or ``(model, example_inputs)``; or a model; or the text of a target, ``"file.py:fn"``.
        mesh: (data, tensor, pipeline).
        example_inputs: the global batch, or a function that returns one, called anew for every step.
        dtype: what to turn the model and floating point inputs into; None leaves them.
        seed: random numbers start from it when the model is made, and from ``seed + step`` before each step.
        loss_fn, batch_dims: as for ``compile``.
        plan: the plan to run; by default one is made.
        timeout: seconds until everything is ended and an error raised.
        options: for ``autoshard.plan``: cluster, memory, microbatches, pin.

    Raises:
        AutoshardError: the model can't be planned, or a rank failed (the error says which, and where); all processes have ended by then.
    """
    common = {"steps": steps, "dtype": dtype, "seed": seed, "loss_fn": loss_fn, "batch_dims": batch_dims, "timeout": timeout}
    with Reference(model_fn, example_inputs, **common) as reference:
        return reference.verify(mesh, plan=plan, **options)


class Reference:
    """The run on one device that sharded runs are compared with: made once, for any number of meshes.

    >>> with Reference(model_fn, batch) as reference:
    ...     reports = [reference.verify(mesh) for mesh in ((2, 1, 1), (1, 2, 1))]

    The arguments are those of ``verify``.
    """

    def __init__(self, model_fn, example_inputs=None, *, steps=3, dtype=None, seed=0, loss_fn=None, batch_dims=None, timeout=TIMEOUT):
        if steps < 1:
            raise RunError(f"steps is {steps}; it must be at least 1")
        if dist.is_available() and dist.is_initialized():
            what = "verify starts its own processes, and this one is already part of a process group"
            raise RunError(what, hint="run it in plain python, without torchrun")
        self.common, self.timeout = {"loss_fn": loss_fn, "batch_dims": batch_dims}, timeout
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, example_inputs = _make(model_fn, example_inputs)
            batches = tuple(example_inputs() if callable(example_inputs) else example_inputs for _ in range(steps))
        if dtype is not None:
            model = model.to(dtype)
            batches = tuple(pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, b) for b in batches)
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
        self.trial = Trial(model, batches, loss_fn, seed, tolerance_of(self.dtype))
        warm_up()
        self._stack = contextlib.ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="autoshard-verify-")))
        self._alone: dict | None = None
        self._process = Process("the one-device run", self._run_alone, self._folder)

    def _run_alone(self, status: Status) -> None:
        torch.save(run_alone(self.trial, status), self._folder / "alone.pt")

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._stack.close()

    def verify(self, mesh: Any, *, plan: Plan | None = None, build: Build | None = None, **options: Any) -> Report:
        """Compare with a run on ``mesh``.

        Args:
            plan, options: as for ``autoshard.verify``.
            build: ``build(model, batch)``, called on every rank, makes the sharded module; by default ``autoshard.compile`` with the plan.
        """
        mesh, start = Mesh.of(mesh), time.monotonic()
        model, steps = self.trial.model, len(self.trial.batches)
        if build is None:
            if plan is None:
                plan = compiler.plan(model, mesh, self.trial.batches[0], **self.common, **options)

            def build(model, batch):
                return compiler.compile(model, mesh, batch, plan=plan, **self.common)

        report = Report(mesh, type(model).__name__, str(self.dtype).removeprefix("torch."), steps)
        report.parameters = sum(p.numel() for p in model.parameters())
        if plan is not None:
            report.microbatches, report.split = plan.microbatches, plan.split_flops
        planned = time.monotonic()
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            folder = Path(name)
            work = partial(_work, self.trial, build, mesh, folder, self.timeout)
            ranks = [Process(_label(mesh, rank), partial(work, rank), folder) for rank in range(mesh.size)]
            logs = [Log(folder / f"rank{rank}.collectives") for rank in range(mesh.size)]

            def watch() -> str | None:
                return first_mismatch(logs) if any([log.refresh() for log in logs]) else None

            try:
                report.mismatch = wait_for(ranks, self.timeout, watch)
            except ProcessError:
                _ = self.alone  # a model that fails on one device as well is no fault of sharding: that error is the one to tell
                raise
            ran = time.monotonic()
            if report.mismatch is None:
                report.collectives = [rank.result for rank in ranks]
                report.random = self.alone["random"]
                checker = Process("the comparison", lambda status: check(self.trial, self.alone, mesh.size, folder, status), folder)
                wait_for([checker], self.timeout)
                report.rows, report.excused = checker.result
        report.seconds = {"planning": planned - start, "running": ran - planned, "comparing": time.monotonic() - ran}
        return report

    @property
    def alone(self) -> dict:
        """What ``run_alone`` gave; waits for it."""
        if self._alone is None:
            wait_for([self._process], self.timeout)
            self._alone = torch.load(self._folder / "alone.pt", weights_only=False)
        return self._alone


def _make(model_fn, example_inputs) -> tuple[nn.Module, Any]:
    if isinstance(model_fn, nn.Module):
        made = copy.deepcopy(model_fn)  # the user's stays as it is
    else:
        made = load_target(model_fn) if isinstance(model_fn, str) else model_fn()
    model, own = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise RunError(f"model_fn returned a {type(model).__name__}", hint="it must return a torch.nn.Module, or (module, example_inputs)")
    example_inputs = own if example_inputs is None else example_inputs
    if example_inputs is None:
        hint = "give a global batch, a function that returns one, or return (model, example_inputs) from model_fn"
        raise RunError("verify needs example_inputs", hint=hint)
    return model, example_inputs


def _label(mesh: Mesh, rank: int) -> str:
    data, tensor, pipeline = mesh.coords(rank)
    return f"rank {rank} (data {data}, tensor {tensor}, pipeline {pipeline})"


def _work(trial: Trial, build: Build, mesh: Mesh, folder: Path, timeout: float, rank: int, status: Status) -> int:
    status("joining the process group")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(mesh.size)}
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=mesh.size, timeout=limit)
    return run_rank(trial, build, rank, folder, status)
