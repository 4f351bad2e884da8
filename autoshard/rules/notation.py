"""The notation of sharding rules, and what one axis of the mesh may do with an op.

A rule names the *factors* (independent indices) of an op, one token a dim, as Shardy and nnScaler do::

    linear      "... k, n k, +n -> ... n"        k is not in the result: it is summed, sharding it makes the result P
    attention   "b h s d^, b h t^ d^, b h t^ d^ -> b h s d^"        ^ is never sharded
    view        "b (h d) -> b h d"               a group is a dim made of several factors, outer first
    bias        "+n"                             + marks an additive operand: where the result is P it must be P too
    "..."       any leading dims, the same wherever it stands (broadcast dims of size 1 hold no factor)
    "_"         a dim that holds no factor (size 1, or not of interest): never sharded, independent of everything else

From one rule one axis may: shard a factor, replicate, defer, or pass partial sums through (``linear``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product as cartesian
from math import prod

from autoshard.errors import RuleError
from autoshard.placement import R_STAR, Layout, P, Placement, R, S, legal
from autoshard.rules.pattern import expand, factor_sizes, parse

Spec = tuple[tuple[str, ...], ...]
"""Of one tensor: for each dim, the factors that make it up, outer first; () for a dim without a factor."""


@dataclass(frozen=True)
class Comm:
    """A collective inside an op's own local kernel: name as in ``CONVERSIONS``, elements of its payload.

    ``elements`` is the payload if no other axis cuts the op; an axis that shards one of ``factors`` divides it.
    """

    collective: str
    elements: float
    factors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """What one op does along one axis: the placements that it demands of its operands, and those of its results."""

    name: str  # "shard b", "replicate", "defer", "partial 0,1"
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    factor: str | None = None  # the sharded factor
    blocks: int = 1  # of the factor
    comms: tuple[Comm, ...] = ()


@dataclass(frozen=True)
class OpRule:
    """The rule of one op instance, its sizes filled in.

    operands / results: one ``Spec`` per tensor operand (``operands(node)`` order) and per tensor result.
    sizes: of every factor.
    summed: factors that are added up: sharding one makes the results P.
    fixed: factors that are never sharded.
    additive: operands that are added to the sum (a bias).
    linear: sets of operands through which partial sums pass, if all of them are P at once and the other operands are R*.
    local: factors whose sharding needs a local kernel other than the op itself -> its name, e.g. {"v": "vocab_embedding"}.
    special: choices that no factor expresses (a vocabulary-sharded loss), as functions of the axis size.
    flops: of the op's forward on full shapes; 0 for ops bound by memory traffic.
    saved: what backward reads: operand indices, and -1-i for result i. Values, not copies.
    fallback: the op has no rule of its own and is replicated.
    """

    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    sizes: dict[str, int]
    summed: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    local: dict[str, str] = field(default_factory=dict)
    special: tuple = ()
    flops: float = 0.0
    saved: tuple[int, ...] = ()
    fallback: bool = False


@dataclass(frozen=True)
class Strategy:
    """One choice per axis, and the layouts that they add up to."""

    choices: tuple[Choice, ...]  # (data, tensor)
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]

    @property
    def name(self) -> str:
        return " | ".join(c.name for c in self.choices)


def place(spec: Spec, factor: str, blocks: int, sizes: dict[str, int]) -> Placement | None:
    """S(d/B) of the dim of ``spec`` that holds ``factor`` (itself cut in ``blocks`` blocks); None if no dim holds it."""
    for dim, group in enumerate(spec):
        if factor in group:
            before = prod(sizes[f] for f in group[: group.index(factor)])
            return S(dim, before * blocks)
    return None


def factor_choice(rule: OpRule, factor: str, blocks: int = 1) -> Choice:
    """The choice that shards ``factor``: inputs that have it are S, inputs that lack it R* (P if additive to a sum), results S or P."""
    summed = factor in rule.summed
    operands = tuple(
        place(spec, factor, blocks, rule.sizes) or (P if summed and i in rule.additive else R_STAR) for i, spec in enumerate(rule.operands)
    )
    results = tuple(place(spec, factor, blocks, rule.sizes) or (P if summed else R_STAR) for spec in rule.results)
    name = f"shard {factor}" if blocks == 1 else f"shard {factor}/{blocks}"
    return Choice(name, operands, results, factor, blocks)


def kernel(rule: OpRule, choice: Choice) -> str | None:
    """The name of the local kernel that runs in place of the op under this choice; None: the op itself runs."""
    return rule.local.get(choice.factor) if choice.factor else None


def _grouped(rule: OpRule, factor: str) -> bool:
    return any(factor in group and len(group) > 1 for spec in rule.operands + rule.results for group in spec)


def choices(rule: OpRule, k: int, blocks: dict[str, tuple[int, ...]] | None = None) -> tuple[Choice, ...]:
    """Everything that one axis of k ranks may do with an op. ``blocks`` lists the block counts to try per factor (default: 1)."""
    n, m = len(rule.operands), len(rule.results)
    out = [Choice("replicate", (R,) * n, (R,) * m)]
    if k == 1:
        return tuple(out)
    out.append(Choice("defer", (R_STAR,) * n, (R_STAR,) * m))
    for factor, size in rule.sizes.items():
        if factor in rule.fixed or size < 2:
            continue
        grouped = _grouped(rule, factor)
        for b in (blocks or {}).get(factor, (1,)):
            if b > 1 and rule.local.get(factor, "mean") != "mean":
                continue  # the kernel takes a rank's piece for one stretch of the factor
            if size % b or size // b < k or (grouped and (size // b) % k):
                continue  # a factor inside a group must be cut evenly: pieces of the dim would not be chunks
            out.append(factor_choice(rule, factor, b))
    for passing in rule.linear:
        operands = tuple(P if i in passing else R_STAR for i in range(n))
        out.append(Choice(f"partial {','.join(map(str, sorted(passing)))}", operands, (P,) * m))
    for special in rule.special:
        out.extend(special(rule, k))
    return tuple(out)


def strategies(
    rule: OpRule,
    per_axis: tuple[tuple[Choice, ...], ...],
    sizes: tuple[int, ...],
    operand_shapes: tuple[tuple[int, ...], ...],
    result_shapes: tuple[tuple[int, ...], ...],
) -> tuple[Strategy, ...]:
    """The product of the axes' choices, less the illegal ones (a dim cut finer than its size, blocks torn, one local kernel twice)."""
    out = []
    for combo in cartesian(*per_axis):
        operands = tuple(tuple(c.operands[i] for c in combo) for i in range(len(operand_shapes)))
        results = tuple(tuple(c.results[i] for c in combo) for i in range(len(result_shapes)))
        kernels = [name for c in combo if (name := kernel(rule, c))]
        if len(kernels) > 1 and set(kernels) != {"mean"}:  # sums over several axes divide by one count; other kernels know one axis
            continue
        shapes = (*operand_shapes, *result_shapes)
        fits = all(legal(layout, shape, sizes) for layout, shape in zip(operands + results, shapes))
        if fits and _even_groups(rule, combo, sizes):
            out.append(Strategy(combo, operands, results))
    return tuple(out)


