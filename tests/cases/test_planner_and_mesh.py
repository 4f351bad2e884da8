"""What can't be planned or does not fit, and meshes that are not what is there: the same clear error on every rank, and no rank waits."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from workers import run_on

import autoshard
from autoshard.errors import AutoshardError, InfeasibleError, MeshError, PlanError
from autoshard.planning.plan import Plan
from autoshard.rules import RuleWarning
from cases.test_shapes import Blocks
from cases.test_tracing import Decides, flip_and_scale
from cases.tools import data, equal, on_ranks, prepared, refused, tensor


def rows(*shape):
    return lambda: {"x": torch.randn(*shape)}


class Wide(nn.Module):
    """A wide pair of layers, of which Megatron's cut is the best that a tensor axis can do."""

    def __init__(self, width=64, inner=256):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x))).pow(2).mean()


def test_memory_that_not_even_one_layer_fits_in():
    for mesh in ((1, 2, 1), (1, 1, 2)):
        text = refused(lambda: Wide(256, 4096), rows(8, 256), mesh, "the limit is 1 MiB", error=InfeasibleError, memory="1MiB")
        assert re.search(r"a rank of stage [01] needs [\d.]+ MiB", text), text


def test_memory_exactly_at_the_boundary():
    model, batch = prepared(Wide, rows(8, 64), None)
    free = autoshard.plan(model, (1, 2, 1), batch)
    peak = free.peak_bytes
    assert autoshard.plan(model, (1, 2, 1), batch, memory=peak).peak_bytes <= peak
    refused(Wide, rows(8, 64), (1, 2, 1), error=PlanError, memory=peak - 1, zero=0, recompute="off", offload="off", microbatches=1)


def test_memory_in_which_only_recompute_and_zero_fit():
    model, batch = prepared(lambda: Blocks(8, 64), rows(512, 64), None)
    peak = autoshard.plan(model, (2, 1, 1), batch).peak_bytes
    assert autoshard.plan(model, (2, 1, 1), batch, memory=0.7 * peak).peak_bytes <= 0.7 * peak


def test_forty_eight_identical_blocks():
    model, batch = prepared(lambda: Blocks(48, 16), rows(8, 16), None)
    started = time.monotonic()
    plan = autoshard.plan(model, (2, 2, 2), batch)
    assert time.monotonic() - started < 60
    assert plan.solver["folded"] > 40 * 3
    same = {tuple(plan.params[f"blocks.{i}.1.weight"] for i in range(48))}
    assert len(set(next(iter(same)))) == 1


def test_gradients_lie_as_their_parameters():
    """After the planned reduction every piece of a gradient is that of the parameter's piece."""
    def check(sharded, batch):
        sharded(**batch).backward()
        whole = sharded.grad_dict()
        for name, p in sharded.named_parameters():
            assert p.grad.shape == p.shape
            torch.testing.assert_close(p.grad, sharded.piece_of(name, whole[name]))

    pins = tensor("S(0)", "up.weight"), tensor("S(1)", "up.weight", "down.weight"), {}
    for mesh, pin in itertools.product([(2, 2, 1), (1, 2, 2)], pins):
        on_ranks(Wide, rows(8, 64), mesh, check, pin=pin, microbatches=1)


def test_a_wide_layer_is_cut_as_megatron_cuts_it():
    plan = equal(Wide, rows(2, 64), (1, 8, 1))
    assert plan.params == {"up.weight": "[R, S(0)]", "down.weight": "[R, S(1)]"}
    assert [row.kind for row in plan.collectives] == ["all_reduce"]


def test_a_batch_of_2_on_8_ranks_is_not_cut_finer_than_its_samples():
    equal(Wide, rows(2, 64), (8, 1, 1))
    plan = equal(Wide, rows(2, 64), (2, 4, 1))
    assert plan.split_flops == {"data": 1.0, "tensor": 1.0}


@pytest.mark.parametrize("mesh", [(0, 1, 1), (2, -1, 1), (1, 2.0, 1), (1, 1, 1, 1), "2,x"], ids=str)
def test_meshes_that_are_none(mesh):
    with pytest.raises(MeshError, match="mesh"):
        autoshard.plan(Wide(), mesh, {"x": torch.randn(8, 64)})


def test_a_pipeline_for_a_model_that_can_not_be_cut():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return (x * self.weight).sum()

    refused(One, rows(4, 4), (1, 1, 4), "pipeline=4", "legal cut points", error=PlanError)


