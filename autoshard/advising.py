"""Where nothing fits: what is in the way, the least memory that would be enough, and the smallest changes that help.

All of it is found by planning, if roughly: a suggestion is a plan that was made, with everything else as it was asked for. What can't fit,
by a bound on what any plan needs, or is far from it, is not planned.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from math import ceil, floor, inf, log2, log10, sqrt
from typing import Any

from autoshard import passes
from autoshard.capture import Captured
from autoshard.changes import LOSS_ALONE, Change, changes
from autoshard.cost.held import held_bytes, returned_bytes
from autoshard.draws import without_keys
from autoshard.errors import AutoshardError, InfeasibleError, PlanError
from autoshard.logs import logger
from autoshard.mesh import Mesh
from autoshard.passes.loss_alone import loss_alone
from autoshard.planning.advice import Advice, Found, Suggestion
from autoshard.planning.choices import batch_of, larger_microbatches, microbatch_candidates
from autoshard.planning.pins import pins_of
from autoshard.planning.plan import PinRow, Plan
from autoshard.predict import check_memory
from autoshard.report.advice import details, headline
from autoshard.report.tables import render
from autoshard.searching import Wanted, wanted_of
from autoshard.solvers.folded import Effort
from autoshard.tasks import Cuts, Outline, Task
from autoshard.tracing import few_collections

BUDGET, LONGER = 40.0, 80.0
"""Seconds of the processor after which nothing more is planned, or as many as the search took, if that was longer; and of models of many
layers, of which each plan takes longer."""

SHARE = 0.4
"""Of that, for the least memory."""

ROUGH = Effort(seconds=30.0, gap=0.05, whole=2_000)
"""How hard solvers try: what is asked is whether anything fits."""

LARGE = 2.0
"""A number of micro-batches whose fastest plan needs so many times as much as that of another is not promising."""

CLOSE, GROWTH = 1.05, 1.1
"""A limit that is enough, by one that is not: near enough to stop. And by how much one is raised that is not, at first."""

NEAR = 1.5
"""Where one number of micro-batches needs so many times the limit, or more, no other is tried."""

EVEN = 0.9
"""More devices are not tried where so much of an even share of the smallest plan is too much."""

FASTER = 0.95
"""A plan that fits is left for one of fewer micro-batches where that takes so much of its time, or less."""

NOTICEABLE = 0.02
"""Share of the limit from which on it is worth mentioning what forward returns beside its loss."""

progress = logger("plan").getChild("advice")
"""Says what is being looked at; commands show it while they wait."""


@few_collections()
def planned(captured: Captured, title: str, mesh: Mesh | int, traced: Callable[[str], Captured], *options: Any, **named: Any) -> Plan:
    """What ``searching.search`` finds, or what turns up when it is asked what would be enough; its InfeasibleError says what would help.

    Args:
        traced: gives the same model in a precision.
        options: those of ``wanted_of``.

    Raises PlanError.
    """
    wanted, start = wanted_of(captured, title, *options, **named), time.process_time()
    try:
        return wanted.best(mesh)
    except InfeasibleError as error:
        budget = max(BUDGET if wanted.cuts.short is None else LONGER, time.process_time() - start)
        adviser = _Adviser(wanted, mesh, traced, error, budget)
    try:
        advice = adviser.advice()
    except _Fits as found:
        rough = found.plan
        logger("plan").info("%d micro-batches fit after all", rough.microbatches)
        try:
            return replace(wanted, microbatches=rough.microbatches).best(rough.mesh)
        except PlanError:
            return replace(rough, random=wanted.random)
    raise explained(advice)


def explained(advice: Advice) -> InfeasibleError:
    text = headline(advice) + "\n" + render(details(advice)).rstrip()
    known = {"limit": advice.limit, "least": advice.least, "proven": advice.proven, "stage": advice.stage, "memory": advice.memory}
    return InfeasibleError(text, **known, suggestions=tuple(advice.suggestions))


class _Late(Exception):
    """There is no time left."""


class _Fits(Exception):
    """A plan was found for what was asked for: searches for several numbers of micro-batches do not try all of them hard."""

    def __init__(self, plan: Plan):
        super().__init__()
        self.plan = plan


class _Adviser:
    def __init__(self, wanted: Wanted, mesh: Mesh | int, traced: Callable[[str], Captured], error: InfeasibleError, budget: float):
        self.wanted, self.asked, self.traced, self.error, self.budget = wanted, mesh, traced, error, budget
        self.began = time.process_time()
        self.captured: dict[tuple[str, bool], tuple[Captured, Cuts]] = {}  # by precision, and whether the loss alone is returned
        self.outlines: dict[tuple, Outline] = {}  # which no limit changes, by what they are of

    def advice(self) -> Advice:
        """Raises _Fits."""
        wanted, error = self.wanted, self.error
        mesh = self.mesh = self.asked if isinstance(self.asked, Mesh) else self._smallest_mesh(self.asked)
        numbers = numbers_of(wanted, mesh)
        one = len(numbers) == 1 and isinstance(self.asked, Mesh)  # else what was proven is of one of them
        solved = error.proven if one else None
        proven = max(min(held(wanted, mesh, m) for m in numbers), solved or 0.0)
        facts = {"cluster": wanted.cluster.name, "limit": wanted.limit, "proven": proven, "pins": pinned(wanted)}
        advice = Advice(str(self.asked), str(mesh), numbers=numbers, least=error.least, stage=error.stage, memory=error.memory, **facts)
        self._least(mesh, advice)
        if advice.stage is None:  # no plan was found, with whatever limit
            advice.least = proven
        self._suggest(mesh, advice)
        advice.seconds = self.spent()
        return advice

    def attempt(self, wanted: Wanted, mesh: Mesh, m: int, share: float = 1.0) -> Plan:
        """The plan for a number of micro-batches; it fits. Raises PlanError, InfeasibleError where it does not, _Late."""
        self.in_time(share)
        progress.info("nothing fits; is %.4g GiB enough on mesh %s in %d micro-batches?", wanted.limit / 2**30, mesh, m)
        plan = self.task(wanted, mesh, m).finished(self.drafted(wanted, mesh, m))
        check_memory(plan)
        return plan

    def task(self, wanted: Wanted, mesh: Mesh, m: int) -> Task:
        return wanted.task(wanted.placed(mesh), m, effort=ROUGH)

    def drafted(self, wanted: Wanted, mesh: Mesh, m: int) -> Plan | Outline:
        """Raises PlanError."""
        key = id(wanted.cuts), bool(wanted.pins), wanted.saving, wanted.schedule, mesh, m
        if key in self.outlines:
            return self.outlines[key]
        draft = self.task(wanted, mesh, m).drafted()
        if isinstance(draft, Outline):
            self.outlines[key] = draft
        return draft

    def spent(self) -> float:
        return time.process_time() - self.began

    def in_time(self, share: float = 1.0) -> None:
        """Raises _Late."""
        if self.spent() > share * self.budget:
            raise _Late

    def promising(self, wanted: Wanted, mesh: Mesh) -> list[int]:
        """Numbers of micro-batches with which least may be needed, by what their drafts need. Raises PlanError, _Late."""
        peaks: dict[int, float] = {}
        refused: PlanError | None = None
        for m in smallest_first(numbers_of(wanted, mesh)):
            self.in_time()
            try:
                peaks[m] = self.drafted(wanted, mesh, m).peak_bytes
            except InfeasibleError as error:  # no cut of the pipeline fits
                peaks[m] = error.least
            except PlanError as error:
                refused = error
        if not peaks:
            raise refused
        least = min(peaks.values())
        return [m for m in sorted(peaks, key=peaks.__getitem__) if peaks[m] <= LARGE * least]

    # --- the least memory -------------------------------------------------------------------------------------------------

    def _smallest_mesh(self, devices: int) -> Mesh:
        """The one that needs least, as far as half of the time for such questions shows."""
        batch = batch_of(self.wanted.program)
        meshes = [mesh for mesh in Mesh.all(devices, self.wanted.cluster.node_size) if batch is None or batch % mesh.data == 0]
        bounds = {mesh: min(held(self.wanted, mesh, m) for m in numbers_of(self.wanted, mesh)) for mesh in meshes}
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
        """Why so many micro-batches don't fit: of plans that save memory everywhere alike, if there are any, else of what is solved for.

        Raises _Fits, PlanError, _Late.
        """
        self.in_time(SHARE)
        task = self.task(wanted, mesh, m)
        try:
            plan = task.ladder() if type(task) is Task and wanted.saving.open else task.finished(self.drafted(wanted, mesh, m))
            check_memory(plan)
        except InfeasibleError as refused:
            return refused
        raise _Fits(plan)

    def _between(self, mesh: Mesh, advice: Advice, order: list[int]) -> None:
        """Narrow down the least limit that is enough for the first number of micro-batches; and whether the others need less."""
        low = max(self.wanted.limit, advice.proven)
        trial, growth = readable(max(advice.least, low)), GROWTH
        for m in order:
            below = low
            while True:
                try:
                    plan = self.attempt(replace(self.wanted, limit=trial), mesh, m, share=SHARE)
                except PlanError as error:
                    below = trial
                    if advice.enough is None:
                        advice.little = trial
                        least = error.least if isinstance(error, InfeasibleError) else trial
                        trial, growth = readable(max(trial * growth, min(least, trial * LARGE))), growth**2
                        continue
                else:
                    first = advice.enough is None
                    advice.enough = trial, found_of(plan)
                    if advice.stage is None or plan.peak_bytes <= advice.least:
                        advice.stage, advice.memory = max(plan.rank_memory.items(), key=lambda item: sum(item[1].values()))
                        advice.least, advice.microbatches = plan.peak_bytes, m
                    if first and trial > below * CLOSE:  # the smallest plan may be the end of it
                        trial = readable(max(min(plan.peak_bytes, trial / CLOSE), below * CLOSE))
                        continue
                high = advice.enough[0]
                if high <= below * CLOSE:
                    advice.little = trial = below
                    break
                trial = readable(sqrt(below * high))

    # --- what helps -------------------------------------------------------------------------------------------------------

    def _suggest(self, mesh: Mesh, advice: Advice) -> None:
        wanted = self.wanted
        listed = list(changes(wanted, mesh, isinstance(self.asked, Mesh)))
        returned = wanted.program.loss is not None and returned_bytes(wanted.program) / mesh.size > NOTICEABLE * wanted.limit
        first = [Change(LOSS_ALONE, {}, "loss", loss_alone=True)] if returned else []
        self._try(first + listed, advice, advice.least)
        if returned and not advice.suggestions:
            both = [replace(c, text=f"{c.text}; and {LOSS_ALONE}", loss_alone=True) for c in listed]
            try:
                alone = self._changed(first[0])[0]
                least = self._refusal(alone, mesh, max(numbers_of(alone, mesh))).least
            except (AutoshardError, _Late, _Fits):
                least = 0.0
            self._try(both, advice, least)

    def _try(self, changes: list[Change], advice: Advice, least: float) -> None:
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

    def _changed(self, change: Change) -> tuple[Wanted, Mesh]:
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
            pins=options.get("pin", wanted.pins),
        )
        return wanted, options.get("mesh", self.mesh)

    def _traced(self, precision: str, alone: bool) -> tuple[Captured, Cuts]:
        if (precision, alone) not in self.captured:
            self.in_time()
            captured = self.wanted.captured if precision == self.wanted.captured.precision else self.traced(precision)
            if alone:
                captured = replace(captured, program=loss_alone(captured.program))
            program = without_keys(passes.run("canonicalize", captured.program), self.wanted.random)
            self.captured[precision, alone] = captured, Cuts(program)
        return self.captured[precision, alone]

    def _fitting(self, wanted: Wanted, mesh: Mesh) -> Plan:
        """A plan that fits, in small pieces; or in fewer, if they fit and are faster. Raises PlanError: none was found. _Late."""
        numbers = numbers_of(wanted, mesh)
        best, refused = None, InfeasibleError("any plan needs more")
        least, far = inf, False  # what the smallest draft needs; whether that is far from fitting
        for m in smallest_first([m for m in numbers if held(wanted, mesh, m) <= wanted.limit]):
            self.in_time()
            try:
                peak = self.drafted(wanted, mesh, m).peak_bytes
                if peak > LARGE * least or (far and peak >= least):
                    continue
                least = min(least, peak)
                best = self.attempt(wanted, mesh, m)
                break
            except PlanError as error:
                refused = error
                far = far or (isinstance(error, InfeasibleError) and error.least > NEAR * wanted.limit)
        if best is None:
            raise refused
        fewer = [m for m in numbers if m < best.microbatches]
        low, high = 0, len(fewer)  # of fewer, those before low don't fit, or are no faster; those from high on are worse than the best
        while low < high:
            at = (low + high) // 2
            try:
                plan = None
                if self.drafted(wanted, mesh, fewer[at]).step_seconds <= FASTER * best.step_seconds:
                    plan = self.attempt(wanted, mesh, fewer[at])
            except _Late:
                break
            except PlanError:
                pass
            if plan is None:
                low = at + 1
                continue
            high = at
            if plan.step_seconds <= FASTER * best.step_seconds:
                best = plan
        return best


def pinned(wanted: Wanted) -> list[PinRow]:
    """What is pinned; in models of many layers, where it is in all like layers, in how many."""
    long = wanted.cuts.short is not None
    pins = pins_of(wanted.program, wanted.pins)
    return [PinRow(pin.name, dict(pin.axes), len(wanted.cuts.like(node)) if long else 1) for node, pin in pins.items()]


def held(wanted: Wanted, mesh: Mesh, m: int) -> float:
    """Bytes that the fullest rank needs in any plan."""
    return held_bytes(wanted.program, mesh, m, wanted.saving.zero, wanted.saving.offload is not False, bool(wanted.pins))


def smallest_first(numbers: list[int]) -> list[int]:
    """Those that are looked at: many micro-batches, for small pieces, and the fewest, for which no results of others are kept."""
    return list(dict.fromkeys([*numbers[:-3:-1], *numbers[:1]]))


def found_of(plan: Plan) -> Found:
    return Found(plan.peak_bytes, plan.step_seconds, plan.microbatches)


def numbers_of(wanted: Wanted, mesh: Mesh) -> list[int]:
    """The numbers of micro-batches that the search looks at, fewest first."""
    numbers = microbatch_candidates(wanted.program, mesh, wanted.microbatches)
    if wanted.microbatches is None:
        numbers += larger_microbatches(wanted.program, mesh, max(numbers))
    return sorted(set(numbers))


def readable(nbytes: float) -> float:
    """Bytes no less, in three digits and the unit that ``report.units.size`` prints them with: what is printed is what was meant."""
    unit = 1024.0 ** max(0, floor(log2(nbytes) / 10)) if nbytes >= 1 else 1.0
    digits = max(0, 2 - floor(log10(nbytes / unit)))
    return ceil(nbytes / unit * 10**digits * (1 - 1e-12)) / 10**digits * unit
