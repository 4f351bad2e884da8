"""What ``autoshard explain`` prints: the plan for a person, the summary first and memory last."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from autoshard.mesh import AXES, SHARDED_AXES
from autoshard.planning.plan import CollectiveRow, OpRow, PinRow, Plan
from autoshard.report.fold import Folded, fold, layer_of
from autoshard.report.tables import Line, Part, Table, Title, render
from autoshard.report.units import count, duration, percent, size

SHOWN_OPS = ("addmm", "baddbmm", "bilinear", "bmm", "conv", "cross_entropy", "einsum", "embedding", "index_put", "linear", "matmul", "mm",
             "nll_loss", "norm", "scaled_dot_product", "topk")  # fmt: skip
"""Ops listed by default (a part of the name); so are ops that read a weight, and those that take at least 1 % of the time."""


HOST = " host"
"""Marks weights that the optimizer updates there."""


def explain(plan: Plan, *, every: bool = False) -> list[Part]:
    """The sections in order. ``every`` lists all the ops, and every collective with its reason."""
    sections = (summary, lambda p: modules(p, every), stages, lambda p: collectives(p, every), times, solver, memory)
    return [part for section in sections for part in section(plan)]


def explain_text(plan: Plan, *, every: bool = False, width: int = 100) -> str:
    """The same as plain text."""
    return render(explain(plan, every=every), width=width)


def summary(plan: Plan) -> list[Part]:
    throughput = [f"{count(plan.samples / plan.step_seconds)} samples/s"] if plan.step_seconds else []
    if plan.tokens and plan.step_seconds:
        throughput.append(f"{count(plan.tokens / plan.step_seconds)} tokens/s")
    head = (
        f"{plan.model or 'model'}: {count(plan.parameter_count)} parameters on mesh {plan.mesh} = {_plural(plan.mesh.size, 'rank')} "
        f"of {plan.cluster}, estimated {', '.join([f'{duration(plan.step_seconds)} a step', *throughput])}, "
        f"efficiency {plan.efficiency:.2f}"
    )
    axes = _times({axis: getattr(plan.mesh, axis) for axis in AXES})
    near = plan.mesh.within(plan.node_size) if plan.node_size else {}
    axes += f" (ranks of a node: {_times(near)})" if near else ""
    batch = f"{_plural(plan.samples, 'sample')}" + (f" ({plan.tokens} tokens)" if plan.tokens else "")
    precision = "" if plan.precision == "fp32" else f" {plan.precision} with fp32 masters;"
    detail = f"{axes};{precision} a batch of {batch} in {_plural(plan.microbatches, 'micro-batch', 'es')}"
    if plan.schedule != "none":
        detail += f", {plan.schedule} schedule" + (f" with {plan.chunks} stages a rank" if plan.chunks > 1 else "")
    one = f"one such device would take {duration(plan.one_device_seconds)} a step; " if plan.one_device_seconds else ""
    return [Line(head, indent=0), Line(f"{detail}; {one}all times and bytes are estimates"), *map(Line, pinned(plan.pins))]


def pinned(pins: Iterable[PinRow]) -> list[str]:
    """What was forced, and in how many layers."""
    out = []
    for pin in pins:
        placed = ", ".join(f"{axis}:{placement}" for axis, placement in pin.axes.items())
        layers = f", in all {pin.layers} layers like it" if pin.layers > 1 else ""
        out.append(f"pinned: {pin.name} to {placed}{layers}")
    return out


def _times(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


def modules(plan: Plan, every: bool) -> list[Part]:
    """The table of ops, identical layers folded. Axes of size 1 have no column."""
    axes = [i for i, axis in enumerate(SHARDED_AXES) if getattr(plan.mesh, axis) > 1]
    total = sum(_time(row) for row in plan.ops) or 1.0
    totals: Counter[str] = Counter()  # by op and module with the layer number out, so that a layer is not judged alone
    for row in plan.ops:
        totals[_kind(row)] += _time(row)
    shown = [row for row in plan.ops if every or _interesting(row) or totals[_kind(row)] / total >= 0.01]

    hosted = set(plan.offload)

    def key(row: OpRow):
        weights = tuple((_below(name, row.module), _compact(at) + HOST * (name in hosted)) for name, at in row.weights.items())
        return row.op, tuple(row.choices[i] for i in axes), weights, row.layout

    lines, block = [], ""
    for run in _runs(fold(shown, lambda row: row.module, key)):
        if run[0].block != block:
            block = run[0].block
            lines.append((f"{block}:" if block else "",))
        lines.append(_op_cells(run, total))
    headers = ("module", "op", *(f"{SHARDED_AXES[i]} ({getattr(plan.mesh, SHARDED_AXES[i])})" for i in axes))
    out = [Title("Modules"), Table((*headers, "weights", "output", ">time"), tuple(lines))]
    rest = sum(_time(row) for row in plan.ops) - sum(_time(row) for row in shown)
    if len(shown) < len(plan.ops):
        out.append(Line(f"and {_plural(len(plan.ops) - len(shown), 'more op')}, {percent(rest / total)} of the time (--all lists them)"))
    text = f"layouts are [{', '.join(SHARDED_AXES)}]; time is the share of all compute, without communication"
    out.append(Line(text + "; host: where the optimizer updates a weight" * bool(hosted)))
    flops = [f"{axis} {percent(share)}" for axis, share in plan.split_flops.items() if getattr(plan.mesh, axis) > 1]
    if flops:
        out.append(Line(f"share of the FLOPs that an axis divides: {', '.join(flops)}"))
    return out


def _runs(rows: list[Folded]) -> list[list[Folded]]:
    """Neighbours of one module that differ only in a dull op (pointwise, views) belong on one line."""
    out: list[list[Folded]] = []
    for row in rows:
        last = out[-1][-1] if out else None
        if last and last.path == row.path and last.key[1:] == row.key[1:] and not (_interesting(last.rows[0]) or _interesting(row.rows[0])):
            out[-1].append(row)
        else:
            out.append([row])
    return out


def _op_cells(run: list[Folded], total: float) -> tuple[str, ...]:
    _, choices, weights, layout = run[0].key
    ops = Counter(_op_name(folded.key[0]) for folded in run)
    op = ", ".join(name if n == 1 else f"{n} {name}" for name, n in ops.items())
    share = sum(_time(row) for folded in run for row in folded.rows) / total
    names = "\n".join(f"{name} {at}" for name, at in weights) or "-"
    inside = run[0].inside or "(itself)"
    return ("  " * bool(run[0].block) + inside, op, *choices, names, _compact(layout), percent(share))


def stages(plan: Plan) -> list[Part]:
    p, m = plan.mesh.pipeline, plan.microbatches
    if p == 1:
        return [Title("Stages"), Line("one: the mesh has no pipeline, so there is no bubble")]
    rows = [
        (str(s.index), s.first, s.last, str(s.ops), count(s.parameters), duration(s.seconds), duration(s.once), str(s.in_flight))
        for s in plan.stage_rows
    ]
    headers = (">stage", "from", "to", ">ops", ">params/rank", ">micro-batch", ">once a step", ">in flight")
    if plan.chunks > 1:
        headers, rows = (">rank", *headers), [(str(s.rank), *row) for s, row in zip(plan.stage_rows, rows)]
    out = [Title("Stages"), Table(headers, tuple(rows))]
    for before, after in zip(plan.stage_rows, plan.stage_rows[1:]):
        if before.rank == after.rank:
            out.append(Line(f"cut {before.index}|{after.index} after {before.last or 'the model itself'}: within a rank"))
            continue
        sends = [c for c in plan.collectives if c.axis == "pipeline" and c.kind == "send"]
        forward = [c for c in sends if c.direction == "forward" and c.stage == before.index]
        backward = [c for c in sends if c.direction == "backward" and c.stage == after.index]
        out.append(
            Line(
                f"cut {before.index}|{after.index} after {before.last or 'the model itself'}: "
                f"{_plural(len(forward), 'value')}, "
                f"{size(sum(c.nbytes for c in forward))} forward and {size(sum(c.nbytes for c in backward))} back, per micro-batch and rank"
            )
        )
    formula = f"(p-1)/(p-1+m) = {p - 1}/({p - 1}+{m}) = {percent((p - 1) / (p - 1 + m))}"
    usual = "" if plan.schedule in ("GPipe", "1F1B") else " under 1F1B"
    out.append(Line(f"bubble: {formula} if stages were equal{usual}; planned {percent(plan.bubble)}"))
    return [*out, *_schedules(plan)]


def _schedules(plan: Plan) -> list[Part]:
    """What was tried, and what each would take."""
    rows = plan.solver.get("schedules")
    if not rows:
        return []
    if len(rows) == 1:
        return [Line(f"schedules: {rows[0]['schedule']}; no other was expected to take 1 % less")]
    tried = []
    for row in rows:
        text = f"{row['schedule']} {duration(row['step_seconds'])}"
        other = f" on {row['mesh']}" if row["mesh"] != str(plan.mesh) else ""
        other += f" in {row['microbatches']} micro-batches" if row["microbatches"] != plan.microbatches else ""
        tried.append(text + other + ("" if row["fits"] else ", which does not fit"))
    return [Line(f"schedules tried (x stages a rank): {'; '.join(tried)}")]


def collectives(plan: Plan, every: bool) -> list[Part]:
    if not plan.collectives:
        return [Title("Communication"), Line("none")]
    groups: dict[tuple[str, str, str], list[CollectiveRow]] = defaultdict(list)
    for row in plan.collectives:
        groups[row.kind, row.axis, row.direction].append(row)
    lines = []
    for (kind, axis, direction), rows in groups.items():
        busiest = max(sorted({row.stage for row in rows}), key=lambda stage: sum(_run_seconds(row) for row in rows if row.stage == stage))
        mine = [row for row in rows if row.stage == busiest]
        per_layer = Counter(layer_of(row.module) for row in rows)
        per_layer.pop("", None)
        each = sorted(set(per_layer.values()))
        lines.append(
            (
                kind.replace("_", "-"),
                axis,
                "once a step" if direction == "step" else direction,
                str(sum(row.runs for row in mine)),
                "-".join(map(str, (each[0], each[-1])[: len(each)])) if len(per_layer) > 1 else "-",
                size(sum(row.nbytes * row.runs for row in mine)),
                duration(sum(_run_seconds(row) for row in mine)),
            )
        )
    headers = ("kind", "axis", "when", ">runs/step", ">per layer", ">sent/step", ">time/step")
    where = ", on the busiest stage's ranks" if plan.mesh.pipeline > 1 else ""
    out = [Title(f"Communication (of one rank{where})"), Table(headers, tuple(lines)), *_per_layer(plan)]
    return out + (_reasons(plan) if every else [Line("--all lists every collective and why it is there")])


def _per_layer(plan: Plan) -> list[Part]:
    """Collectives of one layer in one micro-batch, as one counts Megatron's."""
    layers: dict[str, Counter[tuple[str, str, str]]] = defaultdict(Counter)
    for row in plan.collectives:
        if layer_of(row.module) and row.direction != "step" and row.kind != "send":
            layers[layer_of(row.module)][row.kind.replace("_", "-"), row.axis, row.direction] += 1
    rows = fold(layers.items(), lambda item: item[0], lambda item: tuple(sorted(item[1].items())))
    out = []
    for folded in rows:
        if len(folded.rows) == 1 and len(rows) > 4:
            continue  # models whose layers all differ: the table above says enough
        text = ", ".join(f"{n} {kind} over {axis} {direction}" for (kind, axis, direction), n in folded.key)
        out.append(Line(f"{'.'.join(folded.path)}, each layer and micro-batch: {text}"))
    return out


