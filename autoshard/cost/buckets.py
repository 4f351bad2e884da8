"""Memory of the weights' own communication: gradients that are summed in buckets while the last backward runs, and weights that are
gathered before the first forward. Follows ``runtime.gradients`` and ``runtime.zero``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autoshard.cost.heap import GRADIENTS, TRANSIENT, Block, Heap
from autoshard.runtime.gradients import BUCKET_BYTES
from autoshard.runtime.zero import GATHER_BYTES

IN_FLIGHT = 2  # reduce-scatters that ``runtime.gradients`` lets run at once


@dataclass(frozen=True)
class Weight:
    """A parameter that is trained.

    whole: bytes that its gradient has after backward. piece: bytes of what the optimizer updates, in the dtype that forward reads, and
    itemsize: its bytes an element. master: whether the optimizer updates an fp32 copy.
    axes: over which its gradient is summed once a step. cut: whether ranks update pieces of it over data, at ``level`` 1 or 2.
    """

    node: fx.Node
    whole: float
    piece: float
    itemsize: int
    axes: tuple[str, ...]
    level: int = 0
    master: bool = False

    @property
    def updated(self) -> float:
        """Bytes of what the optimizer updates, and so of one of its moments."""
        return self.piece / self.itemsize * 4 if self.master else self.piece

    @property
    def state(self) -> float:
        """Bytes that the optimizer keeps: two moments, and the master."""
        return (3 if self.master else 2) * self.updated

    @property
    def cut(self) -> bool:
        return self.level in (1, 2)

    @property
    def scatter(self) -> bool:
        return self.level == 2 and "data" in self.axes

    @property
    def key(self) -> tuple:
        axes = tuple(a for a in self.axes if a != "data") if self.scatter else self.axes
        return axes, self.scatter, self.level == 2, self.itemsize


def filled(weights: Sequence[Weight]) -> list[list[Weight]]:
    """Buckets of weights, those in the order of their first use in forward, in the order in which backward fills them."""
    filling: dict[tuple, tuple[list[Weight], float]] = {}
    order: dict[int, list[Weight]] = {}
    for weight in reversed([w for w in weights if w.axes or w.cut]):
        bucket, size = filling.get(weight.key, ([], 0.0))
        if size + weight.whole > BUCKET_BYTES:
            bucket, size = [], 0.0
        filling[weight.key] = bucket, size + weight.whole
        bucket.append(weight)
        order.pop(id(bucket), None)
        order[id(bucket)] = bucket
    return list(order.values())


class Buckets:
    """Sums gradients as they arrive, and hands over pieces.

    Args:
        weights: in the order of their first use in forward.
        ranks: along data. copies: whether a reduce-scatter works on a copy (gloo).
    """

    def __init__(self, heap: Heap, weights: Sequence[Weight], ranks: int, copies: bool):
        self.heap, self.ranks, self.copies = heap, ranks, copies
        self.buckets = filled(weights)
        self.of = {w.node: number for number, bucket in enumerate(self.buckets) for w in bucket}
        self.scatters = any(w.scatter for bucket in self.buckets for w in bucket)
        self.missing = [len(bucket) for bucket in self.buckets]
        self.arrived: dict[fx.Node, Block] = {}
        self.launched = self.finished = 0
        self.moving: list[list[Block]] = []

    def arrive(self, node: fx.Node, block: Block) -> Block | None:
        """A gradient is there; the block where it is kept, None if the bucket has it."""
        if node not in self.of:
            return block
        self.arrived[node] = block
        self.missing[self.of[node]] -= 1
        while self.launched < len(self.buckets) and self.missing[self.launched] <= 0:
            self._launch()
        return None

    def finish(self) -> None:
        while self.launched < len(self.buckets):
            self._launch()
        while self.finished < len(self.buckets):
            self._finish()

    def _launch(self) -> None:
        heap, bucket = self.heap, [w for w in self.buckets[self.launched] if w.node in self.arrived]
        self.launched += 1
        moving: list[Block] = []
        cut = bool(bucket) and bucket[0].level == 2
        if cut:
            heap.new(sum(w.piece for w in bucket), GRADIENTS)
        if bucket and bucket[0].scatter:
            sent = heap.new(self.ranks * sum(w.piece for w in bucket), TRANSIENT)
            moving = [sent]
            for weight in bucket:
                heap.drop(self.arrived[weight.node])
            if self.copies:
                moving.append(heap.new(sent.nbytes, TRANSIENT))
        elif len(bucket) > 1 and bucket[0].axes:
            flat = heap.new(sum(w.whole for w in bucket), TRANSIENT)
            for weight in bucket:
                heap.drop(self.arrived[weight.node])
            heap.file(flat, GRADIENTS)
            moving = [flat] * cut
        elif cut:
            moving = [self.arrived[w.node] for w in bucket]
        self.moving.append(moving)
        if self.scatters and self.launched - self.finished > IN_FLIGHT:
            self._finish()

    def _finish(self) -> None:
        for block in self.moving[self.finished]:
            self.heap.drop(block)
        self.finished += 1


def gather_bytes(weights: Sequence[Weight], ranks: int, copies: bool) -> float:
    """What comes and goes while weights of levels 1 and 2 are gathered: the largest bucket's pieces, one's own and those of all ranks."""
    sizes: list[list[float]] = []
    filling: dict[int, float] = {}
    for weight in weights:
        if not weight.cut:
            continue
        if weight.itemsize not in filling or filling[weight.itemsize] + weight.whole > GATHER_BYTES:
            filling[weight.itemsize] = 0.0
            sizes.append([])
        sizes[-1].append(weight.piece)
        filling[weight.itemsize] += weight.whole
    return max((sum(pieces) * (1 + ranks * (2 if copies else 1)) for pieces in sizes), default=0.0)
