"""Sharded training against one device, at every ZeRO level, with and without recomputation, on meshes over data, tensors and stages.

Every cell is planned as ``autoshard verify`` plans it, and run in float64. That it does what it is named after is measured on its ranks
while they train: the memory behind weights and gradients, what the optimizer updates, and how often layers are computed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import nn

from autoshard.capture import capture
from autoshard.checking.report import Report
from autoshard.compiler import Prepared, source
from autoshard.mesh import Mesh
from autoshard.placement import R, local_shape, parse_layout
from autoshard.planning.plan import Plan
from autoshard.runtime.sharded import Sharded
from autoshard.runtime.world import open_world
from autoshard.searching import search
from autoshard.target import load_target
from autoshard.verifier import Reference

from .models import gpt2, llama

STEPS = 2
ALLOWED = 1e-12  # error of a loss, output, gradient or parameter
ALIGNED = 16  # elements: gradients that are summed together start at multiples of it
TIMEOUT = 400.0  # seconds of a cell
MESHES = ("4,1,1", "2,2,1", "2,1,2", "2,2,2")
COMPARED = ("loss", "output", "gradient", "parameter")


def odd(make: Callable, width: int, vocabulary: int) -> tuple[nn.Module, dict]:
    """Six samples of nine tokens, of whose labels one to five do not count."""
    model, batch = make(layers=2, width=width, batch=6, length=9, vocabulary=vocabulary)
    labels = batch["labels"].clone()
    for row, label in enumerate(labels):
        label[: row % 5 + 1] = -100
    return model, {**batch, "labels": labels}


MODELS: dict[str, Callable] = {
    "gpt2": lambda: load_target("examples/gpt2.py:tiny"),
    "llama": lambda: load_target("examples/llama.py:tiny"),
    "gpt2 odd": lambda: odd(gpt2, 28, 101),
    "llama odd": lambda: odd(llama, 40, 37),
}


@dataclass(frozen=True)
class Cell:
    """zero: the level that is asked for all weights. microbatches: None is what the planner likes best."""

    model: str
    mesh: str
    zero: int
    recompute: str
    microbatches: int | None = None

    def __str__(self) -> str:
        return f"{self.model:10}{self.mesh:6} zero {self.zero}  recompute {self.recompute:4}"


CELLS = (
    *(
        Cell(model, mesh, zero, recompute)
        for model in ("gpt2", "llama") for mesh in MESHES for recompute in ("off", "on") for zero in range(4)
    ),
    Cell("gpt2 odd", "4,1,1", 2, "on"),
    Cell("gpt2 odd", "3,2,1", 3, "on", 2),
    Cell("gpt2 odd", "4,1,2", 1, "off", 3),
    Cell("llama odd", "4,1,1", 3, "off"),
    Cell("llama odd", "3,2,1", 2, "on", 2),
    Cell("llama odd", "3,1,2", 1, "on", 2),
)  # fmt: skip


class Ranks:
    """What the ranks of a cell hold, in elements of trained weights by rank, and what the plan says of that.

    weights: of what forward reads, as it is kept between steps. gradients: before the optimizer's step. updated: by the optimizer.
    whole: what each of them would be without ZeRO. wanted, most: what they are to be, and the most that they may be. calls: of
    methods that are computed again.
    """

    KINDS = ("weights", "gradients", "updated")

    def __init__(self, plan: Plan):
        def table() -> dict[str, torch.Tensor]:  # that forked processes can write to
            return {kind: torch.zeros(plan.mesh.size, dtype=torch.int64).share_memory_() for kind in (*self.KINDS, "calls")}

        self.plan, self.found, self.wanted, self.most = plan, table(), table(), table()
        self.whole = table()["calls"]

    def watch(self, sharded: Sharded, again: Iterable[str]) -> None:
        """Measure a rank, as it is built and before each step of its optimizer. again: names of the methods that are computed again."""
        rank, stage, found = sharded.world.rank, sharded.stage, self.found
        self._expect(sharded)
        found["weights"][rank] = _elements(stage.leaves())
        found["updated"][rank] = sum(p.numel() for p in sharded.parameters() if p.requires_grad)
        grad_dict = sharded.grad_dict

        def before_the_step():
            leaves = [*stage.leaves(), *(shard.piece for shard in stage.shards.values())]
            found["gradients"][rank] = _elements(x.grad for x in leaves if x.grad is not None)
            return grad_dict()

        def counted(method: Callable) -> Callable:
            @functools.wraps(method)
            def call(*args):
                found["calls"][rank] += 1
                return method(*args)

            return call

        sharded.grad_dict = before_the_step
        for name in again:  # every rank has a class of its own
            setattr(type(stage), name, counted(getattr(type(stage), name)))

    def _expect(self, sharded: Sharded) -> None:
        sizes, rank, coords = self.plan.mesh.sizes, sharded.world.rank, sharded.world.coords
        for spec in sharded.stage.params.values():
            if not spec.requires_grad:
                continue
            layout, level = parse_layout(self.plan.params[spec.name]), self.plan.zero.get(spec.name, 0)
            piece, largest = (prod(local_shape(spec.shape, layout, sizes, at)) for at in (coords, (0, coords[1])))
            whole = prod(local_shape(spec.shape, (R, layout[1]), sizes, coords)) if level else piece
            self.whole[rank] += whole
            for kind, cut_from in zip(self.KINDS, (3, 2, 1)):
                cut = level >= cut_from
                self.wanted[kind][rank] += piece if cut else whole
                self.most[kind][rank] += largest if cut else whole
            # at level 1 pieces are views of what was summed, but for some that had to be put together
            self.most["gradients"][rank] += ALIGNED + largest * (level == 1)

    def wrong(self) -> Iterator[str]:
        for kind in self.KINDS:
            for rank, (found, wanted, most) in enumerate(zip(*(of[kind].tolist() for of in (self.found, self.wanted, self.most)))):
                # of gradients a copy of the piece may be all that stays, at level 1 as well
                if not (found == wanted or kind == "gradients" and self.wanted["updated"][rank] <= found <= most):
                    yield f"{kind} of rank {rank}: {found} elements, not {wanted}"

    def shares(self) -> str:
        """weights / gradients / updated, of what they would be without ZeRO, on the rank with the most."""
        return " / ".join(f"{(self.found[kind] / self.whole).max():.2f}" for kind in self.KINDS)


def _elements(tensors: Iterable[torch.Tensor]) -> int:
    """Of the memory behind some tensors."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() // x.element_size() for x in tensors}.values())


