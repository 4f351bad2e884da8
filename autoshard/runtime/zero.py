"""Weights of which forward reads something else than the optimizer updates.

Under ZeRO levels 1 and 2 forward reads them whole, and the optimizer updates pieces over the data axis. (A weight of level 3 is stored in
pieces only; see ``regather``.) In mixed precision forward reads them rounded, and the optimizer updates masters in fp32. Offloaded, what
the optimizer updates, its gradient then, and all that the optimizer keeps of it are in the host's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from autoshard.placement import R, blocks_now, local_shape, parse_layout
from autoshard.runtime import collectives
from autoshard.runtime.world import World

GATHER_BYTES = 25 * 2**20


class Rounded:
    """A weight of lower precision, or one that is offloaded.

    whole: what forward reads, and where backward leaves the gradient: a leaf.
    piece: the parameter that the user's optimizer sees: the master of ``whole``. Its gradient stays in the lower precision.

    Args:
        shape: of what this rank holds.
        master: dtype of the master.
        offload: the master is in the host's memory, pinned where the device is another.
    """

    cut = False

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, master: torch.dtype, world: World, offload: bool = False):
        self.whole = torch.empty(shape, dtype=dtype, device=world.device, requires_grad=True)
        self.piece = nn.Parameter(_empty(shape, master, world, offload))
        self._follow()

    def _follow(self) -> None:
        self.piece.grad_dtype = None  # any: that of ``whole``
        self._seen = self.piece._version

    def target(self) -> torch.Tensor:
        """``whole``, to be filled with what the masters say now. Autograd sees it only if they have changed: a backward that is still to
        come may read the weight otherwise."""
        changed, self._seen = self.piece._version != self._seen, self.piece._version
        return self.whole if changed else self.whole.data

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """What belongs to the piece of ``x``, shaped like ``whole``."""
        return x

    def hand_over(self, gradient: torch.Tensor) -> None:
        """Add a gradient of the piece to what the piece has, where the piece is."""
        gradient = gradient.to(self.piece.device)
        self.piece.grad = gradient if self.piece.grad is None else self.piece.grad.add_(gradient)


class Shard(Rounded):
    """A weight of ZeRO level 1 or 2.

    whole: cut over the tensor axis only. piece: this rank's part of it over data; where nothing stands against it, a view.

    Args:
        shape: of the weight, global.
        layout: of the pieces, text over (data, tensor).
    """

    cut = True

    def __init__(
        self, shape: tuple[int, ...], layout: str, dtype: torch.dtype, master: torch.dtype | None, world: World, offload: bool = False
    ):
        data, tensor = parse_layout(layout)
        sizes = world.mesh.sizes
        self.axis = world.data
        self.dim, self.blocks = data.dim, blocks_now((data, tensor), 0, sizes)
        local = local_shape(shape, (R, tensor), sizes, world.coords)
        self.whole = torch.empty(local, dtype=dtype, device=world.device, requires_grad=True)
        self.widths = collectives.widths_of(local[self.dim] // self.blocks, self.axis.size)
        mine = self.part(self.whole.detach(), self.axis.index)
        self.is_view = self.blocks == 1 and master is None and not offload
        self.piece = nn.Parameter(mine if self.is_view else _empty(self.piece_shape(self.axis.index), master or dtype, world, offload))
        self._follow()

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Rank ``index``'s part of a tensor shaped like ``whole``: a view, with its blocks, if there are several, in a dim of their own."""
        if self.blocks > 1:
            x = x.unflatten(self.dim, (self.blocks, x.shape[self.dim] // self.blocks))
        return x.narrow(self.dim + (self.blocks > 1), sum(self.widths[:index]), self.widths[index])

    def piece_shape(self, index: int) -> tuple[int, ...]:
        shape = self.whole.shape
        return (*shape[: self.dim], self.blocks * self.widths[index], *shape[self.dim + 1 :])

    def target(self) -> torch.Tensor:
        return self.whole.data if self.is_view else super().target()  # the optimizer's step has told autograd

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``x``, shaped like ``whole``: a view if the blocks allow it."""
        return self.part(x, self.axis.index).reshape(self.piece.shape)

    @property
    def room(self) -> int:
        """Elements of the largest piece: the first, as torch.chunk cuts."""
        return self.whole.numel() // self.whole.shape[self.dim] * self.blocks * self.widths[0]


def _empty(shape: tuple[int, ...], dtype: torch.dtype, world: World, offload: bool) -> torch.Tensor:
    if not offload:
        return torch.empty(shape, dtype=dtype, device=world.device)
    return torch.empty(shape, dtype=dtype, pin_memory=world.device.type == "cuda")


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
def gather(weights: Iterable[Rounded]) -> None:
    """Make every ``whole`` what the pieces of all data ranks say. A collective."""
    weights = list(weights)
    rounded = [weight for weight in weights if not weight.cut]
    if rounded:
        torch._foreach_copy_([weight.target() for weight in rounded], [weight.piece for weight in rounded])
    for bucket in _buckets(weight for weight in weights if weight.cut):
        slots, axis = Slots(bucket), bucket[0].axis
        mine, everyone = slots.new(1), slots.new(axis.size)
        pieces = [shard.piece.detach() for shard in bucket]
        torch._foreach_copy_([slots.slot(mine[0], i, piece) for i, piece in enumerate(pieces)], pieces)
        collectives.all_gather_into(everyone, mine, axis)
        targets, sources = [], []
        wholes = [shard.target() for shard in bucket]
        for rank in range(axis.size):
            for i, shard in enumerate(bucket):
                part = shard.part(wholes[i], rank)
                if rank != axis.index or not shard.is_view:
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
