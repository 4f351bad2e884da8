"""Answers to questions about a plan. Plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Move:
    """A conversion: of a value, from layout to layout, because of a reader; seconds of a step."""

    value: str
    before: str
    after: str
    reader: str
    seconds: float


@dataclass(frozen=True)
class Alternative:
    """Another choice, all else left as it is. Seconds of a step more than now: of the op itself, and of all conversions around it.

    moves: those conversions that would be new, around one instance of the op. predicted: of the nearest alternatives, seconds of a step
    and bytes of the fullest rank more than now, as the whole plan is predicted.
    """

    choice: str
    layout: str
    own: float
    neighbours: float
    moves: tuple[Move, ...]
    predicted: tuple[float, float] | None = None

    @property
    def total(self) -> float:
        return self.own + self.neighbours


@dataclass(frozen=True)
class Unavailable:
    choice: str
    reason: str


@dataclass(frozen=True)
class Why:
    """What was chosen for a node, what it takes in a step, and what else there was.

    instances: of the op, in layers that are planned alike; all seconds are of all of them together. tight: the plan also saves memory.
    step, peak, limit: of the plan: seconds of a step, bytes of the fullest rank, and bytes that a rank has.
    cheaper: alternatives whose op would take no longer, by what they would take in all; dearer: whose op would.
    """

    node: str
    asked: str
    what: str
    module: str
    source: str
    shape: tuple[int, ...]
    axes: dict[str, int]
    choice: str
    layout: str
    instances: int
    own: float
    conversions: tuple[Move, ...]
    tight: bool
    step: float
    peak: float
    limit: float
    cheaper: tuple[Alternative, ...]
    dearer: tuple[Alternative, ...]
    unavailable: tuple[Unavailable, ...]

    @property
    def nearest(self) -> list[Alternative]:
        """Those that were predicted, the fastest first."""
        return sorted((a for a in self.cheaper + self.dearer if a.predicted), key=lambda a: a.predicted)

    def to_json(self) -> dict:
        return asdict(self)