@dataclass
class Outcome:
    """levels: share of the weights' elements by ZeRO level. again: how often a layer was computed in a step, of each micro-batch; 0 if
    none is to be computed again. wrong: why the cell is not equal, or not what it is named after."""

    cell: Cell
    plan: Plan
    report: Report
    ranks: Ranks
    levels: dict[int, float]
    again: float
    wrong: list[str] = field(default_factory=list)

    def error(self, kind: str) -> float:
        return max((row.error for row in self.report.rows if row.kind == kind), default=float("inf"))

    def find_wrong(self) -> None:
        if not self.report.equal:
            self.wrong.append(self.report.text())
        self.wrong += [f"{kind}: error {self.error(kind):.1e}" for kind in COMPARED if self.error(kind) > ALLOWED]
        if self.report.excused:
            self.wrong.append(f"{sum(self.report.excused.values())} elements differ from an independent run")
        if self.levels.get(self.cell.zero, 0.0) < 0.9:
            self.wrong.append(f"ZeRO levels are {self.levels}")
        self.wrong += self.ranks.wrong()
        if bool(self.plan.regions) != (self.cell.recompute == "on") or self.again != 2 * bool(self.plan.regions):
            self.wrong.append(f"{len(set(self.plan.regions.values()))} layers to be computed again; computed {self.again} times")


