"""Every node gets the strategies that the mesh's axes may use: the rules, with blocked shards where views and splits call for them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import product as cartesian

import torch
from torch import fx

from autoshard.mesh import SHARDED_AXES, Mesh
from autoshard.placement import R_STAR, Layout, Placement, R, S, legal
from autoshard.planning.blocked import Key, block_candidates, factor_blocks
from autoshard.program import Program, is_getitem, operands, result_of, shape_of, tensors
from autoshard.rules import rule_for
from autoshard.rules.notation import Choice, OpRule, Strategy, choices, strategies


@dataclass
class Annotated:
    """A node with what it may do. ``inputs`` are its operand values; placeholders have none, the output node has no results."""

    node: fx.Node
    rule: OpRule | None
    inputs: tuple[Key, ...]
    strategies: tuple[Strategy, ...]


def plain(layout: Layout, grad: bool, sizes: tuple[int, ...]) -> Layout:
    """The layout in its one spelling: R along axes of size 1, and no R* for a value without a gradient."""
    return tuple(R if k == 1 or (p == R_STAR and not grad) else p for p, k in zip(layout, sizes))


def annotate(program: Program, mesh: Mesh, alike: dict[fx.Node, int] | None = None) -> dict[fx.Node, Annotated]:
    """The legal strategies of every placeholder, op and of the output, on axes (data, tensor).

    alike: a class for each op; ops of one class (the same op of identical layers) have one rule, which is looked up once.
    """
    sizes = mesh.sizes
    by_class: dict[int, OpRule] = {}
    rules = {}
    for node in program.ops:
        if not is_getitem(node):
            kind = alike.get(node) if alike else None
            rules[node] = by_class[kind] if kind in by_class else rule_for(node)
            if kind is not None:
                by_class[kind] = rules[node]
    inputs = {node: operands(node) for node in rules}
    keys = {node: tuple(map(result_of, found)) for node, found in inputs.items()}
    blocks = block_candidates(rules, keys, sizes)
    per_axis = _choices_by_axis(rules, keys, sizes, blocks)
    for axis in range(len(sizes)):
        if sizes[axis] > 1:
            _prune(program, rules, keys, per_axis, axis)
    out: dict[fx.Node, Annotated] = {}
    made: dict[tuple, tuple[Strategy, ...]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            out[node] = Annotated(node, None, (), _stored(program, node, sizes, blocks))
        elif node in rules:
            key = (id(rules[node]), *map(id, per_axis[node]))  # equal choices are one tuple, and the rule says shapes and gradients
            if key not in made:
                found = strategies(
                    rules[node],
                    tuple(per_axis[node]),
                    sizes,
                    tuple(map(shape_of, inputs[node])),
                    tuple(tuple(v.shape) for v in tensors(node.meta["val"])),
                )
                made[key] = _plain(found, inputs[node], node, sizes)
            out[node] = Annotated(node, rules[node], keys[node], made[key])
        elif node.op == "output":
            out[node] = _demands(program, node, sizes)
    return out


def split_heavy(annotated: dict[fx.Node, Annotated], alike: dict[fx.Node, int], exempt: float = 0.02) -> None:
    """A mesh is a demand: ops that hold 98 % of the matmul FLOPs are divided by every axis that can divide them.

    A model large enough for its mesh is planned so anyway. A small one would be cheapest replicated, with nothing gained by the mesh
    that was asked for. Ops that are planned alike are divided alike.
    """
    heavy: dict[object, list[Annotated]] = defaultdict(list)
    for node, item in annotated.items():
        if item.rule and item.rule.flops:
            heavy[alike.get(node, node)].append(item)
    work = {kind: sum(item.node.meta.get("stands_for", 1) * item.rule.flops for item in group) for kind, group in heavy.items()}
    left = exempt * sum(work.values())
    for kind, group in sorted(heavy.items(), key=lambda entry: work[entry[0]]):
        left -= work[kind]
        if left >= 0:
            continue
        shared = set.intersection(*({(s.operands, s.results) for s in item.strategies} for item in group))
        most = max((_ways(s) for s in group[0].strategies if (s.operands, s.results) in shared), default=0)
        for item in group:
            item.strategies = tuple(s for s in item.strategies if _ways(s) == most)


def _ways(strategy: Strategy) -> int:
    """How many axes divide the op."""
    return sum(c.name.startswith("shard") for c in strategy.choices)


def _plain(found, inputs, node: fx.Node, sizes) -> tuple[Strategy, ...]:
    """Strategies in plain spelling, without those that differ in nothing."""
    unique: dict[tuple, Strategy] = {}
    for s in found:
        ins = tuple(plain(layout, bool(x.meta.get("grad")), sizes) for layout, x in zip(s.operands, inputs))
        outs = tuple(plain(layout, bool(node.meta.get("grad")), sizes) for layout in s.results)
        unique.setdefault((ins, outs), Strategy(s.choices, ins, outs))
    return tuple(unique.values())


def _choices_by_axis(rules: dict[fx.Node, OpRule], keys, sizes, blocks) -> dict[fx.Node, list[tuple[Choice, ...]]]:
    """What each axis may do with each op. Ops of one rule that see the same blocks share one tuple of choices."""
    made: dict[tuple, list[tuple[Choice, ...]]] = {}
    found = {}
    for node, rule in rules.items():
        per_factor: dict[str, set[int]] = defaultdict(lambda: {1})
        for spec, key in [*zip(rule.operands, keys[node]), *((s, (node, i)) for i, s in enumerate(rule.results))]:
            for factor, b, _ in factor_blocks(rule, spec, key, blocks):
                per_factor[factor].add(b)
        per_factor = {factor: tuple(sorted(per_factor[factor])) for factor in sorted(per_factor)}
        marks = (*(producer.meta.get("batch", R) for producer, _ in keys[node]), *(node.meta.get("batch", R) for _ in rule.results))
        known = (id(rule), tuple(per_factor.items()), marks)
        if known not in made:
            data, tensor = (choices(rule, k, per_factor) if k > 1 else choices(rule, 1) for k in sizes)
            made[known] = [data, _leave_batch_to_data(rule, tensor, marks)]
        found[node] = list(made[known])
    return found


def _leave_batch_to_data(rule: OpRule, options: tuple[Choice, ...], marks: tuple[Placement, ...]) -> tuple[Choice, ...]:
    """The tensor axis divides what is not the batch, unless a matmul has nothing else to divide. ``marks``: where each operand and result
    has the batch.

    An axis's name says what it is for. Where memory allows it, the batch is the cheapest thing to cut along every axis, and a mesh of
    (1, 8) would be planned as if it were (8, 1).
    """
    kept = tuple(c for c in options if not any(p.is_shard and p == mark for p, mark in zip(c.operands + c.results, marks)))
    return kept if not rule.flops or any(c.name.startswith("shard") for c in kept) else options


def _prune(program: Program, rules: dict[fx.Node, OpRule], keys, per_axis, axis: int) -> None:
    """Drop choices that lead nowhere: a blocked shard that no neighbour speaks, a view's shard that no consumer wants."""
    consumers: dict[Key, list[tuple[fx.Node, int]]] = defaultdict(list)
    for node in rules:
        for i, key in enumerate(keys[node]):
            consumers[key].append((node, i))
    leaves = {result_of(x) for x in program.leaves if isinstance(x, fx.Node)}
    # What was found for one op is found for all that have the same rule, choices and neighbours. Tuples of choices are told apart by id:
    # equal ones are one object, and ``alive`` holds them all.
    sets: dict[frozenset, frozenset] = {}
    sides: dict[tuple, frozenset[Placement]] = {}
    kept: dict[tuple, tuple[Choice, ...]] = {}
    alive = {tuple(map(id, options[axis])): options[axis] for options in per_axis.values()}
    for options in per_axis.values():
        options[axis] = alive[tuple(map(id, options[axis]))]

    def side(options: tuple[Choice, ...], index: int, results: bool) -> frozenset[Placement]:
        """What the choices demand of an operand, or what a result can be."""
        key = id(options), index, results
        if key not in sides:
            found = frozenset((c.results if results else c.operands)[index] for c in options)
            sides[key] = sets.setdefault(found, found)
        return sides[key]

    def accepted(key: Key) -> frozenset[Placement] | None:
        """Shards that some consumer demands; None if the value leaves the program."""
        if key in leaves:
            return None
        found = frozenset().union(*{side(per_axis[node][axis], i, False) for node, i in consumers[key]})
        return sets.setdefault(found, found)

    def produced(key: Key) -> frozenset[Placement] | None:
        node, index = key
        return None if node not in rules else side(per_axis[node][axis], index, True)

    def useful(choice: Choice, wanted: list, made: list, view: bool) -> bool:
        for p, w in zip(choice.results, wanted):
            if p.is_shard and (p.blocks > 1 or view) and w is not None and p not in w:
                return False
        return not any(p.is_shard and p.blocks > 1 and m is not None and p not in m for p, m in zip(choice.operands, made))

    def useful_choices(node: fx.Node, options: tuple[Choice, ...]) -> tuple[Choice, ...]:
        rule = rules[node]
        wanted = [accepted((node, i)) for i in range(len(rule.results))]
        made = [produced(key) for key in keys[node]]
        key = (id(rule), id(options), *map(id, wanted), *map(id, made))
        if key not in kept:
            view = rule.flops == 0 and not rule.saved
            left = tuple(c for c in options if useful(c, wanted, made, view))
            kept[key] = options if len(left) == len(options) else alive.setdefault(tuple(map(id, left)), left)
        return kept[key]

    changed = True
    while changed:
        changed = False
        for node in reversed(list(rules)):
            left = useful_choices(node, per_axis[node][axis])
            if left is not per_axis[node][axis]:
                per_axis[node][axis] = left
                changed = True


