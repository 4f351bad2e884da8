"""Decide: the strategy of every op and the stage it runs in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import fx

from autoshard.cluster import Cluster
from autoshard.cost.compute import op_costs
from autoshard.errors import PlanError
from autoshard.mesh import Mesh
from autoshard.planning.fold import fold
from autoshard.planning.problem import build, classes_of, op_seconds
from autoshard.planning.stages import blocks
from autoshard.planning.strategies import Annotated, annotate
from autoshard.program import Program, is_getitem, where
from autoshard.rules.notation import Strategy
from autoshard.solvers import cuts, sharding
from autoshard.solvers.problem import Infeasible


@dataclass
class Decision:
    """What was decided for one program (of one micro-batch), and the solver's account of it."""

    chosen: dict[fx.Node, Strategy]
    stages: dict[fx.Node, int]
    solver: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Solvers:
    """What answers the two problems: the cheapest answers, unless someone wants others (tests: any legal answer must compute the same)."""

    shardings: Callable[..., sharding.ShardingSolution] = sharding.solve
    cuts: Callable[..., cuts.CutSolution] = cuts.solve_cuts


CHEAPEST = Solvers()


def decide(
    program: Program,
    mesh: Mesh,
    cluster: Cluster,
    pure: Callable[[Program], set[fx.Node]],
    limit: float | None = None,
    pins: dict[str, dict[str, str]] | None = None,
    time_limit: float = 60.0,
    solvers: Solvers = CHEAPEST,
) -> Decision:
    """The cheapest strategies for every node, then the cheapest cut into stages.

    ``pure(program)`` gives the values that any stage can compute for itself. ``limit``: bytes a rank, for the cut. Raises PlanError.
    """
    start = time.perf_counter()
    alike = fold(program).by_node(program)
    annotated = annotate(program, mesh, pins, alike)
    chosen, notes = _shardings(program, annotated, alike, mesh, cluster, partial(solvers.shardings, time_limit=time_limit))
    decision = Decision(chosen, dict.fromkeys(program.ops, 0), notes)
    if mesh.pipeline > 1:
        decision.stages = _cut(program, annotated, chosen, mesh, cluster, pure(program), limit, notes, solvers.cuts)
    notes["seconds"] = time.perf_counter() - start
    return decision


def _shardings(program: Program, annotated: dict[fx.Node, Annotated], alike, mesh: Mesh, cluster: Cluster, solve):
    classes = classes_of(program, alike)
    built = build(program, annotated, classes, mesh, cluster)
    try:
        solution = solve(built.problem)
    except Infeasible as error:
        raise PlanError(f"no plan for mesh {mesh}: {error}", hint="loosen the pins, or choose another mesh") from error
    evaluation = sharding.evaluate(built.problem, solution.choices)
    if evaluation.violations:
        raise PlanError(f"the solver's answer breaks the problem: {evaluation.violations[0]}", hint="this is a bug; please report it")
    chosen = built.read(solution)
    notes = {
        "name": solution.solver,
        "status": solution.status,
        "objective": solution.objective,
        "bound": solution.bound,
        "gap": solution.gap,
        "variables": solution.variables,
        "ops": len(built.problem.ops),
        "strategies": sum(len(op.costs) for op in built.problem.ops),
        "folded": len(annotated) - len(built.members),
    }
    return chosen, notes


def _cut(program: Program, annotated, chosen, mesh: Mesh, cluster: Cluster, pure, limit, notes, solve) -> dict[fx.Node, int]:
    priced = {}
    for node in program.ops:
        if node in annotated:
            item = annotated[node]
            cost = op_costs(node, item.rule, (chosen[node],), mesh.sizes, cluster)[0]
            priced[node] = (op_seconds(item, (chosen[node],), mesh, cluster)[0], cost.saved_bytes)
    found = blocks(program, pure, chosen, priced, mesh, cluster, limit)
    solution = solve(found.problem)
    notes["cut"] = {"objective": solution.objective, "bound": solution.bound, "blocks": len(found.groups)}
    return found.stages(solution.first)


def restore(program: Program, mesh: Mesh, strategies: dict[str, list[str]], stages: dict[str, int]) -> Decision:
    """The decision that a plan records, for the same program. Raises PlanError where they do not fit each other."""
    annotated = annotate(program, mesh, alike=fold(program).by_node(program))
    chosen: dict[fx.Node, Strategy] = {}
    for node, item in annotated.items():
        if node.op == "output":
            chosen[node] = item.strategies[0]
            continue
        names = strategies.get(node.name)
        match = [s for s in item.strategies if [c.name for c in s.choices] == names]
        if not match:
            raise PlanError(
                f"the plan says {names} for {node.name!r}, which this model does not allow on mesh {mesh}",
                where=where(node),
                hint="the plan was made for another model, batch or version: make it again",
            )
        chosen[node] = match[0]
    return Decision(chosen, {n: stages.get(n.name, 0) for n in program.ops})


def record(decision: Decision) -> tuple[dict[str, list[str]], dict[str, int]]:
    """(strategies, stages) by node name, as a plan keeps them."""
    strategies = {n.name: [c.name for c in s.choices] for n, s in decision.chosen.items() if n.op != "output"}
    return strategies, {n.name: s for n, s in decision.stages.items()}


def apply(program: Program, decision: Decision) -> Program:
    """A copy of the program with the decision written on its nodes: ``strategy``, ``layouts``, ``stage``."""
    out = program.copy()
    by_name = {n.name: (s, n) for n, s in decision.chosen.items()}
    stages = {n.name: s for n, s in decision.stages.items()}
    for node in out.graph.nodes:
        if node.name in by_name:
            strategy = by_name[node.name][0]
            node.meta["strategy"] = strategy
            node.meta["layouts"] = strategy.results
        if is_getitem(node):  # a value like any other, once it has crossed a cut
            producer, index = node.args
            node.meta["layouts"] = (producer.meta["layouts"][index],)
        if node.op == "call_function":
            node.meta["stage"] = stages[node.name]
        elif node.op == "output":
            node.meta["stage"] = program.mesh.pipeline - 1
    return out
