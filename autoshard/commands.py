"""What each command of the command line does, once its flags are read. Each returns the exit status."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import nn

from autoshard.checking.one_device import loss_of
from autoshard.checking.processes import Process, wait_for
from autoshard.checking.trial import call
from autoshard.errors import AutoshardError, InfeasibleError, MeshError, PlanError, RunError
from autoshard.planning.plan import Plan
from autoshard.target import load_target

DONE, NO = 0, 1
LEARNING_RATE = 1e-3


def explain(arguments: Namespace, options: dict) -> int:
    """Print the plan."""
    from autoshard.report.explain import explain as sections
    from autoshard.report.tables import show

    if arguments.why is not None:
        return _why(arguments, options)
    if arguments.why_not:
        return _why_not(arguments, options)
    plan = _plan(arguments, options)[2]
    if arguments.format == "json":
        _print_json(plan.to_json())
    else:
        show(sections(plan, every=arguments.all))
    return DONE


def _why(arguments: Namespace, options: dict) -> int:
    """Print why something is placed as it is."""
    from autoshard import reasons
    from autoshard.advising import planned
    from autoshard.report.tables import show
    from autoshard.report.why import why as sections

    captured, title, traced, options = _captured(arguments, options)
    with _progress("planning"):
        plan = options.get("plan") or planned(captured, title, traced=traced, **options)
        answer = reasons.why(captured, plan, arguments.why, options.get("pin"))
    if arguments.format == "json":
        _print_json(answer.to_json())
    else:
        show(sections(answer, arguments.all))
    return DONE


def _why_not(arguments: Namespace, options: dict) -> int:
    """Print what a forced placement would make worse."""
    from autoshard.advising import planned
    from autoshard.planning.pins import pins_of
    from autoshard.report.tables import show
    from autoshard.report.why import not_fitting
    from autoshard.report.why import why_not as sections
    from autoshard.searching import wanted_of

    asked, other, refused = ", ".join(arguments.why_not), None, None
    captured, title, traced, options = _captured(arguments, options)
    with _progress("planning, without and with what is forced"):
        plan = planned(captured, title, traced=traced, **options)
        pins = {name: {**options.get("pin", {}).get(name, {}), **axes} for name, axes in arguments.forced.items()}
        forced = {**options, "microbatches": plan.microbatches, "pin": {**options.get("pin", {}), **pins}}
        mesh = forced.pop("mesh")
        wanted = wanted_of(captured, title, **forced)
        try:
            other = wanted.best(mesh)
        except InfeasibleError as error:
            refused = error
    if arguments.format == "json":
        _print_json({"plan": plan.to_json(), "forced": other and other.to_json(), "refused": refused and refused.what})
    elif other:
        show(sections(asked, plan, other))
    else:
        layers = max(len(wanted.cuts.like(node)) for node in pins_of(wanted.program, arguments.forced))
        show(not_fitting(asked, plan, layers, refused))
    return DONE if other else NO


def compare(arguments: Namespace, options: dict) -> int:
    """Print the plans of other frameworks beside ours; 1 if ours does not fit."""
    from autoshard import comparing
    from autoshard.report.compare import compare as sections
    from autoshard.report.tables import show

    captured, title, _, options = _captured(arguments, options)
    with _progress("planning") as status:
        comparison = comparing.compare(captured, title, progress=status.update if status else lambda text: None, **options)
    if arguments.format == "json":
        _print_json(comparison.to_json())
    else:
        show(sections(comparison))
    return DONE if comparison.ours.fits else NO


def diff(arguments: Namespace, options: dict) -> int:
    """Print how two plans differ; 1 if they do."""
    from autoshard.report import diff as report
    from autoshard.report.tables import show

    before, after = Plan.load(arguments.before), Plan.load(arguments.after)
    equal = report.same(before, after)
    if arguments.format == "json":
        _print_json({"same": equal, **report.to_json(before, after)})
    else:
        show(report.diff(before, after))
    return DONE if equal else NO


def verify(arguments: Namespace, options: dict) -> int:
    """Print whether the sharded run equals one device's; 1 if it does not."""
    from autoshard import verifier

    options = _with_plan(options)
    dtype = {"fp32": torch.float32, "fp64": torch.float64}[arguments.dtype]
    with _progress("running on a mesh of this machine and on one device"):
        options |= {"steps": arguments.steps, "dtype": dtype, "seed": arguments.seed, "backend": arguments.backend}
        report = verifier.verify(arguments.target, **options)
    if arguments.format == "json":
        _print_json(report.to_json())
    else:
        print(report.text())
    return DONE if report.equal else NO


