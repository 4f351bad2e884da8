"""Decide: the strategy of every op and the stage it runs in."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import fx

from autoshard.cluster import Cluster
from autoshard.cost.compute import Pricing
from autoshard.errors import MORE_ROOM, InfeasibleError, PlanError
from autoshard.mesh import Mesh
from autoshard.planning.fold import Folding, fold
from autoshard.planning.pins import Asked, Pin, apart, keep_pinned, pins_of
from autoshard.planning.problem import build, classes_of, op_seconds
from autoshard.planning.saving import NOTHING, Saving, layer_regions, zero_levels
from autoshard.planning.stages import blocks
from autoshard.planning.strategies import Annotated, annotate, split_heavy
from autoshard.program import Program, is_getitem, where
from autoshard.rules import rule_for
from autoshard.rules.notation import Strategy
from autoshard.solvers import cuts, sharding
from autoshard.solvers.problem import Infeasible


@dataclass
class Decision:
    """What was decided for one program (of one micro-batch), and the solver's account of it.

    zero: parameter name -> ZeRO level. regions: node name -> number of the region, computed again in backward, that it is in.
    kept: what is not computed again in regions, as ``Plan.kept`` has it. offload: names of parameters that are updated on the host.
    """

    chosen: dict[fx.Node, Strategy]
    stages: dict[fx.Node, int]
    solver: dict = field(default_factory=dict)
    zero: dict[str, int] = field(default_factory=dict)
    regions: dict[str, int] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    offload: list[str] = field(default_factory=list)


Narrow = Callable[[Program, Folding, dict[fx.Node, Annotated], Mesh], None]
"""Takes strategies away from annotated nodes, in place; it raises PlanError where too few would be left."""


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
    pins: Asked | None = None,
    time_limit: float = 60.0,
    solvers: Solvers = CHEAPEST,
    saving: Saving = NOTHING,
    chunks: int = 1,
    narrow: Narrow | None = None,
) -> Decision:
    """The cheapest strategies for every node, then the cheapest cut into stages, ``chunks`` of them a rank.

    ``pure(program)`` gives the values that any stage can compute for itself. ``limit``: bytes a rank, for the cut. ``narrow`` takes
    strategies away before anything is decided. Raises PlanError.
    """
    start = time.perf_counter()
    _, alike, annotated = choices_of(program, mesh, pins_of(program, pins or {}), narrow)
    chosen, notes = _shardings(program, annotated, alike, mesh, cluster, partial(solvers.shardings, time_limit=time_limit))
    decision = Decision(chosen, dict.fromkeys(program.ops, 0), notes)
    save(decision, program, pure(program), saving)
    if mesh.pipeline > 1:
        decision.stages = _cut(program, annotated, decision, mesh, cluster, pure(program), limit, solvers.cuts, chunks, saving)
    notes["seconds"] = time.perf_counter() - start
    return decision


def choices_of(
    program: Program, mesh: Mesh, pins: Mapping[str, Pin], narrow: Narrow | None = None
) -> tuple[Folding, dict[fx.Node, int], dict[fx.Node, Annotated]]:
    """What there is to choose from: identical layers, the class of each node, and each node's strategies."""
    folding = fold(program)
    alike = folding.by_node(program)
    for node in list(apart(pins, alike)):  # what is pinned in one layer is not pinned in all of them
        del alike[node]
    annotated = annotate(program, mesh, alike)
    keep_pinned(annotated, pins, mesh.sizes)
    if narrow:
        narrow(program, folding, annotated, mesh)
    split_heavy(annotated, alike)
    return folding, alike, annotated


def save(decision: Decision, program: Program, pure: set[fx.Node], saving: Saving) -> None:
    """Write on a decision what ``saving`` asks for, the same for all weights and layers. ``program`` knows its mesh."""
    decision.zero, decision.regions = {}, {}
    decision.offload = [param.name for param in program.params.values() if param.requires_grad] if saving.offload else []
    if saving.zero and program.mesh.data > 1:
        decision.zero = zero_levels(program, {n: s.results[0] for n, s in decision.chosen.items() if n.op == "placeholder"}, saving.zero)
    if saving.recompute:
        decision.regions = layer_regions(program, pure)


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


def _cut(
    program: Program, annotated, decision: Decision, mesh: Mesh, cluster: Cluster, pure, limit, solve, chunks: int, saving: Saving
) -> dict[fx.Node, int]:
    chosen, regions, priced = decision.chosen, decision.regions, {}
    kept, pricing = set(), Pricing(mesh.sizes, cluster)
    for node in program.ops:
        if node in annotated:
            item = annotated[node]
            cost = pricing.costs(node, item.rule, (chosen[node],))[0]
            seconds, saved = op_seconds(item, (chosen[node],), mesh, cluster)[0], cost.saved_bytes
            if node.name in regions:  # computed again, and of what it saves only the inputs of its region are kept, once
                region = regions[node.name]
                saved = {(region, at): nbytes for at, nbytes in cost.saved if regions.get(at[0]) != region and (region, at) not in kept}
                kept.update(saved)
                seconds, saved = seconds + cost.forward, sum(saved.values())
            priced[node] = (seconds, saved)
    stages = mesh.pipeline * chunks
    # of several stages a rank, each alone says little about its memory: the plan is checked as a whole
    found = blocks(program, pure, chosen, priced, mesh, cluster, limit if chunks == 1 else None, decision.zero, stages)
    try:
        solution = solve(found.problem)
    except cuts.OutOfMemory as error:
        if saving.open:  # then memory is another's business
            return _cut(program, annotated, decision, mesh, cluster, pure, None, solve, chunks, saving)
        raise InfeasibleError(
            f"no cut into {mesh.pipeline} stages fits: a rank of stage {error.stage} needs {error.least / 2**30:.3g} GiB in the best one, "
            f"the limit is {error.limit / 2**30:.3g} GiB",
            hint=MORE_ROOM, limit=error.limit, least=error.least, stage=error.stage,
        ) from error  # fmt: skip
    decision.solver["cut"] = {"objective": solution.objective, "bound": solution.bound, "blocks": len(found.groups)}
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
    """A copy of the program with the decision written on its nodes: ``rule``, ``strategy``, ``layouts``, ``stage``."""
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
            if not is_getitem(node):
                node.meta["rule"] = rule_for(node)
        elif node.op == "output":
            node.meta["stage"] = max(stages.values(), default=0)
    return out
