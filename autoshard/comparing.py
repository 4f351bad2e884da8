"""The plans of other frameworks beside ours: the same model, devices, pipeline and prices, but fewer things to choose from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from autoshard.capture import Captured
from autoshard.errors import InfeasibleError, PlanError, SlowerError
from autoshard.mesh import Mesh
from autoshard.passes.cut_stages import pure_nodes
from autoshard.planning.baselines import BASELINES, Baseline
from autoshard.planning.choices import batch_of, microbatch_candidates
from autoshard.planning.comparison import Comparison, Row
from autoshard.planning.plan import Plan
from autoshard.planning.planner import NOTHING, Decision, Saving, save
from autoshard.schedule import Schedule, schedule_of
from autoshard.scheduling import hoped, under
from autoshard.searching import Wanted, wanted_of
from autoshard.tasks import LongTask, Outline, Task, default_schedule

SLACK = 0.98
"""A rank's share of an op is not always a whole share: kernels of pieces skip a little of what the op on one device does."""


OURS = "autoshard"


def compare(
    captured: Captured,
    title: str,
    mesh: Mesh | int,
    progress: Callable[[str], None] = lambda text: None,
    baselines: Iterable[Baseline] = BASELINES,
    **options: Any,
) -> Comparison:
    """Our plan on a mesh, or the best over the meshes of a number of devices, and every baseline's best plan on as many devices.

    ``options`` are those of ``search``; ``pin``, ``zero``, ``recompute`` and ``offload`` are for our plan alone. ``progress`` is told what
    is being planned. What can't be planned has a reason instead of a plan.
    """
    wanted = wanted_of(captured, title, **options)
    devices = mesh if isinstance(mesh, int) else mesh.size
    planner = _Planner(replace(wanted, pins={}, saving=NOTHING), devices, progress)
    rows = [planner.row(baseline) for baseline in baselines]
    progress(f"autoshard on {mesh if isinstance(mesh, Mesh) else f'all meshes of {mesh} devices'}")
    try:
        ours = Row(OURS, "the best plan found", wanted.best(mesh))
    except PlanError as error:
        ours = Row(OURS, "the best plan found", None, error.what)
    return Comparison((ours, *rows), devices, isinstance(mesh, int))


