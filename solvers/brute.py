"""Every answer tried: for tests and toy problems, to hold against the solvers."""

from __future__ import annotations

from itertools import combinations, product

from .cuts import CutProblem, evaluate_cuts
from .exact import ways_to_cut
from .problem import ShardingProblem, evaluate
from .staged import StagedAnswer, StagedProblem, evaluate_staged


def brute_sharding(problem: ShardingProblem) -> tuple[tuple[int, ...], float] | None:
    """The cheapest choices (the first in lexical order) and their seconds; None if nothing is feasible."""
    best: tuple[tuple[int, ...], float] | None = None
    for choices in product(*(range(len(op.costs)) for op in problem.ops)):
        price = evaluate(problem, choices)
        if not price.violations and (best is None or price.objective < best[1]):
            best = choices, price.objective
    return best


def brute_cuts(problem: CutProblem) -> tuple[tuple[int, ...], float] | None:
    """The best first items of the stages (the first in lexical order) and their objective; None if nothing is feasible."""
    best: tuple[tuple[int, ...], float] | None = None
    for cuts in combinations(range(1, len(problem.items)), problem.stages - 1):
        price = evaluate_cuts(problem, (0, *cuts))
        if not price.violations and (best is None or price.objective < best[1]):
            best = (0, *cuts), price.objective
    return best


def least_memory(problem: CutProblem) -> float | None:
    """The least limit, in bytes, under which ``problem`` has an answer; None if it has too few legal cuts."""
    peaks = []
    for cuts in combinations(range(1, len(problem.items)), problem.stages - 1):
        if all(problem.boundaries[cut - 1].legal for cut in cuts):
            peaks.append(max(evaluate_cuts(problem, (0, *cuts)).memory))
    return min(peaks, default=None)


def brute_staged(problem: StagedProblem) -> tuple[StagedAnswer, float] | None:
    """The best answer over every cut and every combination of strategies, and its seconds; None if nothing is feasible."""
    best: tuple[StagedAnswer, float] | None = None
    keys = [(op, block) for op in range(len(problem.ops)) for block in problem.homes(op)]
    for first in ways_to_cut(problem):
        for combination in product(*(range(len(problem.ops[op].costs)) for op, _ in keys)):
            answer = StagedAnswer(first, dict(zip(keys, combination)))
            price = evaluate_staged(problem, answer)
            if not price.violations and (best is None or price.objective < best[1]):
                best = answer, price.objective
    return best
