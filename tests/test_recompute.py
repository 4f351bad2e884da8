"""Layers that backward computes again: equal to one device, the same random numbers, and less memory."""

import pytest
import torch
from single import run
from small import Case, case, gpt2
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoshard import passes
from autoshard.capture import capture
from autoshard.compiler import source
from autoshard.passes.checkpoint_regions import checkpoint_regions

FAST = {("gpt2", "1,2,1", 1), ("gpt2", "1,1,2", 4), ("llama", "2,1,1", 2)}
CASES = [
    pytest.param(*values, marks=[] if values in FAST else pytest.mark.slow, id="-".join(map(str, values)))
    for name in ("gpt2", "llama")
    for values in ((name, "1,2,1", 1), (name, "2,1,1", 2), (name, "1,1,2", 4), (name, "2,2,2", 2), (name, "1,1,1", 4))
]


@pytest.mark.parametrize("name, mesh, microbatches", CASES)
def test_equal_to_one_device(name, mesh, microbatches):
    plan = case(name).check(mesh, recompute="on", microbatches=microbatches)
    assert set(plan.regions.values()) == {0, 1}


def test_layers_are_methods_that_are_computed_again():
    cell = case("gpt2")
    ready = cell.prepared(cell.plan((1, 2, 1), recompute="on"))
    text = source(ready.captured, ready.rewritten, ready.plan, 0)
    calls = [line.split("#")[0].strip() for line in text.splitlines() if "rt.recompute(" in line]
    assert [call.split("(")[1].split(",")[0] for call in calls] == ["self.layer_0", "self.layer_1"]
    for i in (0, 1):
        method = text[text.index(f"    def layer_{i}(self, ") :].split("\n\n")[0]
        assert f"# transformer.h.{i}.mlp.c_fc" in method and "rt.convert(" in method
        assert method.splitlines()[-1].startswith("        return ")
    forward = text[text.index("    def forward(") :].split("\n\n")[0]
    assert "# transformer.h.0\n" in forward and "c_fc" not in forward


def gradients(cell, mesh, zero, recompute):
    def work(sharded):
        torch.manual_seed(0)
        losses = []
        for _ in range(2):  # streams must be left as they are without recomputation
            loss = sharded(**cell.batch)[0]
            loss.backward()
            losses.append(loss.detach())
        return losses, sharded.grad_dict()

    return cell.on_ranks(cell.plan(mesh, zero, recompute), work)


@pytest.mark.parametrize("mesh, zero", [((1, 2, 1), 0), ((2, 1, 2), 3)])
def test_the_same_random_numbers_again(mesh, zero):
    cell = Case(*gpt2(dropout=0.3))
    torch.manual_seed(1)
    kept = gradients(cell, mesh, zero, "off")
    torch.manual_seed(1)
    again = gradients(cell, mesh, zero, "on")
    for (losses, grads), (want_losses, want) in zip(again, kept):
        assert losses == want_losses and losses[0] != losses[1]
        for name, gradient in want.items():
            torch.testing.assert_close(grads[name], gradient, rtol=1e-5, atol=1e-7)


class Live(TorchDispatchMode):
    """The bytes of all tensors that were made within and are still alive: now, and at most."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        self.storages = {at: entry for at, entry in self.storages.items() if not entry[0].expired()}
        return sum(nbytes for _, nbytes in self.storages.values())


def test_peak_of_live_activations():
    """Six layers of GPT-2 on one rank: what forward leaves behind falls to the layers' inputs, and the peak of the step with it."""
    model, batch = gpt2()
    config = type(model.config)(**{**model.config.to_dict(), "n_layer": 6})
    cell = Case(type(model)(config), batch)
    found = {}
    for recompute in ("off", "on"):
        plan = cell.plan((1, 1, 1), recompute=recompute)

        def work(sharded):
            with Live() as live:
                loss = sharded(**batch)[0]
                held = live.now()
                live.peak = 0
                loss.backward()
                gradients = sum(p.grad.untyped_storage().nbytes() for p in sharded.parameters())
            return held, live.peak - gradients

        (held, peak), memory = cell.on_ranks(plan, work)[0], plan.stage_rows[0].memory
        found[recompute] = held, peak, memory["activations"], memory["activations"] + memory["transient"]
    held, peak, kept, most = zip(found["off"], found["on"])
    assert held[1] < 0.3 * held[0] and peak[1] < 0.5 * peak[0], found
    assert kept[1] < 0.3 * kept[0] and most[1] < 0.5 * most[0], found
    assert kept[0] == pytest.approx(held[0], rel=0.35) and kept[1] == pytest.approx(held[1], rel=0.35), found


def test_time_of_one_more_forward():
    """Without what backward reads no result of: in both layers the last matmul, and the sum behind it."""
    cell = case("gpt2")
    off, on = (cell.plan((1, 2, 1), recompute=recompute) for recompute in ("off", "on"))
    last = {row.node for row in off.ops if row.node in ("addmm_3", "add_4", "addmm_7", "add_8")}
    layers = sum(row.forward for row in off.ops if ".h." in row.module and row.node not in last)
    assert len(last) == 4
    assert on.breakdown["compute"] - off.breakdown["compute"] == pytest.approx(layers, rel=1e-9)
    assert on.breakdown["tensor"] > off.breakdown["tensor"]


class Chain(nn.Module):
    """Layers of which no two are alike."""

    def __init__(self, widths=(6, 9, 7, 12, 5, 8, 4)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 1.1
        return (x**2).mean()


@pytest.mark.parametrize("mesh, microbatches", [((2, 1, 1), 1), ((1, 2, 1), 2), ((1, 1, 2), 2)])
def test_blocks_between_narrow_places_where_nothing_repeats(mesh, microbatches):
    torch.manual_seed(0)
    cell = Case(Chain().double(), {"x": torch.randn(8, 6).double()})
    plan = cell.check(mesh, recompute="on", microbatches=microbatches)
    assert 2 <= len(set(plan.regions.values())) <= 6
    assert list(plan.regions)[0] == "linear" and "mean" not in plan.regions


def test_a_region_is_a_run_with_a_gradient():
    model, x = Chain((3, 3, 3)), torch.randn(2, 3)
    captured = capture(model, (x,))
    program = passes.run("canonicalize", captured.program)
    names = [node.name for node in program.ops]
    assert names == ["linear", "tanh", "mul", "linear_1", "tanh_1", "mul_1", "pow_1", "mean"]
    marked = checkpoint_regions(program, {"linear": 7, "tanh": 7, "linear_1": 7, "tanh_1": 9})
    assert [node.meta.get("region") for node in marked.ops] == [0, 0, None, 1, 2, None, None, None]
    assert not any("region" in node.meta for node in program.ops)
    torch.testing.assert_close(run(captured, marked, model, {"x": x})[0], model(x))
    for node in program.ops:
        node.meta["grad"] = node.name == "linear_1"
    marked = checkpoint_regions(program, {"linear": 7, "tanh": 7, "linear_1": 8})
    assert [node.meta.get("region") for node in marked.ops] == [None] * 3 + [0] + [None] * 4
