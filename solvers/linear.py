"""A small (mixed-integer) linear program, row by row, solved on one thread: the same program gets the same answer.

HiGHS, as ortools 9.15 has it, writes a line to stdout now and then, whatever it is told; here that goes nowhere. (SCIP does not, but
called an answer of a random problem optimal that was not.)
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers import highs_pb2

from .problem import OutOfTime, SolverError

INF = float("inf")


@dataclass(frozen=True)
class LinearAnswer:
    """values: of the columns. objective, bound: of the answer, and what no answer is better than. optimal: whether that is proven.
    duals: of the rows, of a program without integers; what one unit more of the row's limit would add to the objective."""

    values: list[float]
    objective: float
    bound: float
    optimal: bool
    duals: list[float]


class LinearProgram:
    """minimise sum of cost * x, over columns within bounds and rows within limits."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.bounds: list[tuple[float, float]] = []
        self.integers: list[bool] = []
        self.limits: list[tuple[float, float]] = []
        self.entries: list[tuple[int, int, float]] = []

    def column(self, cost: float = 0.0, lower: float = 0.0, upper: float = INF, integer: bool = False) -> int:
        self.costs.append(cost)
        self.bounds.append((lower, upper))
        self.integers.append(integer)
        return len(self.costs) - 1

    def row(self, terms: Mapping[int, float], lower: float = -INF, upper: float = INF) -> int:
        row = len(self.limits)
        self.limits.append((lower, upper))
        self.entries.extend((row, column, factor) for column, factor in sorted(terms.items()) if factor)
        return row

    def solve(self, relaxed: bool = False, time_limit: float = 60.0, gap: float = 1e-9, presolve: bool = True) -> LinearAnswer | None:
        """None if there is no answer. ``relaxed``: integers may be fractions. Raises SolverError where HiGHS fails."""
        model = model_pb2.ModelProto()
        model.variables.ids.extend(range(len(self.costs)))
        model.variables.lower_bounds.extend(lower for lower, _ in self.bounds)
        model.variables.upper_bounds.extend(upper for _, upper in self.bounds)
        model.variables.integers.extend(flag and not relaxed for flag in self.integers)
        priced = [i for i, cost in enumerate(self.costs) if cost]
        model.objective.linear_coefficients.ids.extend(priced)
        model.objective.linear_coefficients.values.extend(self.costs[i] for i in priced)
        model.linear_constraints.ids.extend(range(len(self.limits)))
        model.linear_constraints.lower_bounds.extend(lower for lower, _ in self.limits)
        model.linear_constraints.upper_bounds.extend(upper for _, upper in self.limits)
        matrix = model.linear_constraint_matrix
        for row, column, factor in sorted(self.entries):
            matrix.row_ids.append(row)
            matrix.column_ids.append(column)
            matrix.coefficients.append(factor)
        result = highs(mathopt.Model.from_model_proto(model), time_limit, gap, 1e-9, presolve)
        reason = result.termination.reason
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return None
        if not result.has_primal_feasible_solution():
            failure = OutOfTime if reason == mathopt.TerminationReason.NO_SOLUTION_FOUND else SolverError
            raise failure(f"HiGHS has no answer after {time_limit:g} s ({reason.name}: {result.termination.detail})")
        found = {variable.id: value for variable, value in result.variable_values().items()}
        duals = {row.id: value for row, value in result.dual_values().items()} if result.has_dual_feasible_solution() else {}
        return LinearAnswer(
            values=[found.get(i, 0.0) for i in range(len(self.costs))],
            objective=result.objective_value(),
            bound=result.termination.objective_bounds.dual_bound,
            optimal=reason == mathopt.TerminationReason.OPTIMAL,
            duals=[duals.get(i, 0.0) for i in range(len(self.limits))],
        )


def highs(model: mathopt.Model, time_limit: float, gap: float, difference: float, presolve: bool = True, **more) -> mathopt.SolveResult:
    """Solve with HiGHS on one thread. gap, difference: relative and absolute, at which an answer is good enough. more: for math_opt.

    Raises SolverError where it fails.
    """
    options = highs_pb2.HighsOptionsProto(string_options={"parallel": "off"}, int_options={"random_seed": 0})
    params = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=time_limit),
        relative_gap_tolerance=gap,
        absolute_gap_tolerance=difference,
        presolve=None if presolve else mathopt.Emphasis.OFF,
        highs=options,
    )
    with _no_stdout():
        try:
            return mathopt.solve(model, mathopt.SolverType.HIGHS, params=params, **more)
        except (RuntimeError, ValueError, AttributeError) as error:  # the last is ortools' own, over a status that it can't read
            raise SolverError(f"HiGHS failed: {error}") from error


@contextmanager
def _no_stdout() -> Iterator[None]:
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
