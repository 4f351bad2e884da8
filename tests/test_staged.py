"""The staged problem: strategies, stages and memory at once. Exact answers against every answer tried; folded ones against exact ones."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from random import Random

import pytest

from autoshard.solvers import whole
from autoshard.solvers.brute import brute_staged
from autoshard.solvers.exact import TooSlow, solve_exactly
from autoshard.solvers.folded import Effort, OutOfMemory, solve_folded
from autoshard.solvers.problem import Infeasible
from autoshard.solvers.staged import (
    EVERY,
    FIRST,
    NEXT,
    NOTHING,
    RESIDENT,
    Amount,
    StagedAnswer,
    StagedOp,
    StagedProblem,
    StagedUse,
    StagedValue,
    evaluate_staged,
)
from autoshard.solvers.twins import refined
from autoshard.solvers.whole import proven, solve_staged

ANYWHERE = float("inf")


def toy(limit: float) -> StagedProblem:
    """Two blocks of one op, two stages, three micro-batches. Each op is fast (4 s, saves 5 bytes) or small (6 s, saves 1)."""
    cost = (Amount(4.0, 0.0, 10.0, 5.0), Amount(6.0, 0.0, 10.0, 1.0))
    ops = (StagedOp("a", cost, 0), StagedOp("b", cost, 1))
    value = StagedValue("x", 0, (0, 0), {(0, 1): Amount(1.0)}, {0: 0.5})
    return StagedProblem(ops, (value,), (StagedUse(0, 1, (1, 1)),), (0, 1), (True,), (2, 1), 3, limit)


def test_evaluate_by_hand():
    answer = StagedAnswer((0, 1), {(0, 0): 1, (1, 1): 0})
    found = evaluate_staged(toy(14.0), answer)
    assert found.seconds == [6.5, 5.5], "a small 6 + send 0.5; b fast 4 + conversion 1 + send 0.5"
    assert found.objective == 12.0 + 2 * 6.5
    assert found.memory == [10 + 2 * 1, 10 + 5], "two micro-batches are in flight in stage 0, one in stage 1"
    assert found.violations == ["stage 1 holds 15 bytes, the limit is 14"]


@pytest.mark.parametrize("limit, choices", [(20.0, (0, 0)), (15.0, (1, 0)), (12.0, (1, 1))])
def test_memory_decides(limit, choices):
    found = solve_exactly(toy(limit))
    assert (found.answer.choices[0, 0], found.answer.choices[1, 1]) == choices
    assert found.status == "optimal" and found.gap == 0.0


def test_nothing_fits():
    with pytest.raises(Infeasible, match="no plan of 2 stages fits in 11 bytes"):
        solve_exactly(toy(11.0))


# --- random problems ---------------------------------------------------------------------------------------------------


def amount(rng: Random) -> Amount:
    seconds, once, state, saved = rng.choice([0, 1, 2, 3, 5]), rng.choice([0, 0, 1, 2]), rng.choice([0, 1, 3]), rng.choice([0, 1, 2, 4])
    return Amount(float(seconds), float(once), float(state), float(saved), float(rng.choice([0, 0, 2])))


def anything(rng: Random) -> StagedProblem:
    """Up to six ops in up to six blocks, with one weight that several may read; conversions that cost or are impossible."""
    n = rng.randint(2, 6)
    stages, microbatches = rng.randint(1, min(3, n)), rng.randint(1, 4)
    blocks = rng.randint(stages, n)
    parts = sorted([*range(blocks), *(rng.randrange(blocks) for _ in range(n - blocks))])
    ops = [StagedOp(f"op{i}", tuple(amount(rng) for _ in range(rng.randint(1, 3))), part) for i, part in enumerate(parts)]
    if n < 6 and rng.random() < 0.5:
        ops.append(StagedOp("weight", tuple(amount(rng)._replace(peak=0.0) for _ in range(rng.randint(1, 3))), RESIDENT))
    values, uses = [], []
    for i, op in enumerate(ops):
        readers = [j for j in range(0 if op.part == RESIDENT else i + 1, n) if rng.random() < 0.5]
        if not readers:
            continue
        moves = {
            (a, b): Amount(float(rng.choice([0, 1, 2])), float(rng.choice([0, 0, 1])), 0.0, float(rng.choice([0, 0, 1])))
            for a in range(3)
            for b in range(3)
            if a != b and rng.random() < 0.85
        }
        sends = {a: rng.choice([0, 1, 2]) * 0.5 for a in range(3)} if op.part != RESIDENT else {}
        buffers = {a: 1.0 - sent for a, sent in sends.items()}
        values.append(StagedValue(f"v{i}", i, tuple(rng.randrange(3) for _ in op.costs), moves, sends, buffers))
        uses += [StagedUse(len(values) - 1, j, tuple(rng.randrange(3) for _ in ops[j].costs)) for j in readers]
    legal = tuple(rng.random() < 0.85 for _ in range(blocks - 1))
    in_flight = tuple(min(microbatches, stages - s) for s in range(stages))
    reserve = tuple(float(rng.choice([0, 0, 1])) for _ in range(stages))
    chain, limit = tuple(range(blocks)), float(rng.randint(3, 25))
    return StagedProblem(tuple(ops), tuple(values), tuple(uses), chain, legal, in_flight, microbatches, limit, reserve)


def layers(rng: Random) -> StagedProblem:
    """A block, one to three layers of two ops, a block; sometimes a weight that the first and the last block share."""
    stages, microbatches, count = rng.randint(1, 3), rng.randint(1, 5), rng.randint(2, 3)

    def costs(share=1.0, peak=2.0):
        return tuple(
            Amount(share * rng.uniform(1, 5), rng.uniform(0, 2), rng.uniform(0, 3), rng.uniform(0, 4), rng.choice([0.0, peak]))
            for _ in range(rng.randint(2, 3))
        )

    ops = [StagedOp(name, costs(), part) for name, part in (("first", 0), ("a", 1), ("b", 1), ("last", 2))]
    tied = rng.random() < 0.5
    if tied:
        ops.append(StagedOp("weight", costs(0.2, 0.0), RESIDENT))
    values, uses = [], []

    def value(op: int, readers):
        placements = tuple(rng.randrange(2) for _ in ops[op].costs)
        moves = {(a, 1 - a): Amount(rng.uniform(0, 1), 0.0, 0.0, rng.choice([0.0, rng.uniform(0, 1)])) for a in range(2)}
        sends = {a: rng.uniform(0, 0.3) for a in range(2)} if ops[op].part != RESIDENT else {}
        buffers = {a: 0.3 - sent for a, sent in sends.items()}  # what sends less is held longer
        values.append(StagedValue(f"v{op}", op, placements, moves, sends, buffers))
        for reader, link in readers:
            uses.append(StagedUse(len(values) - 1, reader, tuple(rng.randrange(2) for _ in ops[reader].costs), link))

    value(0, [(1, FIRST)] + ([(2, EVERY)] if rng.random() < 0.4 else []))
    value(1, [(2, "here")])
    value(2, [(1, NEXT), (3, FIRST)])
    if tied:
        value(4, [(0, "here"), (3, "here")])
    in_flight = tuple(min(microbatches, stages - s) for s in range(stages))
    chain = (0, *[1] * count, 2)
    return StagedProblem(
        tuple(ops), tuple(values), tuple(uses), chain, (True,) * (count + 1), in_flight, microbatches, rng.uniform(4, 30)
    )


def against_brute(seed: int) -> bool:
    """Whether the problem has an answer; fails if the exact solver's is not the best."""
    problem = anything(Random(seed))
    expected = brute_staged(problem)
    try:
        found = solve_exactly(problem)
    except Infeasible:
        assert expected is None
        return False
    assert expected is not None and found.objective == pytest.approx(expected[1], abs=1e-9)
    assert found.bound <= found.objective and not found.evaluation.violations
    return True


