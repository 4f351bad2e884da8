"""Gather the weights of a layer together: those of ZeRO level 3 that it reads, in one collective instead of one for each.

before (``w`` and ``b`` are of one layer, and cut over data)::

    w_rs = convert(w, S(0) -> R*, data)
    linear = aten.linear(x, w_rs)
    b_rs = convert(b, S(0) -> R*, data)
    add = aten.add(linear, b_rs)

after::

    w_rs = convert(w, S(0) -> R*, data)       # bucket 0: in the emitted module one line, self.gather_all
    b_rs = convert(b, S(0) -> R*, data)       # bucket 0
    linear = aten.linear(x, w_rs)
    add = aten.add(linear, b_rs)

A bucket is made of what follows each other in one layer, stage and region, has one dtype, and is no larger than a limit: all of it is
whole at once. What is in one bucket twice is gathered once. Backward gathers what it reads again of a bucket together too, and sums its
gradients in one reduce-scatter.
"""

from __future__ import annotations

import re
from math import prod

from torch import fx

from autoshard import ops
from autoshard.placement import R_STAR, local_shape
from autoshard.program import Program

BUCKET_BYTES = 25 * 2**20


def bucket_gathers(program: Program) -> Program:
    """Mark gathers that run together with the number of their bucket, and move them to where the first of them is."""
    if not any(map(gathers_weight, program.ops)):
        return program
    out = program.copy()
    number, key, size, members = -1, None, 0.0, []
    for node in list(out.ops):
        if not gathers_weight(node):
            continue
        here, nbytes = _key(node), _bytes(node, out)
        if here != key or size + nbytes > BUCKET_BYTES:
            number, key, size, members = number + 1, here, 0.0, []
        same = next((m for m in members if m.args[:2] == node.args[:2]), None)
        if same is not None:
            node.replace_all_uses_with(same)
            out.graph.erase_node(node)
            continue
        if members:
            members[-1].append(node)
        node.meta["bucket"] = number
        members.append(node)
        size += nbytes
    return out


def gathers_weight(node: fx.Node) -> bool:
    """Whether a node is a gather of a weight of ZeRO level 3 that is a summand in backward."""
    return node.target is ops.convert and node.args[0].meta.get("zero") == 3 and node.args[2] == "data" and node.meta["step"].dst == R_STAR


def _key(node: fx.Node) -> tuple:
    """What gathers of one bucket have in common."""
    meta = node.meta
    return meta["stage"], meta.get("region"), meta.get("again"), meta["val"].dtype, _layer(meta.get("module", ""))


def _layer(module: str) -> str:
    """The path to the first numbered module, "transformer.h.0" of "transformer.h.0.attn.c_attn"; all of it where none is."""
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", module)
    return found[0] if found else module


def _bytes(node: fx.Node, program: Program) -> float:
    """Of the gathered weight, on a rank."""
    shape = local_shape(tuple(node.meta["val"].shape), node.meta["layouts"][0], program.mesh.sizes, (0, 0))
    return prod(shape) * node.meta["val"].element_size()
