"""Price a rewritten program: what each op, collective, stage and rank will cost. Estimates, from the cost model alone.

Works on the graph in which conversions are explicit, not on the solver's numbers, so that a wrong objective would show.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import prod

from torch import fx

from autoshard import ops
from autoshard.cluster import Cluster
from autoshard.cost.buckets import Weight, filled
from autoshard.cost.communication import conversion_steps, gradient_sync, kernel_steps, send, together, weight_sync
from autoshard.cost.compute import Pricing, accumulation_seconds, offloaded_seconds, optimizer_seconds
from autoshard.cost.pipeline import StageTime, bubble_share, crowded_seconds, exposed_seconds, half_done, in_flight, step_seconds
from autoshard.cost.rank import Manner, rank_peak
from autoshard.errors import MORE_ROOM, InfeasibleError
from autoshard.mesh import Mesh
from autoshard.passes.cut_stages import Stage, crossing, cut_stages
from autoshard.placement import R, format_layout, local_shape
from autoshard.planning.plan import CollectiveRow, OpRow, Plan, StageRow
from autoshard.program import Program, is_getitem, operands, stored_layout, tensors
from autoshard.rules import rule_for
from autoshard.rules.notation import Choice, OpRule, Strategy
from autoshard.schedule import schedule_of

PARTED = {"cpu": 0.1, "gpu": 0.0}
"""Of a backward's time, what it takes more in two parts. On a CPU 4 to 17 % were measured: what forward saved is still there, so the
memory that backward needs is new. On GPUs nothing was."""


def predict(plan: Plan, program: Program, cluster: Cluster) -> Plan:
    """Fill in the predictions of ``plan`` from its converted ``program`` (of one micro-batch)."""
    mesh = plan.mesh
    plan.ops, plan.collectives = [], []
    per_stage = {s: {"compute": 0.0, "data": 0.0, "tensor": 0.0} for s in range(plan.depth)}
    part = {s: {"forward": 0.0, "weights": 0.0} for s in range(plan.depth)}  # seconds of these, of all that
    whole_seconds = 0.0
    buckets: dict[int, list[fx.Node]] = defaultdict(list)
    for node in program.ops:
        if "bucket" in node.meta:
            buckets[node.meta["bucket"]].append(node)
    spent: dict[fx.Node, float] = {}  # seconds of backward
    pricing, alone = Pricing(mesh.sizes, cluster), Pricing((1, 1), cluster)
    priced: dict[tuple[int, int], tuple] = {}  # by rule and strategy: the ops of a hundred layers cost what those of one do
    for node in program.ops:
        if is_getitem(node):
            continue
        stage = node.meta["stage"]
        if node.target is ops.convert:
            members = buckets[node.meta["bucket"]] if "bucket" in node.meta else [node]
            if node is not members[0]:
                continue
            steps = [step for n in members for step in _steps(n, mesh, cluster) + _again(n, program, mesh, cluster)]
            for step in together(steps, mesh, cluster):
                per_stage[stage][step.axis] += step.seconds
                part[stage]["forward"] += step.seconds if step.direction == "forward" else 0.0
                spent[node] = spent.get(node, 0.0) + (step.seconds if step.direction == "backward" else 0.0)
                if not step.local:
                    taken = node.meta["step"]
                    path = f"{format_layout(taken.before)} -> {format_layout(taken.after)}"
                    why = f"{node.meta['of']}: {path}, wanted by {node.meta['wanted_by']}"
                    why += f", and {len(members) - 1} more" if len(members) > 1 else ""
                    plan.collectives.append(_row(step, node, plan, stage, why, plan.microbatches))
            continue
        strategy, rule = node.meta["strategy"], rule_for(node)
        key = id(rule), id(strategy)
        if key not in priced:
            whole = _whole(len(strategy.operands), len(strategy.results))
            priced[key] = rule, pricing.costs(node, rule, (strategy,))[0], alone.costs(node, rule, (whole,))[0], _texts(node)
        _, cost, one, texts = priced[key]
        spent[node] = cost.backward + (cost.forward if node.meta.get("again") == "again" else 0.0)
        per_stage[stage]["compute"] += cost.forward + spent[node]
        part[stage]["forward"] += cost.forward
        part[stage]["weights"] += _for_weights(node, rule, program) * cost.backward
        itemsize = max((v.element_size() for v in tensors(node.meta["val"])), default=4)
        for step in kernel_steps(strategy, itemsize, mesh, cluster):
            per_stage[stage][step.axis] += step.seconds
            part[stage]["forward"] += step.seconds
            plan.collectives.append(_row(step, node, plan, stage, f"inside {node.target}", plan.microbatches))
        whole_seconds += (one.forward + one.backward) * plan.microbatches
        plan.ops.append(_op_row(node, program, cost, texts))
    placed, halves = schedule_of(plan.schedule), _halves(plan)
    for node, seconds in spent.items():
        stage = node.meta["stage"]
        if halves[placed.rank_of(stage, mesh.pipeline)]:
            per_stage[stage]["compute"] += PARTED[cluster.device.kind] * seconds
    _sends(plan, program, mesh, cluster)
    once, hidden = _weights(plan, program, mesh, cluster, spent)
    _totals(plan, mesh, cluster, per_stage, part, once, hidden, whole_seconds, program)
    return plan


def _for_weights(node: fx.Node, rule: OpRule, program: Program) -> float:
    """The share of an op's backward that gives gradients of weights and may wait: of matmuls one of two matrices."""
    if not rule.flops or "region" in node.meta:
        return 0.0
    trained = [x for i, x in enumerate(operands(node)) if x.meta.get("grad") and i not in rule.additive]
    weights = sum(_source(x).name in program.params for x in trained)
    return weights / len(trained) if trained else 0.0


