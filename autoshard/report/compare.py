"""What compare prints: one column a plan, ours first."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.planning.comparison import Comparison, Row
from autoshard.planning.plan import Plan
from autoshard.report.tables import Line, Part, Table, Title
from autoshard.report.units import count, duration, percent, size


def compare(comparison: Comparison) -> list[Part]:
    plans = [row.plan for row in comparison.rows if row.plan]
    parts: list[Part] = [Line(_verdict(comparison), indent=0)]
    if plans:
        parts += [Line(_subject(plans[0], comparison)), Title("Plans"), _table(comparison, plans[0])]
    for row in comparison.rows:
        parts.append(Line(f"{row.name}: {row.what}" + (_scheduled(row.plan) if row.plan else f" - none: {row.reason}")))
    return parts


def _scheduled(plan: Plan) -> str:
    usual = plan.schedule in ("none", "1F1B")
    return "" if usual else f" (here {plan.schedule}, {plan.chunks} stage{'s' * (plan.chunks > 1)} a rank)"


def _verdict(comparison: Comparison) -> str:
    ours, faster = comparison.ours, comparison.faster
    if ours.plan is None:
        return f"autoshard: no plan: {ours.reason}"
    head = f"autoshard: {duration(ours.plan.step_seconds)} a step on mesh {ours.plan.mesh}"
    if faster:
        best = min(faster, key=lambda row: row.plan.step_seconds)
        than = f"{best.name} is predicted to be faster than this plan, {duration(best.plan.step_seconds)} a step on mesh {best.plan.mesh}"
        if comparison.every_mesh:
            return f"{head}; {than}: the search has missed it, which is a bug of autoshard's; please report it"
        return f"{head}; {than}: this mesh is not the best for the model, --mesh {comparison.devices} searches all"
    if not ours.fits:
        return f"{head}, which does not fit, and neither does any baseline"
    fitting = [row for row in comparison.rows[1:] if row.fits]
    if not fitting:
        return f"{head}; no baseline fits"
    best = min(fitting, key=lambda row: row.plan.step_seconds)
    ratio = best.plan.step_seconds / ours.plan.step_seconds
    return f"{head}; the best baseline that fits, {best.name}, takes {duration(best.plan.step_seconds)}, {ratio:.2f} times as long"


def _subject(plan: Plan, comparison: Comparison) -> str:
    batch = f"{plan.samples} samples" + (f" ({plan.tokens} tokens)" if plan.tokens else "")
    precision = "" if plan.precision == "fp32" else f", {plan.precision}"
    limit = f", {size(plan.memory_limit)} each" if plan.memory_limit else ""
    return (
        f"{plan.model}, {count(plan.parameter_count)} parameters, a batch of {batch}{precision}, on {comparison.devices} devices of "
        f"{plan.cluster}{limit}; all times and bytes are estimates"
    )


def _table(comparison: Comparison, some: Plan) -> Table:
    ours = comparison.ours.plan

    def fullest(plan: Plan) -> dict[str, float]:
        return max(plan.rank_memory.values(), key=lambda table: sum(table.values()))

    def seconds(axis: str) -> Callable[[Plan], str]:
        return lambda plan: duration(plan.breakdown[axis])

    def nbytes(category: str) -> Callable[[Plan], str]:
        return lambda plan: size(fullest(plan).get(category, 0.0))

    speed = ("tokens/s", lambda plan: count(plan.tokens / plan.step_seconds)) if some.tokens else (
        "samples/s", lambda plan: count(plan.samples / plan.step_seconds))  # fmt: skip
    measures: list[tuple] = [
        ("mesh", lambda plan: str(plan.mesh)),
        ("micro-batches", lambda plan: str(plan.microbatches)),
        ("ZeRO", _levels),
        ("recompute", lambda plan: "on" if plan.regions else "off"),
        ("step", lambda plan: duration(plan.step_seconds)),
        speed,
        ("ratio", lambda plan: f"{plan.step_seconds / ours.step_seconds:.2f}" if ours and plan.peak_bytes <= plan.memory_limit else "-"),
        ("bubble", lambda plan: percent(plan.bubble)),
        ("communication of a step, by axis",),
        *((f"  {axis}", seconds(axis)) for axis in ("data", "tensor", "pipeline")),
        ("memory of the fullest rank",),
        *((f"  {category}", nbytes(category)) for category in fullest(some)),
        ("  total", lambda plan: size(plan.peak_bytes)),
        ("fits", lambda plan: "yes" if plan.peak_bytes <= plan.memory_limit else "NO"),
    ]
    rows = tuple(measure if len(measure) == 1 else _cells(comparison.rows, *measure) for measure in measures)
    return Table(("", *(f">{row.name}" for row in comparison.rows)), rows)


def _cells(rows: tuple[Row, ...], name: str, cell: Callable[[Plan], str]) -> tuple[str, ...]:
    return (name, *(cell(row.plan) if row.plan else "-" for row in rows))


def _levels(plan: Plan) -> str:
    levels = sorted(set(plan.zero.values()) - {0})
    return ",".join(map(str, levels)) or "0"
