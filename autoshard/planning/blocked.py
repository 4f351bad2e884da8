"""Which blocked shards are worth trying: a fused projection is cut by heads, ``S(1/3)``, because a split further on has three parts."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from autoshard.rules.notation import OpRule

Key = tuple[fx.Node, int]
"""A value: (producing node, result index)."""


def factor_blocks(rule: OpRule, spec, key: Key, blocks):
    """(factor, its own block count, dim) for every candidate block count of the dims of a value, as this op sees them."""
    for dim, group in enumerate(spec):
        for total in blocks.get((*key, dim), ()):
            before = 1
            for factor in group:
                size = rule.sizes[factor]
                if total % before == 0 and 1 < total // before < size and size % (total // before) == 0:
                    yield factor, total // before, dim
                before *= size


def block_candidates(rules: dict[fx.Node, OpRule], inputs: dict[fx.Node, tuple[Key, ...]], sizes) -> dict[tuple, set[int]]:
    """Block counts by (node, result, dim): seeded by groups in views, splits and joins, then spread through ops that share the dim.

    Args:
        inputs: the operand values of every op.
    """
    cuts = [k for k in sizes if k > 1]
    blocks: dict[tuple, set[int]] = defaultdict(set)
    sides = {}
    for node, rule in rules.items():
        keys = [*inputs[node], *((node, i) for i in range(len(rule.results)))]
        sides[node] = list(zip(rule.operands + rule.results, keys))
        for spec, key in sides[node]:
            for dim, group in enumerate(spec):
                before = 1
                for factor in group:
                    size = rule.sizes[factor]
                    if before > 1 and factor not in rule.fixed and any(size % k == 0 for k in cuts):
                        blocks[(*key, dim)].add(before)
                    before *= size
    order = list(rules)
    for _ in range(6):  # forward and back again; chains of views deeper than this are of no use to anyone
        changed = False
        for node in order:
            rule = rules[node]
            found = {(f, b) for spec, key in sides[node] for f, b, _ in factor_blocks(rule, spec, key, blocks) if f not in rule.fixed}
            for f, b in found:
                if not any((rule.sizes[f] // b) % k == 0 for k in cuts):
                    continue
                for spec, key in sides[node]:
                    for dim, group in enumerate(spec):
                        if f in group:
                            total = b
                            for g in group[: group.index(f)]:
                                total *= rule.sizes[g]
                            if total not in blocks[(*key, dim)] and len(blocks[(*key, dim)]) < 6:
                                blocks[(*key, dim)].add(total)
                                changed = True
        order.reverse()
        if not changed:
            break
    return blocks
