"""Cut the batch into micro-batches: sharding the batch factor on one more axis, *time*, with the same rules.

On the time axis no collective exists but the final sum, so whether a model may be cut, and how its loss is combined, is derived: every
value must be S on that axis, or the same for every micro-batch, or reach the loss as a summand (P). Values without a gradient that depend
on the inputs alone may be converted all the same: they are computed for the whole batch before the first micro-batch runs (*extras*).

before (batch 8)::

    sum_1 = aten.cross_entropy_loss(logits, labels, reduction=sum)     # over 8 samples
    count = aten.sum(aten.ne(labels, -100))
    loss = aten.div(sum_1, count)

after (4 micro-batches)::

    count = placeholder                                                # extra "P -> R": summed over the micro-batches
    sum_1 = aten.cross_entropy_loss(logits, labels, reduction=sum)     # over 2 samples
    loss = aten.div(sum_1, count)                                      # P: the engine adds the micro-batches' losses
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from math import inf, prod

import torch
from torch import fx

from autoshard import ops
from autoshard.errors import PlanError
from autoshard.passes.localize import local_call
from autoshard.placement import R_STAR, P, Placement, R, S, local_shape
from autoshard.program import Program, ancestors, draws, is_getitem, new_node, operands, result_of, tensors, where
from autoshard.rules import rule_for
from autoshard.rules.notation import Choice, OpRule, choices

aten = torch.ops.aten


@dataclass(frozen=True)
class Extra:
    """A value of the prologue, converted over time from ``src`` to ``dst``; ``name`` is its placeholder in the program."""

    name: str
    src: Placement
    dst: Placement


@dataclass
class Microbatched:
    """The program of one micro-batch, and the prologue that computes its extras (None if it has none).

    The prologue reads inputs, buffers and constants of one micro-batch; its output leaves are the extras, in order.
    """

    program: Program
    prologue: Program | None = None
    extras: tuple[Extra, ...] = ()


def microbatch(program: Program, m: int) -> Microbatched:
    """The program of one of ``m`` equal micro-batches.

    Raises PlanError, naming the op, if a value mixes the samples of different micro-batches, or the batch is not divisible by ``m``.
    """
    if m == 1:
        out = program.copy()
        marks = batch_placements(out)
        for node in out.graph.nodes:
            node.meta["time"] = R
            node.meta["batch"] = marks.get(node, R)
        return Microbatched(out)
    return _Cut(program, m).run()


def batch_placements(program: Program) -> dict[fx.Node, Placement]:
    """Where the samples of the batch lie in each value: S(d) if along dim d; values in which they have met are left out."""
    batch = next((i.shape[i.batch_dim] for i in program.inputs.values() if i.batch_dim is not None), 1)
    if batch == 1:
        return {}
    cut = _Cut(program, batch)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            cut._place_input(node)
        elif node.op == "call_function" and not is_getitem(node):
            try:
                cut._place_op(node)
            except PlanError:
                cut.time.update({(node, i): R for i in range(len(tensors(node.meta["val"])))})
    return {node: p for (node, index), p in cut.time.items() if index == 0 and p.is_shard}


class _Cut:
    def __init__(self, program: Program, m: int):
        self.program, self.m = program, m
        self.time: dict[tuple[fx.Node, int], Placement] = {}
        self.chosen: dict[fx.Node, Choice] = {}
        self.graph = fx.Graph()
        self.built: dict[tuple[fx.Node, Placement], fx.Node] = {}
        self.extras: dict[str, tuple[Extra, fx.Node]] = {}
        self.pure: set[fx.Node] = set()  # without gradient, from inputs, buffers and constants alone
        self.dirty: set[fx.Node] = set()  # need extras themselves: they can't be computed in the prologue
        self.inputs: dict[fx.Node, list[fx.Node]] = {}
        self.rules: dict[fx.Node, OpRule] = {}
        self.known: dict[tuple, tuple[int, Choice]] = {}
        self.pieces: dict[tuple, torch.Tensor] = {}

    # --- natural placements ------------------------------------------------------------------------------------------

    def run(self) -> Microbatched:
        for spec in self.program.inputs.values():
            if spec.batch_dim is not None and spec.shape[spec.batch_dim] % self.m:
                raise PlanError(
                    f"input {spec.name!r} has a batch of {spec.shape[spec.batch_dim]}, which {self.m} micro-batches do not divide",
                    hint="choose a number of micro-batches that divides the batch, or pad the batch",
                )
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._place_input(node)
            elif node.op == "call_function" and not is_getitem(node):
                self._place_op(node)
        self._refuse_updates()
        leaves = []
        for leaf in self.program.leaves:
            if isinstance(leaf, fx.Node):
                now = self._now(leaf)
                leaves.append((leaf, P if now == R_STAR and leaf.meta.get("grad") else now))
            else:
                leaves.append(leaf)
        main = self._assemble(leaves, self.program.loss, self.program.updates)
        if not self.extras:
            return Microbatched(main)
        extras, self.extras = self.extras, {}
        prologue = self._assemble([(node, extra.src) for extra, node in extras.values()], None)
        if self.extras:
            node = next(iter(self.extras.values()))[1]
            raise PlanError(
                f"the batch can't be cut into {self.m} micro-batches: a value that is needed before the first of them mixes samples",
                where=where(node),
                hint="use microbatches=1",
            )
        read = {n.name for n in prologue.graph.nodes if n.op == "placeholder" and n.name in prologue.params and n.users}
        for node in main.graph.nodes:
            if node.op == "placeholder" and node.name in read:
                node.meta["prologue"] = True
        return Microbatched(main, prologue, tuple(extra for extra, _ in extras.values()))

    def _refuse_updates(self) -> None:
        """A buffer's new value is taken from the last micro-batch, so it must be the same for all of them."""
        for name, leaf in zip(self.program.updates, self.program.leaves[len(self.program.results) :]):
            if self._now(leaf) not in (R, R_STAR):
                raise PlanError(
                    f"forward changes the buffer {name!r} by the samples of the batch, and {self.m} micro-batches would each change it",
                    where=where(leaf),
                    hint="use microbatches=1",
                )

    def _place_input(self, node: fx.Node) -> None:
        if node.name in self.program.inputs:
            dim = self.program.inputs[node.name].batch_dim
            self.time[node, 0] = R if dim is None else S(dim)
            self.pure.add(node)
        else:
            param = self.program.params[node.name]
            self.time[node, 0] = R_STAR if param.requires_grad else R
            if not param.requires_grad:
                self.pure.add(node)

    def _now(self, operand: fx.Node) -> Placement:
        return self.time[result_of(operand)]

    def _fits(self, operand: fx.Node, now: Placement, wanted: Placement) -> bool:
        return now == wanted or (not operand.meta.get("grad") and {now, wanted} <= {R, R_STAR})

    def _place_op(self, node: fx.Node) -> None:
        inputs = self.inputs[node] = operands(node)
        rule = self.rules[node] = rule_for(node)
        now = [self._now(x) for x in inputs]
        pure = all(result_of(x)[0] in self.pure for x in inputs) and not node.meta.get("grad") and not draws(node)
        if pure:
            self.pure.add(node)
        traits = [(result_of(x)[0] in self.pure, x.op == "call_function" and not is_getitem(x)) for x in inputs]
        key = id(rule), tuple(now), tuple(traits)  # what the choice depends on, unless more of the graph was asked
        if key not in self.known:
            found, asked = self._best(node, rule, inputs, now)
            if not asked:
                self.known[key] = found
        else:
            found = self.known[key]
        cost, choice = found
        self.chosen[node] = choice
        if cost or any(result_of(x)[0] in self.dirty for x in inputs):
            self.dirty.add(node)
        for i in range(len(tensors(node.meta["val"]))):
            p = choice.results[min(i, len(choice.results) - 1)]
            self.time[node, i] = R if p == R_STAR and not node.meta.get("grad") else p

    def _best(self, node: fx.Node, rule: OpRule, inputs: list[fx.Node], now: list[Placement]) -> tuple[tuple[int, Choice], bool]:
        """The choice that converts least, with what it converts; and whether it depends on more of the graph than the op itself."""
        best: tuple[int, Choice] | None = None
        asked = False
        for choice in choices(rule, self.m, _blocks(rule, now)):
            if choice.comms:
                continue
            wrong = [(x, b) for x, a, b in zip(inputs, now, choice.operands) if not self._fits(x, a, b) and not self._free(x, a, b)]
            impure = [(x, b) for x, b in wrong if result_of(x)[0] not in self.pure]
            asked = asked or any(self._may_be_reachable(x, p) for x, p in impure)
            if not all(self._reachable(x, p) for x, p in impure):
                continue
            cost = sum(prod(x.meta["val"].shape) for x, _ in wrong) + len(wrong)
            if best is None or cost < best[0]:
                best = (cost, choice)
        if best is None:
            kinds = ", ".join(f"{x.name}: {p}" for x, p in zip(inputs, now))
            raise PlanError(
                f"the batch can't be cut into {self.m} micro-batches: {node.target} mixes the samples of the batch ({kinds})",
                where=where(node),
                hint="use microbatches=1 (and a mesh without pipeline), or write the model so that samples do not meet before the loss",
            )
        return best, asked

    def _reachable(self, operand: fx.Node, wanted: Placement) -> bool:
        """Whether a value of weights alone, the same for all micro-batches, can be computed for one: positions expanded to the batch."""
        return self._may_be_reachable(operand, wanted) and self._rederive(operand, wanted) is not None

    def _may_be_reachable(self, operand: fx.Node, wanted: Placement) -> bool:
        return operand.op == "call_function" and not is_getitem(operand) and self._now(operand) == R_STAR and wanted.is_shard

    def _free(self, operand: fx.Node, now: Placement, wanted: Placement) -> bool:
        """R* -> P needs no communication: every micro-batch takes 1/m of the value."""
        return bool(operand.meta.get("grad")) and now == R_STAR and wanted == P

    # --- the new graph -----------------------------------------------------------------------------------------------

    def _assemble(self, leaves: list, loss: int | None, updates: tuple[str, ...] = ()) -> Program:
        """A program with these leaves, each a constant or (node, time placement)."""
        self.graph, self.built = fx.Graph(), {}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
        for node in _sources([leaf[0] for leaf in leaves if isinstance(leaf, tuple)], self.program):
            self._op(node)  # in order, so that no recursion is deeper than a chain of converted values
        output = self.graph.output([self._get(*leaf) if isinstance(leaf, tuple) else leaf for leaf in leaves])
        output.meta = copy.copy(self.program.output.meta)
        anchor = next(n for n in self.graph.nodes if n.op != "placeholder")
        for node in [n for n in self.graph.nodes if n.op == "placeholder"]:
            anchor.prepend(node)
        self.graph.eliminate_dead_code()
        return Program(self.graph, dict(self.program.params), dict(self._inputs()), loss, self.program.mesh, self.m, updates)

    def _inputs(self):
        old = {node.name: node for node in self.program.graph.nodes if node.op == "placeholder"}
        for name, spec in self.program.inputs.items():
            shape = local_shape(spec.shape, (self.time[old[name], 0],), (self.m,), (0,))
            yield name, type(spec)(spec.name, shape, spec.dtype, spec.batch_dim)

    def _placeholder(self, node: fx.Node) -> None:
        p = self.time[node, 0]
        new = self.graph.placeholder(node.name)
        new.meta = copy.copy(node.meta)
        new.meta.update(time=p, batch=p if p.is_shard else R)
        new.meta["val"] = self._cut_val(node.meta["val"], p)
        self.built[node, p] = new

    def _get(self, operand: fx.Node, wanted: Placement) -> fx.Node:
        """The new node for an operand, in the wanted time placement."""
        producer, index = result_of(operand)
        now = self.time[producer, index]
        if not operand.meta.get("grad") and wanted == R_STAR:
            wanted = R  # without a gradient the two are one
        key = (operand, wanted)
        if key in self.built:
            return self.built[key]
        if now == wanted:
            if is_getitem(operand):
                whole = self._op(producer)
                new = self.graph.call_function(operand.target, (whole, index))
                self._finish(new, operand, whole.meta["val"][index], now)
            else:
                new = self._op(producer)
        elif self._free(operand, now, wanted):
            new = self.graph.call_function(aten.div.Tensor, (self._get(operand, now), self.m))
            self._finish(new, operand, operand.meta["val"], P)
        else:
            choice = self._rederive(operand, wanted)
            new = self._emit(operand, choice) if choice else self._extra(operand, now, wanted)
        self.built[key] = new
        return new

    def _op(self, node: fx.Node) -> fx.Node:
        key = (node, self.time[node, 0])
        if key not in self.built:
            self.built[key] = self._emit(node, self.chosen[node])
        return self.built[key]

    def _rederive(self, node: fx.Node, wanted: Placement) -> Choice | None:
        """Another choice of an op that gives ``wanted`` itself and converts something smaller instead, or nothing."""
        if node.op != "call_function" or is_getitem(node) or not wanted.is_shard or self.time[node, 0] not in (R, R_STAR):
            return None
        best = None
        whole = inf if node in self.dirty else prod(node.meta["val"].shape)
        inputs, rule = self.inputs[node], self.rules[node]
        for choice in choices(rule, self.m, _blocks(rule, [wanted], result=True)):
            if choice.results[0] != wanted or choice.comms or not inputs:
                continue
            wrong = [(x, p) for x, p in zip(inputs, choice.operands) if not self._fits(x, self._now(x), p)]
            if not all(result_of(x)[0] in self.pure or self._reachable(x, p) for x, p in wrong):
                continue
            cost = sum(prod(x.meta["val"].shape) for x, _ in wrong if result_of(x)[0] in self.pure)
            if cost < whole and (best is None or cost < best[0]):
                best = (cost, choice)
        return best[1] if best else None

    def _emit(self, node: fx.Node, choice: Choice) -> fx.Node:
        inputs = self.inputs[node]
        new_inputs = [self._get(x, p) for x, p in zip(inputs, choice.operands)]
        shapes = tuple(tuple(n.meta["val"].shape) for n in new_inputs)
        vals = tensors(node.meta["val"])
        cut = [self._cut_val(v, choice.results[min(i, len(choice.results) - 1)]) for i, v in enumerate(vals)]
        call = local_call(node, shapes, tuple(tuple(v.shape) for v in cut), {"time": choice}, self.rules[node].local)
        replacements = iter(new_inputs)
        args, kwargs = _replace(call.args, inputs, replacements), {k: _replace(v, inputs, replacements) for k, v in call.kwargs.items()}
        if call.target is ops.scaled_sum:  # a mean over samples: the sum of this micro-batch's, divided by the count of all
            x, dims, keepdim, count = args
            total = self.graph.create_node("call_function", aten.sum.dim_IntList, (x, list(dims), keepdim), name=f"{node.name}_sum")
            self._finish(total, node, cut[0], choice.results[0])
            new = self.graph.create_node("call_function", aten.div.Tensor, (total, count), name=node.name)
        else:
            new = new_node(self.graph, call.target, args, kwargs, node.name)
        result = cut[0] if isinstance(node.meta["val"], torch.Tensor) else type(node.meta["val"])(cut)
        self._finish(new, node, result, choice.results[0])
        return new

    def _extra(self, operand: fx.Node, now: Placement, wanted: Placement) -> fx.Node:
        name = f"{operand.name}_of_batch" if wanted == R else f"{operand.name}_of_microbatch"
        new = self.graph.placeholder(name)
        self._finish(new, operand, self._cut_val(operand.meta["val"], wanted), wanted)
        self.extras[new.name] = (Extra(new.name, now, wanted), operand)
        return new

    def _cut_val(self, val, placement: Placement):
        whole = tuple(val.shape)
        key = whole, val.dtype, placement
        if key not in self.pieces:
            shape = local_shape(whole, (placement,), (self.m,), (0,))
            if shape == whole:
                return val
            self.pieces[key] = val.new_empty(shape)
        return self.pieces[key]

    def _finish(self, new: fx.Node, old: fx.Node, val, time: Placement) -> None:
        new.meta = copy.copy(old.meta)
        new.meta.update(val=val, time=time, batch=time if time.is_shard else R)


def _sources(leaves: list[fx.Node], program: Program) -> list[fx.Node]:
    """The ops (not getitems) that the leaves are computed from, in graph order."""
    needed = ancestors(leaves)
    return [n for n in program.graph.nodes if n in needed and n.op == "call_function" and not is_getitem(n)]


def _blocks(rule: OpRule, placements, result: bool = False) -> dict[str, tuple[int, ...]]:
    """Block counts of factors that the given operand (or result) placements would need."""
    found: dict[str, tuple[int, ...]] = {}
    for spec, p in zip(rule.results if result else rule.operands, placements):
        if p.is_shard and p.dim < len(spec):
            before = 1
            for factor in spec[p.dim]:
                size = rule.sizes[factor]
                if p.blocks % before == 0 and p.blocks // before < size:
                    found[factor] = tuple(sorted({1, *found.get(factor, ()), p.blocks // before}))
                before *= size
    return found


def _replace(arg, old: list[fx.Node], new):
    """``arg`` with its tensor operands, met in order, replaced."""
    if isinstance(arg, fx.Node):
        return next(new) if arg in old else arg
    if isinstance(arg, (tuple, list)):
        return type(arg)(_replace(a, old, new) for a in arg)
    return arg
