"""Shapes that do not divide, and views of what is cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.errors import PlacementError, PlanError
from cases.tools import choices_of, data, equal, refused, tensor


class Vocabulary(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mlp, self.head = nn.Embedding(101, 16), nn.Linear(16, 16), nn.Linear(16, 101, bias=False)

    def forward(self, ids):
        logits = self.head(F.gelu(self.mlp(self.embed(ids))))
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return {"loss": loss, "logits": logits, "best": logits.argmax(-1), "total": logits.logsumexp(-1)}


def ids_with_the_last():
    ids = torch.randint(0, 101, (4, 6))
    ids[0, 0], ids[3, 5] = 100, 100
    return {"ids": ids}


@pytest.mark.parametrize("ways", (2, 4))
def test_vocabulary_that_the_tensor_axis_does_not_divide(ways):
    rows = {"tensor": "shard v"}  # each rank looks up, and is asked for, its own rows of the tables
    force = {"embedding": rows, "linear_1": {"tensor": "shard n"}, "cross_entropy_loss": rows}
    plan = equal(Vocabulary, ids_with_the_last, (1, ways, 1), tensor("S(0)", "embed.weight", "head.weight"), force=force)
    assert plan.params["embed.weight"] == plan.params["head.weight"] == "[R, S(0)]"


class Heads(nn.Module):
    """A projection to heads, [batch, heads, positions, 8]."""

    def __init__(self, width, heads):
        super().__init__()
        self.proj, self.heads = nn.Linear(width, 8 * heads), heads

    def forward(self, x):
        return self.proj(x).view(x.shape[0], x.shape[1], self.heads, 8).transpose(1, 2)


class GroupedQuery(nn.Module):
    """Eight query heads over fewer heads of keys and values, which are repeated to eight."""

    def __init__(self, kv, repeat):
        super().__init__()
        self.q, self.k, self.v, self.out = Heads(16, 8), Heads(16, kv), Heads(16, kv), nn.Linear(64, 16)
        self.kv, self.repeat = kv, repeat

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.repeat == "interleave":
            k, v = k.repeat_interleave(8 // self.kv, 1), v.repeat_interleave(8 // self.kv, 1)
        elif self.repeat == "index":
            pick = torch.arange(8) * self.kv // 8
            k, v = k[:, pick], v[:, pick]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.repeat == "kernel")
        return self.out(y.transpose(1, 2).reshape(x.shape[0], x.shape[1], 64)).pow(2).mean()


def hidden(batch=2, positions=6, width=16):
    return lambda: {"x": torch.randn(batch, positions, width)}


@pytest.mark.parametrize(
    "kv, repeat", [(1, "interleave"), (2, "interleave"), (3, "index"), (1, "kernel"), (2, "kernel")], ids=lambda v: str(v)
)
def test_fewer_key_heads_than_the_tensor_axis(kv, repeat):
    plan = equal(lambda: GroupedQuery(kv, repeat), hidden(), (1, 4, 1), tensor("S(0)", "q.proj.weight") | tensor("S(1)", "out.weight"))
    (attention,) = choices_of(plan, "aten.scaled_dot_product_attention")
    assert attention[1] in ("shard d1", "shard rep")  # query heads are cut, also where there are fewer of keys


@pytest.mark.parametrize("kv", (1, 2, 3))
def test_key_heads_that_are_forced_onto_more_ranks_than_there_are(kv):
    model = lambda: GroupedQuery(kv, "index")  # noqa: E731
    refused(model, hidden(), (1, 4, 1), f"[2, {kv}, 6, 8]", "S(1)", "of size 4", error=PlacementError, pin=tensor("S(1)", "k"))


class Attention(nn.Module):
    """Four heads of 4; ``views`` says how the projections are turned to heads."""

    def __init__(self, views):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.views = views

    def split(self, x):
        b, t, _ = x.shape
        if self.views == "inferred":
            return x.view(b, -1, 4, 4).transpose(1, 2)
        if self.views == "literal":
            return x.view(2, 6, 4, 4).transpose(1, 2)
        return x.unflatten(-1, (4, 4)).permute(0, 2, 1, 3)

    def join(self, y):
        if self.views == "inferred":
            return y.transpose(1, 2).reshape(y.shape[0], -1, 16)
        if self.views == "literal":
            return y.transpose(1, 2).contiguous().view(2, 6, 16)
        return y.permute(0, 2, 1, 3).flatten(-2)

    def forward(self, x):
        q, k, v = (self.split(proj(x)) for proj in (self.q, self.k, self.v))
        return self.out(self.join(F.scaled_dot_product_attention(q, k, v))).pow(2).mean()


@pytest.mark.parametrize("views", ("inferred", "literal", "unflatten"))
def test_attention_views_with_literal_head_counts(views):
    pin = tensor("S(0)", "q.weight", "k.weight", "v.weight") | tensor("S(1)", "out.weight")
    plan = equal(lambda: Attention(views), hidden(), (1, 2, 1), pin)
    (attention,) = choices_of(plan, "aten.scaled_dot_product_attention")
    assert attention[1].startswith("shard")
    assert [row.module for row in plan.collectives] == ["out"]


class Fused(nn.Module):
    """One projection for queries, keys and values."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(16, 32 if kind == "grouped" else 48), nn.Linear(16, 16)

    def forward(self, x):
        b, t, _ = x.shape
        fused = self.qkv(x)
        if self.kind == "grouped":
            q, k, v = fused.split([16, 8, 8], -1)
        elif self.kind == "interleaved":
            q, k, v = (y.flatten(2) for y in fused.reshape(b, t, 4, 3, 4).unbind(3))
        else:
            q, k, v = fused.chunk(3, -1)
        q, k, v = (y.reshape(b, t, -1, 4).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.kind == "grouped")
        return self.out(y.transpose(1, 2).reshape(b, t, 16)).pow(2).mean()


