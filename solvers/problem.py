"""The op-sharding problem as plain numbers, and the independent pricing of any answer to it."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite


class Infeasible(ValueError):
    """No choice satisfies every constraint.

    Attributes:
        ops: names of the ops that have no consistent choice, as far as known.
        values: names of the values that stand in their way, as far as known.
    """

    def __init__(self, what: str, ops: tuple[str, ...] = (), values: tuple[str, ...] = ()):
        super().__init__(what)
        self.ops, self.values = ops, values


class SolverError(RuntimeError):
    """The solver failed, ran out of time without an answer, or its answer does not have the price it claims."""


class OutOfTime(SolverError):
    """The time was over before any answer was found."""


@dataclass(frozen=True)
class Op:
    """An op that must be given one strategy.

    costs: seconds of each strategy, for one instance.
    count: how many instances (identical layers) the op stands for.
    """

    name: str
    costs: tuple[float, ...]
    count: float = 1.0


@dataclass(frozen=True)
class Value:
    """One result of an op. Several values may share an op, and even be the same result for groups of users with different counts.

    op: index of the producer.
    placements: for each strategy of the producer, the id of the placement in which it leaves the value.
    moves: (from, to) -> seconds of that conversion, for one instance. A pair that is absent is impossible; staying (p, p) is free.
    count: how many instances the value stands for.
    """

    name: str
    op: int
    placements: tuple[int, ...]
    moves: dict[tuple[int, int], float]
    count: float = 1.0


@dataclass(frozen=True)
class Use:
    """An operand: ``op`` reads ``value``. The user may be the producer itself: the next layer's instance of it.

    demands: for each strategy of the user, the id of the placement in which it wants the value.
    """

    value: int
    op: int
    demands: tuple[int, ...]


@dataclass(frozen=True)
class ShardingProblem:
    """Choose one strategy for each op: the cheapest sum of op costs and conversions, each conversion paid once per value."""

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    uses: tuple[Use, ...]

    def check(self) -> None:
        """Raises ValueError, naming the op or value, where an index, a length or a cost is wrong."""
        for op in self.ops:
            if not all(isfinite(cost) and cost >= 0 for cost in op.costs) or not op.count >= 0:
                raise ValueError(f"op {op.name!r}: costs and counts are finite and not negative")
        for value in self.values:
            if not 0 <= value.op < len(self.ops) or len(value.placements) != len(self.ops[value.op].costs):
                raise ValueError(f"value {value.name!r}: one placement for each strategy of its op is needed")
            if not all(isfinite(cost) and cost >= 0 for cost in value.moves.values()) or not value.count >= 0:
                raise ValueError(f"value {value.name!r}: moves and counts are finite and not negative; leave impossible moves out")
        for use in self.uses:
            if not 0 <= use.value < len(self.values) or not 0 <= use.op < len(self.ops):
                raise ValueError(f"a use points to value {use.value} and op {use.op}, which do not both exist")
            if len(use.demands) != len(self.ops[use.op].costs):
                user, value = self.ops[use.op].name, self.values[use.value].name
                raise ValueError(f"use of {value!r} by {user!r}: one demand for each strategy is needed")


@dataclass(frozen=True)
class ShardingSolution:
    """An answer, with its proof.

    choices: index of the strategy of each op.
    objective: seconds, as priced by ``evaluate``.
    bound: seconds; no answer is cheaper (up to 1e-9 of it).
    seconds: wall time of the whole solve; build_seconds: the part before the solver started.
    status: "optimal", or "time limit".
    solver: what solved it; "presolve" when nothing was left for a solver.
    variables: of the integer program that was left after presolve.
    """

    choices: tuple[int, ...]
    objective: float
    bound: float
    seconds: float
    build_seconds: float
    status: str
    solver: str
    variables: int

    @property
    def gap(self) -> float:
        """How much cheaper, at most, another answer could be: a fraction of the objective."""
        return (self.objective - self.bound) / self.objective if self.objective > 0 else 0.0


@dataclass(frozen=True)
class Evaluation:
    """Price of an answer in seconds, without the impossible conversions, which ``violations`` lists in words."""

    objective: float
    violations: list[str]


def evaluate(problem: ShardingProblem, choices) -> Evaluation:
    """Price ``choices`` (one strategy index per op) by reading the problem again, without any solver."""
    violations = []
    if len(choices) != len(problem.ops):
        return Evaluation(0.0, [f"{len(choices)} choices for {len(problem.ops)} ops"])
    for op, choice in zip(problem.ops, choices):
        if not 0 <= choice < len(op.costs):
            violations.append(f"{op.name}: no strategy {choice}, it has {len(op.costs)}")
    if violations:
        return Evaluation(0.0, violations)
    objective = sum(op.count * op.costs[choice] for op, choice in zip(problem.ops, choices))
    paid: set[tuple[int, int]] = set()
    for use in problem.uses:
        value = problem.values[use.value]
        have, want = value.placements[choices[value.op]], use.demands[choices[use.op]]
        if have == want or (use.value, want) in paid:
            continue
        if (have, want) not in value.moves:
            violations.append(f"{value.name}: can't go from placement {have} to {want}, which {problem.ops[use.op].name} demands")
            continue
        paid.add((use.value, want))
        objective += value.count * value.moves[have, want]
    return Evaluation(objective, violations)
