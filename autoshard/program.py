"""The program that passes rewrite: an fx graph of ATen ops, and what is known about its values.

Facts live in ``node.meta``:

    val       tensor on ``meta`` (or a tuple of them): global shape and dtype before LOCAL, the rank's own after
    grad      whether a gradient flows through the value (its result requires grad)
    rule      autoshard.rules.OpRule of an op, from PLANNED on and before LOCAL: shapes stay as they are
    strategy  autoshard.rules.Strategy, from the plan
    layouts   tuple of Layout, one per tensor result
    stage     pipeline stage
    zero      ZeRO level of a parameter, from 1 on; piece: the layout of what its optimizer updates
    region    number of the region, computed again in backward, that an op is in
    bucket    number of the bucket in which a weight of ZeRO level 3 is gathered
    module    module path, "transformer.h.0.attn"
    draw      autoshard.draws.Drawn of an op whose random numbers have keys
    cut_along axes over which the random numbers of an op that draws them are cut, after LOCAL
    stands_for  how many ops of the whole program an op of an abridged one stands for
    source    the user's own line, "modeling_gpt2.py:187: query_states, ... = self.c_attn(...)"
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx

from autoshard.mesh import Mesh
from autoshard.placement import Layout


@dataclass(frozen=True)
class Param:
    """A parameter, buffer or constant of the model. ``names`` are all its names, canonical first; ``master``: the dtype in which the
    optimizer keeps a trained parameter of lower precision, None: as it is."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    kind: str  # "parameter" | "buffer" | "constant"
    persistent: bool = True
    master: torch.dtype | None = None

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Input:
    """A tensor input of the model: the user's name for it ("input_ids"), and the dim that holds the batch (None: none)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None = 0


@dataclass
class Program:
    """A graph and its interface.

    graph: placeholders first (params, then inputs), then ops, then one output node whose args[0] is a flat list of leaves.
    params / inputs: by placeholder name.
    loss: index, into the output leaves, of the scalar to be minimised; None if the model returns none.
    updates: names of the buffers that forward changes; their new values are the last leaves, in this order.
    """

    graph: fx.Graph
    params: dict[str, Param]
    inputs: dict[str, Input]
    loss: int | None
    mesh: Mesh = field(default_factory=Mesh)
    microbatches: int = 1
    updates: tuple[str, ...] = ()

    def copy(self) -> Program:
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for old in self.graph.nodes:
            copied_node(graph, old, mapping)
        return Program(graph, dict(self.params), dict(self.inputs), self.loss, self.mesh, self.microbatches, self.updates)

    @property
    def output(self) -> fx.Node:
        return next(n for n in reversed(self.graph.nodes) if n.op == "output")

    @property
    def leaves(self) -> list[Any]:
        return list(self.output.args[0])

    @property
    def results(self) -> list[Any]:
        """The leaves that the model returns: those that are no updates of buffers."""
        leaves = self.leaves
        return leaves[: len(leaves) - len(self.updates)]

    @property
    def ops(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "call_function"]


SET_ARGS, SET_KWARGS = fx.Node.args.fset, fx.Node.kwargs.fset
"""``node.args = args`` also takes the node out of the graph's table of ops, and puts it in again."""


def new_node(graph: fx.Graph, target, args: tuple, kwargs: dict, name: str) -> fx.Node:
    """``graph.create_node`` of an op, in half the time: that looks for symbolic numbers among all arguments, and a program has none."""
    node = graph.create_node("call_function", target, name=name)
    SET_ARGS(node, args)
    if kwargs:
        SET_KWARGS(node, kwargs)
    return node


def copied_node(graph: fx.Graph, old: fx.Node, mapping: dict[fx.Node, fx.Node], name: str | None = None) -> fx.Node:
    """A copy of a node of another graph, its facts too; entered into ``mapping``, which has its operands."""
    args, kwargs = fx.map_arg((old.args, old.kwargs), mapping.__getitem__)
    if old.op == "call_function":
        node = new_node(graph, old.target, args, kwargs, name or old.name)
    else:
        node = graph.create_node(old.op, old.target, args, kwargs, name=name or old.name)
    node.meta.update(old.meta)
    mapping[old] = node
    return node


