"""Where nothing fits: each suggestion fits when it is planned as suggested, the least memory is enough, and less is not."""

from __future__ import annotations

import math

import pytest
import torch
from small import case
from torch import nn
from workers import run_on

import autoshard
from autoshard import advising, changes, cli
from autoshard.capture import capture
from autoshard.errors import InfeasibleError
from autoshard.mesh import Mesh
from autoshard.planning.advice import Advice, Found, Suggestion
from autoshard.report.advice import details, headline
from autoshard.report.tables import render
from autoshard.report.units import size
from autoshard.searching import Wanted, search, wanted_of
from examples import mlp

KIB = 1024.0
SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]


class Alone(nn.Module):
    """Returns the loss, and nothing else."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        if hasattr(model, "config"):
            self.config = model.config  # so that no cache is traced

    def forward(self, **batch):
        return self.model(**batch)[0]


def models(name: str):
    return mlp.tiny() if name == "mlp" else (case(name).model, case(name).batch)


def refused(model, batch, mesh, **options) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        autoshard.plan(model, mesh, batch, **options)
    return caught.value


def fits(model, batch, mesh, **options) -> bool:
    """As the search itself finds, which has nothing to advise."""
    captured = capture(model, batch, precision=options.pop("precision", "fp32"))
    try:
        return search(captured, "model", Mesh.wanted(mesh), **options).peak_bytes <= options["memory"]
    except InfeasibleError:
        return False


@pytest.mark.parametrize(
    "name, mesh, options",
    [
        ("mlp", (1, 1, 1), {"memory": 7 * KIB}),
        ("mlp", (2, 1, 1), {"memory": 10 * KIB, "zero": 0, "recompute": "off", "offload": "off", "microbatches": 1}),
        ("mlp", 2, {"memory": 4 * KIB}),
        pytest.param("gpt2", (1, 1, 2), {"memory": 250 * KIB, "microbatches": 4}, marks=SLOW),
        pytest.param("odd", (2, 1, 1), {"memory": 6 * KIB}, marks=SLOW),
    ],
)
def test_what_is_suggested_fits_and_the_least_is_enough(name, mesh, options):
    model, batch = models(name)
    error = refused(model, batch, mesh, **options)
    assert error.limit == options["memory"] and error.least > error.limit and error.suggestions
    assert sum(error.memory.values()) == pytest.approx(error.least)
    if isinstance(mesh, tuple):
        least = advising.readable(error.least)
        assert f"a rank of stage {error.stage} needs" in str(error) and "least limit for which a plan was found on mesh" in str(error)
        assert fits(model, batch, mesh, **{**options, "memory": least})
        assert not fits(model, batch, mesh, **{**options, "memory": 0.95 * least})
    assert error.proven <= error.least
    for suggestion in error.suggestions:
        assert suggestion.found.peak_bytes <= error.limit and suggestion.found.step_seconds > 0
        changed = {"mesh": mesh, **options, **suggestion.options}
        assert fits(Alone(model) if suggestion.loss_alone else model, batch, **changed), suggestion


def wide():
    torch.manual_seed(0)
    return mlp.MLP(16, 16, 4096), {"x": torch.randn(64, 16), "labels": torch.randint(0, 4096, (64,))}


def test_what_is_forced_is_freed_where_that_is_enough():
    model, batch = wide()
    forced = {"microbatches": 1, "zero": 0, "recompute": "off", "offload": "off"}
    fewer, more = (autoshard.plan(Alone(model), (2, 1, 1), batch, **{**forced, "microbatches": m}).peak_bytes for m in (1, 8))
    assert more < 0.9 * fewer
    error = refused(Alone(model), batch, (2, 1, 1), memory=more, **forced)
    assert any(s.options.get("microbatches", 0) in (2, 4, 8) for s in error.suggestions)
    states = autoshard.plan(Alone(model), (2, 1, 1), batch, **{**forced, "zero": 3}).peak_bytes
    assert states < 0.9 * fewer
    error = refused(Alone(model), batch, (2, 1, 1), memory=states, **forced)
    assert any(s.options == {"zero": "auto"} for s in error.suggestions)


def test_results_that_take_the_room_are_named():
    model, batch = wide()
    both, alone = (autoshard.plan(m, (1, 1, 1), batch, microbatches=64).peak_bytes for m in (model, Alone(model)))
    assert alone < both / 1.5
    error = refused(model, batch, (1, 1, 1), memory=1.1 * alone, microbatches=64)
    assert error.suggestions[0].loss_alone and error.suggestions[0].text == changes.LOSS_ALONE and not error.suggestions[0].options
    assert fits(Alone(model), batch, (1, 1, 1), memory=1.1 * alone, microbatches=64)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)])
@pytest.mark.parametrize("name", ["mlp", "gpt2", "odd"])
def test_no_plan_needs_less_than_is_said_to_be_needed(name, mesh):
    mesh = Mesh(*mesh)
    captured = capture(*mlp.tiny()) if name == "mlp" else case(name).captured
    for options in ({}, {"zero": 0}, {"zero": 2}, {"zero": 3, "recompute": "on"}, {"offload": "optimizer"}):
        wanted = wanted_of(captured, "model", **options)
        for m in {1, advising.numbers_of(wanted, mesh)[-1]}:
            task = wanted.task(mesh, m)
            bound = advising.held(wanted, mesh, m)
            assert 0 < bound <= task.drafted().peak_bytes
            if wanted.saving.open:
                assert bound <= task.ladder().peak_bytes


def test_pins_are_said_and_lifted():
    model, batch = mlp.tiny()
    pin = {"up.weight": {"tensor": "R"}, "down.weight": {"tensor": "R"}}
    fitting = autoshard.plan(model, (1, 2, 1), batch, memory="9KiB").peak_bytes
    error = refused(model, batch, (1, 2, 1), memory=1.05 * fitting, pin=pin, offload="off", recompute="off", microbatches=1)
    assert "pinned: up.weight to tensor:R" in str(error) and any(s.options == {"pin": {}} for s in error.suggestions)


def test_a_plan_that_turns_up_while_advice_is_sought_is_the_answer(monkeypatch):
    best, asked = Wanted.best, []

    def missed(self, mesh):
        asked.append(self.microbatches)
        if len(asked) == 1:
            raise InfeasibleError("nothing fits", limit=self.limit, least=2 * self.limit)
        return best(self, mesh)

    monkeypatch.setattr(Wanted, "best", missed)
    plan = autoshard.plan(mlp.tiny()[0], (1, 1, 1), mlp.tiny()[1], memory="1GiB")
    assert plan.peak_bytes <= plan.memory_limit and asked == [None, plan.microbatches]


def test_limits_are_printed_as_they_are_meant():
    for nbytes in (1.0, 999.0, 1000.0, 1023.0, 1024.0, 1025.0, 123456.0, 14.12 * 2**30, 1e13 / 3):
        limit = advising.readable(nbytes)
        assert nbytes <= limit <= 1.011 * nbytes
        number, unit = size(limit).split()
        assert math.isclose(float(number) * 1024.0 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit), limit)


def test_no_time_is_said_to_be_none(monkeypatch):
    monkeypatch.setattr(advising, "BUDGET", 0.0)
    monkeypatch.setattr(advising._Adviser, "spent", lambda self: 1e9)
    model, batch = mlp.tiny()
    error = refused(model, batch, (1, 1, 1), memory=9 * KIB, offload="off")
    assert not error.suggestions and "there was no time to find a limit that is enough" in str(error)
    assert "for forward returns its loss alone, offload=auto" in str(error)


def test_offloading_helps_where_it_was_ruled_out():
    error = refused(*mlp.tiny(), (1, 1, 1), memory=9 * KIB, offload="off")
    assert any(s.options == {"offload": "auto"} for s in error.suggestions)
    error = refused(*mlp.tiny(), (1, 1, 1), memory=7 * KIB, microbatches=1)
    assert not any("offload" in s.options for s in error.suggestions)


def on_rank(rank):
    model, batch = mlp.tiny()
    try:
        autoshard.compile(model, (2, 1, 1), batch, memory=5 * KIB)
    except InfeasibleError as error:
        return str(error), error.limit, error.least, error.memory, [s.options for s in error.suggestions]


def test_every_rank_is_told_the_same():
    first, second = run_on(2, on_rank, timeout=100.0)
    assert first == second and first[1] == 5 * KIB and first[4] and "what helps" in first[0]


def test_the_command_line_says_it_and_exits_with_1(capsys):
    assert cli.main(["explain", "examples/mlp.py:tiny", "--mesh", "1,1,1", "--memory", "7KiB"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("autoshard: error: nothing fits on mesh 1,1,1: a rank of stage 0 needs ")
    assert "what helps, nearest first" in err and all(len(line) <= 100 for line in err.splitlines()[1:])


def test_the_text():
    memory = {"parameters": 2.0 * 2**30, "activations": 3.0 * 2**30}
    found = Found(2.0**30, 0.25, 8)
    advice = Advice("2,1,1", "2,1,1", "a100-dgx", 2.0**30, [1, 2, 8], 5.0 * 2**30, 0, memory, 8)
    advice.enough, advice.little, advice.proven = (5.0 * 2**30, found), 4.8 * 2**30, 3.0 * 2**30
    advice.suggestions = [Suggestion("mesh 1,2,1", {"mesh": Mesh(1, 2)}, False, found)]
    advice.refused = ["precision=bf16", "mesh 1,1,2", "precision=bf16; and x", "mesh 1,1,2; and x"]
    assert headline(advice) == (
        "nothing fits on mesh 2,1,1: a rank of stage 0 needs 5 GiB in the smallest plan found, the limit is 1 GiB; "
        "the largest part is activations, 3 GiB"
    )
    assert render(details(advice)) == """\
  asked for: mesh 2,1,1 of a100-dgx, 1 GiB a rank, 1 to 8 micro-batches
  that rank, in 8 micro-batches: parameters 2 GiB, activations 3 GiB
  least limit for which a plan was found on mesh 2,1,1: 5 GiB, 250 ms a step in 8 micro-batches
  (none for 4.8 GiB); any plan needs 3 GiB, proven
  what helps, nearest first, each planned with all else as it was asked for:
                fullest rank    step  micro-batches
    mesh 1,2,1         1 GiB  250 ms              8
  no plan was found that fits with precision=bf16, mesh 1,1,2; both x and one of precision=bf16,
  mesh 1,1,2
"""