# --- placeholders and the output ---------------------------------------------------------------------------------------


def _stored(program: Program, node: fx.Node, sizes, blocks) -> tuple[Strategy, ...]:
    """How a parameter or input may be held: whole or cut. Parameters are whole along data: their state there is ZeRO's business."""
    shape = shape_of(node)
    per_axis = []
    for axis, k in zip(SHARDED_AXES, sizes):
        held = [R]
        if k > 1 and not _must_be_whole(program, node) and not (node.name in program.params and axis == "data"):
            for dim, n in enumerate(shape):
                held += [S(dim, b) for b in sorted({1, *blocks.get((node, 0, dim), ())}) if n % b == 0 and n // b >= k]
        per_axis.append([Choice(str(p), (), (p,)) for p in held])
    out = []
    for combo in cartesian(*per_axis):
        layout = tuple(c.results[0] for c in combo)
        if legal(layout, shape, sizes):
            out.append(Strategy(combo, (), (layout,)))
    return tuple(out)


def _must_be_whole(program: Program, node: fx.Node) -> bool:
    """A value of the prologue, and what the prologue reads; buffers that forward changes, here or in train mode (running statistics)."""
    param = program.params.get(node.name)
    if param is None:
        return bool(node.meta.get("prologue")) or node.name not in program.inputs
    norms = any(user.target is torch.ops.aten.batch_norm.default for user in node.users)
    return bool(node.meta.get("prologue")) or param.name in program.updates or (param.kind == "buffer" and norms)


def reads_of(program: Program) -> dict[fx.Node, tuple[Key, ...]]:
    """What every node that something is decided about reads, as ``Annotated.inputs`` has it."""
    found: dict[fx.Node, tuple[Key, ...]] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            found[node] = _wanted(program)
        elif not is_getitem(node):
            found[node] = tuple(map(result_of, operands(node))) if node.op == "call_function" else ()
    return found


def _wanted(program: Program) -> tuple[Key, ...]:
    """The loss, and new values of buffers; without a loss every output."""
    leaves = program.leaves
    wanted = leaves if program.loss is None else [leaves[program.loss], *leaves[len(program.results) :]]
    return tuple(result_of(x) for x in wanted if isinstance(x, fx.Node))


def _demands(program: Program, node: fx.Node, sizes) -> Annotated:
    """What is wanted of the program must come out whole."""
    inputs = _wanted(program)
    whole = tuple(R for _ in sizes)
    choice = Choice("replicate", (R,) * len(inputs), ())
    return Annotated(node, None, inputs, (Strategy((choice,) * len(sizes), (whole,) * len(inputs), ()),))
