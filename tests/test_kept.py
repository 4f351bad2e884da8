"""What is kept in regions that backward computes again: equal, the same random numbers, less memory than without, and less work."""

import pytest
import torch
from small import Case, case, gpt2
from test_recompute import Live
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard import passes
from autoshard import runtime as rt
from autoshard.capture import capture
from autoshard.cluster import Cluster
from autoshard.compiler import source
from autoshard.cost.rank import left_by_forward
from autoshard.errors import PlanError
from autoshard.passes.checkpoint_regions import NOTHING, OPERANDS, RESULTS, checkpoint_regions


def in_each_layer(plan, *names):
    """Names of the same ops in both layers of GPT-2, of 4 matmuls and 1 attention each."""
    found = []
    for layer in (0, 1):
        for name in names:
            op, dash, rest = name.partition("->")
            kind, _, number = op.rpartition(":")
            number = int(number) + layer * {"addmm": 4, "layer_norm": 2, "reshape": 12}.get(kind, 1)
            found.append(f"{kind}_{number}{dash}{rest}" if number else f"{kind}{dash}{rest}")
    return found


def keeping(cell, mesh, *names, **options):
    plan = cell.plan(mesh, recompute="on", **options)
    plan.kept = in_each_layer(plan, *names)
    return cell.priced(plan)


ATTENTION = ("addmm:0", "scaled_dot_product_attention:0")
GATHERED = "layer_norm:0->[R, R*]"


@pytest.mark.parametrize(
    "mesh, names, options",
    [
        ((1, 2, 1), (*ATTENTION, GATHERED, "addmm:1"), {}),
        ((1, 1, 2), ("addmm:0", "layer_norm:1"), {"microbatches": 4}),
        ((2, 1, 1), ("addmm:2", "scaled_dot_product_attention:0"), {"zero": 3}),
        pytest.param((1, 2, 2), ATTENTION, {"microbatches": 2}, marks=pytest.mark.slow),
        pytest.param((2, 2, 1), ("addmm:2", "addmm:3"), {"zero": 2, "microbatches": 2}, marks=pytest.mark.slow),
    ],
)
def test_equal_to_one_device(mesh, names, options):
    cell = case("gpt2")
    plan = cell.check_plan(keeping(cell, mesh, *names, **options))
    assert plan.kept and plan.regions


def test_what_is_kept_can_be_seen():
    cell = case("gpt2")
    ready = cell.prepared(keeping(cell, (1, 2, 1), *ATTENTION, GATHERED))
    text = source(ready.captured, ready.rewritten, ready.plan, 0)
    lines = text[text.index("    def layer_0(") :].split("\n\n")[0].splitlines()
    under = {lines[i + 1].split(" = ")[0].strip(): line.strip() for i, line in enumerate(lines) if line.strip().startswith("with rt.")}
    assert under == {
        "layer_norm_rs": "with rt.kept():",
        "addmm": "with rt.kept():",
        "scaled_dot_product_attention": "with rt.kept():",
    }
    assert not any("rt.kept" in line for line in text.split("    def layer_0(")[0].splitlines())


