"""What can't be captured, each reduced to a forward of a few lines, and what the error says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from autoshard.capture import capture
from autoshard.errors import CaptureError


class Flip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Model(nn.Module):
    """Two layers of width 4, a buffer, a norm, and what a row of the table does with them."""

    def __init__(self, function: Callable):
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.InstanceNorm1d(3, track_running_stats=True)
        self.register_buffer("table", torch.zeros(4))

    def forward(self, x):
        return self.last(self.function(self, x)).pow(2).mean()


def branch(m, x):
    return m.first(x) if x.sum() > 0 else x


def selection(m, x):
    return m.first(x)[x > 0][:4]


def number(m, x):
    return m.first(x) * x.max().item()


def to_numpy(m, x):
    return m.first(x) * float(x.detach().numpy().mean())


def packed(m, x):
    rows = nn.utils.rnn.pack_padded_sequence(m.first(x), torch.tensor([3, 2]), batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(rows, batch_first=True)[0]


def condition(m, x):
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (m.first(x),))


def own_backward(m, x):
    return Flip.apply(m.first(x))


def hook(m, x):
    y = m.first(x)
    y.register_hook(lambda grad: grad * 2)
    return y


def backward(m, x):
    m.first(x).sum().backward()
    return x


def functional_gradient(m, x):
    return torch.func.grad(lambda z: m.first(z).pow(2).sum())(x)


def data(m, x):
    return m.first(x).data


def write_parameter(m, x):
    with torch.no_grad():
        m.first.weight.clamp_(-1, 1)
    return m.first(x)


def write_input(m, x):
    return m.first(x.add_(1))


def write_unseen(m, x):
    y = m.first(x) * 1
    with torch.no_grad():
        y[:, 0] = 0
    return y


def other_shape(m, x):
    m.table = m.first(x).detach()
    return x


def state(m, x):
    m.calls = getattr(m, "calls", 0) + 1
    return m.first(x) * m.calls


def instance_statistics(m, x):
    return m.norm(m.first(x))


REFUSED: dict[str, Callable] = {
    "`if x.sum() > 0:`, `assert`, loops over data": branch,
    "`y[x > 0]`, `nonzero`, `unique`": selection,
    "`x.max().item()`, `tolist()`": number,
    "`x.numpy()`": to_numpy,
    "`pack_padded_sequence`": packed,
    "`torch.cond`, `while_loop`": condition,
    "an `autograd.Function` with a backward": own_backward,
    "`register_hook` on a value": hook,
    "`backward()`": backward,
    "`torch.func.grad`, `jacrev`": functional_gradient,
    "`x.data`": data,
    "a parameter changed in place": write_parameter,
    "an input changed in place": write_input,
    "a value with a gradient changed under `no_grad`": write_unseen,
    "a buffer replaced by one of another shape": other_shape,
    "state in an attribute, read by the next step": state,
    "running statistics of an instance norm": instance_statistics,
}
"""What forward does, as the README names it -> a forward that does it."""


def error_of(function: Callable) -> CaptureError:
    """The error that ``capture`` raises. RuntimeError if it raises none."""
    try:
        capture(Model(function), {"x": torch.zeros(2, 3, 4)})
    except CaptureError as error:
        return error
    raise RuntimeError(f"{function.__name__} is captured without an error")


def table() -> list[str]:
    """Lines of Markdown."""
    rows = [f"| {what} | {error_of(function).what} |" for what, function in REFUSED.items()]
    return ["| in forward | error |", "| --- | --- |", *rows]
