"""Seconds that one op takes on one rank under a strategy, by the roofline model.

    t = max(flops / (peak * efficiency), bytes / (bandwidth * efficiency)) + kernels * launch

(Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore architectures", CACM 2009.) Where a
device has measured factors for an op, they multiply that.
``flops`` and ``bytes`` are those of the fullest rank and of one micro-batch. An op that is sharded does 1/k of the work; one that is
replicated or deferred does all of it on every rank, and pays in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

from torch import fx

from autoshard.cluster import Cluster, Device
from autoshard.cost.scratch import op_scratch
from autoshard.placement import Layout, R, local_shape
from autoshard.program import is_getitem, op_kind, operands, result_of, tensors
from autoshard.rules.notation import OpRule, Strategy

ALIASES = frozenset("reshape view permute transpose t numpy_T unsqueeze squeeze alias detach".split())
"""Ops that give the same elements another shape: no kernel runs, forward or backward, and the result shares its operand's memory."""

WINDOWS = frozenset("slice select expand narrow diagonal".split())
"""Ops whose result is a window on the operand: nothing runs forward, but backward writes a gradient of the operand's size."""

GATHERS = frozenset("embedding index_select gather index".split())
"""Ops that read of their first operand only the rows they return."""

ATTENTION_BACKWARD = 2.5
"""Matmul work of attention's backward over its forward: 5 matmuls (scores are computed again) to 2 (Dao et al., FlashAttention, 2022)."""

Storage = tuple[str, int, tuple[str, ...]]
"""What memory a value lies in: (producing node, result index, kind of placement on each axis, with R* read as R)."""


Place = tuple[int | None, tuple[str, ...], float]
"""What an op saves: operand i, or -1-i for result i, or None (neither of them); the kind of its placement on each axis; bytes."""


@dataclass(frozen=True)
class OpCost:
    """One op under one strategy, on the fullest rank, for one micro-batch.

    forward / backward: seconds. flops: of the whole op, forward, undivided. split: by how many ranks that work is divided.
    saved: what backward needs of activations, (storage, bytes) each once; the same storage may be saved by other ops too. What the kernel
        saves beside operands and results lies in storage (node, -1, ()).
    result_bytes: memory that the op itself allocates. working_bytes: what it needs while it runs, the larger of forward and backward.
    """

    forward: float
    backward: float
    flops: float
    split: float
    saved: tuple[tuple[Storage, float], ...]
    result_bytes: float
    working_bytes: float

    @property
    def saved_bytes(self) -> float:
        """Bytes of all that this op saves."""
        return sum(nbytes for _, nbytes in self.saved)


def roofline_seconds(flops: float, nbytes: float, dtype: str, device: Device, kernels: int = 1) -> float:
    """The formula above: seconds of ``kernels`` kernels that do ``flops`` in ``dtype`` and move ``nbytes`` in all."""
    if not kernels:
        return 0.0
    return max(flops / device.flops(dtype), nbytes / device.memory_rate) + kernels * device.launch


def optimizer_seconds(elements: float, device: Device, itemsize: int = 4, mixed: float = 0.0, tensors: int = 1) -> float:
    """Seconds of one Adam step on ``elements`` of a rank's parameters; ``itemsize``: of the optimizer's own values.

    Bound by memory: parameter, gradient and two moments are read, parameter and moments written, 7 values an element: 28 bytes. Of the
    elements in ``mixed`` precision the gradient is made fp32 before (2 bytes read, 4 written), and the master rounded behind (4 and 2).
    tensors: that they are in, each of which was measured to cost some launches.
    """
    seconds = roofline_seconds(0.0, 7 * itemsize * elements + 12 * mixed, "fp32", device)
    factor, launches = device.factors.get("optimizer", (1.0, 0.0))
    return seconds * factor + launches * tensors * device.launch


def accumulation_seconds(nbytes: float, tensors: int, device: Device) -> float:
    """Seconds in which gradients of ``nbytes`` in all are added to those of a micro-batch before. 0 where that was not measured."""
    factor, _ = device.factors.get("accumulate", (0.0, 0.0))
    return factor * roofline_seconds(0.0, 3 * nbytes, "fp32", device, tensors)


