"""State that forward leaves behind: buffers that it replaces, and attributes that a later step may read.

A step is a function of parameters, buffers and batch. A buffer that is replaced (``self.steps = self.steps + 1``) is one that is changed;
an attribute that changes is harmless if the next step does not look at it, or if it is a constant made at first use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind

from autoshard.errors import CaptureError
from autoshard.program import ancestors
from autoshard.torch_private import pytree

OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has: its parameters, buffers, submodules and hooks."""

Name = tuple[str, str]
"""Path of a module, and an attribute of it."""


class Carried:
    """What forward leaves behind in a model. Works around a forward that is traced: ``begin``, the model, ``end``."""

    def __init__(self, model: nn.Module):
        self.modules = dict(model.named_modules())
        self.unset = {(path, name) for path, m in self.modules.items() for name, value in m._buffers.items() if value is None}
        self.before: dict[Name, Any] = {}
        self.left: dict[Name, Any] = {}

    def begin(self, state: tuple[torch.Tensor, ...]) -> None:
        """Put what the run before left behind in place, ``state`` for its tensors; then remember all attributes."""
        tensors = iter(state)
        for (path, name), value in self.left.items():
            setattr(self.modules[path], name, pytree.tree_map_only(torch.Tensor, lambda _: next(tensors), value))
        self.before = {key: pytree.tree_flatten(value) for key, value in self._attributes()}
        self.buffers = {path: dict(module._buffers) for path, module in self.modules.items()}

    def end(self) -> list[torch.Tensor]:
        """Write replaced buffers into the old ones; the tensors that forward leaves behind in other attributes."""
        for path, old in self.buffers.items():
            for name, value in self.modules[path]._buffers.items():
                if isinstance(value, torch.Tensor) and isinstance(old.get(name), torch.Tensor) and value is not old[name]:
                    self.modules[path]._buffers[name] = _written(path, name, old[name], value)
        self.left = {key: value for key, value in self._attributes() if not _same(self.before.get(key), pytree.tree_flatten(value))}
        return [leaf for leaf in pytree.tree_leaves(self.left) if isinstance(leaf, torch.Tensor)]

    def _attributes(self):
        for path, module in self.modules.items():
            if type(module).__module__.startswith("torch.nn."):  # they keep nothing but buffers; recurrent ones sort their weights anew
                continue
            for name, value in vars(module).items():
                if name not in OF_MODULES:
                    yield (path, name), value
            for name, value in module._buffers.items():
                if (path, name) in self.unset:  # made at first use
                    yield (path, name), value


def _written(path: str, name: str, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    if old.shape != new.shape or old.dtype != new.dtype:
        raise CaptureError(
            f"forward replaces the buffer {f'{path}.{name}'.lstrip('.')!r}, {old.dtype} of shape {tuple(old.shape)}, "
            f"by {new.dtype} of shape {tuple(new.shape)}",
            hint="a buffer must keep its shape and dtype",
        )
    return old.copy_(new.detach())


def _same(before, now) -> bool:
    """Whether two flattened values are made of the same objects, or of equal numbers."""
    plain = (bool, int, float, complex, str)
    return (
        before is not None
        and before[1] == now[1]
        and all(a is b or (type(a) is type(b) and isinstance(a, plain) and a == b) for a, b in zip(before[0], now[0]))
    )


def refuse_state(first, left: dict[Name, Any], trace_again: Callable[[], tuple[Any, dict[Name, Any]]]) -> None:
    """Refuse a forward whose second run computes something else than its first.

    Args:
        first: the exported program of the first run: its last results are the tensors left behind.
        left: what it left behind.
        trace_again: gives the same of the second run, whose last inputs are the tensors that the first one left behind.
    """
    second, left_again = trace_again()
    keys, keys_again = _tensors(left), _tensors(left_again)
    made = dict(zip(keys, _last(_results(first), len(keys))))
    inputs = {n.name: n for n in second.graph.nodes if n.op == "placeholder"}
    state = [inputs[name] for name in _last(second.graph_signature.user_inputs, len(keys))]
    read = {key for key, node in zip(keys, state) if any(user.op != "output" for user in node.users)}
    wrong = [key for key in read if key in keys_again or not _constant(first, made[key])]
    if not read and _text(first, len(keys)) != _text(second, len(keys_again)):
        wrong = [key for key in left if key not in keys] or keys
    if wrong:
        shown = ", ".join(repr(f"{path}.{name}".lstrip(".")) for path, name in sorted(set(wrong)))
        raise CaptureError(
            f"forward reads what it left behind the time before, in {shown}: each step would compute something else",
            hint="keep what goes from step to step in a buffer: self.register_buffer(...), changed in place or replaced",
        )


def _tensors(left: dict[Name, Any]) -> list[Name]:
    """The attribute of each tensor left behind."""
    return [key for key, value in left.items() for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _last(items: list[Any], count: int) -> list[Any]:
    return list(items[len(items) - count :])


def _results(program) -> list[Any]:
    return list(next(n for n in program.graph.nodes if n.op == "output").args[0])


def _constant(program, value: Any) -> bool:
    """Whether a value depends on no parameter, buffer or input."""
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    made_from = ancestors([value] if isinstance(value, fx.Node) else [])
    return all(kinds[node.name] is InputKind.CONSTANT_TENSOR for node in made_from if node.op == "placeholder")


def _text(program, skipped: int) -> list[str]:
    """What a program computes, without its last results, in names of its own."""
    numbers: dict[fx.Node, str] = {}
    results = _results(program)
    needed = ancestors(r for r in results[: len(results) - skipped] if isinstance(r, fx.Node))
    lines = []
    for node in program.graph.nodes:
        impure = node.op == "call_function" and getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        if node in needed or impure:
            numbers[node] = node.name if node.op in ("placeholder", "get_attr") else f"%{len(numbers)}"
            lines.append(f"{node.target if node.op == 'call_function' else node.op} {fx.map_arg((node.args, node.kwargs), numbers.get)}")
    return lines
