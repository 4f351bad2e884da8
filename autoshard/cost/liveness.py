"""One micro-batch on one rank, op by op: what its forward leaves for backward, and what comes and goes on the way.

Follows what the emitted module and autograd do: a local name is deleted where its module ends, a saved tensor is released when its op's
backward has run, gradients of a value that is read twice are added, a region that is computed again keeps its inputs alone.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from math import prod

from torch import fx

from autoshard import ops
from autoshard.cost.heap import ACTIVATIONS, TRANSIENT, Block, Heap
from autoshard.cost.scratch import conversion_scratch, op_scratch
from autoshard.cost.strides import Ints, contiguous, dense_like, viewed
from autoshard.placement import R, blocks_now, local_shape
from autoshard.program import Program, is_getitem, op_kind, operands, result_of, tensors
from autoshard.rules import rule_for

RESHAPES = frozenset("reshape view".split())
PERMUTES = frozenset("permute transpose t numpy_T unsqueeze squeeze alias detach slice select expand narrow diagonal".split())
WINDOWS = frozenset("slice select narrow diagonal".split())
PASSES_ON = frozenset("add sub cat stack reshape view permute transpose t numpy_T unsqueeze squeeze alias detach".split())
"""Ops whose backward hands on the gradient that it is given, where the shape is the same."""


@dataclass
class Held:
    """A tensor on the rank: the block it lies in, its local shape and strides, bytes an element."""

    block: Block
    shape: Ints
    strides: Ints
    itemsize: int

    @property
    def nbytes(self) -> float:
        return float(prod(self.shape) * self.itemsize)


@dataclass
class Left:
    """What one forward leaves behind.

    saved: by op, what its backward reads. inputs: by region, what is needed to compute it again, beside kept: results of its ops.
    outputs: what it returns.
    """

    saved: dict[fx.Node, list[Block]] = field(default_factory=lambda: defaultdict(list))
    inputs: dict[int, dict[fx.Node, Block]] = field(default_factory=dict)
    kept: dict[fx.Node, list[Held]] = field(default_factory=dict)
    outputs: list[Block] = field(default_factory=list)


class MicroBatch:
    """Runs a stage's forward and backward on a heap.

    Args:
        program: of one stage, conversions explicit, of one micro-batch.
        sizes: of (data, tensor).
        copies: whether collectives work on a copy (gloo).
    """

    def __init__(self, program: Program, sizes: tuple[int, int], copies: bool):
        self.program, self.sizes, self.copies = program, sizes, copies
        self.ops = program.ops
        self.rules = {n: rule_for(n) for n in self.ops if not is_getitem(n) and n.target is not ops.convert}
        self.keep = set(program.output.all_input_nodes)
        self.runs: list[tuple[int | None, list[fx.Node]]] = []
        for number, run in groupby(self.ops, lambda node: node.meta.get("region")):
            run = list(run)
            if number is None or not any(n.meta.get("grad") for n in run):
                self.runs += [(None, [n]) for n in run]
            else:
                self.runs.append((number, run))
        self.buckets: dict[int, list[fx.Node]] = defaultdict(list)  # weights of ZeRO level 3 that are gathered together
        for node in self.ops:
            if "bucket" in node.meta:
                self.buckets[node.meta["bucket"]].append(node)
        self.readers: dict[fx.Node, int] = defaultdict(int)  # of parameters: how many ops send them a gradient
        for node in self.ops:
            if node.meta.get("grad"):
                for x in operands(node):
                    if x.op == "placeholder" and x.meta.get("grad"):
                        self.readers[x] += 1

    # --- values ------------------------------------------------------------------------------------------------------

    def local(self, node: fx.Node) -> list[tuple[Ints, int]]:
        """(local shape, bytes an element) of each result, on the fullest rank."""
        layouts = node.meta.get("layouts") or ((R, R),)
        return [
            (local_shape(tuple(v.shape), layout, self.sizes, (0,) * len(self.sizes)), v.element_size())
            for v, layout in zip(tensors(node.meta["val"]), layouts)
        ]

    def placed(self, node: fx.Node, block: Block) -> Held:
        """A placeholder, whose memory is there already."""
        shape, itemsize = self.local(node)[0]
        return Held(block, shape, contiguous(shape), itemsize)

    # --- forward -----------------------------------------------------------------------------------------------------

    def forward(self, heap: Heap, placeholders: dict[fx.Node, Held]) -> Left:
        """Leaves on the heap what backward needs and what is returned."""
        left, env = Left(), {node: [held] for node, held in placeholders.items()}
        items = [run for _, run in self.runs]
        last = {x: i for i, run in enumerate(items) for node in run for x in node.all_input_nodes}
        alive: list[fx.Node] = []
        for i, (number, run) in enumerate(self.runs):
            if number is None:
                self._op(heap, run[0], env, left.saved)
                alive.append(run[0])
            else:
                made = self._region(heap, number, run, env, left)
                alive += made
            if i + 1 == len(items) or _module(items[i + 1]) != _module(run):
                dead = [n for n in alive if n not in self.keep and last.get(n, i) <= i and not isinstance(n.meta["val"], (tuple, list))]
                for node in dead:
                    _release(heap, env, node)
                alive = [n for n in alive if n in env]
        for x in self.program.output.args[0]:
            if isinstance(x, fx.Node):
                left.outputs.append(heap.hold(env[x][0].block))
        for node in alive:
            _release(heap, env, node)
        return left

    def _region(self, heap: Heap, number: int, run: list[fx.Node], env, left: Left) -> list[fx.Node]:
        inside = set(run)
        read = {x: None for node in run for x in node.all_input_nodes if x not in inside and x.name not in self.program.params}
        left.inputs[number] = {x: heap.file(heap.hold(env[x][0].block), ACTIVATIONS) for x in read}
        made = [node for node in run if node in self.keep or any(user not in inside for user in node.users)]
        self._body(heap, run, env, None, set(made), left.kept)
        return made

    def _body(self, heap: Heap, run: list[fx.Node], env, saved, made: set[fx.Node], kept: dict[fx.Node, list[Held]]) -> None:
        """The statements of a region's method. saved: None in forward; in backward what is saved is put there, what is kept is found."""
        last = {x: i for i, node in enumerate(run) for x in node.all_input_nodes}
        alive: list[fx.Node] = []
        for i, node in enumerate(run):
            again = node.meta.get("again", "again")
            if saved is not None and again == "kept":
                env[node] = kept.pop(node)
                self._keep(heap, node, env, saved)
            elif saved is not None and again == "once":
                env[node] = [Held(Block(0.0, TRANSIENT), s, contiguous(s), size) for s, size in self.local(node)]
                self._keep(heap, node, env, saved)
            else:
                self._op(heap, node, env, saved)
                if saved is None and again == "kept":
                    kept[node] = [Held(heap.file(heap.hold(h.block), ACTIVATIONS), h.shape, h.strides, h.itemsize) for h in env[node]]
            alive.append(node)
            if i + 1 == len(run) or _module([run[i + 1]]) != _module([node]):
                for old in [n for n in alive if n not in made and (last.get(n, i) <= i or i + 1 == len(run))]:
                    if i + 1 == len(run) or not isinstance(old.meta["val"], (tuple, list)):
                        _release(heap, env, old)
                alive = [n for n in alive if n in env]

    def _op(self, heap: Heap, node: fx.Node, env: dict[fx.Node, list[Held]], saved) -> None:
        """``saved``: None where autograd keeps nothing."""
        if is_getitem(node):
            held = env[node.args[0]][node.args[1]]
            heap.hold(held.block)
            env[node] = [held]
        elif node.target is ops.convert:
            env[node] = [self._convert(heap, node, env[node.args[0]][0])]
        else:
            env[node] = self._call(heap, node, env, saved)

    def _call(self, heap: Heap, node: fx.Node, env, saved) -> list[Held]:
        ins, kind = [env[x][0] for x in operands(node)], op_kind(node)
        results = self.local(node)
        view = _view(node, kind, ins, results)
        if view is not None:
            heap.hold(view.block)
            return [view]
        out = [Held(heap.new(float(prod(s) * size)), s, _strides(kind, s, ins), size) for s, size in results]
        scratch = op_scratch(self._kernel(node, kind), [x.nbytes for x in ins], [x.nbytes for x in out])
        heap.look(scratch.forward)
        if saved is not None and node.meta.get("grad"):
            self._save(heap, node, kind, ins, out, scratch.saved, saved)
        elif scratch.saved:
            heap.look(scratch.saved)
        return out

    def _saves(self, node: fx.Node) -> bool:
        """Whether autograd saves something for the op's backward."""
        if node not in self.rules or not node.meta.get("grad"):
            return False
        ins, outs = ([float(prod(s) * size) for x in of for s, size in self.local(x)] for of in (operands(node), [node]))
        return bool(self.rules[node].saved or op_scratch(self._kernel(node, op_kind(node)), ins, outs).saved)

    def _keep(self, heap: Heap, node: fx.Node, env, saved) -> None:
        """What an op saves that is not computed again."""
        if node in self.rules and node.meta.get("grad"):
            self._save(heap, node, op_kind(node), [env[x][0] for x in operands(node)], env[node], 0.0, saved)

    def _kernel(self, node: fx.Node, kind: str) -> str:
        """``kind``, or that of the local kernel that runs in the op's place."""
        strategy = node.meta.get("strategy")
        if kind == "cross_entropy_loss" and any(c.comms and k > 1 for c, k in zip(strategy.choices, self.sizes)):
            return "vocab_cross_entropy"
        return kind

    def _save(self, heap: Heap, node: fx.Node, kind: str, ins: list[Held], out: list[Held], hidden: float, saved) -> None:
        inputs = operands(node)
        wanted = self.rules[node].saved
        if self.rules[node].fallback:
            wanted = (*range(len(ins)), *(-1 - i for i in range(len(out))))
        if self._kernel(node, kind) == "vocab_cross_entropy":
            wanted = (0, *wanted)
        for i in wanted:
            held = ins[i] if i >= 0 else out[-1 - i]
            if i >= 0 and _gathered(inputs[i]) and "region" not in node.meta:
                continue  # gathered again in backward; within a region they are made again together with the rest
            saved[node].append(heap.file(heap.hold(held.block), held.block.category if _standing(held.block) else ACTIVATIONS))
        if hidden:
            saved[node].append(heap.new(hidden, ACTIVATIONS))

    def _convert(self, heap: Heap, node: fx.Node, x: Held) -> Held:
        step = node.meta["step"]
        shape, itemsize = self.local(node)[0]
        if step.conversion.forward == "none":
            heap.hold(x.block)
            return Held(x.block, shape, x.strides, itemsize)
        out = Held(heap.new(float(prod(shape) * itemsize)), shape, contiguous(shape), itemsize)
        together = self.buckets.get(node.meta.get("bucket"), [])
        if len(together) < 2:
            heap.look(self._moving(step, step.conversion.forward, x.nbytes, out.nbytes))
        elif node is together[0]:
            heap.look(self._bucket_scratch(together) + self._whole(together[1:]))
        return out

    def _whole(self, nodes: Iterable[fx.Node]) -> float:
        return sum(float(prod(shape) * itemsize) for node in nodes for shape, itemsize in self.local(node))

    def _bucket_scratch(self, together: list[fx.Node]) -> float:
        """Beside what is gathered together: one buffer of all, the pieces in one, and what the backend copies."""
        whole = self._whole(together)
        return whole * (1 + 1 / self.sizes[0]) + (whole if self.copies else 0.0)

    def _moving(self, step, kind: str, before: float, after: float) -> float:
        shard, layout = (step.dst, step.after) if step.dst.is_shard else (step.src, step.before)
        first = shard.is_shard and shard.dim == 0 and blocks_now(layout, step.axis, self.sizes) == 1
        return conversion_scratch(kind, before, after, first, self.copies)

    # --- backward ----------------------------------------------------------------------------------------------------

    def backward(self, heap: Heap, placeholders: dict[fx.Node, Held], left: Left, given: Iterable[Block], leaf: Callable) -> None:
        """Uses up what forward left.

        Args:
            given: the gradient of each output that has one, in their order.
            leaf: ``leaf(placeholder, block)`` takes over the gradient of one.
        """
        self.heap, self.leaf = heap, leaf
        self.grads: dict[tuple[fx.Node, int], Block] = {}
        self.pending = dict(self.readers)
        self.regathered: dict[fx.Node, Block] = {}
        trained = [x for x in self.program.output.args[0] if isinstance(x, fx.Node) and x.meta.get("trained", x.meta.get("grad"))]
        if self.program.loss is not None:
            trained = [self.program.leaves[self.program.loss]]
        for x, block in zip(trained, given):
            self._give(x, block)
        for number, run in reversed(self.runs):
            saved = left.saved
            if number is not None:
                saved = defaultdict(list)
                if any(self._incoming(node) for node in run):
                    self._recompute(run, placeholders, left, number, saved)
            for node in reversed(run):
                self._backward(node, saved)
            if number is not None:
                for block in [*left.inputs[number].values(), *(h.block for node in run for h in left.kept.pop(node, ()))]:
                    heap.drop(block)
        for blocks in left.saved.values():
            for block in blocks:
                heap.drop(block)
        left.saved.clear()

    def _recompute(self, run: list[fx.Node], placeholders, left: Left, number: int, saved) -> None:
        """Forward of a region up to the last op that saves something."""
        last = max((i for i, node in enumerate(run) if self._saves(node)), default=-1)
        run = run[: last + 1]
        inside = set(run)
        read = {x: None for node in run for x in node.all_input_nodes if x not in inside}
        env: dict[fx.Node, list[Held]] = {}
        for x in read:
            if x.name in self.program.params:
                env[x] = [placeholders[x]]
            else:
                shape, itemsize = self.local(result_of(x)[0])[result_of(x)[1]]
                env[x] = [Held(left.inputs[number][x], shape, contiguous(shape), itemsize)]
        self._body(self.heap, run, env, saved, set(), left.kept)

    def _incoming(self, node: fx.Node) -> list[Block]:
        return [self.grads[node, i] for i in range(len(tensors(node.meta["val"]))) if (node, i) in self.grads]

    def _backward(self, node: fx.Node, saved) -> None:
        if is_getitem(node) or not node.meta.get("grad"):
            return
        heap, incoming = self.heap, self._incoming(node)
        if incoming:
            inputs = operands(node)
            wanted = [i for i, x in enumerate(inputs) if x.meta.get("grad")]
            gathered = [block for i in self._reads_again(node, inputs) for block in self._regather(inputs[i])]
            out = {i: self._gradient(node, inputs[i], incoming[0]) for i in wanted}
            heap.look(self._scratch(node, inputs).backward)
            for block in gathered:
                heap.drop(block)
            for index in range(len(tensors(node.meta["val"]))):
                block = self.grads.pop((node, index), None)
                if block is not None:
                    heap.drop(block)
            for block in saved.pop(node, ()):
                heap.drop(block)
            for i, block in out.items():
                self._give(inputs[i], block)
        else:
            for block in saved.pop(node, ()):
                heap.drop(block)

    def _reads_again(self, node: fx.Node, inputs) -> list[int]:
        if node.target is ops.convert:
            return []
        return [i for i in self.rules[node].saved if i >= 0 and _gathered(inputs[i]) and "region" not in node.meta]

    def _regather(self, x: fx.Node) -> list[Block]:
        """Gather a weight again; with it come those that were gathered together with it, to be read later."""
        if x in self.regathered:
            return [self.regathered.pop(x)]
        together = [node for node in self.buckets.get(x.meta.get("bucket"), [x]) if self._read_again(node)]
        blocks = {node: self.heap.new(self._whole([node])) for node in together}
        if len(together) > 1:
            self.heap.look(self._bucket_scratch(together))
        else:
            step, nbytes = x.meta["step"], self._whole([x])
            self.heap.look(self._moving(step, step.conversion.forward, nbytes / self.sizes[step.axis], nbytes))
        found = blocks.pop(x)
        self.regathered.update(blocks)
        return [found]

    def _read_again(self, node: fx.Node) -> bool:
        """Whether the backward of an op reads a gathered weight."""
        users = [user for user in node.users if user in self.rules and "region" not in user.meta]
        return any(x is node for user in users for i, x in enumerate(operands(user)) if i in self.rules[user].saved)

    def _scratch(self, node: fx.Node, inputs):
        if node.target is ops.convert:
            return op_scratch("", (), ())
        ins = [float(prod(self.local(result_of(x)[0])[result_of(x)[1]][0]) * x.meta["val"].element_size()) for x in inputs]
        outs = [float(prod(s) * size) for s, size in self.local(node)]
        return op_scratch(self._kernel(node, op_kind(node)), ins, outs)

    def _gradient(self, node: fx.Node, x: fx.Node, incoming: Block) -> Block:
        """The gradient of one operand: a block of its own, or the incoming one handed on."""
        heap, kind = self.heap, op_kind(node)
        shape, itemsize = self.local(result_of(x)[0])[result_of(x)[1]]
        nbytes = float(prod(shape) * itemsize)
        if node.target is ops.convert:
            step = node.meta["step"]
            if step.conversion.backward == "none":
                return heap.hold(incoming)
            block = heap.new(nbytes)
            together = self.buckets.get(node.meta.get("bucket"), [])
            if len(together) < 2:
                heap.look(self._moving(step, step.conversion.backward, incoming.nbytes, nbytes))
            elif node is together[-1]:  # the first to be met, and all their gradients are there
                heap.look(self._bucket_scratch(together))
            return block
        own = self.local(node)[0]
        if kind in ("cat", "stack"):
            return heap.hold(incoming)
        if kind in PASSES_ON and prod(own[0]) == prod(shape) and own[1] == itemsize:
            return heap.hold(incoming)
        if kind == "expand" and prod(own[0]) == prod(shape):
            return heap.hold(incoming)
        if kind == "sum":
            return heap.hold(incoming)
        return heap.new(nbytes)

    def _give(self, x: fx.Node, block: Block) -> None:
        """Add a gradient to what a value has. A parameter's goes to ``leaf`` when all its readers have sent theirs."""
        key = result_of(x)
        old = self.grads.get(key)
        if old is None:
            self.grads[key] = block
        elif old.holders == 1:
            self.heap.drop(block)
        else:
            self.grads[key] = self.heap.new(old.nbytes)
            self.heap.drop(old)
            self.heap.drop(block)
        if x.op == "placeholder":
            self.pending[x] = self.pending.get(x, 1) - 1  # a value that is only handed on to the next stage has no reader here
            if self.pending[x] <= 0:
                self.leaf(x, self.grads.pop(key))


