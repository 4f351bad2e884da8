"""An exported program's graph, made flat, functional and annotated: the second half of capture."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind

from autoshard.autocast import write_casts
from autoshard.draws import keys_of, number_draws
from autoshard.errors import CaptureError
from autoshard.origin import inner_place, module_path, place, source_line
from autoshard.program import Param, has_grad, tensors
from autoshard.torch_private import pytree
from autoshard.tracing import quiet
from autoshard.writes import detach_in_place, is_mutating, refuse_hidden_writes

aten = torch.ops.aten
TAKEN = ("self", "torch", "F", "rt")
"""Names that mean something in emitted code."""

Flat = tuple[fx.Graph, dict[Param, fx.Node], dict[str, fx.Node], tuple[str, ...]]
"""A graph, the placeholders of the params that it reads, those of its inputs by name, and the buffers that forward changes."""


def build_graph(exported, params: tuple[Param, ...], leaf_name: Callable[[tuple], str]) -> tuple[Flat, int]:
    """The graph of a Program from what torch.export made.

    Args:
        params: all of the model's; names without the ``model.`` of the traced root.
        leaf_name: name of an input from its pytree path in the traced root's arguments.

    Returns:
        The flat graph (constants are params that it reads too), and how many draws of random numbers a step makes.

    Raises:
        CaptureError: sizes that depend on data, mutated parameters or inputs, regions that are not supported.
    """
    inline_regions(exported.graph_module)
    with quiet():
        write_casts(exported.graph)
    refuse_data_dependent(exported.graph)
    refuse_instance_statistics(exported)
    detach_in_place(exported.graph)
    refuse_hidden_writes(exported, {name for param in params if param.requires_grad for name in param.names})
    taken_apart = any(is_mutating(node) or keeps_statistics(node) or is_vectorised(node) for node in exported.graph.nodes)
    keys, total = keys_of(exported.graph, read_only=taken_apart)
    if taken_apart:
        with quiet():
            exported = exported.run_decompositions({})
        refuse_mutation(exported, leaf_name)
    graph, read, inputs, updates = flatten(exported, params, leaf_name)
    annotate(graph, read)
    number_draws(graph, keys)
    return (graph, read, inputs, updates), total


# --- regions -----------------------------------------------------------------------------------------------------------


def inline_regions(module: fx.GraphModule) -> None:
    """Replace no_grad regions by their ops, whose operands are detached.

    before:  y = wrap_with_set_grad_enabled(False, submod_0, x, w)[0]        # submod_0: linear(x, w)
    after:   detach = aten.detach(x); detach_1 = aten.detach(w); y = linear(detach, detach_1)
    """
    regions = [n for n in module.graph.nodes if n.op == "call_function" and isinstance(n.target, torch._ops.HigherOrderOperator)]
    for node in regions:
        name = node.target.name()
        if name == "wrap_with_set_grad_enabled":
            inline(node, node.args[1], node.args[2:], module, grad=node.args[0])
        else:
            raise unsupported(name, place(node) or inner_place(module, node))
    if regions:
        module.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output") or n.op == "call_function")
        module.recompile()


def inline(node: fx.Node, body: fx.Node, operands: tuple, parent: fx.GraphModule, grad: bool) -> None:
    inner: fx.GraphModule = getattr(parent, body.target)
    inline_regions(inner)
    graph = parent.graph
    placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
    mapping = dict(zip(placeholders, operands))
    with graph.inserting_before(node):
        if not grad:
            mapping = {p: detached(graph, o, p.meta) for p, o in mapping.items()}
        for old in inner.graph.nodes:
            if old.op == "call_function":
                new = mapping[old] = graph.node_copy(old, lambda n: mapping[n])
                if not new.meta.get("nn_module_stack"):
                    new.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
            elif old.op == "output":
                results = pytree.tree_map_only(fx.Node, lambda n: mapping[n], old.args[0])
    for user in list(node.users):
        index = user.args[1]
        user.replace_all_uses_with(results[index])
        graph.erase_node(user)
    graph.erase_node(node)


def unsupported(name: str, where: str | None) -> CaptureError:
    hint = "the graph must be the same for all data: compute both sides and choose with torch.where, or unroll the loop"
    return CaptureError(f"the model uses the operator {name!r} inside forward, which is not supported", where=where, hint=hint)


def detached(graph: fx.Graph, value: Any, meta: dict) -> Any:
    val = meta.get("val")
    if not isinstance(value, fx.Node) or not isinstance(val, torch.Tensor) or not (val.is_floating_point() or val.is_complex()):
        return value
    new = graph.create_node("call_function", aten.detach.default, (value,), name="detach")
    new.meta = {"val": meta["val"], "nn_module_stack": value.meta.get("nn_module_stack"), "stack_trace": value.meta.get("stack_trace")}
    return new


# --- what can't be a program ---------------------------------------------------------------------------------------------


def is_vectorised(node: fx.Node) -> bool:
    """Whether a node belongs to a region of torch.vmap: decomposed, the region is ops on whole batches."""
    return node.op == "call_function" and getattr(node.target, "__module__", "") == "torch._functorch.predispatch"


def refuse_data_dependent(graph: fx.Graph) -> None:
    for node in graph.nodes:
        val = node.meta.get("val")
        symbolic = isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool))
        if symbolic or any(isinstance(size, torch.SymInt) for t in tensors(val) for size in t.shape):
            raise CaptureError(
                f"{node.target} gives a {'number' if symbolic else 'size'} that depends on the data",
                where=place(node) or None,
                hint="every shape must be known before the step: use torch.where or a mask instead of selecting elements",
            )


def keeps_statistics(node: fx.Node) -> bool:
    """Whether a norm updates running statistics; its schema does not say so."""
    return node.target in (aten.batch_norm.default, aten.instance_norm.default) and node.args[5] and isinstance(node.args[3], fx.Node)


def refuse_instance_statistics(exported) -> None:
    """torch forgets these updates when it makes a graph functional."""
    buffers = exported.graph_signature.inputs_to_buffers
    for node in exported.graph.nodes:
        if node.target is aten.instance_norm.default and keeps_statistics(node) and node.args[3].name in buffers:
            raise mutated("buffer", buffers[node.args[3].name], place(node))


def refuse_mutation(exported, leaf_name: Callable[[tuple], str]) -> None:
    signature = exported.graph_signature
    arguments = pytree.tree_unflatten(list(signature.user_inputs), exported.call_spec.in_spec)[0]
    names = {placeholder: leaf_name(path) for path, placeholder in pytree.tree_flatten_with_path(arguments)[0]}
    for kind, outputs in (
        ("parameter", getattr(signature, "parameters_to_mutate", {})),
        ("input", signature.user_inputs_to_mutate),
    ):
        for node_name, target in outputs.items():
            node = next(n for n in exported.graph.nodes if n.name == node_name)
            raise mutated(kind, names.get(target, target), place(node))


def mutated(kind: str, target: str, where: str) -> CaptureError:
    name = target.removeprefix("model.")
    module = name.rpartition(".")[0]
    return CaptureError(
        f"forward changes the {kind} {name!r}" + (f" of module {module!r}" if kind != "input" and module else ""),
        where=where or None,
        hint="running statistics of an instance norm are not supported: use eval() for this module, or track_running_stats=False"
        if kind == "buffer"
        else "work on a copy: use the out-of-place form of the operation",
    )


# --- one flat graph --------------------------------------------------------------------------------------------------------


def flatten(exported, params: tuple[Param, ...], leaf_name: Callable[[tuple], str]) -> Flat:
    """A new graph: one placeholder per param that is read and per tensor input, ops, one flat output."""
    by_name = {name: param for param in params for name in param.names}
    source = exported.graph
    old = {n.name: n for n in source.nodes if n.op == "placeholder"}
    graph = fx.Graph()
    mapping: dict[fx.Node, Any] = {}
    read: dict[Param, fx.Node] = {}
    inputs: dict[str, fx.Node] = {}

    def placeholder(name: str, like: fx.Node) -> fx.Node:
        name = re.sub(r"\W", "_", name)
        node = graph.placeholder(f"{name}_" if name in TAKEN else name)
        node.meta["val"] = facts(like.meta["val"])
        return node

    user: list[fx.Node] = []
    reads: dict[str, list[fx.Node]] = {}
    numbers: dict[fx.Node, torch.Tensor] = {}
    changed = set(exported.graph_signature.buffers_to_mutate.values())
    for spec in exported.graph_signature.input_specs:
        node = old[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            user.append(node)
            continue
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            raise CaptureError(f"the model holds {spec.target!r}, which is no tensor but a {spec.kind.name.lower()}")
        if not node.users and spec.target not in changed:
            continue
        name = spec.target.removeprefix("model.")
        if spec.kind is InputKind.CONSTANT_TENSOR and is_number(exported.constants[spec.target]):
            numbers[node] = exported.constants[spec.target]
            continue
        param = by_name.get(name)
        if param is None:
            val = node.meta["val"]
            param = by_name[name] = Param((name,), tuple(val.shape), val.dtype, False, "constant", persistent=False)
        reads.setdefault(param.name, []).append(node)
    for param in dict.fromkeys(by_name.values()):  # in the model's own order
        for node in reads.get(param.name, ()):
            if param not in read:
                read[param] = placeholder(param.name, node)
            mapping[node] = read[param]

    arguments = pytree.tree_unflatten(user, exported.call_spec.in_spec)[0]
    for path, node in pytree.tree_flatten_with_path(arguments)[0]:
        if isinstance(node.meta.get("val"), torch.Tensor):
            name = leaf_name(path)
            mapping[node] = inputs[name] = placeholder(name, node)

    for node, number in numbers.items():
        args, kwargs = ([], number.item()), {"dtype": number.dtype}
        new = mapping[node] = graph.create_node("call_function", aten.full.default, args, kwargs, name="full")
        new.meta = {"val": facts(node.meta["val"]), "module": "", "source": ""}
    for node in source.nodes:
        if node.op == "call_function":
            new = mapping[node] = graph.node_copy(node, lambda n: mapping[n])
            new.meta = {"val": pytree.tree_map_only(torch.Tensor, facts, node.meta.get("val"))}
            new.meta["module"] = module_path(node)
            new.meta["source"] = source_line(node)
    leaves = next(n for n in source.nodes if n.op == "output").args[0]
    results: list[Any] = []
    updates: dict[str, fx.Node] = {}
    for spec, leaf in zip(exported.graph_signature.output_specs, leaves):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            updates[by_name[spec.target.removeprefix("model.")].name] = mapping[leaf]
        else:
            results.append(mapping[leaf] if isinstance(leaf, fx.Node) else leaf)
    graph.output([*results, *updates.values()])
    return graph, read, inputs, tuple(updates)


def is_number(constant: Any) -> bool:
    """Whether a constant is a number that can be written into the graph, such as that of ``torch.tensor(2.0)``."""
    return isinstance(constant, torch.Tensor) and constant.dim() == 0 and constant.device.type != "meta" and not constant.is_complex()


def facts(val: torch.Tensor) -> torch.Tensor:
    """A fake tensor as one on ``meta``: a program is for no device, and ops on it are run many times quicker."""
    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="meta")


def annotate(graph: fx.Graph, read: dict[Param, fx.Node]) -> None:
    """Set meta["grad"]: a floating value has a gradient if an operand has, and nothing cuts it."""
    trainable = {node for param, node in read.items() if param.requires_grad}
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["grad"] = node in trainable
        elif node.op == "call_function":
            node.meta["grad"] = has_grad(node)