@dataclass
class _Planner:
    """Plans for baselines, of one model on a number of devices."""

    wanted: Wanted
    devices: int
    progress: Callable[[str], None]
    one_device: float = float("inf")  # seconds of a step on one device, the least that was seen
    decisions: dict[tuple, Decision] = field(default_factory=dict)
    outlines: dict[tuple[Mesh, int], tuple[LongTask, Outline]] = field(default_factory=dict)  # of one baseline

    def row(self, baseline: Baseline) -> Row:
        """The best plan of a baseline: of those that fit, if any does."""
        batch = batch_of(self.wanted.program)
        meshes = [mesh for mesh in baseline.meshes(self.devices, self.wanted.cluster) if not (batch and batch % mesh.data)]
        if not meshes:
            return Row(baseline.name, baseline.what, None, f"none of its meshes of {self.devices} devices divides the batch of {batch}")
        best: list[Plan] = []  # none, or one
        reason = ""
        for savings in baseline.savings:
            if best and best[0].peak_bytes <= self.wanted.limit:
                break
            reason = self.search(best, meshes, baseline, savings) or reason
        if not best and self.outlines:
            best.append(self.smallest())
        return Row(baseline.name, baseline.what, best[0] if best else None, "" if best else reason)

    def search(self, best: list[Plan], meshes: list[Mesh], baseline: Baseline, savings: tuple[Saving, ...]) -> str:
        """Put the best plan over meshes and numbers of micro-batches into ``best``; the first reason why a mesh has none."""
        reason = ""
        candidates = {mesh: microbatch_candidates(self.wanted.program, mesh, self.wanted.microbatches) for mesh in meshes}
        self.outlines.clear()
        for mesh in sorted(meshes, key=lambda mesh: min(self.share(baseline, mesh, m) for m in candidates[mesh])):
            attempt, finish = partial(self.attempt, best, baseline, savings, mesh), partial(self.finished, baseline, mesh)
            given = (mesh, attempt, finish, self.known(best))
            try:
                found = self.wanted.over_microbatches(*given)
            except SlowerError:
                continue
            except PlanError as error:
                reason = reason or error.what
                continue
            best[:] = [min((*best, found), key=self.wanted.rank)]
        return reason

    def known(self, best: list[Plan]) -> float:
        """Seconds of the best plan, if it fits."""
        return best[0].step_seconds if best and best[0].peak_bytes <= self.wanted.limit else float("inf")

    def attempt(self, best: list[Plan], baseline: Baseline, savings: tuple[Saving, ...], mesh: Mesh, m: int) -> Plan | Outline:
        """The plan for ``m``, or its outline. Raises SlowerError if it can't be faster than the best one, which fits."""
        known = self.known(best)
        if SLACK * self.one_device * self.share(baseline, mesh, m) >= known < float("inf"):
            raise SlowerError(f"{m} micro-batches on mesh {mesh} are slower than the best")
        self.progress(f"{baseline.name} on {mesh}, {m} micro-batch{'es' * (m > 1)}")
        wanted = replace(self.wanted, schedule=self.placed(mesh).name)
        tasks = [replace(wanted, saving=saving).task(mesh, m, baseline.narrow) for saving in savings]
        drafts = [(task, self.outlined(task)) for task in tasks if isinstance(task, LongTask)]
        if drafts and all(isinstance(draft, Outline) for _, draft in drafts):
            self.outlines[mesh, m] = min(drafts, key=lambda entry: self.wanted.rank(entry[1]))
            task, outline = self.outlines[mesh, m]
            return replace(outline, step_seconds=outline.step_seconds * self.hope(baseline, task, outline))
        found = self.quickest(baseline, tasks[0], self.restricted(tasks))
        self.one_device = min(self.one_device, found.one_device_seconds)
        return found

    def schedules(self, baseline: Baseline, mesh: Mesh) -> tuple[Schedule, ...]:
        """What it runs beside the usual."""
        return baseline.schedules if self.wanted.schedule == "auto" and mesh.pipeline > 1 else ()

    def hope(self, baseline: Baseline, task: Task, made: Plan | Outline) -> float:
        """The share of its time that another schedule may need."""
        seconds = [hoped(task, made, placed) for placed in self.schedules(baseline, task.mesh)]
        return min([made.step_seconds, *seconds]) / made.step_seconds

    def quickest(self, baseline: Baseline, task: Task, plan: Plan) -> Plan:
        """The plan under the best of the baseline's schedules."""
        plans = [plan]
        for placed in self.schedules(baseline, task.mesh):
            if hoped(task, plan, placed) < min(plans, key=self.wanted.rank).step_seconds and plan.peak_bytes <= self.wanted.limit:
                try:
                    plans.append(under(placed, task, plan))
                except PlanError:
                    continue
        return min(plans, key=self.wanted.rank)

    def outlined(self, task: LongTask) -> Plan | Outline:
        """The first outline of a baseline is made even if it can't fit: then what it would need."""
        try:
            return task.drafted()
        except InfeasibleError:
            if not self.outlines:
                unlimited = replace(task, limit=None)
                self.outlines[task.mesh, task.m] = unlimited, unlimited.drafted()
            raise

    def finished(self, baseline: Baseline, mesh: Mesh, draft: Plan | Outline, cutoff: float) -> Plan:
        """The plan of a draft, as far as its baseline can make it fit."""
        if isinstance(draft, Plan):
            return draft
        task, outline = self.outlines[mesh, draft.microbatches]
        found = self.quickest(baseline, task, task.finished(outline, cutoff / self.hope(baseline, task, outline)))
        self.one_device = min(self.one_device, found.one_device_seconds)
        return found

    def smallest(self) -> Plan:
        """What needs the least memory of what was outlined and does not fit."""
        task, draft = min(self.outlines.values(), key=lambda entry: entry[1].peak_bytes)
        return replace(replace(task, limit=None).finished(draft), memory_limit=self.wanted.limit)

    def share(self, baseline: Baseline, mesh: Mesh, m: int) -> float:
        """The least share of one device's time that a step can take: all work divided by all ranks, and the pipeline's bubble."""
        p, usual = mesh.pipeline, self.placed(mesh).name in ("none", "GPipe", "1F1B")
        chunks = max((placed.chunks for placed in self.schedules(baseline, mesh)), default=1)
        return ((m + (p - 1) / chunks) / m if usual else 1.0) / mesh.size

    def placed(self, mesh: Mesh) -> Schedule:
        auto = self.wanted.schedule == "auto" or mesh.pipeline == 1
        return default_schedule(mesh) if auto else schedule_of(self.wanted.schedule)

    def restricted(self, tasks: list[Task]) -> Plan:
        """A baseline's plan: the best of its tasks."""
        plans = []
        for task in tasks:
            task.schedule.check(task.m, task.mesh.pipeline, task.schedule.chunks)
            try:
                plans.append(task.predicted(self.decided(task)))
            except InfeasibleError:  # then what it would need
                plans.append(replace(replace(task, limit=None).quick(), memory_limit=self.wanted.limit))
        return min(plans, key=self.wanted.rank)

    def decided(self, task: Task) -> Decision:
        """Its decision; that of the same restriction is used again where only what saves memory differs, and no cut depends on it."""
        key = (task.narrow, task.mesh, task.m, task.saving if task.mesh.pipeline > 1 else None)
        if key not in self.decisions:
            self.decisions[key] = task.decided()
        decision = replace(self.decisions[key])
        save(decision, task.cut, pure_nodes(task.cut), task.saving)
        return decision