def _gathered(x: fx.Node) -> bool:
    """Whether an operand is a weight of ZeRO level 3, gathered where it is read."""
    return x.target is ops.convert and x.args[0].meta.get("zero") == 3


def _standing(block: Block) -> bool:
    return block.category not in (TRANSIENT, ACTIVATIONS)


def _module(run: list[fx.Node]) -> str:
    """Of a statement of the emitted module; of a region, what its ops' paths have in common."""
    if len(run) == 1:
        return run[0].meta.get("module", "")
    return ".".join(os.path.commonprefix([node.meta["module"].split(".") for node in run if node.meta.get("module")]))


def _release(heap: Heap, env: dict[fx.Node, list[Held]], node: fx.Node) -> None:
    for held in env.pop(node, ()):
        heap.drop(held.block)


def _view(node: fx.Node, kind: str, ins: list[Held], results) -> Held | None:
    """The result, where it shares its operand's memory."""
    if len(results) != 1 or not ins:
        return None
    (shape, itemsize), x = results[0], ins[0]
    if kind in RESHAPES:
        strides = viewed(x.shape, x.strides, shape)
    elif kind == "contiguous":
        strides = x.strides if x.strides == contiguous(x.shape) else None
    elif kind == "to":
        strides = x.strides if x.itemsize == itemsize else None
    elif kind in PERMUTES:
        strides = _permuted(node, kind, x, shape)
    else:
        return None
    return None if strides is None else Held(x.block, shape, strides, itemsize)


