"""The staged problem solved whole: one integer program for each way to cut the chain, the most promising first.

For stages that start at given blocks, with the flows of ``flows`` (one instance of an op is (op, block), one of a value (value, block)):

    x[op, s]         binary      the instance takes strategy s
    f[use, p, q]     in [0, 1]   a use goes from placement p to placement q
    w[value, at, p, q]           some use of stage ``at`` goes from p to q: that conversion is paid there
    t[at], T, G                  seconds of a stage, of the slowest stage, and once a step

    minimise  sum t + (m - 1) T + G
    (A) sum_s x = 1      (B), (C) the flows of a use leave and arrive as x says      (D) w >= f
    (T) t[at] = what the stage's x and w cost, and what it sends;  T >= t[at];  G >= once[at]
    (M) reserve + state + in_flight saved + P <= limit;  P >= peak of each block

A cut whose relaxation is no better than the best answer so far is done with. Meant for problems with few cuts.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, combinations
from math import comb

from .linear import INF, LinearAnswer, LinearProgram
from .problem import Infeasible, OutOfTime, SolverError
from .staged import RESIDENT, SLACK, Amount, StagedAnswer, StagedEvaluation, StagedProblem, StagedUse, evaluate_staged, stage_of

_AGREEMENT, _EXACT = 1e-6, 1e-9
_SMALLEST = 0.01  # relative: at which the least memory is known well enough


@dataclass(frozen=True)
class StagedSolution:
    """answer and its evaluation. bound: seconds that no answer is faster than. status: in words, "optimal" if that is proven."""

    answer: StagedAnswer
    evaluation: StagedEvaluation
    bound: float
    seconds: float
    status: str

    @property
    def objective(self) -> float:
        return self.evaluation.objective

    @property
    def gap(self) -> float:
        return max(0.0, self.objective - self.bound) / self.objective if self.objective > 0 else 0.0


class TooSlow(Infeasible):
    """No plan is as fast as was asked for. least: seconds of a step, proven."""

    def __init__(self, least: float):
        super().__init__(f"no plan takes less than {least:.4g} s")
        self.least = least


def ways_to_cut(problem: StagedProblem) -> list[tuple[int, ...]]:
    """The first blocks of the stages, for every legal way to cut the chain."""
    places = [i + 1 for i, legal in enumerate(problem.legal) if legal]
    return [(0, *cuts) for cuts in combinations(places, problem.stages - 1)]


def size(problem: StagedProblem) -> int:
    """Binary variables of all the programs that ``solve_exactly`` may solve."""
    ways = comb(sum(problem.legal), problem.stages - 1)
    return ways * sum(len(op.costs) * len(problem.homes(i)) for i, op in enumerate(problem.ops))


def solve_exactly(
    problem: StagedProblem,
    time_limit: float = 60.0,
    gap: float = 0.0,
    fastest: Sequence[float] = (),
    known: StagedAnswer | None = None,
    cutoff: float = INF,
) -> StagedSolution:
    """The best answer, proven, or the best found in about ``time_limit`` seconds.

    Args:
        problem: with few ways to cut the chain.
        gap: relative, at which an answer is good enough.
        fastest: seconds that each block takes at least; saves looking at most ways to cut.
        known: an answer to begin with.
        cutoff: seconds of a step; slower answers are of no use.

    Raises Infeasible if no answer fits. TooSlow. OutOfTime if none was found.
    """
    search = _Cuts(problem, time_limit, fastest)
    best: tuple[float, StagedAnswer, StagedEvaluation] | None = None
    if known is not None:
        evaluation = evaluate_staged(problem, known)
        best = evaluation.objective, known, evaluation
    least = INF  # of what was not looked at to the end
    for bound, program in search:
        good = min(cutoff, best[0] * (1 - max(gap, 1e-12))) if best else cutoff
        if bound >= good or best and search.over:
            least = min(least, bound)
            break
        try:
            found = program.solve(search.left(), gap)
        except OutOfTime:
            search.late, least = True, min(least, bound)
            continue
        if found is None:
            continue
        answer, evaluation, proven, _ = found
        least = min(least, max(bound, proven))
        if best is None or evaluation.objective < best[0]:
            best = evaluation.objective, answer, evaluation
    least = min(least, search.unseen)
    if cutoff <= least < INF:
        raise TooSlow(least)
    if best is None and search.late:
        raise OutOfTime(f"no plan of {problem.stages} stages was found in {time_limit:g} s")
    if best is None:
        raise Infeasible(f"no plan of {problem.stages} stages fits in {problem.limit:.0f} bytes")
    objective, answer, evaluation = best
    bound, status = least, "time limit" if search.late else "best found"
    if bound >= objective * (1 - _EXACT):
        bound, status = objective, "optimal"
    return StagedSolution(answer, evaluation, bound, time.perf_counter() - search.began, status)


def least_seconds(problem: StagedProblem, time_limit: float = 60.0, fastest: Sequence[float] = ()) -> float:
    """Seconds that no answer takes less than; infinite if none fits. ``fastest``: as for ``solve_exactly``."""
    search = _Cuts(problem, time_limit, fastest)
    bound = next((bound for bound, _ in search), INF)
    return min(bound, search.unseen)


def smallest(problem: StagedProblem, time_limit: float = 60.0) -> tuple[StagedAnswer, StagedEvaluation]:
    """An answer whose fullest stage holds about as little as any, whatever the limit. Raises Infeasible if there is none, OutOfTime."""
    search = _Cuts(problem, time_limit, smallest=True)
    for _, program in search:
        found = program.linear.solve(time_limit=search.left(), gap=_SMALLEST)
        if found is not None:
            answer = program.read(found)
            return answer, evaluate_staged(problem, answer)
    raise OutOfTime("for the least memory") if search.late else Infeasible("there is no plan")


class _Cuts:
    """Ways to cut the chain that have an answer as far as the relaxed program can tell, the most promising first: what no answer is
    faster than, and the program.

    late: whether some were left out because time was short; unseen: what no answer of those is faster than.
    """

    def __init__(self, problem: StagedProblem, time_limit: float, fastest: Sequence[float] = (), smallest: bool = False):
        self.problem, self.time_limit, self.smallest, self.began = problem, time_limit, smallest, time.perf_counter()
        self.late, self.unseen = False, INF
        outlines = _outlines(problem, fastest or [0.0] * len(problem.chain))
        self._heap = [(0.0 if smallest else bound, first, False) for first, bound in outlines]
        heapify(self._heap)

    def left(self) -> float:
        return max(1.0, self.time_limit - (time.perf_counter() - self.began))

    @property
    def over(self) -> bool:
        return time.perf_counter() - self.began > self.time_limit

    def __iter__(self) -> Iterator[tuple[float, _Program]]:
        share = 1.0  # of the time, for relaxed programs
        while self._heap:
            bound, first, relaxed = heappop(self._heap)
            if relaxed:
                yield bound, _Program(self.problem, first, self.smallest)
                continue
            try:
                if time.perf_counter() - self.began > share * self.time_limit:
                    raise OutOfTime("for more relaxed programs")
                program = _Program(self.problem, first, self.smallest)
                answer = program.linear.solve(relaxed=True, time_limit=self.left())
            except SolverError:  # out of time, or HiGHS failed
                self.late, self.unseen = True, min(self.unseen, bound)
                continue
            if answer is not None:
                heappush(self._heap, (max(bound, answer.objective / program.scale), first, True))
                share = 0.5


def _outlines(problem: StagedProblem, fastest: Sequence[float]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every way to cut the chain, and seconds that it takes at least: as long as its blocks, and what crosses the cuts."""
    crossing = [0.0] * len(problem.chain)  # seconds of each of two stages, cut behind this block
    for index, uses in problem.readings.items():
        value = problem.values[index]
        if problem.ops[value.op].part == RESIDENT:
            continue
        ends: dict[int, int] = {}
        for _, (source, user) in uses:
            for a, b in zip(source.tolist(), user.tolist()):
                ends[a] = max(b, ends.get(a, a))
        least = min(value.sends.get(placement, 0.0) for placement in value.placements)
        for a, b in ends.items():
            for block in range(a, b):
                crossing[block] += least
    done = [0.0, *accumulate(fastest)]
    for first in ways_to_cut(problem):
        ends = [*first[1:], len(problem.chain)]
        sent = [0.0, *(crossing[at - 1] for at in first[1:]), 0.0]
        stages = [done[b] - done[a] + sent[s] + sent[s + 1] for s, (a, b) in enumerate(zip(first, ends))]
        yield first, sum(stages) + (problem.microbatches - 1) * max(stages)


