"""What forward does to autograd, to precision, and to state between steps: equal, or refused by name."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from autoshard.errors import CaptureError
from cases.tools import data, equal, refused, tensor


class Model(nn.Module):
    """Three layers of width 8, two buffers, and a function that makes a loss of them."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(8))
        self.offset = torch.zeros(8)

    def forward(self, x):
        return self.function(self, x).pow(2).mean()


class Outer(nn.Module):
    """The model inside another one: its buffers are not those of the module that is compiled."""

    def __init__(self, function):
        super().__init__()
        self.inner = Model(function)

    def forward(self, x):
        return self.inner(x)


def batch():
    return {"x": torch.randn(8, 8)}


PINS = data("S(0)", "x") | tensor("S(0)", "inner.first.weight")


# --- what autograd must not see ----------------------------------------------------------------------------------------


def no_grad(m, x):
    y = m.first(x)
    with torch.no_grad():
        target = m.second(y).softmax(-1)
    return m.last(y) - target


def no_grad_on_complex_numbers(m, x):
    y = torch.view_as_complex(m.first(x).reshape(-1, 4, 2))
    with torch.no_grad():
        length = y / (y.abs() + 1)
    return m.last(torch.view_as_real(y * length).flatten(1))


def enable_grad_inside_no_grad(m, x):
    with torch.no_grad():
        y = m.first(x)
        with torch.enable_grad():
            z = m.second(y)
    return m.last(z)


def inference_mode(m, x):
    with torch.inference_mode():
        target = m.second(x)
    return m.last(m.first(x)) - target


def set_grad_enabled(m, x):
    torch.set_grad_enabled(False)
    target = m.second(x)
    torch.set_grad_enabled(True)
    return m.last(m.first(x)) - target


@torch.no_grad()
def helper(m, x):
    return m.second(x).mean(0)


def decorated(m, x):
    return m.last(m.first(x)) - helper(m, x)


def detach(m, x):
    y = m.first(x)
    return m.last(y) * m.second(y).detach().sigmoid()


def detach_of_a_weight(m, x):
    return F.linear(m.first(x), m.second.weight.detach()) + m.second(x)


def detach_in_place(m, x):
    y = m.first(x)
    z = m.second(y)
    before = z + 1
    z.detach_()
    return m.last(y) * z + before


def straight_through(m, x):
    y = m.first(x)
    return m.last(y + (y.round() - y).detach())


def gradient_as_a_value(m, x):
    y = m.first(x)
    (g,) = torch.autograd.grad(y.pow(2).sum(), m.first.weight, create_graph=True)
    return m.last(y) * g.pow(2).mean()


# --- checkpoints of the user's own ----------------------------------------------------------------------------------------


def checkpoints(m, x, reentrant):
    y = m.first(x)
    y = y + checkpoint(lambda t: m.second(F.gelu(t)), y, use_reentrant=reentrant)
    return m.last(y)


def one_checkpoint_in_another(m, x):
    y = m.first(x)
    return m.last(checkpoint(lambda t: checkpoint(lambda u: m.second(u).tanh(), t, use_reentrant=True) + t, y, use_reentrant=False))


def checkpoint_of_several_values(m, x):
    a, b = checkpoint(lambda t, by: (m.second(t) * by, t.tanh()), m.first(x), by=2.0, use_reentrant=False)
    return m.last(a * b)


def selective_checkpoint(m, x):
    keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return m.last(checkpoint(lambda t: m.second(F.gelu(t)), m.first(x), use_reentrant=False, context_fn=keep))


def checkpointed_sequence(m, x):
    return checkpoint_sequential(nn.Sequential(m.first, m.second, m.last), 2, x, use_reentrant=False)


def reentrant_checkpoint_of_the_batch(m, x):
    return m.last(checkpoint(m.first, x, use_reentrant=True))  # on one device it trains nothing inside


# --- in place, and state -------------------------------------------------------------------------------------------------


def in_place(m, x):
    y = m.first(x) * 1
    y[:, ::2] += 1
    y.view(-1, 2, 4)[:, 1].mul_(3)
    y.clamp_(-2, 2).tanh_()
    z = torch.zeros_like(y)
    z[:, 1:] = y[:, :-1]
    z[x > 1] = 0.5
    return m.last(z.index_add_(1, torch.tensor([0, 3]), y[:, :2]))


def counter(m, x):
    m.steps += 1
    return m.last(m.first(x)) / m.steps


def counter_replaced(m, x):
    before = m.steps
    m.steps = m.steps + 1
    return m.last(m.first(x)) / (m.steps + before)


def moving_average(m, x):
    y = m.first(x)
    with torch.no_grad():
        m.mean.mul_(0.9).add_(0.1 * y.mean(0))
    return m.last(y - m.mean)


def moving_average_copied(m, x):
    y = m.first(x)
    m.mean.copy_(0.9 * m.mean + 0.1 * y.detach().mean(0))
    return m.last(y - m.mean)


def attribute_that_no_one_reads(m, x):
    m.seen = m.first(x)
    m.calls = getattr(m, "calls", 0) + 1
    return m.last(m.seen)


