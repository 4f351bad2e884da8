"""ZeRO levels 0 to 3: equal to one device, and as small as they promise."""

import copy
import sys

import pytest
import torch
from small import case, gpt2, odd
from workers import run_on

import autoshard
from autoshard.checking.local import run_ranks
from autoshard.checking.lockstep import Lockstep
from autoshard.errors import PlanError, RunError
from autoshard.mesh import Mesh
from autoshard.placement import cut_over_data, format_layout, parse_layout
from autoshard.planning.plan import Plan
from autoshard.runtime import collectives
from autoshard.runtime.checkpoint import load, save
from autoshard.runtime.regather import Regather
from autoshard.runtime.world import open_world

bucket_gathers = sys.modules["autoshard.passes.bucket_gathers"]  # the module: the package has the function of its name

FAST = {
    *(("gpt2", "2,2,1", 1, "off"), ("gpt2", "2,2,1", 2, "on"), ("gpt2", "2,2,2", 3, "off")),
    *(("llama", "4,1,1", 3, "on"), ("llama", "2,1,2", 2, "off")),
}
CASES = [
    pytest.param(*values, marks=[] if values in FAST else pytest.mark.slow, id="-".join(map(str, values)))
    for name in ("gpt2", "llama")
    for mesh in ("4,1,1", "2,2,1", "2,1,2", "2,2,2")
    for level in (0, 1, 2, 3)
    for recompute in ("off", "on")
    for values in ((name, mesh, level, recompute),)
]


@pytest.mark.parametrize("name, mesh, level, recompute", CASES)
def test_equal_to_one_device(name, mesh, level, recompute):
    plan = case(name).check(mesh, level, recompute)
    if level:
        assert set(plan.zero.values()) == {level}
        weight = next(layout for param, layout in plan.params.items() if param.endswith(("c_attn.weight", "q_proj.weight")))
        assert parse_layout(weight)[0].is_shard


@pytest.mark.parametrize("level", (1, 2, 3))
@pytest.mark.parametrize("mesh, microbatches", [((3, 1, 1), 2), ((2, 2, 1), 1), ((4, 1, 1), 1)])
def test_odd_sizes_frozen_weights_and_microbatches(level, mesh, microbatches):
    plan = case("odd").check(mesh, level, microbatches=microbatches)
    assert plan.zero["scale"] == plan.zero["shift"] == 0
    assert plan.zero["frozen.weight"] == (3 if level == 3 else 0)
    assert plan.zero["up.weight"] == plan.zero["twice"] == level
    assert Plan.from_json(plan.to_json()).zero == plan.zero


@pytest.mark.parametrize(
    "layout, shape, sizes, cut",
    [
        ("[R, R]", (32, 96), (4, 1), "[S(0), R]"),
        ("[R, R]", (7, 8), (4, 1), "[S(1), R]"),
        ("[R, R]", (7, 13), (2, 1), "[S(1), R]"),
        ("[R, S(0)]", (32,), (2, 4), "[S(0/4), S(0)]"),
        ("[R, S(0/3)]", (96,), (2, 2), "[S(0/6), S(0/3)]"),
        ("[R, S(0)]", (8, 6), (2, 2), "[S(0/2), S(0)]"),
        ("[R, S(0)]", (7, 6), (2, 2), "[S(1), S(0)]"),
        ("[R, R]", (3, 3), (4, 1), None),
        ("[R, R]", (), (2, 1), None),
    ],
)
def test_where_a_weight_is_cut(layout, shape, sizes, cut):
    found = cut_over_data(parse_layout(layout), shape, sizes)
    assert found == (cut and parse_layout(cut)), found and format_layout(found)


def held_bytes(sharded, optimizer) -> dict[str, int]:
    """Bytes of the storages behind weights, gradients and the optimizer's state, each counted once."""
    stage, seen = sharded.stage, set()
    pieces = [tensor for spec, tensor in stage.held() if spec.kind == "parameter"]
    wholes = [shard.whole for shard in stage.shards.values()]

    def count(tensors) -> int:
        total = 0
        for t in tensors:
            storage = t.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    return {
        "parameters": count([*wholes, *pieces]),
        "gradients": count([t.grad for t in [*wholes, *pieces] if t.grad is not None]),
        "optimizer": count([v for state in optimizer.state.values() for v in state.values() if v.dim()]),
    }


