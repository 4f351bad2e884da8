"""Costs against arithmetic by hand, and the properties that any cost must have."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from autoshard import compiler
from autoshard.cluster import Cluster, Device, Link
from autoshard.cost import communication, memory, pipeline
from autoshard.cost.compute import accumulation_seconds, op_cost, op_costs, optimizer_seconds, roofline_seconds, work_share
from autoshard.mesh import Mesh
from autoshard.placement import CONVERSIONS, R_STAR, P, R, S
from autoshard.rules.notation import Choice, Comm, OpRule, Strategy, bind, choices, strategies

# Round figures: 100 FLOP/s in fp32, 200 in bf16, 10 B/s of memory, 10 B/s and 1 s inside a node of 4, 2 B/s and 3 s between nodes.
DEVICE = Device("toy", {"fp32": 100.0, "bf16": 200.0}, 1e6, 10.0, launch=0.5, compute_efficiency=1.0, memory_efficiency=1.0)
TOY = Cluster("toy", DEVICE, 4, Link(10.0, 1.0), Link(2.0, 3.0), nics=4)
FREE_LAUNCH = Cluster("toy, free launch", Device("toy", DEVICE.peak, 1e6, 10.0, 1e-9, 1.0, 1.0), 4, TOY.intra, TOY.inter, nics=4)
FAST_MEMORY = Cluster("toy, fast memory", Device("toy", DEVICE.peak, 1e6, 1e12, 1e-12, 1.0, 1.0), 4, TOY.intra, TOY.inter, nics=4)


# --- communication -------------------------------------------------------------------------------------------------------


def test_collectives_by_hand():
    link = Link(bandwidth=20.0, latency=1.0, efficiency=0.5)  # 10 B/s attained
    seconds = communication.collective_seconds
    assert seconds("all_reduce", 80, 4, link) == 2 * 3 * 1 + 2 * 0.75 * 80 / 10  # 18
    assert seconds("all_gather", 80, 4, link) == 3 + 0.75 * 80 / 10  # 9
    assert seconds("reduce_scatter", 80, 4, link) == 9
    assert seconds("all_to_all", 80, 4, link) == 3 + 0.75 * (80 / 4) / 10  # 4.5
    assert seconds("send", 80, 2, link) == 1 + 80 / 10
    assert seconds("all_reduce", 80, 1, link) == 0


def test_all_reduce_is_reduce_scatter_and_all_gather():
    for k in (2, 3, 8, 128):
        parts = [communication.collective_seconds(kind, 1e6, k, TOY.intra) for kind in ("reduce_scatter", "all_gather")]
        assert communication.collective_seconds("all_reduce", 1e6, k, TOY.intra) == pytest.approx(sum(parts))


def convert(src, dst, mesh, grad=True, share=1.0, shape=(8, 4), cluster=TOY):
    return communication.conversion_seconds(src, dst, shape, 4, Mesh(*mesh), cluster, grad, share)


def test_conversions_by_hand():
    # 8 x 4 floats: 128 bytes; 2 tensor ranks on one node: alpha 1, beta 10; copies: bytes / 10 + 0.5
    mesh = (1, 2, 1)
    gather, reduce = 1 + 64 / 10, 2 + 128 / 10
    assert convert((R, P), (R, R), mesh) == pytest.approx((reduce, 0))
    assert convert((R, R), (R, R_STAR), mesh) == pytest.approx((0, reduce))
    assert convert((R, P), (R, R_STAR), mesh) == pytest.approx((reduce, reduce))
    assert convert((R, S(1)), (R, R_STAR), mesh) == pytest.approx((gather, gather))
    assert convert((R, P), (R, S(0)), mesh) == pytest.approx((gather, gather))
    piece = (64 + 64) / 10 + 0.5  # half is read, half is written
    assert convert((R, R), (R, S(0)), mesh) == pytest.approx((piece, gather))
    assert convert((R, S(0)), (R, R), mesh) == pytest.approx((gather, piece))
    assert convert((R, R), (R, P), mesh) == pytest.approx((2 * 128 / 10 + 0.5, 0))
    assert convert((R, S(0)), (R, S(1)), mesh) == pytest.approx((1 + 32 / 10, 1 + 32 / 10))
    assert convert((R, R), (R, R), mesh) == (0, 0)


def test_the_other_axis_divides_the_bytes():
    # cut over 2 data ranks first: 64 bytes along tensor
    assert convert((S(0), P), (S(0), R), (2, 2, 1)) == pytest.approx((2 + 64 / 10, 0))


def test_no_gradient_pays_nothing_backward_and_does_not_tell_replicas_apart():
    assert convert((R, R), (R, R_STAR), (1, 2, 1), grad=False) == (0, 0)
    assert convert((R, S(0)), (R, R_STAR), (1, 2, 1), grad=False) == pytest.approx((7.4, 0))


def test_no_way_is_none():
    assert convert((R, R), (R, S(1)), (1, 8, 1)) is None  # 4 columns on 8 ranks


def test_microbatches_divide_bytes_but_not_latency():
    assert convert((R, P), (R, R), (1, 2, 1), share=0.25) == pytest.approx((2 + 32 / 10, 0))


def test_steps_tell_what_runs():
    steps = communication.conversion_steps((S(0), P), (S(0), R_STAR), (8, 4), 4, Mesh(2, 2), TOY, True)
    assert [(s.axis, s.kind, s.nbytes, s.direction, s.local) for s in steps] == [
        ("tensor", "all_reduce", 64.0, "forward", False),  # 2 * 1/2 * 64
        ("tensor", "all_reduce", 64.0, "backward", False),
    ]
    steps = communication.conversion_steps((P, P), (R, R), (8, 4), 4, Mesh(2, 2), TOY, True)
    assert {s.axis for s in steps} == {"data", "tensor"} and all(s.direction == "forward" for s in steps)


@pytest.mark.parametrize("cell", CONVERSIONS, ids=lambda cell: f"{cell[0]} to {cell[1]}")
@pytest.mark.parametrize("mesh, axis", [((1, 4, 1), 1), ((4, 1, 1), 0), ((1, 8, 1), 1)])
def test_every_cell_sends_the_bytes_of_the_table(cell, mesh, axis):
    def layout(kind, dim):
        placement = S(dim) if kind == "S" else {"R": R, "R*": R_STAR, "P": P}[kind]
        return tuple(placement if i == axis else R for i in range(2))

    src, dst = layout(cell[0], 0), layout(cell[1], 1 if cell[0] == "S" else 0)
    steps = communication.conversion_steps(src, dst, (16, 16), 1, Mesh(*mesh), TOY, True)
    k, n, row = max(mesh), 256, CONVERSIONS[cell]
    g = (k - 1) / k
    table = {"0": 0, "1": g * n, "2": 2 * g * n, "1/k": g * n / k}
    assert sum(s.nbytes for s in steps if s.direction == "forward") == pytest.approx(table[row.forward_bytes])
    assert sum(s.nbytes for s in steps if s.direction == "backward") == pytest.approx(table[row.backward_bytes])
    assert all(s.seconds > 0 for s in steps)


def test_between_nodes_costs_more():
    inside, across = convert((R, P), (R, R), (1, 4, 1)), convert((R, P), (R, R), (1, 8, 1))
    # 4 ranks inside: 6 * 1 + 1.5 * 128 / 10; 8 ranks over two nodes: 14 * 3 + 1.75 * 128 / (4 cards * 2 B/s)
    assert inside[0] == pytest.approx(6 + 19.2)
    assert across[0] == pytest.approx(42 + 28)


def test_gradient_sync_is_one_ring_over_both_axes():
    mesh = Mesh(2, 2)
    # 4 ranks of one node: 6 * 1 + 2 * 3/4 * 100 / 10
    assert communication.gradient_sync_seconds(100, ("data", "tensor"), mesh, TOY) == pytest.approx(6 + 15)
    assert communication.gradient_sync_seconds(100, ("data",), mesh, TOY) == pytest.approx(2 + 10)
    # the joint ring sends 150 bytes, two rings after one another 200; an axis of size 1 is left out
    assert communication.gradient_sync(100, ("data", "tensor"), mesh, TOY).nbytes == 150
    assert communication.gradient_sync(100, ("data", "tensor"), Mesh(2), TOY).axis == "data"
    assert communication.gradient_sync_seconds(100, ("data", "tensor"), Mesh(), TOY) == 0


def test_tensor_parallel_leaves_the_node_on_ethernet():
    """Question 3 of the users: the same all-reduce is far dearer over 25 Gb/s Ethernet than over NVLink."""
    ethernet = Cluster.of("a100-ethernet")
    inside = communication.collective_seconds("all_reduce", 64e6, 8, ethernet.link("tensor", Mesh(2, 8, 1)))
    across = communication.collective_seconds("all_reduce", 64e6, 16, ethernet.link("tensor", Mesh(1, 16, 1)))
    assert across > 50 * inside


def test_kernel_steps():
    reduce = Choice("shard v", (S(1),), (R,), "v", comms=(Comm("all_reduce", 8, ("n",)),))
    batch = Choice("shard n", (S(0),), (P,), "n")
    whole = Choice("replicate", (R,), (R,))
    both = Strategy((batch, reduce), (), ())
    # 8 labels, half of them on each data rank: 16 bytes over 2 tensor ranks
    (step,) = communication.kernel_steps(both, 4, Mesh(2, 2), TOY)
    assert (step.axis, step.kind, step.nbytes, step.seconds) == ("tensor", "all_reduce", 16.0, pytest.approx(2 + 1.6))
    (step,) = communication.kernel_steps(Strategy((whole, reduce), (), ()), 4, Mesh(2, 2), TOY, batch_share=0.5)
    assert step.nbytes == 16.0
    assert communication.kernel_steps(both, 4, Mesh(2, 1), TOY) == ()


KINDS = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])


@given(KINDS, st.floats(1, 1e12), st.floats(1.01, 100), st.integers(2, 512))
def test_collectives_are_monotone(kind, nbytes, more, k):
    seconds = communication.collective_seconds
    assert seconds(kind, nbytes * more, k, TOY.intra) > seconds(kind, nbytes, k, TOY.intra) > 0
    assert seconds(kind, nbytes, k, TOY.inter) > seconds(kind, nbytes, k, TOY.intra)
    if kind != "all_to_all":
        assert seconds(kind, nbytes, k + 1, TOY.intra) > seconds(kind, nbytes, k, TOY.intra)


# --- compute -------------------------------------------------------------------------------------------------------------


def node_of(target, *shapes, result, grads=(True,), grad=True, dtype=torch.float32, names=None):
    """An op on placeholders of the given shapes, as the annotated graph holds it."""
    graph = fx.Graph()
    inputs = []
    for i, shape in enumerate(shapes):
        node = graph.placeholder((names or {}).get(i, f"in_{i}"))
        node.meta.update(val=torch.empty(shape, dtype=dtype, device="meta"), grad=grads[i % len(grads)])
        inputs.append(node)
    return call(graph, target, inputs, result, grad, dtype)


def call(graph, target, args, result, grad=True, dtype=torch.float32):
    node = graph.call_function(target, tuple(args))
    node.meta.update(val=torch.empty(result, dtype=dtype, device="meta"), grad=grad)
    return node


aten = torch.ops.aten
N, K, M = 8, 16, 4


def linear(grads=(True, True, True), dtype=torch.float32, bias=True):
    shapes = [(N, K), (M, K), (M,)][: 3 if bias else 2]
    node = node_of(aten.linear.default, *shapes, result=(N, M), grads=grads, dtype=dtype)
    rule = bind("n k, m k, +m -> n m", shapes, [(N, M)], flops=2.0 * N * K * M, saved=(0, 1))
    return node, rule, shapes


def pick(rule, shapes, results, sizes, name):
    """The strategy of this name, "data choice | tensor choice"."""
    per_axis = tuple(choices(rule, k) for k in sizes)
    return next(s for s in strategies(rule, per_axis, sizes, tuple(shapes), tuple(results)) if s.name == name)


def linear_cost(name, sizes, cluster=FREE_LAUNCH, share=1.0, whole=frozenset(), **how):
    node, rule, shapes = linear(**how)
    return op_cost(node, rule, pick(rule, shapes, [(N, M)], sizes, name), sizes, cluster, share, whole)


def test_roofline_by_hand():
    # compute: 1000 / 100; memory: 50 / 10; the larger, and two launches
    assert roofline_seconds(1000, 50, "fp32", DEVICE, kernels=2) == 10 + 1
    assert roofline_seconds(1000, 500, "fp32", DEVICE) == 50 + 0.5
    assert roofline_seconds(1000, 50, "bf16", DEVICE) == 5 + 0.5
    assert roofline_seconds(1000, 50, "fp64", DEVICE) == 20 + 0.5  # not listed: half of fp32
    assert roofline_seconds(0, 0, "fp32", DEVICE, kernels=0) == 0


def test_linear_by_hand():
    # 2 * 8 * 16 * 4 = 1024 FLOP = 10.24 s; x 512 B, w 256 B, b 16 B, y 128 B: 912 B = 91.2 s at 10 B/s
    cost = linear_cost("replicate | replicate", (1, 1), cluster=TOY)
    assert cost.forward == pytest.approx(91.2 + 0.5)
    # dx and dw each move y, x and w: 896 B; db reads y and writes b: 144 B
    assert cost.backward == pytest.approx(2 * (89.6 + 0.5) + 14.4 + 0.5)
    assert (cost.flops, cost.split, cost.result_bytes) == (1024, 1, 128)
    assert cost.working_bytes == 128 + 912 - 128  # gradients of y, x, w and b


def test_sharding_divides_the_work_and_replicas_pay_in_full():
    names = ["replicate | replicate", "defer | defer", "shard n | replicate", "shard n | shard m", "shard n | shard k", "shard n | defer"]
    times = {name: linear_cost(name, (2, 4), FAST_MEMORY).forward for name in names}
    # 1024 FLOP at 100 a second
    assert times["replicate | replicate"] == times["defer | defer"] == pytest.approx(10.24)
    assert times["shard n | replicate"] == times["shard n | defer"] == pytest.approx(5.12)
    assert times["shard n | shard m"] == times["shard n | shard k"] == pytest.approx(1.28)
    assert linear_cost("shard n | shard m", (2, 4)).split == 8
    assert linear_cost("shard n | replicate", (2, 4)).split == 2


def test_backward_runs_one_matmul_for_each_matrix_with_a_gradient():

    def backward(*grads):
        return linear_cost("replicate | replicate", (1, 1), FAST_MEMORY, grads=grads, bias=False).backward

    assert backward(True, True) == pytest.approx(2 * 10.24)
    assert backward(True, False) == backward(False, True) == pytest.approx(10.24)
    assert backward(False, False) == 0


def test_half_precision_is_faster_and_smaller():
    full, half = (linear_cost("replicate | replicate", (1, 1), dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert half.forward == pytest.approx(full.forward / 2)
    assert half.result_bytes == full.result_bytes / 2


def test_microbatches_divide_activations_and_flops_but_not_weights():
    cost = linear_cost("replicate | replicate", (1, 1), share=0.25, whole=frozenset({"in_1", "in_2"}))
    # x 128, w 256, b 16, y 32: 432 B
    assert cost.forward == pytest.approx(43.2)
    assert (cost.flops, cost.result_bytes) == (256, 32)


def test_an_op_on_values_without_a_batch_is_not_divided():
    node = node_of(aten.mul.Tensor, (8, 8), (8, 8), result=(8, 8))
    rule = bind("a b, a b -> a b", [(8, 8)] * 2, [(8, 8)])
    whole = frozenset({"in_0", "in_1", node.name})
    strategy = pick(rule, [(8, 8)] * 2, [(8, 8)], (1, 1), "replicate | replicate")
    assert op_cost(node, rule, strategy, (1, 1), TOY, 0.5, whole).forward == op_cost(node, rule, strategy, (1, 1), TOY).forward


def test_uneven_pieces_cost_what_the_fullest_rank_does():
    rule = OpRule((), (), {"n": 10})
    half = Choice("shard n", (), (), "n")
    assert work_share(rule, Strategy((Choice("defer", (), ()), half), (), ()), (1, 4)) == 3 / 10
    assert work_share(rule, Strategy((half, half), (), ()), (2, 4)) == 2 / 10  # 10 -> 5 -> 2
    assert work_share(rule, Strategy((Choice("shard n/2", (), (), "n", 2), half), (), ()), (2, 1)) == 6 / 10  # two blocks of 5 -> 3 each


def test_pointwise_by_bytes():
    shape = (8, 8)  # 256 bytes
    node = node_of(aten.gelu.default, shape, result=shape)
    rule = bind("... -> ...", [shape], [shape], saved=(0,))
    cost = op_cost(node, rule, pick(rule, [shape], [shape], (1, 2), "replicate | shard d0"), (1, 2), TOY)
    assert cost.forward == pytest.approx(2 * 128 / 10 + 0.5)
    assert cost.backward == pytest.approx(3 * 128 / 10 + 0.5)  # reads d y and x, writes d x
    node.meta["grad"] = False
    assert op_cost(node, rule, pick(rule, [shape], [shape], (1, 2), "replicate | shard d0"), (1, 2), TOY).backward == 0


def test_views_are_free_and_slices_pay_for_their_gradient():
    view = node_of(aten.reshape.default, (8, 8), result=(64,))
    rule = OpRule((((), ()),), (((), ()),), {})
    same = Strategy((Choice("replicate", (R,), (R,)),) * 2, ((R, R),), ((R, R),))
    cost = op_cost(view, rule, same, (1, 1), TOY)
    assert (cost.forward, cost.backward, cost.result_bytes, cost.saved_bytes) == (0, 0, 0, 0)
    piece = node_of(aten.slice.Tensor, (8, 8), result=(4, 8))
    cost = op_cost(piece, rule, same, (1, 1), TOY)
    assert cost.forward == 0
    assert cost.backward == pytest.approx((128 + 256) / 10 + 0.5)


def test_embedding_reads_its_rows_only():
    node = node_of(aten.embedding.default, (100, 4), (6,), result=(6, 4), grads=(True, False))
    node.args[1].meta["val"] = torch.empty(6, dtype=torch.int64, device="meta")
    rule = bind("v d, n -> n d", [(100, 4), (6,)], [(6, 4)], summed=frozenset("v"), saved=(1,))
    strategy = pick(rule, [(100, 4), (6,)], [(6, 4)], (1, 1), "replicate | replicate")
    cost = op_cost(node, rule, strategy, (1, 1), TOY)
    assert cost.forward == pytest.approx((96 + 48 + 96) / 10 + 0.5)  # 6 rows of 16 B read and written, 6 ids of 8 B
    assert cost.backward == pytest.approx((96 + 48 + 1600) / 10 + 0.5)  # the whole table's gradient


def test_op_without_a_rule_is_whole():
    node = node_of(aten.cumsum.default, (8, 8), result=(8, 8))
    rule = OpRule((), (), {}, fallback=True)
    strategy = Strategy((Choice("replicate", (), ()),) * 2, (), ())
    cost = op_cost(node, rule, strategy, (2, 2), TOY)
    assert cost.forward == pytest.approx(512 / 10 + 0.5)
    assert cost.saved == (((node.name, 0, ("R", "R")), 256),)  # its result; its operand is an input of the model


def test_many_at_once_equal_one_by_one():
    node, rule, shapes = linear()
    found = strategies(rule, (choices(rule, 2), choices(rule, 2)), (2, 2), tuple(shapes), ((N, M),))
    assert len(found) > 10
    assert op_costs(node, rule, found, (2, 2), TOY) == [op_cost(node, rule, s, (2, 2), TOY) for s in found]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([(1, 2), (2, 1), (2, 2), (4, 2), (2, 4)]), st.sampled_from([1.0, 0.5, 0.25]))
def test_no_strategy_beats_perfect_division_nor_loses_to_replication(sizes, share):
    node, rule, shapes = linear()
    whole = frozenset({"in_1", "in_2"})
    alone = op_cost(node, rule, pick(rule, shapes, [(N, M)], (1, 1), "replicate | replicate"), (1, 1), FREE_LAUNCH, share, whole)
    found = strategies(rule, tuple(choices(rule, k) for k in sizes), sizes, tuple(shapes), ((N, M),))
    for strategy, cost in zip(found, op_costs(node, rule, found, sizes, FREE_LAUNCH, share, whole)):
        n = math.prod(sizes)
        assert alone.forward / n * (1 - 1e-6) <= cost.forward <= alone.forward * (1 + 1e-6), strategy.name
        assert alone.backward / n * (1 - 1e-6) <= cost.backward <= alone.backward * (1 + 1e-6), strategy.name
        assert cost.saved_bytes <= alone.saved_bytes and cost.split <= n


def test_optimizer_step():
    assert optimizer_seconds(10, DEVICE) == pytest.approx(280 / 10 + 0.5)
    assert optimizer_seconds(10, DEVICE, mixed=5) == pytest.approx(340 / 10 + 0.5)


# --- memory --------------------------------------------------------------------------------------------------------------


def test_sixteen_bytes_a_parameter():
    """Mixed-precision Adam: 2 + 2 + 12 = 16 Phi on each rank, 16 Phi / K under ZeRO-3, and the levels between."""
    phi, k = 7.5e9, 64
    by_level = [sum(memory.state_bytes(phi, mixed=True, zero=level, ranks=k).values()) for level in range(4)]
    assert by_level == pytest.approx([16 * phi, (4 + 12 / k) * phi, (2 + 14 / k) * phi, 16 * phi / k])
    # the ZeRO paper's figure 1: 120, 31.4, 16.6 and 1.9 GB
    assert [round(b / 1e9, 1) for b in by_level] == [120.0, 31.4, 16.6, 1.9]
    assert sum(memory.state_bytes(phi).values()) == 16 * phi  # fp32: 4 + 4 + 8
    assert memory.state_bytes(10, itemsize=8) == {"parameters": 80, "gradients": 80, "optimizer": 160}


def test_frozen_parameters_hold_no_state():
    assert memory.state_bytes(10, mixed=True, trainable=False) == {"parameters": 20, "gradients": 0, "optimizer": 0}


def chain():
    """x -> h = linear(x, w) -> v = h.reshape -> gelu(v), and mul(h, h): h is saved by both, once under its own name and once as a view."""
    h, rule, shapes = linear(bias=False)
    graph = h.graph
    v = call(graph, aten.reshape.default, [h, [N * M]], (N * M,))
    g = call(graph, aten.gelu.default, [v], (N * M,))
    m = call(graph, aten.mul.Tensor, [h, h], (N, M))
    flat = bind("a -> a", [(N * M,)], [(N * M,)], saved=(0,))
    square = bind("n m, n m -> n m", [(N, M)] * 2, [(N, M)], saved=(0, 1))
    sizes = (2, 1)
    return (
        op_cost(h, rule, pick(rule, shapes[:2], [(N, M)], sizes, "shard n | replicate"), sizes, TOY),
        op_cost(g, flat, pick(flat, [(N * M,)], [(N * M,)], sizes, "shard a | replicate"), sizes, TOY),
        op_cost(m, square, pick(square, [(N, M)] * 2, [(N, M)], sizes, "shard n | replicate"), sizes, TOY),
    )


def test_saved_activations_are_held_once():
    costs = chain()
    # the linear saves its input and its weight, which are the model's own; h (128 B, half on each rank) is saved by gelu and by mul
    assert [c.saved_bytes for c in costs] == [0, 64, 64]
    assert memory.saved_bytes(costs) == 64
    # the linear's backward holds d h (64), d x (256) and d w (256)
    assert memory.working_bytes(costs) == 64 + 256 + 256


def test_a_frozen_weight_saves_no_input():
    node = node_of(aten.relu.default, (N, K), result=(N, K))
    graph = node.graph
    weight = graph.placeholder("w")
    weight.meta.update(val=torch.empty(M, K, device="meta"), grad=False)
    out = call(graph, aten.linear.default, [node, weight], (N, M))
    rule = bind("n k, m k -> n m", [(N, K), (M, K)], [(N, M)], flops=1.0, saved=(0, 1))
    strategy = pick(rule, [(N, K), (M, K)], [(N, M)], (1, 1), "replicate | replicate")
    assert op_cost(out, rule, strategy, (1, 1), TOY).saved == ()
    weight.meta["grad"] = True
    assert op_cost(out, rule, strategy, (1, 1), TOY).saved == (((node.name, 0, ("R", "R")), 512),)


def test_moments():
    state = {"parameters": 1, "gradients": 10, "optimizer": 100}
    # 3 micro-batches in flight of 3: no gradients yet; of 4: those of the first
    assert memory.moments(state, saved=1000, working=7, flight=3, microbatches=3, finishing=20) == (3108, 1118, 131)
    assert memory.moments(state, saved=1000, working=7, flight=3, microbatches=4, standing=50)[0] == 3168
    assert memory.moments(state, saved=1000, working=7, flight=1, microbatches=1)[:2] == (1108, 1108)


# --- pipeline ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p, m, percent", [(8, 4, 63.6), (8, 16, 30.4), (8, 64, 9.9), (4, 12, 20.0), (1, 4, 0.0)])
def test_bubble_of_equal_stages(p, m, percent):
    assert round(100 * pipeline.equal_bubble(p, m), 1) == percent
    assert pipeline.bubble_share([0.3] * p, m, seconds([0.3] * p, m)) == pytest.approx(pipeline.equal_bubble(p, m))


def seconds(stages, m, once=(0.0,)):
    return pipeline.step_seconds("1F1B", len(stages), [pipeline.StageTime(t / 3, 2 * t / 3) for t in stages], m, once)


def test_step_by_hand():
    # 1 + 3 + 2, then two more from the slowest, then the longest of the stages' own ends
    assert seconds([1, 3, 2], 3) == pytest.approx(12)
    assert seconds([1, 3, 2], 3, once=[5, 1, 2]) == pytest.approx(17)
    # the stages work 3, 9 and 6 of 12 seconds
    assert pipeline.bubble_share([1, 3, 2], 3, 12) == pytest.approx(1 - 18 / 36)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=8), st.integers(1, 20))
def test_step_equals_a_simulated_flow_shop(stages, m):
    done = [0.0] * len(stages)  # when each stage finished its last micro-batch
    for _ in range(m):
        ready = 0.0
        for s, t in enumerate(stages):
            done[s] = ready = max(done[s], ready) + t
    assert seconds(stages, m) == pytest.approx(done[-1])
    bubble, next_one = (pipeline.bubble_share(stages, n, seconds(stages, n)) for n in (m, m + 1))
    assert 0 <= bubble + 1e-9 and next_one <= bubble + 1e-9


def test_what_backward_hides_of_gradient_sums():
    # four equal buckets of 1 s, full after 1, 2, 3, 4 s of backward: only the last is left; of 3 s each they queue up
    assert pipeline.exposed_seconds([(n, 1.0) for n in (1, 2, 3, 4)], backward=4) == 1
    assert pipeline.exposed_seconds([(n, 3.0) for n in (1, 2, 3, 4)], backward=4) == 1 + 4 * 3 - 4
    assert pipeline.exposed_seconds([(100, 3.0)], backward=100) == 3
    assert pipeline.exposed_seconds([(1, 3.0)], backward=100) == 0
    assert pipeline.exposed_seconds([], backward=1) == 0


def test_ranks_that_share_processors_do_not_wait_in_vain():
    """Two stages, one micro-batch: each waits half of the time, which costs nothing where both would share one processor anyway."""
    one = pipeline.StageTime(0.5, 0.5)
    step = pipeline.step_seconds("1F1B", 2, [one, one], 1)
    assert pipeline.crowded_seconds(step, [1, 1], crowding=1) == pipeline.crowded_seconds(step, [1, 1], crowding=2) == 2
    assert pipeline.crowded_seconds(step, [1, 1], crowding=4) == 4


def test_measured_factors_multiply():
    shape = (8, 8)
    node = node_of(aten.gelu.default, shape, result=shape)
    rule = bind("... -> ...", [shape], [shape], saved=(0,))
    slow = Cluster("toy, slow gelu", replace(DEVICE, factors={"gelu": (3.0, 2.0)}), 4, TOY.intra, TOY.inter, nics=4)
    plain, factored = (op_cost(node, rule, pick(rule, [shape], [shape], (1, 1), "replicate | replicate"), (1, 1), c) for c in (TOY, slow))
    assert (factored.forward, factored.backward) == (3 * plain.forward, 2 * plain.backward)
    slow_adam = replace(DEVICE, factors={"optimizer": (5.0, 0.0)})
    assert optimizer_seconds(10, slow_adam) == 5 * optimizer_seconds(10, DEVICE)


def test_what_each_parameter_and_each_view_costs_where_it_was_measured():
    shape = (8, 8)
    measured = replace(DEVICE, factors={"optimizer": (1.0, 6.0), "accumulate": (0.5, 0.0), "view": (0.4, 0.8)})
    assert optimizer_seconds(10, measured, tensors=3) == optimizer_seconds(10, DEVICE, tensors=3) + 3 * 6 * 0.5
    assert accumulation_seconds(10, 2, measured) == pytest.approx(0.5 * (30 / 10 + 2 * 0.5)) and accumulation_seconds(10, 2, DEVICE) == 0
    node = node_of(aten.reshape.default, shape, result=(64,))
    rule = bind("a b -> (a b)", [shape], [(64,)])
    strategy = pick(rule, [shape], [(64,)], (1, 1), "replicate | replicate")
    clusters = TOY, replace(TOY, name="toy, measured", device=measured)
    costs = [op_cost(node, rule, strategy, (1, 1), cluster) for cluster in clusters]
    assert [(cost.forward, cost.backward) for cost in costs] == [(0, 0), (0.2, 0.4)]


def test_micro_batches_add_gradients_up():
    """Three of four add theirs, all parameters, to what is there: 3 values of each go through memory."""
    model, batch = torch.nn.Linear(4, 4), {"input": torch.randn(8, 4)}
    seconds = {}
    for name, factors in (("free", {}), ("measured", {"accumulate": (2.0, 0.0)})):
        cluster = replace(TOY, name=f"toy, adding is {name}", device=replace(DEVICE, factors=factors))
        plan = compiler.plan(model, (1, 1, 1), batch, cluster=cluster, microbatches=4, loss_fn=lambda out, inputs: out.sum())
        seconds[name] = plan.step_seconds
    assert seconds["measured"] - seconds["free"] == pytest.approx(3 * 2 * (3 * 20 * 4 / 10 + 2 * 0.5))
