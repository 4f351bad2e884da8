"""The staged problem of a model whose blocks repeat: what a block may cost, and how many blocks of which cost go into which stage.

Two questions are asked in turns (Dantzig and Wolfe's decomposition, with bounds from below kept as well as answers from above):

block    at prices for time and memory, the cheapest way to run a block of one part: a sharding problem, solved exactly. Its answer is a
         *column*: seconds t, once o, state w, saved a. Its proven bound b is a *cut*: no way to run that block has
         prices . (t, o, w, a, peak) < b
master   n[j, s, c] blocks of segment j (a run of blocks of one part) in stage s are run as column c, y[j, s] in all

    minimise  sum over s of t[s] + (m - 1) T + G     T >= t[s], G >= o[s];  t[s], o[s], w[s], a[s]: n times the columns', t[s] with sends
    (B) sum_c n[j, s, c] = y[j, s]     sum_s y[j, s] = blocks of segment j     segments lie in stages in order, every stage has a block
    (M) reserve[s] + w[s] + in_flight[s] a[s] + P[s] <= limit;  P[s] >= peak of every column of stage s
    (S) blocks of one part leave what the next block reads in one placement (their *stream*), so that any column may follow any other

From above: the master over the columns, n whole. From below: the master in which (t, o, w, a) of y blocks may be anything that no cut
forbids, y whole: no plan is faster, whatever its columns. The duals of the first, with y as the second has it, are the next prices.

The bound leaves out what crosses from one part to another: conversions there are paid by answers, and no more than one a pair of parts.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby, islice, product
from math import floor, log10

import numpy as np

from . import sharding
from .exact import StagedSolution
from .linear import LinearAnswer, LinearProgram
from .problem import Infeasible, Op, ShardingProblem, Use, Value
from .staged import FIRST, HERE, NEXT, NOTHING, RESIDENT, Amount, StagedAnswer, StagedEvaluation, StagedProblem, evaluate_staged

_TINY = 1e-7  # of the natural price of time: breaks ties of plans that are alike in memory
_ROUNDS = 12
_LITTLE = 1e-4  # of the objective: a round that gains less is the last
_COMBINATIONS = 32  # of choices for ops that several parts read, tried for one answer


class OutOfMemory(Infeasible):
    """No plan fits. Attributes: limit; least, the smallest limit for which a plan was found; proven, below which there is none; stage,
    which binds there (bytes, bytes, bytes, index)."""

    def __init__(self, limit: float, least: float, proven: float, stage: int, stages: int):
        super().__init__(f"no plan of {stages} stages fits in {limit:.0f} bytes: the least is {least:.0f} bytes, bound by stage {stage}")
        self.limit, self.least, self.proven, self.stage = limit, least, proven, stage


@dataclass(frozen=True)
class Column:
    """One way to run a block: its choices by op, what it costs, and the placements of what it hands to the next block."""

    choices: tuple[tuple[int, int], ...]
    amount: Amount
    stream: tuple[int, ...]


@dataclass(frozen=True)
class Floor:
    """A cut: no way to run the block costs less than ``bound`` at these prices."""

    prices: Amount
    bound: float


@dataclass
class Part:
    """What is known of one kind of block, and how to ask for more."""

    problem: StagedProblem
    index: int
    columns: list[Column] = field(default_factory=list)
    floors: list[Floor] = field(default_factory=list)
    asked: set[tuple] = field(default_factory=set)

    def __post_init__(self) -> None:
        problem = self.problem
        self.own = [i for i, op in enumerate(problem.ops) if op.part == self.index]
        self.outside: list[int] = []
        self.inner: list[tuple[int, list, float]] = []  # (value, its uses by this part, share of its price that falls to one block)
        self.streams: list[int] = []  # values that the next block reads
        alone = len(problem.blocks[self.index]) == 1
        readers: dict[int, set[int]] = defaultdict(set)
        for use in problem.uses:
            readers[use.value].update(user for _, user in problem.links(use))
        by_value = defaultdict(list)
        for use in problem.uses:
            if problem.ops[use.op].part != self.index:
                continue
            source = problem.values[use.value].op
            if source in self.own or use.link != FIRST or alone:
                by_value[use.value].append(use)
            if source in self.own and use.link == NEXT and not alone and use.value not in self.streams:
                self.streams.append(use.value)
        self.shares: dict[int, float] = {}
        for value, uses in by_value.items():
            source = problem.values[value].op
            if source in self.own:
                uses = [use for use in uses if use.link == HERE or not alone]
                share = 1.0
            else:
                share = 1.0 / len(readers[value])
                if source not in self.outside:
                    self.outside.append(source)
                    reading = set().union(*(readers[v] for v, other in enumerate(problem.values) if other.op == source))
                    self.shares[source] = 1.0 / len(reading) if problem.ops[source].part == RESIDENT else 0.0
            self.inner.append((value, uses, share))
        self.alone = alone
        self.after = defaultdict(list)  # of a block on its own: value -> its uses by other parts
        for use in problem.uses if alone else ():
            if problem.values[use.value].op in self.own and problem.ops[use.op].part != self.index:
                self.after[use.value].append(use)
        self.at = {op: i for i, op in enumerate(self.own + self.outside)}
        self.moves = {
            index: (list(problem.values[index].moves), np.array(list(problem.values[index].moves.values())).reshape(-1, len(NOTHING)))
            for index in [*(index for index, _, _ in self.inner), *self.after]
        }

    def priced(self, prices: Amount, kept: list[list[int]], beside: Mapping[int, int]) -> ShardingProblem:
        """The sharding problem of one block at prices.

        kept: the strategies that are left, of own and outside ops. beside: strategies of ops of other parts, which may read its values.
        """
        problem = self.problem
        ops = []
        for i, left in zip(self.own + self.outside, kept):
            share = self.shares.get(i, 1.0)
            ops.append(Op(problem.ops[i].name, tuple(share * problem.ops[i].costs[k].priced(prices) for k in left)))
        values, uses = [], []
        inner = {index: (readers, share) for index, readers, share in self.inner}
        for index in dict.fromkeys([*inner, *(self.after if beside else ())]):
            readers, share = inner.get(index, ((), 1.0))
            value, left = problem.values[index], kept[self.at[problem.values[index].op]]
            pairs, amounts = self.moves[index]
            moves = dict(zip(pairs, (amounts @ (share * np.array(prices))).tolist()))
            for use in readers:
                uses.append(Use(len(values), self.at[use.op], tuple(use.demands[k] for k in kept[self.at[use.op]])))
            for use in self.after[index] if index in self.after else ():
                if use.op in beside:
                    uses.append(Use(len(values), len(ops), (use.demands[beside[use.op]],)))
                    ops.append(Op(problem.ops[use.op].name, (0.0,)))
            values.append(Value(value.name, self.at[value.op], tuple(value.placements[k] for k in left), moves))
        return ShardingProblem(tuple(ops), tuple(values), tuple(uses))

    def cases(self) -> list[list[list[int]]]:
        """The strategies of every op, once for each strategy of the switch, if there is one: those that go with it."""
        problem = self.problem
        everything = [list(range(len(problem.ops[i].costs))) for i in self.own + self.outside]
        switch = next((i for i in self.own if problem.ops[i].switch), None)
        if switch is None:
            return [everything]
        found = []
        for strategy in everything[self.at[switch]]:
            kept = [list(left) for left in everything]
            kept[self.at[switch]] = [strategy]
            for index, readers, _ in self.inner:
                value = problem.values[index]
                if value.op == switch:
                    have = value.placements[strategy]
                    for use in readers:
                        at = self.at[use.op]
                        kept[at] = [k for k in kept[at] if use.demands[k] == have or (have, use.demands[k]) in value.moves]
            found.append(kept)
        return found

    def ask(self, prices: Amount, time_limit: float, beside: Mapping[int, int] | None = None) -> bool:
        """Solve at these prices, as shares of the largest and rounded; whether that was not yet asked.

        beside: for a column that goes well with these choices of other parts. Without, the answer is a floor too.
        """
        lead = prices.seconds or max(prices)
        prices = Amount(*(_rounded(price / lead) for price in prices))
        beside = beside or {}
        if (prices, *beside.items()) in self.asked:
            return False
        self.asked.add((prices, *beside.items()))
        bound = float("inf")
        for kept in self.cases():
            kept = [[beside[op]] if op in beside else left for op, left in zip(self.own + self.outside, kept)]
            try:
                found = sharding.solve(self.priced(prices, kept, beside), time_limit=time_limit)
            except Infeasible:
                if not beside:
                    raise
                continue
            bound = min(bound, found.bound * (1 - 1e-9))
            column = self.column({op: kept[i][found.choices[i]] for op, i in self.at.items()})
            if all(column.choices != other.choices for other in self.columns):
                self.columns.append(column)
        if not beside:
            self.floors.append(Floor(prices, bound))
        return True

    def column(self, chosen: Mapping[int, int]) -> Column:
        problem = self.problem
        stream = tuple(problem.values[v].placements[chosen[problem.values[v].op]] for v in self.streams)
        return Column(tuple(sorted(chosen.items())), self.amount(chosen, {}), stream)

    def amount(self, chosen: Mapping[int, int], beside: Mapping[int, int]) -> Amount | None:
        """What a block costs, with what it pays beside other parts' choices; None if they don't go together."""
        problem, total = self.problem, NOTHING
        chosen = {op: beside.get(op, strategy) for op, strategy in chosen.items()}
        resident = [op for op in self.outside if problem.ops[op].part == RESIDENT] if self.alone else []
        for op in self.own + resident:
            total = total.plus(problem.ops[op].costs[chosen[op]])
        wanted: dict[int, set[int]] = defaultdict(set)
        for index, readers, _ in self.inner:
            wanted[index] |= {use.demands[chosen[use.op]] for use in readers}
        for index, readers in self.after.items():
            wanted[index] |= {use.demands[beside[use.op]] for use in readers if use.op in beside}
        share = {index: share for index, _, share in self.inner}
        for index, demands in wanted.items():
            value = problem.values[index]
            have = value.placements[chosen[value.op]]
            for want in demands - {have}:
                if (have, want) not in value.moves:
                    return None
                total = total.plus(Amount(*(share.get(index, 1.0) * x for x in value.moves[have, want])))
        return total

    def sends(self, stream: tuple[int, ...]) -> float:
        """Seconds that each of two stages spends on a cut between two blocks."""
        return sum(self.problem.values[v].sends.get(p, 0.0) for v, p in zip(self.streams, stream))

    def least_sends(self) -> float:
        return sum(
            min(self.problem.values[v].sends.get(p, 0.0) for p in self.problem.values[v].placements) for v in self.streams
        )


def _rounded(x: float, digits: int = 4) -> float:
    return round(x, digits - 1 - floor(log10(x))) if x else 0.0


@dataclass(frozen=True)
class Segment:
    """A run of blocks of one part."""

    part: int
    start: int
    count: int


class Master:
    """The master program: from below over floors, or from above over columns.

    y: column of each (segment, stage). n: of each (segment, stage, column of the part), from above.

    beside: from above: a strategy for each op, by which blocks on their own are priced beside other parts. None: from below.
    """

    def __init__(self, problem: StagedProblem, segments: list[Segment], parts: dict[int, Part], scale: float, least: bool, beside):
        self.problem, self.segments, self.parts, self.scale, self.least = problem, segments, parts, scale, least
        self.lp = lp = LinearProgram()
        p = problem.stages
        clock = 0.0 if least else 1.0
        self.spent = [{name: {} for name in ("seconds", "once", "bytes")} for _ in range(p)]
        self.y = {(j, s): lp.column(upper=segment.count, integer=True) for j, segment in enumerate(segments) for s in range(p)}
        self.n: dict[tuple[int, int, int], int] = {}
        self._order()
        self.peaks = [lp.column() for _ in range(p)]
        for s, peak in enumerate(self.peaks):
            self.spent[s]["bytes"][peak] = 1.0
        if beside is None:
            self._floors(clock)
        else:
            self._columns(clock, beside)
        slowest, once = lp.column(cost=clock * (problem.microbatches - 1)), lp.column(cost=clock)
        excess = lp.column(cost=1.0) if least else None
        cut = min(part.least_sends() for part in parts.values()) * scale
        self.time_rows, self.once_rows, self.memory_rows = [], [], []
        for s, spent in enumerate(self.spent):
            cuts = (s > 0) + (s < p - 1)
            self.time_rows.append(lp.row({slowest: 1.0, **{c: -v for c, v in spent["seconds"].items()}}, cuts * cut))
            self.once_rows.append(lp.row({once: 1.0, **{c: -v for c, v in spent["once"].items()}}, 0.0))
            room, whole = ({excess: -1.0}, 0.0) if least else ({}, 1.0)
            self.memory_rows.append(lp.row({**spent["bytes"], **room}, upper=whole - problem.reserve[s] / problem.limit))  # (M)
        self.offset = 2 * (p - 1) * cut * clock

    def _order(self) -> None:
        """Segments lie in stages in order, and every stage has a block."""
        lp, y, p = self.lp, self.y, self.problem.stages
        for s in range(p):
            lp.row({y[j, s]: 1.0 for j in range(len(self.segments))}, 1.0)
        for j, segment in enumerate(self.segments):
            lp.row({y[j, s]: 1.0 for s in range(p)}, segment.count, segment.count)
            if j + 1 == len(self.segments):
                continue
            after = self.segments[j + 1].count
            for s in range(p):
                done = lp.column(upper=1.0, integer=True)  # the segments up to j end in stage s or before
                lp.row({**{y[j, t]: 1.0 for t in range(s + 1)}, done: -float(segment.count)}, 0.0)
                lp.row({**{y[j + 1, t]: 1.0 for t in range(s + 1)}, done: -float(after)}, upper=0.0)

    def _spend(self, s: int, column: int, amount: Amount) -> None:
        spent, problem = self.spent[s], self.problem
        spent["seconds"][column] = amount.seconds * self.scale
        spent["once"][column] = amount.once * self.scale
        spent["bytes"][column] = (amount.state + problem.in_flight[s] * amount.saved) / problem.limit

    def _floors(self, clock: float) -> None:
        lp, limit = self.lp, self.problem.limit
        units = Amount(1 / self.scale, 1 / self.scale, limit, limit, limit)
        for (j, s), y in self.y.items():
            amounts = [lp.column(cost=clock if i == 0 else 0.0) for i in range(len(units))]
            for name, column, unit in zip(Amount._fields, amounts, units):
                self._spend(s, column, Amount(**{name: unit}))
            lp.row({self.peaks[s]: float(self.segments[j].count), amounts[-1]: -1.0}, 0.0)  # the most is no less than the mean
            for bound in self.parts[self.segments[j].part].floors:
                if bound.bound > 0:
                    terms = {column: price * unit / bound.bound for column, price, unit in zip(amounts, bound.prices, units)}
                    lp.row({**terms, y: -1.0}, 0.0)

    def _columns(self, clock: float, beside: Mapping[int, int]) -> None:
        lp, u = self.lp, {}
        amounts = {}
        for index, part in self.parts.items():
            others = {op: k for op, k in beside.items() if self.problem.ops[op].part not in (index, RESIDENT)} if part.alone else {}
            amounts[index] = [part.amount(dict(column.choices), others) for column in part.columns]
        for index, part in self.parts.items():
            streams = sorted({column.stream for column in part.columns})
            if len(streams) > 1:
                for stream in streams:
                    u[index, stream] = lp.column(upper=1.0, integer=True)
                lp.row({u[index, stream]: 1.0 for stream in streams}, 1.0, 1.0)  # (S)
        for (j, s), y in self.y.items():
            segment, terms = self.segments[j], {}
            for c, column in enumerate(self.parts[segment.part].columns):
                amount = amounts[segment.part][c]
                if amount is None:
                    continue
                at = self.n[j, s, c] = lp.column(cost=clock * amount.seconds * self.scale, upper=segment.count, integer=True)
                terms[at] = 1.0
                self._spend(s, at, amount)
                if amount.peak:
                    used = lp.column(upper=1.0, integer=True)
                    lp.row({at: 1.0, used: -float(segment.count)}, upper=0.0)
                    lp.row({self.peaks[s]: 1.0, used: -amount.peak / self.problem.limit}, 0.0)
                if (segment.part, column.stream) in u:
                    lp.row({at: 1.0, u[segment.part, column.stream]: -float(segment.count)}, upper=0.0)
            lp.row({**terms, y: -1.0}, 0.0, 0.0)  # (B)

    def fix(self, y: dict[tuple[int, int], float]) -> None:
        for key, column in self.y.items():
            self.lp.row({column: 1.0}, y[key], y[key])

    def prices(self, found: LinearAnswer) -> dict[int, list[Amount]]:
        """What time and memory are worth in the stages that hold blocks, by part, from the duals of the relaxed program."""
        wanted: dict[int, list[Amount]] = defaultdict(list)
        for s, flight in enumerate(self.problem.in_flight):
            memory = max(0.0, -found.duals[self.memory_rows[s]]) / (self.scale * self.problem.limit)
            clock = _TINY if self.least else 1.0 + max(0.0, found.duals[self.time_rows[s]])
            price = Amount(clock, max(0.0, found.duals[self.once_rows[s]]), memory, memory * flight)
            for j, segment in enumerate(self.segments):
                if found.values[self.y[j, s]] > 1e-6:
                    wanted[segment.part].append(price._replace(peak=memory / segment.count))
        return wanted


def solve_folded(
    problem: StagedProblem,
    time_limit: float = 60.0,
    gap: float = 0.005,
    progress: Callable[[str], None] | None = None,
    parts: dict[int, Part] | None = None,
) -> StagedSolution:
    """The best answer found, within ``gap`` of the proven bound if the rounds suffice.

    parts: what was learnt from the same problem with another limit or reserve, {} at first; is added to.

    Raises:
        ValueError: a boundary of the chain is not legal; ``exact`` handles those.
        OutOfMemory: proven, with the numbers.
    """
    if not all(problem.legal):
        raise ValueError("the chain may be cut between any two blocks")
    return _Search(problem, time_limit, gap, progress or (lambda text: None), {} if parts is None else parts).run()


class _Search:
    def __init__(self, problem: StagedProblem, time_limit: float, gap: float, progress: Callable[[str], None], parts: dict[int, Part]):
        self.problem, self.gap, self.progress = problem, gap, progress
        self.began, self.time_limit = time.perf_counter(), time_limit
        self.segments: list[Segment] = []
        for part, run in groupby(problem.chain):
            start = sum(segment.count for segment in self.segments)
            self.segments.append(Segment(part, start, len(list(run))))
        for part in problem.chain:
            parts.setdefault(part, Part(problem, part))
        self.parts = parts
        self.bound, self.scale = 0.0, 1.0
        self.best: tuple[float, StagedAnswer, StagedEvaluation] | None = None

    def left(self) -> float:
        return max(1.0, self.time_limit - (time.perf_counter() - self.began))

    def run(self) -> StagedSolution:
        self.start()
        before = float("inf")  # between what was found and what is proven
        for number in range(_ROUNDS):
            below = self.master(below=True)
            found = below.lp.solve(time_limit=self.left(), gap=1e-5)
            if found is None:
                raise self.out_of_memory()
            self.bound = max(self.bound, (found.bound + below.offset) / self.scale)
            above = self.master(below=False)
            self.answer(above, above.lp.solve(time_limit=self.left(), gap=1e-5))
            objective = self.best[0] if self.best else float("inf")
            columns = sum(len(part.columns) for part in self.parts.values())
            self.progress(f"round {number + 1}: {objective:.6g} s, at least {self.bound:.6g} s, {columns} kinds of block")
            apart = objective - self.bound
            if self.close() or time.perf_counter() - self.began > self.time_limit or apart > before - _LITTLE * objective:
                break
            before = apart if self.best else before
            if not self.reprice(found, below):
                break
        if self.best is None:
            raise self.out_of_memory()
        objective, answer, evaluation = self.best
        status = "optimal" if self.close() else "time limit"
        return StagedSolution(answer, evaluation, min(self.bound, objective), time.perf_counter() - self.began, status)

    def close(self) -> bool:
        return self.best is not None and self.best[0] - self.bound <= self.gap * self.best[0]

    def master(self, below: bool, least: bool = False) -> Master:
        return Master(self.problem, self.segments, self.parts, self.scale, least, None if below else self.beside())

    def beside(self) -> dict[int, int]:
        """A strategy for each op of a part: what most blocks do in the best answer, or else the fastest."""
        found: dict[int, int] = {}
        for index, part in self.parts.items():
            choices = dict(part.columns[0].choices)
            if self.best:
                blocks = self.problem.blocks[index]
                ways = Counter(tuple(self.best[1].choices[op, block] for op in part.own) for block in blocks)
                choices = dict(zip(part.own, ways.most_common(1)[0][0]))
            found.update({op: choices[op] for op in part.own})
        return found

    def start(self) -> None:
        """Ask every part for its fastest block, its smallest, and some between."""
        p, m = self.problem.stages, self.problem.microbatches
        fast = Amount(1 + (m - 1) / p, 1 / p)
        self.ask({part: [fast] for part in self.parts})
        total = sum(segment.count * self.parts[segment.part].columns[0].amount.priced(fast) for segment in self.segments)
        self.scale = 1e3 / total if total > 0 else 1.0
        weight = total / (p * self.problem.limit)  # seconds a byte: at this price a full rank costs as much as its time
        flight = max(self.problem.in_flight)
        small = Amount(fast.seconds * _TINY, fast.once * _TINY, weight, weight * flight, weight)
        between = Amount(fast.seconds, fast.once, weight, weight * flight)
        self.ask({part: [small, between] for part in self.parts})

    def ask(self, wanted: dict[int, list[Amount]]) -> bool:
        """Ask the parts; blocks on their own also for what goes well with the others. Whether anything is new."""
        asked = [self.parts[part].ask(price, self.left()) for part, prices in wanted.items() for price in prices]
        beside = self.beside()
        for index, prices in wanted.items():
            if self.parts[index].alone:
                others = {op: k for op, k in beside.items() if self.problem.ops[op].part != index}
                asked += [self.parts[index].ask(price, self.left(), others) for price in prices]
        return any(asked)

    def reprice(self, found: LinearAnswer, below: Master) -> bool:
        """Ask every part at the prices of the stages, with the blocks where the bound has them; whether that was new."""
        for least in (False, True):  # where no columns fit, what matters is to fit
            if least:
                below = self.master(below=True, least=True)
                found = below.lp.solve(time_limit=self.left(), gap=1e-4)
            above = self.master(below=False, least=least)
            above.fix({key: float(round(found.values[column])) for key, column in below.y.items()})
            answer = above.lp.solve(relaxed=True, time_limit=self.left())
            if answer is not None and self.ask(above.prices(answer)):
                return True
            if self.best is not None:
                break
        return False

    def answer(self, above: Master, found: LinearAnswer | None) -> None:
        """Read the columns that the master chose, price that answer, and keep it if it is the best."""
        if found is None:
            return
        problem, p = self.problem, self.problem.stages
        choices: dict[tuple[int, int], int] = {}
        sizes = [0] * p
        resident: dict[int, dict[int, None]] = defaultdict(dict)  # what the columns suppose of ops that are in no part
        for j, segment in enumerate(self.segments):
            block = segment.start
            for s in range(p):
                for c, column in enumerate(self.parts[segment.part].columns):
                    for _ in range(round(found.values[above.n[j, s, c]]) if (j, s, c) in above.n else 0):
                        for op, strategy in column.choices:
                            if problem.ops[op].part == segment.part:
                                choices[op, block] = strategy
                            elif problem.ops[op].part == RESIDENT:
                                resident[op][strategy] = None
                        block, sizes[s] = block + 1, sizes[s] + 1
        first = tuple(sum(sizes[:s]) for s in range(p))
        for combination in islice(product(*resident.values()), _COMBINATIONS):
            held = {(op, RESIDENT): strategy for op, strategy in zip(resident, combination)}
            answer = StagedAnswer(first, choices | held)
            evaluation = evaluate_staged(problem, answer)
            if not evaluation.violations and (self.best is None or evaluation.objective < self.best[0]):
                self.best = evaluation.objective, answer, evaluation

    def out_of_memory(self) -> OutOfMemory:
        """What would be enough, and what is surely needed."""
        below = self.master(below=True, least=True).lp.solve(time_limit=self.left(), gap=1e-4)
        above = self.master(below=False, least=True)
        found = above.lp.solve(time_limit=self.left(), gap=1e-4)
        limit = self.problem.limit
        held = zip(self.problem.reserve, above.spent)
        memory = [reserve / limit + sum(v * found.values[c] for c, v in spent["bytes"].items()) for reserve, spent in held]
        stage = max(range(len(memory)), key=memory.__getitem__)
        return OutOfMemory(limit, found.objective * limit, below.bound * limit, stage, self.problem.stages)
