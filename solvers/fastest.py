"""The staged problem, memory aside: every kind of block run the fastest way, and stages as even as blocks allow. No integer program but
the sharding problem of one block of each kind is solved, so this takes no longer for more stages or blocks; nothing is proven."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, product

from .columns import Column, Part
from .problem import Infeasible
from .staged import RESIDENT, Amount, StagedAnswer, StagedEvaluation, StagedProblem, evaluate_staged

_COMBINATIONS = 32  # of columns, tried for one answer


def fastest(problem: StagedProblem, parts: dict[int, Part], time_limit: float = 60.0) -> tuple[StagedAnswer, StagedEvaluation]:
    """The best answer found to a problem of which every answer fits. Raises Infeasible if no ways of its blocks go together.

    parts: {}; what is learnt is added to it, for ``solve_folded``.
    """
    p, m = problem.stages, problem.microbatches
    fast = Amount(1 + (m - 1) / p, 1 / p)
    parts.update({index: Part(problem, index) for index in dict.fromkeys(problem.chain)})
    for part in parts.values():
        part.ask(fast, time_limit)
    chosen = {op: k for part in parts.values() for op, k in part.columns[0].choices if problem.ops[op].part == part.index}
    for part in parts.values():  # with what the others do, and with what they suppose of weights that several read
        shared = [op for op in part.outside if problem.ops[op].part == RESIDENT]
        supposed = [sorted({dict(c.choices)[op] for q in parts.values() if op in q.outside for c in q.columns}) for op in shared]
        for held in islice(product(*supposed), _COMBINATIONS):
            others = {op: k for op, k in chosen.items() if problem.ops[op].part != part.index} if part.alone else {}
            if held or others:
                part.ask(fast, time_limit, beside=others | dict(zip(shared, held)))
    best: tuple[StagedAnswer, StagedEvaluation] | None = None
    columns = [sorted(part.columns, key=lambda column: column.amount.priced(fast)) for part in parts.values()]
    for combination in islice(product(*columns), _COMBINATIONS):
        answer = _answer(problem, dict(zip(parts, combination)))
        if answer is None:
            continue
        evaluation = evaluate_staged(problem, answer)
        if not evaluation.violations and (best is None or evaluation.objective < best[1].objective):
            best = answer, evaluation
    if best is None:
        raise Infeasible("the fastest ways of the blocks do not go together")
    return best


def _answer(problem: StagedProblem, columns: dict[int, Column]) -> StagedAnswer | None:
    """All blocks of a part run as its column says; None if columns disagree on what an op that several parts read does."""
    held: dict[int, int] = {}
    choices: dict[tuple[int, int], int] = {}
    for index, column in columns.items():
        for op, k in column.choices:
            if problem.ops[op].part == RESIDENT and held.setdefault(op, k) != k:
                return None
            if problem.ops[op].part == index:
                choices.update({(op, block): k for block in problem.blocks[index]})
    choices.update({(op, RESIDENT): held.get(op, 0) for op, resident in enumerate(problem.ops) if resident.part == RESIDENT})
    return StagedAnswer(even([columns[part].amount.seconds for part in problem.chain], problem.stages), choices)


def even(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """The first block of each stage, none empty, so that the longest stage is as short as can be.

    >>> even([1, 1, 1, 1, 3], 2)
    (0, 4)
    """
    low, high = max(max(seconds), sum(seconds) / stages), sum(seconds)
    best = _filled(seconds, stages, high)
    for _ in range(60):
        middle = (low + high) / 2
        found = _filled(seconds, stages, middle)
        low, high, best = (middle, high, best) if found is None else (low, middle, found)
    return best


def _filled(seconds: Sequence[float], stages: int, most: float) -> tuple[int, ...] | None:
    """Stages that are filled up to ``most`` one after the other; None if that takes more stages. The last are not left empty."""
    first, time = [0], 0.0
    for block, t in enumerate(seconds):
        if block and (time + t > most or len(seconds) - block <= stages - len(first)):
            first.append(block)
            time = 0.0
        time += t
        if len(first) > stages:
            return None
    return tuple(first) if all(sum(seconds[a:b]) <= most * (1 + 1e-12) for a, b in zip(first, [*first[1:], len(seconds)])) else None
