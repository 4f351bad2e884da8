"""How two plans differ."""

import json
from dataclasses import replace
from pathlib import Path

from toy_plan import toy_plan

from autoshard import cli
from autoshard.mesh import Mesh
from autoshard.report.diff import diff, same, to_json
from autoshard.report.tables import render

GOLDENS = Path(__file__).parent / "goldens"


def other_plan():
    plan = toy_plan()
    plan.mesh, plan.microbatches, plan.step_seconds = Mesh(4, 2, 1), 1, 1.25 * plan.step_seconds
    for i, op in enumerate(plan.ops):
        if op.module.endswith("mlp.c_fc"):
            plan.ops[i] = replace(op, choices=["shard n", "replicate"])
        elif op.module.startswith(("transformer.h.6", "transformer.h.7")):
            plan.ops[i] = replace(op, stage=0)
    plan.strategies = {op.node: op.choices for op in plan.ops}
    plan.stages = {op.node: op.stage for op in plan.ops}
    plan.params = {name: "[R, R]" if "c_attn.weight" in name else layout for name, layout in plan.params.items()}
    plan.zero = {name: 2 for name in plan.params if "c_proj" in name}
    plan.offload = [name for name in plan.params if "mlp.c_fc" in name]
    plan.regions = {op.node: 0 for op in plan.ops if op.module.startswith("transformer.h.3")}
    return plan


def test_diff_golden():
    assert render(diff(toy_plan(), other_plan())) == (GOLDENS / "diff_toy.txt").read_text()


def test_the_clock_makes_no_difference():
    plan = toy_plan()
    plan.solver["seconds"] = 99.0
    assert same(toy_plan(), plan) and render(diff(toy_plan(), plan)) == "the plans are the same\n"
    assert not same(toy_plan(), other_plan())


def test_json_names_what_differs():
    data = to_json(toy_plan(), other_plan())
    assert data["mesh"] == {"before": [2, 2, 2], "after": [4, 2, 1]} and "cluster" not in data
    assert set(map(tuple, data["strategies"]["after"].values())) == {("shard n", "replicate")}
    assert len(data["stages"]["after"]) == 18


def test_plans_of_other_models_are_compared_as_far_as_they_go():
    text = render(diff(toy_plan(), replace(other_plan(), fingerprint="other", ops=[])))
    assert "the plans are for different models" in text


def test_exit_status_is_that_of_diff(tmp_path, capsys):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    toy_plan().save(a)
    other_plan().save(b)
    assert cli.main(["diff", str(a), str(a)]) == 0
    assert cli.main(["diff", str(a), str(b)]) == 1
    assert cli.main(["diff", str(a), str(tmp_path / "none.json")]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("the plans are the same\nstep ") and "can't read the plan" in err
    assert cli.main(["diff", str(a), str(b), "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["same"] is False
