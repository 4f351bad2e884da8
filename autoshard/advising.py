"""Where nothing fits: what is in the way, the least memory that would be enough, and the smallest changes that help.

All of it is found by planning: a suggestion is a plan that was made, with everything else as it was asked for. What can't fit, by a bound
on what any plan needs, or is far from it, is not planned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil, floor, log2, log10, prod, sqrt
from typing import Any

from torch import fx

from autoshard import passes
from autoshard.capture import Captured
from autoshard.cost.memory import state_bytes
from autoshard.draws import without_keys
from autoshard.errors import AutoshardError, InfeasibleError, PlanError
from autoshard.logs import logger
from autoshard.mesh import AXES, Mesh
from autoshard.planning.advice import Advice, Found, Suggestion
from autoshard.planning.choices import batch_of, larger_microbatches, microbatch_candidates
from autoshard.planning.plan import Plan
from autoshard.predict import check_memory
from autoshard.program import Program, tensors
from autoshard.report.advice import details, headline
from autoshard.report.tables import render
from autoshard.searching import Wanted, wanted_of
from autoshard.tasks import Cuts, Outline, Task
from autoshard.tracing import few_collections

BUDGET = 40.0
"""Seconds of the processor after which nothing more is planned, or as many as the search took, if that was longer."""

SHARE = 0.4
"""Of that, for the least memory."""

LARGE = 2.0
"""A number of micro-batches whose fastest plan needs so many times as much as that of another is not promising."""

CLOSE, GROWTH = 1.05, 1.1
"""A limit that is enough, by one that is not: near enough to stop. And by how much one is raised that is not."""

NEAR = 1.5
"""Where one number of micro-batches needs so many times the limit, or more, no other is tried."""

EVEN = 0.9
"""More devices are not tried where so much of an even share of the smallest plan is too much."""

FASTER = 0.95
"""A plan that fits is left for one of fewer micro-batches where that takes so much of its time, or less."""

FACTORS = (2, 4, 8)
"""How many times as many devices are looked at."""

MESHES = 3
"""Of as many devices, enough of those that help."""

NOTICEABLE = 0.02
"""Share of the limit from which on it is worth mentioning what forward returns beside its loss."""

LOSS_ALONE = "forward returns its loss alone"

progress = logger("plan").getChild("advice")
"""Says what is being looked at; commands show it while they wait."""


@few_collections()
def planned(captured: Captured, title: str, mesh: Mesh | int, traced: Callable[[str], Captured], *options: Any, **named: Any) -> Plan:
    """What ``searching.search`` finds; its InfeasibleError says what would help.

    Args:
        traced: gives the same model in a precision.
        options: those of ``wanted_of``.

    Raises PlanError.
    """
    wanted, start = wanted_of(captured, title, *options, **named), time.process_time()
    try:
        return wanted.best(mesh)
    except InfeasibleError as error:
        adviser = _Adviser(wanted, mesh, traced, error, max(BUDGET, time.process_time() - start))
    raise explained(adviser.advice())


def explained(advice: Advice) -> InfeasibleError:
    text = headline(advice) + "\n" + render(details(advice)).rstrip()
    known = {"limit": advice.limit, "least": advice.least, "proven": advice.proven, "stage": advice.stage, "memory": advice.memory}
    return InfeasibleError(text, **known, suggestions=tuple(advice.suggestions))


class _Late(Exception):
    """There is no time left."""


@dataclass(frozen=True)
class _Change:
    """options: as in ``Suggestion``. Of changes of one kind no more than ``enough`` are wanted."""

    text: str
    options: dict[str, Any]
    kind: str
    enough: int = 1
    loss_alone: bool = False


class _Adviser:
    def __init__(self, wanted: Wanted, mesh: Mesh | int, traced: Callable[[str], Captured], error: InfeasibleError, budget: float):
        self.wanted, self.asked, self.traced, self.error, self.budget = wanted, mesh, traced, error, budget
        self.began = time.process_time()
        self.captured: dict[tuple[str, bool], tuple[Captured, Cuts]] = {}  # by precision, and whether the loss alone is returned

    def advice(self) -> Advice:
        wanted, error = self.wanted, self.error
        mesh = self.mesh = self.asked if isinstance(self.asked, Mesh) else self._smallest_mesh(self.asked)
        numbers = numbers_of(wanted, mesh)
        one = len(numbers) == 1 and isinstance(self.asked, Mesh)  # else what was proven is of one of them
        solved = error.proven if one else None
        proven = max(min(needed(wanted, mesh, m) for m in numbers), solved or 0.0)
        facts = {"cluster": wanted.cluster.name, "limit": wanted.limit, "proven": proven}
        advice = Advice(str(self.asked), str(mesh), numbers=numbers, least=error.least, stage=error.stage, memory=error.memory, **facts)
        self._least(mesh, advice)
        self._suggest(mesh, advice)
        advice.seconds = self.spent()
        return advice

    def attempt(self, wanted: Wanted, mesh: Mesh, m: int, draft: Plan | Outline | None = None, share: float = 1.0) -> Plan:
        """The plan for a number of micro-batches; it fits. Raises PlanError, InfeasibleError where it does not, _Late."""
        self.in_time(share)
        progress.info("nothing fits; is %.4g GiB enough on mesh %s in %d micro-batches?", wanted.limit / 2**30, mesh, m)
        task = wanted.task(wanted.placed(mesh), m)
        plan = task.finished(draft or task.drafted())
        check_memory(plan)
        return plan

    def spent(self) -> float:
        return time.process_time() - self.began

    def in_time(self, share: float = 1.0) -> None:
        """Raises _Late."""
        if self.spent() > share * self.budget:
            raise _Late

    def promising(self, wanted: Wanted, mesh: Mesh) -> dict[int, Plan | Outline | None]:
        """Numbers of micro-batches with which least may be needed, by what their drafts need, and these. Raises PlanError, _Late.

        Many are looked at, for small pieces, and the fewest, with which gradients and results of no others are kept.
        """
        numbers = numbers_of(wanted, mesh)
        if wanted is not self.wanted or mesh != self.mesh:
            numbers = [m for m in numbers if needed(wanted, mesh, m) <= wanted.limit]
        drafts: dict[int, Plan | Outline | None] = {}
        peaks: dict[int, float] = {}
        refused: PlanError = InfeasibleError("any plan needs more")
        for m in dict.fromkeys([*numbers[:-3:-1], *numbers[:1]]):
            self.in_time()
            try:
                drafts[m] = wanted.task(wanted.placed(mesh), m).drafted()
                peaks[m] = drafts[m].peak_bytes
            except InfeasibleError as error:  # no cut of the pipeline fits
                drafts[m], peaks[m] = None, error.least
            except PlanError as error:
                refused = error
        if not peaks:
            raise refused
        least = min(peaks.values())
        return {m: drafts[m] for m in sorted(peaks, key=peaks.__getitem__) if peaks[m] <= LARGE * least}

    # --- the least memory -------------------------------------------------------------------------------------------------

    def _smallest_mesh(self, devices: int) -> Mesh:
        """The one that needs least, as far as half of the time for such questions shows."""
        batch = batch_of(self.wanted.program)
        meshes = [mesh for mesh in Mesh.all(devices, self.wanted.cluster.node_size) if batch is None or batch % mesh.data == 0]
        bounds = {mesh: min(needed(self.wanted, mesh, m) for m in numbers_of(self.wanted, mesh)) for mesh in meshes}
        found: dict[Mesh, float] = {}
        try:
            for mesh in sorted(meshes, key=bounds.__getitem__):
                if found and bounds[mesh] >= min(found.values()):
                    break
                try:
                    self.in_time(SHARE / 2)
                    found[mesh] = self._refusal(self.wanted, mesh, max(numbers_of(self.wanted, mesh))).least
                except PlanError:
                    continue
        except _Late:
            pass
        return min(found, key=found.__getitem__, default=meshes[0])

    def _least(self, mesh: Mesh, advice: Advice) -> None:
        """Find the smallest plan, by its number of micro-batches, and between which limits plans begin to be found."""
        try:
            order = self.promising(self.wanted, mesh)
            refusals = {m: self._refusal(self.wanted, mesh, m) for m in order}
            m = min(refusals, key=lambda m: refusals[m].least)
            smallest = refusals[m]
            advice.least, advice.stage, advice.memory, advice.microbatches = smallest.least, smallest.stage, smallest.memory, m
            self._between(mesh, advice, sorted(order, key=lambda other: other != m))
        except _Late:
            pass
        except PlanError as error:
            logger("plan").info("no least memory: %s", error)

    def _refusal(self, wanted: Wanted, mesh: Mesh, m: int) -> InfeasibleError:
        """Why so many micro-batches don't fit: of plans that save memory everywhere alike, if there are any, else of what is solved for."""
        self.in_time(SHARE)
        task = wanted.task(wanted.placed(mesh), m)
        try:
            plan = task.ladder() if type(task) is Task and wanted.saving.open else task.finished(task.drafted())
            check_memory(plan)
        except InfeasibleError as refused:
            return refused
        raise PlanError(f"{m} micro-batches fit")

    def _between(self, mesh: Mesh, advice: Advice, order: list[int]) -> None:
        """Narrow down the least limit that is enough for the first number of micro-batches; and whether the others need less."""
        low = max(self.wanted.limit, advice.proven)
        trial = readable(max(advice.least, low))
        for m in order:
            below = low
            while True:
                try:
                    plan = self.attempt(replace(self.wanted, limit=trial), mesh, m, share=SHARE)
                except InfeasibleError as error:
                    below = trial
                    if advice.enough is None:
                        trial = readable(max(trial * GROWTH, error.least))
                        continue
                else:
                    first = advice.enough is None
                    advice.enough = trial, found_of(plan)
                    if plan.peak_bytes <= advice.least:
                        advice.stage, advice.memory = max(plan.rank_memory.items(), key=lambda item: sum(item[1].values()))
                        advice.least, advice.microbatches = plan.peak_bytes, m
                    if first and trial > below * CLOSE:  # the smallest plan may be the end of it
                        trial = readable(trial / CLOSE)
                        continue
                high = advice.enough[0]
                if high <= below * CLOSE:
                    advice.little = trial = below
                    break
                trial = readable(sqrt(below * high))

    # --- what helps -------------------------------------------------------------------------------------------------------

    def _suggest(self, mesh: Mesh, advice: Advice) -> None:
        changes = list(self._changes(mesh))
        returned = self.wanted.program.loss is not None and returned_bytes(self.wanted) / mesh.size > NOTICEABLE * self.wanted.limit
        first = [_Change(LOSS_ALONE, {}, "loss", loss_alone=True)] if returned else []
        self._try(first + changes, advice, advice.least)
        if returned and not advice.suggestions:
            both = [replace(c, text=f"{c.text}; and {LOSS_ALONE}", loss_alone=True) for c in changes]
            try:
                alone = self._changed(first[0])[0]
                least = min(self._refusal(alone, mesh, m).least for m in numbers_of(alone, mesh)[-1:])
            except (AutoshardError, _Late):
                least = 0.0
            self._try(both, advice, least)

    def _changes(self, mesh: Mesh) -> Iterator[_Change]:
        """Nearest first: what costs nothing, other meshes of as many devices, what costs something, more devices."""
        wanted, saving = self.wanted, self.wanted.saving
        if wanted.microbatches is not None:
            for m in larger_microbatches(wanted.program, mesh, wanted.microbatches):
                yield _Change(f"microbatches={m}", {"microbatches": m}, "microbatches")
        if saving.zero is not None and mesh.data > 1:
            yield _Change("zero=auto", {"zero": "auto"}, "zero")
        if saving.recompute is False:
            yield _Change("recompute=auto", {"recompute": "auto"}, "recompute")
            if saving.zero is not None and mesh.data > 1:
                yield _Change("zero=auto and recompute=auto", {"zero": "auto", "recompute": "auto"}, "both")
        if wanted.schedule not in ("auto", "1F1B") and mesh.pipeline > 1:
            yield _Change("schedule=1F1B", {"schedule": "1F1B"}, "schedule")
        if isinstance(self.asked, Mesh):
            same = [other for other in Mesh.all(mesh.size, wanted.cluster.node_size) if self._possible(other)]
            cut_more = [other for other in same if other.tensor > mesh.tensor or other.pipeline > mesh.pipeline]
            for other in sorted(cut_more, key=lambda other: distance(mesh, other)):
                yield _Change(f"mesh {other}", {"mesh": other}, "mesh", MESHES)
        offload = saving.offload is False and wanted.cluster.device.kind != "cpu"  # whose memory is the host's
        if offload:
            yield _Change("offload=auto", {"offload": "auto"}, "offload")
        if wanted.captured.precision == "fp32" and any(p.dtype.itemsize == 4 and p.requires_grad for p in wanted.captured.params):
            yield _Change("precision=bf16", {"precision": "bf16"}, "precision")
            if offload:
                both = {"offload": "auto", "precision": "bf16"}
                yield _Change("offload=auto and precision=bf16", both, "offload and precision")
        for factor in FACTORS:
            for axis in AXES:
                other = replace(mesh, **{axis: getattr(mesh, axis) * factor})
                if self._possible(other):
                    yield _Change(f"mesh {other}", {"mesh": other}, axis)

    def _possible(self, mesh: Mesh) -> bool:
        batch = batch_of(self.wanted.program)
        return (batch is None or batch % mesh.data == 0) and mesh.tensor <= self.wanted.cluster.node_size

    def _try(self, changes: list[_Change], advice: Advice, least: float) -> None:
        """least: bytes that the smallest plan needs on the mesh, with what the changes have in common."""
        helped: dict[str, int] = {}
        for change in changes:
            some = any(s.options and s.options.keys() < change.options.keys() for s in advice.suggestions)  # of these changes are enough
            if some or helped.get(change.kind, 0) >= change.enough:
                continue
            try:
                wanted, on = self._changed(change)
                if EVEN * least * self.mesh.size / on.size > wanted.limit and on.size > self.mesh.size:
                    raise InfeasibleError("far from fitting")
                plan = self._fitting(wanted, on)
            except _Late:
                advice.untried.append(change.text)
                continue
            except AutoshardError as error:
                logger("plan").info("%s: %s", change.text, error.what)
                advice.refused.append(change.text)
                continue
            helped[change.kind] = helped.get(change.kind, 0) + 1
            advice.suggestions.append(Suggestion(change.text, change.options, change.loss_alone, found_of(plan)))

    def _changed(self, change: _Change) -> tuple[Wanted, Mesh]:
        """What is to be planned with a change. Raises AutoshardError, _Late."""
        wanted, options = self.wanted, change.options
        precision = options.get("precision", wanted.captured.precision)
        if precision != wanted.captured.precision or change.loss_alone:
            captured, cuts = self._traced(precision, change.loss_alone)
            wanted = replace(wanted, captured=captured, cuts=cuts)
        wanted = replace(
            wanted,
            microbatches=options.get("microbatches", wanted.microbatches),
            saving=replace(wanted.saving, **{name: None for name in ("zero", "recompute", "offload") if name in options}),
            schedule=options.get("schedule", wanted.schedule),
        )
        return wanted, options.get("mesh", self.mesh)

    def _traced(self, precision: str, loss_alone: bool) -> tuple[Captured, Cuts]:
        if (precision, loss_alone) not in self.captured:
            self.in_time()
            captured = self.wanted.captured if precision == self.wanted.captured.precision else self.traced(precision)
            if loss_alone:
                captured = replace(captured, program=without_results(captured.program))
            program = without_keys(passes.run("canonicalize", captured.program), self.wanted.random)
            self.captured[precision, loss_alone] = captured, Cuts(program)
        return self.captured[precision, loss_alone]

    def _fitting(self, wanted: Wanted, mesh: Mesh) -> Plan:
        """A plan that fits, for a number of micro-batches with which least is needed; or for fewer, if they fit and are faster.

        Raises PlanError: none was found. _Late: there was no time.
        """
        refused: PlanError | None = None
        best: Plan | None = None
        for m, draft in self.promising(wanted, mesh).items():
            try:
                best = self.attempt(wanted, mesh, m, draft)
                break
            except PlanError as error:
                refused = error
                if isinstance(error, InfeasibleError) and error.least > NEAR * wanted.limit:
                    break
        if best is None:
            raise refused
        for m in (m for m in reversed(numbers_of(wanted, mesh)) if m < best.microbatches):
            try:
                draft = wanted.task(wanted.placed(mesh), m).drafted()
                if draft.step_seconds > FASTER * best.step_seconds:
                    break
                plan = self.attempt(wanted, mesh, m, draft)
            except (PlanError, _Late):
                break
            if plan.step_seconds > FASTER * best.step_seconds:
                break
            best = plan
        return best


