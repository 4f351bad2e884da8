"""The memory of a rank over a whole training step: the most it needs, and what that is made of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Manner:
    """How a rank runs a stage.

    flight: micro-batches whose activations it holds at once. last: whether it is the last stage.
    late: whether what is sent forward, and back, is held until the step ends; None under torch's schedules for one stage a rank.
    splits: backward is run in two parts, the second when ``half`` more micro-batches have had the first.
    elsewhere: weights that are another stage's of the same rank.
    """

    flight: int = 1
    last: bool = True
    late: tuple[bool, bool] | None = None
    splits: bool = False
    half: int = 0
    elsewhere: frozenset[str] = frozenset()


def step_peak(
    program: Program, mesh: Mesh, device: Device, flight: int = 1, last: bool = True, offload: Collection[str] = ()
) -> dict[str, float]:
    """Bytes by category, at the moment of a training step when their sum is largest, on the fullest rank of a stage.

    Adam has its state already: it is not the first step.

    Args:
        program: the stage's, conversions explicit, of one micro-batch.
        flight, last: as in ``Manner``.
        offload: names of parameters that the optimizer updates in the host's memory, which is not counted.
    """
    return rank_peak([(program, Manner(flight, last))], mesh, device, offload)[0]


def rank_peak(
    stages: Sequence[tuple[Program, Manner]], mesh: Mesh, device: Device, offload: Collection[str] = ()
) -> list[dict[str, float]]:
    """The same of a rank that runs these stages: of each of them, when all together need most. One at a time has something transient."""
    steps = [_Step(program, mesh, device, manner, offload) for program, manner in stages]
    found = []
    for full in (True, False):
        others = [step.standing(full) for step in steps] if len(steps) > 1 else [{}]
        for i, step in enumerate(steps):
            found.append([*others[:i], step.peak(full), *others[i + 1 :]])
    return max(found, key=lambda tables: sum(sum(table.values()) for table in tables))


def left_by_forward(program: Program, mesh: Mesh, device: Device) -> float:
    """Bytes that one micro-batch's forward leaves for its backward; what the model returns is not counted."""
    return _Step(program, mesh, device, Manner(), ()).left


