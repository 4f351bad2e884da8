"""Sharding rules: what one axis of the mesh may do with each op. One table per family of ops, one look-up.

    rule = rule_for(node)                      # OpRule of an fx node whose operands and result have meta["val"]
    for choice in choices(rule, k): ...        # what an axis of k ranks may do; see notation.py
    register_rule("lib::op", "b s e -> b s e") # a rule for your own op

Some choices need a kernel other than the op itself; ``OpRule.local`` names it by factor:

    kernel                 ops                          what a rank computes
    "mean"                 mean.default, mean.dim       its sum over the dims, divided by the count of the whole dims
    "vocab_embedding"      embedding, rows sharded      rows that it holds, 0 for ids of other ranks
    "batch_norm"           native_batch_norm, samples   statistics of its samples, joined with those of the others
    "vocab_cross_entropy"  cross_entropy_loss, classes  maximum, sum of exponentials and picked logit of its classes, each reduced

Sizes in arguments (reshape, expand, slice, ...) are those of the whole value; whoever runs an op on pieces writes the pieces' sizes there.
That is not a local kernel. Where any other argument would be wrong on pieces, the rule fixes the factor.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import fx

from autoshard.errors import RuleError
from autoshard.program import likeness, operands, tensors, where
from autoshard.rules import (
    attention,
    convolution,
    factories,
    indexing,
    losses,
    matmul,
    norm,
    pointwise,
    randomness,
    recurrent,
    reductions,
    slicing,
    transforms,
    views,
)
from autoshard.rules.call import bind_node
from autoshard.rules.check import check_rule
from autoshard.rules.notation import Choice, Comm, OpRule, Strategy, bind, choices, kernel, strategies
from autoshard.rules.pattern import parse

__all__ = [
    "Choice", "Comm", "OpRule", "RuleWarning", "Strategy", "bind", "choices", "has_rule", "kernel", "parse", "register_rule", "rule_for",
    "strategies",
]  # fmt: skip

TABLES = (
    pointwise.TABLE,
    views.TABLE,
    slicing.TABLE,
    reductions.TABLE,
    matmul.TABLE,
    attention.TABLE,
    norm.TABLE,
    indexing.TABLE,
    losses.TABLE,
    convolution.TABLE,
    recurrent.TABLE,
    transforms.TABLE,
    randomness.TABLE,
    factories.TABLE,
)

RULES = {op: rule for table in TABLES for op, rule in table.items()}
"""Op -> rule text, or function(node) -> OpRule."""

NAMED = dict(matmul.NAMED)
"""The same for ops outside ATen, by name ("lib::op" for the default overload), users' own among them: they win over ``RULES``."""


_MADE: dict[tuple, OpRule] = {}
"""Rules of ops met before, by what they are made from: the ops of a hundred layers have the rules of one."""


class RuleWarning(UserWarning):
    """An op has no sharding rule, and is replicated."""


def _name(target) -> str:
    if not isinstance(target, torch._ops.OpOverload):
        return str(target)
    return target.name()  # "lib::op", or "lib::op.overload"


def _find(target):
    return NAMED.get(_name(target)) or RULES.get(target)


def has_rule(target) -> bool:
    """Whether this op (an OpOverload) has a rule of its own."""
    return _find(target) is not None


def rule_for(node: fx.Node) -> OpRule:
    """The rule of an op, its sizes filled in.

    An op without a rule, or called in a way that its rule does not know, is replicated, with one ``RuleWarning`` per op and program.
    RuleError if a rule that the user registered does not fit the call.
    """
    if "rule" in node.meta:
        return node.meta["rule"]
    rule = _find(node.target)
    if rule is None:
        return _replicated(node, "has no sharding rule")
    key = rule, likeness(node)
    if key not in _MADE:
        made = _made(node, rule)
        if made.fallback:  # which warns, once a program
            return made
        _MADE[key] = made
    return _MADE[key]


def _made(node: fx.Node, rule) -> OpRule:
    try:
        found = bind_node(node, rule) if isinstance(rule, str) else rule(node)
    except RuleError as error:
        if isinstance(rule, str):
            raise RuleError(error.what, where=where(node), hint=f"the rule of {_name(node.target)} does not fit this call") from None
        return _replicated(node, f"is called in a way that its sharding rule does not cover ({error.what})")
    return replace(found, saved=()) if node.meta.get("grad") is False else found


def _replicated(node: fx.Node, why: str) -> OpRule:
    """Every operand and result whole on every rank. The warning leaves a mark in ``meta``, so that copies of the program keep quiet."""
    if not any(n.meta.get("warned") for n in node.graph.find_nodes(op="call_function", target=node.target, sort=False)):
        node.meta["warned"] = True
        name = _name(node.target)
        hint = f'autoshard.register_rule("{name}", ...) would let it be sharded'
        warnings.warn(f"{name} {why} and is replicated\n  at {where(node)}\n  hint: {hint}", RuleWarning, stacklevel=3)
    operand_specs = tuple(tuple(() for _ in tensors(n.meta["val"])[0].shape) for n in operands(node))
    result_specs = tuple(tuple(() for _ in t.shape) for t in tensors(node.meta["val"]))
    return OpRule(operand_specs, result_specs, {}, fallback=True)


def register_rule(op: str, rule: str, samples: tuple | None = None) -> None:
    """Give an op of your own a sharding rule: ``register_rule("lib::scale", "b s e, e -> b s e")``.

    One spec for each tensor operand and result, one factor for each dim, as in the op's own call; factors that the results lack are
    summed, ``^`` marks factors that must not be sharded, ``+`` operands that are added to a sum. See ``autoshard.rules.notation``.

    Args:
        op: "lib::op", or "lib::op.overload".
        rule: the rule's text.
        samples: example arguments. If given, the rule is checked: each factor is cut in two, and outputs and gradients are compared with
            those of the whole op.

    Raises RuleError: no such op; the text can't be parsed; the rule is wrong for the samples (it names the factor).
    """
    target = _resolve(op)
    parse(rule)
    if samples is not None:
        check_rule(target, rule, tuple(samples))
    NAMED[_name(target)] = rule


def _resolve(op: str):
    library, _, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, library), name), overload or "default")
    except (AttributeError, RuntimeError):
        raise RuleError(
            f"there is no op {op!r}", hint='define it first (torch.library.custom_op), and name it "lib::op" or "lib::op.overload"'
        ) from None
