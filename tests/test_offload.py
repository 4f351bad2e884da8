"""Optimizers on the host: the same training, with what they keep in the host's memory, of all parameters or of those that must be there."""

import pytest
import torch
from small import case

import autoshard
from autoshard.cluster import Cluster
from autoshard.compiler import source
from autoshard.errors import InfeasibleError, PlanError
from autoshard.mesh import Mesh
from autoshard.passes.cut_stages import pure_nodes
from autoshard.planning.joint import staged_of
from autoshard.planning.saving import Saving
from autoshard.planning.staging import Allowed
from autoshard.report.explain import explain_text
from autoshard.schedule import SCHEDULES
from autoshard.searching import wanted_of
from autoshard.tasks import Cuts, plan_for


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


@pytest.mark.parametrize(
    "name, mesh, zero, part",
    [
        ("odd", (2, 1, 1), 2, ("up.weight", "twice", "scale")),  # read twice; a scalar, which ZeRO can't cut
        ("odd", (3, 1, 1), 3, ("down", "shift")),  # the frozen layer is cut at level 3 too
        ("odd", (1, 2, 1), 0, ("up.weight", "down.bias", "scale")),  # no data axis
        ("gpt2", (2, 1, 2), 2, ("wte", "ln_1.weight")),  # the tied weight, which both stages hold
        ("gpt2", (1, 1, 2), 0, ("h.1.", "wpe")),  # all of one layer
    ],
)
def test_some_on_the_host_and_some_not(name, mesh, zero, part):
    cell = case(name)
    plan = cell.plan(mesh, zero)
    trained = [name for name, p in cell.model.named_parameters() if p.requires_grad]
    plan.offload = [name for name in trained if any(piece in name for piece in part)]
    assert 0 < len(plan.offload) < len(trained)
    cell.check_plan(plan)


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


def planned(name, mesh, limit=None, m=1, offload=None):
    cell, mesh, cluster = case(name), Mesh.of(mesh), Cluster.of("a100-dgx")
    cell.program.mesh = mesh
    return plan_for(cell.captured, cell.program, "model", mesh, cluster, limit, m, {}, saving=Saving(None, None, offload))


@pytest.mark.parametrize(
    "name, mesh, m, share",
    [("gpt2", (2, 1, 1), 1, 0.6), ("gpt2", (1, 1, 1), 1, 0.7), ("gpt2", (1, 1, 2), 4, 0.75), ("odd", (1, 1, 1), 1, 0.75)],
)
def test_auto_offloads_what_must_be(name, mesh, m, share):
    """Where nothing else makes a plan fit; not all of it, and nothing where there is room. It trains as one device does."""
    free = planned(name, mesh, m=m)
    limit = share * free.peak_bytes
    assert not free.offload
    with pytest.raises(InfeasibleError):
        planned(name, mesh, limit, m, offload=False)
    tight = planned(name, mesh, limit, m)
    trained = {p for p, tensor in case(name).model.named_parameters() if tensor.requires_grad}
    assert tight.peak_bytes <= limit and set() < set(tight.offload) < trained
    case(name).check_plan(tight)


@pytest.mark.parametrize("name, mesh, level, m", [("gpt2", (2, 1, 1), 2, 4), ("odd", (1, 1, 1), 0, 1)])
def test_the_joint_problem_counts_what_predictions_count(name, mesh, level, m):
    """Bytes of states, and seconds once a step, where all weights are on the host, and where none is."""
    cell, mesh, cluster = case(name), Mesh.of(mesh), Cluster.of("a100-dgx")
    cell.program.mesh = mesh
    cut = Cuts(cell.program).of(m, mesh)
    for host in (False, True):
        plan = cell.plan(mesh, level, microbatches=m, offload=host)
        allowed = Allowed((level,), Saving().modes, (host,))
        problem = staged_of(cut, mesh, cluster, pure_nodes(cut), 1e12, {}, allowed, SCHEDULES["none"]).problem
        weights = [(op.costs[0], len(problem.homes(i))) for i, op in enumerate(problem.ops) if any(cost.state for cost in op.costs)]
        table, gradients = plan.stage_rows[0].memory, sum(p.nbytes for p in cell.model.parameters() if p.requires_grad)
        held = sum(amount.state * count for amount, count in weights)
        assert held == table["parameters"] + table["optimizer"] + gradients and (table["optimizer"] == 0) == host
        once = sum(amount.once * count for amount, count in weights)
        assert once == pytest.approx(plan.breakdown["optimizer"], rel=1e-9, abs=cluster.device.launch)


def test_processes_train_a_plan_that_offloads_some():
    """gloo's collectives, in the pipeline and over data, with gradients and weights that are on the host here and not there."""
    one = case("gpt2")
    plan = one.plan((2, 1, 2), 2)
    plan.offload = ["transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight", "transformer.h.1.ln_1.bias"]
    report = autoshard.verify(one.model, plan.mesh, one.batch, plan=plan, steps=2)
    assert report.equal, report.text()


def test_on_a_cpu_the_host_is_no_help():
    cell = case("gpt2")
    assert wanted_of(cell.captured, "model", cluster="cpu").saving.offload is False
    assert wanted_of(cell.captured, "model", cluster="cpu", offload="optimizer").saving.offload is True
    assert wanted_of(cell.captured, "model").saving.offload is None


def test_it_can_be_seen_and_saved():
    cell = case("gpt2")
    plan = cell.plan((1, 1, 1), offload=True)
    assert type(plan).from_json(plan.to_json()).offload == plan.offload
    ready = cell.prepared(plan)
    text = source(ready.captured, ready.rewritten, ready.plan, 0)
    declared = [line for line in text.splitlines() if "rt.Param(" in line]
    assert declared and all("offload=True" in line for line in declared)
    assert explain_text(plan).count(" host\n") + explain_text(plan).count(" host ") > 4


def test_wrong_choice():
    with pytest.raises(PlanError, match="offload='weights' can't be"):
        autoshard.plan(case("odd").model, (1, 1, 1), case("odd").batch, offload="weights")
