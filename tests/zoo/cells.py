"""One model on one mesh: planned, emitted, run and compared with one device."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

import autoshard
from autoshard.checking.processes import ProcessError
from autoshard.errors import AutoshardError
from autoshard.planning.plan import Plan
from autoshard.rules import RuleWarning
from autoshard.verifier import Reference

from . import make

AXES = ("data", "tensor", "pipeline")
MESHES = ("2,1,1", "1,2,1", "1,1,2", "2,2,2")


@dataclass
class Cell:
    """What became of a model on a mesh.

    kind: "EQ", or "ERR" for an error of autoshard's own that says why not. Anything else is a mistake of autoshard: "BUG".
    error: the largest one of all comparisons. text: of an error.
    split: share of the matmul FLOPs that each axis divides, by axis, for axes of more than one rank (see ``shares``).
    """

    model: str
    mesh: str
    kind: str
    error: float = 0.0
    split: dict[str, float] = field(default_factory=dict)
    microbatches: int = 1
    text: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.kind != "EQ":
            return f"{self.kind} {self.text}"
        shares = "/".join(f"{100 * self.split[axis]:.0f}" if axis in self.split else "-" for axis in AXES)
        return f"EQ {self.error:.0e} {shares} %" + (f" m={self.microbatches}" if self.microbatches > 1 else "")


def shares(plan: Plan) -> dict[str, float]:
    """Share of the matmul FLOPs that each axis of more than one rank divides.

    Of the pipeline: what the busiest rank does not do, as a share of what it would not do if all p did 1/p.
    """
    found = {axis: share for axis, share in plan.split_flops.items() if getattr(plan.mesh, axis) > 1}
    ranks = plan.mesh.pipeline
    if ranks > 1:
        flops, place = [0.0] * ranks, {row.index: row.rank for row in plan.stage_rows}
        for op in plan.ops:
            flops[place[op.stage]] += op.flops
        found["pipeline"] = (1 - max(flops) / sum(flops)) / (1 - 1 / ranks)
    return found


def run(model: str, meshes=MESHES, backend: str = "local", dtype: torch.dtype | None = None, steps: int = 2) -> Iterator[Cell]:
    """The cells of a model's row, one by one."""
    try:
        reference = Reference(lambda: make(model), steps=steps, backend=backend, dtype=dtype)
    except Exception as error:
        yield from (_failed(model, mesh, error) for mesh in meshes)
        return
    with reference:
        for mesh in meshes:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuleWarning)
                    plan = autoshard.plan(reference.trial.model, mesh, reference.trial.batches[0])
                    report = reference.verify(mesh, plan=plan)
            except Exception as error:
                yield _failed(model, mesh, error)
                continue
            if report.equal:
                cell = Cell(model, mesh, "EQ", max(row.error for row in report.rows), shares(plan), report.microbatches)
            else:
                worst = report.mismatch or f"{report.worst.kind} {report.worst.where()} is off by {report.worst.error:.0e}"
                cell = Cell(model, mesh, "BUG", split=shares(plan), microbatches=report.microbatches, text=worst)
            cell.seconds = sum(report.seconds.values())
            yield cell


def _failed(model: str, mesh: str, error: Exception) -> Cell:
    known = isinstance(error, AutoshardError) and not isinstance(error, ProcessError)
    text = str(error) if known else "".join(traceback.format_exception(error, limit=-8))
    return Cell(model, mesh, "ERR" if known else "BUG", text=text)


def support(rows: dict[str, list[Cell]]) -> list[str]:
    """Lines of Markdown: models that fare alike share one."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for model, cells in rows.items():
        alike.setdefault(tuple(map(status, cells)), []).append(model)
    meshes = [cell.mesh for cell in next(iter(rows.values()))]
    lines = [f"| models | {' | '.join(meshes)} |", "| --- |" + " --- |" * len(meshes)]
    return lines + [f"| {', '.join(models)} | {' | '.join(cells)} |" for cells, models in alike.items()]


def status(cell: Cell) -> str:
    if cell.kind != "EQ":
        return cell.text.splitlines()[0]
    return "equal" if cell.microbatches > 1 or not cell.mesh.endswith(",2") else "equal (1 micro-batch)"
