"""What lies across the cuts of a pipeline: shared weights, skips, masks, frozen parts, arguments, results, errors."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.checking.processes import ProcessError
from autoshard.errors import AutoshardError, RunError
from cases.tools import equal, on_ranks, prepared, tensor


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TiedHead(nn.Module):
    """The first stage looks words up in the table that the last one multiplies with."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(13, 8), nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), ids.flatten())


def ids13(batch=4):
    return lambda: {"ids": torch.randint(0, 13, (batch, 6))}


TIED = [((1, 1, 2), "R", 0), ((1, 1, 4), "R", 0), ((2, 1, 2), "R", 0), ((2, 1, 2), "R", 1), ((2, 1, 2), "R", 3), ((1, 2, 2), "S(0)", 0)]


@pytest.mark.parametrize("mesh, cut, zero", TIED, ids=str)
def test_embedding_and_head_share_a_weight_over_the_stages(mesh, cut, zero):
    rows = {"embedding": {"tensor": "shard v"}, "linear_8": {"tensor": "shard n"}} if cut != "R" else {}  # linear_8: the head
    plan = equal(TiedHead, ids13(), mesh, tensor(cut, "embed.weight"), steps=10, microbatches=2, zero=zero, force=rows)
    assert zero or plan.params["embed.weight"] == f"[R, {cut}]"


def test_a_shared_weight_is_saved_once_under_all_its_names():
    class Named(TiedHead):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 13, bias=False)
            self.head.weight = self.embed.weight

    model, _ = prepared(Named, ids13(), torch.float64)
    for state in on_ranks(Named, ids13(), (1, 1, 2), lambda sharded, _: sharded.state_dict()):
        assert state.keys() == model.state_dict().keys()
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
        prepared(Named, ids13(), torch.float64)[0].load_state_dict(state, strict=True)


def test_copies_of_a_shared_weight_have_one_optimizer_state_each():
    def states(sharded, batch):
        optimizer = sharded.optimizer(torch.optim.AdamW, lr=1e-3)
        sharded(**batch).backward()
        optimizer.step()
        return len(optimizer.state), len(list(sharded.parameters()))

    for kept, held in on_ranks(TiedHead, ids13(), (1, 1, 2), states):
        assert kept == held


class UNet(nn.Module):
    """Three levels down, three up: the first level's result jumps over all stages in between."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(16, 12), nn.Linear(12, 8), nn.Linear(8, 6)])
        self.up = nn.ModuleList([nn.Linear(6, 8), nn.Linear(16, 12), nn.Linear(24, 16)])

    def forward(self, x):
        a = F.gelu(self.down[0](x))
        b = F.gelu(self.down[1](a))
        c = F.gelu(self.down[2](b))
        y = F.gelu(self.up[0](c))
        y = F.gelu(self.up[1](torch.cat([y, b], -1)))
        return self.up[2](torch.cat([y, a], -1)).pow(2).mean()


class Everywhere(nn.Module):
    """The embedding is added to every block."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(13, 8), nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids):
        first = x = self.embed(ids)
        for block in self.blocks:
            x = block(x) + first
        return x.pow(2).mean()


@pytest.mark.parametrize("stages", (3, 4))
def test_skip_connections_over_stages(stages):
    equal(UNet, lambda: {"x": torch.randn(4, 16)}, (1, 1, stages), microbatches=4)
    equal(Everywhere, ids13(), (1, 1, stages), microbatches=4)


class Masks(nn.Module):
    """Whole numbers, a mask and tables of sines, all of which the second half reads again."""

    def __init__(self):
        super().__init__()
        self.embed, self.places, self.blocks = nn.Embedding(13, 8), nn.Embedding(6, 8), nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids):
        positions = (ids != 0).long().cumsum(-1) % 6
        mask = (ids > 3).unsqueeze(-1)
        angles = torch.arange(6, dtype=torch.float32)[:, None] * torch.arange(1, 9)
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x * cos + x.flip(-1) * sin).masked_fill(mask, 0.5) + self.places(positions)
        return x.pow(2).mean()


