"""``autoshard.verify``: the sharded model on processes of this machine, against the model as it is."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autoshard import compiler
from autoshard.capture import capture
from autoshard.checking.compare import tolerance_of
from autoshard.checking.local import Local
from autoshard.checking.precise import precise
from autoshard.checking.report import Report
from autoshard.checking.separate import Separate
from autoshard.checking.trial import Build, Trial
from autoshard.errors import RunError
from autoshard.mesh import Mesh
from autoshard.planning.plan import Plan
from autoshard.precision import dtype_of
from autoshard.runtime.world import open_world
from autoshard.target import load_target
from autoshard.torch_private import pytree

BACKENDS = {"processes": Separate, "local": Local}
TIMEOUT = 120.0
"""Seconds that a verification may take. Ranks that only wait for each other are found within 15 s."""


def verify(
    model_fn: Callable | nn.Module | str,
    mesh: Any,
    example_inputs: Any = None,
    *,
    steps: int = 3,
    dtype: torch.dtype | None = None,
    precision: str | None = None,
    seed: int = 0,
    loss_fn: Callable | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    plan: Plan | None = None,
    random: str | None = None,
    timeout: float = TIMEOUT,
    backend: str = "processes",
    **options: Any,
) -> Report:
    """Train a few steps on ``mesh.size`` ranks on this machine and compare with one device.

    Compared are the loss of every step on every rank, every output of the first step on every rank, all gathered gradients of every
    step, parameters and buffers after every step of AdamW, the copies that ranks hold of one tensor, and the collectives that ranks
    start. What equal means, and what Adam does to rounding, is said in ``autoshard.checking.compare``.

    Args:
        model_fn: takes nothing and returns a model, or ``(model, example_inputs)``; or a model; or the text of a target, ``"file.py:fn"``.
        mesh: (data, tensor, pipeline).
        example_inputs: the global batch, or a function that returns one, called anew for every step.
        dtype: what to turn the model and floating point inputs into; None leaves them. In float64 the model's own casts to float32 are
            taken as float64 too, so that nothing is compared in float32.
        precision: as for ``autoshard.plan``; by default that of the plan. One device then trains ``model.to(torch.bfloat16)`` with AdamW on
            fp32 copies of the parameters, in fp16 with a ``torch.amp.GradScaler``.
        seed: random numbers start from it when the model is made, and from ``seed + step`` before each step.
        loss_fn, batch_dims: as for ``compile``.
        plan: the plan to run; by default one is made.
        random: as for ``autoshard.plan``; by default that of the plan. "native" masks of a mesh are not those of one device.
        timeout: seconds until everything is ended and an error raised.
        backend: "processes" (gloo, one thread each), as on a cluster; or "local", all ranks in lockstep inside this process: the same
            programs and comparisons in a fraction of the time, but no process group, and a plain schedule in place of the pipeline's.
        options: for ``autoshard.plan``: cluster, memory, microbatches, pin, zero, recompute.

    Raises:
        AutoshardError: the model can't be planned, or a rank failed (the error says which, and where); all processes have ended by then.
    """
    common = {"steps": steps, "dtype": dtype, "seed": seed, "loss_fn": loss_fn, "batch_dims": batch_dims, "timeout": timeout}
    common["random"] = random or (plan.random if plan is not None else "invariant")
    precision = precision or (plan.precision if plan else "fp32")
    with Reference(model_fn, example_inputs, backend=backend, precision=precision, **common) as reference:
        return reference.verify(mesh, plan=plan, **options)


class Reference:
    """The run on one device that sharded runs are compared with: made once, for any number of meshes.

    >>> with Reference(model_fn, batch) as reference:
    ...     reports = [reference.verify(mesh) for mesh in ((2, 1, 1), (1, 2, 1))]

    The arguments are those of ``verify``.
    """

    def __init__(
        self,
        model_fn,
        example_inputs=None,
        *,
        steps=3,
        dtype=None,
        precision="fp32",
        seed=0,
        loss_fn=None,
        batch_dims=None,
        random="invariant",
        timeout=TIMEOUT,
        backend="processes",
    ):
        if steps < 1:
            raise RunError(f"steps is {steps}; it must be at least 1")
        if backend not in BACKENDS:
            raise RunError(f"backend can't be {backend!r}", hint=f"it is one of {', '.join(BACKENDS)}")
        low = dtype_of(precision)
        if low is not None and dtype == torch.float64:
            raise RunError(f"precision {precision} can't be compared in fp64", hint="leave --dtype out")
        self.common, self.backend, self.precision = {"loss_fn": loss_fn, "batch_dims": batch_dims}, backend, precision
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, example_inputs = _make(model_fn, example_inputs)
            batches = tuple(example_inputs() if callable(example_inputs) else example_inputs for _ in range(steps))
        if dtype is not None:
            model = precise(model.to(dtype)) if dtype == torch.float64 else model.to(dtype)
            batches = tuple(pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, b) for b in batches)
        self.dtype = low or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
        self.trial = Trial(model, batches, loss_fn, seed, tolerance_of(self.dtype), precision, random)
        self._backend = BACKENDS[backend](self.trial, timeout)

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_) -> None:
        self._backend.close()

    def verify(self, mesh: Any, *, plan: Plan | None = None, build: Build | None = None, **options: Any) -> Report:
        """Compare with a run on ``mesh``.

        Args:
            plan, options: as for ``autoshard.verify``.
            build: ``build(model, batch)``, called on every rank, makes the sharded module; by default ``autoshard.compile`` with the plan.
        """
        mesh, start = Mesh.wanted(mesh), time.monotonic()
        model, steps = self.trial.model, len(self.trial.batches)
        if build is None:
            given = {"precision": self.precision, "random": self.trial.random, **self.common}
            plan = plan or compiler.plan(model, mesh, self.trial.batches[0], **given, **options)
            if plan.random != self.trial.random:
                raise RunError(f"the plan is for random={plan.random!r}, not {self.trial.random!r}", hint="leave random= out, or the plan")
            mesh = plan.mesh
            build = self._build(mesh, plan)
        report = Report(mesh, type(model).__name__, str(self.dtype).removeprefix("torch."), steps, backend=self.backend)
        report.parameters = sum(p.numel() for p in model.parameters())
        if plan is not None:
            report.microbatches, report.split = plan.microbatches, plan.split_flops
        planned = time.monotonic()
        found = self._backend.compare(mesh, build)
        report.mismatch, report.rows, report.excused = found.mismatch, found.rows, found.excused
        report.collectives, report.random = found.collectives, self.trial.random if found.random else ""
        report.seconds = {"planning": planned - start, "running": found.running, "comparing": found.comparing}
        return report

    def _build(self, mesh: Mesh, plan: Plan) -> Build:
        if self.backend != "local":
            return lambda model, batch: compiler.compile(model, mesh, batch, plan=plan, **self.common)
        # ranks of one process need the model to be traced once only
        model, batch = self.trial.model, self.trial.batches[0]
        prepared = compiler.Prepared.of(capture(model, batch, precision=plan.precision, **self.common), plan, mesh, batch)
        return lambda model, batch: prepared.sharded(model, open_world(mesh))


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
