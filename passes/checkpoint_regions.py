"""Mark the regions that backward computes again, so that only their inputs are kept.

before (``relu`` and ``linear_1`` are of one region)::

    linear = aten.linear(x, w1)
    relu = aten.relu(linear)
    relu_r = convert(S(1) -> R*, tensor)
    linear_1 = aten.linear(relu_r, w2)
    return linear_1

after::

    linear = aten.linear(x, w1)
    linear_1 = region_0(linear)           # in the emitted module a method of its own, called through rt.recompute

where ``region_0`` is made of ``relu``, ``relu_r`` and ``linear_1``: they have ``meta["region"] = 0``. A region is a run of ops that follow
each other, with the conversions between them; a run that something else interrupts is two. What carries no gradient keeps nothing for
backward, so a run of such ops is no region.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from autoshard import ops
from autoshard.program import Program


def checkpoint_regions(program: Program, regions: Mapping[str, int]) -> Program:
    """``regions``: number of its region by node name; the other ops are in none. Conversions go with the op that they are for."""
    out = program.copy()
    wanted = {node: _wanted(node, regions) for node in out.ops}
    number = 0
    for region, run in groupby(out.ops, lambda node: wanted[node]):
        run = list(run)
        if region is not None and any(node.meta.get("grad") for node in run):
            for node in run:
                node.meta["region"] = number
            number += 1
    return out


def _wanted(node, regions: Mapping[str, int]) -> int | None:
    return regions.get(node.meta["wanted_by"] if node.target is ops.convert else node.name)
