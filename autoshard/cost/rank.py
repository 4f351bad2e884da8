"""The memory of a rank over a whole training step: the most it needs, and what that is made of."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from math import prod

from torch import fx

from autoshard.cluster import Device
from autoshard.cost.buckets import Buckets, Weight, gather_bytes
from autoshard.cost.heap import ACTIVATIONS, GRADIENTS, TRANSIENT, Block, Heap
from autoshard.cost.liveness import Held, MicroBatch
from autoshard.cost.memory import CATEGORIES
from autoshard.cost.scratch import optimizer_scratch
from autoshard.mesh import Mesh
from autoshard.placement import R, local_shape
from autoshard.program import Program, stored_layout, tensors


def step_peak(
    program: Program, mesh: Mesh, device: Device, flight: int = 1, last: bool = True, offload: Collection[str] = ()
) -> dict[str, float]:
    """Bytes by category, at the moment of a training step when their sum is largest, on the fullest rank of a stage.

    Adam has its state already: it is not the first step. A backward that is run in two parts counts as one that is not.

    Args:
        program: the stage's, conversions explicit, of one micro-batch.
        flight: micro-batches whose activations it holds at once. last: whether it is the last stage.
        offload: names of parameters that the optimizer updates in the host's memory, which is not counted.
    """
    return _Step(program, mesh, device, flight, last, offload).peak()


def left_by_forward(program: Program, mesh: Mesh, device: Device) -> float:
    """Bytes that one micro-batch's forward leaves for its backward; what the model returns is not counted."""
    return _Step(program, mesh, device, 1, True, ()).left


