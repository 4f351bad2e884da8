"""Optimizers on the host: the same training, with all that they keep in the host's memory."""

import pytest
import torch
from small import case

import autoshard
from autoshard.cluster import Cluster
from autoshard.compiler import source
from autoshard.errors import PlanError


@pytest.mark.parametrize(
    "name, mesh, options",
    [
        ("gpt2", (1, 1, 1), {}),
        ("odd", (2, 1, 1), {"zero": 1}),
        ("odd", (3, 1, 1), {"zero": 3}),
        ("gpt2", (2, 1, 2), {"zero": 2, "microbatches": 2}),
        ("odd", (1, 2, 1), {"microbatches": 2}),
    ],
)
def test_equal_to_one_device(name, mesh, options):
    plan = case(name).check(mesh, offload=True, **options)
    assert set(plan.offload) == {p for p, tensor in case(name).model.named_parameters() if tensor.requires_grad}


@pytest.mark.parametrize("zero", (0, 2, 3))
def test_what_is_where(zero):
    """The optimizer's parameter shares no memory with what forward reads, and holds no gradient on the device."""
    cell = case("odd")

    def work(sharded):
        optimizer = sharded.optimizer(torch.optim.AdamW, lr=1e-2)
        sharded(**cell.batch)[0].backward()
        before = {name: shard.whole.clone() for name, shard in sharded.stage.shards.items()}
        norm = sharded.clip_grad_norm_(1.0)
        optimizer.step()
        for name, shard in sharded.stage.shards.items():
            assert shard.piece.untyped_storage().data_ptr() != shard.whole.untyped_storage().data_ptr()
            assert shard.piece.device.type == "cpu" and shard.whole.grad is None and shard.piece.grad is not None
            assert torch.equal(shard.whole, before[name])  # brought there by the next call
            assert all(value.device == shard.piece.device for value in optimizer.state[shard.piece].values())
        return len(sharded.stage.shards), norm, sharded.state_dict()

    plan = cell.plan((2, 1, 1), zero, offload=True)
    trained = [p for p in cell.model.parameters() if p.requires_grad]
    model_norm = torch.nn.utils.get_total_norm(torch.autograd.grad(cell.model(**cell.batch)[0], trained))
    for count, norm, state in cell.on_ranks(plan, work):
        assert count == len(trained)
        torch.testing.assert_close(norm, model_norm)
        assert list(state) == list(cell.model.state_dict())


def test_device_memory_and_time():
    """The device holds 8 bytes a parameter instead of 16; gradients go to the host and weights come back over its link."""
    cell = case("gpt2")
    off, on = (cell.plan((1, 1, 1), offload=offload) for offload in (False, True))
    before, after = off.stage_rows[0].memory, on.stage_rows[0].memory
    assert before["optimizer"] == 2 * before["parameters"] and after["optimizer"] == 0
    assert {**before, "optimizer": 0} == after
    n, host = before["parameters"] / 4, Cluster.of("a100-dgx").host
    seconds = 8 * n / host.link.rate + 28 * n / host.bandwidth + 2 * len(on.offload) * host.link.latency
    assert on.breakdown["optimizer"] == pytest.approx(seconds)
    assert on.step_seconds > off.step_seconds


def test_it_can_be_seen_and_saved():
    cell = case("gpt2")
    plan = cell.plan((1, 1, 1), offload=True)
    assert type(plan).from_json(plan.to_json()).offload == plan.offload
    ready = cell.prepared(plan)
    text = source(ready.captured, ready.rewritten, ready.plan, 0)
    declared = [line for line in text.splitlines() if "rt.Param(" in line]
    assert declared and all("offload=True" in line for line in declared)


def test_wrong_choice():
    with pytest.raises(PlanError, match="offload='weights' can't be"):
        autoshard.plan(case("odd").model, (1, 1, 1), case("odd").batch, offload="weights")
