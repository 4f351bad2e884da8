"""Whole models on whole meshes: what ``autoshard.verify`` promises, on the examples."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autoshard.mesh import Mesh
from autoshard.verifier import Reference, verify

EXAMPLES = Path(__file__).parent.parent / "examples"
FAST = (
    *(("gpt2", mesh) for mesh in ("2,1,1", "1,2,1", "1,1,2", "2,2,2")),
    *(("llama", "2,2,1"), ("bert", "1,2,1"), ("vit", "2,1,1"), ("t5", "1,1,2")),
)
CASES = [
    pytest.param(name, mesh, marks=[] if (name, mesh) in FAST else pytest.mark.slow, id=f"{name}-{mesh}")
    for name in ("gpt2", "llama", "bert", "vit", "t5")
    for mesh in ("2,1,1", "1,2,1", "1,1,2", "2,2,1", "2,2,2")
]


def target(name: str) -> str:
    return f"{EXAMPLES / name}.py:tiny"


@pytest.fixture(scope="module")
def references():
    """One-device runs by example, made when first asked for."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda name: stack.enter_context(Reference(target(name))))


@pytest.mark.parametrize("name, mesh", CASES)
def test_equal_to_one_device(references, name, mesh):
    report = references(name).verify(mesh)
    assert report.equal, report.text()
    shape = Mesh.of(mesh)
    assert all(report.split[axis] > 0.5 for axis in ("data", "tensor") if getattr(shape, axis) > 1), report.text()
    assert sum(report.excused.values()) < 0.01 * report.parameters, report.text()


def test_float64():
    report = verify(target("gpt2"), "1,2,1", dtype=torch.float64)
    assert report.equal, report.text()
    assert report.worst.allowed <= 1e-10 and sum(report.excused.values()) <= 2, report.text()


def test_on_one_device():
    report = verify(target("mlp"), "1,1,1", steps=1)
    assert report.equal and not report.replicated, report.text()


def train_text(folder: Path, mesh: str, processes: int) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else [sys.executable]
    arguments = ["--mesh", mesh, "--text", str(EXAMPLES / "train_text.py"), "--steps", "5", "--losses", str(folder / "losses")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(EXAMPLES / "train_text.py"), *arguments], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[:3:2] for line in done.stdout.splitlines()] == [["step", "loss"]] * 5
    return [float(line) for line in (folder / "losses").read_text().split()]


@pytest.mark.slow
def test_the_training_script_gives_the_same_losses_on_a_mesh(tmp_path):
    alone, together = train_text(tmp_path, "1,1,1", 1), train_text(tmp_path, "1,2,2", 4)
    assert alone == pytest.approx(together, rel=1e-5)
    assert alone[-1] < alone[0]
