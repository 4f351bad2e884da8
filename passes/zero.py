"""ZeRO: how each weight, and what the optimizer keeps of it, lies over the data axis.

before (data axis of 2, level 3 for ``w``, level 2 for ``b``)::

    w = placeholder                       # [R, S(1)]
    b = placeholder                       # [R, R]

after::

    w = placeholder                       # [S(0), S(1)]: gathered by whoever reads it
    b = placeholder                       # [R, R], and its piece is [S(0), R]

Levels 1 and 2 change nothing of what the graph computes: forward reads the weight whole, and the engine sums its gradient once a step.
At level 1 every rank has the whole gradient and updates its piece, at level 2 it is given the gradient of its piece only. At level 3 the
weight itself is a shard, so that the conversion to what an op demands is an all-gather, and a reduce-scatter backward.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.errors import PlanError
from autoshard.placement import cut_over_data
from autoshard.program import Program


def zero(program: Program, levels: Mapping[str, int]) -> Program:
    """``levels``: by the parameters' names; others are left alone. Nodes of weights with a level get ``zero`` and ``piece``."""
    out = program.copy() if any(levels.values()) else program  # without levels there is nothing to mark
    for node in out.graph.nodes:
        if node.op == "placeholder" and node.name in out.params:
            param = out.params[node.name]
            level = levels.get(param.name, 0)
            if level:
                piece = cut_over_data(node.meta["layouts"][0], param.shape, out.mesh.sizes)
                if piece is None:
                    raise PlanError(f"ZeRO level {level} of {param.name!r}: no dim of it can be cut over data", hint="make the plan again")
                node.meta["zero"], node.meta["piece"] = level, piece
                if level == 3:
                    node.meta["layouts"] = (piece,)
    return out