def _reasons(plan: Plan) -> list[Part]:
    """Every collective under its module: what it is for, and the user's line that its value comes from.

    Folded layers are shown with the names of the first.
    """

    def why(row: CollectiveRow) -> str:
        layer = layer_of(row.module)
        return row.why.replace(f"{layer}.", "") if layer else row.why

    def key(row: CollectiveRow):
        return row.kind, row.axis, row.direction, re.sub(r"_\d+\b", "", why(row)), row.nbytes  # nodes of a layer differ in their number

    layers = [row for row in plan.collectives if row.kind != "send"]
    sends = [row for row in plan.collectives if row.kind == "send"]  # of a few layers only: apart, or no layer would equal the next
    out, module = [], None
    for folded in fold(layers, lambda row: row.module, key) + fold(sends, lambda row: row.module, key):
        if folded.path != module:
            module = folded.path
            out.append(Line(".".join(module) or "(the model itself)"))
        first = folded.rows[0]
        text = f"{first.kind.replace('_', '-')} over {first.axis}, {first.direction}, {size(first.nbytes)}: {why(first)}"
        out.append(Line(f"{text} ({first.source})" if first.source else text, indent=4))
    return out


def times(plan: Plan) -> list[Part]:
    meaning = {
        "compute": "ops",
        "data": "collectives over the data axis",
        "tensor": "collectives over the tensor axis",
        "pipeline": "sends between stages",
        "optimizer": "the optimizer's step",
        "bubble": "waiting for other stages",
    }
    step = plan.step_seconds or 1.0
    rows = [
        (name, duration(seconds), percent(seconds / step), "#" * round(30 * seconds / step), meaning.get(name, ""))
        for name, seconds in plan.breakdown.items()
    ]
    rows.append(("step", duration(plan.step_seconds), percent(1.0), "", "of a rank, estimated"))
    return [Title("Time of a step"), Table(("", ">time", ">share", "", ""), tuple(rows))]