class Log(TorchDispatchMode):
    """Names of the ops that run within."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "names, left_out",
    [((), {"addmm": 2}), (("addmm:0",), {"addmm": 4}), (("addmm:2", "addmm:3"), {"addmm": 4}), (("scaled_dot_product_attention:0",), {})],
)
def test_ops_that_backward_runs_again(names, left_out):
    """Of 4 matmuls in each of 2 layers the last is not run again, as nobody reads it; nor what is kept."""
    cell = case("gpt2")
    plan = keeping(cell, (1, 1, 1), *names)

    def work(sharded):
        loss = sharded(**cell.batch)[0]
        with Log() as log:
            loss.backward()
        return log.names

    ran = cell.on_ranks(plan, work)[0]
    assert ran.count("addmm") == 8 - left_out.get("addmm", 2)
    attention = sum("attention" in name and "backward" not in name for name in ran)
    assert attention == (0 if "scaled_dot_product_attention:0" in names else 2)


def test_memory_between_all_and_nothing():
    """Six layers of GPT-2: what is held falls as predicted."""
    model, batch = gpt2()
    config = type(model.config)(**{**model.config.to_dict(), "n_layer": 6})
    cell = Case(type(model)(config), batch)
    found = {}
    for kept in ((), ("addmm",), ("addmm", "scaled_dot_product_attention", "tanh")):
        plan = cell.plan((1, 1, 1), recompute="on")
        plan.kept = [name for name in plan.regions if name.rstrip("_0123456789") in kept]
        stage = cell.prepared(plan).rewritten.stages[0].program
        predicted = left_by_forward(stage, plan.mesh, Cluster.of("cpu").device)

        def work(sharded):
            with Live() as live:
                loss = sharded(**batch)[0]
                held = live.now()
                loss.backward()
                del loss
                after = live.now() - sum(p.grad.untyped_storage().nbytes() for p in sharded.parameters())
            return held, after

        held, after = cell.on_ranks(plan, work)[0]
        found[kept] = held, predicted, after
    (least, p0, left), (some, p1, left1), (more, p2, left2) = found.values()
    assert left == left1 == left2  # what was kept is let go of
    assert least < some < more
    assert some - least == pytest.approx(p1 - p0, rel=0.02)
    assert more - some == pytest.approx(p2 - p1, rel=0.05)  # attention's log-sum-exp is not counted


def test_work_is_what_is_computed_again():
    cell = case("gpt2")
    less, all_of_it = keeping(cell, (1, 2, 1), *ATTENTION, GATHERED), keeping(cell, (1, 2, 1))
    names = set(in_each_layer(less, *ATTENTION))
    spared = sum(row.forward for row in less.ops if row.node in names)
    assert all_of_it.breakdown["compute"] - less.breakdown["compute"] == pytest.approx(spared, rel=1e-9)
    assert less.breakdown["tensor"] < all_of_it.breakdown["tensor"]


@pytest.mark.parametrize("mesh, zero", [((1, 2, 1), 0), ((2, 1, 2), 0)])
def test_random_numbers_of_what_is_kept_are_skipped(mesh, zero):
    """Attention draws, and is kept; what draws behind it must go on where it did in forward."""
    cell = Case(*gpt2(dropout=0.3))

    def gradients(plan):
        torch.manual_seed(1)
        return cell.on_ranks(plan, lambda sharded: (sharded(**cell.batch)[0].backward(), sharded.grad_dict())[1])

    some = keeping(cell, mesh, *ATTENTION)
    for got, want in zip(gradients(some), gradients(cell.plan(mesh))):
        for name, gradient in want.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-7)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        h = torch.relu(self.a(x))
        h = self.b(h) + h
        return self.c(torch.tanh(h)).reshape(-1).sum()


def marked(kept):
    program = passes.run("canonicalize", capture(Mlp(), (torch.randn(3, 4),)).program)
    for node in program.ops:
        node.meta.update(strategy=type("S", (), {"choices": ()}), layouts=((),))
    out = checkpoint_regions(program, dict.fromkeys((node.name for node in program.ops), 0), kept)
    return {node.name: node.meta["again"] for node in out.ops}


def test_what_is_not_read_is_not_computed_again():
    tail = {"linear_2": "once", "reshape": "again", "sum_1": "once"}
    before = {"linear": "again", "relu": "again"}
    assert marked([]) == {**before, "linear_1": "again", "add": "again", "tanh": "again", **tail}
    # tanh is kept, and saves its own result only: the sum is not read, nor the matmul whose result goes into it
    assert marked(["tanh"]) == {**before, "linear_1": "once", "add": "once", "tanh": "kept", **tail}
    assert marked(["reshape"])["linear_2"] == "kept"  # a view stands for what it is a view of


def test_unknown_names():
    with pytest.raises(PlanError, match="keeps the result of 'linear_9'"):
        marked(["linear_9"])


CALLS = {
    "convert": lambda x: rt.convert(x, "R -> R*", rt.Axis("tensor", 2, 0, None)),
    "add": lambda x: x + x, "sub": lambda x: x - 2 * x.detach(), "neg": lambda x: -x, "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]), "sum": lambda x: x.sum(0), "to": lambda x: x.to(torch.float64),
}  # fmt: skip
SAVING = {
    "linear": lambda x: torch.nn.functional.linear(x, x.detach()), "addmm": lambda x: torch.addmm(x, x, x), "mm": lambda x: x @ x,
    "bmm": lambda x: torch.bmm(x[None], x[None]), "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x[None]),
    "matmul": lambda x: torch.matmul(x, x),
    "mul": lambda x: x * x, "div": lambda x: x / x, "gelu": nn.functional.gelu, "silu": nn.functional.silu,
    "embedding": None,
    "conv1d": lambda x: nn.functional.conv1d(x[None], x[..., None]),
    "conv2d": lambda x: nn.functional.conv2d(x[None, :, :, None], x[..., None, None]),
    "conv3d": lambda x: nn.functional.conv3d(x[None, :, :, None, None], x[..., None, None, None]),
    "convolution": lambda x: torch.convolution(x[None], x[..., None], None, (1,), (0,), (1,), False, (0,), 1),
}  # fmt: skip
RESULT = {kind: getattr(torch, kind) for kind in "tanh sigmoid relu exp sqrt rsqrt".split()}
RESULT |= {kind: lambda x, kind=kind: getattr(torch, kind)(x, -1) for kind in ("softmax", "log_softmax")}


@pytest.mark.parametrize("kind", sorted(NOTHING | OPERANDS | RESULTS))
def test_autograd_saves_what_the_table_says(kind):
    x = torch.rand(4, 4, requires_grad=True)
    other = torch.arange(4)
    call = {**CALLS, **SAVING, **RESULT}[kind]
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t.untyped_storage()._cdata) or t, lambda t: t):
        out = call(x) if kind != "embedding" else torch.nn.functional.embedding(other, x)
    operands = {x.untyped_storage()._cdata, other.untyped_storage()._cdata}
    allowed = operands if kind in OPERANDS else {out.untyped_storage()._cdata} if kind in RESULTS else set()
    assert out.grad_fn is not None and set(saved) <= allowed
