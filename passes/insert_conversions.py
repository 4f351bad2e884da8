"""Make every change of placement explicit: where a value is not placed as its consumer demands, conversions are inserted.

before (tensor axis of 2)::

    linear = aten.linear(x, w1)           # [R, S(1)]
    linear_1 = aten.linear(linear, w2)    # shard k: [R, P]
    gelu = aten.gelu(linear_1)            # demands [R, R]

after::

    linear = aten.linear(x, w1)           # [R, S(1)]
    linear_1 = aten.linear(linear, w2)    # [R, P]
    linear_1_r = convert(P -> R, tensor)  # [R, R]
    gelu = aten.gelu(linear_1_r)          # [R, R]

A conversion is inserted once per value and pipeline stage, before its first consumer; of a weight of ZeRO level 3 once per consumer, so
that no whole copy is kept from one to the next. An axis along which a weight is whole and every use of it wants R* needs no conversion in
the graph: its gradient is summed once a step (``meta["sync"]``).
"""

from __future__ import annotations

import re

from torch import fx

from autoshard import ops
from autoshard.errors import PlanError
from autoshard.mesh import SHARDED_AXES
from autoshard.placement import R_STAR, Layout, R, route
from autoshard.program import Program, is_getitem, operands, result_of, tensors, where


def insert_conversions(program: Program) -> Program:
    """Nodes need ``strategy``, ``layouts`` and ``stage``; convert nodes are given ``step``, the single-axis step that they take."""
    for node in program.graph.nodes:
        node.meta.pop("sync", None)
    _sync_weights(program)
    done: dict[tuple, fx.Node] = {}
    for node in list(program.graph.nodes):
        strategy = node.meta.get("strategy")
        if node.op == "output":
            _convert_outputs(program, node, done)
        elif node.op == "call_function" and not is_getitem(node) and strategy is not None:
            inputs = operands(node)
            new = [_converted(program, x, layout, node, done) for x, layout in zip(inputs, strategy.operands)]
            if any(a is not b for a, b in zip(inputs, new)):
                waiting = iter(new)
                node.args = _swap(node.args, waiting)
                node.kwargs = _swap(node.kwargs, waiting)
    return program


def _sync_weights(program: Program) -> None:
    """Axes along which a weight is whole and all its uses are R*: the engine sums its gradient, the graph sees R*."""
    demands: dict[fx.Node, list[Layout]] = {}
    for node in program.graph.nodes:
        strategy = node.meta.get("strategy")
        if node.op == "call_function" and not is_getitem(node) and strategy is not None:
            for x, layout in zip(operands(node), strategy.operands):
                if x.name in program.params:
                    demands.setdefault(x, []).append(layout)
    for node, layouts in demands.items():
        if not node.meta.get("grad"):
            continue
        stored = node.meta["layouts"][0]
        axes = tuple(i for i, p in enumerate(stored) if p == R and all(layout[i] == R_STAR for layout in layouts))
        node.meta["sync"] = tuple(SHARDED_AXES[i] for i in axes)
        node.meta["stored"] = stored
        node.meta["layouts"] = (tuple(R_STAR if i in axes else p for i, p in enumerate(stored)),)


def _convert_outputs(program: Program, node: fx.Node, done) -> None:
    """The loss and new values of buffers are made whole. Other outputs leave as they are, but R* (whole, its gradient a summand) is turned
    to R, which is free."""
    leaves = []
    for i, leaf in enumerate(node.args[0]):
        if isinstance(leaf, fx.Node):
            layout = _layout(leaf)
            if program.loss is None or i == program.loss or i >= len(program.results):
                layout = (R,) * len(layout)
            layout = tuple(R if p == R_STAR else p for p in layout)
            leaf = _converted(program, leaf, layout, node, done)
        leaves.append(leaf)
    node.args = (leaves,)


def _layout(operand: fx.Node) -> Layout:
    producer, index = result_of(operand)
    return producer.meta["layouts"][index]


def _converted(program: Program, operand: fx.Node, wanted: Layout, consumer: fx.Node, done) -> fx.Node:
    val = operand.meta["val"]
    src = _layout(operand)
    if src == wanted:
        return operand
    grad = bool(operand.meta.get("grad"))
    steps = route(src, wanted, tuple(val.shape), program.mesh.sizes, grad)
    if steps is None:
        raise PlanError(f"no conversion leads from {src} to {wanted}", where=where(operand))
    stage = consumer.meta.get("stage", 0)
    current = operand
    for step in steps:
        key = (operand, step.after, stage, consumer if operand.meta.get("zero") == 3 else None)
        if key not in done:
            with program.graph.inserting_before(consumer):
                axis = SHARDED_AXES[step.axis]
                call = (current, f"{step.src} -> {step.dst}", axis, 0)
                new = program.graph.create_node("call_function", ops.convert, call, name=_name(operand, step))
            new.meta = {k: v for k, v in operand.meta.items() if k in ("val", "grad", "module", "source", "time")}
            if operand.op == "placeholder":  # weights and inputs belong where they are read
                new.meta.update({k: v for k, v in consumer.meta.items() if k in ("module", "source")})
            new.meta.update(layouts=(step.after,), step=step, stage=stage, of=operand.name, wanted_by=consumer.name)
            done[key] = new
        current = done[key]
    return current


def _name(operand: fx.Node, step) -> str:
    """``linear_1_r``, ``layer_norm_s1``: the value's name and the placement it now has."""
    mark = re.sub(r"\W", "", str(step.dst).replace("R*", "rs").replace("/", "b")).lower()
    base = re.sub(r"_(?:r|rs|p|s\d+(?:b\d+)?)$", "", operand.name)
    return f"{base}_{mark}"


def _swap(arg, new):
    """``arg`` with its tensor operands, met in order, taken from ``new``."""
    if isinstance(arg, fx.Node):
        return next(new) if (tensors(arg.meta.get("val")) and not isinstance(arg.meta["val"], (tuple, list))) else arg
    if isinstance(arg, (tuple, list)):
        return type(arg)(_swap(a, new) for a in arg)
    if isinstance(arg, dict):
        return {k: _swap(v, new) for k, v in arg.items()}
    return arg