def emit(arguments: Namespace, options: dict) -> int:
    """Write every rank's module into a folder, and print their paths."""
    from autoshard import compiler

    model, inputs, plan = _plan(arguments, options)
    folder = Path(arguments.output)
    with _progress("writing the program of each rank"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files = [str(path) for path in compiler.emit_folder(model, plan.mesh, inputs, plan, folder)]
        except OSError as error:
            raise AutoshardError(f"can't write to {str(folder)!r}: {error.strerror}", hint="choose another --output") from None
    if arguments.format == "json":
        _print_json({"folder": str(folder), "files": files})
    else:
        print("\n".join(files))
        print(f"run it: torchrun --nproc-per-node {plan.mesh.size} -m autoshard.runtime.launch {folder}")
    return DONE


def run(arguments: Namespace, options: dict) -> int:
    """Train on the example batch for some steps, and print the losses and the speed."""
    torch.manual_seed(arguments.seed)  # under torchrun every rank must build the same model
    if "WORLD_SIZE" in os.environ:  # this is one of torchrun's processes
        model, inputs = load_target(arguments.target)
        first = os.environ.get("RANK", "0") == "0"
        result = _train(model, inputs, _with_plan(options), arguments.steps, sys.stderr if first else None)
        if not first:
            return DONE
    else:
        model, inputs, plan = _plan(arguments, options)
        if arguments.nproc not in (None, plan.mesh.size):
            raise MeshError(f"mesh {plan.mesh} has {plan.mesh.size} ranks, but --nproc is {arguments.nproc}", hint="leave --nproc out")
        result = _train_locally(model, inputs, plan, arguments.steps)
    if arguments.format == "json":
        _print_json(result)
    else:
        losses = result["losses"]
        print(f"loss {losses[0]:.6g} -> {losses[-1]:.6g} in {len(losses)} steps of AdamW on one batch")
        print(f"{result['samples_per_second']:.4g} samples/s measured on {result['ranks']} ranks (without the first step)")
    return DONE


def profile(arguments: Namespace, options: dict) -> int:
    """Measure this machine, and write a file that --cluster reads."""
    from autoshard import profiling

    torch.set_num_threads(1)
    cluster = profiling.profile(arguments.processes, sys.stderr)
    try:
        Path(arguments.output).write_text(cluster.to_toml())
    except OSError as error:
        raise AutoshardError(f"can't write to {arguments.output!r}: {error.strerror}", hint="choose another --output") from None
    device = cluster.device
    print(f"{arguments.output}: {cluster.name}, {cluster.node_size} processes on {cluster.cores:.3g} processors")
    rates = ", ".join(f"{dtype} {peak / 1e9:.3g}" for dtype, peak in device.peak.items())
    print(f"a process alone: GFLOP/s {rates}; {device.bandwidth / 1e9:.3g} GB/s of memory; {device.launch * 1e6:.3g} us to start an op")
    for ranks in sorted({fit.ranks for fit in cluster.fits}):
        fits = [fit for fit in cluster.fits if fit.ranks == ranks]
        rates = ", ".join(f"{fit.kind} {fit.latency * 1e3:.2g} ms + bytes / {fit.bandwidth / 1e9:.2g} GB/s" for fit in fits)
        print(f"{ranks} processes: {rates}")
    print(f"plan for it: autoshard explain TARGET --mesh D,T,P --cluster {arguments.output}")
    return DONE


def _train_locally(model: nn.Module, inputs: dict | tuple, plan: Plan, steps: int) -> dict:
    """``_train`` on as many processes of this machine as the mesh has ranks; what rank 0 returns."""
    n = plan.mesh.size
    with tempfile.TemporaryDirectory() as folder, os.fdopen(os.dup(2), "w") as progress:  # the processes' own stderr goes to files

        def body(rank: int):
            def rank_body(status) -> dict:
                dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n)
                status("training")
                return _train(model, inputs, {"mesh": plan.mesh, "plan": plan}, steps, progress if rank == 0 else None)

            return rank_body

        ranks = [Process(f"rank {rank}", body(rank), Path(folder)) for rank in range(n)]
        wait_for(ranks, timeout=math.inf)
        return ranks[0].result


