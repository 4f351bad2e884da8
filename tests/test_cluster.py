"""Clusters: presets, files, and the link that each axis of a mesh sees."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.cluster import DEFAULT, PRESETS, Cluster, Device, Fit, Link, parse_bytes
from autoshard.errors import MeshError, PlanError
from autoshard.mesh import Mesh

DGX, ETHERNET = PRESETS["a100-dgx"], PRESETS["a100-ethernet"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_complete_and_sourced(name):
    cluster = Cluster.of(name)
    assert cluster.name == name
    assert cluster.device.source and cluster.intra.source and cluster.inter.source
    assert 0 < cluster.device.compute_efficiency <= 1 and 0 < cluster.device.memory_efficiency <= 1
    for dtype in ("fp64", "fp32", "tf32", "bf16", "fp16"):
        assert cluster.device.flops(dtype) > 0


def test_of_takes_names_clusters_and_nothing():
    assert Cluster.of(DGX) is DGX
    assert Cluster.of(None) is PRESETS[DEFAULT]
    with pytest.raises(PlanError, match="'a100'.*\n.*a100-dgx"):
        Cluster.of("a100")


# --- links: nodes of 8 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mesh, axis, cards",  # cards: network cards that a ring may use; None: it stays inside a node
    [
        ((1, 8, 1), "tensor", None),
        ((4, 8, 2), "tensor", None),
        ((1, 16, 1), "tensor", 8),  # one ring through both nodes, 8 of its ranks in each
        ((2, 8, 1), "data", 1),  # 8 rings leave each node, 8 cards
        ((8, 1, 1), "data", None),
        ((16, 1, 1), "data", 8),
        ((16, 2, 1), "data", 4),  # two rings a node, 4 ranks of each in it
        ((2, 4, 1), "data", None),  # ranks 0 and 4, all eight on one node
        ((2, 8, 2), "pipeline", 1),
        ((1, 4, 2), "pipeline", None),  # stages of 4 ranks, both on one node
        ((1, 4, 4), "pipeline", 1),  # 4 of a node's ranks send over the border; each send uses one card
        ((2, 8, 1), "data+tensor", 8),
        ((1, 12, 1), "tensor", 4),  # the second node holds 4 ranks of the ring
    ],
)
def test_link_on_a_dgx(mesh, axis, cards):
    link = DGX.link(axis, Mesh(*mesh))
    if cards is None:
        assert link == DGX.intra
    else:
        # 8 cards carry 8 * 25 * 0.9 = 180 GB/s, below NVLink's 300 * 0.78 = 234
        assert link.rate == pytest.approx(cards * 25e9 * 0.9)
        assert link.latency == DGX.inter.latency


def test_eight_devices_share_one_ethernet_card():
    # 25 Gb/s = 3.125 GB/s a node; 8 data groups leave each node at once
    assert ETHERNET.link("data", Mesh(2, 8, 1)).bandwidth == pytest.approx(3.125e9 / 8)
    # one tensor group over two nodes has the card to itself
    assert ETHERNET.link("tensor", Mesh(1, 16, 1)).bandwidth == pytest.approx(3.125e9)
    assert ETHERNET.link("tensor", Mesh(2, 8, 1)) == ETHERNET.intra
    assert ETHERNET.link("pipeline", Mesh(1, 8, 2)).bandwidth == pytest.approx(3.125e9 / 8)


def test_a_ring_is_never_faster_than_the_links_inside_its_nodes():
    slow = Cluster("slow inside", DGX.device, 8, Link(10e9, 1e-6), DGX.inter, nics=8)
    assert slow.link("tensor", Mesh(1, 16, 1)).rate == 10e9
    assert slow.link("tensor", Mesh(1, 16, 1)).latency == DGX.inter.latency


def test_axis_of_size_one_and_unknown_axis():
    assert DGX.link("data", Mesh(1, 16, 1)) == DGX.intra
    with pytest.raises(MeshError, match="'sequence'"):
        DGX.link("data+sequence", Mesh(2, 2, 1))


# --- files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_toml_round_trip(name, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(PRESETS[name].to_toml())
    assert Cluster.of(str(path)) == PRESETS[name]
    assert Cluster.of(path) == PRESETS[name]


MINIMAL = """
node_size = 4
[device]
memory = "24 GB"
bandwidth = 1008e9
[device.peak]
fp32 = 82.6e12
[intra]
bandwidth = 32e9
latency = 5e-6
[inter]
bandwidth = 12.5e9
latency = 1e-5
"""


def read(tmp_path, text):
    path = tmp_path / "lab.toml"
    path.write_text(text)
    return Cluster.of(path)


def test_minimal_file(tmp_path):
    cluster = read(tmp_path, MINIMAL)
    assert (cluster.name, cluster.node_size, cluster.nics) == ("lab", 4, 4)  # one card a device unless told
    assert cluster.device.memory == 24e9
    assert cluster.device.flops("bf16") == cluster.device.flops("fp32") == 2 * cluster.device.flops("fp64")


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("node_size = 4", "", "'node_size' is missing"),
        ("node_size = 4", "node_size = 4.5", "'node_size' is 4.5.*positive integer"),
        ("node_size = 4", "node_size = 4\nnodesize = 4", "unknown key 'nodesize'"),
        ("node_size = 4", "node_size = 4\nname = 3", "'name' is 3.*text"),
        ('memory = "24 GB"', 'memory = "24 gigs"', "'device.memory' = '24 gigs'"),
        ('memory = "24 GB"', "", "'device.memory' is missing"),
        ("bandwidth = 1008e9", "bandwidth = -1", "'device.bandwidth' is -1"),
        ("bandwidth = 1008e9", "bandwidth = true", "'device.bandwidth' is True"),
        ("bandwidth = 1008e9", "bandwidth = 1e9\ncompute_efficiency = 1.5", "'device.compute_efficiency' is 1.5.*at most 1"),
        ("fp32 = 82.6e12", "bf16 = 82.6e12", "'device.peak.fp32' is missing"),
        ("fp32 = 82.6e12", "fp32 = 82.6e12\nfp8 = 1e15", "unknown key 'device.peak.fp8'"),
        ("latency = 5e-6", "", "'intra.latency' is missing"),
        ("[inter]", "[outer]", "unknown key 'outer'"),
        ("[inter]", "[intra.x]", "unknown key 'intra.x'"),
        ("node_size = 4", "node_size = = 4", "can't read the cluster file"),
        ("node_size = 4", "node_size = 4\ncores = 0", "'cores' is 0"),
        ("bandwidth = 1008e9", 'bandwidth = 1e9\nkind = "tpu"', "'device.kind' is 'tpu'.*'gpu' or 'cpu'"),
        ("[intra]", "[device.factors]\ntanh = [1]\n[intra]", "'device.factors.tanh' is .1.*two numbers"),
        ("[intra]", '[[collectives]]\nkind = "gossip"\n[intra]', "'collectives.kind' is 'gossip'"),
    ],
)
def test_file_errors_name_the_key(tmp_path, old, new, message):
    assert old in MINIMAL
    with pytest.raises(PlanError, match=f"lab.toml.*{message}|{message}.*lab.toml"):
        read(tmp_path, MINIMAL.replace(old, new, 1))


def test_value_in_place_of_a_table(tmp_path):
    with pytest.raises(PlanError, match="lab.toml.*'device' must be a table"):
        read(tmp_path, "node_size = 4\ndevice = 3")


def test_missing_file(tmp_path):
    with pytest.raises(PlanError, match="nowhere.toml"):
        Cluster.of(str(tmp_path / "nowhere.toml"))


@pytest.mark.parametrize("text, value", [("40GiB", 40 * 2**30), ("40 GB", 40e9), ("1.5 kib", 1536), (7, 7), ("4e10", 4e10), ("12 B", 12)])
def test_parse_bytes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GB", "-1", "40 GBs", 0, -3, True, None, float("inf"), float("nan")])
def test_parse_bytes_errors(text):
    with pytest.raises(PlanError, match="can't read memory"):
        parse_bytes(text)


MEASURED = Cluster(
    "measured",
    Device("thread", {"fp32": 1e11}, 1e9, 1e10, kind="cpu", factors={"tanh": (2.0, 1.5)}),
    8,
    Link(1e9, 1e-4),
    Link(1e9, 1e-4),
    1,
    cores=2.0,
    fits=(Fit("all_reduce", 2, 1e-4, 1e9, 0.5e-4, 2e9), Fit("all_reduce", 4, 4e-4, 1e9, 2e-4, 4e9)),
)


def test_measurements_survive_the_file(tmp_path):
    assert read(tmp_path, MEASURED.to_toml()) == MEASURED


def test_processes_that_share_processors_crowd_each_other():
    assert [MEASURED.crowding(n) for n in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert Cluster.of("a100-dgx").crowding(8) == 1


def test_measured_collectives():
    """Of more processes than cores their work counts, which the crowd makes longer; more ranks than measured grow in proportion."""
    assert MEASURED.fit("all_reduce", 2, Mesh(2)) == pytest.approx((1e-4, 1e-9))
    assert MEASURED.fit("all_reduce", 2, Mesh(2, 2)) == pytest.approx((0.5e-4, 0.5e-9))
    assert MEASURED.fit("all_reduce", 3, Mesh(3)) == MEASURED.fit("all_reduce", 4, Mesh(4)) == pytest.approx((2e-4, 0.25e-9))
    assert MEASURED.fit("all_reduce", 8, Mesh(8)) == pytest.approx((4e-4, 0.5e-9))
    assert MEASURED.fit("all_gather", 2, Mesh(2)) is None
    assert MEASURED.fit("all_reduce", 2, Mesh(16)) is None  # leaves the node
    by_the_clock = replace(MEASURED, fits=(Fit("all_reduce", 4, 4e-4, 1e9),))
    assert by_the_clock.fit("all_reduce", 4, Mesh(4)) == pytest.approx((2e-4, 0.5e-9))


def test_what_two_processes_were_measured_to_take_has_their_crowding_in_it():
    slower = replace(MEASURED, cores=1.6)
    assert slower.crowding(2) == 1.25
    assert slower.fit("all_reduce", 2, Mesh(2)) == pytest.approx((0.8e-4, 0.8e-9))