def _permuted(node: fx.Node, kind: str, x: Held, shape: Ints) -> Ints:
    rank, strides = len(x.shape), list(x.strides)
    if kind == "permute":
        return tuple(strides[d] for d in node.args[1])
    if kind in ("transpose", "t", "numpy_T"):
        a, b = node.args[1:3] if kind == "transpose" else (0, rank - 1)
        if rank:
            strides[a], strides[b] = strides[b], strides[a]
        return tuple(strides)
    if kind == "unsqueeze":
        d = node.args[1] % (rank + 1)
        return (*strides[:d], (strides[d] * x.shape[d] if d < rank else 1), *strides[d:])
    if kind in ("squeeze", "select"):
        gone = set(range(rank)) - set(_kept(x.shape, shape, node, kind))
        return tuple(s for d, s in enumerate(strides) if d not in gone)
    if kind == "expand":
        lead = len(shape) - rank
        return tuple(0 if d < lead or (x.shape[d - lead] == 1 and n != 1) else strides[d - lead] for d, n in enumerate(shape))
    if kind == "slice" and len(node.args) > 4:
        strides[node.args[1]] *= node.args[4]
    return tuple(strides) if len(strides) == len(shape) else contiguous(shape)


def _kept(before: Ints, after: Ints, node: fx.Node, kind: str) -> list[int]:
    if kind == "select":
        return [d for d in range(len(before)) if d != node.args[1] % len(before)]
    dims = node.args[1] if len(node.args) > 1 else list(range(len(before)))
    dims = {d % len(before) for d in ([dims] if isinstance(dims, int) else dims)}
    return [d for d in range(len(before)) if d not in dims or before[d] != 1]


def _strides(kind: str, shape: Ints, ins: list[Held]) -> Ints:
    """Of a new result: elementwise ops keep their operand's order, attention's kernels write heads beside each other."""
    if "attention" in kind and len(shape) == 4:
        b, h, s, d = shape
        return (s * h * d, d, h * d, 1)
    like = next((x for x in ins if x.shape == shape), None)
    if like is None or kind in ("linear", "addmm", "mm", "bmm", "matmul", "embedding", "cat"):
        return contiguous(shape)
    return dense_like(shape, like.strides)
