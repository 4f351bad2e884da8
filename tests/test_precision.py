"""Mixed precision: compute in bf16 or fp16, masters in fp32."""

import copy
import functools
import json

import pytest
import small
import torch
from cases.test_stages import TiedHead, ids13
from cases.tools import on_ranks
from test_zero import held_bytes
from torch import nn
from zoo import make

import autoshard
from autoshard import passes
from autoshard.capture import capture
from autoshard.cluster import Cluster
from autoshard.errors import CaptureError, PlanError, RunError
from autoshard.planning.plan import Plan
from autoshard.runtime import masters, zero


class Mixed(nn.Module):
    """A tied weight, a frozen layer, buffers of all kinds, a loss that the model takes to fp32 itself."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.again = nn.Linear(8, 32, bias=False)
        self.again.weight = self.up.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False] * 4))

    def forward(self, x):
        y = self.down(torch.tanh(self.frozen(torch.tanh(self.up(x)))) + self.again(x)) * self.scale
        return y.float().masked_fill(self.mask, 0).pow(2).mean(), y


def mixed():
    torch.manual_seed(0)
    return Mixed(), {"x": torch.randn(8, 8)}


def test_what_is_traced_is_the_model_in_low_precision_and_the_users_stays():
    model, batch = mixed()
    before = copy.deepcopy(model.state_dict())
    captured = capture(model, batch, precision="bf16")
    assert all(t.dtype == before[name].dtype and torch.equal(t, before[name]) for name, t in model.state_dict().items())
    plain = capture(model.to(torch.bfloat16), {"x": batch["x"].bfloat16()})
    vals = [[node.meta["val"].dtype for node in passes.run("canonicalize", c.program).ops] for c in (captured, plain)]
    assert vals[0] == vals[1] and torch.bfloat16 in vals[0] and torch.float32 in vals[0]
    assert captured.program.results[0].meta["val"].dtype == torch.float32  # as the model says
    params = {name: p for p in captured.params for name in p.names}
    assert params["up.weight"].names == ("up.weight", "again.weight") and params["up.weight"].dtype == torch.bfloat16
    assert params["up.weight"].master == params["down.bias"].master == torch.float32
    assert params["frozen.weight"].dtype == torch.bfloat16 and params["frozen.weight"].master is None
    assert [params[name].dtype for name in ("scale", "steps", "mask")] == [torch.bfloat16, torch.int64, torch.bool]
    assert all(p.master is None for p in plain.params)


def test_a_module_that_keeps_a_buffer_in_fp32_keeps_it():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("frequencies", torch.rand(4))

        def _apply(self, fn, recurse=True):
            kept = self.frequencies
            super()._apply(fn, recurse)
            self.frequencies = kept
            return self

        def forward(self, x):
            return (self.linear(x).float() * self.frequencies).sum()

    params = {p.name: p for p in capture(Keeps(), (torch.randn(2, 4),), precision="bf16").params}
    assert params["frequencies"].dtype == torch.float32 and params["linear.weight"].dtype == torch.bfloat16


def test_sixteen_bytes_a_parameter_and_half_of_what_is_sent():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Flatten(0)), (torch.randn(8, 64),)
    n, k = sum(p.numel() for p in model.parameters()), 4
    common = {"loss_fn": lambda y, batch: y.pow(2).mean(), "pin": {"input": {"data": "S(0)"}}, "microbatches": 1}
    for level, bytes_each in enumerate(((2, 2, 12), (2, 2, 12 / k), (2, 2 / k, 12 / k), (2 / k, 2 / k, 12 / k))):
        full = autoshard.plan(model, (k, 1, 1), batch, zero=level, **common)
        plan = autoshard.plan(model, (k, 1, 1), batch, zero=level, precision="bf16", **common)
        memory = plan.stage_rows[0].memory
        held = [memory[c] for c in ("parameters", "optimizer")]  # of gradients and activations, the plan has what is there at the peak
        assert held == pytest.approx([n * bytes_each[0], n * bytes_each[2]], rel=1e-6)
        sent = [sum(row.nbytes * row.runs for row in p.collectives if row.nbytes > 100) for p in (plan, full)]
        assert sent[0] == pytest.approx(sent[1] / 2, rel=0.01)
        assert plan.precision == Plan.from_json(plan.to_json()).precision == "bf16" and full.precision == "fp32"
        assert plan.fingerprint != full.fingerprint
    state, wide = sum(memory[c] for c in ("parameters", "gradients", "optimizer")), 4 * n / k
    assert plan.peak_bytes >= state + wide  # the optimizer's step reads fp32 gradients


def test_flops_are_those_of_the_precision():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4096, 4096, device="meta"), nn.Flatten(0)), (torch.empty(4096, 4096, device="meta"),)
    seconds = {}
    for precision in ("fp32", "bf16", "fp16"):
        plan = autoshard.plan(model, (1, 1, 1), batch, loss_fn=lambda y, batch: y.pow(2).mean(), precision=precision)
        seconds[precision] = next(op.forward for op in plan.ops if op.op == "aten.linear")
    device = Cluster.of("a100-dgx").device
    assert seconds["fp32"] / seconds["bf16"] == pytest.approx(device.flops("bf16") / device.flops("fp32"), rel=0.1)
    assert seconds["fp16"] == pytest.approx(seconds["bf16"], rel=0.1)


def test_wrong_precisions():
    model, batch = mixed()
    with pytest.raises(CaptureError, match="precision='int8' can't be"):
        autoshard.plan(model, (1, 1, 1), batch, precision="int8")
    plan = autoshard.plan(model, (1, 1, 1), batch, precision="bf16")
    with pytest.raises(PlanError, match="the plan is for precision bf16, not fp32"):
        autoshard.compile(model, (1, 1, 1), batch, plan=plan, precision="fp32")
    model.register_buffer("turn", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(CaptureError, match="'turn' is complex"):
        autoshard.plan(model, (1, 1, 1), batch, precision="bf16")


# --- runs ------------------------------------------------------------------------------------------------------------------

PIN = {"up.weight": {"tensor": "S(0)"}, "x": {"data": "S(0)"}}


def handmade(steps, dtype=torch.bfloat16, lr=0.01, scale=1.0):
    """Losses and masters of a loop written out: ``model.to(dtype)``, AdamW on fp32 copies."""
    model, batch = mixed()
    masters = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    low = model.to(dtype)
    optimizer = torch.optim.AdamW(masters.values(), lr=lr)
    losses = []
    for _ in range(steps):
        loss = low(batch["x"].to(dtype))[0]
        (loss * scale).backward()
        for name, p in low.named_parameters():
            if name in masters:
                masters[name].grad, p.grad = p.grad.float() / scale, None
        optimizer.step()
        with torch.no_grad():
            for name, p in low.named_parameters():
                p.copy_(masters.get(name, p))
        losses.append(loss.item())
    return losses, masters


@pytest.mark.parametrize(
    "precision, mesh, level",
    [
        *(("bf16", (2, 1, 1), level) for level in (0, 1, 2, 3)),
        *(("fp16", (2, 2, 2), level) for level in (0, 1, 2, 3)),
        *(("bf16", (1, 2, 1), 0), ("fp16", (1, 2, 1), 0), ("bf16", (1, 1, 2), 0), ("bf16", (2, 2, 2), 3)),
    ],
)
def test_equal_to_one_device(precision, mesh, level):
    report = autoshard.verify(mixed, mesh, precision=precision, zero=level, microbatches=mesh[2], pin=PIN, backend="local")
    assert report.equal, report.text()
    assert all(row.allowed <= 1e-5 for row in report.rows if row.kind == "parameter" and "down" in row.name)


@pytest.mark.parametrize("precision, mesh, level", [pytest.param("bf16", (2, 2, 2), 2, marks=pytest.mark.slow), ("fp16", (2, 1, 2), 3)])
def test_language_model_equals_one_device(precision, mesh, level):
    report = autoshard.verify(small.gpt2, mesh, precision=precision, zero=level, recompute="on", backend="local")
    assert report.equal, report.text()


@pytest.mark.slow  # models that plan for long, and whose own rounding is large
@pytest.mark.parametrize("precision", ("bf16", "fp16"))
@pytest.mark.parametrize("name", ("resnet", "dlrm", "bert", "lstm", "qwen3"))
def test_the_zoo_equals_one_device(name, precision):
    report = autoshard.verify(functools.partial(make, name), (2, 2, 1), precision=precision, steps=2, backend="local")
    assert report.equal, report.text()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("microbatches", (1, 2))
def test_on_one_rank_it_is_the_loop_written_out(dtype, microbatches):
    precision, scale = {torch.bfloat16: ("bf16", 1.0), torch.float16: ("fp16", 2.0**16)}[dtype]

    def trained(sharded, batch):
        optimizer = sharded.optimizer(torch.optim.AdamW, lr=0.01)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(sharded(**batch)[0])
            losses[-1].backward()
            optimizer.step()
        assert all(state["exp_avg"].dtype == torch.float32 for state in optimizer.state.values())
        sharded(**batch)
        for weight in sharded.stage.shards.values():
            assert torch.equal(weight.whole, weight.piece.to(dtype)) and weight.piece.grad.dtype == dtype
        return [loss.item() for loss in losses], sharded.state_dict()

    losses, masters = handmade(3, dtype, scale=scale)
    ((found, state),) = on_ranks(Mixed, mixed()[1], (1, 1, 1), trained, dtype=None, precision=precision, microbatches=microbatches)
    for name, master in masters.items():
        if microbatches == 1:
            assert torch.equal(state[name], master), name
        assert state[name].dtype == torch.float32
    assert found == pytest.approx(losses, rel=0 if microbatches == 1 else 4e-3)


def broken(name, monkeypatch):
    """Ways in which mixed precision may be wrong."""
    if name == "the forward never sees the masters":
        monkeypatch.setattr(zero.Rounded, "target", lambda self: torch.empty_like(self.whole))
    if name == "masters are rounded":
        follow = zero.Rounded._follow

        def rounded(self):
            follow(self)
            self.piece.register_post_accumulate_grad_hook(lambda p: None)
            self.piece.data = self.piece.data.to(self.whole.dtype)

        monkeypatch.setattr(zero.Rounded, "_follow", rounded)
    if name == "the scale stays in":
        monkeypatch.setattr(masters.Masters, "true", lambda self, gradient, dtype: gradient.to(dtype))
    if name == "a gradient is counted twice":
        hand_over = zero.Rounded.hand_over
        monkeypatch.setattr(zero.Rounded, "hand_over", lambda self, gradient: hand_over(self, gradient * 2))


@pytest.mark.parametrize(
    "wrong, precision",
    [
        ("the forward never sees the masters", "bf16"),
        ("masters are rounded", "bf16"),
        ("the scale stays in", "fp16"),
        ("a gradient is counted twice", "bf16"),
    ],
)
def test_verify_sees_what_is_wrong(wrong, precision, monkeypatch):
    broken(wrong, monkeypatch)
    report = autoshard.verify(mixed, (2, 1, 1), precision=precision, pin=PIN, microbatches=1, backend="local")
    assert not report.equal


def test_bytes_of_a_rank():
    """16 bytes a parameter, as predicted: 2 + 2 + 12, each divided by the data ranks from its level on."""
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), Square())  # noqa: E731
    batch, k = (torch.randn(8, 64),), 4
    n = sum(p.numel() for p in make().parameters())

    def work(sharded, batch):
        optimizer = sharded.optimizer(torch.optim.AdamW, lr=1e-3)
        sharded(*batch).backward()
        optimizer.step()
        found = held_bytes(sharded, optimizer)
        pieces = [p for p in sharded.parameters() if p.dtype == torch.float32]
        whole = sum(weight.whole.untyped_storage().nbytes() for weight in sharded.stage.shards.values())
        return whole, found["gradients"], found["optimizer"] + sum(p.untyped_storage().nbytes() for p in pieces)

    for level, bytes_each in enumerate(((2, 2, 12), (2, 2, 12 / k), (2, 2 / k, 12 / k), (2 / k, 2 / k, 12 / k))):
        for found in on_ranks(make, batch, (k, 1, 1), work, dtype=None, precision="bf16", zero=level, pin={"input": {"data": "S(0)"}}):
            assert list(found) == pytest.approx([n * b for b in bytes_each], rel=0.05), level


class Square(nn.Module):
    def forward(self, x):
        return x.float().pow(2).mean()


@pytest.mark.parametrize("precision", ("bf16", "fp16"))
@pytest.mark.parametrize("mesh, level", [((2, 1, 1), 0), ((2, 2, 1), 2), ((2, 1, 1), 3), ((1, 1, 2), 0)])
def test_the_users_own_loop(precision, mesh, level):
    """The user's own optimizers with their groups, gradients of two backwards, clipping, whole tensors in and out."""
    model, batch = mixed()
    other = {name: tensor * 1.5 if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()}
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    model.load_state_dict(other)
    model.frozen.to(torch.bfloat16 if precision == "bf16" else torch.float16)
    model.frozen.float()
    for scale in (1.0, 3.0):
        (scale * model(**batch)[0]).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def work(sharded, batch):
        ours = dict(sharded.named_parameters())
        optimizers = [torch.optim.SGD([p], lr=1.0) for name, p in ours.items() if name in names]
        sharded(**batch)[0].backward()
        sharded.zero_grad()
        sharded.load_state_dict(other)
        before = sharded.state_dict()
        assert all(torch.equal(before[name], other[name]) for name in names)
        if precision == "fp16":
            sharded.loss_scale = 256.0
        losses = [sharded(**batch)[0], 3.0 * sharded(**batch)[0]]  # both forwards before both backwards
        for loss in losses:
            loss.backward()
        assert sharded.clip_grad_norm_(0.1).item() == pytest.approx(norm.item(), rel=0.02)
        for name, g in sharded.grad_dict().items():
            if name in names:
                want = dict(model.named_parameters())[name].grad
                assert (g.float() - want).abs().max() <= 0.03 * want.abs().max(), name
        return before, optimizers, sharded

    def stepped(sharded, batch):
        before, optimizers, sharded = work(sharded, batch)
        if sharded.world.mesh.pipeline > 1 and precision == "fp16":
            optimizers = [torch.optim.SGD(sharded.parameters(), lr=1.0)]  # ranks agree in each step, so all of them must make it
        for optimizer in optimizers:
            optimizer.step()
        after = sharded.state_dict()
        gradients = sharded.grad_dict()
        for name in names:
            torch.testing.assert_close(after[name], before[name] - gradients[name].float(), rtol=1e-5, atol=1e-6)
        loss = sharded(**batch)[0]
        if sharded.scheduled:
            return
        with torch.no_grad():
            ours = dict(sharded.named_parameters())
            ours["down.weight"].mul_(2.0)  # of which backward reads a rounded copy
        sharded(**batch)
        with pytest.raises((RuntimeError, RunError), match="modified by an inplace|changed between the forward"):
            loss.backward()

    options = {"zero": level, "pin": PIN if mesh[2] == 1 else {}, "microbatches": mesh[2]}
    on_ranks(Mixed, batch, mesh, stepped, dtype=None, precision=precision, **options)


