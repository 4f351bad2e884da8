"""The engine against one device: hand-written stage modules, three AdamW steps in fp64, on 1 to 4 processes."""

import copy

import pytest
import torch
from emitted_by_hand import Mlp, Tied, interface, mlp, mlp_batch, tied, tied_batch
from torch.utils import _pytree as pytree
from workers import run_on

from autoshard import runtime as rt
from autoshard.cost.buckets import Weight, filled
from autoshard.errors import MeshError, RunError
from autoshard.placement import local_shape, parse_layout
from autoshard.runtime.feed import over_time
from autoshard.runtime.gradients import Entry, GradientSync
from autoshard.runtime.pieces import join, take

STEPS = 3


def close(a, b, what):
    assert a.shape == b.shape and a.dtype == b.dtype, what
    scale = max(b.abs().max().item(), 1e-300) if b.numel() else 1.0
    worst = (a - b).abs().max().item() if b.numel() else 0.0
    assert worst <= 1e-10 * scale or worst < 1e-14, f"{what}: {worst:.3g} of {scale:.3g}"


def whole(leaf):
    return leaf.full_tensor() if isinstance(leaf, rt.Lazy) else leaf


class Case:
    """A model, its stage modules on a mesh, and batches."""

    def __init__(self, kind, mesh, m=1, samples=8, frozen_below=0):
        self.mesh, self.m = mesh, m
        if kind == "mlp":
            self.model = Mlp()
            self.batches = [mlp_batch(i, samples) for i in range(STEPS)]
            self.emit = lambda rank, stage: mlp(mesh, rank, stage, m, samples)
        else:
            self.model = Tied(max(2, mesh[2]), frozen_below)
            self.batches = [tied_batch(i, samples) for i in range(STEPS)]
            self.emit = lambda rank, stage: tied(mesh, rank, stage, m, samples, frozen_below)

    def sharded(self):
        world = rt.open_world(self.mesh)
        stage = self.emit(world.rank, world.stage)(world)
        whole = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        stage.load(whole.__getitem__)
        out = self.model(**self.batches[0])
        leaves, spec = pytree.tree_flatten(out)
        constants = {i: x for i, x in enumerate(leaves) if not isinstance(x, torch.Tensor)}
        return rt.Sharded(stage, interface(self.batches[0], out_spec=spec, constants=constants))