def _source(x: fx.Node) -> fx.Node:
    """What was converted."""
    while x.target is ops.convert:
        x = x.args[0]
    return x


@cache
def _whole(operands: int, results: int) -> Strategy:
    nothing = (R, R)
    choice = Choice("replicate", (R,) * operands, (R,) * results)
    return Strategy((choice, choice), (nothing,) * operands, (nothing,) * results)


def _texts(node: fx.Node) -> dict:
    """What a row says of all ops of one rule and strategy."""
    strategy = node.meta["strategy"]
    return {
        "op": str(node.target).rsplit(".", 1)[0],
        "choices": [c.name for c in strategy.choices],
        "layout": format_layout(strategy.results[0]) if strategy.results else "",
        "operands": [format_layout(layout) for layout in strategy.operands],
    }


def _op_row(node: fx.Node, program: Program, cost, texts: dict) -> OpRow:
    weights = {}
    for x in operands(node):
        source = _source(x)
        if source.name in program.params:
            weights[program.params[source.name].name] = format_layout(stored_layout(source))
    return OpRow(
        node=node.name,
        module=node.meta.get("module", ""),
        source=node.meta.get("source", ""),
        stage=node.meta["stage"],
        weights=weights,
        flops=cost.flops,
        split=cost.split,
        forward=cost.forward,
        backward=cost.backward,
        **texts,
    )


def _row(step, node: fx.Node, plan: Plan, stage: int, why: str, runs: int) -> CollectiveRow:
    return CollectiveRow(
        step.kind, step.axis, node.name, node.meta.get("module", ""), node.meta.get("source", ""), why, step.direction, stage, step.nbytes,
        step.seconds, runs,
    )  # fmt: skip


def _steps(node: fx.Node, mesh: Mesh, cluster: Cluster):
    step = node.meta["step"]
    val = node.meta["val"]
    return conversion_steps(step.before, step.after, tuple(val.shape), val.element_size(), mesh, cluster, bool(node.meta.get("grad"))) or ()


def _again(node: fx.Node, program: Program, mesh: Mesh, cluster: Cluster):
    """What backward runs again of a conversion's forward: of one in a region all, of a gathered weight what an op's backward reads."""
    again = node.meta.get("again")
    kept = again is None and node.args[0].meta.get("zero") == 3 and any(
        user.target is ops.convert or i in rule_for(user).saved for user in node.users for i, x in enumerate(operands(user)) if x is node
    )
    if again != "again" and not kept:
        return ()
    return tuple(replace(step, direction="backward") for step in _steps(node, mesh, cluster) if step.direction == "forward")