@pytest.mark.parametrize(
    "kind, placement",
    [("chunk", "S(0/3)"), ("chunk", "S(0)"), ("grouped", "S(0)"), ("grouped", "S(0/4)"), ("interleaved", "S(0)")],
)
def test_fused_projection_of_queries_keys_and_values(kind, placement):
    plan = equal(lambda: Fused(kind), hidden(), (1, 2, 1), tensor(placement, "qkv.weight"))
    assert plan.params["qkv.weight"] == f"[R, {placement}]"


class GateUp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(16, 64), nn.Linear(32, 16)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up).pow(2).mean()


@pytest.mark.parametrize("placement", ("S(0/2)", "S(0)"))
def test_fused_gate_and_up_projection(placement):
    plan = equal(GateUp, hidden(), (1, 2, 1), tensor(placement, "gate_up.weight") | tensor("S(1)", "down.weight"))
    if placement == "S(0/2)":
        assert [row.module for row in plan.collectives] == ["down"]


class View(nn.Module):
    """A linear layer, then a view of its result, then something that mixes."""

    def __init__(self, view):
        super().__init__()
        self.up, self.view = nn.Linear(5, 8 if view == "regroup" else 16), view
        self.norm, self.last = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x):
        y = self.up(x)
        if self.view == "regroup":
            return y.view(16, 6).softmax(-1).pow(2).sum()
        if self.view == "flat":
            return (y.view(-1).softmax(0) * torch.arange(y.numel())).sum()
        return self.last(self.norm(y).flatten(0, 1)).pow(2).mean()


def test_view_that_does_not_line_up_with_the_shard():
    equal(lambda: View("regroup"), lambda: {"x": torch.randn(12, 5)}, (1, 4, 1), tensor("S(0)", "up.weight"))


def test_view_of_unevenly_cut_rows_as_one_row():
    equal(lambda: View("flat"), lambda: {"x": torch.randn(7, 5)}, (3, 1, 1), data("S(0)", "x"))


def test_rows_that_would_leave_a_rank_with_nothing():
    refused(lambda: View("flat"), lambda: {"x": torch.randn(6, 5)}, (4, 1, 1), "'x'", "[6, 5]", "of size 4", pin=data("S(0)", "x"))


def test_positions_that_are_cut_and_then_flattened_with_the_batch():
    equal(lambda: View("positions"), hidden(2, 6, 5), (1, 2, 1), tensor("S(1)", "norm"))
    equal(lambda: View("positions"), hidden(2, 6, 5), (2, 2, 1), tensor("S(1)", "norm"))


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(10, 14), nn.Linear(14, 10)

    def forward(self, x):
        return self.down(F.gelu(self.up(x))).pow(2).mean()


@pytest.mark.parametrize("ways", (3, 4))
def test_hidden_width_that_the_tensor_axis_does_not_divide(ways):
    pin = tensor("S(0)", "up.weight", "up.bias") | tensor("S(1)", "down.weight")
    plan = equal(TwoLayers, lambda: {"x": torch.randn(9, 10)}, (1, ways, 1), pin)
    assert plan.params["down.weight"] == "[R, S(1)]"


def test_hidden_width_that_would_leave_a_rank_with_nothing():
    refused(TwoLayers, lambda: {"x": torch.randn(9, 10)}, (1, 8, 1), "'down.bias'", "[10]", "of size 8", pin=tensor("S(0)", "down.bias"))


def test_batch_of_9_on_a_data_axis_of_6():
    equal(TwoLayers, lambda: {"x": torch.randn(9, 10)}, (6, 1, 1))


def test_batch_of_7_on_a_data_axis_of_2():
    plan = equal(TwoLayers, lambda: {"x": torch.randn(7, 10)}, (2, 1, 1), data("S(0)", "x"))
    assert plan.split_flops["data"] == 1.0


def test_batch_that_the_micro_batches_do_not_divide():
    refused(Blocks, lambda: {"x": torch.randn(8, 6)}, (1, 1, 3), "'x'", "batch of 8", "3 micro-batches", error=PlanError, microbatches=3)


class Blocks(nn.Module):
    """Identical blocks, as a pipeline likes them."""

    def __init__(self, blocks=4, width=6):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.pow(2).mean()


@pytest.mark.parametrize("microbatches", (1, 2))
def test_fewer_micro_batches_than_stages(microbatches):
    plan = equal(Blocks, lambda: {"x": torch.randn(4, 6)}, (1, 1, 4), microbatches=microbatches)
    assert plan.microbatches == microbatches


def test_five_blocks_on_four_stages():
    plan = equal(lambda: Blocks(5), lambda: {"x": torch.randn(4, 6)}, (1, 1, 4), microbatches=4, schedule="1F1B")
    assert set(plan.stages.values()) == {0, 1, 2, 3}


def test_more_stages_than_the_model_can_be_cut_into():
    class Short(nn.Module):
        def __init__(self):
            super().__init__()
            self.only = nn.Linear(6, 1)

        def forward(self, x):
            return self.only(x).sigmoid().mean()

    text = refused(Short, lambda: {"x": torch.randn(4, 6)}, (1, 1, 6), "pipeline=6", "legal cut points", error=PlanError)
    assert "needs 5 cuts" in text