def test_bytes_of_a_rank():
    """Of fp32 with AdamW, 16 bytes a parameter: 4 + 4 + 8, each divided from its level on; as predicted."""
    cell, k = case("gpt2"), 4
    n = sum(p.numel() for p in cell.model.parameters())

    def work(sharded):
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
        sharded(**cell.batch)[0].backward()
        optimizer.step()
        return held_bytes(sharded, optimizer)

    for level, bytes_each in enumerate(((4, 4, 8), (4, 4, 8 / k), (4, 4 / k, 8 / k), (4 / k, 4 / k, 8 / k))):
        plan = cell.plan((k, 1, 1), level)
        for found in cell.on_ranks(plan, work):
            assert list(found.values()) == pytest.approx([n * b for b in bytes_each], rel=0.03), (level, found)
            for category in ("parameters", "optimizer"):  # of gradients the plan has what is there at the peak
                assert plan.stage_rows[0].memory[category] == pytest.approx(found[category], rel=0.03), (level, category)


def test_level_3_keeps_no_gathered_weight(monkeypatch):
    gathered = []

    def gather(self, *args):
        wholes = plain(self, *args)
        gathered.extend(self._known[whole.untyped_storage()._cdata][0] for whole in wholes)
        return wholes

    plain = Regather.gather
    monkeypatch.setattr(Regather, "gather", gather)

    def work(sharded):
        loss = sharded(**case("gpt2").batch)[0]
        alive = [not ref.expired() for ref in gathered]
        loss.backward()
        return sum(alive), len(alive)

    plan = case("gpt2").plan((2, 1, 1), 3)
    (alive, of), _ = case("gpt2").on_ranks(plan, work)
    assert of >= len(plan.params) and alive == 0
    reads = [row for row in plan.collectives if row.kind == "all_gather" and row.value.endswith(("_rs", "_rs_1"))]
    sent = {when: sum(row.nbytes for row in reads if row.direction == when) for when in ("forward", "backward")}
    assert sent["forward"] > sent["backward"] > 0  # biases are not read again


def test_level_3_gathers_a_layer_at_once(monkeypatch):
    """As many collectives as predicted: of the weights of a layer one all-gather forward, one backward, and one reduce-scatter."""
    cell, found = case("gpt2"), {}
    for limit in (0, bucket_gathers.BUCKET_BYTES):
        monkeypatch.setattr(bucket_gathers, "BUCKET_BYTES", limit)
        plan = cell.plan((2, 1, 1), 3)
        ready = cell.prepared(plan)
        report = cell.reference.verify(plan.mesh, build=lambda model, batch, ready=ready: ready.sharded(model, open_world(ready.plan.mesh)))
        assert report.equal, report.text()
        found[limit] = report.collectives[0], len(plan.collectives), sum(row.nbytes for row in plan.collectives), plan.step_seconds
    (many, _, alone, slow), (few, rows, together, fast) = found.values()
    assert few == rows < many / 4 and fast < slow
    assert together == pytest.approx(alone)
    layers = [row for row in plan.collectives if row.module.startswith("transformer.h.0")]
    assert sorted((row.kind, row.direction) for row in layers) == [
        ("all_gather", "backward"), ("all_gather", "forward"), ("reduce_scatter", "backward"),
    ]  # fmt: skip


def test_many_at_once_are_the_same_as_one_by_one():
    torch.manual_seed(0)
    cuts = [(0, 1, 7), (1, 1, 6), (1, 3, 12), (0, 1, 2), (0, 2, 4)]  # uneven, blocked, fewer elements than ranks
    shapes = [(7, 2), (2, 6), (2, 12), (2,), (4, 3)]
    wholes = [torch.randn(shape) for shape in shapes]

    def work(world):
        axis = world.data
        pieces = [collectives.cut(x, axis, dim, blocks).contiguous() for x, (dim, blocks, _) in zip(wholes, cuts)]
        gathered = collectives.all_gather_together(pieces, cuts, axis)
        mine = [x * (1 + axis.index) for x in wholes]
        scattered = collectives.reduce_scatter_together(mine, cuts, axis)
        return gathered, scattered, [collectives.reduce_scatter(x, axis, dim, blocks) for x, (dim, blocks, _) in zip(mine, cuts)]

    for gathered, scattered, one_by_one in run_ranks(Lockstep(3), Mesh(3, 1, 1), work, 20):
        for got, want in zip([*gathered, *scattered], [*wholes, *one_by_one]):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("level", (1, 2, 3))
