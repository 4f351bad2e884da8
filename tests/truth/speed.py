"""Predicted seconds of a training step against measured ones, of plans that differ, on processes of this machine."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from autoshard import compiler
from autoshard.capture import capture
from autoshard.checking.processes import Process, Status, wait_for
from autoshard.checking.trial import call, loss_of
from autoshard.cluster import Cluster
from autoshard.mesh import Mesh
from autoshard.runtime.world import open_world

from .memory import Case
from .models import MODELS

ROUNDS = 3  # in each of them every plan runs once, so that what else the machine does falls on all
STEPS = 3  # timed, of each plan in each round
LEAST = 0.9  # rank correlation
SIZES = {"gpt2": {}, "llama": {"width": 320, "batch": 8}}

CASES = (
    Case("gpt2", "2,1,1"),
    Case("gpt2", "8,1,1"),
    Case("gpt2", "1,2,1"),
    Case("gpt2", "1,4,1"),
    Case("gpt2", "1,1,2", microbatches=1),
    Case("gpt2", "1,1,4", microbatches=8),
    Case("gpt2", "2,1,1", 3, "on", 4),
    Case("gpt2", "4,1,1", 3),
    Case("gpt2", "2,2,2", microbatches=4),
    Case("llama", "2,1,1"),
    Case("llama", "1,2,1"),
    Case("llama", "2,1,1", 0, "on"),
    Case("llama", "1,1,2", microbatches=4),
    Case("llama", "1,1,2", 0, "on", 1),
    Case("llama", "4,1,1", 2),
    Case("llama", "4,1,1", 3, "on", 2),
    Case("llama", "2,4,1"),
)


@dataclass
class Timed:
    """seconds: medians of the rounds. work: processor time of all ranks, of a step; predicted_work: what they are busy, not counting that
    they share processors."""

    case: Case
    prepared: compiler.Prepared
    predicted_work: float
    seconds: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)

    @property
    def measured(self) -> float:
        return statistics.median(self.seconds)

    @property
    def worked(self) -> float:
        return statistics.median(self.work)


def prepare(case: Case, cluster: Cluster) -> Timed:
    model, batch = MODELS[case.model](**SIZES[case.model])
    options = {"zero": case.zero, "recompute": case.recompute, "microbatches": case.microbatches}
    plan = compiler.plan(model, case.mesh, batch, cluster=cluster, **options)
    busy = sum(seconds for part, seconds in plan.breakdown.items() if part != "bubble")
    work = busy * plan.mesh.size / cluster.crowding(plan.mesh.size)
    return Timed(case, compiler.Prepared.of(capture(model, batch), plan, Mesh.of(case.mesh), batch), work)


def once(timed: Timed) -> None:
    """Train for some steps, and note the median of their seconds."""
    model, batch = MODELS[timed.case.model](**SIZES[timed.case.model])
    mesh = timed.prepared.plan.mesh

    def train(rank: int, store: str, status: Status) -> tuple[float, float]:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=mesh.size)
        sharded = timed.prepared.sharded(model, open_world(mesh))
        optimizer = sharded.optimizer(torch.optim.AdamW, lr=1e-3)
        found = []
        for step in range(STEPS + 1):  # the first warms up
            status(f"step {step}")
            dist.barrier()
            start, work = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            loss_of(call(sharded, batch), has_loss_fn=False).backward()
            optimizer.step()
            work = time.process_time() - work
            dist.barrier()
            found.append((time.perf_counter() - start, work))
        return tuple(statistics.median(column) for column in zip(*found[1:]))

    with tempfile.TemporaryDirectory() as folder:
        ranks = [Process(f"rank {rank}", partial(train, rank, f"{folder}/store"), Path(folder)) for rank in range(mesh.size)]
        wait_for(ranks, timeout=300)
        timed.seconds.append(ranks[0].result[0])
        timed.work.append(sum(process.result[1] for process in ranks))


def spearman(a: list[float], b: list[float]) -> float:
    """The correlation of the ranks of two lists, ties sharing theirs."""

    def ranks(values: list[float]) -> list[float]:
        return [sum(y < x for y in values) + (sum(y == x for y in values) - 1) / 2 for x in values]

    return statistics.correlation(ranks(a), ranks(b))


def table(cluster: Cluster, rounds: int = ROUNDS) -> bool:
    """Print the table; whether the ranks correlate well enough."""
    plans = []
    for case in CASES:
        print(f"planning {case}", file=sys.stderr, flush=True)
        plans.append(prepare(case, cluster))
    for number in range(rounds):
        for timed in plans:
            once(timed)
            print(f"round {number + 1}: {timed.seconds[-1]:.3f} s, {timed.case}", file=sys.stderr, flush=True)
    print("seconds of a step: predicted, median of the rounds, least and most of them; processor time of all ranks: predicted, measured")
    print(f"{'predicted':>10}{'measured':>10}{'ratio':>7}{'least':>8}{'most':>8}{'predicted':>11}{'work':>8}{'ratio':>7}")
    for timed in sorted(plans, key=lambda timed: timed.measured):
        predicted = timed.prepared.plan.step_seconds
        clock = predicted, timed.measured, predicted / timed.measured, min(timed.seconds), max(timed.seconds)
        work = timed.predicted_work, timed.worked, timed.predicted_work / timed.worked
        print("{:10.3f}{:10.3f}{:7.2f}{:8.3f}{:8.3f}{:11.3f}{:8.3f}{:7.2f}   {}".format(*clock, *work, timed.case))
    found = spearman([t.prepared.plan.step_seconds for t in plans], [t.measured for t in plans])
    worked = spearman([t.predicted_work for t in plans], [t.worked for t in plans])
    print(f"of the processor times, which other work on the machine disturbs less, the rank correlation is {worked:.3f}")
    print(f"Spearman's rank correlation {found:.3f} of {len(plans)} plans, {rounds} rounds of {STEPS} steps")
    return found >= LEAST
