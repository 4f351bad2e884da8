"""A random model as data, and as the source that a person can run."""

from __future__ import annotations

import linecache
from dataclasses import dataclass, replace

import torch
from torch import nn

HEADER = """import torch
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
"""


@dataclass(frozen=True)
class Weight:
    """Something that ``__init__`` makes: ``self.NAME = TEXT``. buffer: by register_buffer; frozen: its parameters take no gradient."""

    name: str
    text: str
    buffer: bool = False
    frozen: bool = False

    def lines(self) -> list[str]:
        if self.buffer:
            return [f'self.register_buffer("{self.name}", {self.text})']
        return [f"self.{self.name} = {self.text}"] + [f"self.{self.name}.requires_grad_(False)"] * self.frozen


@dataclass(frozen=True)
class Step:
    """Statements of ``forward``: ``{0}``, ``{1}`` stand for the values read (expressions), the names in ``outs`` are assigned."""

    outs: tuple[str, ...]
    template: str
    inputs: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        return self.template.format(*self.inputs).split("\n")


@dataclass(frozen=True)
class Spec:
    """A model. inputs: (name, expression that makes it). outputs: names returned beside the loss."""

    inputs: tuple[tuple[str, str], ...] = ()
    weights: tuple[Weight, ...] = ()
    steps: tuple[Step, ...] = ()
    loss: str = ""
    outputs: tuple[str, ...] = ()

    def source(self) -> str:
        """The module and a function that makes a batch, as Python."""
        names = [name for name, _ in self.inputs]
        body = [line for step in self.steps for line in step.lines()]
        made = [line for weight in self.weights for line in weight.lines()]
        outputs = "".join(f', "{name}": {name}' for name in self.outputs)
        lines = [HEADER, "", "class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in made]
        lines += ["", f"    def forward({', '.join(['self', *names])}):"]
        lines += [f"        {line}" for line in body]
        lines += [f'        return {{"loss": {self.loss}{outputs}}}', "", "", "def batch():"]
        lines += [f"    return {{{', '.join(f'{name!r}: {text}' for name, text in self.inputs)}}}"]
        return "\n".join(lines).replace("'", '"') + "\n"

    def load(self) -> tuple[nn.Module, dict]:
        """The module and one batch; what is random in them comes from torch's generator. The default dtype is float64 afterwards."""
        text = self.source()
        filename = f"<fuzz {abs(hash(text))}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        scope: dict = {"__name__": "fuzzed"}
        exec(compile(text, filename, "exec"), scope)
        return scope["Model"](), scope["batch"]()

    def pruned(self) -> Spec:
        """Without steps, weights and inputs that nothing reads (one input is left)."""
        wanted = [self.loss, *self.outputs]
        steps: list[Step] = []
        for step in reversed(self.steps):
            if any(mentions(text, out) for out in step.outs for text in wanted):
                steps.append(step)
                wanted += [step.template, *step.inputs]
        weights = tuple(w for w in self.weights if any(mentions(text, f"self.{w.name}") for text in wanted))
        inputs = tuple(i for i in self.inputs if any(mentions(text, i[0]) for text in wanted)) or self.inputs[:1]
        return replace(self, steps=tuple(reversed(steps)), weights=weights, inputs=inputs)


def mentions(text: str, name: str) -> bool:
    """Whether an expression reads a name; names are told apart by what is around them."""
    at = -1
    while (at := text.find(name, at + 1)) >= 0:
        before, after = text[at - 1 : at], text[at + len(name) : at + len(name) + 1]
        if not (before.isalnum() or before in ("_", ".") and not name.startswith("self")) and not (after.isalnum() or after == "_"):
            return True
    return False


@dataclass
class Value:
    """A value while a model is being made. text: the expression that reads it. lead: its dim 0 holds the samples."""

    text: str
    tensor: torch.Tensor
    lead: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def floating(self) -> bool:
        return self.tensor.is_floating_point()
