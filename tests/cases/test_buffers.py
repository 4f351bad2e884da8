"""Buffers that are not saved, and positions of a sequence that is cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.errors import RunError
from cases.tools import equal, on_ranks, prepared, refused, tensor


class Rotary(nn.Module):
    """Attention with rotary positions, of frequencies that are a buffer and are not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10 ** torch.arange(0, 4, dtype=torch.float32), persistent=False)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def rotate(self, x, angles):
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def forward(self, x):
        angles = torch.arange(x.shape[1])[:, None] * self.inv_freq
        q, k, v = (proj(x).unflatten(-1, (2, 8)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.rotate(q, angles).to(x.dtype), self.rotate(k, angles).to(x.dtype), v)
        return self.out(y.transpose(1, 2).flatten(2)).pow(2).mean()


def rows(*shape):
    return lambda: {"x": torch.randn(*shape)}


@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 1, 1), (1, 1, 2)], ids=str)
def test_a_buffer_that_is_not_saved(mesh):
    plan = equal(Rotary, rows(4, 8, 16), mesh, tensor("S(0)", "q.weight"))
    assert "inv_freq" in plan.params


def mixed():
    """Weights in bfloat16, frequencies in float32: what ``to`` gives when a model keeps them apart."""
    model = Rotary().bfloat16()
    model.inv_freq = 1.0 / 10 ** torch.arange(0, 4, dtype=torch.float32)
    return model


def test_a_buffer_keeps_its_own_dtype():
    def held(sharded, batch):
        sharded(**batch)
        return {name: (b.dtype, b.clone()) for name, b in sharded.named_buffers()}, list(sharded.state_dict())

    batch = {"x": torch.randn(4, 8, 16, dtype=torch.bfloat16)}
    for buffers, saved in on_ranks(mixed, batch, (2, 2, 1), held, dtype=None):
        dtype, value = buffers["inv_freq"]
        assert dtype == torch.float32 and torch.equal(value, mixed().inv_freq)
        assert "inv_freq" not in saved


def test_a_model_on_the_meta_device_is_planned_but_has_no_values_to_train():
    with torch.device("meta"):
        model = Rotary()
    batch = {"x": torch.empty(4, 8, 16, device="meta")}
    plan = autoshard.plan(model, (2, 2, 1), batch)
    assert plan.parameter_count == sum(p.numel() for p in model.parameters())
    with pytest.raises(RunError, match="'inv_freq'.* on the meta device"):
        autoshard.compile(model, (1, 1, 1), batch)


def test_values_given_to_a_model_made_on_the_meta_device():
    def deferred():
        with torch.device("meta"):
            model = Rotary()
        model = model.to_empty(device="cpu")
        torch.manual_seed(3)
        model.load_state_dict({name: torch.randn_like(value) * 0.1 for name, value in Rotary().state_dict().items()}, strict=True)
        model.inv_freq.copy_(1.0 / 10 ** torch.arange(0, 4))
        return model

    equal(deferred, rows(4, 8, 16), (2, 2, 1), tensor("S(0)", "q.weight"))


class Positions(nn.Module):
    """Learned, rotary and relative positions, over a sequence of 8 that is cut in two."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.norm, self.up, self.down = kind, nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.places, self.bias = nn.Embedding(12, 8), nn.Parameter(torch.randn(12, 12))
        self.register_buffer("angles", torch.randn(12, 8))

    def forward(self, x):
        t = x.shape[1]
        if self.kind == "learned":
            x = x + self.places(torch.arange(t))
        elif self.kind == "rotary":
            x = x * self.angles[:t].cos() + x.flip(-1) * self.angles[:t].sin()
        x = self.norm(x)
        if self.kind == "relative":
            x = x + (x @ x.transpose(1, 2) + self.bias[:t, :t]).softmax(-1) @ x
        return (x + self.down(F.gelu(self.up(x)))).pow(3).mean()


@pytest.mark.parametrize("kind", ("learned", "rotary", "relative"))
def test_positions_of_a_sequence_that_is_cut(kind):
    cut = {"embedding": {"tensor": "shard i0"}} if kind == "learned" else {}  # the second rank looks up 4 to 7
    equal(lambda: Positions(kind), rows(2, 8, 8), (1, 2, 1), tensor("S(1)", "x", "norm"), force=cut)
    equal(lambda: Positions(kind), rows(2, 8, 8), (2, 2, 1), tensor("S(1)", "norm"), force=cut)


class Counter(nn.Module):
    """State that forward updates: a count of calls, a running mean, both saved."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("running", torch.zeros(8))

    def forward(self, x):
        y = self.linear(x)
        loss = (y - self.running).pow(2).mean()
        if self.training:
            self.calls += 1
            self.running.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return loss * self.calls


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)], ids=str)
def test_buffers_that_forward_updates(mesh):
    equal(Counter, rows(6, 8), mesh, {"x": {"data": "S(0)"}} | tensor("S(0)", "linear.weight"), microbatches=1)


def test_a_count_of_calls_counts_micro_batches_as_one():
    class Count(Counter):
        def forward(self, x):
            self.calls += 1
            return self.linear(x).pow(2).mean() * self.calls

    equal(Count, rows(6, 8), (1, 1, 1), microbatches=3)


def test_buffers_that_micro_batches_would_update_differently():
    refused(Counter, rows(6, 8), (1, 1, 1), "'running'", "2 micro-batches", microbatches=2)


def test_updated_buffers_are_the_same_on_all_ranks():
    model, batch = prepared(Counter, rows(6, 8), torch.float64)

    def steps(sharded, batch):
        for _ in range(3):
            sharded(**batch)
        return dict(sharded.named_buffers())

    for _ in range(3):
        model(**batch)
    for buffers in on_ranks(Counter, batch, (2, 1, 1), steps, pin={"x": {"data": "S(0)"}}):
        assert buffers["calls"].item() == 3
        torch.testing.assert_close(buffers["running"], model.running, rtol=1e-10, atol=0)
