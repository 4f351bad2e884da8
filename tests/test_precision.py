"""Mixed precision: compute in bf16 or fp16, masters in fp32."""

import copy

import pytest
import torch
from torch import nn

import autoshard
from autoshard import passes
from autoshard.capture import capture
from autoshard.cluster import Cluster
from autoshard.errors import CaptureError, PlanError
from autoshard.planning.plan import Plan


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
        assert [memory[c] for c in ("parameters", "gradients", "optimizer")] == pytest.approx([n * b for b in bytes_each], rel=1e-6)
        assert memory["activations"] == full.stage_rows[0].memory["activations"] / 2
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
