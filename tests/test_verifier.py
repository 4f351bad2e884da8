"""``verify`` against a hand-made data-parallel module: right, and wrong in every way that it must catch."""

from __future__ import annotations

import json
import math
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoshard.checking import compare, processes
from autoshard.checking.collectives import Log, Record, first_mismatch
from autoshard.checking.report import Report
from autoshard.errors import AutoshardError, RunError
from autoshard.mesh import Mesh
from autoshard.verifier import Reference, verify

MESH = (2, 1, 1)


class Toy(nn.Module):
    """Attention whose key has a bias: its gradient is zero but for rounding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, ids):
        self.calls += 1
        x = self.embed(ids)
        attended = nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        logits = self.head(self.norm(x + attended) * self.frozen)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()), "logits": logits, "n": 3}


def toy():
    torch.manual_seed(1)
    return Toy()


def batch():
    return {"ids": torch.randint(0, 11, (4, 6))}


class Mean(torch.autograd.Function):
    """The mean over ranks; each rank's gradient is its own summand's."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x / dist.get_world_size()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Rows:
    """Rows of the batch dim, one piece a rank."""

    def __init__(self, x):
        self.x = x

    def full_tensor(self):
        parts = [torch.empty_like(self.x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, self.x.detach().contiguous())
        return torch.cat(parts)


class DataParallel(nn.Module):
    """What ``compile`` would return for pure data parallelism. ``faults`` name what it does wrong."""

    def __init__(self, model, *faults):
        super().__init__()
        self.model, self.faults, self.step, self.rank = model, faults, 0, dist.get_rank()
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p, name=name: self.reduce(name, p))

    def bad(self, fault):
        return fault in self.faults

    def reduce(self, name, p):
        last = self.rank == 1
        if name == "head.bias" and last and self.bad("no collective") or name == "embed.weight" and last and self.bad("no last collective"):
            return
        grad = p.grad[:-1].contiguous() if name == "head.bias" and last and self.bad("other shape") else p.grad
        if name == "norm.weight" and self.bad("no gradient sum"):
            return
        dist.all_reduce(grad)
        p.grad /= dist.get_world_size()
        if name == "head.weight" and self.bad("scaled gradient"):
            p.grad *= 1 + 1e-4
        if name == "head.weight" and self.bad("one gradient on one rank") and last and self.step == 3:
            p.grad[2, 3] *= 1.01
        if name == "key.bias" and self.bad("large noise"):
            p.grad += 1e-4
        if name == "head.weight" and self.bad("flipped small gradient"):
            p.grad.flatten()[p.grad.abs().argmin()] *= -1

    def forward(self, ids):
        self.step += 1
        if self.bad("raises") and self.rank == 1 and self.step == 2:
            raise ValueError("token 99 is out of range")
        if self.bad("raises an error of ours"):
            raise RunError("argument 'ids' is bad")
        if self.bad("exits") and self.rank == 1:
            import os

            os._exit(7)
        if self.bad("sleeps") and self.rank == 1:
            time.sleep(1000)
        n = ids.shape[0] // dist.get_world_size()
        out = self.model(ids[self.rank * n : (self.rank + 1) * n])
        loss = Mean.apply(out["loss"])
        if self.bad("wrong loss on one rank") and self.rank == 1 and self.step == 2:
            loss = loss * (1 + 1e-4)
        logits = out["logits"].detach()
        if self.bad("wrong output"):
            logits = logits * (1 + 1e-4)
        return {"loss": loss, "logits": Rows(logits), "n": 4 if self.bad("other constant") else 3}

    def named_parameters(self, *args, **kwargs):
        return self.model.named_parameters()

    def named_buffers(self, *args, **kwargs):
        return self.model.named_buffers()

    def state_dict(self):
        state = self.model.state_dict()
        if self.bad("other weights"):
            state = {**state, "head.bias": state["head.bias"] + 1e-7}
        if self.bad("other names"):
            state["module.x"] = torch.ones(1)
        return state

    def grad_dict(self):
        grads = {name: p.grad for name, p in self.model.named_parameters()}
        if self.bad("zero for none"):
            grads["unused.weight"] = torch.zeros(2, 2)
        return grads

    def piece_of(self, name, tensor):
        return tensor


@pytest.fixture(scope="module")
def reference():
    with Reference(toy, batch, timeout=40) as reference:
        yield reference


def run(reference, *faults):
    return reference.verify(MESH, build=lambda model, batch: DataParallel(model, *faults))


def wrong(report):
    return {(row.kind, row.name) for row in report.rows if not row.ok}


def test_equal(reference):
    start = time.monotonic()
    report = run(reference)
    assert report.equal, report.text()
    assert time.monotonic() - start < 15
    assert {row.kind for row in report.rows} == {"loss", "output", "gradient", "parameter", "buffer", "copy"}
    assert {row.step for row in report.rows if row.kind == "gradient"} == {1, 2, 3}
    assert {row.rank for row in report.rows if row.kind == "output"} == {0, 1}
    assert report.collectives == [12, 12]  # the loss, and eleven parameters
    json.dumps(report.to_json())
    assert report.text().startswith("equal: Toy on mesh 2,1,1 (2 processes) against one device; 3 steps, float32")


