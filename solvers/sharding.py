"""Choose one sharding strategy for every op: the least time for ops and conversions, with a proof.

    minimise  sum over ops     count[op] * costs[op][s]                      s the op's strategy
            + sum over values  count[value] * sum over q of moves[p, q]      p where the producer leaves the value,
                                                                             q every placement that some use demands, once

``reduce`` shrinks the problem without losing its optimum. What is left, ``elimination`` solves where its tables are small enough; or else
``flows`` writes it as an integer program whose relaxation is nearly integral, and HiGHS solves that on one thread. ``problem.evaluate``
prices the answer again. The same problem gets the same answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from .elimination import cheapest
from .flows import Answer, FlowProgram, run
from .network import Network, network
from .problem import Evaluation, Infeasible, Op, ShardingProblem, ShardingSolution, SolverError, Use, Value, evaluate
from .reduce import reduce

__all__ = ["Evaluation", "Infeasible", "Op", "ShardingProblem", "ShardingSolution", "SolverError", "Use", "Value", "evaluate", "solve"]

AGREEMENT = 1e-6  # relative difference allowed between the solver's price and evaluate's
ATTEMPTS = 3
FINE = 10.0  # an objective this large, as scaled, is well above HiGHS's tolerances of 1e-7 to 1e-6


def solve(problem: ShardingProblem, time_limit: float = 60.0, progress: Callable[[str], None] | None = None) -> ShardingSolution:
    """The cheapest choices, or the best found in ``time_limit`` seconds.

    Args:
        problem: checked first (ValueError).
        time_limit: seconds for the solver; building comes on top.
        progress: called with one line of text at a time: sizes, then the solver's own log.

    Raises:
        Infeasible: naming ops and values with no consistent choice.
        SolverError: the time was over before any answer was found, or the answer does not have the price that the solver claims.
    """
    start = time.perf_counter()
    problem.check()
    net = network(problem)
    reduce(net)
    sizes = f"{len(problem.ops)} ops, {sum(len(op.costs) for op in problem.ops)} strategies"
    chosen = cheapest(net)
    if chosen is not None:
        if progress:
            progress(f"{sizes}; after presolve {len(chosen)} ops, eliminated")
        choices = net.recover(chosen)
        price = evaluate(problem, choices)
        if price.violations:
            raise SolverError(f"elimination's answer is not one: {price.violations}")
        seconds = time.perf_counter() - start
        solver = "elimination" if chosen else "presolve"
        return ShardingSolution(choices, price.objective, price.objective, seconds, seconds, "optimal", solver, 0)
    built = time.perf_counter()
    found = solve_network(net, lambda choices: evaluate(problem, choices), time_limit, progress)
    if found is None:
        raise _explain(problem)
    choices, price, answer, variables = found
    return ShardingSolution(
        choices=choices,
        objective=price.objective,
        bound=bound_of(net, answer, price),
        seconds=time.perf_counter() - start,
        build_seconds=built - start,
        status="optimal" if answer.optimal else "time limit",
        solver="HiGHS",
        variables=variables,
    )


def solve_network(
    net: Network,
    evaluated: Callable[[tuple[int, ...]], Evaluation],
    time_limit: float,
    progress: Callable[[str], None] | None = None,
) -> tuple[tuple[int, ...], Evaluation, Answer, int] | None:
    """Choices for a network that is reduced, their price by ``evaluated``, HiGHS's answer, and how many variables it was given at first.

    None if no choice is consistent. Raises SolverError.
    """
    program = FlowProgram(net)
    if progress:
        progress(
            f"{len(net.costs)} ops; after presolve {len(program.x)} ops, "
            f"{program.integers} strategies, {program.columns - program.integers} flow variables, {program.rows} rows"
        )
    variables, scale = program.columns, net.scale()
    for _ in range(ATTEMPTS):
        answer = run(program, scale, time_limit, progress)
        if answer is None:
            return None
        choices = net.recover(answer.chosen)
        price, claimed = evaluated(choices), answer.price + net.offset
        over = price.objective - claimed  # an unfinished answer may hold flows that its own x make cheaper, a finished one may not
        agrees = (abs(over) if answer.optimal else over) <= AGREEMENT * max(claimed, price.objective)
        if price.violations or price.objective == 0.0 or agrees and (price.objective * scale >= FINE or not answer.optimal):
            break
        # Far cheaper than ``scale`` supposed, so lost in the solver's tolerances: again, without all that costs more than this answer.
        net.forget(price.objective)
        reduce(net)
        program, scale = FlowProgram(net), 1e4 / price.objective
    if price.violations or not (agrees or price.objective == 0.0):
        raise SolverError(f"the solver claims {claimed!r} s, evaluate says {price.objective!r} s {price.violations}")
    return choices, price, answer, variables


def bound_of(net: Network, answer: Answer, price: Evaluation) -> float:
    """Seconds that no choice is cheaper than; nothing has a negative price."""
    return min(max(answer.bound + net.offset, 0.0), price.objective)


def _explain(problem: ShardingProblem) -> Infeasible:
    """Why there is no answer: the fewest values that would have to go where they can't, found by making exactly that the price."""
    values = []
    for index, value in enumerate(problem.values):
        wanted = {q for use in problem.uses if use.value == index for q in use.demands}
        pairs = [(p, q) for p in dict.fromkeys(value.placements) for q in sorted(wanted)]
        values.append(replace(value, moves={pair: float(pair not in value.moves and pair[0] != pair[1]) for pair in pairs}, count=1.0))
    ops = tuple(replace(op, costs=(0.0,) * len(op.costs)) for op in problem.ops)
    choices = solve(ShardingProblem(ops, tuple(values), problem.uses)).choices
    stuck = [
        (problem.values[use.value], problem.ops[use.op])
        for use in problem.uses
        if values[use.value].moves[problem.values[use.value].placements[choices[values[use.value].op]], use.demands[choices[use.op]]]
    ]
    if not stuck:
        raise SolverError("HiGHS calls a problem infeasible that is not")
    text = "; ".join(f"{op.name} can't be given {value.name} in a placement that it can use" for value, op in stuck)
    return Infeasible(
        f"no combination of strategies is consistent: {text}",
        tuple(dict.fromkeys(op.name for _, op in stuck)),
        tuple(dict.fromkeys(value.name for value, _ in stuck)),
    )
