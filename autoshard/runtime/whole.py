"""The whole of a value from the ranks' pieces."""

from __future__ import annotations

import torch

from autoshard.errors import PlacementError
from autoshard.placement import Layout, R, route, step_arguments
from autoshard.runtime.convert import convert
from autoshard.runtime.world import World


def is_whole(layout: Layout, world: World) -> bool:
    """Whether every rank of a stage holds the value, and its whole gradient."""
    return all(p == R or k == 1 for p, k in zip(layout, world.mesh.sizes))


def whole(x: torch.Tensor, layout: Layout, shape: tuple[int, ...], world: World) -> torch.Tensor:
    """The whole value on every data x tensor rank of a stage; a collective over them, and differentiable.

    Args:
        x: this rank's part of a value of global ``shape``, placed by ``layout``.
    """
    sizes = world.mesh.sizes
    steps = route(layout, (R,) * len(layout), shape, sizes, True)
    if steps is None:
        raise PlacementError(f"a value of shape {shape} in {layout} can't be gathered on mesh {world.mesh}")
    for step in steps:
        text, size = step_arguments(step, shape, sizes, world.coords)
        x = convert(x, text, world.axes[step.axis], size)
    return x