def refuse_everything(rank):
    """Texts of all errors that a rank sees, one after the other: after each the ranks go on together."""
    jobs = {
        "world size": (Wide, rows(8, 64), (4, 2, 2), {}),
        "stages": (Wide, rows(8, 64), (1, 1, 2), {"memory": "1KiB"}),
        "control flow": (lambda: Decides("if"), rows(4, 8), (2, 1, 1), {}),
        "batch": (Wide, rows(7, 64), (2, 1, 1), {"microbatches": 2}),
        "pin": (Wide, rows(8, 64), (1, 2, 1), {"pin": tensor("S(7)", "up.weight")}),
        "pin's name": (Wide, rows(8, 64), (1, 2, 1), {"pin": tensor("S(0)", "pu.weight")}),
        "memory": (Wide, rows(8, 64), (2, 1, 1), {"memory": "1KiB"}),
        "too many stages": (nn.Flatten, lambda: (torch.randn(4, 4),), (1, 1, 2), {"microbatches": 1}),
        "argument": (Wide, lambda: {"y": torch.randn(8, 64)}, (2, 1, 1), {}),
        "plan": (Wide, rows(8, 64), (2, 1, 1), {"plan": Plan.from_json(OTHER.to_json())}),
    }
    texts = {}
    for job, (model_fn, batch, mesh, options) in jobs.items():
        model, example = prepared(model_fn, batch, None)
        try:
            autoshard.compile(model, mesh, example, **options)
        except AutoshardError as error:
            texts[job] = str(error)
    model, example = prepared(Wide, rows(8, 64), None)
    sharded = autoshard.compile(model, (2, 1, 1), example)
    for job, kwargs in {"width": {"x": torch.randn(8, 32)}, "no argument": {}, "dtype": {"x": torch.randn(8, 64).double()}}.items():
        try:
            sharded(**kwargs)
        except AutoshardError as error:
            texts[job] = str(error)
    return texts, sharded(**example).item()  # and everyone is well


OTHER = autoshard.plan(Wide(16, 32), (2, 1, 1), {"x": torch.randn(8, 16)})

EXPECTED = {
    "world size": ("4,2,2", "16 processes", "WORLD_SIZE is 2"),
    "stages": ("a rank of stage", "the limit is"),
    "control flow": ("test_tracing.py:", "if x.sum() > 0:  # here: if", "x.sum() > 0"),
    "batch": ("'x'", "batch of 7", "2 micro-batches"),
    "pin": ("'up.weight'", "S(7)", "[256, 64]"),
    "pin's name": ("'pu.weight'", "did you mean up.weight"),
    "memory": ("a rank of stage", "the limit is"),
    "too many stages": ("pipeline=2",),
    "argument": ("'y'", "x"),
    "plan": ("another model", OTHER.fingerprint),
    "width": ("'x'", "(8, 32)", "(8, 64)", "can't be compiled for this call"),
    "no argument": ("missing argument 'x'",),
    "dtype": ("'x'", "float64", "float32"),
}


def test_bad_input_gives_one_error_on_every_rank_and_none_waits():
    (first, loss), (second, other) = run_on(2, refuse_everything, timeout=90)
    assert first == second and loss == other
    assert first.keys() == EXPECTED.keys()
    for job, parts in EXPECTED.items():
        assert all(part in first[job] for part in parts), (job, first[job])


class NoRule(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return flip_and_scale(self.linear(x), 2.0).pow(2).mean()


def test_an_op_without_a_rule_is_replicated_with_one_warning():
    with pytest.warns(RuleWarning, match=r"cases::flip_and_scale has no sharding rule.*\n.*test_planner_and_mesh.py") as caught:
        plan = equal(NoRule, rows(4, 8), (2, 1, 1), data("S(0)", "x"))
    assert len({str(w.message) for w in caught}) == 1
    (row,) = [row for row in plan.ops if "flip_and_scale" in row.op]
    assert row.choices[0] in ("replicate", "defer")


HASH = """
import json, torch, autoshard
from cases.test_shapes import Blocks
torch.manual_seed(0)
print(json.dumps(autoshard.plan(Blocks(4, 8), (2, 2, 2), {"x": torch.randn(8, 8)}).to_json()))
"""


def test_the_same_plan_whatever_the_hash_seed():
    def plan(seed):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
        return subprocess.Popen([sys.executable, "-c", HASH], env=environment, stdout=subprocess.PIPE, text=True)

    plans = [process.communicate(timeout=60)[0] for process in [plan("1"), plan("2")]]
    first, second = (json.loads(re.sub(r'"(\w*seconds)": [\d.e-]+', r'"\1": 0', text)) for text in plans)
    assert first == second and first["strategies"]
