"""Some cells of the table of ``python -m tests.truth equal``, and that it tells what is not as it was asked for."""

from __future__ import annotations

import functools

import pytest

from tests.truth.equal import Bench, Cell

bench = functools.cache(functools.partial(Bench, backend="local"))


@pytest.mark.parametrize(
    "cell",
    [
        Cell("gpt2 odd", "2,1,2", 2, "on", 2),  # embeddings are tied over stages
        Cell("gpt2 odd", "4,1,1", 2, "on"),  # gradients of some weights need no sum over data
        Cell("gpt2 odd", "3,2,1", 3, "on", 2),
        Cell("llama odd", "3,1,2", 1, "off", 2),
    ],
    ids=str,
)
def test_equal_and_as_asked(cell):
    outcome = bench(cell.model).run(cell)
    assert not outcome.wrong, outcome.wrong


def test_what_is_not_as_asked_is_told():
    cell = Cell("gpt2 odd", "2,1,1", 1, "on")
    found = bench(cell.model).run(cell, bench(cell.model).plan(Cell("gpt2 odd", "2,1,1", 0, "off")))
    assert found.report.equal
    levels, layers = found.wrong
    assert levels.startswith("ZeRO levels are {0: 1.0") and layers.startswith("0 layers to be computed again")


def test_ranks_that_hold_more_than_planned_are_told():
    cell = Cell("gpt2 odd", "2,1,1", 2, "off")
    plan = bench(cell.model).plan(cell)
    held = bench(cell.model).run(cell, plan).ranks
    held.found["gradients"][1] = held.whole[1]
    held.found["updated"][0] -= 1
    assert [text.split(":")[0] for text in held.wrong()] == ["gradients of rank 1", "updated of rank 0"]
