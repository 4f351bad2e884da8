"""Baselines beside ours: what they are restricted to, that none is faster, and what compare prints."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import case
from torch import nn
from toy_plan import toy_plan

from autoshard.capture import capture
from autoshard.comparing import compare
from autoshard.mesh import Mesh
from autoshard.planning.baselines import BASELINES
from autoshard.planning.comparison import Comparison, Row
from autoshard.report.compare import compare as sections
from autoshard.report.tables import render
from examples import mlp

GOLDENS = Path(__file__).parent / "goldens"
NAMED = {baseline.name: baseline for baseline in BASELINES}


def captured(name: str):
    return capture(*mlp.tiny()) if name == "mlp" else case(name).captured


def only(name: str, mesh: Mesh):
    """A baseline on this mesh alone."""
    return replace(NAMED[name], meshes=lambda devices, cluster: [mesh])


def rows_of(model: str, mesh: Mesh, *names: str, **options) -> dict[str, Row]:
    found = compare(captured(model), "model", mesh, baselines=[only(name, mesh) for name in names], **options)
    return {row.name: row for row in found.rows}


@pytest.mark.parametrize(
    "model, devices",
    [("mlp", 2), ("gpt2", 2), ("llama", 2), *(pytest.param(name, 4, marks=pytest.mark.slow) for name in ("mlp", "gpt2", "llama"))],
)
def test_no_baseline_is_faster_than_ours(model, devices):
    comparison = compare(captured(model), "model", devices)
    assert all(row.plan or row.reason for row in comparison.rows)
    assert sum(row.plan is not None for row in comparison.rows) >= 6
    assert [(row.name, row.plan.step_seconds) for row in comparison.faster] == []
    assert {row.plan.mesh.size for row in comparison.rows if row.plan} == {devices}


def test_less_memory_than_data_parallel_needs():
    free = rows_of("gpt2", Mesh(2), "DP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP")
    peaks = [free[name].plan.peak_bytes for name in ("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP")]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[1] > peaks[3] > peaks[4]  # 2 peaks elsewhere than its gradients
    assert [sorted(set(row.plan.zero.values())) for row in free.values()][1:] == [[], [1], [2], [3], [3]]
    tight = rows_of("gpt2", Mesh(2), "DP", "FSDP", memory=(peaks[0] + peaks[-1]) / 2, microbatches=1)
    assert not tight["DP"].fits and tight["FSDP"].fits and tight["autoshard"].fits
    assert tight["FSDP"].plan.regions and tight["autoshard"].plan.step_seconds <= tight["FSDP"].plan.step_seconds


def test_data_parallel_divides_nothing_but_the_batch():
    plan = rows_of("llama", Mesh(2), "DP")["DP"].plan
    linear = [op for op in plan.ops if op.op == "aten.linear"]
    assert len(linear) == 15 and all(op.choices[0] == "shard d0" for op in linear)
    assert not [row for row in plan.collectives if row.direction != "step" and row.nbytes > 8], "but for the loss"


def test_megatron_pairs_columns_with_rows():
    plan = rows_of("llama", Mesh(1, 2), "Megatron")["Megatron"].plan
    linear = {op.module.rpartition(".")[2]: op.choices[1] for op in plan.ops if op.op == "aten.linear" and "layers" in op.module}
    columns = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "shard n")
    assert linear == {**columns, "o_proj": "shard k", "down_proj": "shard k"}
    stream = [op.layout for op in plan.ops if op.op == "aten.add" and op.module.startswith("model.layers.") and op.module.count(".") == 2]
    assert stream == ["[R, R]"] * 4
    inside = [row for row in plan.collectives if ".layers." in f".{row.module}." and row.direction != "step"]
    kinds = [(row.kind, row.direction) for row in inside if row.module.startswith("model.layers.1")]
    assert sorted(kinds) == [("all_reduce", "backward")] * 2 + [("all_reduce", "forward")] * 2, "two a layer and direction"


def test_megatron_with_the_sequence_cuts_the_stream():
    plan = rows_of("llama", Mesh(1, 2), "Megatron-SP")["Megatron-SP"].plan
    stream = [op.layout for op in plan.ops if op.op == "aten.add" and op.module.startswith("model.layers.") and op.module.count(".") == 2]
    assert stream == ["[R, S(1)]"] * 4
    linear = {op.choices[1] for op in plan.ops if op.op == "aten.linear" and "layers" in op.module}
    assert linear == {"shard n", "shard k"}
    kinds = {row.kind for row in plan.collectives if row.module.startswith("model.layers.1") and row.direction == "forward"}
    assert kinds == {"all_gather", "reduce_scatter"}


class Filters(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Conv1d(4, 4, 3)

    def forward(self, x):
        return self.filters(x).square().mean()


def test_what_a_baseline_can_not_do_has_a_reason():
    filters = capture(Filters(), {"x": torch.randn(6, 4, 8)})
    comparison = compare(filters, "Filters", Mesh(1, 2), baselines=[NAMED["DP"], only("Megatron", Mesh(1, 2)), NAMED["Megatron-SP"]])
    reasons = {row.name: row.reason for row in comparison.rows}
    assert reasons["DP"] == "" and reasons["Megatron"] == "it has no matmul that reads a weight"
    four = compare(filters, "Filters", Mesh(1, 4), baselines=[NAMED["DP"], only("Megatron-SP", Mesh(2, 2))])
    assert four.rows[1].reason == "none of its meshes of 4 devices divides the batch of 6"
    loose = compare(captured("mlp"), "MLP", Mesh(1, 2), baselines=[NAMED["Megatron-SP"]])
    assert "no layers of it repeat" in loose.rows[1].reason


def toy_comparison(every_mesh: bool, other_seconds: float) -> Comparison:
    ours, other = toy_plan(), toy_plan()
    other.mesh, other.microbatches, other.step_seconds, other.bubble = Mesh(8), 1, other_seconds, 0.0
    other.zero, other.regions = {"a": 1, "b": 0}, {"op": 0}
    other.memory_limit = 2.0**30
    rows = (Row("autoshard", "the best plan found", ours), Row("FSDP", "cut", other), Row("SP", "along", None, "no sequence"))
    return Comparison(rows, 8, every_mesh)


def test_compare_golden():
    text = render(sections(toy_comparison(True, 1.5)))
    assert text == (GOLDENS / "compare_toy.txt").read_text()


def test_a_faster_baseline_is_said_plainly():
    comparison = toy_comparison(True, 0.001)
    assert not comparison.faster, "it does not fit"
    comparison.rows[1].plan.memory_limit = 80 * 2.0**30
    assert [row.name for row in comparison.faster] == ["FSDP"]
    text = " ".join(render(sections(comparison)).split())
    assert "FSDP is predicted to be faster than this plan" in text and "which is a bug of autoshard's" in text
    text = " ".join(render(sections(replace(comparison, every_mesh=False))).split())
    assert "this mesh is not the best for the model, --mesh 8 searches all" in text and "bug" not in text


def test_json_has_every_measure():
    data = toy_comparison(True, 1.5).to_json()
    assert data["rows"][1]["ratio"] == pytest.approx(1.5 / toy_plan().step_seconds) and data["rows"][1]["zero"] == [1]
    assert data["rows"][2] == {"name": "SP", "what": "along", "reason": "no sequence"}
