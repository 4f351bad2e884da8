"""What the user sees of a compiled model: the arguments it takes and the structure it returns. The same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.errors import RunError
from autoshard.signature import Signature
from autoshard.torch_private import pytree


@dataclass(frozen=True)
class Argument:
    """A tensor argument: its shape in the *global* batch, and the dim that holds the batch (None: none). cast: whether values of other
    floating dtypes are converted."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None = 0
    cast: bool = False


@dataclass(frozen=True)
class Interface:
    """Arguments and result of the compiled model.

    arguments: the tensor arguments; their names are those of ``signature.tensors``.
    out_spec: structure of the result; without one a tuple of its tensors is returned.
    constants: leaves of the result that are no tensors, by index among all leaves.
    training: the mode the model was captured in; None if the mode makes no difference.
    """

    signature: Signature
    arguments: tuple[Argument, ...]
    out_spec: pytree.TreeSpec | None = None
    constants: dict[int, Any] = field(default_factory=dict)
    training: bool | None = None

    def bind(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensor arguments of a call, by name.

        Raises:
            RunError: naming the argument that is missing, unknown, or of another value, shape or dtype than was compiled for. The same
                on every rank that is given the same batch, before any communication.
        """
        values = self.values(args, kwargs)
        for argument in self.arguments:
            if tuple(values[argument.name].shape) != argument.shape:
                raise self.wrong_shape(argument, tuple(values[argument.name].shape))
        return values

    def values(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """``bind``, whatever the shapes."""
        values = self.signature.bind(args, kwargs)
        for argument in self.arguments:
            value = values[argument.name]
            if argument.cast and value.is_floating_point():
                value = values[argument.name] = value.to(argument.dtype)
            if value.dtype != argument.dtype:
                raise RunError(
                    f"argument {argument.name!r} has dtype {value.dtype}; the model was compiled for {argument.dtype}",
                    hint=f"convert it with .to({argument.dtype})",
                )
            if value.requires_grad and torch.is_grad_enabled():
                raise RunError(
                    f"argument {argument.name!r} requires grad; gradients are computed for parameters only",
                    hint="detach it, or make it a parameter of the model",
                )
        return values

    @staticmethod
    def wrong_shape(argument: Argument, shape: tuple[int, ...]) -> RunError:
        """The error for an argument of another shape than was compiled for."""
        hint, batch = "compile the model again for this shape", argument.batch_dim
        others = [d for d, (a, b) in enumerate(zip(shape, argument.shape)) if a != b and d != batch]
        if batch is not None and len(shape) == len(argument.shape) and not others:
            hint = "every rank is given the whole global batch; compile again for another size, or drop or pad the last batch"
        return RunError(f"argument {argument.name!r} has shape {shape}; the model was compiled for {argument.shape}", hint=hint)

    def result(self, tensors: Mapping[int, Any]) -> Any:
        """The model's own result from its tensor leaves (tensors, or what stands for them) by leaf index."""
        if self.out_spec is None:
            return tuple(tensors[i] for i in sorted(tensors))
        leaves = [self.constants[i] if i in self.constants else tensors[i] for i in range(self.out_spec.num_leaves)]
        return pytree.tree_unflatten(leaves, self.out_spec)
