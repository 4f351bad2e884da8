"""Plans under a memory limit: shardings, ZeRO levels, recomputation and stages at once; and they train as one device does."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from small import case

import autoshard
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, MeshError
from autoshard.mesh import Mesh
from autoshard.passes.cut_stages import pure_nodes
from autoshard.planning import spans
from autoshard.planning.chain import chain_of
from autoshard.planning.fold import fold
from autoshard.planning.saving import Saving
from autoshard.searching import wanted_of
from autoshard.tasks import plan_for
from autoshard.verifier import Reference

OPEN = Saving(None, None)


def planned(name: str, mesh, limit: float | None = None, m: int = 4, saving: Saving = OPEN):
    one, mesh = case(name), Mesh.of(mesh)
    one.program.mesh = mesh
    return plan_for(one.captured, one.program, "model", mesh, Cluster.of("a100-dgx"), limit, m, {}, saving=saving)


@pytest.mark.parametrize(
    "name, mesh, share",
    [
        ("gpt2", (2, 1, 1), 0.75),
        ("gpt2", (2, 1, 2), 0.75),
        ("llama", (1, 2, 1), 0.9),
        ("odd", (2, 1, 1), 0.85),
        pytest.param("llama", (2, 2, 2), 0.7, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_less_memory_and_the_same_numbers(name, mesh, share):
    m = 4 if len(mesh) == 3 and mesh[2] > 1 else 1
    free = planned(name, mesh, m=m)
    limit = share * free.peak_bytes
    tight = planned(name, mesh, limit, m)
    assert tight.peak_bytes <= limit
    assert (tight.zero, tight.regions, tight.strategies) != (free.zero, free.regions, free.strategies)
    assert tight.step_seconds >= free.step_seconds * (1 - 1e-9)
    case(name).check_plan(tight)


def test_what_is_asked_for_is_kept_to():
    free = planned("gpt2", (2, 1, 1), m=1)
    limit = 0.85 * free.peak_bytes
    without = planned("gpt2", (2, 1, 1), limit, 1, Saving(None, False))
    assert not without.regions and any(without.zero.values()) and without.peak_bytes <= limit
    level = planned("gpt2", (2, 1, 1), limit, 1, Saving(3, None))
    assert set(level.zero.values()) == {3} and level.peak_bytes <= limit
    with pytest.raises(InfeasibleError, match="nothing fits on mesh"):
        planned("gpt2", (2, 1, 1), 0.1 * free.peak_bytes, 1)


def test_the_bound_is_below_and_close():
    free = planned("gpt2", (2, 1, 2))
    tight = planned("gpt2", (2, 1, 2), 0.8 * free.peak_bytes)
    solver = tight.solver
    assert 0 < solver["bound"] <= solver["objective"]
    assert solver["objective"] == pytest.approx(tight.step_seconds, rel=0.1), "the converted program is priced by other code"


def test_any_mesh_of_so_many_devices():
    """As good as the best of all of them, each searched on its own."""
    model, batch = case("gpt2").model, case("gpt2").batch
    best = autoshard.plan(model, 4, batch, microbatches=2)
    assert best.mesh.size == 4
    for mesh in Mesh.all(4, 8):
        assert best.step_seconds <= autoshard.plan(model, mesh, batch, microbatches=2).step_seconds * (1 + 1e-9), mesh
    with pytest.raises(MeshError, match="torchrun has started none"):
        autoshard.plan(model, "auto", batch)


# --- models whose layers do not repeat ---------------------------------------------------------------------------------------


def test_cuts_are_where_the_least_is_alive():
    """Of all ways to cut a run, none has less alive at its cuts, squares of the work between included."""
    rng = Random(0)
    for _ in range(50):
        n = rng.randint(2, 9)
        work = [rng.random() for _ in range(n)]
        done = [sum(work[:i]) / sum(work) for i in range(n + 1)]
        alive = {at: rng.random() for at in range(1, n) if rng.random() < 0.8}

        def price(cuts, n=n, done=done, alive=alive):
            ends = [0, *cuts, n]
            return sum(alive[at] + spans.CUT for at in cuts) + 3.0 * sum((done[b] - done[a]) ** 2 for a, b in zip(ends, ends[1:]))

        found = spans.narrowest_cuts(0, n, done, alive, 3.0)
        every = (cuts for size in range(len(alive) + 1) for cuts in combinations(sorted(alive), size))
        assert price(found) == pytest.approx(min(map(price, every)))


@pytest.mark.parametrize("name", ["widths", "towers", "unet"])
def test_blocks_of_a_model_without_layers(name):
    program = replace(case(name).program, mesh=Mesh(1, 1, 4))
    chain = chain_of(program, fold(program), pure_nodes(program))
    matmuls = sum("linear" in node.name or "conv" in node.name or "matmul" in node.name for node in program.ops)
    assert not chain.repeats and min(8, matmuls) <= len(chain.blocks) <= spans.MOST, "two for each stage"
    assert chain.again == [True] * (len(chain.blocks) - 1) + [False], "backward needs the last at once"
    assert sorted(node.name for block in chain.blocks for node in block) == sorted(node.name for node in program.ops)


def test_short_runs_between_layers_stay_whole():
    program = case("gpt2").program
    chain = chain_of(program, fold(program), pure_nodes(program))
    assert chain.part == [0, 1, 1, 2] and chain.again == [False, True, True, False]


@pytest.mark.parametrize(
    "name, mesh, m",
    [
        ("widths", (1, 1, 2), 4),
        ("towers", (2, 1, 2), 1),
        ("unet", (1, 1, 2), 4),
        ("unet", (2, 1, 2), 4),
        pytest.param("widths", (2, 2, 1), 1, marks=pytest.mark.slow),
        pytest.param("towers", (2, 2, 1), 1, marks=pytest.mark.slow),
        pytest.param("unet", (2, 2, 1), 1, marks=pytest.mark.slow),
    ],
)
def test_unlike_layers_under_memory(name, mesh, m):
    """No slower than plans that save everywhere alike, with a bound; and equal to one device."""
    free = planned(name, mesh, m=m)
    limit = 0.9 * free.peak_bytes
    plan = planned(name, mesh, limit, m)
    assert plan.peak_bytes <= limit and 0 < plan.solver["bound"] <= plan.solver["objective"]
    ladder = wanted_of(case(name).captured, "model", microbatches=m, memory=limit).task(Mesh.of(mesh), m).ladder()
    assert ladder.peak_bytes > limit or plan.step_seconds <= ladder.step_seconds * 1.01
    case(name).check_plan(plan)


def test_unlike_layers_in_processes():
    """Recomputed pieces, and a level of the U-Net that crosses a stage which does not read it."""
    one = case("unet")
    plan = planned("unet", (1, 1, 3), 0.95 * planned("unet", (1, 1, 3)).peak_bytes)
    assert plan.regions
    with Reference(one.model, one.batch, steps=2) as reference:
        report = reference.verify(plan.mesh, plan=plan)
    assert report.equal, report.text()
