"""The solvers against brute force, against arithmetic done by hand, and against themselves in another process."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from benchmarks.solver_scale import layered, random_cuts
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.solvers import elimination
from autoshard.solvers.brute import brute_cuts, brute_sharding, least_memory
from autoshard.solvers.cuts import Boundary, CutProblem, Item, OutOfMemory, TooFewCuts, evaluate_cuts, solve_cuts
from autoshard.solvers.sharding import Infeasible, Op, ShardingProblem, SolverError, Use, Value, evaluate, solve

WAYS = pytest.mark.parametrize("largest", [elimination.LARGEST, 0], ids=["elimination", "integer program"])


def with_tables(largest: int):
    return patch.object(elimination, "LARGEST", largest)


# --- sharding: by hand --------------------------------------------------------------------------------------------------

R, S, P = 0, 1, 2  # placement ids: whole, sharded, partial sums
GATHER, REDUCE, SCATTER, SLICE = 4.0, 8.0, 5.0, 0.5
MOVES = {(S, R): GATHER, (P, R): REDUCE, (P, S): SCATTER, (R, S): SLICE}


def chain(*ops: Op, placements, demands) -> ShardingProblem:
    """A -> B -> C ...: ``placements[i]`` of op i's result, ``demands[i]`` of op i's operand (none for the first)."""
    values = tuple(Value(op.name, i, placements[i], MOVES) for i, op in enumerate(ops))
    uses = tuple(Use(i, i + 1, demands[i + 1]) for i in range(len(ops) - 1))
    return ShardingProblem(ops, values, uses)


def test_column_then_row_parallel_beats_gathering_between():
    """A makes x; B and D are matmuls, C follows, E is the loss and wants R. Strategies of a matmul: replicate, column, row.

    B column (2) leaves S, C shard (1), D row (2) takes S and leaves P, E reduces: A 1 + B 2 + C 1 + D 2 + REDUCE 8 + E 1 = 15.
    All replicated: 1 + 6 + 3 + 6 + 1 = 17. Column, column: 1 + 2 + 1 + GATHER 4 + 2 + GATHER 4 + 1 = 15 too, so C at 0.9 decides nothing;
    make the reduce 7: row wins by one.
    """
    moves = {**MOVES, (P, R): 7.0}
    matmul = (6.0, 2.0, 2.0)
    ops = (Op("A", (1.0,)), Op("B", matmul), Op("C", (3.0, 1.0)), Op("D", matmul), Op("E", (1.0,)))
    problem = chain(*ops, placements=[(R,), (R, S, P), (R, S), (R, S, P), (R,)], demands=[(), (R, R, S), (R, S), (R, R, S), (R,)])
    problem = replace(problem, values=tuple(replace(v, moves=moves) for v in problem.values))
    solution = solve(problem)
    assert solution.choices == (0, 1, 1, 2, 0)
    assert solution.objective == pytest.approx(1 + 2 + 1 + 2 + 7 + 1)
    assert solution.status == "optimal" and solution.gap <= 1e-9


def test_a_conversion_is_paid_once_for_all_users():
    """A leaves S only; B, C, D want R for 1 each, or take S for 3 each; E too. One GATHER 4 serves all four: 4 + 4*1 = 8 < 4*3 = 12.

    Paid per user, gathering would cost 4*4 + 4 = 20, and everyone would take S.
    """
    ops = (Op("A", (0.0,)), *(Op(name, (1.0, 3.0)) for name in "BCDE"))
    problem = ShardingProblem(ops, (Value("a", 0, (S,), MOVES),), tuple(Use(0, i, (R, S)) for i in range(1, 5)))
    solution = solve(problem)
    assert solution.choices == (0, 0, 0, 0, 0) and solution.objective == pytest.approx(8.0)
    for_two = replace(problem, uses=problem.uses[:2])  # B and C: 4 + 2 = 6 or 3 + 3 = 6; D and E: 1 each, unused
    assert solve(for_two).objective == pytest.approx(8.0)
    for_one = replace(problem, uses=problem.uses[:1])  # B takes S for 3; C, D, E take 1 each
    assert solve(for_one).choices == (0, 1, 0, 0, 0) and solve(for_one).objective == pytest.approx(6.0)


def test_folded_layers_pay_by_their_counts():
    """A feeds the first of 10 equal layers of B -> C, C feeds B of the next layer (9 times) and E (once).

    B wants R (1) or S (2), C wants and leaves S (1 each). Loop S -> R at GATHER 4 nine times: 10*1 + 9*4; B on S: 10*2 and no gather.
    B on S: A leaves R, SLICE 0.5 once, 10*2 + 10*1 + E gathers 4 = 34.5. B on R: 10*1 + B leaves R, SLICE 0.5*10 + 10*1 + 9*4 + 4 = 65.
    """
    ops = (Op("A", (0.0,)), Op("B", (1.0, 2.0), 10), Op("C", (1.0,), 10), Op("D", (0.0,)), Op("E", (0.0,)))
    values = (
        Value("a", 0, (R,), MOVES),
        Value("b", 1, (R, S), MOVES, 10),
        Value("c within", 2, (S,), MOVES, 9),
        Value("c out", 2, (S,), MOVES, 1),
        Value("d", 3, (R,), MOVES),
    )
    uses = (Use(0, 1, (R, S)), Use(1, 2, (S,)), Use(2, 1, (R, S)), Use(3, 3, (R,)), Use(4, 4, (R,)))
    solution = solve(ShardingProblem(ops, values, uses))
    assert solution.choices == (0, 1, 0, 0, 0) and solution.objective == pytest.approx(34.5)


def test_the_next_instance_of_the_same_op():
    """B feeds itself 4 times over, C, D and E read it too. Strategy 0 (1 s) takes R and leaves S; 1 (3 s) takes and leaves S.

    0: 5*1 + 4*4, and C wants R: another group's value, 4 more = 25. 1: 5*3 + SLICE 0.5 for A's R + GATHER 4 = 19.5.
    """
    ops = (Op("A", (0.0,)), Op("B", (1.0, 3.0), 5), Op("C", (0.0,)), Op("D", (0.0,)), Op("E", (0.0,)))
    values = (Value("a", 0, (R,), MOVES), Value("loop", 1, (S, S), MOVES, 4), Value("out", 1, (S, S), MOVES))
    uses = (Use(0, 1, (R, S)), Use(1, 1, (R, S)), Use(2, 2, (R,)), Use(2, 3, (R,)), Use(2, 4, (S,)))
    solution = solve(ShardingProblem(ops, values, uses))
    assert solution.choices == (0, 1, 0, 0, 0) and solution.objective == pytest.approx(15 + 0.5 + 4)


def test_ties_take_the_first_strategy():
    ops = tuple(Op(name, (1.0, 1.0, 1.0)) for name in "ABCDE")
    values = tuple(Value(op.name, i, (R, R, R), {}) for i, op in enumerate(ops))
    problem = ShardingProblem(ops, values, tuple(Use(i, j, (R, R, R)) for i in range(5) for j in range(i + 1, 5)))
    assert solve(problem).choices == (0, 0, 0, 0, 0)


# --- sharding: errors ---------------------------------------------------------------------------------------------------


def test_infeasible_names_op_and_value():
    problem = chain(Op("A", (0.0,)), Op("B", (0.0,)), placements=[(R,), (R,)], demands=[(), (P,)])
    with pytest.raises(Infeasible, match="no strategy of A is consistent with its neighbours across A") as error:
        solve(problem)
    assert error.value.ops == ("A",) and error.value.values == ("A",)


def test_infeasible_together_names_a_user():
    """Each pair has a consistent choice, the odd ring of three has none: neighbours must differ, and there are two placements."""
    differ = {(0, 2): 1.0, (1, 3): 1.0}  # from 0 only to "I am 1" (2), from 1 only to "I am 0" (3)
    ops = tuple(Op(name, (0.0, 0.0)) for name in "ABCDE")
    values = tuple(Value(f"{op.name}'s", i, (0, 1), differ) for i, op in enumerate(ops))
    uses = tuple(Use(i, (i + 1) % 5, (3, 2)) for i in range(5))
    with pytest.raises(Infeasible) as error:
        solve(ShardingProblem(ops, values, uses))
    assert str(error.value)
    assert set(error.value.ops) <= set("ABCDE") and error.value.ops
    star = tuple(Use(i, j, (3, 2)) for i in range(4) for j in range(4) if i != j)  # all of four must differ from each other
    with pytest.raises(Infeasible, match="no combination of strategies is consistent: . can't be given .'s") as error:
        solve(ShardingProblem(ops[:4], values[:4], star))
    assert set(error.value.values) <= {f"{name}'s" for name in "ABCD"} and error.value.values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: replace(p, ops=(Op("A", (float("inf"),)), p.ops[1])), "op .A.: costs and counts are finite"),
        (lambda p: replace(p, values=(Value("a", 0, (R, R), {}), p.values[1])), "value 'a': one placement for each strategy"),
        (lambda p: replace(p, values=(Value("a", 0, (R,), {(R, S): -1.0}), p.values[1])), "value 'a': moves"),
        (lambda p: replace(p, uses=(Use(7, 0, (R,)),)), "value 7"),
        (lambda p: replace(p, uses=(Use(0, 1, (R, R)),)), "use of 'A' by 'B': one demand"),
    ],
)
def test_malformed_problems_are_refused(change, message):
    problem = chain(Op("A", (0.0,)), Op("B", (0.0,)), placements=[(R,), (R,)], demands=[(), (R,)])
    with pytest.raises(ValueError, match=message):
        solve(change(problem))


def test_evaluate_lists_violations():
    problem = chain(Op("A", (1.0, 2.0)), Op("B", (4.0,)), placements=[(R, S), (R,)], demands=[(), (P,)])
    price = evaluate(problem, (1, 0))
    assert price.objective == 6.0 and price.violations == ["A: can't go from placement 1 to 2, which B demands"]
    assert evaluate(problem, (2, 0)).violations == ["A: no strategy 2, it has 2"]


def test_progress_may_raise():
    """An exception in the callback comes out of solve; it does not end the process."""

    lines = []

    def progress(line):
        lines.append(line)
        if len(lines) > 1:  # the first line is ours, the others HiGHS's
            raise KeyError(line)

    with pytest.raises(KeyError), with_tables(0):
        solve(layered(1, seed=1), progress=progress)
    assert len(lines) == 2 and "after presolve" in lines[0]


# --- sharding: against brute force --------------------------------------------------------------------------------------


@st.composite
def sharding_problems(draw):
    """Up to 6 ops; values with several users, several values of one op, cycles, self loops, repeated uses, impossible moves."""
    seconds = st.sampled_from([0.0, 1e-9, 3e-7, 1e-6, 2e-6, 5e-6, 1e-3, 0.25])
    counts = st.sampled_from([1.0, 1.0, 3.0, 31.0])
    n = draw(st.integers(1, 6))
    ops = [Op(f"op{i}", tuple(draw(st.lists(seconds, min_size=1, max_size=3))), draw(counts)) for i in range(n)]
    placements = st.integers(0, 3)
    values, uses = [], []
    for i in range(draw(st.integers(0, 8))):
        op = draw(st.integers(0, n - 1))
        pairs = draw(st.lists(st.tuples(placements, placements).filter(lambda pair: pair[0] != pair[1]), unique=True, min_size=4))
        moves = {pair: draw(seconds) for pair in pairs}
        width = len(ops[op].costs)
        values.append(Value(f"v{i}", op, tuple(draw(st.lists(placements, min_size=width, max_size=width))), moves, draw(counts)))
        for _ in range(draw(st.integers(1, 4))):
            user = draw(st.integers(0, n - 1))
            width = len(ops[user].costs)
            uses.append(Use(i, user, tuple(draw(st.lists(placements, min_size=width, max_size=width)))))
    return ShardingProblem(tuple(ops), tuple(values), tuple(uses))


@WAYS
@settings(max_examples=400, deadline=None)
@given(problem=sharding_problems())
def test_solver_equals_brute_force(largest, problem):
    best = brute_sharding(problem)
    with with_tables(largest):
        if best is None:
            with pytest.raises(Infeasible):
                solve(problem)
            return
        solution = solve(problem)
    assert solution.status == "optimal"
    assert solution.objective == pytest.approx(best[1], rel=1e-6, abs=1e-15)
    price = evaluate(problem, solution.choices)
    assert price.violations == [] and price.objective == solution.objective
    assert solution.bound <= solution.objective
    assert solution.bound >= best[1] * (1 - 1e-6)


def test_twenty_thousand_flow_variables():
    """A layer of the size of a Llama's, four times: all proven, though most of it is too large to try every answer."""
    problem = layered(4, seed=0)
    sizes = []
    with with_tables(0):
        solution = solve(problem, progress=sizes.append)
    assert solution.status == "optimal" and solution.gap <= 1e-6
    by_elimination = solve(problem)
    assert by_elimination.solver == "elimination" and by_elimination.objective == pytest.approx(solution.objective, rel=1e-6)
    assert solution.variables > 20_000
    assert evaluate(problem, solution.choices).violations == []
    for op, choice in enumerate(solution.choices):  # no single op can do better
        for other in range(len(problem.ops[op].costs)):
            price = evaluate(problem, (*solution.choices[:op], other, *solution.choices[op + 1 :]))
            assert other == choice or price.violations or price.objective >= solution.objective * (1 - 1e-9)


