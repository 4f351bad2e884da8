"""What diff prints: how two plans differ, layers that differ alike on one line."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from autoshard.planning.plan import Plan
from autoshard.report.fold import fold
from autoshard.report.tables import Line, Part, Table, Title
from autoshard.report.units import duration, size
from autoshard.report.why import collectives_changed

SETTINGS = ("model", "mesh", "cluster", "precision", "samples", "microbatches", "schedule", "chunks")
DECISIONS = (*SETTINGS, "fingerprint", "strategies", "stages", "params", "zero", "offload", "regions", "kept")


def same(before: Plan, after: Plan) -> bool:
    """Whether two plans decide the same; how long deciding took does not count."""
    return all(getattr(before, name) == getattr(after, name) for name in DECISIONS)


@dataclass(frozen=True)
class _Change:
    name: str
    module: str
    before: str
    after: str


def diff(before: Plan, after: Plan) -> list[Part]:
    if same(before, after):
        return [Line("the plans are the same", indent=0)]
    ratio = after.step_seconds / before.step_seconds - 1 if before.step_seconds else 0.0
    head = f"step {duration(before.step_seconds)} -> {duration(after.step_seconds)} ({100 * ratio:+.1f} %), "
    head += f"fullest rank {size(before.peak_bytes)} -> {size(after.peak_bytes)}"
    parts: list[Part] = [Line(head, indent=0)]
    if before.fingerprint != after.fingerprint:
        parts.append(Line("the plans are for different models, batches or versions: what both have is compared"))
    settings = [(name, str(getattr(before, name)), str(getattr(after, name))) for name in SETTINGS]
    parts += _table("Settings", ("", "before", "after"), [row for row in settings if row[1] != row[2]])
    ops = {op.node: op for op in before.ops} | {op.node: op for op in after.ops}
    module, kind = (lambda node: ops[node].module), (lambda node: _kind(ops[node].op))
    parts += _folded("Ops", "op", _differing(_ops(before), _ops(after), module, kind))
    parts += _folded("Parameters", "parameter", _parameters(before.params, after.params))
    parts += _where("ZeRO", "level", "parameter", _parameters(_texts(before.zero), _texts(after.zero)))
    parts += _where("Updated on the host", "", "parameter", _parameters(*(_hosted(plan) for plan in (before, after))))
    parts += _where("Stages", "stage", "op", _differing(_stages(before), _stages(after), module, kind))
    parts += _where("Computed again in backward", "", "op", _differing(_again(before), _again(after), module, kind))
    moved = collectives_changed(before, after)
    parts += [Title("Communication"), *map(Line, moved)] if moved else []
    times = [(name, duration(before.breakdown.get(name, 0.0)), duration(after.breakdown.get(name, 0.0))) for name in before.breakdown]
    parts += _table("Time of a step", ("", ">before", ">after"), [row for row in times if row[1] != row[2]])
    full = [max(plan.rank_memory.values(), key=lambda table: sum(table.values())) for plan in (before, after)]
    memory = [(name, size(full[0].get(name, 0.0)), size(full[1].get(name, 0.0))) for name in dict.fromkeys([*full[0], *full[1]])]
    return parts + _table("Memory of the fullest rank", ("", ">before", ">after"), [row for row in memory if row[1] != row[2]])


def to_json(before: Plan, after: Plan) -> dict:
    """Every decision that differs, {"name": {"before": ..., "after": ...}}; of tables, the entries that do."""
    out: dict = {"step_seconds": {"before": before.step_seconds, "after": after.step_seconds}}
    out["peak_bytes"] = {"before": before.peak_bytes, "after": after.peak_bytes}
    for name in DECISIONS:
        old, new = getattr(before, name), getattr(after, name)
        if name == "mesh":
            old, new = (list(mesh.shape) + list(mesh.order or ()) for mesh in (old, new))
        if isinstance(old, dict) and old != new:
            keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
            old, new = ({key: table.get(key) for key in keys} for table in (old, new))
        if old != new:
            out[name] = {"before": old, "after": new}
    return out


def _kind(op: str) -> str:
    return op.removeprefix("aten.")


def _ops(plan: Plan) -> dict[str, str]:
    return {op.node: " | ".join(op.choices) for op in plan.ops}


def _stages(plan: Plan) -> dict[str, str]:
    return {op.node: str(op.stage) for op in plan.ops}


def _again(plan: Plan) -> dict[str, str]:
    return {op.node: "no" if op.node not in plan.regions else "kept" if op.node in plan.kept else "yes" for op in plan.ops}


def _hosted(plan: Plan) -> dict[str, str]:
    return {name: "yes" if name in plan.offload else "no" for name in plan.params}


def _texts(levels: dict[str, int]) -> dict[str, str]:
    return {name: str(level) for name, level in levels.items()}


def _differing(before: dict[str, str], after: dict[str, str], module: Callable[[str], str], name: Callable[[str], str]) -> list[_Change]:
    """What both plans know, and hold different."""
    return [_Change(name(key), module(key), old, after[key]) for key, old in before.items() if key in after and after[key] != old]


def _parameters(before: dict[str, str], after: dict[str, str]) -> list[_Change]:
    default = "0" if all(text.isdigit() for text in (*before.values(), *after.values())) else ""
    names = dict.fromkeys([*before, *after])
    old, new = ({name: table.get(name, default) for name in names} for table in (before, after))
    return _differing(old, new, lambda name: name.rpartition(".")[0], lambda name: name.rpartition(".")[2])


def _folded(title: str, what: str, changes: Iterable[_Change]) -> list[Part]:
    def key(change: _Change) -> Hashable:
        return change.name, change.before, change.after

    counted: dict[tuple, int] = {}
    for row in fold(changes, lambda change: change.module, key):
        at = ".".join(row.path), *row.key
        counted[at] = counted.get(at, 0) + 1  # several ops of one kind in a module, changed alike
    rows = [
        (path or "(itself)", name if n == 1 else f"{n} {name}", old or "-", new or "-") for (path, name, old, new), n in counted.items()
    ]
    return _table(title, ("module", what, "before", "after"), rows)


def _where(title: str, name: str, what: str, changes: list[_Change]) -> list[Part]:
    """For changes of one word to another: how many, and in which layers and modules."""
    groups: dict[tuple[str, str], list[_Change]] = {}
    for change in changes:
        groups.setdefault((change.before, change.after), []).append(change)
    parts: list[Part] = [Title(title)] if groups else []
    for (old, new), found in groups.items():
        rows = fold(found, lambda change: change.module, lambda change: change.name)
        places = dict.fromkeys(row.block or ".".join(row.path) or "the model itself" for row in rows)
        many = f"{len(found)} {what}{'s' * (len(found) != 1)}"
        parts.append(Line(f"{name} {old} -> {new}: {many}, in {', '.join(places)}".lstrip()))
    return parts


def _table(title: str, headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[Part]:
    return [Title(title), Table(headers, tuple(rows))] if rows else []
