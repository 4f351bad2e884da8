"""The op-sharding integer program in the flow formulation, built in one go and solved by HiGHS.

Variables (ops, links and stars are those of ``network``):

    x[op, s]        binary       op takes strategy s
    f[use, p, q]    in [0, 1]    use goes from class p of the producer to class q of the user; only pairs that are possible
    w[star, p, q]   in [0, 1]    some use of the star goes from p to q; only where that costs something and several users may want q

    minimise  sum cost[op, s] x[op, s] + sum table[p, q] f[link, p, q] + sum table[p, q] w[star, p, q]         (a w that is left out: f)

    (A) sum_s x[op, s] = 1                                                 for each op
    (B) sum_q f[use, p, q] = sum of x[producer, s] that leave class p      for each use and p
    (C) sum_p f[use, p, q] = sum of x[user, s] that demand class q         for each use and q
    (D) w[star, p, q] >= f[use, p, q]                                      for each use of the star

A use by the producer itself has no f: strategy s goes from its own p to its own q, so x takes the place of f in (D) and in the cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from .linear import highs
from .network import INF, Network, Star
from .problem import OutOfTime, SolverError


class FlowProgram:
    """The integer program of a network: columns and rows as arrays.

    net: as ``reduce`` leaves it: no op has a link to itself, and no living strategy an impossible one.
    x: op -> (its living strategies, their columns). The x come first; ``integers`` is their number.
    """

    def __init__(self, net: Network):
        self._costs: list[tuple[np.ndarray, np.ndarray]] = []  # (columns, what they cost more)
        self._limits: list[tuple[float, float]] = []
        self._entries: list[tuple[np.ndarray, np.ndarray, float]] = []  # (rows, columns, coefficient)
        self.columns = 0
        self.x: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for op in range(len(net.costs)):
            if op not in net.gone:
                alive = net.alive(op)
                self.x[op] = (alive, self._variables(net.costs[op][alive]))
        self.integers = self.columns
        for _, x in self.x.values():
            self._entries.append((self._constraints(1, 1.0, 1.0).repeat(len(x)), x, 1.0))  # (A)
        for link in net.links.values():
            self._flow(link.a, link.b, link.rows, link.cols, link.table)
        for star in net.stars.values():
            self._star(star)
        self.cost = np.zeros(self.columns)
        for columns, cost in self._costs:
            np.add.at(self.cost, columns, cost)

    def _variables(self, cost: np.ndarray) -> np.ndarray:
        columns = np.arange(self.columns, self.columns + len(cost))
        self.columns += len(cost)
        self._costs.append((columns, cost))
        return columns

    def _constraints(self, n: int, lower: float, upper: float) -> np.ndarray:
        self._limits.extend([(lower, upper)] * n)
        return np.arange(len(self._limits) - n, len(self._limits))

    def _flow(self, a: int, b: int, rows: np.ndarray, cols: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, ...]:
        """f of one use, with (B) and (C): the class pairs that are possible, and their columns."""
        (alive_a, x_a), (alive_b, x_b) = self.x[a], self.x[b]
        kept_rows, of_a = np.unique(rows[alive_a], return_inverse=True)
        kept_cols, of_b = np.unique(cols[alive_b], return_inverse=True)
        table = table[np.ix_(kept_rows, kept_cols)]
        p, q = np.nonzero(table < INF)
        f = self._variables(table[p, q])
        for n, end, of_x, x in ((len(kept_rows), p, of_a, x_a), (len(kept_cols), q, of_b, x_b)):
            equal = self._constraints(n, 0.0, 0.0)
            self._entries += [(equal[end], f, 1.0), (equal[of_x], x, -1.0)]
        return kept_rows[p], kept_cols[q], f

    def _star(self, star: Star) -> None:
        alive, x = self.x[star.a]
        wanted = np.zeros(star.table.shape[1], dtype=int)
        for op, cols in star.users:
            wanted[np.unique(cols[self.x[op][0]])] += 1
        living = np.isin(np.arange(len(star.table)), star.rows[alive])
        shared = (star.table > 0.0) & (star.table < INF) & (wanted > 1) & living[:, None]
        w_of = np.full(star.table.shape, -1)
        w_of[shared] = self._variables(star.table[shared])
        alone = np.where(shared, 0.0, star.table)
        for op, cols in star.users:
            if op == star.a:
                p, q, f = star.rows[alive], cols[alive], x
                self._costs.append((x, alone[p, q]))
            else:
                p, q, f = self._flow(star.a, op, star.rows, cols, alone)
            tied = w_of[p, q] >= 0
            w, own = np.unique(w_of[p, q][tied], return_inverse=True)
            rows = self._constraints(len(w), 0.0, INF)  # (D)
            self._entries += [(rows, w, 1.0), (rows[own], f[tied], -1.0)]

    @property
    def rows(self) -> int:
        return len(self._limits)

    def proto(self, scale: float) -> model_pb2.ModelProto:
        """The program for math_opt, its objective times ``scale``."""
        model = model_pb2.ModelProto()
        model.variables.ids.extend(range(self.columns))
        model.variables.lower_bounds.extend([0.0] * self.columns)
        model.variables.upper_bounds.extend([1.0] * self.columns)
        model.variables.integers.extend([True] * self.integers + [False] * (self.columns - self.integers))
        priced = np.flatnonzero(self.cost)
        model.objective.linear_coefficients.ids.extend(priced.tolist())
        model.objective.linear_coefficients.values.extend((scale * self.cost[priced]).tolist())
        model.linear_constraints.ids.extend(range(len(self._limits)))
        model.linear_constraints.lower_bounds.extend([lower for lower, _ in self._limits])
        model.linear_constraints.upper_bounds.extend([upper for _, upper in self._limits])
        rows = np.concatenate([rows for rows, _, _ in self._entries])
        columns = np.concatenate([columns for _, columns, _ in self._entries])
        coefficients = np.concatenate([np.full(len(rows), c) for rows, _, c in self._entries])
        order = np.lexsort((columns, rows))
        matrix = model.linear_constraint_matrix
        matrix.row_ids.extend(rows[order].tolist())
        matrix.column_ids.extend(columns[order].tolist())
        matrix.coefficients.extend(coefficients[order].tolist())
        return model


@dataclass(frozen=True)
class Answer:
    """chosen: strategy of each op. price and bound: seconds. optimal: whether the time sufficed for a proof."""

    chosen: dict[int, int]
    price: float
    bound: float
    optimal: bool


def run(program: FlowProgram, scale: float, time_limit: float, progress: Callable[[str], None] | None = None) -> Answer | None:
    """Solve; None if infeasible. ``scale`` brings seconds to the magnitude that HiGHS's tolerances are made for.

    Raises:
        SolverError: the time was over before any answer was found, or HiGHS failed.
    """
    if not program.x:
        return Answer({}, 0.0, 0.0, True)
    x = sorted(column for _, columns in program.x.values() for column in columns.tolist())
    model = mathopt.Model.from_model_proto(program.proto(scale))
    variables = [model.get_variable(column) for column in x]
    failed: list[BaseException] = []

    def report(lines: list[str]) -> None:
        try:  # an exception must not cross HiGHS, it would end the process
            for line in lines if not failed else ():
                progress(line)
        except BaseException as error:
            failed.append(error)

    wanted = mathopt.SparseVectorFilter(filtered_items=variables, skip_zero_values=True)
    result = highs(
        model,
        time_limit,
        gap=1e-9,
        difference=1e-6,
        model_params=mathopt.ModelSolveParameters(variable_values_filter=wanted),
        msg_cb=report if progress else None,
    )
    if failed:
        raise failed[0]
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return None
    if not result.has_primal_feasible_solution():
        failure = OutOfTime if reason == mathopt.TerminationReason.NO_SOLUTION_FOUND else SolverError
        raise failure(f"HiGHS has no answer after {time_limit:g} s ({reason.name}: {result.termination.detail})")
    value = {variable.id: x for variable, x in result.variable_values().items()}
    chosen = {
        op: int(alive[np.argmax([value.get(column, 0.0) for column in columns.tolist()])]) for op, (alive, columns) in program.x.items()
    }
    bound = result.termination.objective_bounds.dual_bound
    return Answer(chosen, result.objective_value() / scale, bound / scale, reason == mathopt.TerminationReason.OPTIMAL)
