"""Which ops the zoo's models consist of, and what autoshard may do with them."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator

from autoshard.capture import capture
from autoshard.passes.canonicalize import canonicalize
from autoshard.program import Program, is_getitem
from autoshard.rules import RuleWarning, rule_for
from autoshard.rules.notation import OpRule

from . import make


def programs(models: Iterable[str]) -> Iterator[tuple[str, Program]]:
    """Every model's canonical program."""
    for model in models:
        yield model, canonicalize(capture(*make(model)).program)


def coverage(programs: Iterable[tuple[str, Program]]) -> Iterator[str]:
    """Lines of text: every ATen op, how often it occurs, in how many models, and its rule where it has most to shard."""
    calls: dict[str, list[tuple[str, OpRule]]] = defaultdict(list)
    why: dict[str, str] = {}
    for model, program in programs:
        for node in program.ops:
            if is_getitem(node):
                continue
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", RuleWarning)
                calls[str(node.target)].append((model, rule_for(node)))
            if caught:
                why.setdefault(str(node.target), str(caught[0].message).splitlines()[0])
    yield f"{'op':45} {'calls':>6} {'models':>6}  rule"
    for op, found in sorted(calls.items()):
        replicated = sum(rule.fallback for _, rule in found)
        best = max((rule for _, rule in found), key=lambda rule: len(free(rule)))
        note = text(best) + (f"; REPLICATED {replicated} times: {why.get(op, 'no rule')}" if replicated else "")
        yield f"{op:45} {len(found):6} {len({model for model, _ in found}):6}  {note}"
    missing = sum(any(rule.fallback for _, rule in found) for found in calls.values())
    yield f"{len(calls)} ops, {missing} without a rule"


def free(rule: OpRule) -> list[str]:
    """Factors that an axis may shard."""
    return [f for f, n in rule.sizes.items() if n > 1 and f not in rule.fixed]


def text(rule: OpRule) -> str:
    """The rule as it is written, filled in for one call."""
    if not rule.sizes:
        reads = any(spec for spec in rule.operands)
        return "whole on every rank: " + ("any part of the result may need any part of an operand" if reads else "made of numbers")

    def spec(dims) -> str:
        names = [[f + "^" * (f in rule.fixed) for f in group] for group in dims]
        return " ".join("_" if not g else g[0] if len(g) == 1 else f"({' '.join(g)})" for g in names) or "()"

    sides = [", ".join("+" * (i in rule.additive) + spec(s) for i, s in enumerate(rule.operands)), ", ".join(map(spec, rule.results))]
    return " -> ".join(sides)
