"""Cutting a whole tensor into the pieces of a layout, and joining them again. Local, differentiable, no communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autoshard.placement import Layout, Placement, R, blocks_now, pieces

Coords = tuple[int, ...]


def cuts(layout: Layout, sizes: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """The cuts that a layout makes, in the order in which they nest: (axis, dim, blocks that this cut sees)."""
    order = sorted(range(len(layout)), key=lambda a: (layout[a].blocks, a))  # coarse factors first, then outer axes first
    done: list[Placement] = [R] * len(layout)
    found = []
    for axis in order:
        if layout[axis].is_shard and sizes[axis] > 1:
            done[axis] = layout[axis]
            found.append((axis, layout[axis].dim, blocks_now(tuple(done), axis, sizes)))
    return tuple(found)


def take_one(tensor: torch.Tensor, dim: int, blocks: int, k: int, index: int) -> torch.Tensor:
    """Piece ``index`` of the k that ``S(dim/blocks)`` cuts ``tensor`` into: a view if blocks is 1."""
    size = tensor.shape[dim] // blocks
    lengths = pieces(size, k)
    start = sum(lengths[:index])
    if blocks == 1:
        return tensor.narrow(dim, start, lengths[index])
    return tensor.unflatten(dim, (blocks, size)).narrow(dim + 1, start, lengths[index]).flatten(dim, dim + 1)


def join_one(parts: Sequence[torch.Tensor], dim: int, blocks: int = 1) -> torch.Tensor:
    """The tensor that ``take_one`` cut into ``parts``."""
    if blocks == 1:
        return torch.cat(tuple(parts), dim)
    return torch.cat([p.unflatten(dim, (blocks, p.shape[dim] // blocks)) for p in parts], dim + 1).flatten(dim, dim + 1)


def take(tensor: torch.Tensor, layout: Layout, sizes: tuple[int, ...], coords: Coords) -> torch.Tensor:
    """The piece at ``coords`` of a whole ``tensor``; its shape is ``placement.local_shape``."""
    for axis, dim, blocks in cuts(layout, sizes):
        tensor = take_one(tensor, dim, blocks, sizes[axis], coords[axis])
    return tensor


def join(parts: Mapping[Coords, torch.Tensor], layout: Layout, sizes: tuple[int, ...]) -> torch.Tensor:
    """The whole tensor from its pieces by coordinates. Along axes that do not cut it only index 0 is looked at."""
    steps = cuts(layout, sizes)

    def whole(at: dict[int, int], depth: int) -> torch.Tensor:
        if depth == len(steps):
            return parts[tuple(at.get(axis, 0) for axis in range(len(sizes)))]
        axis, dim, blocks = steps[depth]
        return join_one([whole({**at, axis: i}, depth + 1) for i in range(sizes[axis])], dim, blocks)

    return whole({}, 0)
