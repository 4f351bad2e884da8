"""Search for the best plan: over the numbers of micro-batches, and for each of them over everything that is decided about the graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoshard import passes
from autoshard.capture import Captured
from autoshard.cluster import Cluster, parse_bytes
from autoshard.draws import without_keys
from autoshard.errors import InfeasibleError, PlanError
from autoshard.logs import logger
from autoshard.mesh import Mesh
from autoshard.passes.cut_stages import pure_nodes
from autoshard.passes.microbatch import Microbatched
from autoshard.planning.chain import Irregular
from autoshard.planning.choices import batch_of, larger_microbatches, microbatch_candidates
from autoshard.planning.comparison import NEAR
from autoshard.planning.joint import decide_jointly
from autoshard.planning.plan import Plan
from autoshard.planning.planner import CHEAPEST, NOTHING, Decision, Narrow, Saving, apply, decide, record, save
from autoshard.predict import check_memory, describe, predict
from autoshard.program import Program
from autoshard.schedule import SCHEDULES, Schedule, schedule_of

SAVINGS = (Saving(2, False), Saving(2, True), Saving(3, False), Saving(3, True))
"""What is tried, in turn, to fit a model that has no blocks for ``decide_jointly``."""


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
    if offload not in ("optimizer", "off", "auto"):
        raise PlanError(f"offload={offload!r} can't be", hint='use "optimizer", "off" or "auto"')
    saving, host = Saving.of(zero, recompute), offload == "optimizer"
    return Wanted(captured, program, title, cluster, limit, microbatches, dict(pin or {}), saving, schedule, host, random)


@dataclass(frozen=True)
class Wanted:
    """What is to be planned, and what was asked for; ``program`` is the canonical one, of the whole batch."""

    captured: Captured
    program: Program
    title: str
    cluster: Cluster
    limit: float
    microbatches: int | None
    pins: dict
    saving: Saving
    schedule: str
    offload: bool
    random: str

    def best(self, mesh: Mesh | int) -> Plan:
        """The best plan for a mesh, or over the meshes of a number of devices. Raises PlanError."""
        return replace(self.on(mesh) if isinstance(mesh, Mesh) else self.on_any(mesh), random=self.random)

    def on(self, mesh: Mesh) -> Plan:
        """The best plan for a mesh, over the numbers of micro-batches. Raises PlanError."""
        self.program.mesh = mesh
        placed = default_schedule(mesh) if self.schedule == "auto" else schedule_of(self.schedule)
        given = (self.captured, self.program, self.title, mesh, self.cluster, self.limit, self.pins, self.saving, placed, self.offload)
        tasks: dict[int, Task] = {}

        def draft(m: int) -> Plan:
            tasks[m] = Task.of(*given, m)
            return tasks[m].drafted()

        best = self.over_microbatches(mesh, draft, lambda plan: tasks[plan.microbatches].finished(plan))
        check_memory(best)
        return best

    def over_microbatches(self, mesh: Mesh, draft: Callable[[int], Plan], finish: Callable[[Plan], Plan] = lambda plan: plan) -> Plan:
        """The fastest of the plans for several numbers of micro-batches, of those that fit if one does.

        Args:
            draft: the fastest plan for a number of micro-batches, memory aside.
            finish: makes a draft fit, if it can; it gets no faster by that.

        Raises PlanError if ``draft`` or ``finish`` always does.
        """
        drafts, refused = self._drafts(mesh, draft)
        best: Plan | None = None
        planned = 0  # fewer micro-batches are larger: no faster when they fit, if they are not as drafts
        for plan in drafts:
            fits = best is not None and best.peak_bytes <= self.limit
            if fits and plan.step_seconds >= best.step_seconds:
                break
            if plan.microbatches < planned:
                continue
            try:
                found = finish(plan)
            except PlanError as error:
                refused = refused if isinstance(refused, InfeasibleError) else error
                continue
            planned = plan.microbatches
            if best is None or self.rank(found) < self.rank(best):
                best = found
            elif fits:
                break
        if best is None:
            raise refused
        return best

    def _drafts(self, mesh: Mesh, draft: Callable[[int], Plan]) -> tuple[list[Plan], PlanError | None]:
        """The drafts, fastest first; and why some number has none."""
        drafts: list[Plan] = []
        refused: PlanError | None = None
        full = 0  # the most micro-batches that are too large to fit as they are

        def attempt(m: int) -> None:
            nonlocal full, refused
            try:
                drafts.append(draft(m))
                full = max(full, m) if drafts[-1].peak_bytes > self.limit else full
            except PlanError as error:
                full = max(full, m) if isinstance(error, InfeasibleError) else full
                refused = refused if isinstance(refused, InfeasibleError) else error

        candidates = microbatch_candidates(self.program, mesh, self.microbatches)
        for m in candidates:
            if m == 1 and len(candidates) > 1 and drafts:  # an idle pipeline, for models whose samples meet before the loss
                break
            if m >= full:  # fewer would be larger still
                attempt(m)
        if self.microbatches is None and full and not any(plan.peak_bytes <= self.limit for plan in drafts):
            for m in larger_microbatches(self.program, mesh, max(candidates)):  # smaller pieces of the batch need less memory
                attempt(m)
        return sorted(drafts, key=lambda plan: plan.step_seconds), refused

    def rank(self, plan: Plan) -> tuple[bool, float]:
        """Smaller is better."""
        return plan.peak_bytes > self.limit, plan.step_seconds

    def on_any(self, devices: int) -> Plan:
        """The best plan over the meshes of so many devices: those that look best, memory aside, are searched until none can be better."""
        batch = batch_of(self.program)
        meshes = Mesh.all(devices, self.cluster.node_size)
        found: list[tuple[float, Mesh]] = []
        refused: PlanError | None = None
        for mesh in meshes:
            if batch is not None and batch % mesh.data:
                continue
            try:
                found.append((self._estimate(mesh), mesh))
            except PlanError as error:
                refused = error
        best: Plan | None = None
        for estimate, mesh in sorted(found, key=lambda pair: pair[0]):
            logger("plan").info("mesh %s: %.4g s or more", mesh, estimate)
            if best is not None and estimate >= best.step_seconds:
                break
            try:
                plan = self.on(mesh)
            except PlanError as error:
                refused = error
                continue
            if best is None or plan.step_seconds < best.step_seconds:
                best = plan
        if best is None:
            raise refused or PlanError(f"no mesh of {devices} devices divides the batch of {batch}", hint="use another number of devices")
        best.solver["meshes"] = len(found)
        return best

    def _estimate(self, mesh: Mesh) -> float:
        """About the least seconds of a step on a mesh, memory aside."""
        self.program.mesh = mesh
        m = self.microbatches or max(microbatch_candidates(self.program, mesh, None))
        cut = passes.run("microbatch", self.program, m).program
        notes = decide(cut, mesh, self.cluster, pure_nodes, None, self.pins, saving=self.saving).solver
        return notes["objective"] * m / (m + mesh.pipeline - 1)  # a pipeline's bubble is smaller with more micro-batches


def default_schedule(mesh: Mesh) -> Schedule:
    return SCHEDULES["1F1B" if mesh.pipeline > 1 else "none"]


@dataclass(frozen=True)
class Task:
    """A program cut into ``m`` micro-batches, to be planned."""

    captured: Captured
    program: Program  # of the whole batch
    title: str
    mesh: Mesh
    cluster: Cluster
    limit: float | None
    pins: dict
    saving: Saving
    schedule: Schedule
    offload: bool  # of all trained parameters' optimizer state
    cut: Microbatched
    m: int
    narrow: Narrow | None = None

    @staticmethod
    def of(captured, program: Program, title, mesh, cluster, limit, pins, saving, schedule: Schedule, offload: bool, m: int) -> Task:
        """Raises PlanError if the batch can't be cut so, or not for this schedule."""
        schedule.check(m, mesh.pipeline, schedule.chunks)
        cut = passes.run("microbatch", program, m)
        return Task(captured, program, title, mesh, cluster, limit, pins, saving, schedule, offload, cut, m)

    def predicted(self, decision: Decision) -> Plan:
        strategies, stages = record(decision)
        limit = self.cluster.device.memory if self.limit is None else self.limit
        known = (self.captured, self.program, self.title, self.mesh, self.cluster, limit, self.m)
        plan = describe(*known, strategies, stages, decision.solver, self.schedule.name, self.schedule.chunks)
        plan.zero, plan.regions, plan.kept = decision.zero, decision.regions, decision.kept
        if self.offload:
            plan.offload = sorted(param.name for param in self.program.params.values() if param.requires_grad)
        return predict(plan, convert(self.cut.program, decision), self.cluster)

    def quick(self, solvers=CHEAPEST) -> Plan:
        """The fastest plan, memory aside, with no more done to save memory than was asked for, or than saves time too.

        ZeRO 2 sends as much as all-reduces do, and divides by data the optimizer's step, and sums of weights that several stages read.
        """
        decision = self.decided(solvers)
        plan = self.predicted(decision)
        if self.saving.zero is not None or self.mesh.data == 1:
            return plan
        cut = replace(decision)
        save(cut, self.cut.program, pure_nodes(self.cut.program), replace(self.saving, zero=2))
        other = self.predicted(cut)
        return other if other.step_seconds < (1 - NEAR) * plan.step_seconds else plan

    def drafted(self, solvers=CHEAPEST) -> Plan:
        """The quick plan, and what it took."""
        start = time.perf_counter()
        plan = self.quick(solvers)
        plan.solver["trace_seconds"] = self.captured.seconds
        plan.solver["plan_seconds"] = time.perf_counter() - start
        logger("plan").info("%d micro-batches: %.4g s a step, %.4g GiB", self.m, plan.step_seconds, plan.peak_bytes / 2**30)
        return plan

    def finished(self, quick: Plan) -> Plan:
        """The quick plan if it fits, or if no more may be done; else the best that does more to save memory. Raises InfeasibleError."""
        if not self.saving.open or self.limit is None or quick.peak_bytes <= self.limit:
            return quick
        start = time.perf_counter()
        try:
            plan = self.joint(quick)
        except (Irregular, InfeasibleError) as reason:
            logger("plan").info("no joint plan: %s", reason)
            plan = self.ladder()
            if isinstance(reason, InfeasibleError) and plan.peak_bytes > self.limit:
                raise
        logger("plan").info("%d micro-batches, made to fit: %.4g s a step", self.m, plan.step_seconds)
        plan.solver["trace_seconds"] = self.captured.seconds
        plan.solver["plan_seconds"] = quick.solver["plan_seconds"] + time.perf_counter() - start
        return plan

    def decided(self, solvers=CHEAPEST) -> Decision:
        """What the fastest plan is."""
        given = (self.cut.program, self.mesh, self.cluster, pure_nodes, self.limit, self.pins)
        return decide(*given, solvers=solvers, saving=self.saving, chunks=self.schedule.chunks, narrow=self.narrow)

    def joint(self, quick: Plan) -> Plan:
        """The fastest plan that fits, over ZeRO levels and recomputation too. Raises Irregular, InfeasibleError."""
        if self.schedule.chunks > 1:
            raise Irregular("a rank holds several stages")
        found: dict[int, Plan] = {}  # by decision

        def measure(decision: Decision) -> list[float]:
            plan = found[id(decision)] = self.predicted(decision)
            return [sum(row.memory.values()) for row in plan.stage_rows]

        transient = [row.memory["transient"] for row in quick.stage_rows]
        pure = pure_nodes(self.cut.program)
        given = (self.cut.program, self.mesh, self.cluster, pure, self.limit, self.pins, self.saving, self.schedule)
        decision = decide_jointly(*given, transient, measure, self.narrow)
        return replace(found[id(decision)], solver=decision.solver)

    def ladder(self) -> Plan:
        """The fastest of some plans that save memory everywhere alike, or the smallest if none fits."""
        plans = []
        for saving in SAVINGS:
            if self.saving.zero in (None, saving.zero) and self.saving.recompute in (None, saving.recompute):
                plans.append(replace(replace(self, saving=saving, limit=None).quick(), memory_limit=self.limit))
        fitting = [plan for plan in plans if plan.peak_bytes <= self.limit]
        return min(fitting, key=lambda plan: plan.step_seconds) if fitting else min(plans, key=lambda plan: plan.peak_bytes)


def plan_for(
    captured, program: Program, title, mesh, cluster, limit, m, pins, solvers=CHEAPEST, saving=NOTHING, schedule=None, offload=False
) -> Plan:
    """The plan for ``m`` micro-batches. ``program`` is the canonical one; ``limit``: bytes a rank; ``offload``: all trained parameters."""
    task = Task.of(captured, program, title, mesh, cluster, limit, pins, saving, schedule or default_schedule(mesh), offload, m)
    return task.finished(task.drafted(solvers))


def convert(program: Program, decision: Decision) -> Program:
    """The program with all that was decided written on its nodes, conversions explicit."""
    placed = passes.run("zero", apply(program, decision), decision.zero)
    regions = passes.run("checkpoint_regions", passes.run("insert_conversions", placed), decision.regions, decision.kept)
    return passes.run("bucket_gathers", regions)
