"""Cut a chain of items into pipeline stages: the least time of one step, with a proof.

    t[s] = seconds of the items of stage s + seconds of the cut before it + seconds of the cut behind it
    minimise  (sum over s of t[s])  +  (m - 1) max over s of t[s]  +  max over s of once[s]                m micro-batches
    (M) resident[s] + min(m, p - s) activation[s] + max transient[s] <= limit                               1F1B: so many are in flight
    (S) p stages, each of at least one item, cut at legal boundaries only

The search goes along the chain, stage by stage, over partial answers that end at the same position:

(L) label     (cuts paid so far, longest stage, most once-a-step work)
(R) rest      the least cuts, the least possible longest stage and once-a-step work from a position to the end, each on its own (exact,
              by recursion). A label's two maxima are at least those of its rest, and cuts + rest's cuts + (m - 1) longest + most is a bound
(U) prune     a label whose bound is no better than the best answer is dropped; at first that is the answer whose longest stage is shortest
(D) dominate  a label that another at its position beats or equals in all three is dropped: the rest pays the same for both
(W) width     at most ``width`` labels a position are kept, by bound. The best bound of those dropped is a proven bound; while it is below
              the best answer, search again four times as wide

Why not an integer program: CP-SAT, with one binary per stage and boundary, proves 100 items on 8 stages in a second, but is left with
a gap of 85 % on 400 items and 16 stages after 20 s, as the relaxation of sums of a maximum is weak. This search proves them in a second.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

import numpy as np

from .problem import Infeasible, SolverError

INF = float("inf")
_SLACK = 1e-12  # relative: a limit that fits exactly must not fail by rounding
_WIDTH, _WIDEST = 8, 2048  # (W)
_CHUNK = 2048  # labels grown at once: bounds the memory of a pass


class TooFewCuts(Infeasible):
    """Fewer legal boundaries than stages need. Attributes: legal (how many there are), needed (stages - 1), stages."""

    def __init__(self, legal: int, stages: int):
        super().__init__(f"{stages} pipeline stages need {stages - 1} legal cut points, there are {legal}")
        self.legal, self.needed, self.stages = legal, stages - 1, stages


class OutOfMemory(Infeasible):
    """No cut fits. Attributes: limit, least (the smallest limit that any cut fits, in bytes), stage (that binds there, from 0)."""

    def __init__(self, limit: float, least: float, stage: int, stages: int):
        super().__init__(f"no cut into {stages} stages fits in {limit:.0f} bytes: the least is {least:.0f} bytes, bound by stage {stage}")
        self.limit, self.least, self.stage = limit, least, stage


@dataclass(frozen=True)
class Item:
    """A block that is never cut.

    seconds: forward and backward of one micro-batch.
    once: seconds of work once a step that nothing hides (gradient reduction, optimizer).
    resident: bytes kept all the time. activation: bytes kept for each micro-batch in flight. transient: bytes of its own peak.
    """

    seconds: float
    once: float
    resident: float
    activation: float
    transient: float = 0.0


@dataclass(frozen=True)
class Boundary:
    """Between two consecutive items. seconds: what each of the two stages spends on a cut here, per micro-batch."""

    seconds: float
    legal: bool = True


@dataclass(frozen=True)
class CutProblem:
    """Items in topological order, the boundaries between them (one fewer), stages p, micro-batches m, bytes per rank (None: no limit)."""

    items: tuple[Item, ...]
    boundaries: tuple[Boundary, ...]
    stages: int
    microbatches: int
    limit: float | None = None

    def __post_init__(self) -> None:
        if not self.items or len(self.boundaries) != len(self.items) - 1:
            raise ValueError(f"{len(self.items)} items need {max(0, len(self.items) - 1)} boundaries, not {len(self.boundaries)}")
        if self.stages < 1 or self.microbatches < 1:
            raise ValueError("stages and micro-batches are at least 1")


@dataclass(frozen=True)
class CutSolution:
    """first: first item of each stage. objective, bound, seconds (wall): seconds. memory: peak bytes of each stage.
    stage_seconds: t[s]. status: "optimal" or "time limit". passes: searches made."""

    first: tuple[int, ...]
    objective: float
    bound: float
    memory: tuple[float, ...]
    stage_seconds: tuple[float, ...]
    seconds: float
    status: str
    passes: int


@dataclass(frozen=True)
class CutEvaluation:
    """Price in seconds, t[s] and peak bytes of each stage, and what is wrong, in words."""

    objective: float
    stage_seconds: list[float]
    memory: list[float]
    violations: list[str]


def evaluate_cuts(problem: CutProblem, first) -> CutEvaluation:
    """Price the stages that start at the items ``first``, by reading the problem again."""
    p, m, n = problem.stages, problem.microbatches, len(problem.items)
    if len(first) != p or first[0] != 0 or any(b <= a for a, b in zip(first, [*first[1:], n])):
        return CutEvaluation(0.0, [], [], [f"{first} are not the first items of {p} stages of {n} items"])
    violations, times, once, memory = [], [], [], []
    for s, (i, j) in enumerate(zip(first, [*first[1:], n])):
        items = problem.items[i:j]
        cuts = [problem.boundaries[at - 1] for at in (i, j) if 0 < at < n]
        violations += [f"stage {s} starts at item {i}, which is no legal cut"] if i and not problem.boundaries[i - 1].legal else []
        times.append(sum(item.seconds for item in items) + sum(cut.seconds for cut in cuts))
        once.append(sum(item.once for item in items))
        kept = sum(item.resident + min(m, p - s) * item.activation for item in items)
        memory.append(kept + max(item.transient for item in items))
        if problem.limit is not None and memory[-1] > problem.limit * (1 + _SLACK):
            violations.append(f"stage {s} holds {memory[-1]:.0f} bytes, the limit is {problem.limit:.0f}")
    return CutEvaluation(sum(times) + (m - 1) * max(times) + max(once), times, memory, violations)


class _Chain:
    """Everything about a stage from position i to position j, as matrices; positions are 0, the legal boundaries, and the end."""

    def __init__(self, problem: CutProblem):
        n, p, m = len(problem.items), problem.stages, problem.microbatches
        self.at = np.array([0, *(i for i in range(1, n) if problem.boundaries[i - 1].legal), n])
        cut = np.array([0.0, *(b.seconds for b in problem.boundaries), 0.0])[self.at]
        forward = self.at[None, :] > self.at[:, None]

        def between(field: str) -> np.ndarray:
            total = np.concatenate([[0.0], np.cumsum([getattr(item, field) for item in problem.items])])[self.at]
            return total[None, :] - total[:, None]

        self.time = np.where(forward, between("seconds") + cut[None, :] + cut[:, None], INF)
        self.once = np.where(forward, between("once"), INF)
        self.cut = 2.0 * cut  # paid by the stages on both sides
        peak = np.zeros_like(self.time)
        for i, start in enumerate(self.at[:-1]):
            highest = np.maximum.accumulate([item.transient for item in problem.items[start:]])
            peak[i, i + 1 :] = highest[self.at[i + 1 :] - start - 1]
        resident, activation = between("resident"), between("activation")
        self.memory = [np.where(forward, resident + min(m, p - s) * activation + peak, INF) for s in range(p)]
        limit = INF if problem.limit is None else problem.limit * (1 + _SLACK / 2)
        self.fits = [forward & (memory <= limit) for memory in self.memory]
        self.rest_cuts = self._rest([np.where(fits, self.cut[None, :], INF) for fits in self.fits], np.add)
        self.rest_time = self._rest([np.where(fits, self.time, INF) for fits in self.fits], np.maximum)
        self.rest_once = self._rest([np.where(fits, self.once, INF) for fits in self.fits], np.maximum)

    def _rest(self, price: list[np.ndarray], join: np.ufunc) -> np.ndarray:
        """(R) [s, i]: the least sum or maximum of price[stage][i, j] over the stages s to p - 1, from position i to the end."""
        out = np.full((len(price) + 1, len(self.at)), INF)
        out[-1, -1] = 0.0
        for s in range(len(price) - 1, -1, -1):
            out[s] = join(price[s], out[s + 1][None, :]).min(axis=1)
        return out

    def follow(self, price: list[np.ndarray], rest: np.ndarray) -> tuple[int, ...]:
        """The first items of the stages whose largest price is least, ``rest`` being that of ``price``."""
        positions = [0]
        for s in range(len(price) - 1):
            positions.append(int(np.argmin(np.maximum(price[s][positions[-1]], rest[s + 1]))))
        return tuple(int(self.at[position]) for position in positions)

    def least_memory(self) -> tuple[float, int]:
        """The smallest limit that any cut fits, in bytes, and the stage that holds so much."""
        rest = self._rest(self.memory, np.maximum)
        first = [*self.follow(self.memory, rest), int(self.at[-1])]
        place = {int(at): position for position, at in enumerate(self.at)}
        peaks = [self.memory[s][place[first[s]], place[first[s + 1]]] for s in range(len(self.memory))]
        return float(rest[0, 0]), int(np.argmax(peaks))


@dataclass
class _Labels:
    """(L) Partial answers that end at ``position``, each with its bound and the index of its parent."""

    position: np.ndarray
    cuts: np.ndarray
    longest: np.ndarray
    most: np.ndarray
    bound: np.ndarray
    parent: np.ndarray

    def __getitem__(self, index: np.ndarray) -> _Labels:
        return _Labels(*(getattr(self, field.name)[index] for field in fields(self)))

    @staticmethod
    def join(parts: list[_Labels]) -> _Labels:
        return _Labels(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(_Labels)))


def _undominated(labels: _Labels, width: int) -> tuple[_Labels, float]:
    """(D), (W): the labels that stay, and the best bound of those too many."""
    labels = labels[np.lexsort((labels.parent, labels.most, labels.longest, labels.cuts, labels.bound, labels.position))]
    prices = np.stack([labels.cuts, labels.longest, labels.most])
    starts = np.flatnonzero(np.diff(labels.position, prepend=-1))
    kept: list[int] = []
    too_many = INF
    for start, stop in zip(starts, [*starts[1:], len(labels.position)]):
        left = np.arange(start, stop)
        for _ in range(width):
            kept.append(int(left[0]))
            left = left[(prices[:, left] < prices[:, left[:1]]).any(axis=0)]
            if not len(left):
                break
        else:
            too_many = min(too_many, float(labels.bound[left[0]]))
    return labels[np.array(kept, dtype=int)], too_many


def _search(chain: _Chain, m: int, width: int, best: float) -> tuple[float, tuple[int, ...], float]:
    """One pass at one width.

    Returns:
        The best objective (without the seconds of the items) below ``best`` and the first items of its stages, or infinity and (); and
        the best bound of what was dropped for width.
    """
    longest = (best - chain.rest_cuts[0, 0] - chain.rest_once[0, 0]) / (m - 1) if m > 1 else INF
    quick = chain.time <= longest * (1 + _SLACK)
    allowed = [fits & quick & (rest < INF) for fits, rest in zip(chain.fits, chain.rest_time[1:])]
    zero = np.zeros(1)
    labels = _Labels(zero.astype(int), zero, zero, zero, zero, zero.astype(int))
    history: list[_Labels] = []
    dropped = INF
    for s, ok in enumerate(allowed):
        grown = []
        for begin in range(0, len(labels.position), _CHUNK):
            parent, position = np.nonzero(ok[labels.position[begin : begin + _CHUNK]])
            parent += begin
            start = labels.position[parent]
            cuts = labels.cuts[parent] + chain.cut[position]
            slow = np.maximum(np.maximum(labels.longest[parent], chain.time[start, position]), chain.rest_time[s + 1, position])  # (R)
            most = np.maximum(np.maximum(labels.most[parent], chain.once[start, position]), chain.rest_once[s + 1, position])
            bound = cuts + chain.rest_cuts[s + 1, position] + (m - 1) * slow + most
            grown.append(_Labels(position, cuts, slow, most, bound, parent)[np.flatnonzero(bound < best * (1 - _SLACK))])  # (U)
        labels, too_many = _undominated(_Labels.join(grown), width)
        dropped = min(dropped, too_many)
        if not len(labels.position):
            return INF, (), dropped
        history.append(labels)
    index, first = 0, []
    for s in range(len(history) - 1, -1, -1):
        index = int(history[s].parent[index])
        first.append(int(chain.at[history[s - 1].position[index]]) if s else 0)
    return float(history[-1].bound[0]), tuple(reversed(first)), dropped


def solve_cuts(problem: CutProblem, time_limit: float = 30.0) -> CutSolution:
    """The best cut, proven, or the best found in about ``time_limit`` seconds.

    Raises:
        TooFewCuts, OutOfMemory: there is none; they carry the numbers.
        SolverError: the answer does not have the price that the search claims.
    """
    began = time.perf_counter()
    p, m = problem.stages, problem.microbatches
    legal = sum(boundary.legal for boundary in problem.boundaries)
    if legal < p - 1:
        raise TooFewCuts(legal, p)
    chain = _Chain(problem)
    if chain.rest_time[0, 0] == INF:
        raise OutOfMemory(problem.limit, *chain.least_memory(), p)
    items = sum(item.seconds for item in problem.items)
    first = chain.follow([np.where(fits, chain.time, INF) for fits in chain.fits], chain.rest_time)
    price = evaluate_cuts(problem, first)
    best, bound, width, passes = price.objective - items, -INF, _WIDTH, 0
    while bound < best * (1 - _SLACK) and width <= _WIDEST and (passes == 0 or time.perf_counter() - began < time_limit):
        found, answer, dropped = _search(chain, m, width, best)
        if answer:
            first, best = answer, found
        bound = max(bound, min(best, dropped))
        width, passes = width * 4, passes + 1
    price = evaluate_cuts(problem, first)
    if price.violations or abs(price.objective - best - items) > 1e-6 * price.objective:
        raise SolverError(f"the search claims {best + items!r} s, evaluate says {price.objective!r} s {price.violations}")
    proven = bound >= best * (1 - _SLACK)
    return CutSolution(
        first=first,
        objective=price.objective,
        bound=price.objective if proven else min(price.objective, bound + items),
        memory=tuple(price.memory),
        stage_seconds=tuple(price.stage_seconds),
        seconds=time.perf_counter() - began,
        status="optimal" if proven else "time limit",
        passes=passes,
    )
