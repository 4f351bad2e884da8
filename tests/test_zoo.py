"""Models of every kind: all of them are planned, some of them run here. ``python -m tests.zoo`` runs all."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
import torch
from zoo import ZOO, make
from zoo.cells import MESHES, run, status
from zoo.coverage import coverage
from zoo.refused import table as refused

from autoshard.capture import Captured, capture
from autoshard.cluster import Cluster
from autoshard.compiler import plan_for, rewrite, source
from autoshard.mesh import Mesh
from autoshard.passes.canonicalize import canonicalize

LARGE = ("mamba", "t5", "mixtral", "deberta", "swin", "qwen3", "lora", "llama", "gemma", "falcon")
"""Models that take seconds to plan."""

SMALL = ("lstm", "unet", "dlrm", "two_towers", "nested")
"""Models that are run here."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def captured(name: str) -> Captured:
    return capture(*make(name))


def named(*, slow) -> list:
    return [pytest.param(name, marks=pytest.mark.slow if slow(name) else []) for name in ZOO]


@pytest.mark.parametrize("name", named(slow=LARGE.__contains__))
def test_every_model_is_planned_and_written_out(name):
    mesh, cluster = Mesh(2, 2, 2), Cluster.of(None)
    program = canonicalize(captured(name).program)
    program.mesh = mesh
    m = 1 if name in MIX else 4
    plan = plan_for(captured(name), program, name, mesh, cluster, cluster.device.memory, m, {})
    assert plan.split_flops["data"] > 0.9, plan.split_flops
    assert plan.split_flops["tensor"] > 0.9, plan.split_flops
    seconds = [stage.seconds for stage in plan.stage_rows]
    assert m == 1 or max(seconds) < 0.85 * sum(seconds), seconds  # with one micro-batch stages take turns: balance gains nothing
    rewritten = rewrite(program, plan, mesh)
    for rank in (0, 7):
        ast.parse(source(captured(name), rewritten, plan, rank))


MIX = ("mixtral", "clip", "graph_network", "dense_experts", "two_towers", "resnet")
"""Models whose samples meet before the loss: they run with one micro-batch."""


@pytest.mark.parametrize("name", named(slow=lambda name: name not in SMALL))
def test_models_are_equal_to_one_device(name):
    cells = list(run(name, MESHES))
    for cell in cells:
        assert cell.kind == "EQ", f"{name} on {cell.mesh}: {cell}"
        assert (cell.microbatches == 1) == (cell.mesh.endswith(",1") or name in MIX)
    assert f" {' | '.join(map(status, cells))} |" in next(row for row in readme() if name in row.split(" | ")[0].strip("| ").split(", "))


def readme() -> list[str]:
    """The rows of the README that ``python -m tests.zoo --support`` prints."""
    text = (Path(__file__).parent.parent / "README.md").read_text()
    return text.partition("<!-- python -m tests.zoo --support -->\n")[2].partition("\n<!-- end -->")[0].splitlines()


def test_the_readme_says_what_runs_and_what_is_refused():
    models = [row.split(" | ")[0].strip("| ").split(", ") for row in readme()[2 : readme().index("")]]
    assert sorted(sum(models, [])) == sorted(ZOO)
    assert readme()[readme().index("") + 1 :] == refused()


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["small", "large"])
def test_every_op_has_a_rule(large):
    *lines, last = coverage((name, canonicalize(captured(name).program)) for name in ZOO if (name in LARGE) == large)
    assert last.endswith(" 0 without a rule"), "\n".join(line for line in lines if "REPLICATED" in line)
