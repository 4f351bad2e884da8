"""Mark the regions that backward computes again, so that only their inputs, and what is kept inside, are held until then.

before (all but ``linear`` are of one region, and ``linear_1`` is kept)::

    linear = aten.linear(x, w1)
    relu = aten.relu(linear)
    relu_r = convert(S(1) -> R*, tensor)
    linear_1 = aten.linear(relu_r, w2)
    gelu = aten.gelu(linear_1)
    linear_2 = aten.linear(gelu, w3)
    return linear_2

after::

    linear = aten.linear(x, w1)
    linear_2 = region_0(linear)           # in the emitted module a method of its own, called through rt.recompute

where ``region_0`` is made of the others: they have ``meta["region"] = 0``. A region is a run of ops that follow each other, with the
conversions between them; a run that something else interrupts is two. What carries no gradient keeps nothing for backward, so a run of such
ops is no region.

``meta["again"]`` says what becomes of an op of a region in backward:

    "again"   it is computed again, as its result is read there (``relu``, ``relu_r``, ``gelu``)
    "kept"    its result is kept (``linear_1``)
    "once"    neither: nobody reads its result again (``linear_2``, of which backward reads the operands only)

Views are "again": they cost nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import groupby

import torch
from torch import fx

from autoshard import ops
from autoshard.cost.compute import ALIASES, WINDOWS
from autoshard.errors import PlanError
from autoshard.placement import format_layout
from autoshard.program import Program, is_getitem, op_kind
from autoshard.rules import rule_for

aten = torch.ops.aten

VIEWS = ALIASES | WINDOWS

NOTHING = frozenset("convert add sub neg cat stack sum to".split())
"""Ops of which autograd saves neither operands nor results."""

OPERANDS = frozenset("linear addmm mm bmm baddbmm matmul conv1d conv2d conv3d convolution mul div gelu silu embedding".split())
"""Ops of which it saves operands, but neither results nor anything else."""

RESULTS = frozenset("tanh sigmoid relu exp sqrt rsqrt softmax log_softmax".split())
"""Ops of which it saves the result, but no operand."""


def checkpoint_regions(program: Program, regions: Mapping[str, int], kept: Collection[str] = ()) -> Program:
    """Mark regions.

    Args:
        regions: number of its region by node name; the other ops are in none. Conversions go with the op that they are for.
        kept: names of ops in regions whose results are kept, and of conversions, as ``conversion_name`` writes them: "linear_1->[R, S(1)]".
            A view stands for what it is a view of. Names of conversions that the program does not have keep nothing.

    Raises:
        PlanError: there is no such op, or its result can't be kept.
    """
    out = program.copy() if regions else program  # without regions there is nothing to mark
    wanted = {node: _wanted(node, regions) for node in out.ops}
    number = 0
    for region, run in groupby(out.ops, lambda node: wanted[node]):
        run = list(run)
        if region is not None and any(node.meta.get("grad") for node in run):
            for node in run:
                node.meta["region"] = number
            number += 1
    _decide(out, _kept(out, kept))
    return out


def _wanted(node: fx.Node, regions: Mapping[str, int]) -> int | None:
    return regions.get(node.meta["wanted_by"] if node.target is ops.convert else node.name)


def conversion_name(node: fx.Node) -> str:
    """What a plan calls a conversion: the value, and how it lies then. Known before there are conversions."""
    return f"{node.meta['of']}->{format_layout(node.meta['layouts'][0])}"


def can_keep(node: fx.Node) -> bool:
    """Whether the result of an op may be kept: not that of the runtime's own kernels, which keep what they need, nor of dropout, nor
    random numbers that have a key."""
    if node.target is ops.convert:
        return True
    strategy = node.meta.get("strategy")
    if node.op != "call_function" or strategy is None or is_view(node) or node.target is aten.dropout.default:
        return False
    if "draw" in node.meta and node.target is not aten.scaled_dot_product_attention.default:
        return False
    local = rule_for(node).local
    return not any(choice.comms or choice.factor in local for choice in strategy.choices)


def _kept(program: Program, names: Collection[str]) -> set[fx.Node]:
    by_name: dict[str, list[fx.Node]] = {}
    for node in program.ops:
        by_name.setdefault(conversion_name(node) if node.target is ops.convert else node.name, []).append(node)
    found = set()
    for name in names:
        if name not in by_name and "->" not in name:
            raise PlanError(f"the plan keeps the result of {name!r}, and there is no such op", hint="make the plan again")
        for node in by_name.get(name, ()):
            while node.op == "call_function" and is_view(node):
                node = node.all_input_nodes[0]
            if "region" in node.meta and not can_keep(node):
                raise PlanError(f"the plan keeps the result of {name!r}, which is always computed again", hint="make the plan again")
            found.add(node)
    return found


def _decide(program: Program, kept: set[fx.Node]) -> None:
    for node in reversed(program.ops):
        region = node.meta.get("region")
        if region is None:
            continue
        users = [user for user in node.users if user.meta.get("region") == region]
        if node in kept:
            node.meta["again"] = "kept"
        elif can_keep(node) and _kind(node) in NOTHING | OPERANDS and not any(_reads_again(user) for user in users):
            node.meta["again"] = "once"
        else:
            node.meta["again"] = "again"


def _reads_again(user: fx.Node) -> bool:
    """Whether backward, or an op that it computes again, reads the operands of ``user``."""
    if is_view(user):
        region = user.meta["region"]
        return any(_reads_again(other) for other in user.users if other.meta.get("region") == region)
    return user.meta["again"] == "again" or (saves(user) and _kind(user) not in RESULTS)


def saves(node: fx.Node) -> bool:
    """Whether autograd may save something for the backward of an op."""
    return not is_view(node) and _kind(node) not in NOTHING


def _kind(node: fx.Node) -> str:
    return "convert" if node.target is ops.convert else op_kind(node)


def is_view(node: fx.Node) -> bool:
    """Whether the result lies in the memory of an operand, or is only a name."""
    return is_getitem(node) or (node.target is not ops.convert and op_kind(node) in VIEWS)