def solver(plan: Plan) -> list[Part]:
    facts = plan.solver
    sizes = [f"{count(facts[name])} {name}" for name in ("ops", "strategies", "variables") if facts.get(name)]
    if facts.get("folded"):
        sizes.insert(1, f"{facts['folded']} more folded into them")
    text = f"{facts.get('name', 'unnamed')} took {duration(facts.get('seconds', 0.0))}"
    clocks = (("trace_seconds", "tracing"), ("plan_seconds", "all planning"))
    spent = [f"{what} {duration(facts[name])}" for name, what in clocks if name in facts]
    out = [Title("Solver"), Line("; ".join([f"{text}: {facts['status']}" if "status" in facts else text, ", ".join(sizes), *spent]))]
    if facts.get("objective") is not None:
        out.append(Line(f"shardings: {_proof(facts)}"))
    if facts.get("solved_for"):
        out.append(Line(f"that is of {facts['solved_for']}: of {plan.schedule} no bound is known"))
    elif facts.get("cut"):
        out.append(Line(f"cut points: {_proof(facts['cut'])}, between {_plural(facts['cut']['blocks'], 'block')}"))
    return out + [Line(f"note: {note}") for note in facts.get("notes", ())]


def _proof(facts: dict) -> str:
    """How far a solution can be from the best one."""
    objective, bound = facts["objective"], facts.get("bound")
    if bound is None:
        return f"objective {duration(objective)}, no proven bound"
    gap = (objective - bound) / objective if objective else 0.0
    return f"objective {duration(objective)}, proven bound {duration(bound)}, gap {100 * gap:.2f} %"


