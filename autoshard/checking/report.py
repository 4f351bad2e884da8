"""The answer of ``autoshard.verify``."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

from autoshard.checking.compare import Row
from autoshard.mesh import Mesh

KINDS = ("loss", "output", "gradient", "parameter", "buffer", "copy")
_SHOWN = 10  # rows that are wrong, and parameters with excused elements, that text() names


@dataclass
class Report:
    """Sharded against one device.

    rows: every comparison. mismatch: the first place where ranks' collectives do not match; then there are no rows.
    excused: by parameter, elements that differ from an independent run because Adam amplified rounding (see checking/compare.py).
    random: how the model draws random numbers; "" if it draws none.
    split: share of the matmul FLOPs that each axis splits. collectives: of one step, by rank.
    """

    mesh: Mesh
    model: str
    dtype: str
    steps: int
    backend: str = "processes"
    microbatches: int = 1
    rows: list[Row] = field(default_factory=list)
    mismatch: str | None = None
    excused: dict[str, int] = field(default_factory=dict)
    parameters: int = 0
    split: dict[str, float] = field(default_factory=dict)
    collectives: list[int] = field(default_factory=list)
    random: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return self.mismatch is None and bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def worst(self) -> Row | None:
        """The comparison that is furthest over what is allowed, or nearest to it."""
        return max(self.rows, key=_excess, default=None)

    @property
    def replicated(self) -> bool:
        """Whether nothing is divided: every rank computes everything."""
        return self.mesh.size > 1 and self.mesh.pipeline == 1 and bool(self.split) and not any(self.split.values())

    @property
    def trained(self) -> bool:
        """Whether there was a loss to train with."""
        return self.mismatch is not None or any(row.kind == "loss" for row in self.rows)

    def text(self) -> str:
        """For people: one line of answer, a table, and what to know about it."""
        answer = "equal" if self.equal else "NOT EQUAL"
        runs = [f"{self.steps} step{'s' * (self.steps != 1)}" if self.trained else "forward only, as there is no loss", self.dtype]
        if self.microbatches > 1:
            runs.append(f"{self.microbatches} micro-batches")
        n, s = self.mesh.size, "s" * (self.mesh.size > 1)
        where = f"{n} rank{s} in one process" if self.backend == "local" else f"{n} process{s and 'es'}"
        lines = [f"{answer}: {self.model} on mesh {self.mesh} ({where}) against one device; {', '.join(runs)}"]
        if self.mismatch:
            lines += ["", "Ranks don't run the same collectives:", f"  {self.mismatch}"]
        else:
            lines += ["", *self._table()]
            wrong = list({(row.kind, row.name, row.step): row for row in reversed(self.rows) if not row.ok}.values())[::-1]
            if wrong:
                lines += ["", "Wrong:"]
                lines += [f"  {row.kind} {row.where()}: {row.error:.1e}, allowed {row.allowed:.0e}" for row in wrong[:_SHOWN]]
                lines += [f"  ... and {len(wrong) - _SHOWN} more"] * (len(wrong) > _SHOWN)
        return "\n".join([*lines, "", *self._notes()])

    def _table(self) -> list[str]:
        cells = [("", "compared", "largest error", "allowed", "where")]
        for kind in KINDS:
            rows = [row for row in self.rows if row.kind == kind]
            if rows:
                worst = max(rows, key=lambda row: (_excess(row), row.allowed))
                cells.append((kind, str(len(rows)), f"{worst.error:.1e}", f"{worst.allowed:.0e}", worst.where() if worst.error else ""))
        widths = [max(len(row[i]) for row in cells) for i in range(5)]
        aligned = [[row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:4], widths[1:4])), row[4]] for row in cells]
        return ["  ".join(row).rstrip() for row in aligned]

    def _notes(self) -> list[str]:
        notes = []
        if not self.trained:
            which = 'it is .loss or ["loss"] of what forward returns, or its only scalar, if that comes first'
            notes.append(f"No loss, so no gradients: {which}.")
        if self.collectives and not self.mismatch:
            few, many = min(self.collectives), max(self.collectives)
            counts = f"{few}" if few == many else f"{few} to {many}"
            notes.append(f"Collectives: {counts} a step on each rank, all matched by their peers.")
        if self.excused:
            total = sum(self.excused.values())
            where = ", ".join(f"{name} {n}" for name, n in sorted(self.excused.items(), key=lambda item: -item[1])[:_SHOWN])
            more = f", and {len(self.excused) - _SHOWN} more" * (len(self.excused) > _SHOWN)
            notes.append(
                f"Excused: {total} of {self.parameters} parameter elements differ from an independent run, where Adam turns rounding"
                f" into steps ({where}{more}). Their gradients and updates were right in every step"
                + ("." if self.dtype in ("fp64", "float64") else "; float64 settles doubts.")
            )
        if self.random == "invariant":
            notes.append("Random numbers (dropout): those of one device, which draws them by position too (autoshard.invariant_random).")
        elif self.random and not self.equal:
            notes.append("The model draws native random numbers (dropout?), which depend on the mesh: use random='invariant'.")
        if self.replicated:
            notes.append("NOTHING IS DIVIDED: in this plan every rank computes everything, so equality says little.")
        elif self.split:
            shares = ", ".join(f"{axis} {100 * share:.0f} %" for axis, share in self.split.items())
            stages = f"; {self.mesh.pipeline} pipeline stages" if self.mesh.pipeline > 1 else ""
            notes.append(f"Matmul FLOPs split: {shares}{stages}.")
        if self.seconds:
            notes.append("Seconds: " + ", ".join(f"{name} {s:.1f}" for name, s in self.seconds.items()) + ".")
        return notes

    def to_json(self) -> dict:
        """Plain data; infinite errors are the text ``"inf"``."""
        data = {**asdict(self), "mesh": list(self.mesh.shape), "equal": self.equal, "replicated": self.replicated}
        data["rows"] = [_plain(row) for row in self.rows]
        data["worst"] = _plain(self.worst) if self.rows else None
        return data


def _excess(row: Row) -> float:
    return row.error / row.allowed if row.allowed else math.inf if row.error else 0.0


def _plain(row: Row) -> dict:
    return {**asdict(row), "error": row.error if math.isfinite(row.error) else "inf", "ok": row.ok}
