"""The runs that are compared: an independent one on one device, the sharded one, and one device step by step beside the sharded one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoshard.checking.compare import Row, allowance, compare, compare_gradients, elements_over, tolerance_of
from autoshard.checking.one_device import LEARNING_RATE, Nearby, OneDevice, adamw, loss_of, lowest_dtype
from autoshard.checking.processes import Status
from autoshard.errors import RunError
from autoshard.mesh import Mesh
from autoshard.runtime.drawing import invariant_random
from autoshard.signature import leaf_name
from autoshard.torch_private import pytree

Build = Callable[[nn.Module, Any], nn.Module]
"""``build(model, batch)``, called on every rank, makes its sharded module."""


@dataclass
class Compared:
    """What a backend found: see ``Report`` for the fields. running, comparing: seconds."""

    mismatch: str | None = None
    rows: list[Row] = field(default_factory=list)
    excused: dict[str, int] = field(default_factory=dict)
    collectives: list[int] = field(default_factory=list)
    random: bool = False
    running: float = 0.0
    comparing: float = 0.0


def label(mesh: Mesh, rank: int) -> str:
    data, tensor, pipeline = mesh.coords(rank)
    return f"rank {rank} (data {data}, tensor {tensor}, pipeline {pipeline})"


@dataclass(frozen=True)
class Trial:
    """What is run: the model, one global batch a step, and how often random numbers start anew (``seed`` + step, before each step).

    precision: see ``autoshard.precision``; the model is in its own. random: see ``autoshard.plan``.
    """

    model: nn.Module
    batches: tuple
    loss_fn: Callable | None
    seed: int
    tolerance: float
    precision: str = "fp32"
    random: str = "native"

    def one_device(self) -> OneDevice:
        return OneDevice(self.model, self.loss_fn, self.precision)

    def drawing(self) -> AbstractContextManager:
        """What one device draws random numbers in: as a sharded program does, unless that draws natively."""
        return invariant_random() if self.random == "invariant" else nullcontext()

    def start_step(self, step: int) -> Any:
        """Seed the random numbers of step 1, 2, ... and return its batch, which may be written to."""
        torch.manual_seed(self.seed + step)
        return copy.deepcopy(self.batches[step - 1])


def call(module: nn.Module, batch: Any) -> Any:
    """The user's call of a sharded module."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, (tuple, list)) else module(batch)


def leaves_of(output: Any) -> dict[str, Any]:
    """The leaves of an output by dotted name; sharded ones are gathered (on every rank at once)."""
    leaves = {}
    for path, leaf in pytree.tree_flatten_with_path(output)[0]:
        whole = leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
        leaves[leaf_name(path) or "output"] = whole.detach().clone() if isinstance(whole, torch.Tensor) else whole
    return leaves


def warm_up() -> None:
    """Load what torch loads late, so that forked processes need not each do it: a second a process."""
    p = nn.Parameter(torch.ones(1))
    p.grad = torch.ones(1)
    adamw([p]).step()


def run_alone(trial: Trial, status: Status) -> dict:
    """Train on one device.

    Loss of every step, outputs of the first (and, of a model that computes in lower precision, of runs nearby, and that precision),
    parameters after the last, whether random numbers were drawn.
    """
    one, losses, leaves, nearby, low, random = trial.one_device(), [], {}, [], None, False
    for step in range(1, len(trial.batches) + 1):
        status(f"step {step} on one device")
        batch = trial.start_step(step)
        before = torch.get_rng_state()
        with trial.drawing():
            if step == 1:
                if low := lowest_dtype(one, trial.start_step(1)):
                    nearby = [leaves_of(output) for output in Nearby(one, low).outputs(lambda: trial.start_step(1))]
                torch.set_rng_state(before)
            output = one.run(batch)
            random = random or not torch.equal(before, torch.get_rng_state())
            if step == 1:
                leaves = leaves_of(output)
            loss = loss_of(output, trial.loss_fn is not None)
            if loss is None:
                break
            losses.append(loss.detach().clone())
            one.step(loss)
    parameters = {name: one.masters[name].detach() for name, _ in one.model.named_parameters()}
    return {"losses": losses, "leaves": leaves, "nearby": nearby, "low": low, "parameters": parameters, "random": random}


def run_rank(trial: Trial, build: Build, rank: int, everyone: dist.ProcessGroup | None, recorder, status: Status) -> tuple[dict, int]:
    """Train on one rank: what was computed, as ``check`` reads it, and the number of collectives of a step.

    Args:
        everyone: the group of all ranks; None if there is one.
        recorder: while it is entered, what it gives counts the collectives that this rank starts (``count``, ``end()``).
    """
    status("compile")
    sharded = build(trial.model, copy.deepcopy(trial.batches[0]))
    losses, leaves, gradients, scales, per_step = [], {}, [], [], 0
    with recorder as log:
        status("gathering parameters")
        final = _whole(sharded.state_dict())
        states = [final]
        parameters = list(sharded.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE) if parameters else None
        for step in range(1, len(trial.batches) + 1):
            batch, before = trial.start_step(step), log.count
            status(f"step {step} forward")
            output = call(sharded, batch)
            loss = loss_of(output, trial.loss_fn is not None)
            per_step = log.count - before
            if step == 1:
                status("step 1, gathering outputs")
                leaves = leaves_of(output)
            if loss is None:
                final = _whole(sharded.state_dict())  # forward may have changed buffers
                break
            losses.append(loss.detach().clone())
            status(f"step {step} backward")
            before = log.count
            loss.backward()
            per_step += log.count - before
            status(f"step {step}, gathering gradients")
            scales.append(getattr(sharded, "loss_scale", 1.0))
            gradients.append(_whole(sharded.grad_dict()))
            status(f"step {step} optimizer")
            if optimizer:
                optimizer.step()
                optimizer.zero_grad()
            status(f"step {step}, gathering parameters")
            final = _whole(sharded.state_dict())
            states.append(final)
        log.end()
    status("comparing copies")
    rows = _check_copies(sharded, final, len(losses), rank, everyone)
    whole = {"states": states, "gradients": gradients, "scales": scales} if rank == 0 else {}
    return {"losses": losses, "leaves": leaves, "copies": rows, **whole}, per_step