def test_time_limit_gives_the_best_so_far():
    problem = layered(8, seed=3)
    try:
        with with_tables(0):
            solution = solve(problem, time_limit=1.0)
    except SolverError as error:
        assert "HiGHS has no answer after 1 s" in str(error)
        return
    assert evaluate(problem, solution.choices).violations == []
    assert solution.bound <= solution.objective
    assert solution.status == ("optimal" if solution.gap < 1e-8 else "time limit")


# --- cuts ---------------------------------------------------------------------------------------------------------------


def test_five_blocks_on_two_stages():
    """A to E take 4 1 1 1 3 s, cuts 1 s on each side, 3 micro-batches, once a step 1 s a block.

    AB|CDE: t = 6, 6: 12 + 2*6 + 3 = 27.  A|BCDE: t = 5, 7: 12 + 14 + 4 = 30.  ABC|DE: 7, 5: 12 + 14 + 3 = 29.
    """
    items = tuple(Item(seconds, 1.0, 10.0, 1.0) for seconds in (4.0, 1.0, 1.0, 1.0, 3.0))
    problem = CutProblem(items, (Boundary(1.0),) * 4, 2, 3)
    solution = solve_cuts(problem)
    assert solution.first == (0, 2) and solution.objective == pytest.approx(27.0) and solution.bound == solution.objective
    assert solution.stage_seconds == pytest.approx((6.0, 6.0))
    assert solution.memory == (2 * 10 + 2 * 2 * 1, 3 * 10 + 1 * 3 * 1)  # stage 0 holds two micro-batches, the last one
    # AB|CDE needs 33 bytes; with 32, ABC|DE at 3*10 + 2*3 = 36 does not fit, nor does A|BCDE at 44
    with pytest.raises(OutOfMemory, match="no cut into 2 stages fits in 32 bytes: the least is 33 bytes, bound by stage 1") as error:
        solve_cuts(replace(problem, limit=32.0))
    assert (error.value.least, error.value.stage, error.value.limit) == (33.0, 1, 32.0)
    assert solve_cuts(replace(problem, limit=33.0)).first == (0, 2)  # exactly at the boundary
    # were BC not to be parted: A|BCDE costs 30, ABC|DE 29
    assert solve_cuts(replace(problem, boundaries=(Boundary(1.0), Boundary(1.0, False), Boundary(1.0), Boundary(1.0)))).first == (0, 3)