class _Program:
    """The integer program of one way to cut. smallest: for the least memory, as a share of the limit, not for time."""

    def __init__(self, problem: StagedProblem, first: tuple[int, ...], smallest: bool = False):
        self.problem, self.first = problem, first
        self.linear = linear = LinearProgram()
        most = max((cost.seconds + cost.once for op in problem.ops for cost in op.costs), default=0.0)
        self.scale = 1e3 / most if most > 0 else 1.0
        self.bytes = 1.0 / max(problem.limit, 1.0)
        p, m = problem.stages, problem.microbatches
        self.spent = [{name: defaultdict(float) for name in ("seconds", "once", "bytes")} for _ in range(p)]
        self.x: dict[tuple[int, int], list[int]] = {}
        for index, op in enumerate(problem.ops):
            for block in problem.homes(index):
                columns = [linear.column(upper=1.0, integer=True) for _ in op.costs]
                self.x[index, block] = columns
                linear.row({column: 1.0 for column in columns}, 1.0, 1.0)  # (A)
        self._uses()
        clock = 0.0 if smallest else 1.0
        t = [linear.column(cost=clock) for _ in range(p)]
        slowest, once = linear.column(cost=clock * (m - 1.0)), linear.column(cost=clock)
        room = {linear.column(cost=self.scale): -1.0} if smallest else {}
        whole = 0.0 if smallest else 1 + SLACK
        for at in range(p):
            linear.row({t[at]: 1.0, **{c: -v for c, v in self.spent[at]["seconds"].items()}}, 0.0, 0.0)
            linear.row({slowest: 1.0, t[at]: -1.0}, 0.0)
            linear.row({once: 1.0, **{c: -v for c, v in self.spent[at]["once"].items()}}, 0.0)
            peak = linear.column()
            for block in range(first[at], (*first[1:], len(problem.chain))[at]):
                linear.row({peak: 1.0, **{column: -nbytes for column, nbytes in self.peaks(block)}}, 0.0)
            self.spent[at]["bytes"][peak] = 1.0
            linear.row({**self.spent[at]["bytes"], **room}, upper=whole * problem.limit * self.bytes - problem.reserve[at] * self.bytes)

    def peaks(self, block: int) -> list[tuple[int, float]]:
        """(column, its share of the block's peak)."""
        return [
            (column, cost.peak * self.bytes)
            for (op, home), columns in self.x.items()
            if home == block
            for column, cost in zip(columns, self.problem.ops[op].costs)
        ]

    def _spend(self, at: int, column: int, amount: Amount) -> None:
        spent = self.spent[at]
        spent["seconds"][column] += amount.seconds * self.scale
        spent["once"][column] += amount.once * self.scale
        spent["bytes"][column] += (amount.state + self.problem.in_flight[at] * amount.saved) * self.bytes

    def _flow(self, use: StagedUse, source: int, user: int) -> dict[tuple[int, int], dict[int, float]]:
        """f of one instance of a use, with (B) and (C): a term for each way that is possible."""
        linear, value = self.linear, self.problem.values[use.value]
        sources, targets = defaultdict(list), defaultdict(list)
        for strategy, column in enumerate(self.x[value.op, source]):
            sources[value.placements[strategy]].append(column)
        for strategy, column in enumerate(self.x[use.op, user]):
            targets[use.demands[strategy]].append(column)
        f = {(a, b): linear.column(upper=1.0) for a in sources for b in targets if a == b or (a, b) in value.moves}
        for a, columns in sources.items():
            terms = {f[pair]: 1.0 for pair in f if pair[0] == a}
            linear.row({**terms, **{column: -1.0 for column in columns}}, 0.0, 0.0)  # (B)
        for b, columns in targets.items():
            terms = {f[pair]: 1.0 for pair in f if pair[1] == b}
            linear.row({**terms, **{column: -1.0 for column in columns}}, 0.0, 0.0)  # (C)
        return {pair: {column: 1.0} for pair, column in f.items()}

    def _uses(self) -> None:
        problem, linear = self.problem, self.linear
        stage = {block: stage_of(self.first, block) for block in range(len(problem.chain))}
        w: dict[tuple[int, int, int, int, int], int] = {}
        readers: dict[tuple[int, int], set[int]] = defaultdict(set)
        for use in problem.uses:
            value = problem.values[use.value]
            for source, user in problem.links(use):
                at = stage[user]
                readers[use.value, source].add(at)
                went: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)  # terms whose sum says whether the use goes so
                if (value.op, source) == (use.op, user):  # its own result: x takes the place of f
                    for pair, column in zip(zip(value.placements, use.demands), self.x[use.op, user]):
                        went[pair][column] = 1.0
                    for (a, b), terms in went.items():
                        if a != b and (a, b) not in value.moves:
                            linear.row(terms, 0.0, 0.0)
                else:
                    went.update(self._flow(use, source, user))
                for (a, b), terms in went.items():
                    if a == b or (a, b) not in value.moves or not any(value.moves[a, b]):
                        continue
                    key = (use.value, source, at, a, b)
                    if key not in w:
                        w[key] = linear.column(upper=1.0)
                        self._spend(at, w[key], value.moves[a, b])
                    linear.row({w[key]: 1.0, **{column: -factor for column, factor in terms.items()}}, 0.0)  # (D)
        inside: dict[int, set[int]] = defaultdict(set)
        for (index, source), stages in readers.items():
            value = problem.values[index]
            if source == RESIDENT:
                inside[value.op] |= stages
                continue
            for cut in range(stage[source], max(stages)):
                for strategy, column in enumerate(self.x[value.op, source]):
                    seconds = value.sends.get(value.placements[strategy], 0.0)
                    nbytes = value.buffers.get(value.placements[strategy], 0.0)
                    for at in (cut, cut + 1):
                        self._spend(at, column, Amount(seconds=seconds, state=nbytes))
        for (index, block), columns in self.x.items():
            for at in sorted(inside[index]) if block == RESIDENT else [stage[block]]:
                for column, cost in zip(columns, problem.ops[index].costs):
                    self._spend(at, column, cost)

    def solve(
        self, time_limit: float, gap: float = 0.0, presolve: bool = True
    ) -> tuple[StagedAnswer, StagedEvaluation, float, bool] | None:
        found = self.linear.solve(time_limit=time_limit, gap=max(gap, _EXACT), presolve=presolve)
        if found is None:
            return None
        answer = self.read(found)
        evaluation, claimed = evaluate_staged(self.problem, answer), found.objective / self.scale
        over = evaluation.objective - claimed
        over = abs(over) if found.optimal and gap <= _EXACT else over  # what is not the best may pay for what it does not use
        if evaluation.violations or over > _AGREEMENT * max(claimed, evaluation.objective):
            if presolve:  # once in thousands of problems, HiGHS calls an answer optimal that is not, but not then
                return self.solve(time_limit, gap, presolve=False)
            raise SolverError(f"the solver claims {claimed!r} s, evaluate says {evaluation.objective!r} s {evaluation.violations}")
        return answer, evaluation, found.bound / self.scale, found.optimal

    def read(self, found: LinearAnswer) -> StagedAnswer:
        choices = {key: max(range(len(columns)), key=lambda i: found.values[columns[i]]) for key, columns in self.x.items()}
        return StagedAnswer(self.first, choices)
