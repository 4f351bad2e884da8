"""Verification in one process: what it says must be what processes say, and what goes wrong on one rank must be seen."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from autoshard import compiler
from autoshard.checking.local import local_world
from autoshard.checking.lockstep import Lockstep
from autoshard.errors import AutoshardError, RunError
from autoshard.mesh import Mesh
from autoshard.runtime.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from autoshard.verifier import Reference

MESH = (2, 2, 2)


class Toy(nn.Module):
    """Two stages of work, a weight that both hold, and an output beside the loss that one row of the batch makes large."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, ids, labels):
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(x)))
        logits = self.norm(x) @ self.embed.weight.t()
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch():
    return {"ids": torch.randint(0, 13, (8, 6)), "labels": torch.randint(0, 13, (8, 6))}


@pytest.fixture(scope="module")
def local():
    with Reference(Toy, batch, steps=2, dtype=torch.float64, backend="local") as reference:
        yield reference


@pytest.fixture(scope="module")
def plan():
    return compiler.plan(Toy().double(), MESH, batch(), microbatches=2)


def numbers(report):
    """(kind, name, step, rank) -> error."""
    return {(row.kind, row.name, row.step, row.rank): row.error for row in report.rows}


def test_agrees_with_processes(local, plan):
    start = time.monotonic()
    here = local.verify(MESH, plan=plan)
    seconds = time.monotonic() - start
    with Reference(Toy, batch, steps=2, dtype=torch.float64) as processes:
        there = processes.verify(MESH, plan=plan)
    assert here.equal and there.equal, here.text() + there.text()
    assert numbers(here).keys() == numbers(there).keys()
    assert all(abs(error - numbers(there)[key]) < 1e-13 for key, error in numbers(here).items())
    assert "8 ranks in one process" in here.text() and "8 processes" in there.text()
    assert seconds < 5


def test_agrees_with_processes_on_what_is_wrong():
    """A gradient that is too large on one rank, before it is summed: both see the same wrong numbers."""

    def build(model, example):
        sharded = compiler.compile(model, (2, 1, 1), example)
        if sharded.world.rank == 1:
            parameters = dict(sharded.named_parameters())
            parameters[min(parameters)].register_hook(lambda grad: grad * 1.5)
        return sharded

    reports = []
    for backend in ("local", "processes"):
        with Reference(Toy, batch, steps=2, dtype=torch.float64, backend=backend) as reference:
            reports.append(reference.verify((2, 1, 1), build=build))
    here, there = reports
    wrong = {key for key, error in numbers(here).items() if error > 1e-6}
    assert wrong and wrong == {key for key, error in numbers(there).items() if error > 1e-6}
    assert all(math.isclose(numbers(here)[key], numbers(there)[key], rel_tol=1e-6) for key in wrong)


def faulty(fault):
    """``compile`` in which rank 1 does something wrong in its first backward."""

    def build(model, example):
        sharded = compiler.compile(model, (2, 1, 1), example)
        if sharded.world.rank == 1:
            fault(sharded)
        return sharded

    return build


def no_collectives(sharded):
    sharded._sync.armed = sharded._sync.every_backward = False


def another_shape(sharded):
    bucket = sharded._sync._buckets[0]
    bucket.launch = lambda arrived: dist.all_reduce(torch.zeros(3), group=bucket.group, async_op=True)


@pytest.mark.parametrize(
    "fault, words",
    [
        (no_collectives, ["rank 0 runs allreduce sum float64", "in step 1 backward", "rank 1 runs"]),
        (another_shape, ["rank 1 runs allreduce sum float32[3]", "in step 1 backward"]),
    ],
)
def test_collectives_that_do_not_match(local, fault, words):
    start = time.monotonic()
    report = local.verify((2, 1, 1), build=faulty(fault))
    assert time.monotonic() - start < 5
    assert not report.equal and report.rows == []
    assert all(word in report.mismatch for word in words), report.mismatch


def test_an_error_names_rank_and_stage(local):
    def fault(sharded):
        def broken(*args, **kwargs):
            raise ValueError("token 99 is out of range")

        sharded.stage.forward = broken

    with pytest.raises(RunError, match=r"rank 1 \(data 1, tensor 0, pipeline 0\) failed in step 1 forward: ValueError: token 99") as error:
        local.verify((2, 1, 1), build=faulty(fault))
    assert 'raise ValueError("token 99 is out of range")' in str(error.value)


