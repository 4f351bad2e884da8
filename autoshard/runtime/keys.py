"""One key a step for every op that draws random numbers, and where on this rank its numbers lie in the whole value."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autoshard.errors import RunError
from autoshard.placement import Placement, R, S, parse_layout, parse_placement
from autoshard.runtime.numbers import Numbers, indices, key_words, row_dims, scrambled
from autoshard.runtime.pieces import take, take_one
from autoshard.runtime.world import World

TAKE = {"low": -(2**63), "high": 2**63 - 1, "dtype": torch.int64}
"""A key is what ``torch.randint`` makes of this with torch's default generator of the CPU: ``torch.manual_seed`` governs all."""


@dataclass(frozen=True)
class Draw:
    """What an op draws.

    key: the first of its keys among those of a step, in the order in which the model draws on one device.
    shape: of its numbers, for the global batch; None for an op that every rank runs on whole values, and which may take several keys.
    layout: over (data, tensor), of one micro-batch. time: placement over the micro-batches.
    """

    key: int
    shape: tuple[int, ...] | None = None
    layout: str = "[R, R]"
    time: str = "R"
    count: int = 1


class Keys:
    """The keys of the current step, and the numbers of each op.

    Args:
        count: keys a step.
        draws: by the name of the op's result.
        microbatches: how many; ``microbatch``, a tensor so that it is no constant for torch.compile, is the one that runs.
    """

    def __init__(self, count: int, draws: dict[str, Draw], world: World, microbatches: int):
        self.count, self.draws, self.world = count, draws, world
        self.words: torch.Tensor | None = None
        self.microbatch = torch.zeros((), dtype=torch.int64, device=world.device)
        self.microbatches = microbatches
        places: dict[tuple, tuple] = {}
        self.places = {}
        for name, draw in draws.items():
            if draw.shape is not None:
                where = (draw.shape, draw.layout, draw.time)
                if where not in places:
                    places[where] = self._place(draw)
                self.places[name] = places[where]

    def next_step(self) -> None:
        """Take the keys of a step from torch's default generator: rank 0's, on all ranks. A collective, unless nothing is drawn."""
        if not self.count:
            return
        keys = torch.randint(size=(self.count,), **TAKE).to(self.world.device)
        if self.world.mesh.size > 1:
            dist.broadcast(keys, group_src=0, group=self.world.everyone)
        self.words = key_words(keys)

    def numbers(self, name: str) -> Numbers:
        """Those of this rank's piece of the value of this name, in the micro-batch that runs."""
        rows, columns, shape, whole = self.places[name]
        which = self.microbatch if len(rows) > 1 else 0
        return Numbers(rows[which], columns[which], self.words[self.draws[name].key], shape, whole)

    def source(self, name: str):
        """``source(shape)`` gives the numbers of each draw, one after the other, that the op of this name makes."""
        draw, taken = self.draws[name], 0

        def next_numbers(shape: tuple[int, ...]) -> Numbers:
            nonlocal taken
            taken += 1
            if taken > draw.count:
                raise RunError(f"the op that makes {name!r} draws more than {draw.count} times", hint='use random="native"')
            if draw.shape is None:
                return whole_numbers(shape, self.words[draw.key + taken - 1])
            found = self.numbers(name)
            if found.shape != tuple(shape):
                what = f"the op that makes {name!r} draws numbers of shape {tuple(shape)}, not {found.shape}"
                raise RunError(what, hint='use random="native"')
            return found

        return next_numbers

    def checkpoint_contexts(self):
        """``context_fn`` of ``torch.utils.checkpoint.checkpoint``: what is computed again has the keys and the micro-batch that it had."""
        before: list[torch.Tensor | None] = []

        @contextmanager
        def forward():
            before[:] = self.words, self.microbatch
            yield

        @contextmanager
        def again():
            now = self.words, self.microbatch
            self.words, self.microbatch = before
            try:
                yield
            finally:
                self.words, self.microbatch = now

        return forward(), again()

    def states(self) -> None:
        """Nothing: a key is not used up."""

    def restore(self, states: None) -> None:
        """Nothing either."""

    def _place(self, draw: Draw):
        """Words of this rank's rows and columns for each micro-batch, the shape of its piece, and whether that is all of the value."""
        layout, time = parse_layout(draw.layout), parse_placement(draw.time)
        rows, columns = [], []
        cut = row_dims(draw.shape)
        for microbatch in range(self.microbatches if time.is_shard else 1):
            dims = [self._positions(size, d, layout, time, microbatch) for d, size in enumerate(draw.shape)]
            row, column = indices(dims[:cut], draw.shape[:cut]), indices(dims[cut:], draw.shape[cut:])
            rows.append(torch.stack((scrambled(row, 1), scrambled(row, 2))))
            columns.append(scrambled(column, 3))
        shape = tuple(len(d) for d in dims)
        device = self.world.device
        return torch.stack(rows).to(device), torch.stack(columns).to(device), shape, shape == draw.shape

    def _positions(self, size: int, dim: int, layout: tuple[Placement, ...], time: Placement, microbatch: int) -> torch.Tensor:
        """Where in a dim of the whole value this rank's piece of a micro-batch lies."""
        found = torch.arange(size)
        if time.is_shard and time.dim == dim:
            found = take_one(found, 0, time.blocks, self.microbatches, microbatch)
        here = tuple(S(0, p.blocks) if p.is_shard and p.dim == dim else R for p in layout)
        return take(found, here, self.world.mesh.sizes, self.world.coords)


def whole_numbers(shape: tuple[int, ...], words: torch.Tensor) -> Numbers:
    """The numbers of a whole value, by the words of its key."""
    shape, device = tuple(shape), words.device
    cut = row_dims(shape)
    row, column = (indices([torch.arange(n) for n in sizes], sizes) for sizes in (shape[:cut], shape[cut:]))
    return Numbers(torch.stack((scrambled(row, 1), scrambled(row, 2))).to(device), scrambled(column, 3).to(device), words, shape)
