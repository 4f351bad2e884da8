"""The fastest answer to a staged problem, memory aside: a legal one, hardly slower than the best."""

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from test_staged import layers

from autoshard.solvers.fastest import even, fastest
from autoshard.solvers.folded import solve_folded
from autoshard.solvers.staged import evaluate_staged


def longest(seconds: list[float], first: tuple[int, ...]) -> float:
    return max(sum(seconds[a:b]) for a, b in zip(first, [*first[1:], len(seconds)]))


def test_stages_as_even_as_can_be():
    rng = Random(0)
    for _ in range(300):
        seconds = [rng.choice([0.5, 1.0, 2.0, 3.5]) for _ in range(rng.randint(1, 9))]
        stages = rng.randint(1, len(seconds))
        first = even(seconds, stages)
        assert len(first) == stages and first[0] == 0 and list(first) == sorted(set(first))
        possible = ((0, *cuts) for cuts in combinations(range(1, len(seconds)), stages - 1))
        assert longest(seconds, first) == pytest.approx(min(longest(seconds, cuts) for cuts in possible))


def test_near_the_best():
    apart = []
    for seed in range(60):
        problem = replace(layers(Random(seed)), limit=1e9)
        answer, evaluation = fastest(problem, {})
        assert evaluation == evaluate_staged(problem, answer) and not evaluation.violations
        solution = solve_folded(problem)
        assert evaluation.objective >= solution.bound * (1 - 1e-9), seed
        apart.append(evaluation.objective / solution.evaluation.objective - 1)
    assert max(apart) < 0.15 and sum(apart) / len(apart) < 0.02
