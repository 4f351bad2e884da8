"""Pipeline schedules: which ranks hold which stages, and in what order they run the micro-batches. Plain data; stages count from 0.

A rank holds one stage, or several chunks of the model. On p ranks with v stages each, stage s is on rank

    loop    s mod p                                    0 1 .. p-1, 0 1 .. p-1, ...
    v       s mod p, or backwards in every other row   0 1 .. p-1, p-1 .. 1 0

The names are those of ``torch.distributed.pipelining``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoshard.errors import PlanError


@dataclass(frozen=True)
class Schedule:
    """What a schedule asks for.

    chunks: stages that a rank holds if nobody says how many. fewest, most: how many they may be.
    folds: placed as a v, not as a loop.
    splits: backward is run in two parts, the gradients of what a stage received, and later those of its weights.
    """

    name: str
    chunks: int = 1
    fewest: int = 1
    most: int = 1
    folds: bool = False
    splits: bool = False

    @property
    def title(self) -> str:
        return f"{self.name} x {self.chunks}" if self.chunks > 1 else self.name

    @property
    def listed(self) -> bool:
        """Whether torch runs it from a list of actions, which is for several stages a rank."""
        return self.most > 1

    def rank_of(self, stage: int, ranks: int) -> int:
        """The place along the pipeline axis that holds a stage."""
        row, place = divmod(stage, ranks)
        return ranks - 1 - place if self.folds and row % 2 else place

    def stages_of(self, rank: int, ranks: int, chunks: int) -> tuple[int, ...]:
        """The stages that a place along the pipeline axis holds, ascending."""
        return tuple(stage for stage in range(ranks * chunks) if self.rank_of(stage, ranks) == rank)

    def run_as(self, microbatches: int, ranks: int) -> str:
        """The name of the schedule that runs: 1F1B is not defined for fewer micro-batches than ranks, and GPipe has its length then."""
        return "GPipe" if self.name == "1F1B" and microbatches < ranks else self.name

    def check(self, microbatches: int, ranks: int, chunks: int) -> None:
        """Raise PlanError if so many micro-batches, ranks and stages a rank can't be run."""
        if ranks == 1 and self.name != "none":
            raise PlanError(f"schedule {self.name!r} needs a pipeline", hint='use a mesh with pipeline > 1, or schedule="auto"')
        if not self.fewest <= chunks <= self.most:
            wanted = f"{self.fewest}" if self.fewest == self.most else f"{self.fewest} or more"
            raise PlanError(f"schedule {self.name!r} has {wanted} stages a rank, not {chunks}", hint="make the plan again")
        rounds = max(1, microbatches // ranks)
        if self.name in _IN_ROUNDS and microbatches % rounds:
            raise PlanError(
                f"schedule {self.name!r} can't run {microbatches} micro-batches on {ranks} ranks",
                hint=f"use fewer than {2 * ranks} micro-batches, or a multiple of {ranks}",
            )


ANY = 10**6

SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("none"),
        Schedule("GPipe"),
        Schedule("1F1B"),
        Schedule("Interleaved1F1B", chunks=2, most=ANY),
        Schedule("InterleavedZeroBubble", chunks=2, most=ANY, splits=True),
        Schedule("ZBVZeroBubble", chunks=2, fewest=2, most=2, folds=True, splits=True),
    )
}
"""By name. "none": there is one stage.

GPipe (Huang et al., NeurIPS 2019): all forwards, then all backwards. 1F1B (Narayanan et al., PipeDream, SOSP 2019): one forward, one
backward; with fewer micro-batches than ranks it is run as GPipe, which has the same length then. Interleaved (Narayanan et al., SC 2021):
the same with several stages a rank, so that less time is lost at both ends. Zero bubble (Qi et al., 2023, ZB-H1 and ZB-V): gradients of
weights are computed where a rank would wait otherwise.
"""

INTERLEAVED = (SCHEDULES["Interleaved1F1B"], replace(SCHEDULES["Interleaved1F1B"], chunks=4))

TRIED = (
    *INTERLEAVED,
    replace(SCHEDULES["InterleavedZeroBubble"], chunks=1),
    SCHEDULES["InterleavedZeroBubble"],
    SCHEDULES["ZBVZeroBubble"],
)
"""What is tried beside 1F1B: of two that are as good the earlier is taken, which is simpler to run."""

_IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Run max(1, m // p) rounds of equally many micro-batches."""


def schedule_of(name: str) -> Schedule:
    """Raises PlanError if there is none of that name."""
    if name not in SCHEDULES:
        raise PlanError(f"there is no schedule {name!r}", hint=f"use one of {', '.join(SCHEDULES)}, or auto")
    return SCHEDULES[name]
