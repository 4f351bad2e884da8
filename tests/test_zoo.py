"""Models of every kind: all of them are planned, some of them run here. ``python -m tests.zoo`` runs all."""

from __future__ import annotations

import ast
import re

import pytest
import torch
from zoo import ZOO, make
from zoo.cells import MESHES, run
from zoo.coverage import coverage

from autoshard.capture import capture
from autoshard.compiler import plan, sources
from autoshard.errors import AutoshardError

REFUSED = {"resnet": "forward changes the buffer 'resnet.embedder.embedder.normalization.running_mean'"}
"""Models that can't be planned, and what the error says."""

RUN_HERE = ("lstm", "unet", "dlrm", "mesh_network", "two_towers", "complex_rotary", "nested")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ZOO)
def test_every_model_is_planned_and_written_out(name):
    model, batch = make(name)
    if name in REFUSED:
        with pytest.raises(AutoshardError, match=re.escape(REFUSED[name])):
            plan(model, "2,2,2", batch)
        return
    found = plan(model, "2,2,2", batch)
    assert found.split_flops["data"] > 0.9, found.split_flops
    assert found.split_flops["tensor"] > 0.9 or name in ("lstm", "gru"), found.split_flops  # a recurrent layer divides nothing but samples
    for text in sources(model, "2,2,2", batch, found).values():
        ast.parse(text)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in RUN_HERE else pytest.mark.slow) for n in ZOO if n not in REFUSED])
def test_models_are_equal_to_one_device(name):
    for cell in run(name, MESHES):
        assert cell.kind == "EQ", f"{name} on {cell.mesh}: {cell}"


def test_every_op_has_a_rule():
    *lines, last = coverage(name for name in ZOO if name not in REFUSED)
    assert last.endswith(" 0 without a rule"), "\n".join(line for line in lines if "REPLICATED" in line)


def test_the_model_that_is_given_is_left_alone():
    model, batch = make("lora")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    capture(model, batch)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
