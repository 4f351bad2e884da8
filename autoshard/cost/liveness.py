"""One micro-batch on one rank, op by op: what its forward leaves for backward, and what comes and goes on the way.

Follows what the emitted module and autograd do: a local name is deleted where its module ends, a saved tensor is released when its op's
backward has run, gradients of a value that is read twice are added, a region that is computed again keeps its inputs alone.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from math import prod

from torch import fx

from autoshard import ops
from autoshard.cost.heap import ACTIVATIONS, TRANSIENT, Block, Heap
from autoshard.cost.scratch import NOTHING, Scratch, conversion_scratch, op_scratch
from autoshard.cost.strides import Ints, contiguous, of_result, of_view
from autoshard.placement import R, blocks_now, local_shape
from autoshard.program import Program, is_getitem, op_kind, operands, result_of, tensors
from autoshard.rules import rule_for

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


@dataclass(frozen=True)
class Traits:
    """What is known of an op before it runs; ops that are alike share it.

    kind: "convert" of a conversion. results: (local shape, bytes an element), on the fullest rank; nbytes: of each of them.
    saved: what autograd saves, operand i, or -1-i for result i, and whether that, or a kernel's own (``scratch.saved``), is anything.
    again: operands that are weights to be gathered again in backward.
    gradients: (operand, bytes of its gradient; None where it is the incoming one, handed on) of those that have one.
    """

    kind: str
    results: tuple[tuple[Ints, int], ...]
    nbytes: tuple[float, ...]
    scratch: Scratch
    saved: tuple[int, ...]
    saves: bool
    again: tuple[int, ...]
    gradients: tuple[tuple[int, float | None], ...]


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
        self.inputs = {n: operands(n) for n in self.ops}
        self.values = {n: [result_of(x) for x in found] for n, found in self.inputs.items()}
        self.traits: dict[fx.Node, Traits] = {}
        self.laid: dict[tuple, Ints | list[Ints]] = {}  # strides of results, by traits and strides of operands; of a view alone, no list
        known: dict[tuple, Traits] = {}
        for node in self.ops:
            if not is_getitem(node):
                key = self._like(node)
                if key not in known:
                    known[key] = self._traits(node)
                self.traits[node] = known[key]
        self.keep = set(program.output.all_input_nodes)
        self.runs: list[tuple[int | None, list[fx.Node]]] = []
        for number, run in groupby(self.ops, lambda node: node.meta.get("region")):
            run = list(run)
            if number is None or not any(n.meta.get("grad") for n in run):
                self.runs += [(None, [n]) for n in run]
            else:
                self.runs.append((number, run))
        self.made = [run if number is None else self._made(run) for number, run in self.runs]
        self.dead, self.alive = releases(self.made, [run for _, run in self.runs], self.keep, False)
        self.buckets: dict[int, list[fx.Node]] = defaultdict(list)  # weights of ZeRO level 3 that are gathered together
        for node in self.ops:
            if "bucket" in node.meta:
                self.buckets[node.meta["bucket"]].append(node)
        self.readers: dict[fx.Node, int] = defaultdict(int)  # of parameters: how many ops send them a gradient
        for node in self.ops:
            if node.meta.get("grad"):
                for x in self.inputs[node]:
                    if x.op == "placeholder" and x.meta.get("grad"):
                        self.readers[x] += 1

    # --- what is known before ----------------------------------------------------------------------------------------

    def _like(self, node: fx.Node) -> tuple:
        """Equal for ops with the same traits: a rule says shapes, dtypes, constants and gradients."""
        meta, inputs = node.meta, self.inputs[node]
        layouts = tuple([(producer.meta.get("layouts"), index) for producer, index in self.values[node]])
        gathered = tuple([_gathered(x) for x in inputs])
        if node in self.rules:
            return id(self.rules[node]), id(meta.get("strategy")), meta.get("layouts"), layouts, gathered, "region" in meta
        val, (x,) = meta["val"], inputs
        return meta["step"], tuple(val.shape), val.dtype, meta.get("grad"), x.meta.get("grad"), meta.get("layouts"), layouts

    def _traits(self, node: fx.Node) -> Traits:
        inputs, rule = self.inputs[node], self.rules.get(node)
        results = tuple(self.local(node))
        read = [self.local(producer)[index] for producer, index in self.values[node]]
        ins, outs = ([float(prod(shape) * itemsize) for shape, itemsize in of] for of in (read, results))
        wanted = [i for i, x in enumerate(inputs) if x.meta.get("grad")] if results else []
        if rule is None:
            handed = node.meta["step"].conversion.backward == "none"
            return Traits("convert", results, tuple(outs), NOTHING, (), False, (), tuple([(i, None if handed else ins[i]) for i in wanted]))
        kind = op_kind(node)
        kernel = self._kernel(node, kind)
        scratch = op_scratch(kernel, ins, outs)
        gathered = {i for i, x in enumerate(inputs) if _gathered(x) and "region" not in node.meta}
        saved = rule.saved
        if rule.fallback:
            saved = (*range(len(ins)), *(-1 - i for i in range(len(outs))))
        if kernel == "vocab_cross_entropy":
            saved = (0, *saved)
        return Traits(
            kind,
            results,
            tuple(outs),
            scratch,
            tuple([i for i in saved if i not in gathered]),  # those are gathered again; in a region they are made again with the rest
            bool(rule.saved or scratch.saved),
            tuple([i for i in rule.saved if i in gathered]),
            tuple([(i, None if hands_on(kind, results[0], read[i]) else ins[i]) for i in wanted]),
        )

    def _kernel(self, node: fx.Node, kind: str) -> str:
        """``kind``, or that of the local kernel that runs in the op's place."""
        strategy = node.meta.get("strategy")
        if kind == "cross_entropy_loss" and any(c.comms and k > 1 for c, k in zip(strategy.choices, self.sizes)):
            return "vocab_cross_entropy"
        return kind

    def _made(self, run: list[fx.Node]) -> list[fx.Node]:
        """What is read behind a region."""
        inside = set(run)
        return [node for node in run if node in self.keep or any(user not in inside for user in node.users)]

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
        for (number, run), made, dead in zip(self.runs, self.made, self.dead):
            if number is None:
                self._op(heap, run[0], env, left.saved)
            else:
                self._region(heap, number, run, made, env, left)
            for node in dead:
                _release(heap, env, node)
        for x in self.program.output.args[0]:
            if isinstance(x, fx.Node):
                left.outputs.append(heap.hold(env[x][0].block))
        for node in self.alive:
            _release(heap, env, node)
        return left

    def _region(self, heap: Heap, number: int, run: list[fx.Node], made: list[fx.Node], env, left: Left) -> None:
        inside = set(run)
        read = {x: None for node in run for x in node.all_input_nodes if x not in inside and x.name not in self.program.params}
        left.inputs[number] = {x: heap.file(heap.hold(env[x][0].block), ACTIVATIONS) for x in read}
        self._body(heap, run, env, None, set(made), left.kept)

    def _body(self, heap: Heap, run: list[fx.Node], env, saved, made: set[fx.Node], kept: dict[fx.Node, list[Held]]) -> None:
        """The statements of a region's method. saved: None in forward; in backward what is saved is put there, what is kept is found."""
        steps = [[node] for node in run]
        for node, dead in zip(run, releases(steps, steps, made, True)[0]):
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
            for old in dead:
                _release(heap, env, old)

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
        ins, traits = [env[x][0] for x in self.inputs[node]], self.traits[node]
        strides = self._laid(node, traits, ins)
        if isinstance(strides, tuple):
            heap.hold(ins[0].block)
            ((shape, itemsize),) = traits.results
            return [Held(ins[0].block, shape, strides, itemsize)]
        out = [Held(heap.new(n), shape, order, size) for n, (shape, size), order in zip(traits.nbytes, traits.results, strides)]
        scratch = traits.scratch
        heap.look(scratch.forward)
        if saved is not None and node.meta.get("grad"):
            self._save(heap, node, ins, out, scratch.saved, saved)
        elif scratch.saved:
            heap.look(scratch.saved)
        return out

    def _laid(self, node: fx.Node, traits: Traits, ins: list[Held]) -> Ints | list[Ints]:
        """Strides of the results; of one that lies in the memory of the first operand, no list."""
        key = (id(traits), *[x.strides for x in ins])
        if key not in self.laid:
            view = of_view(node, traits.kind, ins, traits.results)
            self.laid[key] = [of_result(traits.kind, shape, ins) for shape, _ in traits.results] if view is None else view
        return self.laid[key]

    def _keep(self, heap: Heap, node: fx.Node, env, saved) -> None:
        """What an op saves that is not computed again."""
        if node in self.rules and node.meta.get("grad"):
            self._save(heap, node, [env[x][0] for x in self.inputs[node]], env[node], 0.0, saved)

    def _save(self, heap: Heap, node: fx.Node, ins: list[Held], out: list[Held], hidden: float, saved) -> None:
        found = saved[node]
        for i in self.traits[node].saved:
            block = (ins[i] if i >= 0 else out[-1 - i]).block
            found.append(heap.file(heap.hold(block), block.category if _standing(block) else ACTIVATIONS))
        if hidden:
            found.append(heap.new(hidden, ACTIVATIONS))

    def _convert(self, heap: Heap, node: fx.Node, x: Held) -> Held:
        step, traits = node.meta["step"], self.traits[node]
        ((shape, itemsize),) = traits.results
        if step.conversion.forward == "none":
            heap.hold(x.block)
            return Held(x.block, shape, x.strides, itemsize)
        out = Held(heap.new(traits.nbytes[0]), shape, contiguous(shape), itemsize)
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

    def backward(
        self,
        heap: Heap,
        placeholders: dict[fx.Node, Held],
        left: Left,
        given: Iterable[Block],
        leaf: Callable,
        forks: Collection[fx.Node] = (),
    ) -> list[Block]:
        """Uses up what forward left. The gradients that arrive at ``forks`` are held, and returned.

        Args:
            given: the gradient of each output that has one, in their order.
            leaf: ``leaf(placeholder, block)`` takes over the gradient of one.
        """
        self.heap, self.leaf, self.forks = heap, leaf, forks
        self.aside: list[Block] = []
        self.grads: dict[tuple[fx.Node, int], Block] = {}
        self.pending = dict(self.readers)
        self.regathered: dict[fx.Node, Block] = {}
        trained = [x for x in self.program.output.args[0] if isinstance(x, fx.Node) and x.meta.get("trained", x.meta.get("grad"))]
        if self.program.loss is not None:
            trained = [self.program.leaves[self.program.loss]]
        for x, block in zip(trained, given):
            self._give(x, result_of(x), block)
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
        return self.aside

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

    def _saves(self, node: fx.Node) -> bool:
        """Whether autograd saves something for the op's backward."""
        return node in self.traits and bool(node.meta.get("grad")) and self.traits[node].saves

    def _incoming(self, node: fx.Node) -> list[Block]:
        """Gradients of the results, as far as there are any."""
        grads = self.grads
        return [grads[node, i] for i in range(len(tensors(node.meta["val"]))) if (node, i) in grads]

    def _backward(self, node: fx.Node, saved) -> None:
        if node not in self.traits or not node.meta.get("grad"):
            return
        heap, incoming = self.heap, self._incoming(node)
        if incoming:
            if node in self.forks:
                self.aside += [heap.hold(block) for block in incoming]
            inputs, traits = self.inputs[node], self.traits[node]
            gathered = [block for i in traits.again for block in self._regather(inputs[i])]
            out = [(i, self._gradient(node, nbytes, incoming[0])) for i, nbytes in traits.gradients]
            heap.look(traits.scratch.backward)
            for block in gathered:
                heap.drop(block)
            for index in range(len(tensors(node.meta["val"]))):
                block = self.grads.pop((node, index), None)
                if block is not None:
                    heap.drop(block)
            for block in saved.pop(node, ()):
                heap.drop(block)
            for i, block in out:
                self._give(inputs[i], self.values[node][i], block)
        else:
            for block in saved.pop(node, ()):
                heap.drop(block)

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
        return any(x is node for user in users for i, x in enumerate(self.inputs[user]) if i in self.rules[user].saved)

    def _gradient(self, node: fx.Node, nbytes: float | None, incoming: Block) -> Block:
        """The gradient of an operand: a block of its own, of so many bytes, or the incoming one handed on."""
        heap = self.heap
        if nbytes is None:
            return heap.hold(incoming)
        block = heap.new(nbytes)
        if node.target is ops.convert:
            step, together = node.meta["step"], self.buckets.get(node.meta.get("bucket"), [])
            if len(together) < 2:
                heap.look(self._moving(step, step.conversion.backward, incoming.nbytes, nbytes))
            elif node is together[-1]:  # the first to be met, and all their gradients are there
                heap.look(self._bucket_scratch(together))
        return block

    def _give(self, x: fx.Node, key: tuple[fx.Node, int], block: Block) -> None:
        """Add a gradient to what a value has, ``key``. A parameter's goes to ``leaf`` when all its readers have sent theirs."""
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


