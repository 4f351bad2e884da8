"""Regions of torch.autocast: the casts that it makes, written into the graph as ops.

While a model is traced, ops are marked with the dtype that is in force for each type of device. What autocast does to an op is then seen by
running it on fake tensors, with autocast and without: no table of which ops run in which precision is kept here.

Checked with torch 2.13: ``torch.fx.traceback`` and ``torch._C`` are not documented as stable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate, preserve_node_meta

from autoshard.errors import CaptureError
from autoshard.origin import place
from autoshard.program import tensors
from autoshard.torch_private import TorchDispatchMode, pytree
from autoshard.writes import is_mutating

aten = torch.ops.aten
CASTS = (aten._to_copy.default, aten.to.dtype)
KEPT = ("nn_module_stack", "stack_trace", "custom")
"""What a new op has of the user's op that it is made for."""


@contextlib.contextmanager
def autocast_marked() -> Iterator[None]:
    """Regions of torch.autocast are marks on the ops in them: ``meta["custom"]["autocast.cpu"]`` is a dtype, or None where it is off.

    torch.export's own regions can't be used: they lose a ``no_grad`` inside (torch 2.13).
    """
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    def marked_enter(self):
        self.mark = annotate({f"autocast.{self.device}": self.fast_dtype if self._enabled else None})
        self.mark.__enter__()
        with torch._C.DisableTorchFunction():  # so that the exporter does not make a region of its own
            return enter(self)

    def marked_leave(self, *error):
        with torch._C.DisableTorchFunction():
            leave(self, *error)
        self.mark.__exit__(None, None, None)
        return False

    torch.autocast.__enter__, torch.autocast.__exit__ = marked_enter, marked_leave
    try:
        with preserve_node_meta():
            yield
    finally:
        torch.autocast.__enter__, torch.autocast.__exit__ = enter, leave


def write_casts(graph: fx.Graph) -> None:
    """Make the casts of autocast ops of the graph.

    before:  linear = aten.linear(x, w, b)                       # marked autocast.cpu: bf16
    after:   to = aten.to(x, bf16); to_1 = aten.to(w, bf16); to_2 = aten.to(b, bf16); linear = aten.linear(to, to_1, to_2)

    An op that autocast takes apart, such as einsum, which runs bmm in bf16, becomes its parts.

    Raises:
        CaptureError: its parts can't be traced; the region has a torch.vmap in it.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and (mark := _mark(node)):
            _write(graph, node, *mark)


def _mark(node: fx.Node) -> tuple[str, torch.dtype] | None:
    """(type of device, dtype) of the autocast that is in force for an op; None if there is none, or it changes nothing.

    That for another type of device than the operands' does nothing, as it does nothing when the model runs.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or is_mutating(node):
        return None
    marks = node.meta.get("custom") or {}
    found = {t.device.type for n in node.all_input_nodes for t in tensors(n.meta.get("val")) if t.is_floating_point()}
    return next(((device, dtype) for device in found if (dtype := marks.get(f"autocast.{device}"))), None)


class Recorded(TorchDispatchMode):
    """What an op runs: each op with the dtypes that it gives; casts of its operands are kept apart, with the operand's ``id``."""

    def __init__(self, operands: list[torch.Tensor]):
        super().__init__()
        self.operands = {id(t) for t in operands}
        self.casts: dict[int, torch.dtype] = {}
        self.ops: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in CASTS and id(args[0]) in self.operands:
            self.casts[id(args[0])] = result.dtype
        elif made := tensors(result):
            self.ops.append((func, tuple(t.dtype for t in made)))
        return result


def _write(graph: fx.Graph, node: fx.Node, device: str, dtype: torch.dtype) -> None:
    args, kwargs = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs))
    if any(isinstance(leaf, torch.Tensor) and torch._C._functorch.is_batchedtensor(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
        hint = "put it into a region of torch.autocast(..., enabled=False), with casts of your own"
        raise CaptureError("the model uses torch.vmap inside torch.autocast, which is not supported", where=place(node) or None, hint=hint)
    seen = _run(node, args, kwargs, device, dtype)
    plain = _run_plain(node, args, kwargs, device)
    if plain is not None and (seen.ops, seen.casts) == (plain.ops, plain.casts):
        return
    new: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def cast(operand: fx.Node) -> fx.Node:
        wanted = seen.casts.get(id(operand.meta["val"]))
        if wanted is None:
            return operand
        if (operand, wanted) not in new:
            with graph.inserting_before(node):
                made = graph.create_node("call_function", aten.to.dtype, (operand, wanted), name="to")
            made.meta = {"val": operand.meta["val"].to(wanted), **_kept(node)}
            new[operand, wanted] = made
        return new[operand, wanted]

    cast_args, cast_kwargs = pytree.tree_map_only(fx.Node, cast, (node.args, node.kwargs))
    explicit = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (cast_args, cast_kwargs))
    as_cast = _run_plain(node, *explicit, device)
    if as_cast is not None and as_cast.ops == seen.ops:
        node.args, node.kwargs = cast_args, cast_kwargs
        return
    for made in new.values():
        graph.erase_node(made)
    _take_apart(graph, node, args, kwargs, device, dtype)


def _run(node: fx.Node, args: Any, kwargs: Any, device: str, dtype: torch.dtype | None) -> Recorded:
    operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    with _state(device, dtype), Recorded(operands) as recorded:
        node.target(*args, **kwargs)
    return recorded


def _run_plain(node: fx.Node, args: Any, kwargs: Any, device: str) -> Recorded | None:
    """Without autocast. None: the op takes no such operands, for example of several dtypes, unless autocast makes them one."""
    try:
        return _run(node, args, kwargs, device, None)
    except (RuntimeError, ValueError):
        return None


@contextlib.contextmanager
def _state(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False):
        yield


def _take_apart(graph: fx.Graph, node: fx.Node, args: Any, kwargs: Any, device: str, dtype: torch.dtype) -> None:
    """Replace an op by the ops that it runs under autocast."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    nodes = pytree.tree_leaves((node.args, node.kwargs))
    operands = [n for n, leaf in zip(nodes, leaves) if isinstance(leaf, torch.Tensor)]

    def run(*values: torch.Tensor):
        given = iter(values)
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
        with _state(device, dtype):
            return node.target(*args, **kwargs)

    inner = make_fx(run)(*(n.meta["val"] for n in operands)).graph
    mapping: dict[fx.Node, Any] = dict(zip((n for n in inner.nodes if n.op == "placeholder"), operands))
    with graph.inserting_before(node):
        for old in inner.nodes:
            if old.op == "call_function":
                new = mapping[old] = graph.node_copy(old, lambda n: mapping[n])
                new.meta = {"val": old.meta.get("val"), **_kept(node)}
            elif old.op != "placeholder" and old.op != "output":
                raise CaptureError(
                    f"torch.autocast runs parts of {node.target} in {dtype}, and they can't be told apart",
                    where=place(node) or None,
                    hint="run it in a region of torch.autocast(..., enabled=False), with casts of your own",
                )
    result = pytree.tree_map_only(fx.Node, lambda n: mapping[n], next(reversed(inner.nodes)).args[0])
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


def _kept(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in KEPT if key in node.meta}