def test_a_closure_is_refused():
    def work(sharded, batch):
        optimizer = sharded.optimizer(torch.optim.SGD, lr=0.1)
        with pytest.raises(RunError, match="closure"):
            optimizer.step(lambda: sharded(**batch)[0])

    on_ranks(Mixed, mixed()[1], (1, 1, 1), work, dtype=None, precision="bf16")


# --- fp16 ------------------------------------------------------------------------------------------------------------------


def scaled(mesh, work, level=0):
    m = max(mesh[2], 1)
    pin = PIN if mesh[2] == 1 else {}
    return on_ranks(Mixed, mixed()[1], mesh, work, dtype=None, precision="fp16", zero=level, microbatches=m, pin=pin)


@pytest.mark.parametrize("mesh, level", [((2, 1, 1), 0), ((2, 1, 1), 2), ((1, 2, 1), 0), ((2, 2, 2), 3), ((1, 1, 1), 0)])
def test_overflow_on_one_rank_skips_the_step_on_all(mesh, level):
    """As torch.amp.GradScaler: the step is skipped, the scale halves, and the next step is as if nothing had happened."""

    def work(sharded, batch):
        optimizer, last = sharded.optimizer(torch.optim.AdamW, lr=0.01), sharded.world.mesh.size - 1
        losses, before = [], sharded.state_dict()
        for step in range(3):
            optimizer.zero_grad()
            losses.append(sharded(**batch)[0])
            losses[-1].backward()
            if step == 0 and sharded.world.rank == last:
                next(p for p in sharded.parameters() if p.grad is not None).grad.view(-1)[0] = torch.inf
            optimizer.step()
            if step == 0:
                assert not optimizer.state and sharded.loss_scale == 2.0**15
                assert all(torch.equal(before[name], t) for name, t in sharded.state_dict().items())
        return [loss.item() for loss in losses], sharded.loss_scale

    losses, _ = handmade(2, torch.float16, scale=2.0**15)
    for found, scale in scaled(mesh, work, level):
        assert found == pytest.approx([losses[0], *losses], rel=2e-3) and scale == 2.0**15


