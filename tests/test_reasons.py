"""explain --why and --why-not: alternatives are priced as the planner prices them."""

from dataclasses import replace
from pathlib import Path

import pytest
from small import case
from toy_plan import toy_plan

from autoshard.errors import InfeasibleError, PlacementError
from autoshard.mesh import Mesh
from autoshard.planning.answers import Alternative, Move, Unavailable, Why
from autoshard.planning.plan import PinRow
from autoshard.reasons import why
from autoshard.report.tables import render
from autoshard.report.why import not_fitting, why_not
from autoshard.report.why import why as sections
from autoshard.searching import search

GOLDENS = Path(__file__).parent / "goldens"
MESH = Mesh(2, 2)


@pytest.fixture(scope="module")
def plan():
    return search(case("gpt2").captured, "GPT2", MESH, zero=0)


@pytest.mark.parametrize("name", ["transformer.h.0.mlp.c_fc", "lm_head", "transformer.h.1.attn.c_proj.weight", "input_ids", "add_1"])
def test_no_alternative_is_better_than_the_optimum(plan, name):
    answer = why(case("gpt2").captured, plan, name)
    found = answer.cheaper + answer.dearer
    assert found and all(a.total >= -1e-9 for a in found)
    assert all(a.own <= 1e-8 for a in answer.cheaper) and all(a.own > 1e-8 for a in answer.dearer)
    assert answer.choice not in [a.choice for a in found if a.layout == answer.layout]
    layout = plan.params.get(name) or next((op.layout for op in plan.ops if op.node == answer.node), None)
    assert layout in (None, answer.layout)


def test_forcing_costs_no_more_than_the_alternative_with_all_else_left(plan):
    """The solver may change the neighbours too; and what it makes of the pin is what the price was of."""
    name = "transformer.wte.weight"
    answer, alone = why(case("gpt2").captured, plan, name), 0
    for item in answer.cheaper + answer.dearer:
        placement = item.layout.strip("[]").split(", ")[1]
        forced = search(case("gpt2").captured, "GPT2", MESH, pin={name: {"tensor": placement}}, microbatches=1, zero=0)
        assert forced.params[name] == item.layout
        assert forced.solver["objective"] - plan.solver["objective"] <= item.total + 1e-7
        changed = [node for node in plan.strategies if plan.strategies[node] != forced.strategies[node]]
        if item.predicted and len(changed) == 1:
            alone += 1
            found = forced.step_seconds - plan.step_seconds, forced.peak_bytes - plan.peak_bytes
            assert item.predicted == pytest.approx(found, rel=1e-6, abs=1e-9)
    assert alone


def test_a_module_is_asked_about_by_its_heaviest_op(plan):
    answer = why(case("gpt2").captured, plan, "transformer.h.0.mlp")
    assert answer.what == "aten.addmm" and answer.instances == 2 and answer.module.startswith("transformer.h.0.mlp.c_")


def test_what_is_unavailable_says_why(plan):
    one = case("gpt2").captured
    attention = why(one, plan, "transformer.h.0.attn")
    reasons = {item.choice: item.reason for item in why(one, plan, "transformer.h.0.attn.c_attn.bias").unavailable}
    assert "weights are whole over data" in reasons["S(0) over data"]
    assert any("divided by every axis" in item.reason for item in attention.unavailable)
    pins = {"transformer.h.0.attn.c_attn.bias": {"tensor": "R"}}
    pinned = search(one, "GPT2", MESH, pin=pins, zero=0)
    answer = why(one, pinned, "transformer.h.0.attn.c_attn.bias", pins)
    assert answer.choice == "[R, R]" and any("is pinned to R along tensor" in item.reason for item in answer.unavailable)
    with pytest.raises(PlacementError, match="did you mean transformer.h.0.attn"):
        why(one, plan, "transformer.h.0.atn")


def toy_answer() -> Why:
    move = Move("ln_1", "[S(0), R]", "[S(0), R*]", "addmm_1", 17e-6)
    cheaper = tuple(Alternative(f"shard m | shard k{i}", "[S(0), P]", -1e-6, 5e-5 + i * 1e-6, (move,)) for i in range(6))
    cheaper = (replace(cheaper[0], predicted=(5e-5, 2.0**28)), *cheaper[1:])
    return Why(
        "addmm_1", "h.0.mlp", "aten.addmm", "h.0.mlp.up", "model.py:3: x = up(x)", (32, 128), {"data": 2, "tensor": 4}, "shard m | shard n",
        "[S(0), S(1)]", 12, 2e-4, (move,), True, 0.5, 2.0**30, 1.1 * 2.0**30, cheaper,
        (Alternative("replicate | replicate", "[R, R]", 3e-4, -1e-5, ()),),
        tuple(Unavailable(f"shard {factor} over tensor", "its size is 3, less than the 4 ranks") for factor in "qr"),
    )  # fmt: skip


def test_why_golden():
    assert render(sections(toy_answer())) == (GOLDENS / "why_toy.txt").read_text()
    assert "and 1 more" not in render(sections(toy_answer(), every=True))


def test_why_not_golden():
    plan, forced = toy_plan(), toy_plan()
    forced.step_seconds *= 1.1
    forced.breakdown["tensor"] += 0.1 * plan.step_seconds
    forced.strategies = {**forced.strategies, "embedding_0": ["shard b", "replicate"]}
    forced.collectives[0] = replace(forced.collectives[0], axis="data")
    forced.memory_limit = 1.0
    text = render(why_not("lm_head.weight=tensor:R", plan, forced))
    assert text == (GOLDENS / "why_not_toy.txt").read_text()
    assert render(why_not("x=data:R", plan, toy_plan())) == "x=data:R is what the plan does already\n"


def test_why_not_says_in_how_many_layers_and_what_the_search_leaves_open():
    plan, forced = toy_plan(), toy_plan()
    forced.stages, forced.pins = {}, [PinRow("h.3.up", {"tensor": "R"}, 96)]
    forced.step_seconds *= 0.999
    plan.solver["gap"] = 0.01
    text = render(why_not("h.3.up=tensor:R", plan, forced))
    assert "pinned: h.3.up to tensor:R, in all 96 layers like it" in text and "less than the 1.0 %" in text
    refused = InfeasibleError("nothing fits", limit=2.0**30, least=2.0**31, proven=1.5 * 2.0**30)
    text = " ".join(render(not_fitting("h.3.up=tensor:R", plan, 96, refused)).split())
    assert "with h.3.up=tensor:R, in all 96 layers like it, nothing fits: a rank needs 2 GiB in the smallest plan found" in text
    assert "any plan with it needs 1.5 GiB, proven" in text
