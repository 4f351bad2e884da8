"""Mixtures of experts, written with static shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases.tools import data, equal, tensor


class Experts(nn.Module):
    """Top-2 of ``n`` experts. ``how``: a loop over experts with weights of 0, or one einsum over all of them, or index_add."""

    def __init__(self, n=4, how="einsum", all_to_first=False):
        super().__init__()
        self.before, self.router, self.after = nn.Linear(8, 8), nn.Linear(8, n), nn.Linear(8, 8)
        self.up, self.down = nn.Parameter(torch.randn(n, 8, 16) * 0.3), nn.Parameter(torch.randn(n, 16, 8) * 0.3)
        self.n, self.how, self.top = n, how, 1 if all_to_first else 2
        if all_to_first:
            nn.init.zeros_(self.router.weight)
            self.router.bias.data[0] = 50.0

    def forward(self, x):
        h = F.gelu(self.before(x))
        probabilities, chosen = self.router(h).softmax(-1).topk(min(self.top, self.n), -1)
        if self.how == "einsum":
            gates = (F.one_hot(chosen, self.n).to(h.dtype) * probabilities.unsqueeze(-1)).sum(-2)
            y = torch.einsum("bse,beo->bso", gates, self.run(h))
        else:
            y = torch.zeros_like(h)
            for e in range(self.n):
                out = F.gelu(h @ self.up[e]) @ self.down[e]
                gate = torch.where(chosen == e, probabilities, 0.0).sum(-1, keepdim=True)
                if self.how == "loop":
                    y = y + out * gate
                else:
                    flat = (out * gate).flatten(0, 1)
                    y = y.flatten(0, 1).index_add(0, torch.arange(flat.shape[0]), flat).view_as(h)
        return self.after(h + y).pow(2).mean()



class Dispatched(Experts):
    """Every token through every expert, in one einsum over the experts' own dim."""

    def forward(self, x):
        h = F.gelu(self.before(x))
        probabilities, chosen = self.router(h).softmax(-1).topk(min(self.top, self.n), -1)
        gates = (F.one_hot(chosen, self.n).to(h.dtype) * probabilities.unsqueeze(-1)).sum(-2)
        hidden = F.gelu(torch.einsum("bsi,eio->ebso", h, self.up))
        y = torch.einsum("ebsh,eho,bse->bso", hidden, self.down, gates)
        return self.after(h + y).pow(2).mean()


def model(n=4, how="einsum", all_to_first=False):
    return (Dispatched if how == "einsum" else Experts)(n, how, all_to_first)


def rows():
    return {"x": torch.randn(4, 6, 8)}


OWN = {"einsum": {"tensor": "shard e"}}
"""Each rank runs its own experts, and nobody gathers their weights."""


@pytest.mark.parametrize("how", ("einsum", "loop", "index_add"))
def test_experts_cut_over_ranks(how):
    plan = equal(lambda: model(4, how), rows, (1, 2, 1), tensor("S(0)", "up", "down"), force=OWN if how == "einsum" else {})
    assert plan.params["up"] == plan.params["down"] == "[R, S(0)]"


def test_router_and_layers_before_the_experts():
    plan = equal(lambda: model(4), rows, (2, 2, 1), tensor("S(0)", "up", "down") | data("S(0)", "x"), force=OWN)
    assert plan.params["up"] == "[R, S(0)]"


@pytest.mark.parametrize("ways", (2, 4))
def test_experts_that_get_no_tokens(ways):
    """Their gradient is zero, as on one device, and no rank waits."""
    equal(lambda: model(4, "einsum", all_to_first=True), rows, (1, ways, 1), tensor("S(0)", "up", "down"), force=OWN)


@pytest.mark.parametrize("n, ways", [(3, 2), (4, 4)])
def test_experts_that_the_axis_does_not_divide(n, ways):
    equal(lambda: model(n), rows, (1, ways, 1), tensor("S(0)", "up", "down"), force=OWN)


def test_more_ranks_than_experts():
    from cases.tools import refused

    refused(lambda: model(2), rows, (1, 4, 1), "'up'", "[2, 8, 16]", "of size 4", pin=tensor("S(0)", "up", "down"))
    equal(lambda: model(2), rows, (1, 4, 1))


def test_experts_and_data_and_stages():
    equal(lambda: model(4), rows, (2, 2, 2), tensor("S(0)", "up", "down"), microbatches=2, force=OWN)