def hands_on(kind: str, result: tuple[Ints, int], operand: tuple[Ints, int]) -> bool:
    """Whether an op's backward gives an operand the gradient that it is given itself."""
    if kind in ("cat", "stack", "sum"):
        return True
    if prod(result[0]) != prod(operand[0]):
        return False
    return kind == "expand" or (kind in PASSES_ON and result[1] == operand[1])


def releases(
    made: list[list[fx.Node]], runs: list[list[fx.Node]], keep: set[fx.Node], all_at_the_end: bool
) -> tuple[list[list[fx.Node]], list[fx.Node]]:
    """Names that are deleted behind each statement, and those that are left: where a module ends, what nothing reads any more.

    Args:
        made: what each statement makes. runs: the ops in it. keep: names that stay.
        all_at_the_end: whether the last one deletes all others, tuples too.
    """
    last = {x: i for i, run in enumerate(runs) for node in run for x in node.all_input_nodes}
    modules = [_module(run) for run in runs]
    found: list[list[fx.Node]] = []
    alive: list[fx.Node] = []
    for i, new in enumerate(made):
        alive += new
        end = i + 1 == len(made)
        dead: list[fx.Node] = []
        if end or modules[i + 1] != modules[i]:
            left = []
            for node in alive:
                done = last.get(node, i) <= i and not isinstance(node.meta["val"], (tuple, list)) or (end and all_at_the_end)
                (dead if done and node not in keep else left).append(node)
            alive = left
        found.append(dead)
    return found, alive


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
