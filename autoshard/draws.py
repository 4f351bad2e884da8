"""Which ops draw random numbers, and their keys: the place of each draw among all that the model makes in a step on one device.

``meta["draw"]`` of an op that draws is a ``Drawn``. Its value is then a function of its key and of positions in the whole value, the same
on any rank that computes it; without it, numbers are those of whoever draws (``program.draws``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from autoshard.errors import PlanError
from autoshard.placement import R, format_layout
from autoshard.program import Program, draws, shape_of, where
from autoshard.rules.call import argument

aten = torch.ops.aten
MODES = ("invariant", "native")
NATIVE = 'use random="native"'


@dataclass(frozen=True)
class Drawn:
    """The draws of an op. key: of the first, counted from the first of the step. count: how many.

    shape: of its numbers, dim by dim that of its result or not cut where that is; None if the op can't draw a piece of them.
    """

    key: int
    count: int
    shape: tuple[int, ...] | None


def keys_of(graph: fx.Graph, read_only: bool) -> tuple[list[int], int]:
    """The keys of all draws in an exported graph, in the order in which the model runs, and how many a step takes.

    read_only: without those of numbers that nothing reads. One device draws them, but torch drops them when it makes a graph functional.
    """
    read = _read(graph)
    keys, total = [], 0
    for node in graph.nodes:
        count = _count(node)
        if not read_only or node in read:
            keys += range(total, total + count)
        total += count
    return keys, total


def number_draws(graph: fx.Graph, keys: list[int]) -> None:
    """Give the ops of a graph, in order, these keys; none, if there are too many or too few."""
    found = {node: _count(node) for node in graph.nodes if _count(node)}
    if sum(found.values()) != len(keys):
        return
    taken = iter(keys)
    for node, count in found.items():
        shape = SHAPES.get(node.target)
        first, *_ = [next(taken) for _ in range(count)]
        node.meta["draw"] = Drawn(first, count, shape(node) if shape else None)


def _read(graph: fx.Graph) -> set[fx.Node]:
    """What the graph's results depend on. An op that writes to a value is read with the value that it writes to, or to a view of."""
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        base, writes = node, False
        while base.op == "call_function" and isinstance(base.target, torch._ops.OpOverload):
            alias = next(iter(base.target._schema.arguments), None)
            if alias is None or alias.alias_info is None or not isinstance(base.args[0], fx.Node):
                break
            writes |= alias.alias_info.is_write and base is node
            base = base.args[0]
        if writes:
            writers.setdefault(base, []).append(node)
    found: set[fx.Node] = set()
    todo = [node for node in graph.nodes if node.op == "output"]
    todo += [writer for base, nodes in writers.items() if base.op == "placeholder" for writer in nodes]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [*node.all_input_nodes, *writers.get(node, ())]
    return found


def without_keys(program: Program, random: str) -> Program:
    """The program itself; under ``random="native"`` its ops have no keys any more. PlanError if there is no such mode."""
    if random not in MODES:
        raise PlanError(f"random={random!r} can't be", hint=f"it is one of {', '.join(MODES)}")
    for node in program.graph.nodes:
        if random == "native":
            node.meta.pop("draw", None)
        elif _count(node):
            raise PlanError(f"the draws of {node.target} can't be numbered as the model makes them", where=where(node), hint=NATIVE)
    return program


def declarations(nodes: Iterable[fx.Node]) -> list[str]:
    """``"dropout": rt.Draw(...)`` for each of these ops of a rank's program that has keys; ``meta["draw_name"]`` is the name."""
    found: dict[str, str] = {}
    for node in nodes:
        if "draw" in node.meta:
            text, name = _declaration(node), node.name
            while found.get(name, text) != text:  # of two programs that call different values so
                name += "_"
            found[name] = text
            node.meta["draw_name"] = name
    return [f'"{name}": {text}' for name, text in found.items()]


def _declaration(node: fx.Node) -> str:
    draw, time, layout = node.meta["draw"], node.meta.get("time", R), (node.meta.get("layouts") or ((R, R),))[0]
    if draw.shape is None:
        if any(p.is_shard for p in (time, *layout)):
            raise PlanError(
                f"{node.target} draws random numbers that can only be drawn whole, but its result is cut: {format_layout(layout)}",
                where=where(node),
                hint=f"pin the value to R, or {NATIVE}",
            )
        return f"rt.Draw({draw.key}, None, count={draw.count})" if draw.count > 1 else f"rt.Draw({draw.key})"
    here = tuple(p if p.is_shard and draw.shape[p.dim] > 1 else R for p in layout)
    parts = [str(draw.key), repr(draw.shape)]
    if time.is_shard or here != (R, R):
        parts.append(f'"{format_layout(here)}"')
    if time.is_shard:
        parts.append(f'time="{time}"')
    return f"rt.Draw({', '.join(parts)})"


def _count(node: fx.Node) -> int:
    """How many times an op without keys draws on one device: torch's dropout does not with p = 0 or 1, nor out of training."""
    if node.op != "call_function" or not draws(node):
        return 0
    names = [a.name for a in node.target._schema.arguments]
    if any(name in names and argument(node, name) is False for name in ("train", "training")):
        return 0
    if node.target in RECURRENT:
        return argument(node, "num_layers") - 1 if 0 < argument(node, "dropout") < 1 else 0
    if node.target in DROPOUTS:
        return int(0 < argument(node, "p" if "p" in names else "dropout_p") < 1)
    return 1


def _same(node: fx.Node) -> tuple[int, ...]:
    val = node.meta["val"]
    return tuple((val if isinstance(val, torch.Tensor) else val[0]).shape)


def _channels(node: fx.Node) -> tuple[int, ...]:
    """Whole channels are dropped."""
    shape = _same(node)
    return (*shape[:2], *(1 for _ in shape[2:]))


def _weights(node: fx.Node) -> tuple[int, ...]:
    """Attention drops weights, ``[..., queries, keys]``."""
    result, key = _same(node), shape_of(argument(node, "key"))
    return (*result[:-1], key[-2])


def _classes(node: fx.Node) -> tuple[int, ...]:
    several = argument(node, "replacement") and argument(node, "num_samples") > 1
    return _same(node) if several else shape_of(node.all_input_nodes[0])


RECURRENT = {
    aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input,
    aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data,
}  # fmt: skip
DROPOUTS = {
    aten.dropout.default, aten.native_dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default,
    aten.feature_alpha_dropout.default, aten.scaled_dot_product_attention.default,
}  # fmt: skip
SHAPES: dict[torch._ops.OpOverload, Callable[[fx.Node], tuple[int, ...]]] = {
    **dict.fromkeys((aten.dropout.default, aten.native_dropout.default, aten.alpha_dropout.default), _same),
    **dict.fromkeys((aten.feature_dropout.default, aten.feature_alpha_dropout.default), _channels),
    **dict.fromkeys((aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor), _same),
    **dict.fromkeys((aten.rand_like.default, aten.randn_like.default), _same),
    **dict.fromkeys((aten.randint_like.default, aten.randint_like.low_dtype), _same),
    **dict.fromkeys((aten.uniform.default, aten.normal_functional.default, aten.exponential.default), _same),
    aten.scaled_dot_product_attention.default: _weights,
    aten.multinomial.default: _classes,
}
"""Ops that can draw a piece of their numbers."""
