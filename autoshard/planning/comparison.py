"""Plans beside each other: ours, and what other frameworks would run on as many devices. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.planning.plan import Plan

NEAR = 0.01
"""Plans whose times differ by less than this share are as good as each other: states are not cut, say, for less."""


@dataclass(frozen=True)
class Row:
    """A way to train, with its best plan, or why it has none. what: in words, what is compared."""

    name: str
    what: str
    plan: Plan | None
    reason: str = ""

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.peak_bytes <= self.plan.memory_limit


@dataclass(frozen=True)
class Comparison:
    """Ours first. every_mesh: ours is the best over all meshes of so many devices, not over one that was asked for."""

    rows: tuple[Row, ...]
    devices: int
    every_mesh: bool

    @property
    def ours(self) -> Row:
        return self.rows[0]

    @property
    def faster(self) -> list[Row]:
        """Baselines that fit, and that are predicted to be faster than ours by more than ``NEAR`` (or that fit where ours does not)."""
        mine = self.ours.plan.step_seconds if self.ours.fits else float("inf")
        return [row for row in self.rows[1:] if row.fits and row.plan.step_seconds < mine * (1 - NEAR)]

    def to_json(self) -> dict:
        return {"devices": self.devices, "every_mesh": self.every_mesh, "rows": [_json(row, self.ours) for row in self.rows]}


def _json(row: Row, ours: Row) -> dict:
    plan = row.plan
    if plan is None:
        return {"name": row.name, "what": row.what, "reason": row.reason}
    memory = max(plan.rank_memory.values(), key=lambda table: sum(table.values()))
    return {
        "name": row.name,
        "what": row.what,
        "mesh": list(plan.mesh.shape),
        **({"order": list(plan.mesh.order)} if plan.mesh.order else {}),
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "chunks": plan.chunks,
        "step_seconds": plan.step_seconds,
        "samples_per_second": plan.samples / plan.step_seconds,
        "tokens_per_second": plan.tokens / plan.step_seconds,
        "ratio": plan.step_seconds / ours.plan.step_seconds if ours.plan else None,
        "bubble": plan.bubble,
        "communication_seconds": {axis: plan.breakdown[axis] for axis in ("data", "tensor", "pipeline")},
        "zero": sorted({level for level in plan.zero.values() if level}),
        "recompute": bool(plan.regions),
        "memory": memory,
        "peak_bytes": plan.peak_bytes,
        "memory_limit": plan.memory_limit,
        "fits": row.fits,
    }
