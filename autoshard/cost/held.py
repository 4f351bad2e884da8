"""What any plan holds: a bound from below, before anything is planned."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import fx

from autoshard.cost.memory import state_bytes
from autoshard.mesh import Mesh
from autoshard.program import Program, tensors


def held_bytes(program: Program, mesh: Mesh, m: int, zero: int | None = None, offload: bool = False, pinned: bool = False) -> float:
    """Bytes that the fullest rank needs in any plan for ``m`` micro-batches: an even share of what must be held.

    Weights and what the optimizer keeps of them are there all the time; in the last of several micro-batches gradients are too. What
    forward returns is kept for every micro-batch, and when the step ends it is put together; of a batch that is not cut it is there when
    forward ends.

    Args:
        program: the canonical one, of the whole batch.
        zero: the ZeRO level of all weights; None: any.
        offload: optimizer states may be on the host.
        pinned: weights may be cut over data, as pins can make them.
    """
    every, tensor = mesh.size, mesh.tensor * mesh.pipeline
    trains = program.loss is not None
    held = 0.0
    for param in program.params.values():
        whole = state_bytes(prod(param.shape), param.dtype.itemsize, param.master is not None, trainable=param.requires_grad)
        held += whole["parameters"] / (every if pinned or param.kind != "parameter" or zero in (None, 3) else tensor)
        if trains and m > 1:
            held += whole["gradients"] / (every if pinned or zero in (None, 2, 3) else tensor)
        if not offload:
            held += whole["optimizer"] / (every if pinned or zero != 0 else tensor)
    if not trains:
        return held
    returned = (returned_bytes(program) + _bytes(program.results[program.loss])) * (2 if m > 1 else 1) / (mesh.data * mesh.tensor)
    return held + returned if mesh.pipeline == 1 else max(held, returned)


def returned_bytes(program: Program) -> float:
    """Of what forward returns beside its loss, on all ranks together."""
    return sum(_bytes(leaf) for i, leaf in enumerate(program.results) if i != program.loss)


def _bytes(leaf: Any) -> float:
    return sum(prod(t.shape) * t.element_size() for t in tensors(leaf.meta["val"])) if isinstance(leaf, fx.Node) else 0.0
