"""What explain --why and --why-not print."""

from __future__ import annotations

from collections import Counter

from autoshard.errors import InfeasibleError
from autoshard.planning.answers import Alternative, Why
from autoshard.planning.plan import Plan
from autoshard.report.explain import pinned
from autoshard.report.tables import Line, Part, Table, Title
from autoshard.report.units import duration, percent, size

SHOWN = 5


def why(answer: Why, every: bool = False) -> list[Part]:
    axes = ", ".join(f"{axis} ({k})" for axis, k in answer.axes.items())
    where = f" in {answer.module}" if answer.module else ""
    name = answer.asked if answer.what in ("weight", "input") else f"{answer.node}, {answer.what.removeprefix('aten.')}{where},"
    gives = "" if answer.choice == answer.layout else f", its result {answer.layout}"
    layers = f", in {answer.instances} layers that are planned alike" if answer.instances > 1 else ""
    parts: list[Part] = [Line(f"{name} of shape {list(answer.shape)}: {answer.choice}{gives} over [{axes}]{layers}", indent=0)]
    if answer.source:
        parts.append(Line(answer.source))
    parts.append(Line(f"it takes {duration(answer.own)} of a step, estimated" if answer.own else "it takes no time itself"))
    for move in answer.conversions:
        parts.append(Line(f"{_moved(move)} takes {duration(move.seconds)}" + (" a layer" if answer.instances > 1 else "")))
    parts += _nearest(answer)
    if answer.tight:
        parts.append(Line("the plan was also made to save memory, which the prices below do not show"))
    parts += _group("No dearer themselves, but their neighbours would pay", answer.cheaper, every)
    parts += _group("Dearer themselves", answer.dearer, every)
    parts.append(Title("Unavailable"))
    reasons: dict[str, list[str]] = {}
    for item in answer.unavailable:
        reasons.setdefault(item.reason, []).append(item.choice)
    for reason, choices in reasons.items():
        parts.append(Line(f"{_some(choices, every)}: {reason}"))
    return parts if reasons else [*parts, Line("none")]


def _nearest(answer: Why) -> list[Part]:
    """What the nearest alternatives would do to the whole plan."""
    rows = []
    for item in answer.nearest:
        seconds, nbytes = item.predicted
        share = f" ({100 * seconds / answer.step:+.2g} %)" if abs(seconds) >= 1e-9 else ""
        more = f"{'-' if nbytes < 0 else '+'}{size(abs(nbytes))}" if abs(nbytes) >= 1 else "0"
        rows.append((item.choice, _signed(seconds) + share, more, "does not fit" if answer.peak + nbytes > answer.limit else ""))
    if not rows:
        return []
    title = f"Nearest, all else left as it is; now a step takes {duration(answer.step)}, the fullest rank {size(answer.peak)}"
    return [Title(title), Table(("choice", ">step", ">fullest rank", ""), tuple(rows))]


def _group(title: str, found: tuple[Alternative, ...], every: bool) -> list[Part]:
    rows = []
    for item in found if every else found[:SHOWN]:
        moves = "\n".join(f"{_moved(move)} {duration(move.seconds)}" for move in item.moves[:3]) or "-"
        rows.append((item.choice, _signed(item.total), _signed(item.own), _signed(item.neighbours), moves))
    headers = ("choice", ">step", ">itself", ">neighbours", "conversions that would be new")
    parts: list[Part] = [Title(title), Table(headers, tuple(rows)) if rows else Line("none")]
    return parts if every or len(found) <= SHOWN else [*parts, Line(f"and {len(found) - SHOWN} more (--all lists them)")]


def _some(choices: list[str], every: bool) -> str:
    if every or len(choices) <= SHOWN:
        return ", ".join(choices)
    return ", ".join(choices[:SHOWN]) + f" and {len(choices) - SHOWN} more"


def _moved(move) -> str:
    return f"{move.value} {move.before} -> {move.after} for {move.reader}"


def _signed(seconds: float) -> str:
    if abs(seconds) < 1e-9:
        return "0"
    return f"{'-' if seconds < 0 else '+'}{duration(abs(seconds))}"