def test_a_model_that_fails_on_one_device():
    class Bad(nn.Module):
        def forward(self, x):
            raise IndexError("no such row")

    with (
        pytest.raises(AutoshardError, match="the one-device run failed in step 1 .*: IndexError: no such row"),
        Reference(Bad, {"x": torch.ones(2)}, backend="local") as reference,
    ):
        reference.verify((1, 1, 1), build=lambda model, example: model)


def test_the_caller_is_left_as_it_was(local, plan):
    threads, state, dtype = torch.get_num_threads(), torch.get_rng_state(), torch.get_default_dtype()
    local.verify(MESH, plan=plan)
    assert torch.get_num_threads() == threads and torch.get_default_dtype() == dtype
    assert torch.equal(torch.get_rng_state(), state)


def test_unknown_backend():
    with pytest.raises(RunError, match="backend can't be 'threads'"):
        Reference(Toy, batch, backend="threads")


# --- lockstep ---


def ranks(n, body):
    """``body(world)`` on n ranks of the tensor axis: (results, lockstep)."""
    lockstep, mesh = Lockstep(n), Mesh(1, n, 1)
    return lockstep.run([lambda rank=rank: body(local_world(lockstep, mesh, rank)) for rank in range(n)], 10.0), lockstep


@pytest.mark.parametrize("k", [2, 3, 4])
def test_collectives(k):
    """Uneven pieces and blocks, against their definition."""
    whole = torch.randn(6, 12, dtype=torch.float64)

    def body(world):
        axis = world.tensor
        mine = whole * (axis.index + 1)
        rows = (*whole.chunk(k, 0), whole[:0])[axis.index]  # four ranks share six rows as 2, 2, 2, 0
        return (
            all_reduce(mine, axis),
            all_reduce(mine, axis, "max"),
            all_gather(rows, axis, 0, 6),
            reduce_scatter(whole, axis, 1, 3),
            all_to_all(rows, axis, (0, 1), (1, 1), 6),
        )

    results, _ = ranks(k, body)
    for index, (total, top, gathered, piece, columns) in enumerate(results):
        torch.testing.assert_close(total, whole * sum(range(1, k + 1)))
        torch.testing.assert_close(top, torch.stack([whole * (i + 1) for i in range(k)]).amax(0))
        torch.testing.assert_close(gathered, whole)
        blocks = whole.unflatten(1, (3, 4)).chunk(k, 2)
        torch.testing.assert_close(piece, k * blocks[index].flatten(1, 2) if index < len(blocks) else whole[:, :0])
        torch.testing.assert_close(columns, whole.chunk(k, 1)[index])


def test_each_rank_has_its_own_random_numbers():
    def body(world):
        torch.manual_seed(world.rank)
        first = torch.randn(3)
        all_reduce(torch.ones(1), world.tensor)
        return torch.cat((first, torch.randn(3)))

    with torch.random.fork_rng(devices=[]):
        results, _ = ranks(3, body)
        for rank, got in enumerate(results):
            torch.manual_seed(rank)
            assert torch.equal(got, torch.cat((torch.randn(3), torch.randn(3))))


def test_ranks_that_wait_for_each_other():
    def body(world):
        group = world.tensor.group
        group.recv([torch.empty(2)], 1 - group.rank())
        group.send([torch.ones(2)], 1 - group.rank())

    results, lockstep = ranks(2, body)
    assert results is None
    assert "wait for each other: rank 0 in float32[2]" in lockstep.mismatch and "rank 1 in float32[2]" in lockstep.mismatch


def test_a_message_of_another_shape():
    def body(world):
        group = world.tensor.group
        if world.rank == 0:
            group.send([torch.ones(2)], 1)
        else:
            group.recv([torch.empty(3)], 0)

    results, lockstep = ranks(2, body)
    assert results is None and "sent float32[2]" in lockstep.mismatch and "expected float32[3]" in lockstep.mismatch


def test_a_collective_that_nobody_waits_for():
    def body(world):
        if world.rank == 0:
            dist.all_reduce(torch.ones(2), group=world.tensor.group, async_op=True)

    results, lockstep = ranks(2, body)
    assert results is None and "rank 1 ended after 0" in lockstep.mismatch


def test_a_rank_that_never_ends():
    def body(world):
        if world.rank == 0:
            time.sleep(0.5)

    lockstep, mesh = Lockstep(2), Mesh(1, 2, 1)
    bodies = [lambda rank=rank: body(local_world(lockstep, mesh, rank)) for rank in range(2)]
    assert lockstep.run(bodies, 0.1) is None and lockstep.mismatch is None and lockstep.failed is None
