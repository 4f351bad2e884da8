"""Ids that are out of range: the same error on every rank, whoever would have looked them up; never a wrong number, never a hang."""

import re

import pytest
import torch
import torch.nn.functional as F
from cases.tools import choices_of, data, equal, on_ranks, prepared, tensor
from torch import nn
from workers import run_on

import autoshard
from autoshard import passes
from autoshard.capture import capture
from autoshard.errors import IdError
from autoshard.passes.id_checks import id_checks

V = 13


class Model(nn.Module):
    """Shifted labels of which some are ignored, as a language model has them; a gather; a second table."""

    def __init__(self):
        super().__init__()
        self.embed, self.kinds = nn.Embedding(V, 8), nn.Embedding(4, 8)
        self.head = nn.Linear(8, V, bias=False)

    def forward(self, ids, kinds, labels, picks):
        x = torch.tanh(self.embed(ids[:, 1:]) + self.kinds(kinds.to(torch.int64)).unsqueeze(1))
        logits = self.head(x)
        picked = logits[:, 0].gather(1, picks)
        return F.cross_entropy(logits.flatten(0, 1), F.pad(labels, (0, 1), value=-100)[:, 2:].flatten()) + picked.mean()


def batch():
    generator = torch.Generator().manual_seed(0)
    draw = lambda high, *shape: torch.randint(0, high, shape, generator=generator)  # noqa: E731
    return {"ids": draw(V, 4, 6), "kinds": draw(4, 4).int(), "labels": draw(V, 4, 6), "picks": draw(V, 4, 2)}


BAD = [
    ("ids", (3, 2), V, "13 is out of range for embedding in embed: its index must be 0 to 12"),
    ("ids", (0, 1), -1, "-1 is out of range for embedding in embed"),
    ("kinds", (2,), 4, "4 is out of range for embedding in kinds: its index must be 0 to 3"),
    ("labels", (3, 5), 99, "99 is out of range for cross_entropy_loss: its index must be 0 to 12, or -100 to be ignored"),
    ("picks", (1, 1), V, "13 is out of range for gather"),
]
MESHES = [((2, 1, 1), data("S(0)", "ids")), ((1, 2, 1), tensor("S(0)", "embed.weight")), ((2, 2, 1), data("S(0)", "ids")), ((1, 1, 2), {})]


@pytest.mark.parametrize("mesh, pin", MESHES, ids=str)
def test_every_rank_raises_the_same_and_goes_on(mesh, pin):
    def work(sharded, good):
        texts = []
        for name, at, value, _ in BAD:
            wrong = {**good, name: good[name].clone()}
            wrong[name][at] = value
            with pytest.raises(IdError) as caught:
                sharded(**wrong)
            texts.append(str(caught.value))
        return texts, sharded.train_step(**good).item()

    model, good = prepared(Model, batch, torch.float64)
    loss = model(**good).item()
    for texts, got in on_ranks(Model, batch(), mesh, work, pin=pin, microbatches=mesh[2]):
        for text, (*_, expected) in zip(texts, BAD):
            assert expected in text
        assert got == pytest.approx(loss, rel=1e-10)


def test_what_the_model_does_not_look_up_may_be_anything():
    """The first id and the first two labels are cut off, and so never looked up."""

    def odd():
        found = batch()
        found["ids"][:, 0] = 77
        found["labels"][:, :2] = -5
        found["labels"][1, 3] = -100
        return found

    for mesh, pin in MESHES[:2]:
        plan = equal(Model, odd, mesh, pin, microbatches=1)
        assert any(c.startswith("shard") for op in ("aten.embedding",) for row in choices_of(plan, op) for c in row)


def on_processes(rank):
    torch.manual_seed(0)
    model, good = Model(), batch()
    found = []
    for mesh, pin in (((1, 2, 1), tensor("S(0)", "embed.weight")), ((2, 1, 1), data("S(0)", "ids")), ((1, 1, 2), {})):
        sharded = autoshard.compile(model, mesh, good, pin=pin, microbatches=mesh[2])
        for name, at, value, _ in BAD:
            wrong = {**good, name: good[name].clone()}
            wrong[name][at] = value
            try:
                sharded(**wrong)
            except IndexError as error:
                found.append(str(error))
        sharded(**good).backward()
    return found


def test_on_processes():
    first, second = run_on(2, on_processes, timeout=60)
    assert first == second and len(first) == 3 * len(BAD)


def test_what_is_checked():
    class Computed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.linear = nn.Embedding(5, 4), nn.Linear(4, 5)
            self.register_buffer("offsets", torch.tensor([0, 2]))

        def forward(self, x, ids, mask):
            y = self.table(ids % 5) + self.table(ids + self.offsets) + self.table(torch.where(mask, ids, 0))
            return (y + self.table(self.linear(x).argmax(-1))).pow(2).sum() + x[ids[:, 0]].sum()

    inputs = {"x": torch.randn(3, 2, 4), "ids": torch.zeros(3, 2, dtype=torch.long), "mask": torch.ones(3, 2, dtype=torch.bool)}
    found = id_checks(passes.run("canonicalize", capture(Computed(), inputs).program))
    assert [(check.op, check.low, check.high) for check in found.checks] == [("embedding", 0, 4), ("embedding", 0, 4), ("index", -3, 2)]
    assert all(re.match(r"remainder|where|select|scalar|full|slice", node.name) for node in found.ops)