def _sends(plan: Plan, program: Program, mesh: Mesh, cluster: Cluster) -> None:
    """Rows of what crosses the cuts; the sender is charged forward, the receiver backward."""
    placed = schedule_of(plan.schedule)
    stage_of = {n: n.meta["stage"] for n in program.ops}
    for s, values in enumerate(crossing(program, stage_of, plan.depth)):
        if placed.rank_of(s, mesh.pipeline) == placed.rank_of(s + 1, mesh.pipeline):
            continue  # the two are on one rank
        for node in values:
            val = tensors(node.meta["val"])[0]
            nbytes = prod(local_shape(tuple(val.shape), node.meta["layouts"][0], mesh.sizes, (0, 0))) * val.element_size()
            for direction, at in (("forward", s), ("backward", s + 1))[: 2 if node.meta.get("grad") else 1]:
                step = send(nbytes, mesh, cluster, direction)
                plan.collectives.append(_row(step, node, plan, at, f"cut between stages {s} and {s + 1}", plan.microbatches))


def _weights(plan: Plan, program: Program, mesh: Mesh, cluster: Cluster, spent: Mapping[fx.Node, float]) -> tuple[list[float], float]:
    """Stage rows: memory, gradient sums and optimizer. A weight that several stages of one rank read is that of the first.

    spent: seconds of one micro-batch's backward, by op. Returns (seconds once a step that nothing overlaps, by place along the
    pipeline; mean seconds of gradient sums that the last backward overlaps).
    """
    users: dict[fx.Node, set[int]] = defaultdict(set)
    backward: dict[int, float] = defaultdict(float)  # of each stage
    arrives: dict[tuple[fx.Node, int], float] = {}  # when a stage's backward has a weight's gradient
    for node in reversed(program.ops):
        stage = node.meta["stage"]
        backward[stage] += spent.get(node, 0.0)
        arrives.update({(x, stage): backward[stage] for x in node.all_input_nodes})
    for node in program.ops:
        for x in node.all_input_nodes:
            if x.name in program.params:
                users[x].add(node.meta["stage"])
    placed, p = schedule_of(plan.schedule), mesh.pipeline
    rank_of = {s: placed.rank_of(s, p) for s in range(plan.depth)}

    def several(stages: set[int]) -> bool:
        return len({rank_of[s] for s in stages}) > 1

    plan.stage_rows, once, hidden, parts = [], [0.0] * p, 0.0, cut_stages(program, plan.depth)
    memory = _memory(plan, mesh, cluster, parts)
    for s in range(plan.depth):
        here = [n for n, stages in users.items() if s in stages and not any(rank_of[other] == rank_of[s] for other in stages if other < s)]
        elements = 0
        buckets: dict[tuple[int, tuple[str, ...], bool], float] = defaultdict(float)
        names: dict[tuple[int, tuple[str, ...], bool], list[str]] = defaultdict(list)
        trained = wide = seconds = 0.0
        tensors = 0
        weights: list[Weight] = []
        for node in here:
            param = program.params[node.name]
            layout, zero = stored_layout(node), node.meta.get("zero", 0)
            piece = prod(local_shape(param.shape, layout, mesh.sizes, (0, 0)))
            whole = prod(local_shape(param.shape, (R, layout[1]), mesh.sizes, (0, 0))) if zero else piece
            held = piece if zero == 3 else whole
            size = node.meta["val"].element_size()
            mixed = param.master is not None
            offloaded = param.name in plan.offload
            elements += held
            plan.params[param.name] = format_layout(layout)
            if param.requires_grad:
                if offloaded:
                    seconds += offloaded_seconds(piece, size, cluster, mixed)
                else:
                    trained += piece
                    wide += mixed * piece
                    tensors += 1
                axes = tuple(a for a in node.meta.get("sync", ()) if getattr(mesh, a) > 1)
                weights.append(Weight(node, held * size, piece * size, size, axes, zero))
                key = zero, axes, several(users[node])
                buckets[key] += held * size
                names[key].append(param.name)
        seconds += optimizer_seconds(trained, cluster.device, mixed=wide, tensors=tensors) if trained else 0.0
        if buckets:
            grown = accumulation_seconds(sum(buckets.values()), sum(map(len, names.values())), cluster.device)
            seconds += (plan.microbatches - 1) * grown
        sums: list[tuple[float, float]] = []  # of gradients, in buckets: when backward has them, and what is started then
        for bucket in filled([w for w in weights if w.axes]):
            steps = weight_sync(sum(w.whole for w in bucket), bucket[0].axes, 2 if bucket[0].scatter else 0, mesh, cluster)
            started, *later = (step.seconds for step in steps if step.direction == "backward")
            sums.append((max(arrives[w.node, s] for w in bucket), started))
            seconds += sum(later)  # sums over other axes of what was scattered: when that is waited for
        for (zero, axes, tied), nbytes in buckets.items():
            syncs = weight_sync(nbytes, axes, zero, mesh, cluster)
            if tied:
                syncs += (gradient_sync(nbytes / (mesh.data if zero in (1, 2) else 1), ("pipeline",), mesh, cluster),)
            for i, sync in enumerate(syncs):
                if sync.direction == "forward" or (tied and i + 1 == len(syncs)):
                    seconds += sync.seconds
                first, *more = names[zero, axes, tied]
                what = "gradients" if sync.direction == "backward" else "weights"
                why = f"{what} of {first}" + (f" and {len(more)} more" if more else "")
                plan.collectives.append(CollectiveRow(sync.kind, sync.axis, what, "", "", why, "step", s, sync.nbytes, sync.seconds, 1))
        whole = sum(t for _, t in sums)
        # gloo works on the processors that backward needs; schedules with lists of actions end before sums start
        overlaps = cluster.device.kind != "cpu" and not placed.listed
        left = exposed_seconds(sums, backward[s]) if overlaps else whole
        seconds += left
        hidden += (whole - left) / p
        ops_here = [op for op in plan.ops if op.stage == s]
        named = [op.module for op in ops_here if op.module]
        plan.stage_rows.append(
            StageRow(
                index=s,
                first=named[0] if named else "",
                last=named[-1] if named else "",
                ops=len(ops_here),
                parameters=elements,
                seconds=0.0,
                once=seconds,
                in_flight=memory[s][0].flight,
                memory=memory[s][1],
                rank=rank_of[s],
            )
        )
        once[rank_of[s]] += seconds
    return once, hidden


