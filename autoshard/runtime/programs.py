"""The programs of one compiled model, one for each mode and size that it is called with, all on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.errors import AutoshardError, RunError
from autoshard.runtime.interface import Interface
from autoshard.runtime.stage import StageModule

LIMIT = 8
"""Programs beside the first: more sizes than that should be padded."""


@dataclass
class Compiled:
    """A program: this rank's stage of it, what the user sees of it, and what runs its micro-batches (``Loop``, or ``Pipeline``)."""

    stage: StageModule
    interface: Interface
    runner: Any


class Programs:
    """Which program a call runs.

    Args:
        first: its stage holds the weights.
        runner: of a stage.

    again: compiles another program, given its mode and the call's arguments; None if only the first can be called. A collective.
    """

    def __init__(self, first: Compiled, runner: Callable[[StageModule], Any]):
        self.first, self._runner = first, runner
        self.again: Callable[[bool, tuple, Mapping[str, Any]], tuple[StageModule, Interface]] | None = None
        self._others: dict[tuple, Compiled] = {}

    def pick(self, training: bool, args: tuple, kwargs: Mapping[str, Any]) -> Compiled:
        """The program for a call in this mode with these arguments; compiled now, if it is the first of its kind.

        Raises:
            RunError: there is none, naming the argument or the mode. The same on every rank.
        """
        face = self.first.interface
        values = face.values(args, kwargs)
        shapes = tuple(tuple(values[argument.name].shape) for argument in face.arguments)
        as_captured = face.training in (None, training)
        if as_captured and shapes == tuple(argument.shape for argument in face.arguments):
            return self.first
        if self.again is None:
            raise self._mismatch(training, shapes)
        key = (training, shapes)
        if key not in self._others:
            if len(self._others) == LIMIT:
                what = f"{self._mismatch(training, shapes).what}, and for more than {LIMIT} others"
                raise RunError(what, hint="pad batches to a few sizes")
            self._others[key] = self._compile(training, shapes, args, kwargs)
        other = self._others[key]
        other.stage.share_buffers(self.first.stage)
        if torch.is_grad_enabled() and not other.stage.alike:
            raise RunError(
                f"{self._mismatch(training, shapes).what}, and this batch can't be trained on: gradients would lie otherwise",
                hint="pad the batch, or call the model under torch.no_grad()",
            )
        return other

    def _compile(self, training: bool, shapes: tuple, args: tuple, kwargs: Mapping[str, Any]) -> Compiled:
        try:
            stage, interface = self.again(training, args, kwargs)
        except AutoshardError as error:
            mismatch = self._mismatch(training, shapes)
            raise RunError(f"{mismatch.what}, and can't be compiled for this call too: {error}", hint=mismatch.hint) from error
        return Compiled(stage, interface, self.first.runner if stage is self.first.stage else self._runner(stage))

    def _mismatch(self, training: bool, shapes: tuple) -> RunError:
        """How a call differs from what the first program was compiled for."""
        face = self.first.interface
        for argument, shape in zip(face.arguments, shapes):
            if shape != argument.shape:
                return face.wrong_shape(argument, shape)
        modes = ("eval", "train")
        return RunError(
            f"the model was compiled in {modes[face.training]} mode, but is called in {modes[training]} mode",
            hint=f"call .{modes[face.training]}(), or compile the model in the other mode too",
        )
