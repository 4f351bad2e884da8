"""How many blocks of which cost go into which stage: the master program of ``folded``, whose letters it uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from .columns import Part
from .linear import LinearAnswer, LinearProgram
from .staged import RESIDENT, SLACK, Amount, StagedProblem

TINY = 1e-7
"""Of the natural price of time: breaks ties of plans that are alike in memory."""


@dataclass(frozen=True)
class Segment:
    """A run of blocks of one part."""

    part: int
    start: int
    count: int


class Master:
    """The master program: from below over floors, or from above over columns.

    y: column of each (segment, stage). From above, n: of each (segment, stage, column of the part); v: of each (resident op, strategy).

    least: for the least memory, not for time. most: blocks of each (segment, stage), of which no answer that is of use has more.
    unseen: bytes of each stage that the columns do not account for.
    beside: from above: a strategy for each op, by which blocks on their own are priced beside other parts. None: from below.
    """

    def __init__(self, problem: StagedProblem, segments: list[Segment], parts: dict[int, Part], scale, least: bool, most, unseen, beside):
        self.problem, self.segments, self.parts, self.scale, self.least, self.most = problem, segments, parts, scale, least, most
        self.lp = lp = LinearProgram()
        p = problem.stages
        clock = 0.0 if least else 1.0
        self.spent = [{name: {} for name in ("seconds", "once", "bytes")} for _ in range(p)]
        self.y = {(j, s): lp.column(upper=most[j, s], integer=True) for j in range(len(segments)) for s in range(p)}
        self.n: dict[tuple[int, int, int], int] = {}
        self.v: dict[tuple[int, int], int] = {}
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
        cut, buffer = problem.least_cut
        self.time_rows, self.once_rows, self.memory_rows = [], [], []
        self.reserved = [reserve + ((s > 0) + (s < p - 1)) * buffer for s, reserve in enumerate(problem.reserve)]
        for s, spent in enumerate(self.spent):
            cuts = (s > 0) + (s < p - 1)
            self.time_rows.append(lp.row({slowest: 1.0, **{c: -v for c, v in spent["seconds"].items()}}, cuts * cut * scale))
            self.once_rows.append(lp.row({once: 1.0, **{c: -v for c, v in spent["once"].items()}}, 0.0))
            room, whole = ({excess: -1.0}, 0.0) if least else ({}, 1.0 + SLACK)
            reserved = (self.reserved[s] + unseen[s]) / problem.limit
            self.memory_rows.append(lp.row({**spent["bytes"], **room}, upper=whole - reserved))  # (M)
        self.offset = 2 * (p - 1) * cut * scale * clock

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
        begins = self._begins()
        for (j, s), y in self.y.items():
            amounts = [lp.column(cost=clock if i == 0 else 0.0) for i in range(len(units))]
            for name, column, unit in zip(Amount._fields, amounts, units):
                self._spend(s, column, Amount(**{name: unit}))
            lp.row({self.peaks[s]: float(self.most[j, s]), amounts[-1]: -1.0}, 0.0)  # the most is no less than the mean
            for bound in self.parts[self.segments[j].part].floors:
                if bound.bound > 0:
                    terms = {column: price * unit / bound.bound for column, price, unit in zip(amounts, bound.prices, units)}
                    lp.row({**terms, y: -1.0, begins[j, s]: 1.0 - bound.first / bound.bound}, 0.0)

    def _begins(self) -> dict[tuple[int, int], int]:
        """Of each (segment, stage): whether the first block of the segment is there."""
        lp, stages = self.lp, range(self.problem.stages)
        begins = {key: lp.column(upper=1.0, integer=True) for key in self.y}
        for j, segment in enumerate(self.segments):
            lp.row({begins[j, s]: 1.0 for s in stages}, 1.0, 1.0)
            for s in stages:
                lp.row({self.y[j, s]: 1.0, begins[j, s]: -1.0}, 0.0)
                lp.row({**{self.y[j, t]: 1.0 for t in range(s)}, begins[j, s]: float(segment.count)}, upper=segment.count)
        return begins

    def _columns(self, clock: float, beside: Mapping[int, int]) -> None:
        lp, u = self.lp, {}
        amounts = {}
        for index, part in self.parts.items():
            others = {op: k for op, k in beside.items() if self.problem.ops[op].part not in (index, RESIDENT)} if part.alone else {}
            amounts[index] = [part.amount(dict(column.choices), others) for column in part.columns]
        for index, part in self.parts.items():
            streams = sorted({column.stream for column in part.columns})
            if part.streams:
                for stream in streams:
                    u[index, stream] = lp.column(upper=1.0, integer=True)
                lp.row({u[index, stream]: 1.0 for stream in streams}, 1.0, 1.0)  # (S)
                self._cross(part, {stream: u[index, stream] for stream in streams}, clock)
        for (j, s), y in self.y.items():
            segment, most, terms = self.segments[j], float(self.most[j, s]), {}
            for c, column in enumerate(self.parts[segment.part].columns):
                amount = amounts[segment.part][c]
                if amount is None:
                    continue
                at = self.n[j, s, c] = lp.column(cost=clock * amount.seconds * self.scale, upper=most, integer=True)
                terms[at] = 1.0
                self._spend(s, at, amount)
                if amount.peak:
                    used = lp.column(upper=1.0, integer=True)
                    lp.row({at: 1.0, used: -most}, upper=0.0)
                    lp.row({self.peaks[s]: 1.0, used: -amount.peak / self.problem.limit}, 0.0)
                if (segment.part, column.stream) in u:
                    lp.row({at: 1.0, u[segment.part, column.stream]: -most}, upper=0.0)
            lp.row({**terms, y: -1.0}, 0.0, 0.0)  # (B)
        self._residents(clock)

    def _cross(self, part: Part, chosen: Mapping[tuple[int, ...], int], clock: float) -> None:
        """What cuts cost more than the least, by the placement in which blocks hand over, as if all lay within the longest part."""
        if part is not max(self.parts.values(), key=lambda other: len(self.problem.blocks[other.index])):
            return
        seconds, nbytes = self.problem.least_cut
        for stream, column in chosen.items():
            sent, held = part.crossing(stream)
            slower, larger = max(0.0, sent - seconds) * self.scale, max(0.0, held - nbytes) / self.problem.limit
            self.lp.costs[column] += 2 * (self.problem.stages - 1) * slower * clock
            for s, spent in enumerate(self.spent):
                cuts = (s > 0) + (s < self.problem.stages - 1)
                if slower:
                    spent["seconds"][column] = cuts * slower
                if larger:
                    spent["bytes"][column] = cuts * larger

    def _residents(self, clock: float) -> None:
        """(R) One strategy for each resident op, paid for in every stage that reads it."""
        lp, problem = self.lp, self.problem
        for op, resident in enumerate(problem.ops):
            reading = [j for j, segment in enumerate(self.segments) if op in self.parts[segment.part].outside]
            if resident.part != RESIDENT or not reading:
                continue
            held = [lp.column(upper=1.0, integer=True) for _ in resident.costs]
            self.v.update({(op, k): column for k, column in enumerate(held)})
            lp.row(dict.fromkeys(held, 1.0), 1.0, 1.0)
            for j in reading:
                supposing: dict[int, dict[int, float]] = {k: {} for k in range(len(held))}
                for c, column in enumerate(self.parts[self.segments[j].part].columns):
                    terms = supposing[dict(column.choices)[op]]
                    terms.update({self.n[j, s, c]: 1.0 for s in range(problem.stages) if (j, s, c) in self.n})
                for k, terms in supposing.items():
                    lp.row({**terms, held[k]: -float(self.segments[j].count)}, upper=0.0)
            if any(any(cost) for cost in resident.costs):
                self._hold(op, held, reading, clock)

    def _hold(self, op: int, held: list[int], reading: list[int], clock: float) -> None:
        lp = self.lp
        for s in range(self.problem.stages):
            here = [lp.column(cost=clock * cost.seconds * self.scale, upper=1.0) for cost in self.problem.ops[op].costs]
            used = lp.column(upper=1.0, integer=True)
            lp.row({**dict.fromkeys(here, 1.0), used: -1.0}, 0.0, 0.0)
            for cost, mine, column in zip(self.problem.ops[op].costs, here, held):
                lp.row({mine: 1.0, column: -1.0}, upper=0.0)
                self._spend(s, mine, cost)
            for j in reading:
                lp.row({used: float(self.most[j, s]), self.y[j, s]: -1.0}, 0.0)

    def memory(self, found: LinearAnswer) -> list[float]:
        """Bytes of each stage, as far as the program sees them."""
        limit, held = self.problem.limit, zip(self.reserved, self.spent)
        return [reserved + limit * sum(v * found.values[c] for c, v in spent["bytes"].items()) for reserved, spent in held]

    def fix(self, y: dict[tuple[int, int], float]) -> None:
        for key, column in self.y.items():
            self.lp.row({column: 1.0}, y[key], y[key])

    def prices(self, found: LinearAnswer) -> tuple[dict[int, list[Amount]], dict[int, list[Amount]]]:
        """What time and memory are worth in the stages that hold blocks, by part, from the duals of the relaxed program; and in those that
        hold the first block of a segment."""
        wanted: dict[int, list[Amount]] = defaultdict(list)
        first: dict[int, list[Amount]] = defaultdict(list)
        begun: set[int] = set()
        for s, flight in enumerate(self.problem.in_flight):
            memory = max(0.0, -found.duals[self.memory_rows[s]]) / (self.scale * self.problem.limit)
            clock = TINY if self.least else 1.0 + max(0.0, found.duals[self.time_rows[s]])
            price = Amount(clock, max(0.0, found.duals[self.once_rows[s]]), memory, memory * flight)
            for j, segment in enumerate(self.segments):
                if found.values[self.y[j, s]] > 1e-6:
                    here = price._replace(peak=memory / segment.count)
                    wanted[segment.part].append(here)
                    if j not in begun:
                        first[segment.part].append(here)
                        begun.add(j)
        return wanted, first
