"""Predicted bytes of every rank against the measured peak of a training run of the emitted modules."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from autoshard import compiler
from autoshard.capture import capture
from autoshard.checking.processes import Process, Status, wait_for
from autoshard.checking.trial import call, loss_of
from autoshard.cost.memory import CATEGORIES
from autoshard.mesh import Mesh
from autoshard.planning.plan import Plan
from autoshard.runtime.world import open_world

from .meter import Reading, measure
from .models import MODELS

STEPS = 3
TOLERANCE = 0.1
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A plan to be made and run: the model's name, and what ``autoshard.plan`` is told."""

    model: str
    mesh: str
    zero: int | str = 0
    recompute: str = "off"
    microbatches: int = 1
    memory: str | None = None

    def __str__(self) -> str:
        text = f"{self.model:6}{self.mesh:6} zero {self.zero}, recompute {self.recompute}, {self.microbatches} micro-batches"
        return text + (f", limit {self.memory}" if self.memory else "")


CASES = (
    *(Case("gpt2", "2,1,1", zero, recompute) for recompute in ("off", "on") for zero in range(4)),
    Case("gpt2", "1,1,1"),
    Case("gpt2", "1,1,2", microbatches=4),
    Case("gpt2", "2,1,2", 1, "on", 4),
    Case("llama", "2,1,2", 2, "off", 4),
    Case("llama", "2,1,2", 3, "on", 4),
    Case("llama", "1,2,1"),
    Case("llama", "2,2,1", 3, "off", 2),
    Case("llama", "1,2,2", 0, "on", 2),
    Case("llama", "2,1,1", 2, "on", 2),
    Case("gpt2", "2,1,1", 3, "on", memory="76MiB"),
    Case("llama", "2,1,2", 2, "off", 4, memory="58MiB"),
)


@dataclass
class Outcome:
    """What came of a case: the plan, and what each rank measured."""

    case: Case
    plan: Plan
    readings: list[Reading]

    def predicted(self, rank: int) -> dict[str, float]:
        return self.plan.stage_rows[self.plan.mesh.coords(rank)[2]].memory

    def ratios(self) -> list[float]:
        """Predicted over measured bytes of each rank."""
        return [sum(self.predicted(rank).values()) / reading.total for rank, reading in enumerate(self.readings)]

    @property
    def within_limit(self) -> bool:
        return all(reading.total <= self.plan.memory_limit for reading in self.readings)


def run(case: Case, **size: int) -> Outcome:
    """Plan the case and train it for some steps, on a process for each rank. ``size``: of the model and its batch."""
    model, batch = MODELS[case.model](**size)
    mesh = Mesh.of(case.mesh)
    options = {"zero": case.zero, "recompute": case.recompute, "microbatches": case.microbatches, "memory": case.memory}
    plan = compiler.plan(model, mesh, batch, cluster="cpu", **options)
    prepared = compiler.Prepared.of(capture(model, batch), plan, mesh, batch)

    def train(rank: int, store: str, status: Status) -> Reading:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=mesh.size)
        sharded = prepared.sharded(model, open_world(mesh))
        held = [*sharded.stage.parameters(), *sharded.stage.buffers(), *(shard.whole for shard in sharded.stage.shards.values())]
        base = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}.values())
        status("training")

        def steps() -> None:
            optimizer = sharded.optimizer(torch.optim.AdamW, lr=1e-3)
            for _ in range(STEPS):
                optimizer.zero_grad()
                loss = loss_of(call(sharded, batch), has_loss_fn=False)
                loss.backward()
                optimizer.step()

        reading = measure(steps)
        reading.held = base
        dist.barrier()
        return reading

    with tempfile.TemporaryDirectory() as folder:
        ranks = [Process(f"rank {rank}", partial(train, rank, f"{folder}/store"), Path(folder)) for rank in range(mesh.size)]
        wait_for(ranks, timeout=300)
        return Outcome(case, plan, [process.result for process in ranks])


def table(cases: Sequence[Case] = CASES) -> bool:
    """Print every rank of every case; whether all are within TOLERANCE, and under their limits."""
    print("MiB on each rank: predicted, by what it is at the moment of the peak, and the measured peak of live tensors")
    print(f"{'rank':>9}" + "".join(f"{category:>12}" for category in CATEGORIES) + f"{'predicted':>12}{'measured':>10}{'ratio':>8}")
    good = True
    for case in cases:
        outcome = run(case)
        print(case)
        for rank, (reading, ratio) in enumerate(zip(outcome.readings, outcome.ratios())):
            row = outcome.predicted(rank)
            cells = "".join(f"{row[category] / MIB:12.2f}" for category in CATEGORIES)
            print(f"{rank:9}{cells}{sum(row.values()) / MIB:12.2f}{reading.total / MIB:10.2f}{ratio:8.3f}", flush=True)
        ok = all(abs(ratio - 1) <= TOLERANCE for ratio in outcome.ratios()) and outcome.within_limit
        if not ok:
            print("         too far off" if outcome.within_limit else "         over the limit")
        good &= ok
    print("all within 10 %, and under their limits" if good else "not all within 10 %, or under their limits")
    return good