def test_a_transient_peak_belongs_to_the_stage_that_has_it():
    """The last block's peak of 5 counts once, not with every block of its stage: 1 + 1 + 1 + 5 = 8."""
    items = (*(Item(1.0, 0.0, 1.0, 0.0, 2.0),) * 2, Item(1.0, 0.0, 1.0, 0.0, 5.0))
    problem = CutProblem(items, (Boundary(0.0),) * 2, 1, 4, limit=8.0)
    assert solve_cuts(problem).memory == (8.0,)
    with pytest.raises(OutOfMemory):
        solve_cuts(replace(problem, limit=7.0))


def test_too_few_cuts():
    items = (Item(1.0, 0.0, 0.0, 0.0),) * 5
    problem = CutProblem(items, (Boundary(0.0), Boundary(0.0, False), Boundary(0.0, False), Boundary(0.0)), 4, 2)
    with pytest.raises(TooFewCuts, match="4 pipeline stages need 3 legal cut points, there are 2") as error:
        solve_cuts(problem)
    assert (error.value.legal, error.value.needed) == (2, 3)


def test_evaluate_cuts_lists_violations():
    items = (Item(1.0, 0.0, 4.0, 0.0),) * 3
    problem = CutProblem(items, (Boundary(0.0, False), Boundary(0.0)), 2, 1, limit=5.0)
    assert evaluate_cuts(problem, (0, 1)).violations == [
        "stage 1 starts at item 1, which is no legal cut",
        "stage 1 holds 8 bytes, the limit is 5",
    ]
    assert "not the first items of 2 stages" in evaluate_cuts(problem, (0, 3)).violations[0]