def found_of(plan: Plan) -> Found:
    return Found(plan.peak_bytes, plan.step_seconds, plan.microbatches)


def numbers_of(wanted: Wanted, mesh: Mesh) -> list[int]:
    """The numbers of micro-batches that the search looks at, fewest first."""
    numbers = microbatch_candidates(wanted.program, mesh, wanted.microbatches)
    if wanted.microbatches is None:
        numbers += larger_microbatches(wanted.program, mesh, max(numbers))
    return sorted(set(numbers))


def distance(mesh: Mesh, other: Mesh) -> tuple[float, int]:
    """How far apart two meshes are; of two as far the one with fewer stages is nearer."""
    return sum(abs(log2(a / b)) for a, b in zip(mesh.shape, other.shape)), other.pipeline


def readable(nbytes: float) -> float:
    """Bytes no less, in three digits and the unit that ``report.units.size`` prints them with: what is printed is what was meant."""
    unit = 1024.0 ** max(0, floor(log2(nbytes) / 10)) if nbytes >= 1 else 1.0
    digits = max(0, 2 - floor(log10(nbytes / unit)))
    return ceil(nbytes / unit * 10**digits * (1 - 1e-12)) / 10**digits * unit


def returned_bytes(wanted: Wanted) -> float:
    """Of what forward returns beside its loss, on all ranks together."""
    return sum(_bytes(leaf) for i, leaf in enumerate(wanted.program.results) if i != wanted.program.loss)