def test_the_scale_is_that_of_a_grad_scaler(monkeypatch):
    monkeypatch.setattr(masters, "INTERVAL", 3)
    overflows = [0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1]
    p = nn.Parameter(torch.ones(2))
    scaler, reference = torch.amp.GradScaler("cpu", growth_interval=3), torch.optim.SGD([p], lr=0.0)
    wanted = []
    for bad in overflows:
        scaler.scale(p.sum()).backward()
        if bad:
            p.grad[0] = torch.nan
        scaler.step(reference)
        scaler.update()
        reference.zero_grad()
        wanted.append(scaler.get_scale())

    def work(sharded, batch):
        optimizer, found = sharded.optimizer(torch.optim.SGD, lr=0.0), []
        for bad in overflows:
            sharded(**batch)[0].backward()
            if bad and sharded.world.rank == 1:
                next(p for p in sharded.parameters() if p.grad is not None).grad.view(-1)[0] = torch.nan
            optimizer.step()
            optimizer.zero_grad()
            found.append(sharded.loss_scale)
        return found

    assert scaled((2, 1, 1), work) == [wanted] * 2


class Small(nn.Module):
    """Gradients that vanish in fp16 unless the loss is scaled, and overflow if it is scaled by more than 2^13."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return (self.last(torch.tanh(self.first(x))).float() * 1e-7).sum() + (self.first.bias.float() * 4.0).sum()


@pytest.mark.parametrize("mesh, m", [((2, 1, 1), 1), ((1, 1, 2), 2), ((1, 1, 1), 1), ((1, 1, 1), 2)])
def test_small_gradients_survive(mesh, m):
    """The scale is inside the stages' own backward: multiplying gradients afterwards would find zeros."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 8)}

    def work(sharded, batch):
        optimizer = sharded.optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            sharded.train_step(**batch)
            optimizer.step()
            gradients = sharded.grad_dict()
        return sharded.loss_scale, gradients["last.weight"]

    torch.manual_seed(0)
    model = Small()
    model(**batch).backward()
    for scale, gradient in on_ranks(Small, batch, mesh, work, dtype=None, precision="fp16", microbatches=m):
        assert scale == 2.0**13  # after three steps that overflowed
        torch.testing.assert_close(gradient, model.last.weight.grad, rtol=2e-2, atol=1e-9)


