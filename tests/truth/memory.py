"""Predicted bytes of every rank against the measured peak of a training run of the emitted modules."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from autoshard.runtime.sharded import Sharded
from autoshard.runtime.world import open_world

from ..small import Case as Cell
from .meter import Reading, measure
from .models import MODELS

STEPS = 3
TOLERANCE = 0.1
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A plan to be made and run: the model's name, and what ``autoshard.plan`` is told. offload: also, a part of the names of parameters
    that are offloaded; on a CPU, whose memory is the host's, plans offload nothing by themselves."""

    model: str
    mesh: str
    zero: int | str = 0
    recompute: str = "off"
    microbatches: int = 1
    memory: str | None = None
    offload: str = "off"
    precision: str = "fp32"
    schedule: str = "auto"

    def __str__(self) -> str:
        text = f"{self.model:6}{self.mesh:6} zero {self.zero}, recompute {self.recompute}, {self.microbatches} micro-batches"
        text += f", {self.precision}" * (self.precision != "fp32") + f", offload {self.offload}" * (self.offload != "off")
        text += f", {self.schedule}" * (self.schedule != "auto")
        return text + (f", limit {self.memory}" if self.memory else "")

    @property
    def options(self) -> dict:
        """For ``autoshard.plan``, without the limit."""
        names = ("zero", "recompute", "microbatches", "precision", "schedule")
        return {name: getattr(self, name) for name in names} | {"offload": "optimizer" if self.offload == "optimizer" else "off"}


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
    Case("gpt2", "2,1,1", "auto", "auto", memory="100MiB"),
    Case("llama", "2,1,2", "auto", "auto", 4, memory="45MiB"),
    Case("gpt2", "1,1,2", "auto", "auto", 4, memory="95MiB"),
    Case("gpt2", "1,1,2", "auto", "auto", 4, memory="80MiB"),
    Case("llama", "2,1,1", 2, "on", offload="optimizer"),
    Case("llama", "2,1,1", 2, "off", 2, offload="mlp"),
    Case("gpt2", "2,1,1", 2, "off", precision="bf16"),
    Case("llama", "2,2,1", 2),
    Case("gpt2", "1,1,2", microbatches=4, schedule="Interleaved1F1B"),
    Case("gpt2", "1,1,2", microbatches=8, schedule="InterleavedZeroBubble"),
    Case("llama", "1,1,2", 0, "on", 4, schedule="InterleavedZeroBubble"),
    Case("gpt2", "1,1,2", microbatches=4, schedule="ZBVZeroBubble"),
)


@dataclass
class Outcome:
    """What came of a case: the plan, and what each rank measured. free: the plan without the limit, if the case has one."""

    case: Case
    plan: Plan
    readings: list[Reading]
    free: Plan | None = None

    def predicted(self, rank: int) -> dict[str, float]:
        return self.plan.rank_memory[self.plan.mesh.coords(rank)[2]]

    def ratios(self) -> list[float]:
        """Predicted over measured bytes of each rank."""
        return [sum(self.predicted(rank).values()) / reading.total for rank, reading in enumerate(self.readings)]

    @property
    def within_limit(self) -> bool:
        return all(reading.total <= self.plan.memory_limit for reading in self.readings)

    @property
    def forced(self) -> bool:
        """Whether the limit, if there is one, made the plan save what it else would not."""
        return self.free is None or (self.free.peak_bytes > self.plan.memory_limit and saved(self.plan) != saved(self.free))

    @property
    def good(self) -> bool:
        return all(abs(ratio - 1) <= TOLERANCE for ratio in self.ratios()) and self.within_limit and self.forced


def saved(plan: Plan) -> str:
    """What a plan does to save memory, in words."""
    levels = ", ".join(f"{count} weights at level {level}" for level, count in sorted(Counter(plan.zero.values()).items()))
    regions = {(plan.stages[node], number) for node, number in plan.regions.items()}
    again = Counter(stage for stage, _ in regions)
    layers = " + ".join(str(again[stage]) for stage in range(plan.depth))
    return f"ZeRO: {levels or 'none'}; layers computed again, by stage: {layers}; values kept in them: {len(plan.kept)}"