def _even_groups(rule: OpRule, combo: tuple[Choice, ...], sizes: tuple[int, ...]) -> bool:
    """A factor that lies in a group somewhere and is cut by several axes must be cut evenly by all of them together."""
    cut: dict[str, int] = {}
    for choice, k in zip(combo, sizes):
        if choice.factor and k > 1:
            cut[choice.factor] = cut.get(choice.factor, 1) * k
    return all(rule.sizes[factor] % ways == 0 for factor, ways in cut.items() if _grouped(rule, factor))


def bind(text: str, operand_shapes, result_shapes, known: dict[str, int] | None = None, **extra) -> OpRule:
    """Fill a rule text with the sizes of one op instance: ``...`` is expanded, broadcast dims of size 1 lose their factor.

    ``known`` are sizes that can't be told from the shapes (two factors that only occur in one group). ``extra`` are further ``OpRule``
    fields; ``fixed=`` is added to the marks in the text. Factors that occur in operands only are summed. A factor
    that some results have and others lack is fixed: no state says what the others would be. A dim of size 1 in every tensor keeps its
    factor (of size 1: it is never sharded).
    """
    pattern = parse(text)
    n_in, n_out = len(operand_shapes), len(result_shapes)
    wanted = pattern.operands[:n_in]  # optional trailing operands (a bias) may be absent
    if n_in != len(wanted) or n_out != len(pattern.results):
        raise RuleError(
            f"rule {text!r} has {len(pattern.operands)} operands and {len(pattern.results)} results, the op has {n_in} and {n_out}"
        )
    tokens = wanted + pattern.results
    shapes = [tuple(shape) for shape in (*operand_shapes, *result_shapes)]
    labels = [f"operand {i}" for i in range(n_in)] + [f"result {i}" for i in range(n_out)]
    lead = max([len(shape) - len(spec) + 1 for spec, shape in zip(tokens, shapes) if ("...",) in spec], default=0)
    specs = [expand(spec, len(shape), lead, f"rule {text!r}: {label}") for spec, shape, label in zip(tokens, shapes, labels)]
    sizes = factor_sizes(specs, shapes, known or {})
    final = []
    for spec, shape, label in zip(specs, shapes, labels):
        dims = []
        for group, n in zip(spec, shape):
            if len(group) == 1 and n <= 1 and sizes[group[0]] != n:
                group = ()
            elif group and prod(sizes.get(f, 0) for f in group) != n:
                known = ", ".join(f"{f}={sizes.get(f, 'unknown')}" for f in group)
                raise RuleError(f"rule {text!r}: {label} has a dim of {n} where ({known}) is expected")
            dims.append(tuple(group))
        final.append(tuple(dims))
    operands, results = tuple(final[:n_in]), tuple(final[n_in:])
    factors = [{f for group in spec for f in group} for spec in final]
    read = set().union(*factors[:n_in])
    written = set().union(*factors[n_in:])
    unclear = {f for f in written if not all(f in result for result in factors[n_in:])}
    extra.setdefault("summed", frozenset(read - written))
    extra["fixed"] = pattern.fixed | unclear | frozenset(extra.get("fixed", ()))
    extra.setdefault("additive", frozenset(i for i in pattern.additive if i < n_in))
    return OpRule(operands, results, {f: n for f, n in sizes.items() if f in read | written}, **extra)
