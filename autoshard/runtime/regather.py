"""Weights of ZeRO level 3: gathered where forward reads them, and gathered again in backward instead of being kept."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.errors import RunError
from autoshard.runtime.axis import Axis
from autoshard.runtime.convert import convert


@dataclass(frozen=True)
class _Recipe:
    """How a gathered weight is made: from which piece, as it was when it was gathered."""

    piece: torch.Tensor
    version: int
    text: str
    axis: Axis
    size: int


@dataclass(frozen=True)
class _Saved:
    """What stands for a gathered weight, or a view of one, that backward will read."""

    recipe: _Recipe
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @torch.no_grad()
    def again(self) -> torch.Tensor:
        recipe = self.recipe
        if recipe.piece._version != recipe.version:
            raise RunError(
                "a weight was changed between the forward that read it and its backward", hint="call backward before the optimizer's step"
            )
        whole = convert(recipe.piece.detach(), recipe.text, recipe.axis, recipe.size)
        return whole.as_strided(self.shape, self.stride, self.offset)


class Regather:
    """Knows the gathered weights that are alive, by their memory, and keeps autograd from keeping them."""

    def __init__(self):
        self._known: dict[int, tuple[StorageWeakRef, _Recipe]] = {}

    def gather(self, piece: torch.Tensor, text: str, axis: Axis, size: int) -> torch.Tensor:
        """``convert(piece, text, axis, size)``, remembered."""
        whole = convert(piece, text, axis, size)
        storage = whole.untyped_storage()
        # the weak reference keeps the address from being given to another storage
        self._known[storage._cdata] = StorageWeakRef(storage), _Recipe(piece, piece._version, text, axis, size)
        return whole

    def hooks(self) -> AbstractContextManager:
        """Within, what autograd saves of a gathered weight is how to gather it."""
        self._known = {at: (ref, recipe) for at, (ref, recipe) in self._known.items() if not ref.expired()}
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: torch.Tensor) -> torch.Tensor | _Saved:
        found = self._known.get(x.untyped_storage()._cdata)
        if found is None or x.dtype != found[1].piece.dtype:
            return x
        return _Saved(found[1], x.shape, x.stride(), x.storage_offset())

    @staticmethod
    def _unpack(x: torch.Tensor | _Saved) -> torch.Tensor:
        return x.again() if isinstance(x, _Saved) else x