def constant_made_at_first_use(m, x):
    if not hasattr(m, "mask"):
        m.mask = torch.ones(8, 8, dtype=torch.bool).tril()
    return m.last(m.first(x).mm(m.second.weight.masked_fill(~m.mask, 0.0)))


# --- complex numbers, and functions of functions -------------------------------------------------------------------------


def fourier(m, x):
    y = torch.fft.rfft(m.first(x))
    return m.last(torch.fft.irfft(y * torch.exp(-1j * y.abs()), n=8))


def complex_weight(m, x):
    w = torch.complex(m.second.weight, m.second.weight.T)
    y = m.first(x).to(w.dtype) @ w
    return m.last(y.abs()) + y.imag


def polar(m, x):
    y = torch.polar(m.first(x).abs(), m.second(x))
    return m.last((y * y.conj()).real) + y.angle()


def vmap(m, x):
    return torch.vmap(lambda row: m.last(m.first(row).tanh()))(x)


def functional_call(m, x):
    return m.last(torch.func.functional_call(m.second, {"weight": m.first.weight * 2}, (x,)))


EQUAL = [
    no_grad, no_grad_on_complex_numbers, enable_grad_inside_no_grad, inference_mode, set_grad_enabled, decorated, detach,
    detach_of_a_weight, detach_in_place, straight_through, gradient_as_a_value, functools.partial(checkpoints, reentrant=False),
    functools.partial(checkpoints, reentrant=True), one_checkpoint_in_another, checkpoint_of_several_values, selective_checkpoint,
    checkpointed_sequence, reentrant_checkpoint_of_the_batch, in_place, counter, counter_replaced, moving_average, moving_average_copied,
    attribute_that_no_one_reads, constant_made_at_first_use, fourier, complex_weight, polar, vmap, functional_call,
]  # fmt: skip


def name(function) -> str:
    return getattr(function, "__name__", "") or f"{function.func.__name__}-{function.keywords}"


@pytest.mark.parametrize("function", EQUAL, ids=name)
def test_equal_to_one_device(function):
    """Buffers are compared too: those that forward changes are the same after every step."""
    equal(lambda: Outer(function), batch, (2, 2, 2), PINS)


def test_a_buffer_made_at_first_use():
    class Cached(Model):
        def __init__(self, function):
            super().__init__(function)
            self.register_buffer("table", None, persistent=False)

    def cached(m, x):
        if m.table is None:
            m.table = torch.linspace(0, 1, 8, dtype=x.dtype)
        return m.last(m.first(x) * m.table)

    equal(lambda: Cached(cached), batch, (2, 2, 1), data("S(0)", "x"))


# --- refused -------------------------------------------------------------------------------------------------------------


def written_under_no_grad(m, x):
    y = m.first(x) * 1
    with torch.no_grad():
        y[:, 0] = 0
    return m.last(y)


def written_through_detach(m, x):
    y = m.first(x) * 1
    y.detach().mul_(2)
    return m.last(y)


def tensor_hook(m, x):
    y = m.first(x)
    y.register_hook(lambda grad: grad * 2)
    return m.last(y)


def backward_inside(m, x):
    m.first(x).sum().backward()
    return m.last(x)


def condition(m, x):
    return torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t * 3, (m.first(x),))


def state_in_an_attribute(m, x):
    y = m.first(x) + getattr(m, "state", 0.0)
    m.state = y.detach()
    return m.last(y)


def counter_in_an_attribute(m, x):
    m.calls = getattr(m, "calls", 0) + 1
    return m.last(m.first(x)) * m.calls


def tensor_that_is_no_buffer(m, x):
    m.offset.add_(1)
    return m.last(m.first(x)) + m.offset


def buffer_of_another_shape(m, x):
    m.mean = m.first(x).detach()
    return m.last(m.first(x))


REFUSED = [
    (written_under_no_grad, "changes a value in place where autograd does not see it (aten::fill_)"),
    (written_through_detach, "changes a value in place where autograd does not see it (aten::mul_)"),
    (tensor_hook, "uses Tensor.register_hook inside forward"),
    (backward_inside, "uses backward() inside forward"),
    (condition, "uses the operator 'cond' inside forward"),
    (state_in_an_attribute, "reads what it left behind the time before, in 'inner.state'"),
    (counter_in_an_attribute, "reads what it left behind the time before, in 'inner.calls'"),
    (tensor_that_is_no_buffer, "changes the attribute 'inner.offset', a tensor that is no buffer"),
    (buffer_of_another_shape, "replaces the buffer 'inner.mean'"),
]


@pytest.mark.parametrize("function, text", REFUSED, ids=[function.__name__ for function, _ in REFUSED])
def test_refused(function, text):
    refused(lambda: Outer(function), batch, (2, 2, 1), text, "hint:", error=CaptureError)


def test_hooks_on_gradients_are_refused():
    def hooked(what):
        model = Outer(no_grad)
        if what == "module":
            model.inner.first.register_full_backward_hook(lambda *grads: None)
        else:
            model.inner.first.weight.register_hook(lambda grad: grad * 2)
        return model

    refused(lambda: hooked("module"), batch, (2, 1, 1), "the module 'inner.first' has a hook on its gradient", error=CaptureError)
    refused(lambda: hooked("parameter"), batch, (2, 1, 1), "the parameter 'inner.first.weight' has a hook", error=CaptureError)
