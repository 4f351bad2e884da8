"""The whole decision as plain numbers: a strategy for every op and a stage for every block, under memory; and its independent pricing.

A strategy stands for all that is decided about an op: its sharding, whether its result is kept for backward, the ZeRO level of a weight.
The chain of blocks is cut into p stages. With m micro-batches, a step takes

    sum over stages of t[s]  +  (m - 1) max t[s]  +  max once[s]

    t[s], once[s]   seconds (of one micro-batch; once a step) of the ops of the stage, of the conversions that its ops demand, and, in t[s],
                    of what it sends: of a value that crosses the cut behind a stage, that stage and the next spend ``sends`` each
    memory[s]       reserve[s] + sum of state + in_flight[s] * sum of saved + the most of any block's sum of peak + buffers  <=  limit

A conversion is paid once for each (value, stage, demanded placement). Ops of no part (weights that several parts read) are paid for in
every stage that reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

RESIDENT = -1
"""The part of an op that lies in no block: it is in every stage that reads it."""

HERE, NEXT, FIRST, EVERY = "here", "next", "first", "every"

SLACK = 1e-9
"""Relative: what fits a limit exactly must not fail by rounding, here or in a solver."""


class Amount(NamedTuple):
    """seconds: of one micro-batch, forward and backward. once: seconds a step. state: bytes all the time. saved: bytes for each
    micro-batch in flight. peak: bytes while the block is at work in backward, for one micro-batch."""

    seconds: float = 0.0
    once: float = 0.0
    state: float = 0.0
    saved: float = 0.0
    peak: float = 0.0

    def plus(self, other: Amount) -> Amount:
        return Amount(*(a + b for a, b in zip(self, other)))

    def priced(self, prices: Amount) -> float:
        return sum(a * b for a, b in zip(self, prices) if a)


NOTHING = Amount()


@dataclass(frozen=True)
class StagedOp:
    """costs: of each strategy; only these, of ops that lie in blocks, may have a peak. part: the kind of block that it belongs to, or
    RESIDENT. switch: its strategies are worth trying one after the other, as each rules out many of other ops (by a value that has no
    moves)."""

    name: str
    costs: tuple[Amount, ...]
    part: int
    switch: bool = False


@dataclass(frozen=True)
class StagedValue:
    """A result of op ``op``.

    placements: for each strategy of the producer, the id of the placement in which it leaves the value.
    moves: (from, to) -> what that conversion costs. A pair that is absent is impossible; staying (p, p) is free.
    sends: placement -> seconds that each of two neighbouring stages spends when the value crosses the cut between them; free if absent.
    buffers: placement -> bytes that each of the two holds for it, all the time; none if absent.
    """

    name: str
    op: int
    placements: tuple[int, ...]
    moves: dict[tuple[int, int], Amount]
    sends: dict[int, float]
    buffers: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StagedUse:
    """``op`` reads ``value``, in the placement ``demands[strategy]``.

    link: between ops of one part, HERE (the same block) or NEXT (the op of the next block of the part); from another part, FIRST (only the
    first block of the user's part reads it) or EVERY (all its blocks do). From another part, it is the last block's value that is read.
    """

    value: int
    op: int
    demands: tuple[int, ...]
    link: str = HERE


@dataclass(frozen=True)
class StagedProblem:
    """chain: the part of each block, in order; blocks of one part are alike. legal: whether the chain may be cut behind each block but
    the last. in_flight: of each stage. limit: bytes of a rank. reserve: bytes of each stage that no choice changes."""

    ops: tuple[StagedOp, ...]
    values: tuple[StagedValue, ...]
    uses: tuple[StagedUse, ...]
    chain: tuple[int, ...]
    legal: tuple[bool, ...]
    in_flight: tuple[int, ...]
    microbatches: int
    limit: float
    reserve: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.legal) != len(self.chain) - 1:
            raise ValueError(f"{len(self.chain)} blocks have {len(self.chain) - 1} boundaries, not {len(self.legal)}")
        object.__setattr__(self, "reserve", tuple(self.reserve) or (0.0,) * len(self.in_flight))
        for use in self.uses:
            if len(use.demands) != len(self.ops[use.op].costs):
                value, user = self.values[use.value].name, self.ops[use.op].name
                raise ValueError(f"use of {value!r} by {user!r}: one demand for each strategy is needed")

    @property
    def stages(self) -> int:
        return len(self.in_flight)

    @cached_property
    def blocks(self) -> dict[int, list[int]]:
        """The blocks of each part."""
        found = defaultdict(list)
        for block, part in enumerate(self.chain):
            found[part].append(block)
        return found

    @property
    def least_state(self) -> float:
        """Bytes of state that the fullest stage has at least: the mean over stages of the least that every op can have."""
        return sum(min(amount.state for amount in op.costs) * len(self.homes(i)) for i, op in enumerate(self.ops)) / self.stages

    @cached_property
    def least_cut(self) -> tuple[float, float]:
        """Seconds and bytes that each of two neighbouring stages spends on the cut between them, at least."""
        reach: dict[tuple[int, int], int] = {}  # of (value, block of its producer), the last block that reads it
        for index, uses in self.readings.items():
            for _, (source, user) in uses:
                for a, b in zip(source.tolist(), user.tolist()):
                    reach[index, a] = max(b, reach.get((index, a), a))
        steps = np.zeros((2, len(self.chain)))  # what begins to cross, and ceases to, at each boundary
        for (index, block), last in reach.items():
            if block != RESIDENT and last > block:
                value = self.values[index]
                placements = set(value.placements)
                least = [min(of.get(placement, 0.0) for placement in placements) for of in (value.sends, value.buffers)]
                steps[:, block] += least
                steps[:, last] -= least
        legal = [cut for cut, allowed in enumerate(self.legal) if allowed]
        if not legal:
            return 0.0, 0.0
        seconds, nbytes = np.cumsum(steps, axis=1)[:, legal].min(axis=1)
        return max(0.0, float(seconds)), max(0.0, float(nbytes))

    def homes(self, op: int) -> list[int]:
        """The blocks that op is in: [RESIDENT] for one of no part."""
        part = self.ops[op].part
        return [RESIDENT] if part == RESIDENT else self.blocks[part]

    @cached_property
    def readings(self) -> dict[int, list[tuple[StagedUse, tuple[np.ndarray, np.ndarray]]]]:
        """Of each value that is read: its uses, and of every instance of them, the block of the producer and of the user."""
        found = defaultdict(list)
        for use in self.uses:
            links = np.array(self.links(use), dtype=int).reshape(-1, 2)
            if len(links):
                found[use.value].append((use, (links[:, 0], links[:, 1])))
        return found

    def nth(self, op: int, blocks: np.ndarray) -> np.ndarray:
        """Where ``blocks`` stand among the homes of op."""
        return np.searchsorted(self.homes(op), blocks)

    def together(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks``, at most, one stage can hold: the other stages have a block each."""
        blocks = sorted(blocks)
        longest = len(self.chain) - self.stages + 1
        return max(bisect_left(blocks, start + longest) - i for i, start in enumerate(blocks))

    def links(self, use: StagedUse) -> list[tuple[int, int]]:
        """(block of the producer, block of the user) of every instance of a use."""
        source, users = self.homes(self.values[use.value].op), self.homes(use.op)
        if source == [RESIDENT]:
            return [(RESIDENT, block) for block in users]
        if self.ops[self.values[use.value].op].part == self.ops[use.op].part:
            return list(zip(users, users)) if use.link == HERE else list(zip(users, users[1:]))
        return [(source[-1], block) for block in (users[:1] if use.link == FIRST else users)]


@dataclass(frozen=True)
class StagedAnswer:
    """first: the first block of each stage. choices: (op, block) -> strategy; the block of a resident op is RESIDENT."""

    first: tuple[int, ...]
    choices: dict[tuple[int, int], int]


@dataclass(frozen=True)
class StagedEvaluation:
    """objective: seconds of a step. seconds, once, memory: of each stage. violations: what is wrong, in words."""

    objective: float
    seconds: list[float]
    once: list[float]
    memory: list[float]
    violations: list[str]


def stage_of(first: tuple[int, ...], block: int) -> int:
    return sum(1 for start in first if start <= block) - 1


def evaluate_staged(problem: StagedProblem, answer: StagedAnswer) -> StagedEvaluation:
    """Price an answer by reading the problem again, without any solver."""
    p, first = problem.stages, answer.first
    violations = []
    if len(first) != p or first[0] != 0 or any(b <= a for a, b in zip(first, [*first[1:], len(problem.chain)])):
        return StagedEvaluation(0.0, [], [], [], [f"{first} are not the first blocks of {p} stages of {len(problem.chain)} blocks"])
    violations += [f"the chain can't be cut before block {start}" for start in first[1:] if not problem.legal[start - 1]]
    stage = np.repeat(np.arange(p), np.diff([*first, len(problem.chain)]))
    chosen = {i: np.array([answer.choices[i, block] for block in problem.homes(i)]) for i in range(len(problem.ops))}
    total, sends, buffers = np.zeros((p, len(NOTHING))), np.zeros(p), np.zeros(p)
    inside: dict[int, set[int]] = defaultdict(set)  # of a resident op: the stages that read it
    for index, uses in problem.readings.items():
        value, reads = problem.values[index], []
        ids = 1 + max(*value.placements, *(want for use, _ in uses for want in use.demands))
        shape = (ids, ids, p, len(problem.chain) + 1)
        for use, (source, user) in uses:
            have = np.array(value.placements)[chosen[value.op][problem.nth(value.op, source)]]
            want = np.array(use.demands)[chosen[use.op][problem.nth(use.op, user)]]
            reads.append(np.ravel_multi_index((have, want, stage[user], source + 1), shape))
            for pair in dict.fromkeys(zip(have.tolist(), want.tolist())):
                if pair[0] != pair[1] and pair not in value.moves:
                    reader = problem.ops[use.op].name
                    violations.append(f"{value.name} can't go from placement {pair[0]} to {pair[1]}, which {reader} demands")
        have, want, at, source = np.unravel_index(np.unique(np.concatenate(reads)), shape)  # once each: they are paid once
        pairs, kind = np.unique(have * shape[1] + want, return_inverse=True)
        moves = [NOTHING if a == b else value.moves.get((a, b), NOTHING) for a, b in (divmod(pair, shape[1]) for pair in pairs.tolist())]
        np.add.at(total, at, np.array(moves)[kind])
        if problem.ops[value.op].part == RESIDENT:
            inside[value.op].update(at.tolist())
            continue
        last: dict[int, tuple[int, int]] = {}  # of the blocks whose value crosses cuts: its placement, the last stage that reads it
        source -= 1
        for i in np.flatnonzero(at > stage[source]).tolist():
            block, end = int(source[i]), int(at[i])
            last[block] = int(have[i]), max(end, last.get(block, (0, end))[1])
        for block, (placement, end) in last.items():
            for cut in range(stage[block], end):
                sends[cut : cut + 2] += value.sends.get(placement, 0.0)
                buffers[cut : cut + 2] += value.buffers.get(placement, 0.0)
    peaks = np.zeros(len(problem.chain))
    for index, op in enumerate(problem.ops):
        costs = np.array(op.costs)[chosen[index]]
        if op.part == RESIDENT:
            total[sorted(inside[index])] += costs[0]
        else:
            np.add.at(total, stage[problem.homes(index)], costs)
            peaks[problem.homes(index)] += costs[:, Amount._fields.index("peak")]
    total = [Amount(*amounts) for amounts in total.tolist()]
    seconds = [amount.seconds + sent for amount, sent in zip(total, sends.tolist())]
    memory = []
    for s, (start, end, amount) in enumerate(zip(first, [*first[1:], len(problem.chain)], total)):
        held = problem.reserve[s] + float(buffers[s]) + float(peaks[start:end].max())
        memory.append(held + amount.state + problem.in_flight[s] * amount.saved)
    for at, nbytes in enumerate(memory):
        if nbytes > problem.limit * (1 + SLACK):
            violations.append(f"stage {at} holds {nbytes:.0f} bytes, the limit is {problem.limit:.0f}")
    once = [amount.once for amount in total]
    return StagedEvaluation(sum(seconds) + (problem.microbatches - 1) * max(seconds) + max(once), seconds, once, memory, violations)
