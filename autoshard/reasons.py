"""Why the plan is as it is: of one op, parameter or input, what was chosen, what each alternative would cost, and what can't be.

An alternative is priced with everything else left as it is: what the op itself would take, and what the conversions of its operands and
results would. It is for all instances of an op in layers that are planned alike. With the nearest ones the whole plan is predicted again:
what ZeRO, recomputation and overlap make of it, and memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from autoshard import passes
from autoshard.capture import Captured
from autoshard.cluster import Cluster
from autoshard.draws import without_keys
from autoshard.mesh import SHARDED_AXES
from autoshard.placement import R, format_layout
from autoshard.planning.answers import Alternative, Move, Unavailable, Why
from autoshard.planning.fold import fold
from autoshard.planning.pins import pinned_node
from autoshard.planning.plan import Plan
from autoshard.planning.planner import Decision, restore
from autoshard.planning.problem import Built, build, classes_of, move_seconds
from autoshard.planning.strategies import Annotated, annotate, split_heavy
from autoshard.predict import predict
from autoshard.program import Program, shape_of, tensors
from autoshard.rules.notation import Strategy
from autoshard.solvers.sharding import evaluate
from autoshard.tasks import convert

PREDICTED = 3
"""So many alternatives, by their prices, are predicted."""

NOISE = 1e-8  # seconds; what the problem adds to conversions to break ties is less


def why(captured: Captured, plan: Plan, name: str, pins: Mapping[str, Mapping[str, str]] | None = None) -> Why:
    """What was chosen for ``name``: a node of the plan, or a parameter, input or module as pins name them; and instead of what.

    Raises PlacementError if there is no such thing, PlanError if the plan is not the model's.
    """
    program = without_keys(passes.run("canonicalize", captured.program), plan.random)
    program.mesh = plan.mesh
    program = passes.run("microbatch", program, plan.microbatches).program
    return _Asked(program, plan, dict(pins or {})).why(name)


class _Asked:
    def __init__(self, program: Program, plan: Plan, pins: dict):
        self.program, self.plan, self.mesh, self.pins = program, plan, plan.mesh, pins
        self.cluster = Cluster.of(plan.cluster)
        self.decision: Decision = restore(program, plan.mesh, plan.strategies, plan.stages)
        self.alike = fold(program).by_node(program)
        self.annotated = annotate(program, plan.mesh, self.alike)
        self.built, self.choices = self._problem()

    def _problem(self) -> tuple[Built, list[int]]:
        """The problem with every alternative in it, and the plan as an answer to it; layers that are planned differently are apart."""
        numbers: dict[tuple, int] = {}
        apart = {
            node: numbers.setdefault((kind, self.decision.chosen[node].name if node in self.decision.chosen else ""), len(numbers))
            for node, kind in self.alike.items()
        }
        built = build(self.program, self.annotated, classes_of(self.program, apart), self.mesh, self.cluster)
        choices = []
        for members, options in zip(built.members, built.strategies):
            mine = self.decision.chosen[members[0]]
            choices.append(next(i for i, s in enumerate(options) if (s.operands, s.results) == (mine.operands, mine.results)))
        return built, choices

    def why(self, name: str) -> Why:
        node = self._node(name)
        op = next(i for i, members in enumerate(self.built.members) if node in members)
        problem, options, mine = self.built.problem, self.built.strategies[op], self.choices[op]
        base = evaluate(problem, self.choices).objective
        allowed = self._allowed(node)
        found, unavailable = [], self._impossible(node)
        for i, strategy in enumerate(options):
            if i == mine:
                continue
            reason = allowed.get((strategy.operands, strategy.results), "")
            price = evaluate(problem, [i if at == op else choice for at, choice in enumerate(self.choices)])
            if reason or price.violations:
                what = strategy.name if node.op != "placeholder" else format_layout(strategy.results[0])
                unavailable.append(Unavailable(what, reason or "there is no way for a neighbour's value to what it would read or give"))
                continue
            own = problem.ops[op].count * (problem.ops[op].costs[i] - problem.ops[op].costs[mine])
            total = price.objective - base
            found.append((Alternative(*self._words(node, strategy), own, total - own, self._moves(node, op, strategy)), strategy))
        found.sort(key=lambda pair: (pair[0].total, pair[0].choice))
        nearest = [replace(a, predicted=self._predicted(op, strategy)) for a, strategy in found[:PREDICTED]]
        found = nearest + [a for a, _ in found[PREDICTED:]]
        words = self._words(node, options[mine])
        moves = self._paid(node, op, options[mine])
        return Why(
            node=node.name,
            asked=name,
            what=str(node.target).rsplit(".", 1)[0] if node.op == "call_function" else "weight" if self._param(node) else "input",
            module=node.meta.get("module", ""),
            source=node.meta.get("source", ""),
            shape=tuple(tensors(node.meta["val"])[0].shape),
            axes={axis: k for axis, k in zip(SHARDED_AXES, self.mesh.sizes)},
            choice=words[0],
            layout=words[1],
            instances=int(problem.ops[op].count),
            own=problem.ops[op].count * problem.ops[op].costs[mine],
            conversions=tuple(sorted(moves, key=lambda m: -m.seconds)),
            tight=bool(self.plan.zero and any(self.plan.zero.values()) or self.plan.regions),
            step=self.plan.step_seconds,
            peak=self.plan.peak_bytes,
            limit=self.plan.memory_limit,
            cheaper=tuple(a for a in found if a.own <= NOISE),
            dearer=tuple(a for a in found if a.own > NOISE),
            unavailable=tuple(unavailable),
        )

    def _predicted(self, op: int, strategy: Strategy) -> tuple[float, float]:
        """Seconds of a step and bytes of the fullest rank more than the plan's, with another strategy of an op."""
        plan = self.plan
        chosen = {**self.decision.chosen, **dict.fromkeys(self.built.members[op], strategy)}
        decision = Decision(chosen, self.decision.stages, {}, plan.zero, plan.regions, plan.kept, plan.offload)
        other = predict(replace(plan, params={}, stage_rows=[], breakdown={}), convert(self.program, decision), self.cluster)
        return other.step_seconds - plan.step_seconds, other.peak_bytes - plan.peak_bytes

    def _node(self, name: str) -> fx.Node:
        """What a name names: of a module, the op that does most of its work, or the last."""
        named = next((n for n in self.annotated if n.name == name and n.op != "output"), None) or pinned_node(self.program, name)
        if named.op == "placeholder" or named.name == name:
            return named
        inside = [n for n in self.annotated if n.meta.get("module") == name or n.meta.get("module", "").startswith(name + ".")]
        heaviest = max(inside, key=lambda n: self.annotated[n].rule.flops)
        return heaviest if self.annotated[heaviest].rule.flops else named

    def _param(self, node: fx.Node) -> bool:
        return node.name in self.program.params

    def _words(self, node: fx.Node, strategy: Strategy) -> tuple[str, str]:
        layout = format_layout(strategy.results[0]) if strategy.results else ""
        return (layout if node.op == "placeholder" else strategy.name), layout

    # --- what neighbours pay --------------------------------------------------------------------------------------------------

    def _paid(self, node: fx.Node, op: int, strategy: Strategy) -> list[Move]:
        """The conversions of a node's operands, for it, and of its results, if it and its like had ``strategy``."""
        members = set(self.built.members[op])
        chosen = {**self.decision.chosen, **dict.fromkeys(members, strategy)}
        item, out = self.annotated[node], []
        p, m = self.mesh.pipeline, self.program.microbatches
        every, once = (m + p - 1) / p, 1 / p
        keys = [*item.inputs, *((node, i) for i in range(len(strategy.results)))]
        for key in dict.fromkeys(keys):
            have = chosen[key[0]].results[key[1]]
            wanted: dict = {}
            for reader, read in self.annotated.items():
                for position, made in enumerate(read.inputs):
                    if made == key:
                        wanted.setdefault(chosen[reader].operands[position], reader)
            for want, reader in wanted.items():
                moved = move_seconds(self.program, key, have, want, self.mesh, self.cluster)
                if have != want and moved:
                    seconds = every * (moved[0] + moved[1]) + once * moved[2]
                    if seconds > NOISE:
                        out.append(Move(self._name(key[0]), format_layout(have), format_layout(want), self._name(reader), seconds))
        return out

    def _moves(self, node: fx.Node, op: int, strategy: Strategy) -> tuple[Move, ...]:
        """The conversions that would be new."""
        old = {(m.value, m.before, m.after) for m in self._paid(node, op, self.decision.chosen[node])}
        new = [m for m in self._paid(node, op, strategy) if (m.value, m.before, m.after) not in old]
        return tuple(sorted(new, key=lambda m: -m.seconds))

    def _name(self, node: fx.Node) -> str:
        if self._param(node):
            return self.program.params[node.name].name
        return self.program.inputs[node.name].name if node.name in self.program.inputs else node.name

    # --- what can't be --------------------------------------------------------------------------------------------------------

    def _allowed(self, node: fx.Node) -> dict[tuple, str]:
        """(operands, results) of the strategies that the planner took away from the node, and why."""
        before = {(s.operands, s.results) for s in self.annotated[node].strategies}
        heavy = {n: Annotated(a.node, a.rule, a.inputs, a.strategies) for n, a in self.annotated.items()}
        split_heavy(heavy, self.alike)
        reason = "it leaves an axis without work, and so heavy an op is divided by every axis that can"
        out = dict.fromkeys(before - {(s.operands, s.results) for s in heavy[node].strategies}, reason)
        pins = {name: axes for name, axes in self.pins.items() if pinned_node(self.program, name) is node}
        for name, axes in pins.items():
            for s in self.annotated[node].strategies:
                for axis, text in axes.items():
                    index = SHARDED_AXES.index(axis)
                    if self.mesh.sizes[index] > 1 and str(s.results[0][index]) != text:
                        out[s.operands, s.results] = f"{name} is pinned to {text} along {axis}"
        return out

    def _impossible(self, node: fx.Node) -> list[Unavailable]:
        """What no strategy of the node does, though one might ask for it: indices, and dims of weights, that an axis does not divide."""
        out = []
        for index, (axis, k) in enumerate(zip(SHARDED_AXES, self.mesh.sizes)):
            if k == 1:
                continue
            item = self.annotated[node]
            if item.rule is None:
                have = {s.results[0][index].dim for s in item.strategies if s.results[0][index].is_shard}
                for dim, size in enumerate(shape_of(node)):
                    if dim not in have:
                        out.append(Unavailable(f"S({dim}) over {axis}", self._whole(node, axis, size, k)))
                continue
            have = {s.choices[index].factor for s in item.strategies}
            for factor, size in item.rule.sizes.items():
                if size > 1 and factor not in have:
                    out.append(Unavailable(f"shard {factor} over {axis}", _undivided(item, factor, size, k, axis)))
        return out

    def _whole(self, node: fx.Node, axis: str, size: int, k: int) -> str:
        if self._param(node) and axis == "data":
            return "weights are whole over data, where ZeRO cuts what is kept of them"
        return f"a dim of {size} can't be cut in {k} pieces" if size < k else "it is needed whole"


def _undivided(item: Annotated, factor: str, size: int, k: int, axis: str) -> str:
    if factor in item.rule.fixed:
        return "the op needs this index whole"
    if size < k:
        return f"its size is {size}, less than the {k} ranks"
    if size % k:
        return f"its size is {size}, which {k} does not divide"
    if axis == "tensor" and item.node.meta.get("batch", R).is_shard and _is_batch(item, factor):
        return "it is the batch, which is left to data"
    return "no neighbour makes or reads it so"


def _is_batch(item: Annotated, factor: str) -> bool:
    mark = item.node.meta["batch"]
    return any(mark.dim < len(spec) and factor in spec[mark.dim] for spec in item.rule.results)