def test_the_users_own_loop(level):
    """Gradients of two backwards add up, clipping counts each element once, and whole tensors go in and out."""
    cell = case("odd")
    model = copy.deepcopy(cell.model)
    other = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.load_state_dict(other)
    for scale in (1.0, 3.0):
        (scale * model(**cell.batch)[0]).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    plain.step()

    def work(sharded):
        optimizer = sharded.optimizer(torch.optim.AdamW, lr=0.01)
        sharded(**cell.batch)[0].backward()
        sharded.zero_grad()
        sharded.load_state_dict(other)
        losses = [sharded(**cell.batch)[0], 3.0 * sharded(**cell.batch)[0]]  # both forwards before both backwards
        for loss in losses:
            loss.backward()
        assert sharded.clip_grad_norm_(0.1).item() == pytest.approx(norm.item(), rel=1e-10)
        for name, gradient in sharded.grad_dict().items():
            assert (gradient is None) == (gradients[name] is None), name
            if gradient is not None:
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-12)
        optimizer.step()
        for name, tensor in sharded.state_dict().items():
            torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(sharded(**cell.batch)[0].detach(), model(**cell.batch)[0].detach(), rtol=1e-10, atol=0)
        with pytest.raises(RunError, match="Adafactor needs whole parameters"):
            sharded.optimizer(torch.optim.Adafactor)
        loss = sharded(**cell.batch)[0]
        optimizer.step()
        with pytest.raises(RuntimeError if level < 3 else RunError, match="modified by an inplace|changed between the forward"):
            loss.backward()

    cell.on_ranks(cell.plan((3, 1, 1), level), work)


SAVED = (((2, 1, 1), 3), ((1, 2, 1), 0), ((2, 1, 1), 2))
LOADED = (((1, 1, 2), 0), ((2, 1, 1), 1), ((2, 1, 1), 2), ((2, 1, 1), 3))


def two_steps(module, optimizer, batch):
    for _ in range(2):
        loss = module(**batch)[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def save_all(rank, folder):
    model, batch = odd()
    for mesh, level in SAVED:
        sharded = autoshard.compile(model, mesh, batch, zero=level)
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        two_steps(sharded, optimizer, batch)
        save(sharded, optimizer, f"{folder}/{mesh}-{level}")


def go_on(rank, folder):
    model, batch = odd()
    losses = []
    for mesh, level in LOADED:
        sharded = autoshard.compile(model, mesh, batch, zero=level)
        for other in SAVED:
            optimizer = torch.optim.AdamW(sharded.parameters(), lr=1.0)
            load(sharded, optimizer, f"{folder}/{other[0]}-{other[1]}")
            losses.append(two_steps(sharded, optimizer, batch))
    return losses


def test_any_mesh_and_level_to_any_other_on_processes(tmp_path):
    model, batch = odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    two_steps(model, optimizer, batch)
    loss = two_steps(model, optimizer, batch)
    run_on(2, save_all, str(tmp_path), timeout=50)
    for losses in run_on(2, go_on, str(tmp_path), timeout=50):
        assert losses == pytest.approx([loss] * len(SAVED) * len(LOADED), rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("level, mesh", [(2, (2, 2, 1)), (3, (2, 1, 2))])
def test_on_processes(level, mesh):
    report = autoshard.verify(gpt2, mesh, zero=level, recompute="on")
    assert report.equal, report.text()


@pytest.mark.parametrize("options, said", [({"zero": 4}, "zero=4 is no ZeRO level"), ({"recompute": "yes"}, "recompute='yes' can't be")])
def test_wrong_choices(options, said):
    with pytest.raises(PlanError, match=said):
        autoshard.plan(*[case("odd").model, (2, 1, 1), case("odd").batch], **options)
