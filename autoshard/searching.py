"""Search for the best plan: over the numbers of micro-batches, and for each of them over everything that is decided about the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Any

from autoshard import passes
from autoshard.capture import Captured
from autoshard.cluster import Cluster, parse_bytes
from autoshard.draws import without_keys
from autoshard.errors import InfeasibleError, PlanError, SlowerError
from autoshard.logs import logger
from autoshard.mesh import Mesh
from autoshard.passes.cut_stages import pure_nodes
from autoshard.planning.chain import Irregular
from autoshard.planning.choices import batch_of, larger_microbatches, microbatch_candidates
from autoshard.planning.ordering import Traffic, placements_on
from autoshard.planning.plan import Plan
from autoshard.planning.planner import Narrow, Saving
from autoshard.predict import check_memory
from autoshard.program import Program
from autoshard.schedule import schedule_of
from autoshard.scheduling import quickest
from autoshard.solvers.folded import Effort
from autoshard.tasks import BLOCKS, Cuts, LongTask, Outline, Task, default_schedule
from autoshard.tracing import few_collections

THOROUGH, HURRIED = Effort(60.0), Effort(20.0)
"""How hard solvers try to make a plan fit: on the mesh that was asked for; on each of many."""


@few_collections()
def search(captured: Captured, title: str, mesh: Mesh | int, *options: Any, **named: Any) -> Plan:
    """The plan with the shortest predicted step that fits. ``options`` are those of ``wanted_of``. Raises PlanError."""
    return wanted_of(captured, title, *options, **named).best(mesh)


def wanted_of(
    captured: Captured,
    title: str,
    cluster: Cluster | str | None = None,
    memory: str | float | None = None,
    microbatches: int | None = None,
    pin: Mapping[str, Mapping[str, str]] | None = None,
    zero: int | str = "auto",
    recompute: str = "auto",
    schedule: str = "auto",
    offload: str = "auto",
    random: str = "invariant",
) -> Wanted:
    """What is to be planned, options as for ``autoshard.plan``. Raises PlanError."""
    cluster = Cluster.of(cluster)
    limit = parse_bytes(memory) if memory is not None else cluster.device.memory
    program = without_keys(passes.run("canonicalize", captured.program), random)
    saving = Saving.of(zero, recompute, offload)
    if saving.offload is None and cluster.device.kind == "cpu":  # whose memory is the host's
        saving = replace(saving, offload=False)
    return Wanted(captured, Cuts(program), title, cluster, limit, microbatches, dict(pin or {}), saving, schedule, random)


@dataclass(frozen=True)
class Wanted:
    """What is to be planned, and what was asked for."""

    captured: Captured
    cuts: Cuts
    title: str
    cluster: Cluster
    limit: float
    microbatches: int | None
    pins: dict
    saving: Saving
    schedule: str
    random: str
    _drafts: dict[tuple[Mesh, int], Plan | Outline] = field(default_factory=dict, init=False)

    @property
    def program(self) -> Program:
        """The canonical one, of the whole batch."""
        return self.cuts.program

    def best(self, mesh: Mesh | int) -> Plan:
        """The best plan for a mesh, or over the meshes of a number of devices. Raises PlanError."""
        plan = self.on(mesh) if isinstance(mesh, Mesh) else self.on_any(mesh)
        if self.schedule == "auto":
            made = {at: draft for at, draft in self._drafts.items() if isinstance(mesh, int) or at[0] == plan.mesh}
            draft = made.get((plan.mesh, plan.microbatches))
            made[plan.mesh, plan.microbatches] = plan
            plan = quickest(plan, [(self.task(*at), each) for at, each in made.items()], draft)
        return replace(plan, random=self.random)

    def on(self, mesh: Mesh, cutoff: float = float("inf"), effort: Effort = THOROUGH) -> Plan:
        """The best plan for a mesh, over the numbers of micro-batches, under 1F1B or the schedule that was asked for.

        cutoff: as for ``over_microbatches``. effort: of solvers, for each of them. Raises PlanError.
        """
        mesh = self.placed(mesh)

        def finish(plan: Plan | Outline, cutoff: float) -> Plan:
            return self.task(mesh, plan.microbatches, effort=effort).finished(plan, cutoff)

        best = self.over_microbatches(mesh, lambda m: self._drafted(mesh, m), finish, cutoff)
        check_memory(best)
        return best

    def _drafted(self, mesh: Mesh, m: int) -> Plan | Outline:
        if (mesh, m) not in self._drafts:
            self._drafts[mesh, m] = self.task(mesh, m).drafted()
        return self._drafts[mesh, m]

    def placed(self, mesh: Mesh) -> Mesh:
        """The mesh, in the order of ranks that looks best if it has none."""
        placements = placements_on(mesh, self.cluster)
        if len(placements) == 1:
            return mesh
        return self._traffic.best(placements, self.cluster, max(microbatch_candidates(self.program, mesh, self.microbatches)))

    @cached_property
    def _traffic(self) -> Traffic:
        return Traffic.of(self.program, pure_nodes(self.program))

    def task(self, mesh: Mesh, m: int, narrow: Narrow | None = None, effort: Effort = THOROUGH) -> Task:
        """narrow: as for ``planner.decide``. effort: as for ``on``."""
        placed = default_schedule(mesh) if self.schedule == "auto" else schedule_of(self.schedule)
        long = self.cuts.short is not None and placed.chunks == 1
        kind, asked = LongTask if long else Task, (self.pins, self.saving, placed, m, narrow, effort)
        return kind(self.captured, self.cuts, self.title, mesh, self.cluster, self.limit, *asked)

    def over_microbatches(
        self,
        mesh: Mesh,
        draft: Callable[[int], Plan | Outline],
        finish: Callable[[Plan | Outline, float], Plan] = lambda plan, cutoff: plan,
        cutoff: float = float("inf"),
    ) -> Plan:
        """The fastest of the plans for several numbers of micro-batches, of those that fit if one does.

        Args:
            draft: the fastest plan for a number of micro-batches, memory aside.
            finish: makes a draft fit, if it can; it gets no faster by that. It may raise PlanError if nothing that fits takes less than so
                many seconds.
            cutoff: seconds of a step; what is slower is of no use.

        Raises PlanError if ``draft`` or ``finish`` always does, or nothing is faster than ``cutoff``.
        """
        race = _Race(self.limit, draft, finish, cutoff)
        candidates = microbatch_candidates(self.program, mesh, self.microbatches)
        for m in candidates:
            if m == 1 and len(candidates) > 1 and race.drafts:  # an idle pipeline, for models whose samples meet before the loss
                break
            if m >= race.full:  # fewer would be larger still
                race.draft(m)
        if self.microbatches is None and 0 < race.full < float("inf") and not any(plan.peak_bytes <= self.limit for plan in race.drafts):
            more = larger_microbatches(self.program, mesh, max(candidates))
            if not more or race.try_smallest(more[-1]):
                for m in more[:-1]:
                    race.draft(m)
        race.finish_drafts()
        if race.too_large and self.microbatches is None and self.cuts.short is None and 1 not in race.finished:
            race.draft(1)  # in one piece, gradients go as they come, and are not added up; of many layers, activations are the most
            race.finish_drafts()
        return race.winner()

    def rank(self, plan: Plan) -> tuple[bool, float]:
        """Smaller is better."""
        return _rank(plan, self.limit)

    def on_any(self, devices: int) -> Plan:
        """The best plan over the meshes of so many devices: those that look best, memory aside, are searched until none can be better."""
        batch = batch_of(self.program)
        meshes = Mesh.all(devices, self.cluster.node_size)
        found: list[_Look] = []
        refused: PlanError | None = None
        for mesh in map(self.placed, meshes):
            if batch is not None and batch % mesh.data:
                continue
            try:
                found.append(self._look(mesh))
            except Irregular as reason:  # many layers, and more stages yet
                refused = PlanError(f"mesh {mesh}: {reason}", hint="ask for this mesh alone")
            except PlanError as error:
                refused = error
        best: Plan | None = None
        waiting = [(look.seconds, i, look) for i, look in enumerate(found)]
        heapify(waiting)
        while waiting:
            seconds, i, look = heappop(waiting)
            if best is not None and seconds >= best.step_seconds:
                break
            try:
                if look.draft is not None:
                    look = look.fitting(self.task(look.mesh, look.draft.microbatches))
                    heappush(waiting, (look.seconds, i, look))
                    continue
                logger("plan").info("mesh %s: %.4g s or more", look.mesh, seconds)
                plan = self.on(look.mesh, _useful(best), HURRIED)
            except PlanError as error:
                refused = error
                continue
            if best is None or plan.step_seconds < best.step_seconds:
                best = plan
        if best is None:
            raise refused or PlanError(f"no mesh of {devices} devices divides the batch of {batch}", hint="use another number of devices")
        best.solver["meshes"] = len(found)
        return best

    def _look(self, mesh: Mesh) -> _Look:
        """What a mesh is worth at first sight. Raises PlanError, Irregular."""
        m = self.microbatches or max(microbatch_candidates(self.program, mesh, None))
        task = self.task(mesh, m)
        if not isinstance(task, LongTask):
            seconds = task.estimate() * m / (m + mesh.pipeline - 1)  # a pipeline's bubble is smaller with more micro-batches
            return _Look(mesh, seconds)
        more = [] if self.microbatches else larger_microbatches(self.program, mesh, m)[-1:]
        drafts = [each.outlined(1) for each in (task, *(self.task(mesh, most) for most in more))]
        look = _Look(mesh, min(plan.step_seconds for plan in drafts))
        if len(drafts[0].known.staged.problem.chain) < BLOCKS * mesh.pipeline:
            return look
        self._drafts.update({(mesh, plan.microbatches): plan for plan in drafts})
        return look if any(plan.peak_bytes <= self.limit for plan in drafts) else replace(look, draft=drafts[-1])


@dataclass(frozen=True)
class _Look:
    """seconds: about the least of a step on a mesh; memory aside while there is a ``draft``, of the smallest pieces of the batch, that has
    not been asked yet what it takes to fit."""

    mesh: Mesh
    seconds: float
    draft: Outline | None = None

    def fitting(self, task: LongTask) -> _Look:
        """Memory not aside: larger pieces need no less of it. Raises PlanError."""
        least = self.seconds + task.least(self.draft) - self.draft.step_seconds
        logger("plan").info("mesh %s: %.4g s or more, to fit %.4g s", self.mesh, self.seconds, least)
        return _Look(self.mesh, least)


def _rank(plan: Plan, limit: float) -> tuple[bool, float]:
    return plan.peak_bytes > limit, plan.step_seconds


def _useful(best: Plan | None) -> float:
    """Seconds that another plan should not take, as predicted and as solvers count, to be better."""
    return max(best.step_seconds, best.solver.get("objective", 0.0)) if best else float("inf")


class _Race:
    """Plans for several numbers of micro-batches: all are drafted, and only what can still be the best is finished.

    limit: bytes of a rank. draft, finish, cutoff: as for ``over_microbatches``. full: the most micro-batches that are too large to fit as
    they are; infinite if no number can. finished: numbers that were.
    """

    def __init__(self, limit: float, draft, finish, cutoff: float):
        self.limit, self.make, self.finish, self.cutoff = limit, draft, finish, cutoff
        self.drafts: list[Plan | Outline] = []
        self.full: float = 0
        self.dearer = 0.0  # seconds that fitting costs the smallest pieces of the batch: larger ones, no less
        self.best: Plan | None = None
        self.refused: PlanError | None = None
        self.finished: set[int] = set()

    def draft(self, m: int) -> Plan | Outline | None:
        try:
            plan = self.make(m)
        except PlanError as error:
            if isinstance(error, InfeasibleError):
                self.full = float("inf") if error.always else max(self.full, m)
            self.refuse(error)
            return None
        self.drafts.append(plan)
        if plan.peak_bytes > self.limit:
            self.full = max(self.full, m)
        return plan

    def refuse(self, error: PlanError) -> None:
        self.refused = self.refused if isinstance(self.refused, InfeasibleError) else error

    @property
    def fits(self) -> bool:
        return self.best is not None and self.best.peak_bytes <= self.limit

    @property
    def too_large(self) -> bool:
        """Whether nothing that was finished fits."""
        return not self.fits and (self.best is not None or isinstance(self.refused, InfeasibleError))

    def try_smallest(self, m: int) -> bool:
        """Finish ``m`` micro-batches first: if those do not fit, no fewer do (but perhaps the whole batch). Whether others may."""
        plan = self.draft(m)
        if plan is not None:
            self.drafts.remove(plan)
            try:
                self.best = self.finish(plan, self.cutoff)
                self.dearer = self.best.step_seconds - plan.step_seconds
            except InfeasibleError as error:
                self.refuse(error)
                self.drafts.clear()
                return False
            except PlanError as error:
                self.dearer = error.least - plan.step_seconds if isinstance(error, SlowerError) else 0.0
                self.refuse(error)
        return True

    def finish_drafts(self) -> None:
        """Finish what can still be the best."""
        planned = 0  # fewer micro-batches are larger: no faster when they fit, if they are not as drafts
        for plan in sorted(self.drafts, key=lambda plan: plan.step_seconds):
            if plan.step_seconds + max(0.0, self.dearer) >= (self.best.step_seconds if self.fits else self.cutoff):
                break
            if plan.microbatches < planned:
                continue
            self.finished.add(plan.microbatches)
            try:
                found = self.finish(plan, min(self.cutoff, _useful(self.best)) if self.fits else self.cutoff)
            except PlanError as error:
                planned = max(planned, plan.microbatches)
                self.refuse(error)
                continue
            planned = plan.microbatches
            if self.best is None or _rank(found, self.limit) < _rank(self.best, self.limit):
                self.best = found
        self.drafts.clear()

    def winner(self) -> Plan:
        """Raises PlanError."""
        if self.best is None:
            raise self.refused or SlowerError(f"no plan takes less than {self.cutoff:.4g} s", least=self.cutoff)
        return self.best