def test_whole_numbers_masks_and_tables_across_the_cut():
    equal(Masks, ids13(), (1, 1, 2), microbatches=2)
    equal(Masks, ids13(), (1, 1, 4), microbatches=2)


class Lora(nn.Module):
    """All frozen but two small matrices in the last block, so that the first stage trains nothing."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(13, 8), nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 13)
        self.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8, 2))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks[:3]:
            x = block(x)
        x = self.blocks[3](x) + x @ self.a.T @ self.b.T
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


FROZEN = {"plain": {}, "zero_1": {"zero": 1}, "zero_3": {"zero": 3}, "recompute": {"recompute": "on"}}


@pytest.mark.parametrize("options", FROZEN.values(), ids=FROZEN.keys())
@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 2), (1, 2, 2)], ids=str)
def test_frozen_parameters_and_a_stage_that_trains_nothing(mesh, options):
    equal(Lora, ids13(), mesh, microbatches=2, **options)


def test_frozen_parameters_have_no_gradient_and_no_optimizer_state():
    def trained(sharded, batch):
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
        sharded(**batch).backward()
        optimizer.step()
        kept = {name for name, p in sharded.named_parameters() if p in optimizer.state}
        return kept, {name for name, g in sharded.grad_dict().items() if g is not None}

    for kept, graded in on_ranks(Lora, ids13(), (2, 1, 2), trained, microbatches=2):
        assert kept <= {"a", "b"} and graded == {"a", "b"}
    model, batch = prepared(Lora, ids13(), None)
    plan = autoshard.plan(model, (2, 1, 2), batch, microbatches=2, schedule="1F1B")
    summed = [row.why for row in plan.collectives if row.direction == "step"]
    assert summed == ["gradients of a and 1 more"]  # nothing is reduced for the frozen ones


class Arguments(nn.Module):
    """A mask and flags that the last block reads."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(13, 8), nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids, mask=None, *, scale=1.0, use_bias=True):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        return (x * scale + (0.5 if use_bias else 0.0)).pow(2).mean()


def test_arguments_that_the_last_stage_reads():
    equal(Arguments, ids13(), (1, 1, 2), microbatches=2)
    equal(Arguments, lambda: {"ids": torch.randint(0, 13, (4, 6)), "mask": torch.rand(4, 6) > 0.3}, (1, 1, 2), microbatches=2)
    equal(Arguments, lambda: {**ids13()(), "use_bias": False, "scale": 2.5}, (1, 1, 2), microbatches=2)


def test_arguments_by_keyword_in_any_order_and_others_than_were_captured():
    mask = torch.ones(4, 6, dtype=torch.bool)

    def call(sharded, batch):
        ids = batch["ids"]
        calls = (sharded(ids, mask), sharded(mask=mask, ids=ids), sharded(use_bias=True, mask=mask, scale=1.0, ids=ids))
        losses, errors = [loss.item() for loss in calls], []
        for kwargs in ({}, {"mask": None}, {"mask": mask, "scale": 2.0}, {"mask": mask, "more": 1}):
            with pytest.raises(RunError) as caught:
                sharded(ids=ids, **kwargs)
            errors.append(str(caught.value).splitlines()[0])
        return losses, errors

    found = on_ranks(Arguments, {**ids13()(), "mask": mask}, (1, 1, 2), call, microbatches=2)
    assert found[0] == found[1]
    losses, errors = found[0]
    assert len(set(losses)) == 1
    for error, name in zip(errors, ("'mask'", "'mask'", "'scale'", "'more'")):
        assert name in error


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    logits: torch.Tensor
    aux: list
    n: int
    cache: Any = None


torch.export.register_dataclass(Result, serialized_type_name="cases.Result")


