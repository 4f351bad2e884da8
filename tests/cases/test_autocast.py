"""Forwards with torch.autocast: what it casts, the program casts."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoshard.capture import capture
from autoshard.errors import CaptureError
from cases.test_inside import PINS, Outer, batch, name
from cases.tools import equal, on_ranks, prepared, refused

BF16 = ("cpu", torch.bfloat16)


def whole(m, x):
    with torch.autocast(*BF16):
        return m.last(F.gelu(m.second(m.first(x)))).float()


def float16(m, x):
    with torch.autocast("cpu", torch.float16):
        return m.last(F.gelu(m.second(m.first(x)))).float()


@torch.autocast(*BF16)
def decorated(m, x):
    return m.last(m.first(x)).float()


def part(m, x):
    with torch.autocast(*BF16):
        y = m.first(x)
    return m.last(m.second(y.float()))


def off_inside(m, x):
    with torch.autocast(*BF16):
        y = m.first(x)
        with torch.autocast("cpu", enabled=False):
            z = m.second(y.float())
        return m.last(z).float()


def cross_entropy(m, x):
    with torch.autocast(*BF16):
        return F.cross_entropy(m.last(m.first(x)), x.argmax(-1), reduction="none")


def no_grad_inside(m, x):
    with torch.autocast(*BF16):
        y = m.first(x)
        with torch.no_grad():
            target = m.second(y).softmax(-1)
        return m.last(y) - target


def inside_no_grad(m, x):
    with torch.no_grad(), torch.autocast(*BF16):
        target = m.second(x).softmax(-1)
    return m.last(m.first(x)) - target


def checkpoint_inside(m, x, reentrant):
    with torch.autocast(*BF16):
        y = m.first(x)
        return m.last(y + checkpoint(lambda t: m.second(F.gelu(t)), y, use_reentrant=reentrant)).float()


def inside_checkpoint(m, x):
    def inner(t):
        with torch.autocast(*BF16):
            return m.second(F.gelu(t))

    y = m.first(x)
    return m.last(y + checkpoint(inner, y, use_reentrant=False))


def einsum(m, x):
    with torch.autocast(*BF16):
        return m.last(torch.einsum("bi,ji->bj", m.first(x), m.second.weight)).float()  # not cast itself, but the product in it is


def mixed_operands(m, x):
    with torch.autocast(*BF16):
        y = m.first(x)
        z = torch.cat([x, y], -1)  # in fp32
        q, k = z.view(-1, 2, 2, 4), m.second(y).view(-1, 2, 1, 4)
        return m.last(F.scaled_dot_product_attention(q, k, k).flatten(1)[:, :8]).float()


def in_place_inside(m, x):
    with torch.autocast(*BF16):
        y = m.first(x) * 1
        y.mul_(2)[:, :4] += 1
        return m.last(y).float()


CASES = [
    whole, float16, decorated, part, off_inside, cross_entropy, no_grad_inside, inside_no_grad,
    functools.partial(checkpoint_inside, reentrant=False), functools.partial(checkpoint_inside, reentrant=True),
    inside_checkpoint, einsum, mixed_operands, in_place_inside,
]  # fmt: skip


@pytest.mark.parametrize("function", CASES, ids=name)
def test_equal_to_one_device(function):
    equal(lambda: Outer(function), batch, (2, 2, 2), PINS, dtype=None)


@pytest.mark.parametrize("function", CASES, ids=name)
def test_one_rank_casts_what_eager_casts(function):
    """What bf16 allows would hide a missing cast: on one rank nothing is added up in another order."""
    model, example = prepared(lambda: Outer(function), batch, None)
    loss = model(**example)
    loss.backward()

    def work(sharded, example):
        found = sharded(**example)
        found.backward()
        return found.detach(), sharded.grad_dict()

    ((found, gradients),) = on_ranks(lambda: Outer(function), example, (1, 1, 1), work, dtype=None)
    torch.testing.assert_close(found, loss.detach(), rtol=1e-6, atol=0)
    for key, p in model.named_parameters():
        if p.grad is None:
            assert gradients.get(key) is None, key
        else:
            assert gradients[key].dtype == torch.float32
            torch.testing.assert_close(gradients[key], p.grad, rtol=1e-5, atol=1e-8, msg=key)


def casts(function) -> list[str]:
    """The dtype of each cast in a captured forward."""
    model, example = prepared(lambda: Outer(function), batch, None)
    nodes = capture(model, example).program.graph.find_nodes(op="call_function", target=torch.ops.aten.to.dtype)
    assert all(node.meta["module"] and node.meta["source"] for node in nodes)
    return [str(node.args[1]).removeprefix("torch.") for node in nodes]


def test_casts_belong_to_the_ops_that_need_them():
    assert casts(part) == ["bfloat16"] * 3 + ["float32"]
    assert casts(cross_entropy) == ["bfloat16"] * 5 + ["float32"]  # the activation between is in bf16


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autocast_for_another_type_of_device_does_nothing():
    def elsewhere(m, x):
        with torch.autocast("cuda", torch.float16):
            return m.last(m.first(x))

    def elsewhere_inside(m, x):
        with torch.autocast(*BF16), torch.autocast("cuda", torch.float16):
            return m.last(m.first(x)).float()

    assert casts(elsewhere) == []
    assert casts(elsewhere_inside) == ["bfloat16"] * 5 + ["float32"]
    equal(lambda: Outer(elsewhere), batch, (2, 1, 2), dtype=None)


def test_float64_is_not_cast():
    def as_it_is(m, x):
        with torch.autocast(*BF16):
            return m.last(m.first(x))

    equal(lambda: Outer(as_it_is), batch, (2, 2, 1), PINS)


def test_a_vmap_inside_is_refused():
    def vmap(m, x):
        with torch.autocast(*BF16):
            return torch.vmap(lambda row: m.last(m.first(row)))(x).float()

    refused(lambda: Outer(vmap), batch, (2, 1, 1), "uses torch.vmap inside torch.autocast", "inner.first", error=CaptureError)
