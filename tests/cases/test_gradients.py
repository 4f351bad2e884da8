"""Collectives and reductions: what goes wrong in silence."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.errors import PlanError
from cases.tools import data, equal, on_ranks, prepared, refused, tensor


def rows(*shape):
    return lambda: {"x": torch.randn(*shape)}


class RowParallel(nn.Module):
    """Two layers; ``after`` is what follows the sum that the second one leaves pending."""

    def __init__(self, after=None, bias=False):
        super().__init__()
        self.up, self.down, self.after = nn.Linear(8, 16), nn.Linear(16, 8, bias=bias), after
        if bias:
            nn.init.constant_(self.down.bias, 100.0)

    def forward(self, x):
        y = self.down(F.relu(self.up(x)))
        z = y if self.after is None else self.after(y)
        return {"loss": (z * torch.arange(z.shape[-1])).pow(2).mean(), "y": y, "z": z}


def test_bias_of_a_row_parallel_layer_is_added_once():
    equal(lambda: RowParallel(bias=True), rows(4, 8), (1, 4, 1), tensor("S(1)", "down.weight"), microbatches=1)


AFTER = {
    "plus_one": lambda y: y + 1.0,
    "times_two": lambda y: y * 2,
    "relu": F.relu,
    "norm": lambda y: F.layer_norm(y, (8,)),
    "vector_norm": lambda y: y / y.norm(dim=-1, keepdim=True),
    "max": lambda y: y.max(-1, keepdim=True).values + y,
    "softmax": lambda y: y.softmax(-1),
    "where": lambda y: torch.where(y > 0, y, -3 * y),
    "clamp": lambda y: y.clamp(-0.1, 0.1),
    "square_of_sum": lambda y: y.sum(0, keepdim=True).pow(2),
}
LINEAR = ("add", "sub", "mul", "div", "neg", "sum", "mean", "to", "reshape", "transpose", "linear")


@pytest.mark.parametrize("after", AFTER)
def test_pending_sum_meets(after):
    plan = equal(lambda: RowParallel(AFTER[after]), rows(4, 8), (1, 2, 1), tensor("S(1)", "down.weight"))
    for row in plan.ops:
        if any("P" in layout for layout in row.operands):
            assert row.op.split(".")[1] in LINEAR, row
    if after == "plus_one":  # one operand, and a number: adding it on every rank would count it twice
        assert all("P" not in layout for row in plan.ops if row.op == "aten.add" for layout in row.operands)


class Residual(nn.Module):
    """A pending sum plus something that is whole."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.shift = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return (x + self.down(F.relu(self.up(x))) + self.shift).pow(3).mean()


def test_pending_sum_plus_a_whole_value():
    equal(Residual, rows(4, 8), (1, 4, 1), tensor("S(1)", "down.weight"))


class SequenceParallel(nn.Module):
    """A block whose norms work on pieces of the sequence, and a final norm that does too."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.final = norm(8), norm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(self.first(x))))
        return self.final(x).pow(3).mean()


@pytest.mark.parametrize("norm", (nn.LayerNorm, nn.RMSNorm))
def test_norm_weights_under_sequence_parallelism(norm):
    pin = tensor("S(1)", "first", "final", "x") | tensor("S(0)", "up.weight")
    equal(lambda: SequenceParallel(norm), rows(2, 6, 8), (1, 2, 1), pin, steps=10)


class Tied(nn.Module):
    """Cut, whole, tied and rarely used parameters: every kind that a norm of all gradients can count wrongly."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(SequenceParallel(nn.LayerNorm) for _ in range(2))
        self.experts = nn.Parameter(torch.randn(2, 8, 8))
        self.head = nn.Linear(8, 13)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block.first(x + block.down(F.gelu(block.up(x))))
        x = x + torch.einsum("bsi,eio->bso", x, self.experts)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def ids13():
    return {"ids": torch.arange(24).view(4, 6) * 5 % 13}