def _whole(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: t.detach().clone() if isinstance(t, torch.Tensor) else t for name, t in tensors.items()}


def _check_copies(sharded: nn.Module, states: dict[str, Any], step: int, rank: int, everyone: dist.ProcessGroup | None) -> list[Row]:
    """This rank's parameters and buffers against the whole tensors that rank 0 gathered: what several ranks hold
    must be equal to the bit, or it drifts apart."""
    rows = []
    held = {name: tensor.detach().cpu() for pairs in (sharded.named_parameters(), sharded.named_buffers()) for name, tensor in pairs}
    for name in sorted(states):
        whole = states[name].contiguous()
        if everyone is not None:
            dist.broadcast(whole, group_src=0, group=everyone)
        if name in held:
            rows.append(compare("copy", name, step, rank, held[name], sharded.piece_of(name, whole), 0.0))
    return rows


def check(
    trial: Trial, alone: dict, world: int, result_of: Callable[[int], dict], status: Status
) -> tuple[list[Row], dict[str, int]]:
    """Compare what each rank computed with one device. Returns rows, and by parameter the number of excused elements (see compare.py)."""
    rows: list[Row] = []
    low = alone["low"]
    tolerance = max(trial.tolerance, tolerance_of(low)) if low else trial.tolerance
    for rank in range(world):
        status(f"comparing rank {rank}")
        got = result_of(rank)
        for step, want in enumerate(alone["losses"], 1):
            rows.append(compare("loss", "", step, rank, got["losses"][step - 1] if step <= len(got["losses"]) else None, want, tolerance))
        rows += got["copies"]
        names = dict.fromkeys([*alone["leaves"], *got["leaves"]])
        for name in names:
            if name in got["leaves"] and name in alone["leaves"]:
                allowed = allowance(alone["leaves"][name], [leaves.get(name) for leaves in alone["nearby"]], tolerance)
                rows.append(compare("output", name, 1, rank, got["leaves"][name], alone["leaves"][name], allowed))
            else:
                note = "missing" if name in alone["leaves"] else "not an output of the model"
                rows.append(Row("output", name, 1, rank, torch.inf, tolerance, note))
    got = result_of(0)
    status("comparing steps")
    steps = _check_steps(trial, got["states"], got["gradients"], got["scales"], low)
    excused = {}
    if got["gradients"] and all(row.ok for row in steps):  # otherwise what differs is wrong, not excused
        excused = {name: elements_over(got["states"][-1][name], want, trial.tolerance) for name, want in alone["parameters"].items()}
    return rows + steps, {name: n for name, n in excused.items() if n}


def _check_steps(trial: Trial, states: list[dict], gradients: list[dict], scales: list[float], low: torch.dtype | None) -> list[Row]:
    """Every step again on one device, from the parameters that the sharded run had before it; see compare.py."""
    tolerance, one = max(trial.tolerance, tolerance_of(low)) if low else trial.tolerance, trial.one_device()
    start = one.state_dict()
    rows = [
        Row("parameter", name, 0, 0, torch.inf, 0.0, "missing from state_dict" if name in start else "unknown name in state_dict")
        for name in start.keys() ^ states[0].keys()
    ]
    if rows:
        return rows
    rows += [compare("parameter", name, 0, 0, states[0][name], start[name], 0.0) for name in start]
    if not all(row.ok for row in rows):
        return rows
    own = dict(one.model.named_parameters())
    parameters = {name: nn.Parameter(one.masters[name].detach().clone(), p.requires_grad) for name, p in own.items()}
    near = {name: trial.tolerance if one.masters[name] is p else tolerance_of(one.masters[name].dtype) for name, p in own.items()}
    optimizer, around = adamw(parameters.values()), Nearby(one, low) if low else None
    for step, (got, scale) in enumerate(zip(gradients, scales), 1):
        one.model.load_state_dict(states[step - 1])
        with trial.drawing():
            nearby = around.gradients(partial(trial.start_step, step), scale) if around else None
            want = one.gradients(trial.start_step(step), scale)
        if want is None:
            raise RunError("the model returned a loss once, and then none")
        skipped, skips = (scale != 1.0 and not _finite(found) for found in (got, want))
        if skipped != skips:
            note = f"{'overflowed' if skipped else 'did not overflow'} at a loss scale of {scale:g}, unlike on one device"
            rows.append(Row("gradient", "", step, 0, torch.inf, 0.0, note))
        elif not skipped:
            rows += compare_gradients(step, got, want, tolerance, nearby)
        for name, p in parameters.items():
            p.grad = None if skipped or got.get(name) is None else got[name].to(p.dtype)
        if optimizer:
            optimizer.step()
        rows += [compare("parameter", name, step, 0, states[step].get(name), p, near[name]) for name, p in parameters.items()]
        buffers = ((name, b) for name, b in one.model.named_buffers() if name in start)
        rows += [compare("buffer", name, step, 0, states[step].get(name), b, tolerance) for name, b in buffers]
    return rows


def _finite(gradients: Mapping[str, torch.Tensor | None]) -> bool:
    return all(bool(g.isfinite().all()) for g in gradients.values() if g is not None)