def _memory(plan: Plan, mesh: Mesh, cluster: Cluster, parts: list[Stage]) -> dict[int, tuple[Manner, dict[str, float]]]:
    """How each stage is run, and its bytes by category when its rank needs most."""
    placed, p, m = schedule_of(plan.schedule), mesh.pipeline, plan.microbatches
    name, halves, found = placed.run_as(m, p), _halves(plan), {}
    for rank in range(p):
        here, seen, manners = placed.stages_of(rank, p, plan.chunks), frozenset(), []
        for s in here:
            late = (s + 1 not in here, s - 1 not in here) if placed.listed else None
            half = half_done(name, p, m, s) if halves[rank] else 0
            flight = in_flight(name, p, plan.chunks, m, s, not halves[rank])
            manners.append(Manner(flight, s == plan.depth - 1, late, halves[rank], half, seen))
            seen |= parts[s].program.params.keys()
        tables = rank_peak([(parts[s].program, manner) for s, manner in zip(here, manners)], mesh, cluster.device, plan.offload)
        found.update(zip(here, zip(manners, tables)))
    return found


def _halves(plan: Plan) -> list[bool]:
    """Of each place along the pipeline, whether its backwards are run in two parts: not if it computes anything again in them."""
    placed, p = schedule_of(plan.schedule), plan.mesh.pipeline
    again = {placed.rank_of(plan.stages[node], p) for node in plan.regions}
    return [placed.splits and rank not in again for rank in range(p)]


