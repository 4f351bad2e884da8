"""Weights of ZeRO levels 1 and 2: whole where forward reads them, in pieces over the data axis for the optimizer.

(A weight of level 3 is stored in pieces only; see ``regather``.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from autoshard.placement import R, blocks_now, local_shape, parse_layout
from autoshard.runtime import collectives
from autoshard.runtime.world import World

GATHER_BYTES = 25 * 2**20


class Shard:
    """One weight.

    whole: what forward reads, and where backward leaves the gradient: a leaf, cut over the tensor axis only.
    piece: this rank's part of it over data, the parameter that the user's optimizer sees. Where memory allows it a view of ``whole``.

    Args:
        shape: of the weight, global.
        layout: of the pieces, text over (data, tensor).
    """

    def __init__(self, shape: tuple[int, ...], layout: str, dtype: torch.dtype, world: World):
        data, tensor = parse_layout(layout)
        sizes = world.mesh.sizes
        self.axis = world.data
        self.dim, self.blocks = data.dim, blocks_now((data, tensor), 0, sizes)
        local = local_shape(shape, (R, tensor), sizes, world.coords)
        self.whole = torch.empty(local, dtype=dtype, device=world.device, requires_grad=True)
        self.widths = collectives.widths_of(local[self.dim] // self.blocks, self.axis.size)
        mine = self.part(self.whole.detach(), self.axis.index)
        self.piece = nn.Parameter(mine if self.blocks == 1 else mine.reshape(self.piece_shape(self.axis.index)))

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Rank ``index``'s part of a tensor shaped like ``whole``: a view, with its blocks, if there are several, in a dim of their own."""
        if self.blocks > 1:
            x = x.unflatten(self.dim, (self.blocks, x.shape[self.dim] // self.blocks))
        return x.narrow(self.dim + (self.blocks > 1), sum(self.widths[:index]), self.widths[index])

    def piece_shape(self, index: int) -> tuple[int, ...]:
        shape = self.whole.shape
        return (*shape[: self.dim], self.blocks * self.widths[index], *shape[self.dim + 1 :])

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's piece of ``x``, shaped like ``whole``: a view if the blocks allow it."""
        return self.part(x, self.axis.index).reshape(self.piece.shape)

    @property
    def room(self) -> int:
        """Elements of the largest piece: the first, as torch.chunk cuts."""
        return self.whole.numel() // self.whole.shape[self.dim] * self.blocks * self.widths[0]

    def hand_over(self, gradient: torch.Tensor) -> None:
        """Add a gradient of the piece to what the piece has."""
        self.piece.grad = gradient if self.piece.grad is None else self.piece.grad.add_(gradient)


class Slots:
    """A buffer with room for every rank's pieces of some weights, ``[data ranks, room]``: what a collective sends or receives."""

    def __init__(self, shards: Sequence[Shard]):
        self.shards, self.starts, self.room = shards, [], 0
        for shard in shards:
            self.starts.append(self.room)
            self.room += shard.room

    def new(self, rows: int) -> torch.Tensor:
        like = self.shards[0].whole
        return like.new_empty((rows, self.room), requires_grad=False)

    def slot(self, row: torch.Tensor, number: int, part: torch.Tensor) -> torch.Tensor:
        """The place of a part of shard ``number`` in a row, in the shape of ``part``."""
        start = self.starts[number]
        return row[start : start + part.numel()].view(part.shape)


@torch.no_grad()
def gather(shards: Iterable[Shard]) -> None:
    """Make every ``whole`` what the pieces of all data ranks say. A collective."""
    for bucket in _buckets(shards):
        slots, axis = Slots(bucket), bucket[0].axis
        mine, everyone = slots.new(1), slots.new(axis.size)
        pieces = [shard.piece.detach() for shard in bucket]
        torch._foreach_copy_([slots.slot(mine[0], i, piece) for i, piece in enumerate(pieces)], pieces)
        collectives.all_gather_into(everyone, mine, axis)
        targets, sources = [], []
        for rank in range(axis.size):
            for i, shard in enumerate(bucket):
                # past the version counter: a backward that is still to come may read the weight, and its values stay
                part = shard.part(shard.whole.data, rank)
                if rank != axis.index or shard.blocks > 1:
                    targets.append(part)
                    sources.append(slots.slot(everyone[rank], i, part))
        torch._foreach_copy_(targets, sources)


def _buckets(shards: Iterable[Shard]) -> list[list[Shard]]:
    """Shards of one dtype together, up to a size."""
    filling: dict[torch.dtype, list[Shard]] = {}
    buckets, sizes = [], {}
    for shard in shards:
        dtype, nbytes = shard.whole.dtype, shard.whole.numel() * shard.whole.element_size()
        if dtype not in filling or sizes[dtype] + nbytes > GATHER_BYTES:
            filling[dtype], sizes[dtype] = [], 0
            buckets.append(filling[dtype])
        filling[dtype].append(shard)
        sizes[dtype] += nbytes
    return buckets
