"""Plans under a memory limit: shardings, ZeRO levels, recomputation and stages at once; and they train as one device does."""

from __future__ import annotations

import pytest
from small import case

import autoshard
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, MeshError
from autoshard.mesh import Mesh
from autoshard.planning.saving import Saving
from autoshard.tasks import plan_for

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