def memory(plan: Plan) -> list[Part]:
    if not plan.stage_rows:
        return []
    categories = list(dict.fromkeys(name for stage in plan.stage_rows for name in stage.memory))
    rows = []
    for rank, table in plan.rank_memory.items():
        total = sum(table.values())
        cells = [str(rank), *(size(table.get(name, 0.0)) for name in categories), size(total)]
        rows.append((*cells, percent(total / plan.memory_limit) if plan.memory_limit else "-"))
    peak, limit = plan.peak_bytes, plan.memory_limit
    heads = (">rank" if plan.chunks > 1 else ">stage", *(f">{name}" for name in categories), ">total", ">of limit")
    out = [Title("Memory per rank (at the moment of a step when it is fullest)"), Table(heads, tuple(rows))]
    levels = Counter(level for level in plan.zero.values() if level)
    if levels:
        cut = ", ".join(f"{_plural(n, 'parameter')} at level {level}" for level, n in sorted(levels.items()))
        rest = len(plan.zero) - sum(levels.values())
        out.append(Line(f"ZeRO over data: {cut}" + (f", {rest} whole" if rest else "")))
    if plan.regions:
        regions = len(set(plan.regions.values()))
        but = f", but for {_plural(len(plan.kept), 'kept value')}" if plan.kept else ""
        ops = _plural(len(plan.regions), "op")
        out.append(Line(f"backward computes {_plural(regions, 'region')} of {ops} again from their inputs{but}"))
    if plan.offload:
        out.append(Line(f"the optimizer updates {_plural(len(plan.offload), 'parameter')} on the host, and keeps its state there"))
    if not limit:
        return [*out, Line(f"peak {size(peak)} (estimate), no limit given")]
    verdict = "fits" if peak <= limit else f"DOES NOT FIT, {size(peak - limit)} too much"
    return [*out, Line(f"peak {size(peak)} (estimate) of {size(limit)}: {verdict}")]


def _op_name(op: str) -> str:
    name = op.removeprefix("aten.").removeprefix("native_")
    return "attention" if name.startswith("scaled_dot_product") else name


def _interesting(row: OpRow) -> bool:
    return bool(row.weights) or any(part in row.op for part in SHOWN_OPS)


def _kind(row: OpRow) -> str:
    return ".".join([row.op, *(part for part in row.module.split(".") if not part.isdigit())])


def _time(row: OpRow) -> float:
    return row.forward + row.backward


def _run_seconds(row: CollectiveRow) -> float:
    return row.seconds * row.runs


def _below(name: str, module: str) -> str:
    """A weight's name as its module knows it, or in full if it lies elsewhere (a tied weight)."""
    return name.removeprefix(f"{module}.") if module else name


def _plural(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else ending}"


def _compact(layout: str) -> str:
    return layout.replace(", ", ",")  # no blanks, so that a table does not wrap inside it
