"""What a rule function asks of an op node: its arguments by name, the shapes of its tensors, and a rule bound to them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from autoshard.program import operands, shape_of, tensors
from autoshard.rules.notation import OpRule, bind


def aten(name: str, overload: str = "default") -> torch._ops.OpOverload:
    """The ATen op ``name.overload``."""
    return getattr(getattr(torch.ops.aten, name), overload)


def each(names: str, rule) -> dict:
    """One table row per op in ``names`` ("add.Tensor neg"; overload "default" if left out), all with the same rule."""
    return {aten(*name.split(".")): rule for name in names.split()}


def argument(node: fx.Node, name: str):
    """The argument of this schema name, wherever it was passed, or its default."""
    for i, arg in enumerate(node.target._schema.arguments):
        if arg.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, arg.default_value)
    raise KeyError(f"{node.target} has no argument {name!r}")


def operand_names(node: fx.Node) -> list[str]:
    """The schema name of each tensor operand, in ``operands(node)`` order; tensors of a list share its name."""
    names = [arg.name for arg in node.target._schema.arguments]
    found = []
    for name, arg in [*zip(names, node.args), *node.kwargs.items()]:
        inside = arg if isinstance(arg, (tuple, list)) else (arg,)
        found += [name for a in inside if isinstance(a, fx.Node)]
    return found


def shape(node: fx.Node, name: str) -> tuple[int, ...]:
    """Shape of the tensor argument of this name."""
    return shape_of(argument(node, name))


def result_shapes(node: fx.Node) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in tensors(node.meta["val"])]


def needs_grad(value) -> bool:
    """Whether a gradient flows to this operand (or to any that the op reads, if asked of the op); unknown counts as yes for floats."""
    if not isinstance(value, fx.Node):
        return False
    dtype = tensors(value.meta["val"])[0].dtype
    return value.meta.get("grad", dtype.is_floating_point or dtype.is_complex)


def bind_node(node: fx.Node, text: str, **extra) -> OpRule:
    """``bind`` on the shapes of this node."""
    return bind(text, [shape_of(n) for n in operands(node)], result_shapes(node), **extra)


def bind_named(
    node: fx.Node,
    specs: dict[str, str | list[str]],
    result: str,
    *,
    saved: Iterable[str | int] = (),
    linear: Iterable[Iterable[str]] = (),
    **extra,
) -> OpRule:
    """``bind`` with specs, ``saved`` and ``linear`` given by argument name; arguments that are None drop out.

    A spec is a list for a list of tensors, one spec each. ``saved`` may hold -1-i for result i. A set of ``linear`` loses absent
    operands (a bias that is None); it is dropped if none are left.
    """
    names = operand_names(node)
    texts, seen = [], dict.fromkeys(names, 0)
    for name in names:
        texts.append(specs[name] if isinstance(specs[name], str) else specs[name][seen[name]])
        seen[name] += 1

    def indices(wanted) -> list[int]:
        found = [[w] if isinstance(w, int) else [i for i, name in enumerate(names) if name == w] for w in wanted]
        return [i for group in found for i in group]

    sets = [frozenset(indices(wanted)) for wanted in linear]
    return bind_node(
        node,
        f"{', '.join(texts)} -> {result}",
        saved=tuple(indices(saved)),
        linear=tuple(dict.fromkeys(s for s in sets if s)),
        **extra,
    )


def dims(n: int, fixed: Iterable[int] = (), prefix: str = "d") -> list[str]:
    """One token a dim: ``dims(3, {1})`` is ["d0", "d1^", "d2"]."""
    fixed = set(fixed)
    return [f"{prefix}{i}^" if i in fixed else f"{prefix}{i}" for i in range(n)]


def positive(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


def unsharded(node: fx.Node) -> OpRule:
    """No factor at all: replicate or defer only (an op that is known to mix everything, so no warning)."""
    specs = [tuple(() for _ in shape_of(n)) for n in operands(node)]
    return OpRule(tuple(specs), tuple(tuple(() for _ in s) for s in result_shapes(node)), {})
