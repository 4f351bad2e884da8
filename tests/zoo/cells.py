"""One model on one mesh: planned, emitted, run and compared with one device."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from autoshard.checking.processes import ProcessError
from autoshard.errors import AutoshardError
from autoshard.rules import RuleWarning
from autoshard.verifier import Reference

from . import make

MESHES = ("2,1,1", "1,2,1", "1,1,2", "2,2,2")


@dataclass
class Cell:
    """What became of a model on a mesh.

    kind: "EQ", or "ERR" for an error of autoshard's own that says why not. Anything else is a mistake of autoshard: "BUG".
    error: the largest one of all comparisons. split: share of the matmul FLOPs that each axis divides. text: of an error.
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
        shares = "/".join(f"{100 * self.split.get(axis, 0):.0f}" for axis in ("data", "tensor"))
        return f"EQ {self.error:.0e} {shares} %" + (f" m={self.microbatches}" if self.microbatches > 1 else "")


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
                    report = reference.verify(mesh)
            except Exception as error:
                yield _failed(model, mesh, error)
                continue
            if report.equal:
                cell = Cell(model, mesh, "EQ", max(row.error for row in report.rows), report.split, report.microbatches)
            else:
                worst = report.mismatch or f"{report.worst.kind} {report.worst.where()} is off by {report.worst.error:.0e}"
                cell = Cell(model, mesh, "BUG", split=report.split, microbatches=report.microbatches, text=worst)
            cell.seconds = sum(report.seconds.values())
            yield cell


def _failed(model: str, mesh: str, error: Exception) -> Cell:
    known = isinstance(error, AutoshardError) and not isinstance(error, ProcessError)
    text = str(error) if known else "".join(traceback.format_exception(error, limit=-8))
    return Cell(model, mesh, "ERR" if known else "BUG", text=text)