def _bytes(leaf: Any) -> float:
    return sum(prod(t.shape) * t.element_size() for t in tensors(leaf.meta["val"])) if isinstance(leaf, fx.Node) else 0.0


def without_results(program: Program) -> Program:
    """A copy whose forward returns its loss alone."""
    out = program.copy()
    leaves, results = out.leaves, out.results
    out.output.args = ([results[out.loss], *leaves[len(results) :]],)
    out.loss = 0
    return out


def needed(wanted: Wanted, mesh: Mesh, m: int) -> float:
    """Bytes that the fullest rank needs in any plan for ``m`` micro-batches: an even share of what must be held.

    Weights and what the optimizer keeps of them are there all the time; in the last of several micro-batches gradients are too. What
    forward returns is kept for every micro-batch, and when the step ends it is put together; of a batch that is not cut it is there when
    forward ends.
    """
    program, saving = wanted.program, wanted.saving
    every, tensor = mesh.size, mesh.tensor * mesh.pipeline
    trains = program.loss is not None
    free = bool(wanted.pins)  # a pin may cut a weight over data
    held = 0.0
    for param in program.params.values():
        whole = state_bytes(prod(param.shape), param.dtype.itemsize, param.master is not None, trainable=param.requires_grad)
        held += whole["parameters"] / (every if free or param.kind != "parameter" or saving.zero in (None, 3) else tensor)
        if trains and m > 1:
            held += whole["gradients"] / (every if free or saving.zero in (None, 2, 3) else tensor)
        if saving.offload is False:
            held += whole["optimizer"] / (every if free or saving.zero != 0 else tensor)
    if not trains:
        return held
    returned = (returned_bytes(wanted) + _bytes(program.results[program.loss])) * (2 if m > 1 else 1) / (mesh.data * mesh.tensor)
    return held + returned if mesh.pipeline == 1 else max(held, returned)
