"""Reading rule text: from "b (h d), n -> b h d" to tokens, before the sizes of an op instance are known (see notation.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

from autoshard.errors import RuleError

Tokens = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Pattern:
    """A parsed rule text, before sizes are filled in: per operand and result, per token, the factors of the dim."""

    operands: tuple[Tokens, ...]
    results: tuple[Tokens, ...]
    fixed: frozenset[str]
    additive: frozenset[int]


@cache
def parse(text: str) -> Pattern:
    """Parse rule text. A ``RuleError`` quotes the guilty token and operand."""
    sides = text.split("->")
    if len(sides) != 2:
        raise RuleError(f"rule {text!r} has {len(sides) - 1} arrows; it needs one '->'")
    fixed: set[str] = set()
    additive: set[int] = set()
    parsed = []
    for side, kind in zip(sides, ("operand", "result")):
        specs = []
        for index, part in enumerate(side.split(",")):
            plus = part.strip().startswith("+")
            if plus and kind == "result":
                raise RuleError(f"rule {text!r}: '+' marks operands, not result {index}: {part.strip()!r}")
            if plus:
                additive.add(index)
            specs.append(_tokens(part.strip().removeprefix("+"), fixed, f"rule {text!r}: {{}} in {kind} {index}: {part.strip()!r}"))
        parsed.append(tuple(specs))
    for specs, kind in zip(parsed, ("operand", "result")):
        for index, spec in enumerate(specs):
            names = [f for group in spec for f in group]
            twice = next((f for f in names if names.count(f) > 1 and f not in fixed), None)
            if twice:
                raise RuleError(f"rule {text!r}: {twice!r} occurs twice in {kind} {index}; mark it {twice}^ (never sharded)")
    return Pattern(parsed[0], parsed[1], frozenset(fixed), frozenset(additive))


def _tokens(part: str, fixed: set[str], error: str) -> Tokens:
    """The dims of one operand; names marked ^ are added to ``fixed``. ``error`` has a place for what is wrong."""
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for token in part.replace("(", " ( ").replace(")", " ) ").split():
        name = token.rstrip("^")
        if token == "(":
            if group is not None:
                raise RuleError(error.format("nested group"))
            group = []
        elif token == ")":
            if not group:
                raise RuleError(error.format("empty or unopened group"))
            dims.append(tuple(group))
            group = None
        elif token in ("...", "_"):
            if group is not None:
                raise RuleError(error.format(f"{token!r} inside a group"))
            dims.append(("...",) if token == "..." else ())
        elif not name.isidentifier():
            raise RuleError(error.format(f"{token!r} is not a factor name"))
        else:
            if token.endswith("^"):
                fixed.add(name)
            if group is None:
                dims.append((name,))
            else:
                group.append(name)
    if group is not None:
        raise RuleError(error.format("group not closed"))
    if dims.count(("...",)) > 1:
        raise RuleError(error.format("'...' twice"))
    return tuple(dims)


def expand(spec: Tokens, rank: int, lead: int, label: str) -> list[tuple[str, ...]]:
    """Replace ``...`` by as many of the ``lead`` factors d0, d1, ... (the last ones) as the tensor's rank leaves room for."""
    n = rank - (len(spec) - 1)
    if ("...",) in spec and n >= 0:
        at = spec.index(("...",))
        return [*spec[:at], *((f"d{i}",) for i in range(lead - n, lead)), *spec[at + 1 :]]
    if len(spec) != rank:
        raise RuleError(f"{label} has {rank} dims, its spec {len(spec)}")
    return list(spec)


def factor_sizes(specs, shapes, known: dict[str, int]) -> dict[str, int]:
    """Sizes of all factors: those ``known``, those with dims of their own, then the one unknown factor of each group."""
    sizes = dict(known)
    dims = [(group, n) for spec, shape in zip(specs, shapes) for group, n in zip(spec, shape)]
    for group, n in dims:
        if len(group) == 1:
            sizes[group[0]] = max(sizes.get(group[0], 0), n)
    for group, n in dims:
        unknown = [f for f in group if f not in sizes]
        if len(unknown) == 1:
            others = prod(sizes[f] for f in group if f in sizes)
            sizes[unknown[0]] = n // others if others else 0
    return sizes
