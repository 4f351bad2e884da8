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
from dataclasses import dataclass
from itertools import combinations
from math import comb

from .linear import LinearProgram
from .problem import Infeasible, SolverError
from .staged import RESIDENT, SLACK, Amount, StagedAnswer, StagedEvaluation, StagedProblem, StagedUse, evaluate_staged, stage_of

_AGREEMENT = 1e-6


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


def ways_to_cut(problem: StagedProblem) -> list[tuple[int, ...]]:
    """The first blocks of the stages, for every legal way to cut the chain."""
    places = [i + 1 for i, legal in enumerate(problem.legal) if legal]
    return [(0, *cuts) for cuts in combinations(places, problem.stages - 1)]


def size(problem: StagedProblem) -> int:
    """Binary variables of all the programs that ``solve_exactly`` may solve."""
    ways = comb(sum(problem.legal), problem.stages - 1)
    return ways * sum(len(op.costs) * len(problem.homes(i)) for i, op in enumerate(problem.ops))


def solve_exactly(problem: StagedProblem, time_limit: float = 60.0) -> StagedSolution:
    """The best answer, proven, or the best found in about ``time_limit`` seconds. Raises Infeasible if no answer fits."""
    began = time.perf_counter()
    programs = {first: _Program(problem, first) for first in ways_to_cut(problem)}
    relaxed = {}
    for first, program in programs.items():
        answer = program.linear.solve(relaxed=True)
        if answer is not None:
            relaxed[first] = answer.objective / program.scale
    best: tuple[float, StagedAnswer, StagedEvaluation] | None = None
    bound, proven = float("inf"), True
    for first in sorted(relaxed, key=lambda f: (relaxed[f], f)):
        if best is not None and relaxed[first] >= best[0] * (1 - 1e-12):
            break
        left = time_limit - (time.perf_counter() - began)
        if left <= 0 and best is not None:
            bound, proven = min(bound, relaxed[first]), False
            break
        found = programs[first].solve(max(left, 1.0))
        if found is None:
            continue
        answer, evaluation, least, optimal = found
        bound, proven = min(bound, least), proven and optimal
        if best is None or evaluation.objective < best[0]:
            best = evaluation.objective, answer, evaluation
    if best is None:
        raise Infeasible(f"no plan of {problem.stages} stages fits in {problem.limit:.0f} bytes")
    objective, answer, evaluation = best
    if proven:
        bound = objective
    return StagedSolution(answer, evaluation, min(bound, objective), time.perf_counter() - began, "optimal" if proven else "time limit")


class _Program:
    """The integer program of one way to cut."""

    def __init__(self, problem: StagedProblem, first: tuple[int, ...]):
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
        t = [linear.column(cost=1.0) for _ in range(p)]
        slowest, once = linear.column(cost=m - 1.0), linear.column(cost=1.0)
        for at in range(p):
            linear.row({t[at]: 1.0, **{c: -v for c, v in self.spent[at]["seconds"].items()}}, 0.0, 0.0)
            linear.row({slowest: 1.0, t[at]: -1.0}, 0.0)
            linear.row({once: 1.0, **{c: -v for c, v in self.spent[at]["once"].items()}}, 0.0)
            peak = linear.column()
            for block in range(first[at], (*first[1:], len(problem.chain))[at]):
                linear.row({peak: 1.0, **{column: -nbytes for column, nbytes in self.peaks(block)}}, 0.0)
            self.spent[at]["bytes"][peak] = 1.0
            linear.row(self.spent[at]["bytes"], upper=(problem.limit * (1 + SLACK) - problem.reserve[at]) * self.bytes)

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

    def solve(self, time_limit: float, presolve: bool = True) -> tuple[StagedAnswer, StagedEvaluation, float, bool] | None:
        found = self.linear.solve(time_limit=time_limit, presolve=presolve)
        if found is None:
            return None
        choices = {key: max(range(len(columns)), key=lambda i: found.values[columns[i]]) for key, columns in self.x.items()}
        answer = StagedAnswer(self.first, choices)
        evaluation, claimed = evaluate_staged(self.problem, answer), found.objective / self.scale
        over = evaluation.objective - claimed
        if evaluation.violations or (abs(over) if found.optimal else over) > _AGREEMENT * max(claimed, evaluation.objective):
            if presolve:  # once in thousands of problems, HiGHS calls an answer optimal that is not, but not then
                return self.solve(time_limit, presolve=False)
            raise SolverError(f"the solver claims {claimed!r} s, evaluate says {evaluation.objective!r} s {evaluation.violations}")
        return answer, evaluation, found.bound / self.scale, found.optimal
