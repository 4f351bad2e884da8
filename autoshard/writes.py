"""In-place ops that the functional form of a graph would get wrong: those that autograd does not see."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.errors import CaptureError
from autoshard.origin import place
from autoshard.program import is_getitem, passes_grad

aten = torch.ops.aten


def is_mutating(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def detach_in_place(graph: fx.Graph) -> None:
    """From ``x.detach_()`` on, all that reads x reads ``x.detach()``.

    before:  detach_ = aten.detach_(x); y = mul(x, w)
    after:   detach = aten.detach(x); y = mul(detach, w)
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=aten.detach_.default):
        value = node.args[0]
        with graph.inserting_before(node):
            new = graph.create_node("call_function", aten.detach.default, (value,), name="detach")
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        for user in list(value.users):
            if user is not new and order[user] > order[node]:
                user.replace_input_with(value, new)
        graph.erase_node(node)


def refuse_hidden_writes(exported, trainable: set[str]) -> None:
    """Refuse to write to a value with a gradient through ``detach()``, or under ``no_grad``; and to a tensor that is no buffer.

    torch leaves the value's gradient as if nothing had been written; in a functional graph what was written has no gradient at all.

    Args:
        trainable: names of the parameters that have a gradient.
    """
    owner: dict[fx.Node, fx.Node] = {}  # of a view, the value that it looks at
    hidden: set[fx.Node] = set()  # views behind a detach
    learns: set[fx.Node] = set()  # owners with a gradient
    constants = exported.graph_signature.inputs_to_lifted_tensor_constants
    names = {node: target.removeprefix("model.") for node, target in exported.graph_signature.inputs_to_parameters.items()}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            owner[node] = node
            if names.get(node.name) in trainable:
                learns.add(node)
        if node.op != "call_function":
            continue
        seen = next((n for n in _looked_at(node) if n in owner), node)
        owner[node] = owner.get(seen, node)
        reads = any(n in owner and owner[n] in learns and n not in hidden for n in node.all_input_nodes)
        if seen in hidden or (seen is not node and node.target is aten.detach.default):
            hidden.add(node)
        for written in _written(node):
            if owner[written].name in constants:
                name = constants[owner[written].name].removeprefix("model.")
                shown = "a tensor" if name.startswith("lifted_tensor") else f"the attribute {name!r}, a tensor"
                hint = "make it one: self.register_buffer(...)"
                raise CaptureError(f"forward changes {shown} that is no buffer", where=place(node) or None, hint=hint)
            if written in hidden and owner[written] in learns and owner[written].op != "placeholder":
                raise CaptureError(
                    f"forward changes a value in place where autograd does not see it ({node.target.name().partition('.')[0]})",
                    where=place(node) or None,
                    hint="work on a copy, x.detach().clone(), or change it outside of torch.no_grad()",
                )
            if reads and written not in hidden:
                learns.add(owner[written])
        if owner[node] is node and reads and passes_grad(node):
            learns.add(node)


def _looked_at(node: fx.Node) -> list[fx.Node]:
    """The operands that a result may be a view of."""
    if is_getitem(node):
        return [node.args[0]]
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = node.target._schema
    shared = set().union(*(r.alias_info.before_set for r in schema.returns if r.alias_info is not None))
    if str(node.target).startswith("aten.to.") and node.meta["val"].dtype != node.args[0].meta["val"].dtype:
        return []  # a copy
    return [n for arg, n in _arguments(node) if arg.alias_info is not None and shared & set(arg.alias_info.before_set)]


def _written(node: fx.Node) -> list[fx.Node]:
    if not is_mutating(node):
        return []
    return [n for arg, n in _arguments(node) if arg.alias_info is not None and arg.alias_info.is_write]


def _arguments(node: fx.Node):
    """(schema argument, node) of every operand that is a tensor of its own, not in a list."""
    for i, arg in enumerate(node.target._schema.arguments):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(arg.name)
        if isinstance(value, fx.Node):
            yield arg, value