# --- saving ----------------------------------------------------------------------------------------------------------------


def run_steps(sharded, optimizer, batch, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = sharded(**batch)[0]
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("precision", ("bf16", "fp16"))
def test_saved_on_one_mesh_and_loaded_on_another(tmp_path, precision):
    """Masters and what the optimizer keeps, in fp32, under the original names, and the scale of the loss."""

    def saved(sharded, batch):
        optimizer = sharded.optimizer(torch.optim.AdamW, lr=0.01)
        run_steps(sharded, optimizer, batch, 1)
        if precision == "fp16":
            sharded.loss_scale = 1024.0
        run_steps(sharded, optimizer, batch, 1)
        autoshard.save(sharded, optimizer, tmp_path)
        return sharded.state_dict(), run_steps(sharded, optimizer, batch, 2)

    def resumed(sharded, batch):
        optimizer = sharded.optimizer(torch.optim.AdamW, lr=1.0)
        autoshard.load(sharded, optimizer, tmp_path)
        state = sharded.state_dict()
        if precision == "fp16":
            assert sharded.loss_scale == 1024.0
        return state, run_steps(sharded, optimizer, batch, 2)

    batch = mixed()[1]
    options = {"dtype": None, "precision": precision, "pin": PIN}
    (state, loss), *_ = on_ranks(Mixed, batch, (2, 1, 1), saved, zero=2, microbatches=1, **options)
    assert all(state[name].dtype == torch.float32 for name in ("up.weight", "down.bias"))
    for mesh, level in (((1, 2, 1), 0), ((2, 1, 1), 3), ((1, 1, 2), 0), ((1, 1, 1), 0)):
        for found, again in on_ranks(Mixed, batch, mesh, resumed, zero=level, microbatches=mesh[2], **(options | {"pin": {}})):
            assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
            assert again == pytest.approx(loss, rel=1e-2)
    model = Mixed()
    model.load_state_dict(state, strict=True)  # the user's own, in fp32


def test_emitted_folder_and_command_line(tmp_path, capsys):
    from autoshard import cli
    from autoshard.runtime import launch

    target = f"{__file__}:mixed"
    assert cli.main(["emit", target, "--mesh", "1,1,1", "--precision", "fp16", "--output", str(tmp_path)]) == 0
    assert "master=torch.float32" in (tmp_path / "rank0.py").read_text()
    capsys.readouterr()
    assert launch.main([str(tmp_path), "--steps", "2"]) == 0
    emitted = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    plan = tmp_path / "plan.json"
    assert cli.main(["run", target, "--plan", str(plan), "--steps", "2", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["losses"] == pytest.approx(emitted, rel=1e-6)
    assert cli.main(["explain", target, "--plan", str(plan)]) == 0
    assert "fp16 with fp32 masters" in capsys.readouterr().out
    assert cli.main(["verify", target, "--plan", str(plan), "--backend", "local", "--steps", "1"]) == 0
    assert "float16" in capsys.readouterr().out


def tied():
    torch.manual_seed(0)
    return TiedHead(), ids13(8)()


def test_on_processes_with_a_split_backward():
    """A weight that two stages share, a loss in fp16, which overflows at the first scale: one step is skipped, here as on one device."""
    report = autoshard.verify(tied, (1, 1, 2), precision="fp16", microbatches=4, schedule="ZBVZeroBubble")
    assert report.equal, report.text()
    assert {row.step for row in report.rows if row.kind == "gradient"} == {2, 3}