def test_rounding_that_adam_amplifies_is_excused_and_counted(reference):
    report = run(reference)
    assert "key.bias" in report.excused and report.excused["key.bias"] <= 8
    assert "key.bias" in report.text()
    rows = [row for row in report.rows if row.name == "key.bias" and row.kind == "gradient"]
    assert rows and all(row.error < 1e-7 for row in rows)


def test_float64_excuses_nothing():
    report = verify_with(toy, batch, dtype=torch.float64)
    assert report.equal and report.excused == {} and report.worst.error < 1e-10


def test_float64_finds_what_float32_can_not_tell_from_rounding():
    report = verify_with(toy, batch, "flipped small gradient", dtype=torch.float64)
    assert ("gradient", "head.weight") in wrong(report)


def test_a_model_without_a_loss_is_run_forward():
    """Once, and the report says so. Running statistics have changed by then, on all ranks alike."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)

        def forward(self, x):
            return self.norm(self.linear(x)).relu()

    report = verify(Normed, MESH, (torch.randn(8, 8),), backend="local")
    assert report.equal and not report.trained and "forward only, as there is no loss" in report.text()
    assert any(row.kind == "copy" and row.name == "norm.running_mean" for row in report.rows)


def test_a_plan_that_divides_nothing_says_so():
    row = compare.Row("loss", "", 1, 0, 0.0, 1e-5)
    report = Report(Mesh(1, 2, 1), "Toy", "float32", 1, rows=[row], split={"data": 0.0, "tensor": 0.0})
    assert report.equal and report.replicated and "NOTHING IS DIVIDED" in report.text()
    report.split["tensor"] = 0.97
    assert not report.replicated and "Matmul FLOPs split: data 0 %, tensor 97 %." in report.text()


def verify_with(model_fn, inputs, *faults, **options):
    with Reference(model_fn, inputs, timeout=40, **options) as reference:
        return run(reference, *faults)


@pytest.mark.parametrize(
    "fault, found",
    [
        ("scaled gradient", ("gradient", "head.weight")),
        ("no gradient sum", ("gradient", "norm.weight")),
        ("large noise", ("gradient", "key.bias")),
        ("one gradient on one rank", ("copy", "head.weight")),
        ("wrong loss on one rank", ("loss", "")),
        ("wrong output", ("output", "logits")),
        ("other constant", ("output", "n")),
        ("other weights", ("parameter", "head.bias")),
        ("other names", ("parameter", "module.x")),
        ("zero for none", ("gradient", "unused.weight")),
    ],
)
def test_wrong_numbers_are_found(reference, fault, found):
    report = run(reference, fault)
    assert not report.equal
    assert found in wrong(report), report.text()
    assert "NOT EQUAL" in report.text() and not report.worst.ok
    if found[0] == "gradient":
        assert report.excused == {}


@pytest.mark.parametrize(
    "fault, words",
    [
        ("no collective", ["group (0, 1)", "rank 0 runs all", "rank 1 runs all", "step 1 backward"]),
        ("other shape", ["rank 0 runs", "float32[11]", "float32[10]"]),
        ("no last collective", ["rank 0 runs", "rank 1"]),
    ],
)
def test_collectives_that_do_not_match_are_no_hang(reference, fault, words):
    start = time.monotonic()
    report = run(reference, fault)
    assert time.monotonic() - start < 15
    assert not report.equal and report.rows == []
    assert all(word in report.text() for word in words), report.text()


def test_a_rank_that_raises(reference):
    with pytest.raises(RunError) as error:
        run(reference, "raises")
    text = str(error.value)
    assert "rank 1 (data 1, tensor 0, pipeline 0) failed in step 2 forward: ValueError: token 99 is out of range" in text
    assert 'raise ValueError("token 99 is out of range")' in text  # the traceback


def test_an_error_of_ours_keeps_its_class_and_names_the_rank(reference):
    with pytest.raises(RunError, match=r"rank \d .* failed in step 1 forward: argument 'ids' is bad"):
        run(reference, "raises an error of ours")


def test_a_rank_that_dies(reference):
    with pytest.raises(RunError, match="rank 1 .* failed in step 1 forward: exited with status 7"):
        run(reference, "exits")


def test_ranks_that_wait_for_ever(reference, monkeypatch):
    monkeypatch.setattr(processes, "IDLE", 3.0)
    with pytest.raises(RunError, match="wait for each other: rank 0 .* in step 1 forward, rank 1 .* in step 1 forward") as error:
        run(reference, "sleeps")
    assert "in forward" in str(error.value)  # where they are


def test_timeout():
    with pytest.raises(RunError, match="still running after 2 s"), Reference(toy, batch, timeout=2) as reference:
        reference.verify(MESH, build=lambda model, batch: DataParallel(model, "sleeps"))


def test_a_model_that_fails_on_one_device():
    class Bad(nn.Module):
        def forward(self, ids):
            raise IndexError("no such row")

    with pytest.raises(AutoshardError, match="the one-device run failed in step 1 .*: IndexError: no such row"):
        verify_with(Bad, batch)


@pytest.mark.parametrize(
    "model_fn, inputs, steps, words",
    [(toy, None, 3, "needs example_inputs"), (lambda: 3, batch, 3, "returned a int"), (toy, batch, 0, "steps is 0")],
)
def test_wrong_use(model_fn, inputs, steps, words):
    with pytest.raises(RunError, match=words):
        verify(model_fn, MESH, inputs, steps=steps)


# --- comparisons ---


def test_relative_error():
    want = torch.tensor([1.0, -4.0])
    assert compare.relative_error(torch.tensor([1.0, -3.0]), want) == 0.25
    assert compare.relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert compare.relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert compare.relative_error(torch.tensor([math.inf, math.nan, 1.0]), torch.tensor([math.inf, math.nan, 1.0])) == 0.0
    assert compare.relative_error(torch.tensor([math.nan, 1.0]), torch.ones(2)) == math.inf
    assert compare.relative_error(torch.tensor([-math.inf, 1.0]), torch.tensor([math.inf, 1.0])) == math.inf
    assert compare.relative_error(torch.tensor([1, 2]), torch.tensor([1, 3])) == math.inf
    assert compare.relative_error(torch.empty(0), torch.empty(0)) == 0.0


def test_values_of_another_kind_are_unequal():
    one = torch.ones(2)
    for got, want in [(None, one), (one, None), (one.double(), one), (torch.ones(2, 1), one), (1, 1.0), ("a", "b")]:
        assert not compare.compare("output", "x", 1, 0, got, want, 1e-5).ok


def test_only_gradients_that_are_all_rounding_are_absolute():
    def equal(got, want):
        big = torch.ones(2)
        return compare.compare_gradients(1, {"big": big, "small": got}, {"big": big, "small": want}, 1e-5)[1].ok

    assert equal(torch.tensor([3e-9, -1e-9]), torch.tensor([-2e-9, 1e-9]))
    assert not equal(torch.tensor([3e-6, -1e-9]), torch.tensor([-2e-9, 1e-9]))  # not rounding in the sharded run
    assert not equal(torch.tensor([1.001e-5, 0.0]), torch.tensor([1e-5, 0.0]))  # small, but not rounding
    assert equal(torch.tensor([1e-9, 0.0]), torch.zeros(2))
    assert not equal(torch.tensor([3e-6, 0.0]), torch.zeros(2))


# --- logs ---


def collective(what, splits=()):
    return Record(((0, 1), "0"), what.split()[0], what, "step 1", -1, splits)


def message(op, peer, what="float32[3]"):
    return Record(((0, 1), "0"), op, what, "step 1", peer)


def mismatch(zero, one, ended=(True, True)):
    return first_mismatch([SimpleNamespace(records=records, ended=end) for records, end in zip((zero, one), ended)])


def test_logs_that_fit():
    reduce, send, receive = collective("all_reduce float32[2]"), message("send", 1), message("recv_", 0)
    assert mismatch([reduce, send], [receive, reduce]) is None  # messages and collectives are apart
    exchange = collective("all_to_all_single float32", ((1, 2), (1, 3))), collective("all_to_all_single float32", ((3, 4), (2, 4)))
    assert mismatch([exchange[0]], [exchange[1]]) is None
    assert mismatch([reduce], [], ended=(True, False)) is None  # only late


@pytest.mark.parametrize(
    "zero, one, words",
    [
        ([collective("all_reduce float32[2]")], [collective("all_reduce float32[3]")], "collective 1 of group (0, 1)"),
        ([collective("all_reduce float32[2]")], [collective("all_reduce float64[2]")], "float64"),
        ([collective("all_reduce float32[2]")], [], "rank 1 ended after 0 and never does"),
        (
            [message("send", 1)],
            [message("recv_", 0, "float32[4]")],
            "rank 0 to rank 1: sent float32[3] in step 1, expected float32[4]",
        ),
        ([], [message("recv_", 0)], "messages from rank 0 to rank 1: rank 1 runs recv_ float32[3]"),
        ([collective("all_to_all_single f", ((1, 2), (1, 3)))], [collective("all_to_all_single f", ((2, 4), (2, 4)))], "against"),
    ],
)
def test_logs_that_do_not_fit(zero, one, words):
    assert words in mismatch(zero, one)


def test_a_log_is_read_as_it_grows(tmp_path):
    log = Log(tmp_path / "log")
    assert not log.refresh()
    line = '{"group": [[0, 1], "0"], "op": "all_reduce", "what": "all_reduce", "stage": "s", "peer": -1, "splits": [[1, 2], [3, 4]]}'
    log.path.write_text(line + "\n" + line[:10])
    assert log.refresh() and len(log.records) == 1 and log.records[0].splits == ((1, 2), (3, 4))
    log.path.write_text(line + "\n" + line + "\nend\n")
    assert log.refresh() and len(log.records) == 2 and log.ended and not log.refresh()
