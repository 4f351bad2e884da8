"""What explain prints, on plans written by hand."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from toy_plan import toy_plan

from autoshard.mesh import Mesh
from autoshard.report.explain import explain, explain_text
from autoshard.report.fold import fold, layer_of
from autoshard.report.tables import Line, Table, Title, render, show, wrap
from autoshard.report.units import count, duration, percent, size

GOLDENS = Path(__file__).parent / "goldens"


@pytest.mark.parametrize("every, name", [(False, "explain_toy.txt"), (True, "explain_toy_all.txt")])
def test_explain_golden(every, name):
    assert explain_text(toy_plan(), every=every) == (GOLDENS / name).read_text()


def test_sections_come_in_order_and_memory_last():
    titles = [part.text.split(" (")[0] for part in explain(toy_plan()) if isinstance(part, Title)]
    assert titles == ["Modules", "Stages", "Communication", "Time of a step", "Solver", "Memory per rank"]


@pytest.mark.parametrize("width", [72, 80, 100, 140])
def test_nothing_is_cut_at_any_width(width):
    def letters(text):
        return sorted(text.replace(" ", "").replace("\n", ""))

    text = explain_text(toy_plan(), every=True, width=width)
    assert letters(text) == letters(explain_text(toy_plan(), every=True, width=1000))
    if width >= 100:
        assert max(map(len, text.splitlines())) <= width


def test_axes_of_size_one_have_no_column():
    plan = toy_plan()
    plan.mesh = Mesh(1, 4, 1)
    text = explain_text(plan)
    assert "tensor (4)" in text and "data (" not in text
    assert "no pipeline, so there is no bubble" in text


def test_layers_that_differ_are_not_folded():
    plan = toy_plan()
    odd = next(row for row in plan.ops if row.module == "transformer.h.4.mlp.c_fc")
    odd.choices = ["shard n", "replicate"]
    text = explain_text(plan)
    for block in ("transformer.h.0-3,5-11:", "transformer.h.4:"):
        assert block in text


def test_dull_neighbours_of_one_module_share_a_line():
    plan = toy_plan()
    add = next(row for row in plan.ops if row.module == "transformer")
    for name in ("mul", "tanh", "mul"):
        plan.ops.insert(plan.ops.index(add), replace(add, node=f"{name}_0", op=f"aten.{name}"))
    assert re.search(r"\n  transformer +2 mul, tanh, add +shard b", explain_text(plan, every=True, width=140))


def test_what_does_not_fit_is_said():
    plan = toy_plan()
    plan.memory_limit = plan.peak_bytes - 2**20
    assert explain_text(plan).rstrip().endswith("DOES NOT FIT, 1 MiB too much")


def test_a_plan_without_communication_or_solver_facts():
    plan = toy_plan()
    plan.collectives, plan.solver, plan.memory_limit, plan.tokens = [], {}, 0.0, 0
    text = explain_text(plan)
    assert "Communication\n  none" in text and "no limit given" in text and "tokens" not in text


def test_nested_layers_fold_inside_out():
    modules = [f"layers.{i}.{part}" for i in range(3) for part in ("gate", *(f"experts.{j}.up" for j in range(4)))]
    assert [".".join(f.path) for f in fold(modules, str, lambda m: m.split(".")[-1])] == ["layers.0-2.gate", "layers.0-2.experts.0-3.up"]


def test_folding_keeps_every_row():
    modules = ["a.0", "b", "a.1", "a.3", "a.10", "a.2"]
    folded = fold(modules, str, len)
    assert [".".join(f.path) for f in folded] == ["a.0-3", "b", "a.10"]
    assert sorted(row for f in folded for row in f.rows) == sorted(modules)
    assert folded[0].block == "a.0-3" and folded[0].inside == "" and folded[1].block == ""


def test_layer_of():
    assert layer_of("blocks.1.2") == "blocks.1" and layer_of("transformer.h.3.attn.c_attn") == "transformer.h.3"
    assert layer_of("lm_head") == layer_of("") == ""


def test_wrapping():
    assert wrap("transformer.wte.weight [R,S(0)]", 14) == ["transformer.", "wte.weight", "[R,S(0)]"]
    assert wrap("  attn.c_attn", 9) == ["  attn.c_", "  attn"]
    assert wrap("abcdefgh", 3) == ["abc", "def", "gh"]
    assert wrap("a\nb", 9) == ["a", "b"] and wrap("", 3) == [""]


def test_a_table_spans_aligns_and_wraps():
    table = Table(("name", ">n"), (("first:",), ("a long name here", "1"), ("b", "200")))
    assert render([table], width=100) == "  name                n\n  first:\n  a long name here    1\n  b                 200\n"
    assert render([table], width=18) == "  name           n\n  first:\n  a long name    1\n  here\n  b            200\n"


class _Stream:
    def __init__(self, terminal):
        self.text, self.terminal = "", terminal

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.text += text


def test_colour_only_on_a_terminal_and_not_with_no_color(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    pipe, terminal = _Stream(False), _Stream(True)
    show([Title("Stages"), Line("one")], pipe)
    show([Title("Stages"), Line("one")], terminal)
    assert pipe.text == "\nStages\n  one\n" and terminal.text == "\n\x1b[1mStages\x1b[0m\n  one\n"
    monkeypatch.setenv("NO_COLOR", "1")
    terminal.text = ""
    show([Title("Stages")], terminal)
    assert "\x1b" not in terminal.text


def test_units():
    times = (0, 5e-7, 0.00153, 0.99996, 1.25, 130, 9000)
    assert [duration(t) for t in times] == ["0 s", "0.5 us", "1.53 ms", "1 s", "1.25 s", "2.17 min", "2.5 h"]
    assert [size(n) for n in (0, 1023, 1024, 1.5 * 2**30, 2**50)] == ["0 B", "1023 B", "1 KiB", "1.5 GiB", "1024 TiB"]
    assert [count(n) for n in (0, 9999, 12345, 999_960, 124_439_808, 175e9)] == ["0", "9999", "12.3 k", "1 M", "124 M", "175 G"]
    assert percent(0.6364) == "63.6 %"