def _totals(plan: Plan, mesh: Mesh, cluster: Cluster, per_stage, part, once, hidden: float, whole_seconds: float, program: Program):
    m = plan.microbatches
    sends = defaultdict(float)
    for row in plan.collectives:
        if row.kind == "send":
            sends[row.stage] += row.seconds
            part[row.stage]["forward"] += row.seconds if row.direction == "forward" else 0.0
    p, times, work, halves = mesh.pipeline, [], [0.0] * mesh.pipeline, _halves(plan)
    for row in plan.stage_rows:
        row.seconds = sum(per_stage[row.index].values()) + sends[row.index]
        forward, weights = part[row.index]["forward"], halves[row.rank] * part[row.index]["weights"]
        times.append(StageTime(forward, row.seconds - forward - weights, weights))
        work[row.rank] += row.seconds
    crowding = cluster.crowding(mesh.size)
    busy = [m * t for t in work]
    pipelined = crowded_seconds(step_seconds(plan.schedule, p, times, m), busy, crowding)
    plan.step_seconds = crowded_seconds(step_seconds(plan.schedule, p, times, m, once), [t + o for t, o in zip(busy, once)], crowding)
    plan.bubble = bubble_share([t * crowding for t in work], m, pipelined) if p > 1 else 0.0
    mean = {k: sum(per_stage[s][k] for s in per_stage) / p * m for k in ("compute", "data", "tensor")}
    syncs = defaultdict(float)
    for row in plan.collectives:
        if row.direction == "step":
            syncs[row.axis] += row.seconds / p
    if hidden:
        longest = max(syncs, key=syncs.get)
        syncs[longest] = max(0.0, syncs[longest] - hidden)
    optimizer = max(0.0, sum(once) / p - sum(syncs.values()))
    plan.breakdown = {
        "compute": mean["compute"],
        "tensor": mean["tensor"] + syncs.get("tensor", 0.0),
        "data": mean["data"] + sum(v for k, v in syncs.items() if "data" in k),
        "pipeline": sum(sends.values()) / p * m + syncs.get("pipeline", 0.0),
        "optimizer": optimizer,
    }
    plan.breakdown = {name: seconds * crowding for name, seconds in plan.breakdown.items()}
    plan.breakdown["bubble"] = max(0.0, plan.step_seconds - sum(plan.breakdown.values()))
    weights = [prod(q.shape) for q in program.params.values() if q.requires_grad]
    wide = sum(prod(q.shape) for q in program.params.values() if q.master is not None)
    plan.one_device_seconds = whole_seconds + optimizer_seconds(sum(weights), cluster.device, mixed=wide, tensors=len(weights))
    plan.efficiency = plan.one_device_seconds / (mesh.size * plan.step_seconds) if plan.step_seconds else 0.0


def describe(
    captured, program: Program, title: str, mesh: Mesh, cluster: Cluster, limit: float, m: int, strategies, stages, solver, schedule, chunks
) -> Plan:
    """A plan with its decisions and what is known of the model; ``program`` is the canonical one of the whole batch."""
    shapes = [(i.shape, i.batch_dim) for i in program.inputs.values() if i.batch_dim is not None]
    samples = shapes[0][0][shapes[0][1]] if shapes else 0
    words = [i.shape for i in program.inputs.values() if i.batch_dim == 0 and len(i.shape) == 2 and not i.dtype.is_floating_point]
    return Plan(
        mesh=mesh,
        cluster=cluster.name,
        microbatches=m,
        schedule=schedule,
        chunks=chunks,
        strategies=strategies,
        stages=stages,
        params={},
        fingerprint=fingerprint(program),
        precision=captured.precision,
        model=title,
        parameter_count=sum(prod(p.shape) for p in captured.params if p.kind == "parameter"),
        samples=samples,
        tokens=prod(words[0]) if words else 0,
        memory_limit=limit,
        node_size=cluster.node_size,
        solver=solver,
    )


def fingerprint(program: Program) -> str:
    """A hash of the canonical graph: ops, shapes and edges. Equal for equal models and batches, on any machine."""
    digest = hashlib.sha256()
    for node in program.graph.nodes:
        shapes = [(tuple(v.shape), str(v.dtype)) for v in tensors(node.meta.get("val"))]
        digest.update(repr((node.name, node.op, str(node.target), [x.name for x in node.all_input_nodes], shapes)).encode())
    return digest.hexdigest()[:16]


def check_memory(plan: Plan) -> None:
    """Raise InfeasibleError if the fullest rank needs more than the limit."""
    if plan.peak_bytes > plan.memory_limit:
        raise too_large(plan, "the plan does not fit")


def too_large(plan: Plan, what: str, proven: float | None = None) -> InfeasibleError:
    """Of a plan that does not fit, with the stage, the category and the amount. proven: bytes that any plan needs."""
    place, worst = max(plan.rank_memory.items(), key=lambda item: sum(item[1].values()))
    need = sum(worst.values())
    category, most = max(worst.items(), key=lambda kv: kv[1])
    gib = 2.0**30
    return InfeasibleError(
        f"{what}: a rank of stage {place} needs {need / gib:.3g} GiB, the limit is {plan.memory_limit / gib:.3g} GiB, "
        f"{(need - plan.memory_limit) / gib:.3g} GiB too much; {category} are the largest part, {most / gib:.3g} GiB",
        hint=MORE_ROOM, limit=plan.memory_limit, least=need, proven=proven, stage=place, memory=worst,
    )  # fmt: skip
