"""What plans of real models look like, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture import capture
from autoshard.compiler import sources
from autoshard.errors import AutoshardError, InfeasibleError, MeshError, PlacementError, PlanError, RunError
from autoshard.mesh import Mesh
from autoshard.planning.plan import Plan
from autoshard.searching import search
from examples import bert, gpt2, llama, mlp, t5, vit

MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5, "vit": vit}
HEAVY = ("aten.linear", "aten.addmm", "aten.scaled_dot_product_attention", "aten.convolution", "aten.conv2d")


def plan(name, mesh, **options) -> Plan:
    return autoshard.plan(*_swap(MODELS[name].tiny(), mesh), **options)


def _swap(made, mesh):
    model, batch = made
    return model, mesh, batch


@pytest.mark.parametrize("name", MODELS)
def test_a_tensor_axis_divides_the_matmuls_with_no_more_collectives_than_megatron(name):
    made = plan(name, (1, 2))
    assert made.split_flops["tensor"] >= 0.9
    attention = [op for op in made.ops if op.op == "aten.scaled_dot_product_attention"]
    if name != "t5":  # whose position bias makes it cheaper to cut the queries
        assert attention and all(op.layout == "[R, S(1)]" for op in attention), "by heads"
    layers = len(attention)
    # Megatron with sequence parallelism: two all-gathers and two reduce-scatters a layer forward, as many backward; cross-attention
    # makes a decoder's layer three blocks for two
    ends = 16  # of the whole model: embedding, head, loss
    assert sum(row.kind != "slice" for row in made.collectives) <= 8 * layers + ends


def test_fused_attention_is_cut_by_heads():
    rows = {op.module: op for op in plan("gpt2", (1, 2)).ops if op.op == "aten.addmm"}
    assert rows["transformer.h.1.attn.c_attn"].weights["transformer.h.1.attn.c_attn.weight"] == "[R, S(1/3)]"


@pytest.mark.parametrize("name", MODELS)
def test_a_data_axis_divides_the_batch(name):
    heavy = [op for op in plan(name, (2,)).ops if op.op in HEAVY]
    assert len(heavy) > 4 and all(op.layout.startswith("[S(0)") for op in heavy)


@pytest.mark.parametrize("name", MODELS)
def test_a_pipeline_halves_the_parameters(name):
    made = plan(name, (1, 1, 2))
    total = sum(p.numel() for p in MODELS[name].tiny()[0].parameters())
    held = [sum(row.parameters for row in made.stage_rows if row.rank == rank) for rank in range(2)]
    assert all(0.2 * total < parameters < 0.8 * total for parameters in held)
    assert made.microbatches >= 2 and 0 < made.bubble < 0.5


def test_a_plan_survives_json(tmp_path):
    made = plan("gpt2", (2, 2, 2))
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    model, batch = gpt2.tiny()
    with pytest.raises(PlanError, match="another model, batch or version"):
        from autoshard.compiler import sources

        sources(model, (2, 2, 2), {k: v[:4] for k, v in batch.items()}, made)


def test_the_plan_does_not_depend_on_the_run():
    script = "from tests.test_compiler import plan; p = plan('gpt2', (2, 2, 2)); print(p.strategies, p.stages)"
    root = Path(__file__).parent.parent
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=root, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert len(outputs) == 1


def test_what_does_not_fit_says_by_how_much():
    model, batch = MODELS["gpt2"].tiny()
    captured = capture(model, batch)
    with pytest.raises(InfeasibleError, match=r"needs [\d.e-]+ GiB, the limit is [\d.e-]+ GiB, [\d.e-]+ GiB too much; \w+ are"):
        search(captured, "gpt2", Mesh(2), memory="1MiB", zero=0, recompute="off", offload="off")
    with pytest.raises(InfeasibleError, match=r"nothing fits on mesh 2,1,1.* needs [\d.e-]+ GiB.*, the limit is [\d.e-]+ GiB") as caught:
        search(captured, "gpt2", Mesh(2), memory="100KiB", offload="off")
    assert caught.value.limit == 100 * 2**10 < caught.value.least and caught.value.stage == 0


def test_pins():
    made = plan("bert", (1, 2), pin={"cls.predictions.decoder.weight": {"tensor": "S(0)"}})
    assert made.params["bert.embeddings.word_embeddings.weight"] == "[R, S(0)]", "tied: one weight, under its first name"
    with pytest.raises(PlacementError, match="are one value and are both pinned"):
        plan("bert", (1, 2), pin={"cls.predictions.decoder.weight": {}, "bert.embeddings.word_embeddings.weight": {}})
    with pytest.raises(PlacementError, match="no parameter, buffer, input or module") as caught:
        plan("llama", (1, 2), pin={"lm_hed.weight": {"tensor": "S(0)"}})
    assert "did you mean lm_head.weight" in str(caught.value)
    with pytest.raises(PlacementError, match=r"can't be S\(2\) along tensor .*possible: R, S\(0\), S\(1\)"):
        plan("llama", (1, 2), pin={"lm_head.weight": {"tensor": "S(2)"}})


def test_a_pin_in_one_layer_is_none_in_the_others():
    weight = "transformer.h.{}.mlp.c_fc.weight"
    model, batch = gpt2.tiny()
    made = autoshard.plan(model, (1, 2), batch, pin={weight.format(0): {"tensor": "S(0)"}, weight.format(1): {"tensor": "S(1)"}})
    assert (made.params[weight.format(0)], made.params[weight.format(1)]) == ("[R, S(0)]", "[R, S(1)]")
    assert made.params[weight.format(2)] == made.params[weight.format(3)]


def test_a_pin_may_leave_an_op_whole():
    model, batch = mlp.tiny()
    made = autoshard.plan(model, (1, 2), batch, pin={"up": {"tensor": "R"}})
    up = next(op for op in made.ops if op.module == "up")
    assert up.layout == "[R, R]" and made.split_flops["tensor"] > 0  # the rest is divided
    assert len(sources(model, (1, 2), batch, made)) == 2


def test_a_mesh_that_is_none():
    for mesh in ((0, 2), (2, -1), (1, 2, 3, 4), "two", {"rows": 2}):
        with pytest.raises(MeshError):
            plan("gpt2", mesh)


def test_too_many_stages():
    model, batch = mlp.tiny()
    with pytest.raises(PlanError, match=r"pipeline=8, which needs 7 cuts; the model has only \d+ legal cut points"):
        autoshard.plan(model, (1, 1, 8), batch)


def test_microbatches_that_do_not_divide():
    with pytest.raises(PlanError, match="batch of 8, which 3 micro-batches do not divide"):
        plan("gpt2", (1, 1, 2), microbatches=3)
    with pytest.raises(PlanError, match="microbatches=0"):
        plan("gpt2", (1, 1, 2), microbatches=0)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:
            return self.a(x).sum()
        return x.sum()


def test_control_flow_on_data_names_the_line():
    with pytest.raises(AutoshardError, match=r"test_compiler.py:\d+") as caught:
        autoshard.plan(Branch(), (2,), {"x": torch.randn(4, 4)})
    assert "x.sum() > 0" in str(caught.value)


def test_without_example_inputs_the_first_call_traces():
    torch.manual_seed(0)
    model, batch = mlp.tiny()
    sharded = autoshard.compile(model, (1, 1, 1))
    with pytest.raises(RunError, match="not compiled yet"):
        sharded.parameters()
    with torch.no_grad():
        got, want = sharded(**batch), model(**batch)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)
    assert sum(p.numel() for p in sharded.parameters()) == sum(p.numel() for p in model.parameters())
    assert "class Stage" in sharded.source(0) and sharded.plan.mesh.size == 1


def test_weights_on_meta_are_refused():
    model, batch = mlp.tiny()
    with pytest.raises(RunError, match="on the meta device"):
        autoshard.compile(model.to("meta"), (1, 1, 1), batch)