class _Step:
    def __init__(self, program: Program, mesh: Mesh, device: Device, manner: Manner, offload: Collection[str]):
        self.program, self.mesh, self.device, self.manner, self.offload = program, mesh, device, manner, offload
        self.m, self.flight, self.last_stage = program.microbatches, manner.flight, manner.last
        self.copies = device.kind == "cpu"
        self.batch = MicroBatch(program, mesh.sizes, self.copies)
        nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
        self.held_here = [n for n in nodes if n.name in program.params and n.name not in manner.elsewhere]
        self.weights = [self._weight(n) for n in self.held_here if program.params[n.name].requires_grad]
        known = {*program.params, *program.inputs}
        self.received = [n for n in nodes if n.name not in known and n.meta.get("stage") is not None]  # extras have no stage
        self.nodes = nodes
        self.forks = self._forks() if manner.splits else frozenset()

    def _forks(self) -> frozenset[fx.Node]:
        """Ops at which the first part of backward sets gradients aside: they send one to what was received, and one to weights alone."""
        leads = {x for x in self.received if x.meta.get("grad")}
        found = set()
        for node in self.program.ops:
            read = [x for x in node.all_input_nodes if x.meta.get("grad")]
            if node.meta.get("grad") and any(x in leads for x in read):
                leads.add(node)
                if not all(x in leads for x in read):
                    found.add(node)
        return frozenset(found)

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
        for node in self.held_here:
            table["parameters"] += trained[node].whole if node in trained else self._bytes(node, stored_layout(node))
        table["optimizer"] = sum(w.state for w in self._updated())
        if self.device.kind == "gpu":  # the batch is copied there
            table[TRANSIENT] = self.m * sum(self._bytes(n) for n in self.nodes if n.name in self.program.inputs)
        return table

    def _sent(self) -> list[fx.Node]:
        return [] if self.last_stage else [x for x in self.program.output.args[0] if isinstance(x, fx.Node)]

    def standing(self, full: bool) -> dict[str, float]:
        """Bytes by category while another stage of the rank runs: when most micro-batches are in flight, or at the end of the step."""
        table, m, flight = self.held(), self.m, self.flight if full else 0
        table[ACTIVATIONS] += table.pop(TRANSIENT, 0.0) + m * sum(self._results()) + flight * self.left
        if m > flight:
            table[GRADIENTS] += sum(w.whole for w in self.weights)
            table[ACTIVATIONS] += self._still_sent(m - flight)
        if full and self.manner.half:
            table[ACTIVATIONS] += self.manner.half * self.aside
        return {**table, TRANSIENT: 0.0}

    def peak(self, full: bool) -> dict[str, float]:
        """Bytes by category when it needs most: while most micro-batches are in flight; or else before and after that, as weights are
        gathered, in the last backward, and in what follows it."""
        if not full:
            start = Heap(self.held())
            start.look(gather_bytes(self.weights, self.mesh.data, self.copies))
            heaps = [start]
            if self.m > 1 and not self.infers:
                heaps.append(self._run(0, True, True))
        elif self.infers:
            heaps = [self._run(0, False, False)]
        else:
            others, m = self.flight - 1, self.m
            heaps = [self._run(others, m > self.flight, m == 1)]
            if 1 < m == self.flight and others > 1:
                heaps.append(self._run(others - 1, True, False))
        return max(heaps, key=lambda heap: heap.peak).at_peak

    @property
    def infers(self) -> bool:
        return self.program.loss is None and self.last_stage

    def _run(self, others: int, gradients: bool, last: bool) -> Heap:
        """A forward and a backward while ``others`` more micro-batches are in flight.

        gradients: of a micro-batch before are there. last: of the step, so that gradients are summed, and the optimizer runs.
        """
        heap, m = Heap(self.held()), self.m
        placeholders = self._placeholders(heap)
        scheduled = m > 1 or self.mesh.pipeline > 1
        standing = {w.node: heap.new(w.whole, GRADIENTS) for w in self.weights} if gradients else {}
        if others:
            heap.new(others * self.left, ACTIVATIONS)
        before = [heap.new((m - 1 if gradients else others) * sum(self._results()), ACTIVATIONS)] if scheduled else []
        if gradients and self.mesh.pipeline > 1:
            before.append(heap.new(self._still_sent(m - 1 - others), ACTIVATIONS))
        half = min(self.manner.half, others)
        if half:
            before.append(heap.new(half * self.aside, ACTIVATIONS))
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

        given = self._given(heap)
        later = [*map(heap.hold, given), *(placeholders[x].block for x in self.received)]  # until backward is over, with its second part
        if self.manner.splits:
            later += [heap.hold(block) for blocks in left.saved.values() for block in blocks]
        later += self.batch.backward(heap, placeholders, left, given, leaf, self.forks)
        for block in [*sent_back, *later]:
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

    def _still_sent(self, done: int) -> float:
        """Bytes of micro-batches that are done, so many of them, which torch holds on to.

        Under 1F1B: the gradients that it sent back last, and with gloo, if several forwards come first, what one of them sent. (Where
        layers are computed again, the latter was measured to be gone.)
        """
        back, sent = sum(self._bytes(x) for x in self.received if x.meta.get("grad")), sum(self._bytes(x) for x in self._sent())
        if self.manner.late is None:
            return back + (sent if self.copies and self.flight > 1 else 0.0)
        forward, backward = self.manner.late
        return done * (forward * sent + backward * back)

    def _placeholders(self, heap: Heap) -> dict[fx.Node, Held]:
        there = Block(0.0, "parameters")  # counted already
        received = {n: heap.new(self._bytes(n), ACTIVATIONS) for n in self.received}
        return {n: self.batch.placed(n, received.get(n, there)) for n in self.nodes}

    def _given(self, heap: Heap) -> list[Block]:
        """Gradients of what a forward returns, as backward begins: those of what was sent are received."""
        if self.last_stage:
            return [Block(0.0, TRANSIENT) for _ in self.program.output.args[0]]
        return [heap.new(self._bytes(x), TRANSIENT) for x in self._sent() if x.meta.get("trained", x.meta.get("grad"))]

    @cached_property
    def left(self) -> float:
        """Bytes that a micro-batch in flight holds, without what the model returns."""
        heap = Heap({})
        left = self.batch.forward(heap, self._placeholders(heap))
        if self.last_stage:
            for block in left.outputs:
                heap.drop(block)
        return heap.total

    @cached_property
    def aside(self) -> float:
        """Bytes that the first part of a micro-batch's backward sets aside for the second."""
        heap = Heap({})
        there = self._placeholders(heap)
        left, given = self.batch.forward(heap, there), self._given(heap)
        held = [*map(heap.hold, given), *self.batch.backward(heap, there, left, given, lambda node, block: None, self.forks)]
        return sum({id(block): block.nbytes for block in held}.values())

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
