"""The memory of a rank, op by op: strides against torch, blocks by hand, and the planner's linear form against the whole walk."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard import compiler, passes
from autoshard.capture import capture
from autoshard.cluster import Cluster
from autoshard.cost.compute import op_cost
from autoshard.cost.heap import Heap
from autoshard.cost.liveness import MicroBatch
from autoshard.cost.memory import moments, saved_bytes, state_bytes, working_bytes
from autoshard.cost.rank import step_peak
from autoshard.cost.strides import dense_like, viewed
from autoshard.mesh import Mesh
from autoshard.program import is_getitem
from autoshard.rules import rule_for
from tests.truth.models import MODELS


@st.composite
def views(draw):
    """A tensor with some order of dims, perhaps cut or expanded, and a shape of as many elements."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    x = torch.empty(sizes, device="meta").permute(draw(st.permutations(range(len(sizes)))))
    if draw(st.booleans()):
        dim = draw(st.integers(0, x.dim() - 1))
        x = x.narrow(dim, 0, max(1, x.shape[dim] - 1))
    if draw(st.booleans()):
        x = x.unsqueeze(0).expand(2, *x.shape)
    left, wanted = x.numel(), []
    while left > 1:
        wanted.append(draw(st.sampled_from([n for n in range(2, left + 1) if left % n == 0])))
        left //= wanted[-1]
    return x, draw(st.permutations([1, *wanted]))


@given(views())
def test_which_reshapes_copy(case):
    x, wanted = case
    y = x.reshape(wanted)
    strides = viewed(tuple(x.shape), x.stride(), tuple(wanted))
    assert (strides is not None) == (y.untyped_storage()._cdata == x.untyped_storage()._cdata)
    if strides is not None:
        assert all(a == b or n == 1 for a, b, n in zip(strides, y.stride(), wanted))


@given(st.lists(st.integers(2, 4), min_size=1, max_size=4), st.data())
def test_elementwise_results_keep_the_order_of_dims(sizes, data):
    x = torch.empty(sizes, device="meta").permute(data.draw(st.permutations(range(len(sizes)))))
    assert dense_like(tuple(x.shape), x.stride()) == (x * 2).stride()


def test_heap_by_hand():
    heap = Heap({"parameters": 10.0})
    a = heap.new(5)
    b = heap.new(3, "gradients")
    heap.hold(a)
    heap.drop(a)
    heap.look(4)  # 10 + 5 + 3 + 4
    heap.drop(a)
    heap.file(b, "activations")
    assert (heap.peak, heap.total) == (22, 13)
    assert heap.at_peak == {"parameters": 10, "transient": 9, "gradients": 3}
    assert heap.now["activations"] == 3 and heap.now["gradients"] == 0


def planned(name: str, mesh: str, microbatches: int = 1, zero: int = 0, recompute: str = "off"):
    """A plan of a small model, and its stages' programs."""
    model, batch = MODELS[name](layers=2, width=64, batch=8, length=32, vocabulary=200)
    plan = compiler.plan(model, mesh, batch, cluster="cpu", microbatches=microbatches, zero=zero, recompute=recompute)
    program = passes.run("canonicalize", capture(model, batch).program)
    return plan, compiler.rewrite(program, plan, Mesh.of(mesh)).stages


@pytest.mark.parametrize("name, mesh, m", [("gpt2", "2,1,1", 1), ("gpt2", "1,2,1", 4), ("llama", "2,1,2", 4), ("llama", "1,1,2", 2)])
def test_the_linear_form_is_close_to_the_walk(name, mesh, m):
    """What a planner adds up from op costs, and the walk over the program, must tell the same of one plan."""
    plan, stages = planned(name, mesh, m)
    mesh, cluster = plan.mesh, Cluster.of("cpu")
    for stage in stages:
        flight = plan.stage_rows[stage.index].in_flight
        exact = step_peak(stage.program, mesh, cluster.device, flight, stage.index == plan.depth - 1)
        costs = [
            op_cost(node, rule_for(node), node.meta["strategy"], mesh.sizes, cluster)
            for node in stage.program.ops
            if "strategy" in node.meta and not is_getitem(node)
        ]
        params = [node for node in stage.program.graph.nodes if node.name in stage.program.params]
        elements = sum(math.prod(node.meta["val"].shape) / _pieces(node, mesh) for node in params if node.meta["grad"])
        returned, crossing = _ends(stage, mesh)
        standing = returned * m + crossing
        state = state_bytes(elements)
        linear = max(moments(state, saved_bytes(costs), working_bytes(costs), flight, m, standing))
        assert linear == pytest.approx(sum(exact.values()), rel=0.2)


def _pieces(node, mesh: Mesh) -> int:
    return math.prod(k for p, k in zip(node.meta["layouts"][0], mesh.sizes) if p.is_shard)


def _ends(stage, mesh: Mesh) -> tuple[float, float]:
    """What a micro-batch returns; and what it sends and receives."""

    def nbytes(nodes) -> float:
        held = [x for x in nodes if hasattr(x.meta["val"], "numel")]
        return sum(x.meta["val"].numel() * x.meta["val"].element_size() / _pieces(x, mesh) for x in held)

    nodes = {node.name: node for node in stage.program.graph.nodes}
    returned = [] if stage.sends else stage.program.output.all_input_nodes
    return nbytes(returned), nbytes(nodes[name] for name in (*stage.receives, *stage.sends))


def test_what_saves_memory_does():
    """Levels of ZeRO and recomputation need less and less, and the table's categories say where."""
    whole, cut, again = (
        planned("llama", "2,1,1", 2, zero, recompute)[0].stage_rows[0].memory for zero, recompute in ((0, "off"), (3, "off"), (3, "on"))
    )
    assert sum(whole.values()) > sum(cut.values()) > sum(again.values())
    assert cut["parameters"] < 0.6 * whole["parameters"] and cut["optimizer"] < 0.6 * whole["optimizer"]
    assert again["activations"] < 0.8 * cut["activations"]


def test_more_micro_batches_in_flight_hold_more():
    held = [planned("gpt2", "1,1,2", m)[0].stage_rows[0].memory for m in (4, 8)]
    assert sum(held[0].values()) > sum(held[1].values())  # two of a quarter each, two of an eighth each


@pytest.mark.parametrize("mesh, m, zero, recompute", [("2,1,2", 4, 3, "on"), ("1,2,1", 2, 0, "off")])
def test_ops_that_share_traits_are_alike(mesh, m, zero, recompute, monkeypatch):
    """Memory is the same when every op has traits of its own."""
    plan, stages = planned("llama", mesh, m, zero, recompute)
    device = Cluster.of("cpu").device

    def peaks() -> list[dict[str, float]]:
        return [step_peak(s.program, plan.mesh, device, 1, s.index == plan.depth - 1) for s in stages]

    shared = peaks()
    traits = [t for s in stages for t in MicroBatch(s.program, plan.mesh.sizes, True).traits.values()]
    assert len(set(map(id, traits))) < len(traits)
    monkeypatch.setattr(MicroBatch, "_like", lambda self, node: (node,))
    assert peaks() == shared
