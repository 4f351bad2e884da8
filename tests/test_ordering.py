"""Ranks in other orders: where each stands, what joins it to others, which order is chosen, and that the training is the same."""

import functools
from dataclasses import replace
from itertools import permutations

import pytest
import torch
import transformers
from small import case, gpt2

from autoshard.capture import capture
from autoshard.cluster import PRESETS
from autoshard.errors import MeshError
from autoshard.mesh import AXES, ORDER, Mesh
from autoshard.planning.ordering import placements_on
from autoshard.planning.plan import Plan
from autoshard.report.explain import explain_text
from autoshard.searching import wanted_of

ETHERNET, DGX = PRESETS["a100-ethernet"], PRESETS["a100-dgx"]
ORDERS = tuple(permutations(AXES))


# --- where each rank stands ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_and_coordinates(order):
    mesh = Mesh(2, 3, 4, order)
    assert [mesh.rank(*mesh.coords(rank)) for rank in range(24)] == list(range(24))
    coordinates = [dict(zip(AXES, mesh.coords(rank))) for rank in range(24)]
    assert coordinates == sorted(coordinates, key=lambda at: [at[axis] for axis in order])  # the last axis is the fastest
    for axis in AXES:
        for rank in range(24):
            assert [mesh.coords(other)[AXES.index(axis)] for other in mesh.group(axis, rank)] == list(range(getattr(mesh, axis)))
    assert Mesh.of(str(mesh)) == mesh


def test_without_an_order_it_is_the_usual_one():
    assert [Mesh(2, 3, 4).coords(rank) for rank in range(24)] == [Mesh(2, 3, 4, ORDER).coords(rank) for rank in range(24)]
    assert str(Mesh(2, 3, 4)) == "2,3,4"
    assert Mesh.of("4,1,2:data,pipeline") == Mesh(4, 1, 2, ("tensor", "data", "pipeline"))


@pytest.mark.parametrize("order", ["data", "data,tensor", "data,data,pipeline", "data,tensor,sequence", ""])
def test_an_order_names_every_axis_once(order):
    with pytest.raises(MeshError, match="4,1,2 can't be in the order"):
        Mesh.of(f"4,1,2:{order}")


def test_which_meshes_answer_what_was_asked():
    mesh = Mesh(4, 1, 2, ("data", "pipeline"))
    assert mesh.answers(8) and mesh.answers(Mesh(4, 1, 2)) and mesh.answers(mesh)
    assert not mesh.answers(4) and not mesh.answers(Mesh(2, 1, 4)) and not mesh.answers(Mesh(4, 1, 2, ORDER))
    assert not Mesh(4, 1, 2).answers(mesh)


@pytest.mark.parametrize(
    "mesh, node, within",
    [
        ("4,2,2", 8, {"tensor": 2, "data": 4}),
        ("4,2,2:data,pipeline,tensor", 8, {"tensor": 2, "pipeline": 2, "data": 2}),
        ("16,1,1", 8, {"data": 8}),
        ("2,16,1", 8, {"tensor": 8}),
        ("4,2,1", 8, {}),  # one node
        ("4,3,2", 8, {}),  # not the same in every node
    ],
)
def test_ranks_of_a_node(mesh, node, within):
    assert Mesh.of(mesh).within(node) == within


# --- what joins them -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order, links",  # shares of the node's one card, along data, tensor and pipeline, and data and tensor together; None: inside
    [
        ("pipeline,data,tensor", (None, None, 4, None)),  # the second of four stages sends to the third
        ("data,pipeline,tensor", (8, None, None, 4)),
        ("tensor,pipeline,data", (None, 8, None, 4)),
    ],
)
def test_links_by_order(order, links):
    mesh = Mesh.of(f"2,2,4:{order}")
    for axis, shares in zip((*AXES, "data+tensor"), links):
        link = ETHERNET.link(axis, mesh)
        assert link == ETHERNET.intra if shares is None else link.bandwidth == pytest.approx(3.125e9 / shares), axis


def test_orders_are_tried_only_where_they_change_a_link():
    assert placements_on(Mesh(2, 2, 2), DGX) == [Mesh(2, 2, 2)]  # one node
    assert placements_on(Mesh(16), DGX) == [Mesh(16)]
    given = Mesh(4, 2, 2, ORDER)
    assert placements_on(given, DGX) == [given]
    found = placements_on(Mesh(4, 2, 2), DGX)
    assert found[0] == Mesh(4, 2, 2) and Mesh(4, 2, 2, ("data", "pipeline", "tensor")) in found
    links = [tuple(DGX.link(axis, mesh) for axis in (*AXES, "data+tensor")) for mesh in found]
    assert len(set(links)) == len(links)


