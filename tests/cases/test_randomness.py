"""Dropout and its kin: equal where a value is replicated, different where it is cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases.tools import data, equal, on_ranks, prepared, tensor

X = {"x": torch.ones(8, 16, 32)}


class Noise(nn.Module):
    def forward(self, x):
        return torch.rand_like(x)


class Dropped(nn.Module):
    """Dropout behind a row-parallel layer, and inside attention; the values themselves are the result."""

    def __init__(self, p=0.5):
        super().__init__()
        self.up, self.down, self.p = nn.Linear(32, 32), nn.Linear(32, 32), p
        self.drop, self.noise = nn.Dropout(p), Noise()
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        whole = self.drop(self.down(F.relu(self.up(x))) * 0 + 1)  # replicated on the tensor axis
        heads = F.dropout((self.q(x) * 0 + 1).unflatten(-1, (4, 8)), self.p)  # cut by heads
        q, k = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in (self.q(x), self.k(x)))
        v = self.v(x).unflatten(-1, (4, 8)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p)
        noise = self.noise(whole)
        loss = attended.pow(2).mean() + (whole + noise + heads.flatten(2)).pow(2).mean()
        return {"loss": loss, "whole": whole, "heads": heads, "attended": attended, "noise": noise}


PIN = tensor("S(0)", "up.weight", "q.weight", "k.weight", "v.weight") | tensor("S(1)", "down.weight")
PIN |= tensor("R", "drop", "noise") | data("S(0)", "x")


def locals_of(sharded, batch):
    out = sharded(**batch)
    out["loss"].backward()
    return {name: leaf.to_local().detach() if hasattr(leaf, "to_local") else leaf.detach() for name, leaf in out.items()}


@pytest.fixture(scope="module", params=["invariant", "native"])
def ranks(request):
    """By (data, tensor): what each rank of (2, 2, 1) has of the results."""
    found = on_ranks(Dropped, X, (2, 2, 1), locals_of, dtype=None, pin=PIN, random=request.param)
    return {(rank // 2, rank % 2): out for rank, out in enumerate(found)}


def test_replicated_values_are_dropped_alike(ranks):
    for name in ("whole", "noise"):
        assert torch.equal(ranks[0, 0][name], ranks[0, 1][name]) and torch.equal(ranks[1, 0][name], ranks[1, 1][name]), name


def test_data_ranks_drop_differently(ranks):
    for name in ("whole", "heads", "attended", "noise"):
        assert not torch.equal(ranks[0, 0][name], ranks[1, 0][name]), name


def test_heads_that_are_cut_are_dropped_differently(ranks):
    assert ranks[0, 0]["heads"].shape == (4, 16, 2, 8)
    assert not torch.equal(ranks[0, 0]["heads"], ranks[0, 1]["heads"])
    # the same x everywhere, so what differs between two heads of one rank's attention is weights; between batches it is the mask
    assert not torch.allclose(ranks[0, 0]["attended"][0], ranks[0, 0]["attended"][1])


def test_share_of_values_that_are_kept(ranks):
    for name in ("whole", "heads"):
        kept = torch.cat([out[name].flatten() for out in ranks.values()])
        assert set(kept.unique().tolist()) == {0.0, 2.0}
        assert abs((kept > 0).float().mean().item() - 0.5) < 0.02


def test_all_ranks_have_one_loss(ranks):
    assert len({out["loss"].item() for out in ranks.values()}) == 1


@pytest.mark.parametrize("random", ["invariant", "native"])
def test_a_second_step_drops_differently(random):
    def twice(sharded, batch):
        return locals_of(sharded, batch), locals_of(sharded, batch)

    first, second = on_ranks(Dropped, X, (2, 2, 1), twice, dtype=None, pin=PIN, random=random)[3]
    assert not torch.equal(first["whole"], second["whole"]) and not torch.equal(first["heads"], second["heads"])


def test_dropout_of_nothing_is_equal():
    class Without(Dropped):
        def forward(self, x):
            out = super().forward(x)
            return out["attended"].pow(2).mean() + (out["whole"] * out["heads"].flatten(2)).pow(2).mean()

    equal(lambda: Without(0.0), X, (2, 2, 1), {name: axes for name, axes in PIN.items() if name not in ("drop", "noise")})


def test_weights_are_those_of_the_users_model():
    model, _ = prepared(Dropped, X, None)
    for state in on_ranks(Dropped, X, (2, 2, 1), lambda sharded, _: sharded.state_dict(), dtype=None, pin=PIN):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_dropout_is_equal_to_one_device():
    equal(lambda: Dropped(0.5), X, (2, 2, 1), PIN)


class Layers(nn.Module):
    """Layers that draw in every way: dropout, noise, coins, attention."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Dropped() for _ in range(2))
        self.coins = nn.Linear(32, 32)

    def forward(self, x):
        for layer in self.layers:
            out = layer(x)
            x = x + out["whole"] * out["noise"] + out["attended"].transpose(1, 2).flatten(2) * torch.bernoulli(self.coins(x).sigmoid())
        return x.pow(2).mean()


@pytest.mark.parametrize(
    "mesh, microbatches, random",
    [((2, 2, 1), 1, "native"), ((1, 2, 1), 2, "invariant"), ((1, 1, 2), 2, "invariant"), ((1, 1, 2), 2, "native")],
    ids=str,
)
def test_recomputed_regions_draw_the_same_masks(mesh, microbatches, random):
    """The same gradients to the last bit, and the same numbers after it."""

    def steps(sharded, batch):
        found = []
        for _ in range(2):
            sharded.zero_grad()
            loss = sharded(**batch)
            loss.backward()
            found.append((loss.item(), {name: g.clone() for name, g in sharded.grad_dict().items() if g is not None}))
        return found

    pin = tensor("S(0)", "layers.0.q.weight", "layers.1.q.weight")
    given = {"pin": pin, "microbatches": microbatches, "schedule": "1F1B" if mesh[2] > 1 else "auto", "random": random}
    kept, again = (on_ranks(Layers, X, mesh, steps, recompute=r, **given) for r in ("off", "on"))
    for one, other in zip(kept, again):
        for (loss, grads), (loss_again, grads_again) in zip(one, other):
            assert loss == loss_again and grads.keys() == grads_again.keys()
            assert all(torch.equal(g, grads_again[name]) for name, g in grads.items())
