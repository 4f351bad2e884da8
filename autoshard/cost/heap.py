"""The memory of one rank as a step goes on: blocks that are taken, shared and released, and the moment at which most is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TRANSIENT, ACTIVATIONS, GRADIENTS = "transient", "activations", "gradients"


@dataclass(eq=False)
class Block:
    """Bytes that are released when nobody holds them any more."""

    nbytes: float
    category: str
    holders: int = 1


class Heap:
    """``at_peak``: bytes by category at the moment when their sum was largest."""

    def __init__(self, held: Mapping[str, float]):
        """held: bytes by category that are there all the time."""
        self.now = dict(held)
        self.total = sum(held.values())
        self.peak, self.at_peak = self.total, dict(held)

    def new(self, nbytes: float, category: str = TRANSIENT) -> Block:
        self._add(nbytes, category)
        self.look()
        return Block(nbytes, category)

    def hold(self, block: Block) -> Block:
        block.holders += 1
        return block

    def drop(self, block: Block) -> None:
        block.holders -= 1
        if block.holders == 0:
            self._add(-block.nbytes, block.category)

    def file(self, block: Block, category: str) -> Block:
        """Count the block under another category."""
        if block.holders and block.category != category:
            self._add(-block.nbytes, block.category)
            self._add(block.nbytes, category)
            block.category = category
        return block

    def look(self, more: float = 0.0) -> None:
        """Is this the peak, with ``more`` bytes that come and go right now?"""
        if self.total + more > self.peak:
            self.peak, self.at_peak = self.total + more, dict(self.now)
            self.at_peak[TRANSIENT] = self.at_peak.get(TRANSIENT, 0.0) + more

    def _add(self, nbytes: float, category: str) -> None:
        self.now[category] = self.now.get(category, 0.0) + nbytes
        self.total += nbytes