def test_the_best_of_all_answers():
    assert sum(against_brute(seed) for seed in range(120)) > 50


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_best_of_all_answers_for_thousands():
    assert sum(against_brute(seed) for seed in range(1000, 5000)) > 1500


def folded_against_exact(seed: int) -> float | None:
    """How much dearer the folded answer is, as a share; None if there is none. Fails if its bound is above the best answer."""
    problem = layers(Random(seed))
    try:
        exact = solve_exactly(problem)
    except Infeasible:
        with pytest.raises(OutOfMemory):
            solve_folded(problem)
        return None
    found = solve_folded(problem)
    assert evaluate_staged(problem, found.answer).objective == pytest.approx(found.objective)
    assert found.bound <= exact.objective * (1 + 1e-7)
    assert found.objective >= exact.objective * (1 - 1e-7)
    assert solve_folded(problem, cutoff=exact.objective * 1.001).objective >= exact.objective * (1 - 1e-7)  # not TooSlow
    with contextlib.suppress(TooSlow):  # but not OutOfMemory: there is an answer, if not so fast a one
        assert solve_folded(problem, cutoff=exact.objective * 0.97).objective >= exact.objective * (1 - 1e-7)
    return found.objective / exact.objective - 1


def check_folded(seeds: range) -> None:
    worse = [w for seed in seeds if (w := folded_against_exact(seed)) is not None]
    assert len(worse) > len(seeds) / 4 and sum(worse) / len(worse) < 0.05 and sorted(worse)[len(worse) // 2] < 1e-6


@pytest.mark.parametrize("start", range(0, 60, 20))
def test_folded_layers(start):
    """What has an answer gets one, which fits and is good; no answer is better than the bound."""
    check_folded(range(start, start + 20))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_hundreds_of_folded_layers():
    check_folded(range(1000, 1500))


def test_a_cut_costs_what_crosses_it_at_least():
    """A value that the last of three blocks reads crosses both cuts, and so does one of the others; the cheapest placement counts."""
    ops = tuple(StagedOp(f"op{i}", (NOTHING, NOTHING), i) for i in range(3))
    skip = StagedValue("skip", 0, (0, 1), {}, {0: 3.0, 1: 2.0}, {0: 10.0, 1: 20.0})
    near = [StagedValue(f"near{i}", i, (0, 0), {}, {0: sent}, {0: 1.0}) for i, sent in enumerate((5.0, 4.0))]
    uses = (StagedUse(0, 2, (0, 1)), StagedUse(1, 1, (0, 0)), StagedUse(2, 2, (0, 0)))
    problem = StagedProblem(ops, (skip, *near), uses, (0, 1, 2), (True, True), (1, 1), 1, 1.0)
    assert problem.least_cut == (6.0, 11.0)
    assert replace(problem, legal=(True, False)).least_cut == (7.0, 11.0)


@pytest.mark.parametrize("limit, fast", [(29.0, 0), (30.0, 1), (41.0, 2), (42.0, 3), (70.0, 4)])
def test_twins_are_as_fast_as_there_is_room_for(limit, fast):
    """Five blocks of 6 bytes, or of 12 and a second less once a step; a weight that both stages read is 6 of the first stage's 18 at least,
    or 12, and gains the most. A third way, that is faster yet, leaves another placement, and so is no twin."""
    costs = (Amount(2.0, 1.0, 6.0), Amount(2.0, 0.0, 12.0), Amount(1.0, 0.0, 6.0))
    ops = (StagedOp("a", costs, 0), StagedOp("weight", (Amount(0.0, 3.0, 6.0), Amount(0.0, 1.0, 12.0)), RESIDENT))
    values = (StagedValue("x", 0, (0, 0, 1), {}, {}), StagedValue("w", 1, (0, 0), {}, {}))
    uses = (StagedUse(0, 0, (0, 0, 1), NEXT), StagedUse(1, 0, (0, 0, 0)))
    problem = StagedProblem(ops, values, uses, (0,) * 5, (True,) * 4, (1, 1), 2, limit)
    slow = StagedAnswer((0, 3), {(1, RESIDENT): 0, **{(0, block): 0 for block in range(5)}})
    answer, found = refined(problem, slow, evaluate_staged(problem, slow))
    assert not found.violations
    assert sum(answer.choices[0, block] for block in range(3)) + answer.choices[1, RESIDENT] == fast
    assert set(answer.choices.values()) <= {0, 1}


def tied(limit: float) -> StagedProblem:
    """A weight of 6 bytes, by rows or by columns, that the first and the last of four blocks read: both of two stages hold it.

    The first block is fastest with rows (1 s, with columns 3), the last one with columns; a conversion saves another 9 bytes.
    """
    moves = {(0, 1): Amount(saved=9.0), (1, 0): Amount(saved=9.0)}
    ops = (
        StagedOp("weight", (Amount(state=6.0), Amount(state=6.0)), RESIDENT),
        StagedOp("first", (Amount(1.0), Amount(3.0)), 0),
        StagedOp("layer", (Amount(2.0, state=1.0),), 1),
        StagedOp("last", (Amount(3.0), Amount(1.0)), 2),
    )
    values = (StagedValue("weight", 0, (0, 1), moves, {}), StagedValue("x", 2, (0,), {}, {}))
    uses = (StagedUse(0, 1, (0, 1)), StagedUse(0, 3, (0, 1)), StagedUse(1, 2, (0,), NEXT), StagedUse(1, 3, (0, 0), FIRST))
    return StagedProblem(ops, values, uses, (0, 1, 1, 2), (True,) * 3, (2, 1), 3, limit)


@pytest.mark.parametrize("limit", [30.0, 10.0])
def test_parts_agree_on_a_weight_that_both_read(limit):
    """Where there is room either could convert it; where there is not, one of the two takes it as it is fastest for the other."""
    found, best = solve_folded(tied(limit)), brute_staged(tied(limit))[1]
    assert found.objective == pytest.approx(best) and found.bound <= best * (1 + 1e-9)
    with pytest.raises(OutOfMemory):
        solve_folded(tied(6.5))


@pytest.mark.parametrize("many", [whole.MANY, 0])
def test_blocks_that_do_not_repeat(many, monkeypatch):
    """What has an answer gets one that is within the gap of the best; with few strategies, not far from it. No bound is above the best."""
    monkeypatch.setattr(whole, "MANY", many)
    worse, parts = [], {}
    for seed in range(100):
        problem, parts = anything(Random(seed)), {}
        try:
            best = solve_exactly(problem).objective
        except Infeasible:
            with pytest.raises(Infeasible):
                solve_staged(problem, Effort())
            continue
        found = solve_staged(problem, Effort(), parts=parts)
        assert found.bound <= best * (1 + 1e-7) and best * (1 - 1e-7) <= found.objective
        assert evaluate_staged(problem, found.answer).objective == pytest.approx(found.objective)
        reserve = tuple(r - 1.0 for r in problem.reserve)
        roomy = solve_exactly(replace(problem, reserve=reserve))
        assert proven(problem, reserve, found, parts) <= roomy.objective * (1 + 1e-7)
        with pytest.raises(TooSlow):
            solve_staged(problem, Effort(), cutoff=0.9 * found.bound)
        worse.append(found.objective / best - 1 if best else 0.0)
    assert len(worse) > 40 and max(worse) <= (0.0101 if many else 0.5) and sum(worse) / len(worse) < 0.02