@st.composite
def cut_problems(draw):
    amounts = st.sampled_from([0.0, 0.1, 0.3, 1.0, 1.5, 2.0, 7.0])
    n = draw(st.integers(1, 9))
    items = tuple(Item(*(draw(amounts) for _ in range(5))) for _ in range(n))
    boundaries = tuple(Boundary(draw(amounts), draw(st.integers(0, 4)) > 0) for _ in range(n - 1))
    limit = draw(st.sampled_from([None, 5.0, 10.0, 20.0, 40.0]))
    return CutProblem(items, boundaries, draw(st.integers(1, min(n, 5))), draw(st.sampled_from([1, 2, 3, 8, 100])), limit)


@settings(max_examples=400, deadline=None)
@given(cut_problems())
def test_cuts_equal_brute_force(problem):
    best, least = brute_cuts(problem), least_memory(problem)
    if least is None:
        with pytest.raises(TooFewCuts):
            solve_cuts(problem)
        return
    if best is None:
        with pytest.raises(OutOfMemory) as error:
            solve_cuts(problem)
        assert error.value.least == pytest.approx(least)
        assert error.value.least > problem.limit
        assert solve_cuts(replace(problem, limit=least)).memory[error.value.stage] <= least * (1 + 1e-9)
        return
    solution = solve_cuts(problem)
    price = evaluate_cuts(problem, solution.first)
    assert price.violations == [] and price.objective == solution.objective
    assert solution.objective == pytest.approx(best[1], rel=1e-9)
    assert solution.status == "optimal" and solution.bound == solution.objective


def test_many_items_on_many_stages():
    """400 blocks that all differ, 16 stages: proven; and no cut can be moved by one block to gain anything."""
    problem = random_cuts(400, 16, 64, seed=0)
    solution = solve_cuts(problem)
    assert solution.status == "optimal"
    for s in range(1, 16):
        for step in (-1, 1):
            moved = (*solution.first[:s], solution.first[s] + step, *solution.first[s + 1 :])
            assert evaluate_cuts(problem, moved).objective >= solution.objective * (1 - 1e-9)


# --- determinism --------------------------------------------------------------------------------------------------------

ANSWERS = """
from benchmarks.solver_scale import layered, random_cuts
from autoshard.solvers.cuts import solve_cuts
from autoshard.solvers.sharding import solve
print(solve(layered(1, seed=5)).choices, solve_cuts(random_cuts(60, 4, 8, seed=5)).first)
"""


def test_same_answer_in_another_process_whatever_the_hash_seed():
    path = [str(Path(__file__).parent), *sys.path]
    answers = [
        subprocess.run(
            [sys.executable, "-c", ANSWERS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(path)},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert answers[0] == answers[1] and answers[0].count("(") == 2
