"""The staged problem, solved whole where every block is one of its kind and there are few ways to cut, and by ``folded`` elsewhere.

Blocks that do not repeat have little to agree on with others of their kind, and much with their neighbours, of which ``folded`` sees what
it once saw; here a program sees all of them. First with the strategies alone that some column of ``folded`` has: a tenth of all, and an
answer that is seldom more than a percent from the best. If the bound says less, and there are not too many, with all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from math import comb

from . import folded
from .columns import Part
from .exact import StagedSolution, TooSlow, least_seconds, smallest, solve_exactly
from .folded import Effort, OutOfMemory, solve_folded
from .problem import Infeasible, SolverError
from .staged import Amount, StagedAnswer, StagedProblem

WAYS = 5_000
"""To cut the chain, all of which are looked at."""

MANY = 4_000
"""Strategies of all ops, from which on those alone are looked at that columns have."""

GAP = 0.01
"""To the bound, at which an answer is good enough, whatever the effort."""

_SECONDS = Amount(1.0)


def alone(problem: StagedProblem) -> bool:
    """Whether every block is one of its kind, and there are few ways to cut."""
    return len(set(problem.chain)) == len(problem.chain) and comb(sum(problem.legal), problem.stages - 1) <= WAYS


def solve_staged(
    problem: StagedProblem,
    effort: Effort,
    progress: Callable[[str], None] | None = None,
    parts: dict[int, Part] | None = None,
    cutoff: float = float("inf"),
) -> StagedSolution:
    """The best answer found. Arguments and errors as those of ``solve_folded``."""
    if not alone(problem):
        return solve_folded(problem, effort, progress, parts, cutoff)
    began, gap, say = time.perf_counter(), max(effort.gap, GAP), progress or (lambda text: None)
    parts = {} if parts is None else parts

    def left() -> float:
        return max(1.0, effort.seconds - (time.perf_counter() - began))

    try:
        bound = folded.proven(problem, parts, effort.seconds)
    except OutOfMemory as error:
        raise _out_of_memory(problem, parts, error.proven, left()) from None
    if bound >= cutoff:
        raise TooSlow(bound)
    fastest = _fastest(problem, parts, effort.seconds)
    few, kept = _few(problem, parts)
    known = None
    try:
        found = solve_exactly(few, left() / 2, gap, fastest)
        known = _of_all(found.answer, kept)
        say(f"{found.objective:.6g} s with {_size(few)} strategies of {_size(problem)}, at least {bound:.6g} s")
    except (Infeasible, SolverError) as reason:
        say(f"with {_size(few)} strategies of {_size(problem)}: {reason}")
    if known is not None and (_size(problem) > min(MANY, effort.whole) or found.objective * (1 - gap) <= bound):
        return replace(found, answer=known, bound=min(bound, found.objective))
    try:
        found = solve_exactly(problem, left(), gap, fastest, known, cutoff)
        return replace(found, bound=max(found.bound, min(bound, found.objective)))
    except TooSlow:
        raise
    except Infeasible:
        raise _out_of_memory(problem, parts, problem.limit, left()) from None
    except SolverError:
        return solve_folded(problem, replace(effort, seconds=left()), progress, parts, cutoff)


def _out_of_memory(problem: StagedProblem, parts: dict[int, Part], known: float, time_limit: float) -> OutOfMemory:
    """Of a problem without an answer within ``known`` bytes; with an answer of few strategies that needs little."""
    few, kept = _few(problem, parts)
    try:
        answer, evaluation = smallest(few, time_limit)
    except (Infeasible, SolverError):
        return OutOfMemory(problem.limit, known, known, 0, problem.stages)
    least, stage = max((nbytes, s) for s, nbytes in enumerate(evaluation.memory))
    return OutOfMemory(problem.limit, least, known, stage, problem.stages, _of_all(answer, kept))


def proven(
    problem: StagedProblem, reserve: tuple[float, ...], solution: StagedSolution, parts: dict[int, Part], time_limit: float = 60.0
) -> float:
    """Seconds that no answer to ``problem`` with another reserve is faster than, given a solution of it, and what was learnt from it."""
    other = replace(problem, reserve=reserve)
    bound = folded.proven(other, parts, time_limit)
    if not alone(problem):
        return bound
    if all(now >= before for now, before in zip(reserve, problem.reserve)):
        return max(bound, solution.bound)
    return max(bound, least_seconds(other, time_limit, _fastest(other, parts, time_limit))) if _size(problem) <= MANY else bound


def _size(problem: StagedProblem) -> int:
    return sum(len(op.costs) for op in problem.ops)


def _fastest(problem: StagedProblem, parts: dict[int, Part], time_limit: float) -> list[float]:
    """Seconds that each block takes at least."""
    found = []
    for index in problem.chain:
        parts[index].ask(_SECONDS, time_limit)
        found.append(max(floor.bound for floor in parts[index].floors if floor.prices == _SECONDS))
    return found


def _few(problem: StagedProblem, parts: dict[int, Part]) -> tuple[StagedProblem, list[list[int]]]:
    """The problem with the strategies alone that some column has, and those of each op."""
    wanted: list[set[int]] = [set() for _ in problem.ops]
    for part in parts.values():
        for column in part.columns:
            for op, strategy in column.choices:
                wanted[op].add(strategy)
    kept = [sorted(found) or list(range(len(op.costs))) for found, op in zip(wanted, problem.ops)]
    ops = tuple(replace(op, costs=tuple(op.costs[k] for k in ks)) for op, ks in zip(problem.ops, kept))
    values = tuple(replace(value, placements=tuple(value.placements[k] for k in kept[value.op])) for value in problem.values)
    uses = tuple(replace(use, demands=tuple(use.demands[k] for k in kept[use.op])) for use in problem.uses)
    return replace(problem, ops=ops, values=values, uses=uses), kept


def _of_all(answer: StagedAnswer, kept: list[list[int]]) -> StagedAnswer:
    """An answer with few strategies, as one of the whole problem."""
    return StagedAnswer(answer.first, {(op, block): kept[op][k] for (op, block), k in answer.choices.items()})
