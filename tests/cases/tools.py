"""How a case is checked: against one device (``equal``), or for the error that it must raise (``refused``)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import autoshard
from autoshard.capture import capture
from autoshard.checking.local import run_ranks
from autoshard.checking.lockstep import Lockstep
from autoshard.compiler import Prepared
from autoshard.errors import AutoshardError
from autoshard.mesh import SHARDED_AXES, Mesh
from autoshard.planning.plan import Plan
from autoshard.runtime import Sharded

BACKEND = {"backend": "local"}
"""Options of ``autoshard.verify`` that say where ranks run."""


def doubled(batch: Any, dtype: torch.dtype | None) -> Any:
    """The batch with its floating point tensors in ``dtype``."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if dtype and t.is_floating_point() else t, batch)


def prepared(model_fn: Callable, batch: Any, dtype: torch.dtype | None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = model_fn()
    return (model if dtype is None else model.to(dtype)), doubled(batch() if callable(batch) else batch, dtype)


def equal(
    model_fn: Callable[[], nn.Module],
    batch: Any,
    mesh: tuple,
    pin: dict | None = None,
    *,
    steps: int = 3,
    dtype: torch.dtype | None = torch.float64,
    loss_fn: Callable | None = None,
    batch_dims: dict | None = None,
    force: dict[str, dict[str, str]] | None = None,
    where: dict | None = None,
    **options: Any,
) -> Plan:
    """Assert that a model trains on ``mesh`` as on one device; returns the plan that ran.

    Args:
        batch: the global batch, or a function that makes one for each step.
        pin, options: for ``autoshard.plan``: what makes the case bite.
        force: what an axis does with all ops of a name, where a pin can't say it: ``{"cross_entropy_loss": {"tensor": "shard v"}}``.
        where: options of ``autoshard.verify`` in place of ``BACKEND``.
    """
    model, example = prepared(model_fn, batch, dtype)
    common = {"loss_fn": loss_fn, "batch_dims": batch_dims}
    plan = autoshard.plan(model, mesh, example, pin=pin, **common, **options)
    for op, axes in (force or {}).items():
        found = [choices for node, choices in plan.strategies.items() if re.fullmatch(rf"{op}(_\d+)?", node)]
        assert found, f"no {op} among {', '.join(plan.strategies)}"
        for choices in found:
            for axis, choice in axes.items():
                choices[SHARDED_AXES.index(axis)] = choice
    feed = (lambda: doubled(batch(), dtype)) if callable(batch) else example
    report = autoshard.verify(model, mesh, feed, steps=steps, plan=plan, **common, **(BACKEND if where is None else where))
    assert report.equal, report.text()
    return plan


def refused(
    model_fn: Callable[[], nn.Module],
    batch: Any,
    mesh: tuple,
    *parts: str,
    error: type[AutoshardError] = AutoshardError,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> str:
    """Assert that no plan is made, with an error that names all ``parts``; returns its text."""
    model, example = prepared(model_fn, batch, dtype)
    with pytest.raises(error) as caught:
        autoshard.plan(model, mesh, example, **options)
    text = str(caught.value)
    for part in parts:
        assert part in text, text
    return text


def choices_of(plan: Plan, op: str) -> list[list[str]]:
    """What the axes (data, tensor) do with every op of this name ("aten.linear")."""
    return [row.choices for row in plan.ops if row.op == op]


def tensor(placement: str, *names: str) -> dict[str, dict[str, str]]:
    """A pin of these names along the tensor axis."""
    return {name: {"tensor": placement} for name in names}


def data(placement: str, *names: str) -> dict[str, dict[str, str]]:
    """A pin of these names along the data axis."""
    return {name: {"data": placement} for name in names}


def on_ranks(
    model_fn: Callable[[], nn.Module],
    batch: Any,
    mesh: tuple,
    work: Callable[[Sharded, Any], Any],
    *,
    dtype: torch.dtype | None = torch.float64,
    loss_fn: Callable | None = None,
    **options: Any,
) -> list[Any]:
    """What ``work(sharded, batch)`` gives on every rank of a mesh; the ranks run in lockstep in this process."""
    model, example = prepared(model_fn, batch, dtype)
    mesh = Mesh.of(mesh)
    plan = autoshard.plan(model, mesh, example, loss_fn=loss_fn, **options)
    ready = Prepared.of(capture(model, example, loss_fn, precision=plan.precision), plan, mesh, example)
    lockstep = Lockstep(mesh.size)
    results = run_ranks(lockstep, mesh, lambda world: work(ready.sharded(model, world), example), 60)
    assert results is not None, lockstep.mismatch
    return results
