"""Small tools that passes share: new ops with their facts, arguments by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx

from autoshard.program import has_grad
from autoshard.torch_private import pytree

META = torch.device("meta")


def new_op(graph: fx.Graph, target: Callable, args: tuple, kwargs: dict | None = None, *, like: fx.Node) -> fx.Node:
    """Insert an op at the graph's insertion point; its val from those of its operands, module and source from ``like``."""
    node = graph.create_node("call_function", target, args, kwargs or {}, name=target.__name__.partition(".")[0])
    node.meta = {key: like.meta[key] for key in ("module", "source") if key in like.meta}
    node.meta["val"] = run_on_facts(target, args, kwargs or {})
    node.meta["grad"] = has_grad(node)
    return node


def run_on_facts(target: Callable, args: tuple, kwargs: dict) -> Any:
    """What an op gives on the vals of the nodes in its arguments. Raises whatever the op raises."""
    args, kwargs = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (args, kwargs))
    args, kwargs = pytree.tree_map_only(torch.device, lambda _: META, (args, dict(kwargs)))
    if any(a.name == "device" and a.kwarg_only for a in getattr(getattr(target, "_schema", None), "arguments", ())):
        kwargs["device"] = META
    with torch.no_grad():
        return target(*args, **kwargs)


def replace(node: fx.Node, value: fx.Node) -> None:
    """Let every user of ``node`` read ``value``, and erase ``node``."""
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def only_first_result(node: fx.Node) -> bool:
    """Whether nothing reads the other results of an op with several; getitems that nobody reads are erased."""
    for user in list(node.users):
        if not user.users:
            node.graph.erase_node(user)
    return all(user.args[1] == 0 for user in node.users)


class Argument(NamedTuple):
    """One of a schema: what is read of torch's own, which makes each anew for everyone who asks."""

    name: str
    kwarg_only: bool
    default_value: Any
    has_default: bool


def schema(node: fx.Node) -> tuple[Argument, ...]:
    """The schema's arguments of an ATen op; empty for anything else (getitem)."""
    return _schema(node.target) if isinstance(node.target, torch._ops.OpOverload) else ()


@cache
def _schema(target: torch._ops.OpOverload) -> tuple[Argument, ...]:
    return tuple(Argument(a.name, a.kwarg_only, a.default_value, a.has_default_value()) for a in target._schema.arguments)


def arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument of an ATen op by its schema name, defaults filled in."""
    values = {}
    for position, argument in enumerate(schema(node)):
        if position < len(node.args) and not argument.kwarg_only:
            values[argument.name] = node.args[position]
        else:
            values[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return values


def written(node: fx.Node, values: dict[str, Any], full: bool = False) -> tuple[tuple, dict[str, Any]]:
    """``(args, kwargs)`` of an op from its arguments by name, in the one form that graphs use.

    Positional ones positionally without trailing defaults, keyword-only ones by keyword without defaults; with ``full``, every one.
    """
    positional: list[Any] = []
    keep, kwargs = 0, {}
    for argument in schema(node):
        value = values[argument.name]
        default = argument.has_default and type(value) is type(argument.default_value) and value == argument.default_value
        if argument.kwarg_only:
            if full or not default:
                kwargs[argument.name] = value
            continue
        positional.append(value)
        if full or not default:
            keep = len(positional)
    return tuple(positional[:keep]), kwargs