class Bench:
    """A model on one device, and what is traced of it: once for all its cells."""

    def __init__(self, model: str, backend: str):
        self.reference = Reference(MODELS[model], steps=STEPS, dtype=torch.float64, backend=backend, timeout=TIMEOUT)
        self.model, self.batch = self.reference.trial.model, self.reference.trial.batches[0]
        self.captured = capture(self.model, self.batch)

    def plan(self, cell: Cell) -> Plan:
        options = {"zero": cell.zero, "recompute": cell.recompute, "microbatches": cell.microbatches}
        return search(self.captured, type(self.model).__name__, Mesh.of(cell.mesh), **options)

    def run(self, cell: Cell, plan: Plan | None = None) -> Outcome:
        plan = plan or self.plan(cell)
        ready, ranks = Prepared.of(self.captured, plan, plan.mesh, self.batch), Ranks(plan)
        texts = [source(ready.captured, ready.rewritten, plan, rank) for rank in range(plan.mesh.size)]
        again = [set(re.findall(r"rt\.recompute\(self\.(\w+)", text)) for text in texts]

        def build(model: nn.Module, batch: dict) -> Sharded:
            sharded = ready.sharded(model, open_world(plan.mesh))
            ranks.watch(sharded, again[sharded.world.rank])
            return sharded

        report = self.reference.verify(plan.mesh, plan=plan, build=build)
        sizes = {name: p.numel() for name, p in self.model.named_parameters() if p.requires_grad}
        levels = {
            level: sum(size for name, size in sizes.items() if plan.zero.get(name, 0) == level) / sum(sizes.values()) for level in range(4)
        }
        runs = sum(map(len, again)) * plan.microbatches * STEPS
        outcome = Outcome(cell, plan, report, ranks, levels, ranks.found["calls"].sum().item() / runs if runs else 0.0)
        outcome.find_wrong()
        return outcome


def table(cells: Sequence[Cell] = CELLS, backend: str = "processes") -> bool:
    """Print every cell; whether all are equal, and what they are named after."""
    print("largest relative error by kind; elements on the fullest rank, as a share of those without ZeRO; x2: layers are computed twice")
    print(f"{'cell':>4}{'':44}{'m':>3}{'split':>12}" + "".join(f"{kind:>10}" for kind in COMPARED) + "   weights at the level", end="")
    print(f"{' / '.join(Ranks.KINDS):>32}  layers")
    benches: dict[str, Bench] = {}
    good = 0
    for cell in cells:
        if cell.model not in benches:
            for bench in benches.values():
                bench.reference.__exit__()
            benches = {cell.model: Bench(cell.model, backend)}
        outcome = benches[cell.model].run(cell)
        print(f"{CELLS.index(cell):4}  {row(outcome)}", flush=True)
        for text in outcome.wrong:
            print(f"      {text}")
        good += not outcome.wrong
    where = "gloo processes" if backend == "processes" else "ranks in one process"
    print(f"{good} of {len(cells)} cells are equal to one device: {STEPS} steps of AdamW in float64, {ALLOWED:g} allowed, {where}")
    return good == len(cells)


def row(outcome: Outcome) -> str:
    plan, levels = outcome.plan, outcome.levels
    split = "/".join(f"{100 * share:.0f}" for share in plan.split_flops.values()) + " %"
    errors = "".join(f"{outcome.error(kind):10.1e}" for kind in COMPARED)
    level = f"{100 * levels[outcome.cell.zero]:5.1f} %"
    regions = len(set(plan.regions.values()))
    again = f"{regions} x{outcome.again:g}" if regions else "-"
    return f"{outcome.cell}{plan.microbatches:>3}{split:>12}{errors}{level:>12}{outcome.ranks.shares():>24}{again:>8}  " + (
        "NOT OK" if outcome.wrong else "OK"
    )
