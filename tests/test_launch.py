"""Training from a folder of emitted modules alone."""

import contextlib
import io
import subprocess
import sys

import pytest
import torch
from emitted_by_hand import interface
from workers import run_on

from autoshard.mesh import Mesh
from autoshard.runtime import launch

MODULE = """
import torch.nn.functional as F
import torch

from autoshard import runtime as rt


class Stage(rt.StageModule):
    mesh, rank, stage, microbatches = {mesh}, {rank}, 0, 1
    params = {{
        "weight": rt.Param(("lin.weight",), (5, 4), "[R, S(0)]", torch.float32, True, sync=("data",), stages=(0,)),
        "table": rt.Param(("table",), (7, 4), "[R, R]", torch.float32, True, sync=("data", "tensor"), stages=(0,)),
    }}
    inputs = {{
        "ids": rt.Input((6,), torch.int64, "[S(0), R]"),
        "scale": rt.Input((6, 1), torch.float32, "[S(0), R]"),
    }}
    outputs = (rt.Output(0, (), "[R, R]", "R", torch.float32),)
    loss = 0

    def forward(self, ids, scale):
        h = F.linear(F.embedding(ids, self.table), self.weight)  # [S(0), S(1)]
        total = (h * scale).square().sum()  # [P, P]
        total = rt.convert(total, "P -> R", self.tensor)
        return (rt.convert(total, "P -> R", self.data),)
"""


def write(folder, mesh):
    folder.mkdir()
    for rank in range(Mesh(*mesh).size):
        (folder / f"rank{rank}.py").write_text(MODULE.format(mesh=mesh, rank=rank))
    batch = {"ids": torch.zeros(6, dtype=torch.int64), "scale": torch.ones(6, 1)}
    launch.write(folder, interface(batch), high={"ids": 7})


def losses(text):
    return [float(line.split()[-1]) for line in text.splitlines()]


def run_here(rank, folder):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert launch.main([folder, "--steps", "3"]) == 0
    return out.getvalue(), sorted(name for name in sys.modules if name.split(".")[0] == "ortools" or name.startswith("autoshard.planning"))


def test_same_losses_on_any_mesh_and_no_planner(tmp_path):
    results = {}
    for mesh in [(1, 1, 1), (2, 1, 1), (1, 2, 1)]:
        folder = tmp_path / "x".join(map(str, mesh))
        write(folder, mesh)
        if Mesh(*mesh).size == 1:
            run = subprocess.run([sys.executable, "-m", "autoshard.runtime.launch", folder], capture_output=True, text=True, timeout=60)
            assert run.returncode == 0, run.stderr
            results[mesh] = run.stdout
        else:
            (results[mesh], loaded), (silent, _) = run_on(2, run_here, str(folder))
            assert not loaded and not silent
    want = losses(results[1, 1, 1])
    assert len(set(want)) == 3
    for text in results.values():
        assert losses(text) == pytest.approx(want, rel=1e-6)


def test_weights_and_batch_of_the_folder(tmp_path, capsys):
    write(tmp_path / "emitted", (1, 1, 1))
    weights = {"lin.weight": torch.ones(5, 4), "table": torch.ones(7, 4)}
    batch = {"ids": torch.arange(6), "scale": torch.ones(6, 1)}
    launch.write(tmp_path / "emitted", interface(batch), weights, batch)
    assert launch.main([str(tmp_path / "emitted"), "--steps", "1"]) == 0
    assert losses(capsys.readouterr().out) == [5 * 6 * 16.0]


def test_errors(tmp_path, capsys):
    assert launch.main([str(tmp_path)]) == 2
    assert "autoshard: error: " in (text := capsys.readouterr().err) and "holds no emitted modules" in text
    write(tmp_path / "two", (2, 1, 1))
    assert launch.main([str(tmp_path / "two")]) == 2
    assert "mesh 2,1,1 is for 2 processes, but WORLD_SIZE is 1" in capsys.readouterr().err
