"""The staged problem of a model whose blocks repeat: what a block may cost, and how many blocks of which cost go into which stage.

Two questions are asked in turns (Dantzig and Wolfe's decomposition, with bounds from below kept as well as answers from above):

block    at prices for time and memory, the cheapest way to run a block of one part: a sharding problem, solved exactly. Its answer is a
         *column*: seconds t, once o, state w, saved a. Its proven bound b is a *cut*: no way to run that block has
         prices . (t, o, w, a, peak) < b
master   n[j, s, c] blocks of segment j (a run of blocks of one part) in stage s are run as column c, y[j, s] in all

    minimise  sum over s of t[s] + (m - 1) T + G     T >= t[s], G >= o[s];  t[s], o[s], w[s], a[s]: n times the columns', t[s] with sends
    (B) sum_c n[j, s, c] = y[j, s]     sum_s y[j, s] = blocks of segment j     segments lie in stages in order, every stage has a block
    (M) reserve[s] + buffers + w[s] + in_flight[s] a[s] + P[s] <= limit;  P[s] >= peak of every column of stage s
    (R) v[r, k] says which strategy k a resident op r has: no n but of columns that suppose that; stages that read it pay for it
    (S) blocks of one part leave what the next block reads in one placement (their *stream*), so that any column may follow any other

From above: the master over the columns, n whole. From below: the master in which (t, o, w, a) of y blocks may be anything that no cut
forbids, y whole: no plan is faster, whatever its columns. The duals of the first, with y as the second has it, are the next prices.

Between two parts, the bound sees what the second pays to read the first, in whichever placement it would rather read it; and it holds for
answers that hand over as (S) says. The first block of a segment has none of its kind before it: a cut has a bound of its own for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from math import floor

from .columns import Part
from .exact import StagedSolution, TooSlow, size, solve_exactly
from .linear import LinearAnswer
from .master import TINY, Master, Segment
from .problem import Infeasible, OutOfTime, SolverError
from .staged import RESIDENT, Amount, StagedAnswer, StagedEvaluation, StagedProblem, evaluate_staged
from .twins import refined

_ROUNDS = 12
_BETWEEN = (4.0, 16.0)  # a first guess: memory is worth so many times less than what would make it as dear as time
_ATTEMPTS = 3  # to find an answer that fits, in a round
_LITTLE = 1e-4  # of the objective: a round that gains less is the last


@dataclass(frozen=True)
class Effort:
    """How hard to try.

    seconds: that all of it may take. gap: to the proven bound, of an answer that is good enough. whole: binary variables, at most, of a
    problem that is solved whole where blocks of few kinds gave no answer and none is proven not to exist.
    """

    seconds: float = 60.0
    gap: float = 0.005
    whole: int = 10_000


class OutOfMemory(Infeasible):
    """No plan fits, or, of a large problem, none was found. Attributes: limit; least, the smallest limit for which a plan was found;
    proven, below which there is none; stage, which binds there (bytes, bytes, bytes, index); answer, that of the least, if there is one."""

    def __init__(self, limit: float, least: float, proven: float, stage: int, stages: int, answer: StagedAnswer | None = None):
        super().__init__(f"no plan of {stages} stages fits in {limit:.0f} bytes: the least is {least:.0f} bytes, bound by stage {stage}")
        self.limit, self.least, self.proven, self.stage, self.answer = limit, least, proven, stage, answer


def solve_folded(
    problem: StagedProblem,
    effort: Effort = Effort(),
    progress: Callable[[str], None] | None = None,
    parts: dict[int, Part] | None = None,
    cutoff: float = float("inf"),
) -> StagedSolution:
    """The best answer found, within the effort's gap of the proven bound if the rounds suffice.

    parts: what was learnt from the same problem with another limit or reserve, {} at first; is added to.
    cutoff: seconds of a step; slower plans are of no use.

    Raises:
        ValueError: a boundary of the chain is not legal; ``exact`` handles those.
        OutOfMemory: with the numbers; where ``proven`` is no more than the limit, and the problem is not small, only none was found.
        TooSlow: proven.
    """
    if not all(problem.legal):
        raise ValueError("the chain may be cut between any two blocks")
    return _Search(problem, effort, progress or (lambda text: None), {} if parts is None else parts, cutoff).run()


def proven(problem: StagedProblem, parts: dict[int, Part], time_limit: float = 60.0) -> float:
    """Seconds that no answer is faster than, by what is known of the parts from a solution with whatever limit and reserve."""
    search = _Search(problem, Effort(time_limit, 0.0), lambda text: None, parts, float("inf"))
    search.start()
    search.prove()
    return search.bound


class _Search:
    def __init__(self, problem: StagedProblem, effort: Effort, progress, parts: dict[int, Part], cutoff: float):
        self.problem, self.gap, self.progress, self.cutoff = problem, effort.gap, progress, cutoff
        self.began, self.time_limit, self.whole = time.perf_counter(), effort.seconds, effort.whole
        self.segments: list[Segment] = []
        for part, run in groupby(problem.chain):
            start = sum(segment.count for segment in self.segments)
            self.segments.append(Segment(part, start, len(list(run))))
        for part in dict.fromkeys(problem.chain):
            if part not in parts:
                parts[part] = Part(problem, part)
        self.parts = parts
        self.bound, self.scale = 0.0, 1.0
        self.tolerance = 0.3 * self.gap
        self.better, self.most = float("inf"), self.all_blocks()  # only what takes less is of use, and has no more blocks in a stage
        self.unseen = [0.0] * problem.stages  # bytes that the master from above did not see
        self.best: tuple[float, StagedAnswer, StagedEvaluation] | None = None

    def left(self) -> float:
        return max(1.0, self.time_limit - (time.perf_counter() - self.began))

    def run(self) -> StagedSolution:
        try:
            self.rounds()
        except SolverError:  # out of time, or HiGHS failed
            if self.best is None:
                raise
        if self.best is None:
            error = self.out_of_memory()
            if error.proven > self.problem.limit or size(self.problem) > self.whole:
                raise error
            try:
                return solve_exactly(self.problem, self.left())
            except (Infeasible, OutOfTime):
                raise error from None
        _, answer, evaluation = self.best
        answer, evaluation = refined(self.problem, answer, evaluation)
        late = time.perf_counter() - self.began > self.time_limit
        status = "time limit" if late and not self.close() else "best found"  # how good that is, the gap says
        return StagedSolution(answer, evaluation, min(self.bound, evaluation.objective), time.perf_counter() - self.began, status)

    def rounds(self) -> None:
        self.start()
        before = float("inf")  # between what was found and what is proven
        for number in range(_ROUNDS):
            proof = self.prove()
            if self.bound >= self.cutoff:
                raise TooSlow(self.bound)
            if proof is None:
                break
            below, found = proof
            self.answers()
            objective = self.best[0] if self.best else float("inf")
            columns = sum(len(part.columns) for part in self.parts.values())
            self.progress(f"round {number + 1}: {objective:.6g} s, at least {self.bound:.6g} s, {columns} kinds of block")
            apart = objective - self.bound
            self.crowd()
            if self.close() or time.perf_counter() - self.began > self.time_limit or apart > before - _LITTLE * objective:
                break
            before = apart if self.best else before
            if not self.reprice(found, below):
                if not self.tolerance:
                    break
                self.tolerance = 0.0
                if not self.reprice(found, below):
                    break

    def all_blocks(self) -> dict[tuple[int, int], int]:
        return {(j, s): segment.count for j, segment in enumerate(self.segments) for s in range(self.problem.stages)}

    def prove(self) -> tuple[Master, LinearAnswer] | None:
        """Solve the master from below; None if nothing is ``better``. Raises OutOfMemory."""
        below = self.master(below=True)
        found = below.lp.solve(time_limit=self.left(), gap=1e-5)
        if found is None and self.better < float("inf"):
            self.bound = max(self.bound, self.better)
            return None
        if found is None:
            raise self.out_of_memory()
        self.bound = max(self.bound, (found.bound + below.offset) / self.scale)
        return below, found

    def crowd(self) -> None:
        """How many blocks a stage can hold in an answer that is better than the best: by the relaxed master from below."""
        self.better = better = min(self.best[0] if self.best else float("inf"), self.cutoff)
        if better == float("inf"):
            return
        for (j, s), most in self.most.items():
            if self.segments[j].count == 1:
                continue
            below = self.master(below=True)
            below.lp.row({column: cost for column, cost in enumerate(below.lp.costs) if cost}, upper=better * self.scale - below.offset)
            below.lp.costs = [0.0] * len(below.lp.costs)
            below.lp.costs[below.y[j, s]] = -1.0
            found = below.lp.solve(relaxed=True)
            if found is not None:
                self.most[j, s] = min(most, max(0, floor(-found.objective + 1e-6)))

    def close(self) -> bool:
        return self.best is not None and self.best[0] - self.bound <= self.gap * self.best[0]

    def master(self, below: bool, least: bool = False) -> Master:
        unseen = (0.0,) * self.problem.stages if below else self.unseen
        return Master(self.problem, self.segments, self.parts, self.scale, least, self.most, unseen, None if below else self.beside())

    def beside(self) -> dict[int, int]:
        """A strategy for each op: what most blocks do in the best answer, or else what the fastest do."""
        found: dict[int, int] = {}
        for index, part in self.parts.items():
            choices = dict(part.columns[0].choices)
            found.update({op: choices[op] for op in part.outside if self.problem.ops[op].part == RESIDENT and op not in found})
            if self.best:
                blocks = self.problem.blocks[index]
                ways = Counter(tuple(self.best[1].choices[op, block] for op in part.own) for block in blocks)
                choices = dict(zip(part.own, ways.most_common(1)[0][0]))
            found.update({op: choices[op] for op in part.own})
        if self.best:
            found.update({op: k for (op, block), k in self.best[1].choices.items() if block == RESIDENT})
        return found

    def start(self) -> None:
        """Ask every part for its fastest block, its smallest, and some between."""
        p, m = self.problem.stages, self.problem.microbatches
        fast = Amount(1 + (m - 1) / p, 1 / p)
        self.ask({part: [fast] for part in self.parts}, {part: [fast] for part in self.parts})
        total = sum(segment.count * self.parts[segment.part].columns[0].amount.priced(fast) for segment in self.segments)
        self.scale = 1e3 / total if total > 0 else 1.0
        weight = total / (p * self.problem.limit)  # seconds a byte: at this price a full rank costs as much as its time
        flight = max(self.problem.in_flight)
        small = Amount(fast.seconds * TINY, fast.once * TINY, weight, weight * flight, weight)
        between = [Amount(fast.seconds, fast.once, weight / share, weight * flight / share) for share in _BETWEEN]
        self.ask({part: [small, *between] for part in self.parts}, {part: [small, between[0]] for part in self.parts})

    def ask(self, wanted: dict[int, list[Amount]], first: dict[int, list[Amount]]) -> bool:
        """Ask the parts, also for what goes well with the others' choices, and for bounds of first blocks. Whether anything is new."""
        asked = [self.parts[part].ask(price, self.left(), self.tolerance) for part, prices in wanted.items() for price in prices]
        asked += [self.parts[part].open(price, self.left()) for part, prices in first.items() for price in prices]
        beside = self.beside()
        for index, prices in wanted.items():
            part = self.parts[index]
            others = {op: k for op, k in beside.items() if op in part.outside and self.problem.ops[op].part == RESIDENT}
            if part.alone:
                others.update({op: k for op, k in beside.items() if self.problem.ops[op].part not in (RESIDENT, index)})
            for pinned in filter(None, (others, *self.elsewhere(part))):
                asked += [part.ask(price, self.left(), beside=pinned) for price in prices]
        return any(asked)

    def elsewhere(self, part: Part) -> list[dict[int, int]]:
        """Strategies of resident ops that columns of other parts suppose, and none of ``part``'s."""
        found = []
        for op in (op for op in part.outside if self.problem.ops[op].part == RESIDENT):
            supposed = {dict(column.choices)[op] for other in self.parts.values() if op in other.outside for column in other.columns}
            found += [{op: k} for k in sorted(supposed - {dict(column.choices)[op] for column in part.columns})]
        return found

    def reprice(self, found: LinearAnswer, below: Master) -> bool:
        """Ask every part at the prices of the stages, with the blocks where the bound has them; whether that was new."""
        for least in (False, True):  # where no columns fit, what matters is to fit
            if least:
                below = self.master(below=True, least=True)
                found = below.lp.solve(time_limit=self.left(), gap=1e-4)
                if found is None:  # nothing is better, as ``prove`` will see
                    return True
            above = self.master(below=False, least=least)
            above.fix({key: float(round(found.values[column])) for key, column in below.y.items()})
            answer = above.lp.solve(relaxed=True, time_limit=self.left())
            if answer is not None and self.ask(*above.prices(answer)):
                return True
            if self.best is not None:
                break
        above = self.master(below=False)  # with the blocks where columns have them: they may not fit where the bound would
        answer = above.lp.solve(relaxed=True, time_limit=self.left())
        return answer is not None and self.ask(*above.prices(answer))

    def answers(self) -> None:
        """Solve the master from above; where it saw too little memory to be needed, again, with as much more."""
        for _ in range(_ATTEMPTS):
            above = self.master(below=False)
            found = above.lp.solve(time_limit=self.left(), gap=max(1e-5, 0.2 * self.gap))
            if found is None:
                return
            evaluation = self.answer(above, found)
            self.unseen = [max(0.0, have - seen) for have, seen in zip(evaluation.memory, above.memory(found))]
            if not evaluation.violations:
                return

    def answer(self, above: Master, found: LinearAnswer) -> StagedEvaluation:
        """Read the columns that the master chose, price that answer, and keep it if it is the best."""
        problem, p, beside = self.problem, self.problem.stages, self.beside()
        choices = {(op, RESIDENT): 0 for op, resident in enumerate(problem.ops) if resident.part == RESIDENT}
        choices.update({(op, RESIDENT): k for (op, k), column in above.v.items() if found.values[column] > 0.5})
        sizes = [0] * p
        for j, segment in enumerate(self.segments):
            block, part = segment.start, self.parts[segment.part]
            stages = [s for s in range(p) if round(found.values[above.y[j, s]])]
            usual = [all(beside[op] == k for op, k in column.choices if op in part.own) for column in part.columns]
            for s in stages:  # the others are priced beside what is usual: at the ends of the segment, it goes to the end
                order = sorted(range(len(usual)), key=lambda c: usual[c] == (s == stages[-1]))
                for c in order:
                    for _ in range(round(found.values[above.n[j, s, c]]) if (j, s, c) in above.n else 0):
                        choices.update({(op, block): k for op, k in part.columns[c].choices if op in part.own})
                        block, sizes[s] = block + 1, sizes[s] + 1
        answer = StagedAnswer(tuple(sum(sizes[:s]) for s in range(p)), choices)
        evaluation = evaluate_staged(problem, answer)
        if not evaluation.violations and (self.best is None or evaluation.objective < self.best[0]):
            self.best = evaluation.objective, answer, evaluation
        return evaluation

    def out_of_memory(self) -> OutOfMemory:
        """What would be enough, and what is surely needed."""
        self.most = self.all_blocks()
        below = self.master(below=True, least=True).lp.solve(time_limit=self.left(), gap=1e-4)
        above = self.master(below=False, least=True)
        found = above.lp.solve(time_limit=self.left(), gap=1e-4)
        if found is None:  # what there is of columns does not go together
            return OutOfMemory(self.problem.limit, *[below.bound * self.problem.limit] * 2, 0, self.problem.stages)
        limit, memory = self.problem.limit, above.memory(found)
        stage = max(range(len(memory)), key=memory.__getitem__)
        return OutOfMemory(limit, found.objective * limit, below.bound * limit, stage, self.problem.stages)
