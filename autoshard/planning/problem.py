"""From annotated nodes and costs to the solver's plain numbers, identical layers folded into one; and back.

Time is weighted as it counts in a step: p stages and m micro-batches of balanced work take (m + p - 1) / p times the work of one
micro-batch over the whole model; what is done once a step (the gradient sum of weights) counts 1 / p of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from math import prod

from torch import fx

from autoshard.cluster import Cluster
from autoshard.cost.communication import conversion_seconds, gradient_sync_seconds, kernel_steps
from autoshard.cost.compute import op_costs
from autoshard.mesh import SHARDED_AXES, Mesh
from autoshard.placement import R_STAR, Layout, R, local_shape
from autoshard.planning.strategies import Annotated, Key
from autoshard.program import Program, is_getitem, tensors
from autoshard.rules.notation import Strategy
from autoshard.solvers.sharding import Op, ShardingProblem, ShardingSolution, Use, Value

EPSILON = 1e-9  # seconds a conversion costs at least: of two plans that cost the same, the one with fewer conversions

BUCKET = 25 * 2**20
"""Bytes of gradients that are summed in one collective: a weight pays its share of one, not a latency of its own."""


@dataclass
class Built:
    """The problem, and what is needed to read its solution: nodes of each op, and each op's strategies."""

    problem: ShardingProblem
    members: list[list[fx.Node]]
    strategies: list[tuple[Strategy, ...]]

    def read(self, solution: ShardingSolution) -> dict[fx.Node, Strategy]:
        return {
            node: self.strategies[i][choice]
            for i, choice in enumerate(solution.choices)
            for node in self.members[i]
        }


def synced(src: Layout, dst: Layout) -> Layout:
    """``src`` with R* along the axes where a weight is whole and ``dst`` wants R*: the engine sums gradients there, once a step."""
    return tuple(R_STAR if a == R and b == R_STAR else a for a, b in zip(src, dst))


def move_seconds(program: Program, key: Key, src: Layout, dst: Layout, mesh: Mesh, cluster: Cluster) -> tuple[float, float, float] | None:
    """(forward, backward, once a step) seconds of a value's conversion; None if there is no way from ``src`` to ``dst``."""
    node, index = key
    val = tensors(node.meta["val"])[index]
    shape, grad, once = tuple(val.shape), bool(node.meta.get("grad")), 0.0
    if grad and node.name in program.params:
        after = synced(src, dst)
        axes = tuple(a for a, p, q in zip(SHARDED_AXES, src, after) if p != q)
        if axes:
            held = prod(local_shape(shape, src, mesh.sizes, (0, 0))) * val.element_size()
            once = gradient_sync_seconds(BUCKET, axes, mesh, cluster) * held / BUCKET
            src = after
    if src == dst:
        return 0.0, 0.0, once
    found = conversion_seconds(src, dst, shape, val.element_size(), mesh, cluster, grad)
    return None if found is None else (*found, once)


def build(
    program: Program,
    annotated: dict[fx.Node, Annotated],
    classes: dict[fx.Node, int],
    mesh: Mesh,
    cluster: Cluster,
) -> Built:
    """The sharding problem of ``program``. ``classes``: nodes of one class are planned alike (identical layers)."""
    p, m = mesh.pipeline, program.microbatches
    every, once = (m + p - 1) / p, 1 / p
    members: dict[int, list[fx.Node]] = defaultdict(list)
    for node in annotated:
        members[classes[node]].append(node)
    ids = {c: i for i, c in enumerate(members)}
    groups = list(members.values())
    op_of = {node: ids[classes[node]] for node in annotated}

    options: list[tuple[Strategy, ...]] = []
    ops: list[Op] = []
    for group in groups:
        kept = _common([annotated[n].strategies for n in group])
        item = annotated[group[0]]
        if item.rule is None:
            costs = tuple(0.0 for _ in kept)
        else:
            costs = tuple(every * t for t in op_seconds(item, kept, mesh, cluster))
        options.append(kept)
        ops.append(Op(group[0].name, costs, float(len(group))))

    values, uses = _values_and_uses(program, annotated, groups, op_of, options, mesh, cluster, every, once)
    return Built(ShardingProblem(tuple(ops), tuple(values), tuple(uses)), groups, options)


def op_seconds(item: Annotated, options: tuple[Strategy, ...], mesh: Mesh, cluster: Cluster) -> list[float]:
    """Forward plus backward seconds of an op under each strategy, the collectives inside its own kernel included."""
    itemsize = max((v.element_size() for v in tensors(item.node.meta["val"])), default=4)
    costs = op_costs(item.node, item.rule, options, mesh.sizes, cluster)
    return [
        c.forward + c.backward + sum(step.seconds for step in kernel_steps(s, itemsize, mesh, cluster)) for c, s in zip(costs, options)
    ]


def _common(lists: list[tuple[Strategy, ...]]) -> tuple[Strategy, ...]:
    """The strategies that all instances of a class have, in the order of the first."""
    first = lists[0]
    if len(lists) == 1:
        return first
    shared = set.intersection(*({(s.operands, s.results) for s in options} for options in lists))
    return tuple(s for s in first if (s.operands, s.results) in shared)


def _values_and_uses(program, annotated, groups, op_of, options, mesh, cluster, every, once):
    """One solver value per (op, result, set of consumers): instances of a folded op whose results go to the same ops count as one."""
    consumers: dict[Key, list[tuple[int, int]]] = defaultdict(list)
    for node, item in annotated.items():
        for position, key in enumerate(item.inputs):
            consumers[key].append((op_of[node], position))
    values: list[Value] = []
    uses: list[Use] = []
    for op, group in enumerate(groups):
        if group[0].op == "output":
            continue
        for index in range(len(options[op][0].results)):
            kinds: Counter[tuple] = Counter()
            for node in group:
                kinds[tuple(sorted(set(consumers[node, index])))] += 1
            for kind, count in sorted(kinds.items()):
                if not kind:
                    continue
                layouts: dict[Layout, int] = {}
                made = tuple(layouts.setdefault(s.results[index], len(layouts)) for s in options[op])
                produced = list(layouts)
                wanted: dict[Layout, None] = {}
                for consumer, position in kind:
                    for s in options[consumer]:
                        wanted.setdefault(s.operands[position])
                        layouts.setdefault(s.operands[position], len(layouts))
                moves: dict[tuple[int, int], float] = {}
                for src in produced:
                    for dst in wanted:
                        if src == dst:
                            continue
                        found = move_seconds(program, (group[0], index), src, dst, mesh, cluster)
                        if found is not None:
                            forward, backward, step = found
                            moves[layouts[src], layouts[dst]] = every * (forward + backward) + once * step + EPSILON
                value = len(values)
                values.append(Value(f"{group[0].name}.{index}", op, made, moves, float(count)))
                for consumer, position in kind:
                    demands = tuple(layouts[s.operands[position]] for s in options[consumer])
                    uses.append(Use(value, consumer, demands))
    return values, uses


def classes_of(program: Program, folded: dict[fx.Node, int] | None) -> dict[fx.Node, int]:
    """A class per node that the planner decides about; nodes that ``folded`` does not name are classes of their own."""
    out: dict[fx.Node, int] = {}
    fresh = max(folded.values(), default=-1) + 1 if folded else 0
    for node in program.graph.nodes:
        if is_getitem(node):
            continue
        if folded and node in folded:
            out[node] = folded[node]
        else:
            out[node] = fresh
            fresh += 1
    return out
