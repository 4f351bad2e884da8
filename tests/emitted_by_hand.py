"""Modules as the emitter writes them, written by hand, beside the models that they stand for: what the engine's tests run."""

import torch
import torch.nn.functional as F
from torch import nn

from autoshard import runtime as rt
from autoshard.mesh import Mesh
from autoshard.placement import local_shape, parse_layout
from autoshard.signature import Signature

F64 = torch.float64


def interface(batch, batch_dims=None, **rest):
    dims = batch_dims or {}
    arguments = tuple(rt.Argument(n, tuple(x.shape), x.dtype, dims.get(n, 0)) for n, x in batch.items())
    return rt.Interface(Signature(tuple(batch), tuple(batch)), arguments, **rest)


# --- an MLP with a column- and a row-parallel linear, mean squared error; one parameter is never read, one is frozen ----------------------


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 10, dtype=F64)
        self.down = nn.Linear(10, 6, dtype=F64)
        self.spare = nn.Linear(3, 3, dtype=F64)
        self.scale = nn.Parameter(torch.full((6,), 1.5, dtype=F64), requires_grad=False)
        self.register_buffer("shift", torch.arange(6, dtype=F64) / 7)
        self.register_buffer("temporary", torch.ones(2, dtype=F64), persistent=False)

    def forward(self, x, target):
        hidden = torch.tanh(self.up(x))
        y = self.down(hidden) * self.scale + self.shift
        loss = ((y - target) ** 2).sum() / y.numel()
        return loss, y, hidden


def mlp_batch(seed, samples=7):
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(samples, 6, dtype=F64, generator=g), "target": torch.randn(samples, 6, dtype=F64, generator=g)}


def mlp(mesh, rank, stage, m, samples=7):
    assert mesh[2] == 1
    size = samples // m

    class Stage(rt.StageModule):
        params = {
            "up_weight": rt.Param(("up.weight",), (10, 6), "[R, S(0)]", F64, True, sync=("data",)),
            "up_bias": rt.Param(("up.bias",), (10,), "[R, S(0)]", F64, True, sync=("data",)),
            "down_weight": rt.Param(("down.weight",), (6, 10), "[R, S(1)]", F64, True, sync=("data",)),
            "down_bias": rt.Param(("down.bias",), (6,), "[R, R]", F64, True, sync=("data", "tensor")),  # deferred over tensor
            "scale": rt.Param(("scale",), (6,), "[R, R]", F64, False),
            "shift": rt.Param(("shift",), (6,), "[R, R]", F64, False, kind="buffer"),
            "temporary": rt.Param(("temporary",), (2,), "[R, R]", F64, False, kind="buffer", persistent=False),
            "spare_weight": rt.Param(("spare.weight",), (3, 3), "[R, R]", F64, True, sync=("data",)),
            "spare_bias": rt.Param(("spare.bias",), (3,), "[R, R]", F64, True, sync=("data",)),
        }
        inputs = {
            "x": rt.Input((size, 6), F64, "[S(0), R]"),
            "target": rt.Input((size, 6), F64, "[S(0), R]"),
        }
        outputs = (
            rt.Output(0, (), "[R, R]", "P", F64),
            rt.Output(1, (size, 6), "[S(0), R]", "S(0)", F64),
            rt.Output(2, (size, 10), "[S(0), S(1)]", "S(0)", F64),
        )
        loss = 0

        def forward(self, x, target):
            x = rt.convert(x, "R -> R*", self.tensor)
            hidden = torch.tanh(F.linear(x, self.up_weight, self.up_bias))
            y = F.linear(hidden, self.down_weight)  # [S(0), P]
            y = y + rt.convert(self.down_bias, "R* -> P", self.tensor)
            y = rt.convert(y, "P -> R", self.tensor)
            y = y * self.scale + self.shift
            error = ((y - target) ** 2).sum() / (samples * 6)  # [P, R]
            return rt.convert(error, "P -> R", self.data), y, hidden

    Stage.mesh, Stage.rank, Stage.stage, Stage.microbatches = mesh, rank, stage, m
    return Stage


# --- a tied embedding and head on the first and last stage; mean over the valid tokens, counted in a prologue ----------------------------