class _Step:
    def __init__(self, program: Program, mesh: Mesh, device: Device, flight: int, last: bool, offload: Collection[str]):
        self.program, self.mesh, self.device, self.offload = program, mesh, device, offload
        self.m, self.flight, self.last_stage = program.microbatches, flight, last
        self.copies = device.kind == "cpu"
        self.batch = MicroBatch(program, mesh.sizes, self.copies)
        nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
        self.weights = [self._weight(n) for n in nodes if n.name in program.params and program.params[n.name].requires_grad]
        known = {*program.params, *program.inputs}
        self.received = [n for n in nodes if n.name not in known and n.meta.get("stage") is not None]  # extras have no stage
        self.nodes = nodes

    def _bytes(self, node: fx.Node, layout=None) -> float:
        val = tensors(node.meta["val"])[0]
        layout = layout or node.meta["layouts"][0]
        return float(prod(local_shape(tuple(val.shape), layout, self.mesh.sizes, (0, 0))) * val.element_size())

    def _weight(self, node: fx.Node) -> Weight:
        layout, level = stored_layout(node), node.meta.get("zero", 0)
        piece = self._bytes(node, layout)
        whole = self._bytes(node, (R, layout[1])) if level in (1, 2) else piece
        axes = tuple(a for a in node.meta.get("sync", ()) if getattr(self.mesh, a) > 1)
        master = self.program.params[node.name].master is not None
        return Weight(node, whole, piece, tensors(node.meta["val"])[0].element_size(), axes, level, master)

    def _updated(self) -> list[Weight]:
        """Weights that the optimizer updates in this memory."""
        return [w for w in self.weights if self.program.params[w.node.name].name not in self.offload]

    def held(self) -> dict[str, float]:
        """Bytes that are there all the time."""
        table = dict.fromkeys(CATEGORIES, 0.0)
        trained = {w.node: w for w in self.weights}
        for node in self.nodes:
            if node.name in self.program.params:
                table["parameters"] += trained[node].whole if node in trained else self._bytes(node, stored_layout(node))
        table["optimizer"] = sum(w.state for w in self._updated())
        if self.mesh.pipeline > 1:  # torch keeps a buffer for each micro-batch's values, and for the gradients that come back
            back = [x for x in self._sent() if x.meta.get("trained")]
            table[ACTIVATIONS] = self.m * sum(self._bytes(x) for x in [*self.received, *back])
        if self.device.kind == "gpu":  # the batch is copied there
            table[TRANSIENT] = self.m * sum(self._bytes(n) for n in self.nodes if n.name in self.program.inputs)
        return table

    def _sent(self) -> list[fx.Node]:
        return [] if self.last_stage else [x for x in self.program.output.args[0] if isinstance(x, fx.Node)]

    def peak(self) -> dict[str, float]:
        """Over the moments at which a step may need most: weights are gathered; the most micro-batches are in flight; the last backward,
        and what follows it."""
        start = Heap(self.held())
        start.look(gather_bytes(self.weights, self.mesh.data, self.copies))
        heaps = [start]
        if self.program.loss is None and self.last_stage:
            heaps.append(self._run(0, False, False))
        else:
            full, m = self.flight - 1, self.m
            heaps.append(self._run(full, m > self.flight, m == 1))
            if m > 1:
                heaps.append(self._run(0, True, True))
            if 1 < m == self.flight and full > 1:
                heaps.append(self._run(full - 1, True, False))
        return max(heaps, key=lambda heap: heap.peak).at_peak

    def _run(self, others: int, gradients: bool, last: bool) -> Heap:
        """A forward and a backward while ``others`` more micro-batches are in flight.

        gradients: of a micro-batch before are there. last: of the step, so that gradients are summed, and the optimizer runs.
        """
        heap, m = Heap(self.held()), self.m
        placeholders = self._placeholders()
        scheduled = m > 1 or self.mesh.pipeline > 1
        standing = {w.node: heap.new(w.whole, GRADIENTS) for w in self.weights} if gradients else {}
        if others:
            heap.new(others * self.left, ACTIVATIONS)
        before = [heap.new((m - 1 if gradients else others) * sum(self._results()), ACTIVATIONS)] if scheduled else []
        if gradients and self.mesh.pipeline > 1:
            before.append(heap.new(self._still_sent(), ACTIVATIONS))
        left = self.batch.forward(heap, placeholders)
        kept = self._returned(heap, left.outputs, scheduled)
        buckets = Buckets(heap, self.weights, self.mesh.data, self.copies) if last else None
        trained = {w.node for w in self.weights}
        sent_back: list[Block] = []

        def leaf(node: fx.Node, block: Block) -> None:
            if node not in trained:
                sent_back.append(block)
                return
            if node in standing:  # added to in place
                heap.drop(block)
                block = standing.pop(node)
            heap.file(block, GRADIENTS)
            if buckets is not None:
                buckets.arrive(node, block)

        self.batch.backward(heap, placeholders, left, [Block(0.0, TRANSIENT) for _ in left.outputs], leaf)
        for block in sent_back:
            heap.drop(block)
        if last:
            buckets.finish()
            if m > 1:
                heap.look(m * sum(self._results()))  # those of the micro-batches are put together
        for block in [*kept, *before]:
            heap.drop(block)
        if last:
            wide = sum(w.updated for w in self._updated() if w.master)  # gradients of masters
            heap.look(wide + optimizer_scratch([w.updated for w in self._updated()], self.device.kind == "cpu"))
        return heap

    def _still_sent(self) -> float:
        """Bytes of a micro-batch that is done, which torch's 1F1B holds on to: the gradients that it sent back last, and with gloo, if
        several forwards come first, what one of them sent. (Where layers are computed again, the latter was measured to be gone.)"""
        back = sum(self._bytes(x) for x in self.received if x.meta.get("grad"))
        return back + (sum(self._bytes(x) for x in self._sent()) if self.copies and self.flight > 1 else 0.0)

    def _placeholders(self) -> dict[fx.Node, Held]:
        there = Block(0.0, "parameters")  # counted already
        return {n: self.batch.placed(n, there) for n in self.nodes}

    @cached_property
    def left(self) -> float:
        """Bytes that a micro-batch in flight holds, without what the model returns."""
        heap = Heap({})
        left = self.batch.forward(heap, self._placeholders())
        if self.last_stage:
            for block in left.outputs:
                heap.drop(block)
        return heap.total

    def _results(self) -> list[float]:
        if not self.last_stage:
            return []
        return [self._bytes(x) for x in self.program.output.args[0] if isinstance(x, fx.Node)]

    def _returned(self, heap: Heap, outputs: Iterable[Block], scheduled: bool) -> list[Block]:
        """What a forward returns: sent, or kept until the step ends, or (the loss alone is asked for) gone."""
        if scheduled:
            return [heap.file(block, ACTIVATIONS) for block in outputs]
        for block in outputs:
            heap.drop(block)
        return []