def tensors(val) -> tuple:
    """The tensors in ``meta["val"]``: one, or those of a tuple or list."""
    if isinstance(val, torch.Tensor):
        return (val,)
    return tuple(v for v in val if isinstance(v, torch.Tensor)) if isinstance(val, (tuple, list)) else ()


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Some nodes, and all that they are computed from."""
    found, todo = set(), list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def has_grad(node: fx.Node) -> bool:
    """Whether a gradient flows through the result of an op: from a floating operand that has one, unless it is cut."""
    return any(n.meta.get("grad") for n in node.all_input_nodes) and passes_grad(node)


def passes_grad(node: fx.Node) -> bool:
    """Whether an op hands the gradient of its result on to its operands."""
    name = getattr(node.target, "__name__", "").partition(".")[0]
    if name == "detach" or name.endswith("_like") or name.startswith("new_"):
        return False  # torch.zeros_like(x) has nothing of x but its shape
    return any(t.is_floating_point() or t.is_complex() for t in tensors(node.meta["val"]))


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def operands(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of an op in argument order (args, then kwargs); a value used twice is listed twice."""
    found: list[fx.Node] = []
    _tensors_of(node.args, found)
    if node.kwargs:
        _tensors_of(node.kwargs.values(), found)
    return found


def _tensors_of(arguments, found: list[fx.Node]) -> None:
    for arg in arguments:
        if isinstance(arg, fx.Node):
            if isinstance(arg.meta.get("val"), torch.Tensor) or is_getitem(arg):
                found.append(arg)
        elif isinstance(arg, (tuple, list)):
            _tensors_of(arg, found)
        elif isinstance(arg, dict):
            _tensors_of(arg.values(), found)


def likeness(node: fx.Node) -> tuple:
    """Hashable, and equal for ops that differ only in which values they read: same op, constants, shapes, dtypes, gradients."""
    read: list[fx.Node] = []
    args, kwargs = _constants(node.args, read), _constants(node.kwargs, read) if node.kwargs else ()
    return node.target, args, kwargs, facts(node), tuple(map(facts, read))


def facts(node: fx.Node) -> tuple:
    """What is known of a value: shapes, dtypes, and whether a gradient flows through it."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return tuple(val.shape), val.dtype, node.meta.get("grad")
    return tuple((tuple(t.shape), t.dtype) for t in tensors(val)), node.meta.get("grad")


def _constants(argument: Any, read: list[fx.Node]) -> Any:
    """An argument with every value replaced by a mark, and added to ``read``."""
    if isinstance(argument, fx.Node):
        read.append(argument)
        return "%"
    if isinstance(argument, (list, tuple)):
        return tuple([_constants(a, read) for a in argument])
    if isinstance(argument, dict):
        return tuple([(k, _constants(argument[k], read)) for k in sorted(argument)])
    return type(argument), repr(argument)


def op_kind(node: fx.Node) -> str:
    """The op's plain name, without namespace and overload: "aten.slice.Tensor" -> "slice"."""
    return _op_kind(node.target)


@cache
def _op_kind(target) -> str:
    parts = str(target).split(".")
    return parts[1].lstrip("_") if len(parts) > 1 else parts[0]


def result_of(node: fx.Node) -> tuple[fx.Node, int]:
    """The value that an operand names: (producing node, result index). getitem nodes are only names."""
    if is_getitem(node):
        producer, index = node.args
        return producer, index
    return node, 0


def draws(node: fx.Node) -> bool:
    """Whether the op draws random numbers that depend on who draws them: those of an op with keys (``meta["draw"]``) do not."""
    if "draw" in node.meta or torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    return True


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def stored_layout(node: fx.Node) -> Layout:
    """How a rank holds a parameter, buffer or input; of a parameter under ZeRO, what its optimizer updates."""
    return node.meta.get("piece") or node.meta.get("stored") or node.meta["layouts"][0]


def where(node: fx.Node) -> str:
    """For errors: node name, module path and the user's source line."""
    parts = [f"node {node.name!r}"]
    if node.meta.get("module"):
        parts.append(f"in {node.meta['module']}")
    if node.meta.get("source"):
        parts.append(f"({node.meta['source']})")
    return " ".join(parts)