def offloading(part: str, cell: Cell, plan: Plan) -> Plan:
    """The plan with the parameters offloaded whose names have this part, priced anew."""
    some = sorted(name for name in plan.params if part in name)
    return cell.priced(replace(plan, offload=some, stage_rows=[], collectives=[], ops=[]))


def run(case: Case, **size: int) -> Outcome:
    """Plan the case and train it for some steps, on a process for each rank. ``size``: of the model and its batch."""
    model, batch = MODELS[case.model](**size)
    mesh = Mesh.of(case.mesh)
    plan = compiler.plan(model, mesh, batch, cluster="cpu", memory=case.memory, **case.options)
    if case.offload not in ("off", "optimizer"):
        plan = offloading(case.offload, Cell(model, batch), plan)
    free = compiler.plan(model, mesh, batch, cluster="cpu", **case.options) if case.memory else None
    prepared = compiler.Prepared.of(capture(model, batch, precision=case.precision), plan, mesh, batch)

    def train(rank: int, store: str, status: Status) -> Reading:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=mesh.size)
        sharded = prepared.sharded(model, open_world(mesh))
        stage = sharded.stage
        held = [*stage.parameters(), *stage.buffers(), *(x for shard in stage.shards.values() for x in (shard.whole, shard.piece))]
        base = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}.values())
        optimizer = sharded.optimizer(torch.optim.AdamW, lr=1e-3)
        status("training")

        def steps() -> None:
            for _ in range(STEPS):
                optimizer.zero_grad()
                loss = loss_of(call(sharded, batch), has_loss_fn=False)
                loss.backward()
                optimizer.step()

        reading = measure(steps)
        reading.held = base - on_host(sharded, optimizer)
        dist.barrier()
        return reading

    with tempfile.TemporaryDirectory() as folder:
        ranks = [Process(f"rank {rank}", partial(train, rank, f"{folder}/store"), Path(folder)) for rank in range(mesh.size)]
        wait_for(ranks, timeout=300)
        return Outcome(case, plan, [process.result for process in ranks], free)


def on_host(sharded: Sharded, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of what is offloaded, which here is in the same memory: what the optimizer updates, and its state. (Of gradients a device that
    is a CPU has no copy beside the host's.)"""
    pieces = [piece for spec, piece in sharded.stage.held() if spec.offload]
    return sum(x.nbytes for p in pieces for x in (p, *(value for value in optimizer.state[p].values() if value.dim())))


def table(cases: Sequence[Case] = CASES) -> bool:
    """Print every rank of every case; whether all are within TOLERANCE, and under limits that force something."""
    print("MiB on each rank: predicted, by what it is at the moment of the peak, and the measured peak of live tensors")
    print(f"{'rank':>9}" + "".join(f"{category:>12}" for category in CATEGORIES) + f"{'predicted':>12}{'measured':>10}{'ratio':>8}")
    good, worst = 0, 0.0
    for case in cases:
        outcome = run(case)
        print(case)
        for rank, (reading, ratio) in enumerate(zip(outcome.readings, outcome.ratios())):
            row = outcome.predicted(rank)
            cells = "".join(f"{row[category] / MIB:12.2f}" for category in CATEGORIES)
            print(f"{rank:9}{cells}{sum(row.values()) / MIB:12.2f}{reading.total / MIB:10.2f}{ratio:8.3f}", flush=True)
        if outcome.free is not None:
            print(f"         without the limit {outcome.free.peak_bytes / MIB:.2f} MiB; {saved(outcome.free)}")
            print(f"         under it {outcome.plan.peak_bytes / MIB:.2f} MiB; {saved(outcome.plan)}")
        if not outcome.good:
            why = "over the limit" if not outcome.within_limit else "too far off" if outcome.forced else "nothing is forced"
            print(f"         NOT OK: {why}")
        good += outcome.good
        worst = max(worst, *(abs(ratio - 1) for ratio in outcome.ratios()))
    print(f"{good} of {len(cases)} cases within {TOLERANCE:.0%} and under their limits; the worst is {worst:.1%} off")
    return good == len(cases)
