"""What to say where nothing fits. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autoshard.planning.plan import PinRow


@dataclass(frozen=True)
class Found:
    """A plan that fits: bytes of its fullest rank, seconds of a step, and its micro-batches."""

    peak_bytes: float
    step_seconds: float
    microbatches: int


@dataclass(frozen=True)
class Suggestion:
    """A change with which a plan fits, and that plan.

    text: the change, in words. options: those of ``autoshard.plan`` that are others than were asked for.
    loss_alone: also, forward returns its loss and nothing else.
    """

    text: str
    options: dict[str, Any]
    loss_alone: bool
    found: Found


@dataclass
class Advice:
    """About a model that fits with nothing that may be chosen.

    asked: mesh, or number of devices. mesh: the one that the numbers are of, of these devices. numbers: of micro-batches that may be.
    least, stage, memory, microbatches: bytes of the fullest rank of the smallest plan that was found on the mesh, where that rank is,
    what it holds by category (None: not priced, or not known), and the plan's number of micro-batches (None: not known).
    enough: a limit, and the plan that was found for it; little: one for which none was. proven: what any plan needs on this mesh.
    pins: what was asked for. refused, untried: changes with which nothing was found that fits, and those for which there was no time.
    seconds: that looking for all of it took.
    """

    asked: str
    mesh: str
    cluster: str
    limit: float
    numbers: list[int]
    least: float
    stage: int | None
    memory: dict[str, float] | None
    microbatches: int | None = None
    enough: tuple[float, Found] | None = None
    little: float | None = None
    proven: float | None = None
    suggestions: list[Suggestion] = field(default_factory=list)
    pins: list[PinRow] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    seconds: float = 0.0