class Tied(nn.Module):
    def __init__(self, blocks=2, frozen_below=0):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(11, 4, dtype=F64)
        self.blocks = nn.ModuleList(nn.Linear(4, 4, dtype=F64) for _ in range(blocks))
        self.head = nn.Linear(4, 11, bias=False, dtype=F64)
        self.head.weight = self.embed.weight
        for block in self.blocks[:frozen_below]:
            block.requires_grad_(False)

    def forward(self, ids, labels):
        first = h = self.embed(ids)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        logits = self.head(h + first)  # a skip connection from the first stage to the last
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (labels != -100).sum()
        return {"loss": loss, "logits": logits, "count": (labels != -100).sum(), "note": "kept"}


def tied_batch(seed, samples=8):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 11, (samples, 3), generator=g)
    labels[0] = -100
    labels[1, 1:] = -100
    return {"ids": torch.randint(0, 11, (samples, 3), generator=g), "labels": labels}


def tied(mesh, rank, stage, m, samples=8, frozen_below=0):
    """The blocks, two or one for each stage, in order; the embedding's output is relayed to the last stage."""
    stages = mesh[2]
    size, last = samples // m, stage == stages - 1
    hidden = local_shape((size, 3, 4), parse_layout("[S(0), R]"), mesh[:2], Mesh(*mesh).coords(rank)[:2])
    blocks = (0, 1) if stages == 1 else (stage,)

    class Stage(rt.StageModule):
        params = {}
        inputs = {}
        receives = (rt.Value(hidden, F64, True), rt.Value(hidden, F64, True)) if stage else ()
        sends = () if last else (rt.Value(hidden, F64, True), rt.Value(hidden, F64, True))
        outputs = (
            rt.Output(0, (), "[R, R]", "P", F64),
            rt.Output(1, (size, 3, 11), "[S(0), R]", "S(0)", F64),
            rt.Output(2, (), "[R, R]", "R", torch.int64, requires_grad=False),
        )
        loss = 0
        if stage in (0, stages - 1):
            ends = tuple(sorted({0, stages - 1}))
            params["embed_weight"] = rt.Param(("embed.weight", "head.weight"), (11, 4), "[R, R]", F64, True, sync=("data",), stages=ends)
        for i in blocks:
            trained = i >= frozen_below
            params[f"w{i}"] = rt.Param((f"blocks.{i}.weight",), (4, 4), "[R, R]", F64, trained, sync=("data",), stages=(stage,))
            params[f"b{i}"] = rt.Param((f"blocks.{i}.bias",), (4,), "[R, R]", F64, trained, sync=("data",), stages=(stage,))
        if stage == 0:
            inputs["ids"] = rt.Input((size, 3), torch.int64, "[S(0), R]")
        if last:
            inputs["labels"] = rt.Input((size, 3), torch.int64, "[S(0), R]")
            inputs["whole_labels"] = rt.Input((size, 3), torch.int64, "[R, R]", name="labels")
            extras = {"count": rt.Extra("P -> R", ())}

            def prologue(self, whole_labels):
                return {"count": (whole_labels != -100).sum()}

        def start(self, ids):
            first = F.embedding(ids, self.embed_weight)
            return self.middle(first), first

        def middle(self, h):
            for i in blocks:
                h = h + torch.tanh(F.linear(h, getattr(self, f"w{i}"), getattr(self, f"b{i}")))
            return h

        def end(self, h, first, labels, count):
            logits = F.linear(h + first, self.embed_weight)
            error = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
            return rt.convert(error, "P -> R", self.data), logits, count

    if stages == 1:
        Stage.forward = lambda self, ids, labels, count: self.end(*self.start(ids), labels, count)
    elif stage == 0:
        Stage.forward = lambda self, ids: self.start(ids)
    elif last:
        Stage.forward = lambda self, h, first, labels, count: self.end(self.middle(h), first, labels, count)
    else:
        Stage.forward = lambda self, h, first: (self.middle(h), first)
    Stage.mesh, Stage.rank, Stage.stage, Stage.microbatches = mesh, rank, stage, m
    return Stage