def offloaded_seconds(elements: float, itemsize: int, cluster: Cluster, mixed: bool = False) -> float:
    """Seconds of one Adam step on the host.

    Gradients go there and weights come back, ``itemsize`` bytes an element each; the step moves 28 bytes an element through the host's
    memory, and 12 more in mixed precision, as ``optimizer_seconds`` says. One after the other.
    """
    if not elements:
        return 0.0
    link = cluster.host.link
    return 2 * (link.latency + elements * itemsize / link.rate) + (28 + 12 * mixed) * elements / cluster.host.bandwidth


def dtype_name(dtype) -> str:
    """The name by which ``Device.peak`` knows a torch dtype; fp32 for all that it does not list."""
    return {"torch.float64": "fp64", "torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(str(dtype), "fp32")


@cache
def local_elements(shape: tuple[int, ...], layout: Layout, sizes: tuple[int, ...]) -> int:
    """Elements of the largest piece of a value of this global shape (the piece of rank 0: torch.chunk's first is never smaller)."""
    return prod(local_shape(shape, layout, sizes, (0,) * len(sizes)))


def work_share(rule: OpRule, strategy: Strategy, sizes: tuple[int, ...]) -> float:
    """The share of the op's work that falls to the fullest rank: 1 if replicated, 1/k for each even split, ceil(n/k)/n for uneven ones."""
    left: dict[str, float] = {}
    share = 1.0
    for choice, k in zip(strategy.choices, sizes):
        if choice.factor in rule.sizes:
            n = left.get(choice.factor, rule.sizes[choice.factor])
            piece = -(-(n // choice.blocks) // k) * choice.blocks
            left[choice.factor] = piece
            share *= piece / n
        elif choice.name.startswith("shard"):
            share /= k
    return share


def split_of(strategy: Strategy, sizes: tuple[int, ...]) -> float:
    """By how many ranks the op's work is divided: the product of the sizes of the axes that shard a factor."""
    return float(prod(k for choice, k in zip(strategy.choices, sizes) if choice.factor or choice.name.startswith("shard")))


def storage_node(node: fx.Node) -> tuple[fx.Node, int]:
    """The (producing node, result index) whose memory a value lies in: looks through views of the same elements."""
    producer, index = result_of(node)
    while producer.op == "call_function" and op_kind(producer) in ALIASES:
        producer, index = result_of(operands(producer)[0])
    return producer, index


@dataclass(frozen=True)
class _Value:
    """An operand or a result: global shape, bytes an element, whether a gradient flows, whether it grows with the batch, whether it is held
    anyway (a parameter, an input of the model)."""

    shape: tuple[int, ...]
    itemsize: int
    grad: bool
    share: float  # of the bytes that one micro-batch holds
    held: bool

    def nbytes(self, layout: Layout, sizes: tuple[int, ...]) -> float:
        return local_elements(self.shape, layout, sizes) * self.itemsize * self.share


def op_costs(
    node: fx.Node,
    rule: OpRule,
    strategies: tuple[Strategy, ...],
    sizes: tuple[int, int],
    cluster: Cluster,
    batch_share: float = 1.0,
    whole: frozenset[str] = frozenset(),
) -> list[OpCost]:
    """The cost of an op under each of its strategies.

    node: ``meta["val"]`` holds the global shapes of the *whole* batch, ``meta["grad"]`` says whether a gradient flows.
    sizes: (data, tensor). batch_share: 1 / micro-batches. whole: names of the nodes whose values do not grow with the batch (parameters,
    positions, masks without a batch dim); their bytes are not divided by the micro-batches.
    """
    return Pricing(sizes, cluster, batch_share, whole).costs(node, rule, strategies)


def op_cost(node, rule, strategy, sizes, cluster, batch_share=1.0, whole=frozenset()) -> OpCost:
    """The cost of an op under one strategy; see ``op_costs``, which is faster for many."""
    return op_costs(node, rule, (strategy,), sizes, cluster, batch_share, whole)[0]


class Pricing:
    """``op_costs`` of the ops of one program: what is asked for an op is known for all that have its rule, so for every layer."""

    def __init__(self, sizes: tuple[int, int], cluster: Cluster, batch_share: float = 1.0, whole: frozenset[str] = frozenset()):
        self.sizes, self.cluster, self.batch_share, self.whole = sizes, cluster, batch_share, whole
        self._jobs: dict[tuple, _Job] = {}

    def costs(self, node: fx.Node, rule: OpRule, strategies: tuple[Strategy, ...]) -> list[OpCost]:
        """``rule``: as ``rule_for`` gives it. Arguments and result as those of ``op_costs``."""
        kind = op_kind(node)
        if is_getitem(node) or node.op != "call_function" or kind in ALIASES:
            forward, backward = self.cluster.device.view_seconds if kind in ALIASES else (0.0, 0.0)
            backward *= bool(node.meta.get("grad"))
            return [OpCost(forward, backward, 0.0, split_of(s, self.sizes), (), 0.0, 0.0) for s in strategies]
        read = operands(node)
        stores = [storage_node(x) for x in read for _ in tensors(x.meta["val"])]
        held = tuple([producer.op != "call_function" for producer, _ in stores])
        whole = tuple([x.name in self.whole for x in (*read, node)]) if self.whole else ()
        key = id(rule), held, whole
        if key not in self._jobs:
            self._jobs[key] = self._job(kind, node, rule, read, held)
        job = self._jobs[key]
        return [job.cost(s, stores, node) for s in strategies]

    def _job(self, kind: str, node: fx.Node, rule: OpRule, read: list[fx.Node], held: tuple[bool, ...]) -> _Job:
        grad, shares = bool(node.meta.get("grad")), {True: 1.0, False: self.batch_share}
        values = [(x, v) for x in read for v in tensors(x.meta["val"])]
        inputs = [
            _Value(tuple(v.shape), v.dtype.itemsize, bool(x.meta.get("grad")), shares[x.name in self.whole], h)
            for (x, v), h in zip(values, held)
        ]
        share, vals = shares[node.name in self.whole], tensors(node.meta["val"])
        results = [_Value(tuple(v.shape), v.dtype.itemsize, grad and v.dtype.is_floating_point, share, False) for v in vals]
        floats = [v.dtype for v in vals if v.dtype.is_floating_point]
        work = self.batch_share if any(v.share == self.batch_share for v in inputs + results) else 1.0
        dtype = dtype_name(floats[0]) if floats else "fp32"
        return _Job(kind, rule, inputs, results, dtype, rule.flops * work, grad, self.cluster.device, self.sizes)


@dataclass
class _Job:
    """What is the same for all strategies of one op, and for all ops that are like it."""

    kind: str
    rule: OpRule
    inputs: list[_Value]
    results: list[_Value]
    dtype: str
    flops: float
    grad: bool
    device: Device
    sizes: tuple[int, int]

    def __post_init__(self):
        others = [i for i in range(len(self.inputs)) if i not in self.rule.additive]
        self.attention = "attention" in self.kind
        self.matrices = (others if self.attention else others[:2]) if self.flops else []
        self.saved = self.rule.saved
        if self.rule.fallback:  # nothing is known of the op: it may save all that it sees
            self.saved = (*range(len(self.inputs)), *(-1 - i for i in range(len(self.results))))
        self.known: dict[int, tuple[Strategy, OpCost, list[Place]]] = {}  # by the strategy's id

    def cost(self, strategy: Strategy, stores: list[tuple[fx.Node, int]], node: fx.Node) -> OpCost:
        """Under a strategy, of the op ``node`` whose operands lie in ``stores``."""
        if id(strategy) not in self.known:
            self.known[id(strategy)] = strategy, *self._cost(strategy)
        _, cost, places = self.known[id(strategy)]
        if not places:
            return cost
        saved: dict[Storage, float] = {}
        for at, kinds, nbytes in places:
            producer, index = (node, -1) if at is None else stores[at] if at >= 0 else (node, -1 - at)
            saved[producer.name, index, kinds] = nbytes
        return OpCost(cost.forward, cost.backward, cost.flops, cost.split, tuple(saved.items()), cost.result_bytes, cost.working_bytes)

    def _cost(self, strategy: Strategy) -> tuple[OpCost, list[Place]]:
        ins = self._bytes(self.inputs, strategy.operands)
        outs = self._bytes(self.results, strategy.results)
        flops = self.flops * work_share(self.rule, strategy, self.sizes)
        window = self.kind in WINDOWS
        read = [min(ins[0], sum(outs)), *ins[1:]] if self.kind in GATHERS and ins else ins
        forward = self.device.view_seconds[0] if window else self._seconds(flops, sum(read) + sum(outs), 1)
        gradients = [i for i, v in enumerate(self.inputs) if v.grad] if self.grad else []
        incoming = sum(b for b, v in zip(outs, self.results) if v.grad)
        outgoing = sum(ins[i] for i in gradients)
        backward = self._backward(ins, outs, flops, gradients, incoming) if gradients else 0.0
        factors = self.device.factors.get(self.kind)
        if factors:
            forward, backward = forward * factors[0], backward * factors[1]
        vocabulary = any(choice.comms and k > 1 for choice, k in zip(strategy.choices, self.sizes))
        scratch = op_scratch("vocab_cross_entropy" if vocabulary and self.kind == "cross_entropy_loss" else self.kind, ins, outs)
        working = max(0.0 if window else sum(outs) + scratch.forward, incoming + outgoing + scratch.backward)
        saved = self._saved(ins, outs, strategy, scratch.saved, vocabulary) if gradients else []
        return OpCost(forward, backward, self.flops, split_of(strategy, self.sizes), (), 0.0 if window else sum(outs), working), saved

    def _bytes(self, values: list[_Value], layouts: tuple[Layout, ...]) -> list[float]:
        """Bytes of each value on the fullest rank; a value that the rule says nothing of (no rule of its own) is whole."""
        nothing = (R,) * len(self.sizes)
        return [v.nbytes(layouts[i] if i < len(layouts) else nothing, self.sizes) for i, v in enumerate(values)]

    def _seconds(self, flops: float, nbytes: float, kernels: int) -> float:
        return roofline_seconds(flops, nbytes, self.dtype, self.device, kernels)

    def _backward(self, ins, outs, flops, gradients, incoming) -> float:
        """One matmul for each matrix that needs a gradient, as large as the forward one; everything else by the bytes it moves:
        the incoming gradient and what was saved are read, a gradient for each operand that needs one is written."""
        if self.attention and self.flops:
            nbytes = sum(ins) + sum(outs) + incoming + sum(ins[i] for i in gradients)
            return self._seconds(ATTENTION_BACKWARD * flops, nbytes, 1)
        if self.matrices:
            seconds = 0.0
            for i in gradients:
                if i in self.matrices:  # d a = d result @ b: reads d result and b, writes d a
                    seconds += self._seconds(flops, incoming + sum(ins[j] for j in self.matrices), 1)
                elif self.inputs[i].shape != self.results[0].shape:  # d bias: the sum of d result
                    seconds += self._seconds(0.0, incoming + ins[i], 1)
            return seconds
        saved = sum(ins[i] if i >= 0 else outs[-1 - i] for i in self.saved)
        return self._seconds(0.0, incoming + saved + sum(ins[i] for i in gradients), 1)

    def _saved(self, ins, outs, strategy: Strategy, hidden: float, vocabulary: bool) -> list[Place]:
        """hidden: what the kernel saves that is neither operand nor result. vocabulary: it is cut, and then the logits are saved."""
        found: list[Place] = [(None, (), hidden)] if hidden else []
        for i in (0, *self.saved) if vocabulary and self.kind == "cross_entropy_loss" else self.saved:
            if i >= 0 and not self._needed(i):
                continue
            at, layouts = (i, strategy.operands) if i >= 0 else (-1 - i, strategy.results)
            value, nbytes = (self.inputs[at], ins[at]) if i >= 0 else (self.results[at], outs[at])
            if value.held:
                continue
            kinds = tuple(p.kind.rstrip("*") for p in layouts[at]) if at < len(layouts) else ("R",) * len(self.sizes)
            found.append((i, kinds, nbytes))
        return found

    def _needed(self, i: int) -> bool:
        """Whether backward reads saved operand ``i``: of a matmul, only if another matrix needs a gradient."""
        if i not in self.matrices or self.attention:
            return True
        return any(self.inputs[j].grad for j in self.matrices if j != i)
