"""Weights of ZeRO level 3: gathered where forward reads them, and gathered again in backward instead of being kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.errors import RunError
from autoshard.placement import parse_placement
from autoshard.runtime import collectives
from autoshard.runtime.axis import Axis
from autoshard.runtime.convert import convert
from autoshard.runtime.recompute import whole_op

Weight = tuple[torch.Tensor, str, int]
"""A piece, the conversion that makes it whole, "S(0) -> R*", and the size of its dim then."""


@dataclass
class _Recipe:
    """How weights that are gathered together are made: from which pieces, as they were when they were gathered.

    reads: how often autograd will ask for each. whole: what has been gathered again, until all of that was asked for.
    """

    pieces: list[torch.Tensor]
    versions: list[int]
    make: Callable[[Sequence[int], Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    reads: list[int]
    whole: dict[int, torch.Tensor] = field(default_factory=dict)
    left: int = 0

    @torch.no_grad()
    def again(self, index: int) -> torch.Tensor:
        if any(piece._version != version for piece, version in zip(self.pieces, self.versions)):
            raise RunError(
                "a weight was changed between the forward that read it and its backward", hint="call backward before the optimizer's step"
            )
        if not self.left:
            wanted = [i for i, reads in enumerate(self.reads) if reads]
            self.whole = dict(zip(wanted, self.make(wanted, [self.pieces[i].detach() for i in wanted])))
            self.left = sum(self.reads)
        found = self.whole[index]
        self.left -= 1
        if not self.left:
            self.whole = {}
        return found


@dataclass(frozen=True)
class _Saved:
    """What stands for a gathered weight, or a view of one, that backward will read."""

    recipe: _Recipe
    index: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def again(self) -> torch.Tensor:
        return self.recipe.again(self.index).as_strided(self.shape, self.stride, self.offset)


class Regather:
    """Knows the gathered weights that are alive, by their memory, and keeps autograd from keeping them."""

    def __init__(self):
        self._known: dict[int, tuple[StorageWeakRef, _Recipe, int]] = {}

    def gather(self, weights: Sequence[Weight], axis: Axis) -> tuple[torch.Tensor, ...]:
        """Whole weights, remembered; several in one collective, which all must be "S(d) -> R*" then."""
        pieces = [piece for piece, _, _ in weights]
        if len(weights) == 1:
            ((piece, text, size),) = weights
            wholes = (convert(piece, text, axis, size),)
            make = lambda _, given: [convert(given[0], text, axis, size)]  # noqa: E731
        else:
            cuts = [_cut(text, size) for _, text, size in weights]
            wholes = _Together.apply(cuts, axis, *pieces) if axis.size > 1 else tuple(pieces)
            make = lambda wanted, given: collectives.all_gather_together(given, [cuts[i] for i in wanted], axis)  # noqa: E731
        recipe = _Recipe(pieces, [piece._version for piece in pieces], make, [0] * len(pieces))
        for i, whole in enumerate(wholes):
            storage = whole.untyped_storage()
            # the weak reference keeps the address from being given to another storage
            self._known[storage._cdata] = StorageWeakRef(storage), recipe, i
        return wholes

    def hooks(self) -> AbstractContextManager:
        """Within, what autograd saves of a gathered weight is how to gather it."""
        self._known = {at: entry for at, entry in self._known.items() if not entry[0].expired()}
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: torch.Tensor) -> torch.Tensor | _Saved:
        found = self._known.get(x.untyped_storage()._cdata)
        if found is None or x.dtype != found[1].pieces[found[2]].dtype:
            return x
        _, recipe, index = found
        recipe.reads[index] += 1
        return _Saved(recipe, index, x.shape, x.stride(), x.storage_offset())

    @staticmethod
    def _unpack(x: torch.Tensor | _Saved) -> torch.Tensor:
        return x.again() if isinstance(x, _Saved) else x


class _Together(torch.autograd.Function):
    """One all-gather forward, one reduce-scatter backward."""

    @staticmethod
    def forward(ctx, cuts, axis, *pieces):
        ctx.cuts, ctx.axis = cuts, axis
        ctx.set_materialize_grads(False)
        return whole_op(lambda: tuple(collectives.all_gather_together(pieces, cuts, axis)))

    @staticmethod
    def backward(ctx, *gradients):
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]  # the same on every rank
        given = [gradients[i] for i in present]
        found = dict(zip(present, collectives.reduce_scatter_together(given, [ctx.cuts[i] for i in present], ctx.axis)))
        return (None, None, *(found.get(i) for i in range(len(gradients))))


def _cut(text: str, size: int) -> collectives.Cut:
    src = parse_placement(text.split("->")[0])
    return src.dim, src.blocks, size
