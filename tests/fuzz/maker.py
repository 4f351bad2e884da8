"""Grows a random model: every step is run on real tensors as it is added, so shapes, dtypes and sizes of numbers are known."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from .spec import Spec, Step, Value, Weight

LARGEST = 3000  # elements of a value
SIZES = (1, 2, 2, 3, 4, 4, 5, 6, 8, 8, 12)
BATCHES = (1, 2, 3, 4, 4, 4, 6, 6, 8, 8, 12)


class SkipStep(Exception):
    """A step that has nothing to work on here."""


class Maker:
    """A model in the making. ``rng`` draws what it looks like, torch's generator the numbers."""

    def __init__(self, rng: Random):
        self.rng = rng
        self.batch = rng.choice(BATCHES)
        self.sizes = [rng.choice(SIZES) for _ in range(3)] + [rng.choice((4, 6, 8, 12))]
        self.module = nn.Module()
        self.scope: dict = {"torch": torch, "F": F, "nn": nn, "self": self.module}
        self.inputs: list[tuple[str, str]] = []
        self.weights: list[Weight] = []
        self.steps: list[Step] = []
        self.values: list[Value] = []
        self.names = 0

    # --- values ------------------------------------------------------------------------------------------------------

    def input(self, text: str, lead: bool = True) -> Value:
        name = f"x{len(self.inputs)}"
        tensor = eval(text, self.scope)
        self.inputs.append((name, text))
        self.scope[name] = tensor
        return self._add(name, tensor, lead)

    def _add(self, name: str, tensor: torch.Tensor, lead: bool) -> Value:
        value = Value(name, tensor, lead)
        self.values.append(value)
        return value

    def weight(self, *shape: int, scale: float = 0.5, offset: float = 0.0, tie: bool = True) -> str:
        """A parameter of this shape, by the expression that reads it: new, sometimes an old one, sometimes frozen or a buffer."""
        same = [w.name for w in self.weights if getattr(getattr(self.module, w.name), "shape", None) == torch.Size(shape)]
        if tie and same and self.rng.random() < 0.3:
            return f"self.{self.rng.choice(same)}"
        text = f"{scale} * torch.randn({', '.join(map(str, shape))})" if shape else f"{scale} * torch.randn(())"
        text = f"{offset} + {text}" if offset else text
        if self.rng.random() < 0.1:
            return self.hold(Weight(f"w{len(self.weights)}", text, buffer=True))
        return self.hold(Weight(f"w{len(self.weights)}", f"nn.Parameter({text})", frozen=self.rng.random() < 0.1))

    def fixed(self, text: str, buffer: bool = False) -> str:
        """A parameter or buffer that is made by ``text``, by the expression that reads it."""
        return self.hold(Weight(f"w{len(self.weights)}", text, buffer=buffer))

    def part(self, text: str) -> str:
        """A submodule, by the expression that reads it."""
        return self.hold(Weight(f"m{len(self.weights)}", text, frozen=self.rng.random() < 0.1))

    def hold(self, weight: Weight) -> str:
        """Adds what ``__init__`` makes; the expression that reads it."""
        made = eval(weight.text, self.scope)
        if weight.buffer:
            self.module.register_buffer(weight.name, made)
        else:
            setattr(self.module, weight.name, made)
            if weight.frozen:
                made.requires_grad_(False)
        self.weights.append(weight)
        return f"self.{weight.name}"

    def pick(self, fits: Callable[[Value], bool] = lambda v: True) -> Value:
        """A value that fits, the newest ones most often."""
        found = [v for v in self.values if fits(v)]
        if not found:
            raise SkipStep
        n = len(found)
        return self.rng.choices(found, [1.0 / (n - i) for i in range(n)])[0]

    def real(self, dims: int | None = None, least: int = 1) -> Value:
        """A floating point value of so many dims."""
        return self.pick(lambda v: v.floating and (len(v.shape) == dims if dims is not None else len(v.shape) >= least))

    def dim(self, value: Value, least: int = 1) -> int:
        """A dim of at least this size; seldom that of the samples, which must not meet if the batch is to be cut."""
        dims = [d for d, n in enumerate(value.shape) if n >= least]
        free = [d for d in dims if not (value.lead and d == 0)]
        if free and self.rng.random() < 0.93:
            dims = free
        if not dims:
            raise SkipStep
        return self.rng.choice(dims)

    def need_distinct(self, value: Value, dim: int) -> None:
        """Skip the step unless no two numbers along ``dim`` are equal but for rounding."""
        ordered = value.tensor.detach().sort(dim).values
        if ordered.shape[dim] > 1 and bool((ordered.diff(dim=dim) < 1e-9).any()):
            raise SkipStep

    def spell(self, dim: int, value: Value) -> int:
        """A dim, sometimes counted from the end."""
        return dim - len(value.shape) if self.rng.random() < 0.5 else dim

    # --- steps -------------------------------------------------------------------------------------------------------

    def name(self) -> str:
        self.names += 1
        return f"v{self.names - 1}"

    def call(self, template: str, *inputs: Value | str, outs: int = 1, lead: bool | None = None) -> list[Value]:
        """Adds ``OUT = template``; where the template holds ``OUT`` itself it is taken as whole statements."""
        names = [self.name() for _ in range(outs)]
        text = template.replace("OUT", names[0]) if "OUT" in template else f"{', '.join(names)} = {template}"
        step = Step(tuple(names), text, tuple(i if isinstance(i, str) else i.text for i in inputs))
        exec("\n".join(step.lines()), self.scope)
        read = [i for i in inputs if isinstance(i, Value)]
        results = [self.scope[name] for name in names]
        if not all(map(_fit, results)):
            raise SkipStep
        self.steps.append(step)
        if lead is None:
            lead = any(i.lead for i in read)
        return [self._add(name, t, lead and bool(t.shape) and t.shape[0] == self.batch) for name, t in zip(names, results)]

    def spec(self, loss: str, outputs: list[str]) -> Spec:
        return Spec(tuple(self.inputs), tuple(self.weights), tuple(self.steps), loss, tuple(outputs))

    def snapshot(self) -> SimpleNamespace:
        return SimpleNamespace(weights=len(self.weights), steps=len(self.steps), values=len(self.values), inputs=len(self.inputs))

    def back_to(self, before: SimpleNamespace) -> None:
        for weight in self.weights[before.weights :]:
            delattr(self.module, weight.name)
        for kept, n in (
            (self.weights, before.weights), (self.steps, before.steps), (self.values, before.values), (self.inputs, before.inputs)
        ):  # fmt: skip
            del kept[n:]


def _fit(t) -> bool:
    """Whether a value is of use: not too large, finite, and not nothing but rounding."""
    if not isinstance(t, torch.Tensor) or not 0 < t.numel() <= LARGEST:
        return False
    if not t.is_floating_point():
        return True
    top = t.detach().abs().max()
    return bool(t.isfinite().all()) and top < 100 and (top > 1e-3 or top == 0)
