"""Makes a failing model, and what it failed on, as small as can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from .draws import Draw
from .spec import HEADER, Spec, Step, Weight
from .trial import Subject


def same_outcome(spec: Spec, draw: Draw, seed: int, key: str, kind: str) -> bool:
    """Whether a smaller model on a smaller draw still fails in the same way."""
    try:
        outcome = Subject(spec, seed).run(draw)
    except Exception:  # a model that does not even run
        return False
    return outcome.kind == kind and outcome.key == key


def shrink(spec: Spec, draw: Draw, fails: Callable[[Spec, Draw], bool], tries: int = 150) -> tuple[Spec, Draw]:
    """The smallest model and draw that greedy steps lead to and that still fail."""
    left = tries
    changed = True
    while changed and left > 0:
        changed = False
        for candidate in draw.smaller():
            left -= 1
            if fails(spec, candidate):
                draw, changed = candidate, True
                break
        for candidate in _smaller(spec):
            left -= 1
            if left <= 0:
                break
            if fails(candidate, draw):
                spec, changed = candidate, True
                break
    return spec, draw


def _smaller(spec: Spec):
    """Models with a part less: outputs, terms of the loss, then each step, the last ones first."""
    pruned = spec.pruned()
    if pruned != spec:
        yield pruned
    for i in range(len(spec.outputs)):
        yield replace(spec, outputs=spec.outputs[:i] + spec.outputs[i + 1 :]).pruned()
    terms = spec.loss.split(" + ")
    if len(terms) > 1:
        for i in range(len(terms)):
            yield replace(spec, loss=" + ".join(terms[:i] + terms[i + 1 :])).pruned()
    yield from _without_steps(spec)
    for i, weight in enumerate(spec.weights):
        if weight.frozen:
            yield replace(spec, weights=spec.weights[:i] + (replace(weight, frozen=False),) + spec.weights[i + 1 :])


def _without_steps(spec: Spec):
    """Models in which one step's results are an earlier value of the same shape, a new input, or a new weight."""
    scope: dict = {}
    exec(HEADER, scope)
    model, batch = spec.load()
    scope |= {"self": model, **batch}
    values: dict[str, torch.Tensor] = dict(batch)
    samples = max((t.shape[0] for t in batch.values() if t.dim()), default=1)
    for step in spec.steps:
        exec("\n".join(step.lines()), scope)
        values |= {name: scope[name] for name in step.outs}
    for i in reversed(range(len(spec.steps))):
        step = spec.steps[i]
        if step.template.endswith("= {0}"):  # stands for another value already
            continue
        earlier = [*batch, *(name for s in spec.steps[:i] for name in s.outs)]
        for instead in (_earlier(values, earlier), _new_input(samples), _new_weight):
            found = [instead(out, values[out]) for out in step.outs]
            if all(found):
                copies = tuple(Step((out,), f"{out} = {{0}}", (text,)) for out, (text, _) in zip(step.outs, found))
                inputs = tuple(made for _, made in found if isinstance(made, tuple))
                weights = tuple(made for _, made in found if isinstance(made, Weight))
                steps = spec.steps[:i] + copies + spec.steps[i + 1 :]
                yield replace(spec, steps=steps, inputs=spec.inputs + inputs, weights=spec.weights + weights).pruned()


def _earlier(values: dict[str, torch.Tensor], names: list[str]):
    def find(out: str, want: torch.Tensor):
        like = [n for n in names if values[n].shape == want.shape and values[n].dtype == want.dtype]
        return (like[-1], None) if like else None

    return find


def _new_input(samples: int):
    def find(out: str, want: torch.Tensor):
        if not want.dim() or want.shape[0] != samples:
            return None
        size = ", ".join(map(str, want.shape)) + ","
        text = f"torch.randn({size})" if want.is_floating_point() else f"torch.randint(0, 2, ({size}))"
        return f"x_{out}", (f"x_{out}", text + ".bool()" * (want.dtype == torch.bool))

    return find


def _new_weight(out: str, want: torch.Tensor):
    if not want.is_floating_point():
        return None
    size = ", ".join(map(str, want.shape)) or "()"
    return f"self.p_{out}", Weight(f"p_{out}", f"nn.Parameter(torch.randn({size}))")