def test_norm_of_all_gradients():
    """Cut, whole, tied and unused parameters, each counted once."""
    model, batch = prepared(Tied, ids13, torch.float64)
    orders = (2.0, math.inf)

    def clipped(norm_of, gradients_of, module, batch):
        for order in orders:
            module.zero_grad()
            module(**batch).backward()
            yield norm_of(module, order), {name: g for name, g in gradients_of(module).items() if g is not None}

    def sharded(module, batch):
        return list(clipped(lambda m, order: m.clip_grad_norm_(0.01, order), lambda m: m.grad_dict(), module, batch))

    def alone(m, order):
        return torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01, order)

    wanted = list(clipped(alone, lambda m: {name: p.grad for name, p in m.named_parameters()}, model, batch))
    assert all(norm > 0.01 for norm, _ in wanted)
    pin = tensor("S(0)", "embed.weight", "experts")
    for found in on_ranks(Tied, ids13, (2, 2, 2), sharded, pin=pin):
        for (norm, grads), (norm_wanted, grads_wanted) in zip(found, wanted):
            torch.testing.assert_close(norm, norm_wanted, rtol=1e-10, atol=0)
            torch.testing.assert_close(grads, grads_wanted, rtol=1e-9, atol=1e-12)


class ManyLosses(nn.Module):
    """Cross-entropy of one kind of reduction with all its extras, on logits whose classes are cut."""

    def __init__(self, reduction):
        super().__init__()
        self.body, self.head, self.reduction = nn.Linear(8, 8), nn.Linear(8, 12), reduction
        self.register_buffer("weight", torch.rand(12) + 0.5)

    def forward(self, x, labels):
        logits = self.head(F.gelu(self.body(x)))
        losses = {
            f"{'smooth' if smoothing else 'plain'}_{'weighted' if weight is not None else 'even'}": F.cross_entropy(
                logits, labels, weight, reduction=self.reduction, label_smoothing=smoothing, ignore_index=11
            )
            for smoothing in (0.0, 0.1)
            for weight in (None, self.weight)
        }
        return {"loss": sum(loss.mean() * (i + 1) for i, loss in enumerate(losses.values())), **losses}


def labels_one_half_ignored():
    labels = torch.randint(0, 11, (6,))
    labels[:3] = 11
    labels[4] = 0
    return {"x": torch.randn(6, 8), "labels": labels}


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_vocabulary_sharded_cross_entropy(reduction):
    pin = tensor("S(0)", "head.weight") | data("S(0)", "labels")
    equal(lambda: ManyLosses(reduction), labels_one_half_ignored, (2, 3, 1), pin, force={"cross_entropy_loss": {"tensor": "shard v"}})


class Padded(nn.Module):
    def __init__(self, padding):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 4, padding_idx=padding), nn.Linear(4, 1)
        nn.init.normal_(self.embed.weight)  # the row of the padding too

    def forward(self, ids):
        return self.head(self.embed(ids)).pow(2).mean()


@pytest.mark.parametrize("padding", (0, 7, -1))
def test_padding_row_of_a_sharded_table(padding):
    rows = {"embedding": {"tensor": "shard v"}}
    equal(lambda: Padded(padding), lambda: {"ids": torch.randperm(12).view(4, 3)}, (1, 3, 1), tensor("S(0)", "embed.weight"), force=rows)