class Nested(nn.Module):
    """Returns nested results: from the first stage and from the last, numbers, nothing, and an input as it came."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.embed, self.first, self.second, self.head = kind, nn.Embedding(13, 8), Block(), Block(), nn.Linear(8, 13)

    def forward(self, ids):
        h1 = self.first(self.embed(ids))
        h2 = self.second(h1)
        logits = self.head(h2)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        if self.kind == "dict":
            return {"loss": loss, "logits": logits, "aux": [h1, h2], "n": 3, "cache": None, "ids": ids}
        if self.kind == "dataclass":
            return Result(loss, logits, [h1, (h2, ids)], 3)
        return loss, (logits, {"h": [h1, h2]}, ids), None, 3


@pytest.mark.parametrize("kind", ("dict", "dataclass", "tuple"))
def test_nested_results_from_several_stages(kind):
    equal(lambda: Nested(kind), ids13(), (1, 1, 2), microbatches=2)
    equal(lambda: Nested(kind), ids13(), (2, 2, 1))


def test_gradients_of_two_results_both_flow():
    """A loss computed outside the model from two of its results, where backward does not run inside the call."""
    model, batch = prepared(lambda: Nested("dict"), {"ids": torch.arange(24).view(4, 6) % 13}, torch.float64)
    out = model(**batch)
    (out["loss"] + out["aux"][0].pow(2).sum()).backward()

    def trained(sharded, batch):
        out = sharded(**batch)
        whole = out["aux"][0].full_tensor() if hasattr(out["aux"][0], "full_tensor") else out["aux"][0]
        (out["loss"] + whole.pow(2).sum()).backward()
        return sharded.grad_dict()

    for grads in on_ranks(lambda: Nested("dict"), batch, (2, 2, 1), trained):
        torch.testing.assert_close(grads, {name: p.grad for name, p in model.named_parameters()}, rtol=1e-10, atol=1e-12)


def test_names_are_those_of_the_whole_model():
    model, _ = prepared(TiedHead, ids13(), torch.float64)
    for state in on_ranks(TiedHead, ids13(), (1, 1, 2), lambda sharded, _: sharded.state_dict()):
        assert list(state) == list(model.state_dict())
        model.load_state_dict(state, strict=True)


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(13, 8), nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 13)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Shifted(OwnLoss):
    """Ids that don't follow from the batch alone: whether they are in range only the rank can tell that looks them up."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(6, dtype=torch.long))

    def forward(self, ids, labels):
        return super().forward(ids + self.shift, labels)


@pytest.mark.parametrize("bad", ("token on the second data rank", "label on the last stage"))
def test_one_rank_raises(bad):
    mesh = (2, 1, 1) if "token" in bad else (1, 1, 2)
    batch = {"ids": torch.randint(0, 13, (4, 6)), "labels": torch.randint(0, 13, (4, 6))}
    batch["ids" if "token" in bad else "labels"][3, 2] = 77
    started = time.monotonic()
    pin = {"ids": {"data": "S(0)"}}
    with pytest.raises((ProcessError, AutoshardError)) as caught:
        autoshard.verify(OwnLoss, mesh, batch, steps=1, pin=pin, timeout=60)
    assert time.monotonic() - started < 60
    text = str(caught.value)
    assert "out of range" in text or "out of bounds" in text, text
    assert "one device" in text  # the model itself fails as well, and that is what is told


SCRIPT = """
import torch, autoshard
from cases.test_stages import Shifted

torch.manual_seed(0)
model, batch = Shifted(), {"ids": torch.zeros(4, 6, dtype=torch.long), "labels": torch.zeros(4, 6, dtype=torch.long)}
sharded = autoshard.compile(model, (2, 1, 1), batch, pin={"ids": {"data": "S(0)"}})
sharded(**batch).backward()
batch["ids"][3, 2] = 77
sharded(**batch).backward()
"""


def test_one_rank_raises_under_torchrun(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "train.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "IndexError: index out of range in self" in done.stderr
    assert 'File "<autoshard rank1>"' in done.stderr  # the line of the rank that raised