def why_not(asked: str, plan: Plan, forced: Plan) -> list[Part]:
    """What gets worse if ``asked`` is forced."""
    others = [node for node, choices in plan.strategies.items() if forced.strategies.get(node) != choices]
    if not others and forced.stages == plan.stages:
        return [Line(f"{asked} is what the plan does already", indent=0)]
    slower, peak = forced.step_seconds - plan.step_seconds, forced.peak_bytes - plan.peak_bytes
    if abs(slower) < 1e-9:
        head = f"with {asked} a step would take {duration(forced.step_seconds)}, as it does"
    else:
        head = (
            f"with {asked} a step would take {duration(abs(slower))} {'longer' if slower > 0 else 'less'}, "
            f"{duration(plan.step_seconds)} -> {duration(forced.step_seconds)} ({100 * slower / plan.step_seconds:+.2g} %)"
        )
    more = f"{size(abs(peak))} {'more' if peak > 0 else 'less'}, {size(plan.peak_bytes)} -> {size(forced.peak_bytes)}"
    over = "" if forced.peak_bytes <= forced.memory_limit else ", which does not fit"
    memory = f"the fullest rank would need {more if peak else 'the same memory'}{over}"
    parts: list[Part] = [Line(f"{head}; {memory}", indent=0), *map(Line, pinned([pin for pin in forced.pins if pin.layers > 1]))]
    gap = plan.solver.get("gap", 0.0)
    if 1e-9 < abs(slower) < gap * plan.step_seconds:
        parts.append(Line(f"that is less than the {percent(gap)} by which the search may have missed the fastest plan"))
    changed = [k for k in plan.breakdown if abs(forced.breakdown.get(k, 0.0) - plan.breakdown[k]) >= 1e-7]
    if changed:
        parts.append(Line("of a step: " + ", ".join(f"{k} {_signed(forced.breakdown[k] - plan.breakdown[k])}" for k in changed)))
    parts += [Line(text) for text in collectives_changed(plan, forced)]
    nodes = "1 node" if len(others) == 1 else f"{len(others)} nodes"
    placed = f"; under {forced.schedule}, not {plan.schedule}" if forced.schedule != plan.schedule else ""
    return [*parts, Line(f"{nodes} would be placed otherwise{placed}; all was decided anew, in {forced.microbatches} micro-batches")]


def not_fitting(asked: str, plan: Plan, layers: int, refused: InfeasibleError) -> list[Part]:
    """What is in the way of ``asked``, forced in so many like layers, with which nothing fits."""
    where = f", in all {layers} layers like it," if layers > 1 else ""
    needs = f"a rank needs {size(refused.least)} in the smallest plan found, the limit is {size(plan.memory_limit)}"
    if not refused.least:
        needs = refused.what
    parts: list[Part] = [Line(f"with {asked}{where} nothing fits: {needs}", indent=0)]
    if refused.proven:
        parts.append(Line(f"any plan with it needs {size(refused.proven)}, proven"))
    return [*parts, Line(f"without it the fullest rank needs {size(plan.peak_bytes)}, and a step takes {duration(plan.step_seconds)}")]


def collectives_changed(before: Plan, after: Plan) -> list[str]:
    """Kinds of collectives that run more or less often in a step, or send more or less: of all stages together."""

    def totals(plan: Plan) -> tuple[Counter, Counter]:
        runs, sent = Counter(), Counter()
        for row in plan.collectives:
            key = row.kind.replace("_", "-"), row.axis, "once a step" if row.direction == "step" else row.direction
            runs[key] += row.runs
            sent[key] += row.runs * row.nbytes
        return runs, sent

    (runs, sent), (runs_after, sent_after) = totals(before), totals(after)
    out = []
    for key in dict.fromkeys([*runs, *runs_after]):
        more, nbytes = runs_after[key] - runs[key], sent_after[key] - sent[key]
        if more or abs(nbytes) >= 1:
            kind, axis, when = key
            sign = "-" if nbytes < 0 else "+"
            out.append(f"{kind} over {axis}, {when}: {more:+d} a step, {sign}{size(abs(nbytes))} sent")
    return out