class Tokens(nn.Module):
    """The usual loss of a language model: the mean over labels that are not -100."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, x, labels):
        logits = self.head(F.gelu(self.body(x)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def valid_labels(*valid):
    """Samples of ten labels, of which so many are valid."""

    def make():
        labels = torch.full((len(valid), 10), -100)
        for i, n in enumerate(valid):
            labels[i, :n] = torch.randint(0, 12, (n,))
        return {"x": torch.randn(len(valid), 10, 8), "labels": labels}

    return make


WAYS = {"ranks": ((2, 1, 1), {}), "micro_batches": ((1, 1, 1), {"microbatches": 2}), "stages": ((1, 1, 2), {"microbatches": 2})}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("valid", [(1, 9), (0, 7), (0, 0)], ids=["one_and_nine", "none_and_seven", "none"])
def test_mean_over_tokens_that_are_unevenly_spread(way, valid):
    mesh, options = WAYS[way]
    steps = 1 if valid == (0, 0) else 3  # the loss of no tokens is not a number, here as on one device
    pin = data("S(0)", "x") if way == "ranks" else {}
    equal(Tokens, valid_labels(*valid), mesh, pin, steps=steps, **options)


@pytest.mark.parametrize(
    "mesh, microbatches", [((1, 1, 1), 2), ((1, 1, 1), 8), ((1, 1, 2), 4), ((2, 1, 1), 2), ((2, 1, 2), 4), ((4, 1, 1), 4)]
)
def test_scale_of_gradients_with_stages_micro_batches_and_data_ranks(mesh, microbatches):
    plan = equal(Tokens, valid_labels(*range(1, 9), *range(1, 9)), mesh, data("S(0)", "x"), microbatches=microbatches)
    assert plan.microbatches == microbatches


@pytest.mark.parametrize("mesh, microbatches", [((2, 1, 1), 1), ((1, 1, 2), 2), ((2, 1, 2), 2), ((1, 1, 1), 2)])
def test_gradients_that_the_user_accumulates(mesh, microbatches):
    """Two calls, of which each brings half of the loss, are one call on the whole batch: with every way of micro-batches and stages."""
    halves = [valid_labels(4, 4, 4, 4)() for _ in range(2)]
    model, _ = prepared(Tokens, None, torch.float64)
    batches = [{"x": half["x"].double(), "labels": half["labels"]} for half in halves]
    model(**{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})["loss"].backward()

    def accumulated(sharded, _):
        for batch in batches:
            (sharded(**batch)["loss"] / 2).backward()
        return sharded.grad_dict()

    for grads in on_ranks(Tokens, batches[0], mesh, accumulated, pin=data("S(0)", "x"), microbatches=microbatches):
        for name, p in model.named_parameters():
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("zero", (0, 3))
def test_axes_of_size_one(mesh, zero):
    equal(Tokens, valid_labels(4, 3, 9, 10), mesh, microbatches=4, zero=zero)


class Normed(nn.Module):
    """A convolution, then a norm over its channels."""

    def __init__(self, kind):
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)
        self.norm = {
            "group": lambda: nn.GroupNorm(4, 8),
            "group_plain": lambda: nn.GroupNorm(4, 8, affine=False),
            "instance": lambda: nn.InstanceNorm2d(8, affine=True),
            "instance_plain": lambda: nn.InstanceNorm2d(8),
            "layer": lambda: nn.LayerNorm([8, 4, 4]),
            "layer_frozen": lambda: nn.LayerNorm([8, 4, 4]).requires_grad_(False),
            "layer_plain": lambda: nn.LayerNorm([8, 4, 4], elementwise_affine=False),
            "rms_frozen": lambda: nn.RMSNorm([8, 4, 4]).requires_grad_(False),
            "rms_plain": lambda: nn.RMSNorm([8, 4, 4], elementwise_affine=False),
        }[kind]()

    def forward(self, x):
        return self.last(F.relu(self.norm(self.conv(x)))).pow(2).mean()


@pytest.mark.parametrize(
    "kind", ["group", "group_plain", "instance", "instance_plain", "layer", "layer_frozen", "layer_plain", "rms_frozen", "rms_plain"]
)
def test_norm_over_channels_that_are_cut(kind):
    equal(lambda: Normed(kind), rows(4, 3, 6, 6), (2, 2, 1), tensor("S(0)", "conv.weight") | data("S(0)", "x"))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.last(F.relu(self.bn(self.conv(x)))).pow(2).mean()


@pytest.mark.parametrize("batch", (4, 5))
def test_batch_norm_takes_statistics_over_the_whole_batch(batch):
    cut = {"native_batch_norm": {"data": "shard d0"}}
    equal(Convolutions, rows(batch, 3, 6, 6), (2, 1, 1), data("S(0)", "x"), force=cut)
    equal(Convolutions, rows(batch, 3, 6, 6), (2, 2, 1), data("S(0)", "x") | tensor("S(0)", "conv.weight", "bn.weight"), force=cut)


def test_batch_norm_without_scale_or_running_statistics():
    class Plain(Convolutions):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm2d(4, affine=False, track_running_stats=False)

    equal(Plain, rows(5, 3, 6, 6), (2, 1, 1), data("S(0)", "x"), force={"native_batch_norm": {"data": "shard d0"}})


def test_batch_norm_in_stages():
    """Samples meet, so the batch stays in one piece; the first stage's statistics reach the ranks that hold them."""
    assert equal(Convolutions, rows(4, 3, 6, 6), (1, 1, 2)).microbatches == 1


def test_batch_norm_in_eval_mode():
    equal(lambda: Convolutions().eval(), rows(4, 3, 6, 6), (2, 2, 1), data("S(0)", "x") | tensor("S(0)", "conv.weight"))


def test_batch_norm_of_micro_batches_is_refused():
    refused(Convolutions, rows(4, 3, 6, 6), (1, 1, 2), "in bn (", "2 micro-batches", error=PlanError, microbatches=2)
