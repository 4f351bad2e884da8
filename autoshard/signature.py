"""How a call of the model, ``(args, kwargs)``, maps to the tensor inputs of its program: the runtime asks this at every call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.errors import AutoshardError, CaptureError, RunError
from autoshard.torch_private import pytree


def leaf_name(path: tuple) -> str:
    """The dotted name of a pytree path: ``(MappingKey('batch'), SequenceKey(0))`` -> ``"batch.0"``."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def same(a: Any, b: Any) -> bool:
    """Equality of two python constants; ``True`` is not ``1``."""
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:
        return False


@dataclass(frozen=True)
class Signature:
    """The arguments a program was captured with.

    positional: names that positional arguments take, in order (those of ``forward``; the entries of ``*args`` are ``args.0``, ...).
    tensors: names of the tensor leaves, in call order; these are the names in ``Program.inputs``.
    constants: the python leaves and their values: a program holds for these values only.
    defaults: what ``forward`` takes for arguments that are not given.
    """

    positional: tuple[str, ...]
    tensors: tuple[str, ...]
    constants: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    varargs: str | None = None

    def arguments(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Leaf name -> leaf of a call. RunError for too many, or doubly given, arguments."""
        return _leaves(args, kwargs, self.positional, self.varargs, RunError)

    def bind(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Tensor inputs by name, in the order of ``tensors``.

        Raises:
            RunError: an argument is missing, unknown, of another kind, or a python constant is not the captured one.
        """
        given = self.arguments(args, kwargs)
        for name, value in given.items():
            if name in self.tensors:
                if not isinstance(value, torch.Tensor):
                    raise RunError(f"argument {name!r} is {value!r}; the model was captured with a tensor there")
                continue
            expected = self.constants.get(name, self.defaults.get(name, _MISSING))
            if expected is _MISSING or isinstance(value, torch.Tensor):
                raise RunError(f"unexpected argument {name!r}", hint=f"the model was captured with {', '.join(self.tensors)}")
            if not same(value, expected):
                raise RunError(
                    f"argument {name!r} is {value!r}, but the model was captured with {expected!r}",
                    hint="compile the model again for the new value",
                )
        for name in self.tensors:
            if name not in given:
                raise RunError(f"missing argument {name!r}", hint=f"the model was captured with {', '.join(self.tensors)}")
        for name, value in self.constants.items():
            if name not in given and not same(value, self.defaults.get(name, value)):
                raise RunError(f"missing argument {name!r}: the model was captured with {name}={value!r}")
        return {name: given[name] for name in self.tensors}


_MISSING = object()


def _leaves(
    args: tuple, kwargs: Mapping[str, Any], positional: tuple[str, ...], varargs: str | None, error: type[AutoshardError]
) -> dict[str, Any]:
    named: dict[str, Any] = dict(zip(positional, args))
    rest = args[len(positional) :]
    if rest and varargs is None:
        raise error(f"{len(args)} positional arguments given, but forward takes {len(positional)}")
    if rest:
        named[varargs] = tuple(rest)
    for name, value in kwargs.items():
        if name in named:
            raise error(f"argument {name!r} is given twice")
        named[name] = value
    leaves, _ = pytree.tree_flatten_with_path(named)
    return {leaf_name(path): leaf for path, leaf in leaves}


@dataclass(frozen=True)
class Call:
    """Example inputs, sorted out: what goes to forward, and what only to the loss function."""

    args: tuple
    kwargs: dict[str, Any]
    loss_only: dict[str, Any]
    signature: Signature


def read_call(forward: Callable, example_inputs: Any, with_loss: bool, extra: Mapping[str, Any]) -> Call:
    """Match example inputs (a dict of keyword arguments, a tuple, or one tensor) with ``forward``.

    Args:
        with_loss: entries of a dict that ``forward`` doesn't name are kept for the loss function instead of being an error.
        extra: constants given besides, where ``forward`` takes them and the user did not give them.

    Raises:
        CaptureError: an argument is missing or unknown.
    """
    parameters = inspect.signature(forward).parameters
    kinds = inspect.Parameter
    positional = tuple(n for n, p in parameters.items() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD))
    varargs = next((n for n, p in parameters.items() if p.kind is kinds.VAR_POSITIONAL), None)
    named = {n for n, p in parameters.items() if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    defaults = {n: p.default for n, p in parameters.items() if p.default is not kinds.empty}

    if isinstance(example_inputs, Mapping):
        args, kwargs = (), dict(example_inputs)
    elif isinstance(example_inputs, (tuple, list)):
        args, kwargs = tuple(example_inputs), {}
    elif isinstance(example_inputs, torch.Tensor):
        args, kwargs = (example_inputs,), {}
    else:
        raise CaptureError(f"example_inputs is a {type(example_inputs).__name__}", hint="give a dict of keyword arguments, or a tuple")

    unknown = [n for n in kwargs if n not in named]
    loss_only: dict[str, Any] = {}
    if with_loss and (named or not takes_any):
        loss_only = {n: kwargs.pop(n) for n in unknown}
    elif unknown and not takes_any:
        raise CaptureError(f"forward takes no argument {unknown[0]!r}", hint=f"it takes {', '.join(parameters)}")
    taken = set(positional[: len(args)])
    for name, value in extra.items():
        if name in named and name not in kwargs and name not in taken:
            kwargs[name] = value
    try:
        inspect.signature(forward).bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(f"example_inputs don't fit forward: {error}", hint=f"forward takes {', '.join(parameters)}") from error

    leaves = _leaves(args, {**kwargs, **loss_only}, positional, varargs, CaptureError)
    tensors = tuple(n for n, leaf in leaves.items() if isinstance(leaf, torch.Tensor))
    constants = {n: leaf for n, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)}
    # what we add ourselves need not be given at a call, so it is the default now
    defaults.update({n: v for n, v in extra.items() if n in kwargs and same(kwargs[n], v) and n not in _given(example_inputs)})
    return Call(args, kwargs, loss_only, Signature(positional, tensors, constants, defaults, varargs))


def _given(example_inputs: Any) -> set[str]:
    return set(example_inputs) if isinstance(example_inputs, Mapping) else set()
