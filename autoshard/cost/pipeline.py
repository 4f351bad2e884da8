"""The time of one training step on a pipeline of p ranks and m micro-batches, and how many of those are in flight.

A rank works m times what its stages take for a micro-batch, and waits:

    step = m * M + wait + once          M: seconds of a micro-batch on the slowest rank; t, f, b, w: of one stage of the others, on average,
                                        in all, forward, and backward for what was received and for weights; v stages a rank

    GPipe, 1F1B                  (p - 1) t                                              (exact: sum of all t + (m - 1) max t)
    Interleaved1F1B              (v max(0, p - m) + min(p, m) - 1) t
    InterleavedZeroBubble        (v max(0, p - m) + min(p, m) - 1) (f + b) - (min(p, v m) - 1) w
    ZBVZeroBubble                max((p - 1) b, 2 (p - 1) (b - w), (2 p - 1 - m) (f + b))

The first micro-batch passes every stage, and then the slowest stage hands out one more every ``max t``: exact for a chain whose stages each
take one fixed time a micro-batch (a permutation flow shop with constant times). 1F1B has the same length as GPipe, and holds fewer
activations; with v stages a rank the wait is v times shorter (Narayanan et al., "Efficient large-scale language model training on GPU
clusters using Megatron-LM", SC 2021). Gradients of weights fill (p - 1) 2 w of it (Qi et al., "Zero bubble pipeline parallelism", ICLR
2024, ZB-H1); in a v, all of it if f = b = w, but for the start. What holds for fewer micro-batches than ranks, and the last line, was found
by running the schedules' own lists of actions, for stages alike; for others it is near.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoshard.schedule import schedule_of


@dataclass(frozen=True)
class StageTime:
    """Seconds of one micro-batch in a stage, its share of the sends included.

    inputs / weights: backward, for what the stage received, and for its weights, where the two can be run apart.
    """

    forward: float
    inputs: float
    weights: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights


def _full(p: int, v: int, m: int, t: StageTime) -> float:
    return (p - 1) * t.total


def _interleaved(p: int, v: int, m: int, t: StageTime) -> float:
    return (v * max(0, p - m) + min(p, m) - 1) * t.total


def _zero_bubble(p: int, v: int, m: int, t: StageTime) -> float:
    return (v * max(0, p - m) + min(p, m) - 1) * (t.forward + t.inputs) - (min(p, v * m) - 1) * t.weights


def _folded(p: int, v: int, m: int, t: StageTime) -> float:
    return max((p - 1) * max(t.inputs, 2 * (t.inputs - t.weights)), (2 * p - 1 - m) * (t.forward + t.inputs))


WAIT: dict[str, Callable[[int, int, int, StageTime], float]] = {
    "none": _full,
    "GPipe": _full,
    "1F1B": _full,
    "Interleaved1F1B": _interleaved,
    "InterleavedZeroBubble": _zero_bubble,
    "ZBVZeroBubble": _folded,
}
"""Seconds that a rank waits, given p, v, m, and a stage: the table above."""


def step_seconds(schedule: str, ranks: int, stages: Sequence[StageTime], microbatches: int, once: Sequence[float] = (0.0,)) -> float:
    """Seconds of a step.

    stages: all of them, in order; ``schedule`` says which are on one rank. once: seconds a step that no micro-batch overlaps, of each rank.
    """
    placed, chunks = schedule_of(schedule), len(stages) // ranks
    work = [0.0] * ranks
    for s, time in enumerate(stages):
        work[placed.rank_of(s, ranks)] += time.total
    slowest = max(range(ranks), key=work.__getitem__)
    others = [time for s, time in enumerate(stages) if placed.rank_of(s, ranks) != slowest]
    mean = StageTime(*(sum(getattr(t, part) for t in others) / max(1, len(others)) for part in ("forward", "inputs", "weights")))
    return microbatches * work[slowest] + max(0.0, WAIT[schedule](ranks, chunks, microbatches, mean)) + max(once)


def bubble_share(work: Sequence[float], microbatches: int, pipelined: float) -> float:
    """The share of the pipelined part of a step, of so many seconds, that a rank waits, averaged over the ranks.

    For p equal ranks under 1F1B this is (p - 1) / (p - 1 + m).

    work: seconds of a micro-batch on each rank.
    """
    return 1.0 - microbatches * sum(work) / (len(work) * pipelined) if pipelined else 0.0


def exposed_seconds(buckets: Sequence[tuple[float, float]], backward: float) -> float:
    """Seconds of communication that are left when the last backward, of ``backward`` seconds, is over.

    buckets: of gradients, (seconds of backward after which it is full, seconds of their sum), in this order. Each is summed when it is full
    and the one before is done, while backward goes on.
    """
    free = 0.0
    for full, seconds in buckets:
        free = max(free, full) + seconds
    return max(0.0, free - backward)


def crowded_seconds(step: float, busy: Sequence[float], crowding: float) -> float:
    """Seconds of a step of ranks that share processors: no less than all their work takes, if nobody ever waits.

    step: if they shared nothing. busy: the seconds that each of the stages' ranks works. crowding: how much longer work takes when all
    ranks are at it; a rank that waits leaves its share to the others.
    """
    return max(step, crowding * sum(busy) / len(busy))


def equal_bubble(p: int, microbatches: int) -> float:
    """The bubble of p equal stages, (p - 1) / (p - 1 + m): 8 stages and 4 micro-batches wait 63.6 % of the time."""
    return (p - 1) / (p - 1 + microbatches)


def in_flight(schedule: str, ranks: int, chunks: int, microbatches: int, stage: int, whole: bool = False) -> int:
    """Micro-batches whose activations a stage holds when its rank holds most.

    GPipe: all. 1F1B: min(m, p - s). Of v stages a rank, those of the rank's first N forwards, which run through its stages in turn, the
    micro-batches of a round each: N = (v - 1) round + 2 (p - 1 - r) + 1 interleaved, (v - 1) round + p with zero bubble, of which r wait
    for the second part of their backward. In a v, 2 p - 1 - s of the upper stages and r + 1 of the lower.

    whole: the rank's stages run both parts of backward at once, as they do where something is computed again.
    """
    p, v, m = ranks, chunks, microbatches
    rank, row = schedule_of(schedule).rank_of(stage, p), stage // p
    if schedule == "GPipe":
        return m
    if schedule == "ZBVZeroBubble":
        return min(m, rank + 1 if row else 2 * p - 1 - rank)
    if v == 1 and schedule != "InterleavedZeroBubble":
        return min(m, p - stage)
    a_round = m // max(1, m // p)
    ahead = (v - 1) * a_round + (p - whole * rank if schedule == "InterleavedZeroBubble" else 2 * (p - 1 - rank) + 1)
    return sum(step // a_round % v == row for step in range(min(v * m, ahead)))


def half_done(schedule: str, ranks: int, microbatches: int, stage: int) -> int:
    """Micro-batches of a stage that are, at most, between the two parts of their backward while the first part of another runs.

    Zero bubble of a loop: rank r puts off r of them; in a v as many at the end of the step, if there were enough to fill it.
    """
    p, m = ranks, microbatches
    placed = schedule_of(schedule)
    if not placed.splits:
        return 0
    rank = placed.rank_of(stage, p)
    return max(0, min(rank, m - p) - stage // p) if placed.folds else min(rank, m - 1)
