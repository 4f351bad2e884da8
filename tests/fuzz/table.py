"""A step for every op that has a rule: called on its sample arguments, whose numbers become weights and inputs of the model."""

from __future__ import annotations

import torch

from .maker import Maker, SkipStep, Value
from .registry import step

with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    from rule_samples import SAMPLES

OPS = sorted((op for op in SAMPLES if torch.Tag.nondeterministic_seeded not in op.tags and "empty" not in str(op)), key=str)


@step(5)
def any_op(m: Maker):
    call_op(m, m.rng.choice(OPS))


def call_op(m: Maker, op) -> None:
    if "lift_fresh" in str(op):  # no user calls it
        raise SkipStep
    arguments = m.rng.choice(SAMPLES[op])
    read: list[Value | str] = []
    named = arguments[-1] if isinstance(arguments[-1], dict) else {}
    texts = [_text(m, a, read) for a in arguments if not isinstance(a, dict)] + [f"{k}={_text(m, a, read)}" for k, a in named.items()]
    weights = [p for name, p in m.module.named_parameters() if f"self.{name}" in read]
    call = f"torch.ops.{op}({', '.join(texts)})"
    found = eval(call.format(*(r if isinstance(r, str) else r.text for r in read)), m.scope)
    tuples = isinstance(found, (tuple, list))
    outs = list(found) if tuples else [found]
    trained = [t for t in outs if isinstance(t, torch.Tensor) and t.requires_grad]
    if trained:  # what has no derivative on one device either is of no use
        torch.autograd.grad(sum(t.abs().sum() for t in trained), weights, allow_unused=True)
    for value in m.call(f"{call}{'[0]' * (tuples and len(outs) == 1)}", *read, outs=len(outs)):
        if value.tensor.is_complex():
            m.call("torch.view_as_real({0}.resolve_conj())", value)


def _text(m: Maker, argument, read: list) -> str:
    """An argument as source; tensors are added to ``read``."""
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(_text(m, a, read) for a in argument)}]"
    if not isinstance(argument, torch.Tensor):
        if isinstance(argument, torch.device):
            raise SkipStep
        return repr(argument)
    if not argument.numel():
        raise SkipStep
    if argument.is_complex():
        return f"torch.complex({_text(m, argument.real, read)}, {_text(m, argument.imag, read)})"
    lead = argument.dim() > 0 and argument.shape[0] == m.batch
    if argument.is_floating_point():
        rounded = [round(x, 3) for x in argument.flatten().tolist()]
        numbers = f"torch.tensor({rounded}).view({tuple(argument.shape)})"
        kind = m.rng.random()
        if lead and kind < 0.6:
            x = m.input(numbers)
            read.append(m.call("{0} * {1}", x, m.fixed(f"nn.Parameter(torch.ones({argument.shape[-1]}))"))[0] if kind < 0.4 else x)
        else:
            read.append(m.fixed(numbers, buffer=True) if kind > 0.95 else m.fixed(f"nn.Parameter({numbers})"))
    else:
        numbers = f"torch.tensor({argument.tolist()})"
        read.append(m.input(numbers) if lead and m.rng.random() < 0.6 else m.fixed(numbers, buffer=True))
    return f"{{{len(read) - 1}}}"