# --- which one is chosen -----------------------------------------------------------------------------------------------------


def wanted(cluster, batch=8, length=16, **options):
    model, _ = gpt2()
    ids = torch.zeros(batch, length, dtype=torch.long)
    return wanted_of(capture(model, {"input_ids": ids, "labels": ids}), "gpt2", cluster, **options)


@functools.cache
def two_layers_of_gpt2_small():
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2))
        ids = torch.zeros(32, 512, dtype=torch.long)
    return capture(model, {"input_ids": ids, "labels": ids})


def test_estimate_of_traffic():
    found = wanted(ETHERNET)._traffic
    # 13 weights a layer (2 linears of attention, 2 of the MLP, 2 norms), 2 embeddings (one is the head too), the last norm
    width, layer = 32, 12 * 32**2 + 13 * 32
    assert sum(nbytes for nbytes, _ in found.gradients) == 4 * (2 * layer + (99 + 16) * width + 2 * width)
    stream = 4 * 8 * 16 * width
    assert found._cuts(2) == [stream]
    assert found.sums[:4] == (stream,) * 4 and len(found.sums) == 9  # the head gives more than it reads
    tied = 4 * 99 * width
    assert found._most(2) >= tied + 4 * layer and found._most(1) == sum(nbytes for nbytes, _ in found.gradients)


def slow(order: str, cluster=ETHERNET) -> float:
    return wanted(cluster, 32)._traffic.seconds(Mesh.of(f"4,2,2:{order}"), cluster, 4)


def test_the_order_follows_what_is_sent():
    # few weights, long samples: gradients may cross the border of nodes; few samples: activations may
    asked = Mesh(4, 1, 4)
    assert wanted(ETHERNET, batch=512).placed(asked).order == ("tensor", "data", "pipeline")
    assert wanted(ETHERNET, batch=16, length=1).placed(asked) == asked
    assert slow("tensor,pipeline,data") > max(slow("data,pipeline,tensor"), slow("pipeline,data,tensor"))  # tensor over Ethernet
    assert wanted(DGX).placed(Mesh(2, 2, 2)) == Mesh(2, 2, 2)


@pytest.mark.parametrize("name", ["a100-ethernet", "a100-pcie-ethernet"])
def test_tensor_stays_inside_nodes_that_ethernet_joins(name):
    found = wanted_of(two_layers_of_gpt2_small(), "gpt2", name)
    meshes = [found.placed(mesh) for mesh in Mesh.all(16, 8)]
    assert len(meshes) > 10 and any(mesh.tensor == 8 for mesh in meshes)
    for mesh in meshes:
        assert found.cluster.link("tensor", mesh) == found.cluster.intra, mesh


@pytest.mark.slow
def test_the_plan_changes_with_the_network():
    plans = {}
    for name in ("a100-dgx", "a100-ethernet", "a100-pcie-ethernet"):
        found = wanted_of(two_layers_of_gpt2_small(), "gpt2", name)
        plan = plans[name] = found.best(16)
        assert found.cluster.link("tensor", plan.mesh) == found.cluster.intra
    assert len({plan.mesh.shape for plan in plans.values()}) == 3
    dgx, ethernet, pcie = plans.values()
    # sums of gradients over Ethernet are spared first; without NVLink collectives over tensor too
    assert dgx.mesh.data > ethernet.mesh.data and pcie.mesh.tensor < ethernet.mesh.tensor


def test_the_plan_says_so(tmp_path):
    found = wanted(ETHERNET, batch=512, microbatches=8)
    plan = found.best(Mesh(4, 1, 4))
    given = found.best(Mesh(4, 1, 4, ORDER))
    assert given.mesh.order == ORDER and plan.mesh.order == ("tensor", "data", "pipeline")
    assert plan.step_seconds < given.step_seconds
    assert "(ranks of a node: pipeline 4 x data 2)" in " ".join(explain_text(plan).split())
    assert "(ranks of a node: data 4 x pipeline 2)" in " ".join(explain_text(given).split())
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").mesh == plan.mesh
    assert "order" not in replace(plan, mesh=Mesh(4, 1, 4)).to_json()


# --- training is the same ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order, zero", [*zip(ORDERS[:4], (0, 1, 2, 3)), (ORDERS[5], 2)])
def test_equal_in_every_order(order, zero):
    assert order != ORDER
    plan = case("gpt2").check(Mesh(2, 2, 2, order), zero=zero)
    assert plan.mesh.order == order
    assert len(set(plan.stages.values())) == 2 and min(plan.split_flops.values()) > 0.5