def check_training(case, clip=None, norm_type=2.0, scale=1.0):
    """Three steps, sharded and on one device."""
    sharded, model = case.sharded(), copy.deepcopy(case.model)
    ours, theirs = sharded.optimizer(torch.optim.AdamW, lr=0.01), torch.optim.AdamW(model.parameters(), lr=0.01)
    for step, batch in enumerate(case.batches):
        got_leaves, got_spec = pytree.tree_flatten(sharded(**batch))
        want_leaves, want_spec = pytree.tree_flatten(model(**batch))
        assert got_spec == want_spec
        (got_leaves[0] * scale).backward()
        (want_leaves[0] * scale).backward()
        for i, (a, b) in enumerate(zip(got_leaves, want_leaves)):
            if isinstance(b, torch.Tensor):
                assert a.shape == b.shape
                close(whole(a).detach(), b.detach(), f"output {i} of step {step}")
            else:
                assert a == b
        check_gradients(sharded, model, f"step {step}")
        if clip is not None:
            close(sharded.clip_grad_norm_(clip, norm_type), torch.nn.utils.clip_grad_norm_(model.parameters(), clip, norm_type), "norm")
            check_gradients(sharded, model, f"clipped, step {step}")
        ours.step(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()
    check_state(sharded, model)
    return sharded, model


def check_gradients(sharded, model, what):
    gathered = sharded.grad_dict()
    names = dict(model.named_parameters())
    assert gathered.keys() == names.keys()
    for name, param in names.items():
        if param.grad is None:
            assert gathered[name] is None, f"{what}: {name} has a gradient"
        else:
            close(gathered[name], param.grad, f"{what}: gradient of {name}")


def check_state(sharded, model):
    state, expected = sharded.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        close(state[name], value, name)
    if "head.weight" in state:
        assert state["head.weight"] is state["embed.weight"]
    fresh = copy.deepcopy(model)
    fresh.load_state_dict(state, strict=True)
    sharded.load_state_dict({k: v + 1 if v.is_floating_point() else v for k, v in state.items()})
    for name, value in sharded.state_dict().items():
        close(value, expected[name] + 1, f"{name} after load")
    sharded.load_state_dict(state)


def check_accumulation(case):
    """Backward twice without zero_grad adds; so do two losses of two calls."""
    sharded, model = case.sharded(), copy.deepcopy(case.model)
    for batch in case.batches[:2]:
        loss = sharded(**batch)
        pytree.tree_leaves(loss)[0].backward()
        pytree.tree_leaves(model(**batch))[0].backward()
    check_gradients(sharded, model, "two backwards")
    first, second = (pytree.tree_leaves(sharded(**b))[0] for b in case.batches[:2])
    (first + 2 * second).backward()
    first, second = (pytree.tree_leaves(model(**b))[0] for b in case.batches[:2])
    (first + 2 * second).backward()
    check_gradients(sharded, model, "a sum of two losses")
    result = sharded.train_step(**case.batches[2])
    assert not pytree.tree_leaves(result)[0].requires_grad
    pytree.tree_leaves(model(**case.batches[2]))[0].backward()
    check_gradients(sharded, model, "train_step")


def check_no_grad(case):
    """Forward only: same results, no gradients; then training still works (and forward only again)."""
    sharded, model = case.sharded(), copy.deepcopy(case.model)
    for _ in range(2):
        with torch.no_grad():
            got = pytree.tree_leaves(sharded(**case.batches[1]))
        for a, b in zip(got, pytree.tree_leaves(model(**case.batches[1]))):
            if isinstance(b, torch.Tensor):
                close(whole(a), b.detach(), "output under no_grad")
                assert not whole(a).requires_grad
        assert all(p.grad is None for p in sharded.parameters())
        sharded.train_step(**case.batches[0])
        pytree.tree_leaves(model(**case.batches[0]))[0].backward()
        check_gradients(sharded, model, "after no_grad")
        sharded.zero_grad()
        model.zero_grad()


def check_errors(case):
    """Wrong calls: the same error everywhere, naming the argument."""
    sharded = case.sharded()
    batch = case.batches[0]
    name = next(iter(batch))
    wrong = {
        "shape": {**batch, name: batch[name][:-1]},
        "dtype": {**batch, name: batch[name].to(torch.int32)},
        "missing": {n: x for n, x in batch.items() if n != name},
        "unexpected": {**batch, "other": batch[name]},
        "tensor": {**batch, name: None},
    }
    for text, arguments in wrong.items():
        with pytest.raises(RunError, match=text) as error:
            sharded(**arguments)
        assert ("other" if text == "unexpected" else name) in str(error.value)
    state = sharded.state_dict()
    first = next(iter(state))
    with pytest.raises(RunError, match="is missing"):
        sharded.load_state_dict({n: x for n, x in state.items() if n in ("nothing",)})
    with pytest.raises(RunError, match="has shape"):
        sharded.load_state_dict({**state, first: state[first][:1]})
    with pytest.raises(RunError, match="'extra'"):
        sharded.load_state_dict({**state, "extra": state[first]})


def frozen_stage(rank):
    """A first stage without anything to train gets and sends no gradients, and loss.backward() works there as well."""

    class Stage(rt.StageModule):
        mesh, stage, microbatches = (1, 1, 2), rank, 2
        params = {"w": rt.Param((f"{rank}.weight",), (3,), "[R, R]", torch.float64, rank == 1, stages=(rank,))}
        inputs = {} if rank else {"x": rt.Input((2, 3), torch.float64, "[S(0), R]")}
        sends = () if rank else (rt.Value((2, 3), torch.float64, False),)
        receives = (rt.Value((2, 3), torch.float64, False),) if rank else ()
        outputs = (rt.Output(0, (), "[R, R]", "P", torch.float64), rt.Output(1, (2, 3), "[R, R]", "S(0)", torch.float64, False))
        loss = 0

        def forward(self, x):
            return ((x * self.w).sum(), x) if self.stage else (x * self.w,)

    Stage.rank = rank
    x = torch.arange(12, dtype=torch.float64).view(4, 3)
    stage = Stage(rt.open_world((1, 1, 2)))
    stage.load(lambda name: torch.full((3,), 2.0, dtype=torch.float64))
    sharded = rt.Sharded(stage, interface({"x": x}))
    loss, passed = sharded(x=x)
    loss.backward()
    assert loss.item() == 4 * x.sum() and stage.w.grad is None if rank == 0 else torch.equal(stage.w.grad, 2 * x.sum(0))
    first = passed.full_tensor()
    sharded(x=x + 1)  # an output that is a received value is not overwritten by the next step
    assert torch.equal(first, 2 * x) and torch.equal(passed.full_tensor(), 2 * x)
    close(sharded.clip_grad_norm_(1e9), (2 * x.sum(0)).norm(), "norm")
    assert set(sharded.state_dict()) == {"0.weight", "1.weight"}


def random_streams(rank):
    """Equal where a value is replicated, different where it is cut."""
    torch.manual_seed(rank)  # processes that start from different seeds agree all the same
    case = Case("mlp", (2, 1, 1))
    stage = case.sharded().stage
    draws = [torch.empty(2, 8) for _ in range(2)]
    for axes, out in (((), draws[0]), (("data",), draws[1])):
        torch.distributed.all_gather(list(out), torch.rand(8, generator=stage.generator(axes)))
    assert torch.equal(*draws[0]) and not torch.equal(*draws[1])


def on_two(rank):
    with pytest.raises(MeshError, match=r"mesh 2,2,2 is for 8 processes, but WORLD_SIZE is 2"):
        rt.open_world((2, 2, 2))
    for case in [
        Case("mlp", (2, 1, 1), samples=7),
        Case("mlp", (1, 2, 1), samples=7),
        Case("mlp", (2, 1, 1), m=2, samples=6),
        Case("tied", (1, 1, 2), m=4),
        Case("tied", (1, 1, 2), m=1),
        Case("tied", (2, 1, 1), m=1),
    ]:
        check_training(case)
        check_accumulation(case)
        check_no_grad(case)
        check_errors(case)
    sharded, _ = check_training(Case("mlp", (1, 2, 1)), clip=0.05)
    assert [n for n, _ in sharded.named_parameters()][:2] == ["up.weight", "up.bias"]
    with pytest.raises(RunError, match="Muon needs whole parameters, but 'up.weight'"):
        sharded.optimizer(torch.optim.Muon)
    check_training(Case("tied", (1, 1, 2), m=2), clip=0.05, norm_type=float("inf"), scale=0.25)
    lazy_results()
    frozen_stage(rank)
    random_streams(rank)
    return True


def lazy_results():
    """Gradients flow through gathered results where nothing ran backward yet, and are refused where it did."""
    case = Case("mlp", (2, 1, 1))
    sharded, model = case.sharded(), copy.deepcopy(case.model)
    batch = case.batches[0]
    for net in (sharded, model):
        loss, y, hidden = net(**batch)
        (loss + whole(y).sin().sum() + (whole(hidden) ** 3).sum()).backward()
    check_gradients(sharded, model, "through full_tensor")
    y = sharded(**batch)[1]
    rank = sharded.world.rank
    close(y.to_local().detach(), model(**batch)[1].detach()[4 * rank : 4 * rank + 4], "to_local")

    sharded = Case("tied", (1, 1, 2), m=2).sharded()
    logits = sharded(**Case("tied", (1, 1, 2)).batches[0])["logits"].full_tensor()
    with pytest.raises(RunError, match="its backward ran inside the call"):
        logits.sum().backward()
    loss = sharded(**Case("tied", (1, 1, 2)).batches[0])["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(RunError, match="backward ran through this loss already"):
        loss.backward()


def on_four(rank):
    for case in [
        Case("mlp", (2, 2, 1), samples=7),
        Case("mlp", (2, 2, 1), m=2, samples=6),
        Case("tied", (2, 1, 2), m=4, samples=12),
        Case("tied", (1, 1, 4), m=4),
        Case("tied", (1, 1, 4), m=2, frozen_below=2),
    ]:
        check_training(case, clip=0.05)
        check_accumulation(case)
        check_no_grad(case)
    check_errors(case)
    return True


def test_two_processes():
    assert run_on(2, on_two, timeout=110) == [True] * 2


def test_four_processes():
    assert run_on(4, on_four, timeout=110) == [True] * 4


@pytest.mark.parametrize("m", [1, 4])
def test_one_process_needs_no_group(m):
    for kind in ("mlp", "tied"):
        case = Case(kind, (1, 1, 1), m=m)
        check_training(case, clip=0.05)
        check_accumulation(case)
        check_no_grad(case)
        check_errors(case)
    assert not torch.distributed.is_initialized()


def test_mode_is_checked():
    case = Case("mlp", (1, 1, 1))
    sharded = case.sharded()
    sharded = rt.Sharded(sharded.stage, interface(case.batches[0], training=True))
    sharded.eval()
    with pytest.raises(RunError, match="compiled in train mode, but is called in eval mode"):
        sharded(**case.batches[0])


def test_over_time():
    parts = [torch.arange(6).view(2, 3) + 10 * i for i in range(2)]
    assert torch.equal(over_time(parts, "P -> R")[1], parts[0] + parts[1])
    assert torch.equal(over_time(parts, "S(0) -> R")[0], torch.cat(parts))
    assert torch.equal(over_time(parts[:1] * 2, "R -> S(0)")[1], parts[0][1:])
    assert torch.equal(over_time(parts, "S(1) -> S(0)")[1], torch.cat(parts, 1)[1:])
    blocked = over_time([torch.arange(4)] * 2, "R -> S(0/2)")
    assert [b.tolist() for b in blocked] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    "layout, shape",
    [("[S(0), R]", (7, 3)), ("[S(0), S(0)]", (11, 2)), ("[S(1), S(1/3)]", (2, 18)), ("[S(0/2), S(1)]", (8, 5)), ("[R, S(1/3)]", (2, 15))],
)
def test_pieces_join_to_the_whole(layout, shape):
    layout, sizes = parse_layout(layout), (2, 3)
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = {(d, t): take(tensor, layout, sizes, (d, t)) for d in range(2) for t in range(3)}
    assert all(tuple(part.shape) == local_shape(shape, layout, sizes, at) for at, part in parts.items())
    assert torch.equal(join(parts, layout, sizes), tensor)


def test_buckets_are_in_the_order_in_which_backward_fills_them():
    # 16 MB each, summed over one group, and few small ones over another, which are in the first layer as in the last
    large, small = [torch.empty(4 * 2**20, requires_grad=True) for _ in range(3)], [torch.empty(8, requires_grad=True) for _ in range(2)]
    leaves = [small[0], *large, small[1]]
    groups = {x: "all" if x.numel() == 8 else "data" for x in leaves}
    sync = GradientSync([Entry(x, groups[x]) for x in leaves], every_backward=False)
    sums = [[id(x) for x in bucket] for bucket in ([large[2]], [large[1]], [large[0]], small[::-1])]
    assert [[id(entry.leaf) for entry in bucket.entries] for bucket in sync._buckets] == sums
    predicted = filled([Weight(x, 4.0 * x.numel(), 4.0 * x.numel(), 4, (groups[x],)) for x in leaves])
    assert [[id(weight.node) for weight in bucket] for bucket in predicted] == sums
