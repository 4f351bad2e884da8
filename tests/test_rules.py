"""The rule table as a whole: every op, every choice of an axis, in pieces equals the whole op, forward and backward.

No process group: ``autoshard.rules.check`` cuts the operands, runs the op on each rank's pieces and puts the results together.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from rule_samples import ARBITRARY, FROZEN, NO_BACKWARD, SAMPLES
from torch import fx

from autoshard.errors import RuleError
from autoshard.placement import local_shape
from autoshard.program import operands, tensors
from autoshard.rules import RULES, RuleWarning, choices, has_rule, kernel, register_rule, rule_for, strategies
from autoshard.rules.call import argument, aten, operand_names
from autoshard.rules.check import call, compare, node_of, tolerance

torch.manual_seed(0)
RESHAPES = {aten(*name.split(".")) for name in "reshape view _unsafe_view unflatten.int".split()}
EXPANDS = {aten("expand"), aten("broadcast_to")}


def resize(node: fx.Node, values, shapes):
    """The op and arguments of a rank: sizes in arguments are those of its pieces, whose results have these shapes."""
    args = list(node.args)
    if node.target in RESHAPES:
        return aten("reshape"), [args[0], list(shapes[0])]
    if node.target in EXPANDS:
        return node.target, [args[0], list(shapes[0])]
    if node.target in (aten("slice", "Tensor"), aten("narrow")):
        dim = args[1]
        whole, piece = node.args[0].meta["val"].shape[dim], values[0].shape[dim]
        if piece != whole and tuple(tensors(node.meta["val"])[0].shape) != tuple(node.args[0].meta["val"].shape):
            args[2:4] = [n % whole * piece // whole if n != whole else piece for n in args[2:4]]
    return node.target, args


def run_mean(node: fx.Node, values):
    """Local kernel "mean": the sum, divided by the count of the whole dims."""
    whole = operands(node)[0].meta["val"].shape
    dims = argument(node, "dim") if node.target is aten("mean", "dim") else None
    dims = [d % len(whole) for d in dims or range(len(whole))]
    keep = node.target is aten("mean", "dim") and argument(node, "keepdim")
    return [values[0].sum(dims, keepdim=keep) / torch.Size(whole[d] for d in dims).numel()]


def run_embedding(node: fx.Node, values, coords, layout, sizes):
    """Local kernel "vocab_embedding": rows of other ranks give 0."""
    table, ids = values
    rows = operands(node)[0].meta["val"].shape[0]
    axis = next(a for a, p in enumerate(layout) if p.is_shard and p.dim == 0)
    step = -(-rows // sizes[axis])
    ids = ids - coords[axis] * step
    mine = (ids >= 0) & (ids < len(table))
    padding = argument(node, "padding_idx")
    padding = (padding % rows if padding < 0 and padding != -1 else padding) - coords[axis] * step if padding != -1 else -1
    padding = padding if 0 <= padding < len(table) else -1
    return [torch.where(mine[..., None], torch.embedding(table, ids.clamp(0, len(table) - 1), padding), 0.0)]


def run_cross_entropy(node: fx.Node, coords, values, peers, layout):
    """Local kernel "vocab_cross_entropy": the whole loss; of the logits only its own piece has a gradient on a rank."""
    axis = next(a for a, p in enumerate(layout) if p.is_shard and p.dim == 1)
    group = [c for c in sorted(peers) if c[:axis] + c[axis + 1 :] == coords[:axis] + coords[axis + 1 :]]
    logits = torch.cat([values[0] if c == coords else peers[c][0].detach() for c in group], 1)
    return call(node, [logits, *values[1:]])


def check(op, sample, sizes, blocks=None) -> int:
    """Run one call under every strategy of a mesh; how many there were."""
    args, kwargs = (sample[:-1], sample[-1]) if isinstance(sample[-1], dict) else (sample, {})
    node, values = node_of(op, args, kwargs)
    rule = rule_for(node)
    assert not rule.fallback and len(rule.operands) == len(values)
    names = operand_names(node)
    frozen = frozenset(
        i for i, name in enumerate(names) if op in NO_BACKWARD or {name, f"{op._schema.name.split('::')[1]}.{name}"} & FROZEN
    )
    wholes = [tuple(t.shape) for t in tensors(node.meta["val"])]
    per_axis = tuple(choices(rule, k, blocks) for k in sizes)
    found = strategies(rule, per_axis, sizes, tuple(tuple(v.shape) for v in values), tuple(wholes))
    for strategy in found:
        kernels = {kernel(rule, c): c.factor for c in strategy.choices if kernel(rule, c)}

        def run(coords, local, peers, strategy=strategy, kernels=kernels):
            if not coords:
                return call(node, local)
            if "mean" in kernels:
                return run_mean(node, local)
            if "vocab_cross_entropy" in kernels:
                return run_cross_entropy(node, coords, local, peers, strategy.operands[0])
            if "vocab_embedding" in kernels:
                return run_embedding(node, local, coords, strategy.operands[0], sizes)
            shapes = [local_shape(s, layout, sizes, coords) for s, layout in zip(wholes, strategy.results)]
            target, changed = resize(node, local, shapes)
            return call(node, local, target, changed)

        try:
            if op in ARBITRARY:
                corner = (0,) * len(sizes)
                shapes = [local_shape(tuple(v.shape), layout, sizes, corner) for v, layout in zip(values, strategy.operands)]
                got = run(corner, [v.new_empty(s) for v, s in zip(values, shapes)], {})
                assert [tuple(t.shape) for t in got] == [local_shape(s, layout, sizes, corner) for s, layout in zip(wholes, strategy.results)]
                continue
            errors = compare(values, strategy.operands, strategy.results, sizes, run, frozen)
        except Exception as error:
            raise AssertionError(f"{op} {strategy.name} on {sizes}: {error}\n{rule}") from error
        wrong = {what: off for what, off in errors.items() if off > tolerance([*values, *tensors(node.meta["val"])])}
        assert not wrong, f"{op} {strategy.name} on {sizes}: {wrong}\n{strategy}\n{rule}"
    return len(found)


def test_every_op_has_a_sample():
    assert set(SAMPLES) == set(RULES)
    assert all(SAMPLES.values())


@pytest.mark.parametrize("op", sorted(SAMPLES, key=str), ids=str)
def test_every_choice_equals_the_whole_op(op):
    for sample in SAMPLES[op]:
        for k in (2, 3):
            assert check(op, sample, (k,)) >= 2