def _train(model: nn.Module, inputs: dict | tuple, options: dict, steps: int, progress: TextIO | None) -> dict:
    """One rank's part of ``run``: the losses of all steps, and samples a second after the first step. A line a step to ``progress``."""
    from autoshard import compiler

    sharded = compiler.compile(model, example_inputs=inputs, **options)
    optimizer = sharded.optimizer(torch.optim.AdamW, lr=LEARNING_RATE)
    losses, start = [], time.perf_counter()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = loss_of(call(sharded, inputs), has_loss_fn=False)
        if loss is None:
            raise RunError("the model returns no scalar loss, so there is nothing to train", hint="return a loss from forward")
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if progress:
            print(f"step {step}/{steps}: loss {losses[-1]:.6g}", file=progress, flush=True)
        if step == 1 < steps:
            start = time.perf_counter()
    speed = sharded.plan.samples * max(1, steps - 1) / (time.perf_counter() - start)
    return {"losses": losses, "samples_per_second": speed, "ranks": sharded.plan.mesh.size}


def _plan(arguments: Namespace, options: dict):
    """(model, example inputs, plan): the plan of --plan, checked against the model, or a new one."""
    options = _with_plan(options)
    from autoshard import compiler

    with _progress(f"loading {arguments.target}"):
        model, inputs = load_target(arguments.target)
    with _progress("tracing and planning"):
        if "plan" in options:
            _check_belongs(options["plan"], model, inputs)
            return model, inputs, options["plan"]
        return model, inputs, compiler.plan(model, example_inputs=inputs, **options)


def _captured(arguments: Namespace, options: dict):
    """(captured model, its name, how to capture it in a precision, options without the one that it has now): for those that plan several
    times."""
    from autoshard.capture import capture

    options = _with_plan(options)
    with _progress(f"loading {arguments.target}"):
        model, inputs = load_target(arguments.target)
    if "plan" in options:
        _check_belongs(options["plan"], model, inputs)
    with _progress("tracing"):
        precision = options["plan"].precision if "plan" in options else options.pop("precision", "fp32")
        traced = partial(capture, model, inputs, None, None)
        return traced(precision), type(model).__name__, traced, options


def _check_belongs(plan: Plan, model: nn.Module, inputs: dict | tuple) -> None:
    """Raise PlanError if the plan was made for another model or another batch."""
    from autoshard import passes
    from autoshard.capture import capture
    from autoshard.predict import fingerprint

    if fingerprint(passes.run("canonicalize", capture(model, inputs, precision=plan.precision).program)) != plan.fingerprint:
        raise PlanError(
            f"the plan was made for another {plan.model or 'model'}, batch or version", hint="leave --plan out to make a new one"
        )


def _with_plan(options: dict) -> dict:
    """Replace the file of --plan by the plan, and take the mesh from it."""
    if "plan" not in options:
        return options
    plan = Plan.load(options["plan"])
    mesh = options.get("mesh", plan.mesh)
    if not plan.mesh.answers(mesh):
        raise MeshError(f"the plan is for mesh {plan.mesh}, not for {mesh}", hint="leave --mesh out, or make a plan for this mesh")
    return {**options, "plan": plan, "mesh": plan.mesh}


@contextmanager
def _progress(text: str):
    """A spinner on stderr while something takes its time; where nothing fits it says what is looked at. None if stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    log = logging.getLogger("autoshard.plan.advice")
    with Console(stderr=True).status(text) as status:
        handler = _Shown(status.update)
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            yield status
        finally:
            log.removeHandler(handler)


class _Shown(logging.Handler):
    """Hands what is said to ``show``."""

    def __init__(self, show: Callable[[str], None]):
        super().__init__()
        self.show = show

    def emit(self, record: logging.LogRecord) -> None:
        self.show(record.getMessage())


def _print_json(data: dict) -> None:
    print(json.dumps(data, indent=1))
