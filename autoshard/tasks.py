"""One task of the search: the best plan for a mesh, a schedule and a number of micro-batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from autoshard import passes
from autoshard.capture import Captured
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, PlanError
from autoshard.logs import logger
from autoshard.mesh import SHARDED_AXES, Mesh
from autoshard.passes.cut_stages import pure_nodes
from autoshard.planning.abridge import abridged
from autoshard.planning.chain import Chain, Irregular, chain_of
from autoshard.planning.comparison import NEAR
from autoshard.planning.fold import fold
from autoshard.planning.joint import decide_jointly, decision_of, notes_of, nothing_fits, staged_of
from autoshard.planning.pins import Asked, Pin, in_all_layers, pins_of
from autoshard.planning.plan import PinRow, Plan
from autoshard.planning.planner import CHEAPEST, Decision, Narrow, Saving, apply, decide, record, save
from autoshard.planning.saving import NOTHING
from autoshard.planning.staging import Allowed, Staged
from autoshard.predict import describe, predict, too_large
from autoshard.program import Program
from autoshard.schedule import SCHEDULES, Schedule
from autoshard.solvers.columns import Part
from autoshard.solvers.fastest import fastest
from autoshard.solvers.folded import Effort, OutOfMemory, proven, solve_folded
from autoshard.solvers.problem import Infeasible

SAVINGS = tuple(Saving(zero, again, host) for host in (False, True) for zero in (2, 3) for again in (False, True))
"""What is tried, in turn, where ``decide_jointly`` has no problem to solve (a rank holds several stages; there are fewer blocks than
stages; a stage can't end behind a block), or finds nothing that fits; what is updated on the host, if nothing else fits."""

CLOSE = 0.005
"""To the bound: a plan that need not be compared with those of the ``ladder``."""

AMPLE = 2.0**50
"""Bytes that any plan fits in."""

BLOCKS = 2
"""Blocks for each stage, from which on it is enough to cut the pipeline between them."""

LITTLE = 1.25
"""Of the limit: what a plan needs that may be made to fit without computing anything again."""


def default_schedule(mesh: Mesh) -> Schedule:
    return SCHEDULES["1F1B" if mesh.pipeline > 1 else "none"]


class Cuts:
    """A canonical program of the whole batch, and the programs of one micro-batch, each made when first asked for."""

    def __init__(self, program: Program):
        self.program = program
        self._made: dict[int, Program] = {}

    @cached_property
    def short(self) -> Cuts | None:
        """The same of few layers, if the model has many."""
        program = abridged(self.program)
        return None if program is None else Cuts(program)

    @cached_property
    def alike(self) -> dict[fx.Node, int]:
        """A class for each op and param: corresponding ones of identical layers share it."""
        return fold(self.program).by_node(self.program)

    def everywhere(self, pins: Asked) -> dict[str, Pin]:
        """Pins of the values in all like layers. Raises PlacementError, and Irregular where like values are pinned, but not alike."""
        return in_all_layers(pins_of(self.program, pins), self.alike) if pins else {}

    def like(self, node: str) -> list[str]:
        """Names of all nodes that are like one, itself among them."""
        kinds = {kind for other, kind in self.alike.items() if other.name == node}
        return [other.name for other, kind in self.alike.items() if kind in kinds] or [node]

    def of(self, m: int, mesh: Mesh) -> Program:
        """Raises PlanError if the batch can't be cut so."""
        if m not in self._made:
            self._made[m] = passes.run("microbatch", self.program, m).program
        return replace(self._made[m], mesh=mesh)


@dataclass(frozen=True)
class Task:
    """A program to be planned, cut into ``m`` micro-batches."""

    captured: Captured
    cuts: Cuts
    title: str
    mesh: Mesh
    cluster: Cluster
    limit: float | None
    pins: Asked
    saving: Saving
    schedule: Schedule
    m: int
    narrow: Narrow | None = None
    effort: Effort = Effort()  # of a solver, to make a plan fit

    @property
    def cut(self) -> Program:
        """Of one micro-batch."""
        return self.cuts.of(self.m, self.mesh)

    def predicted(self, decision: Decision) -> Plan:
        strategies, stages = record(decision)
        limit = self.cluster.device.memory if self.limit is None else self.limit
        program = self.cuts.program
        known = (self.captured, program, self.title, self.mesh, self.cluster, limit, self.m)
        plan = describe(*known, strategies, stages, decision.solver, self.schedule.name, self.schedule.chunks)
        plan.zero, plan.regions, plan.kept, plan.offload = decision.zero, decision.regions, decision.kept, sorted(decision.offload)
        plan.pins = self._pinned(decision)
        return predict(plan, convert(self.cut, decision), self.cluster)

    def _pinned(self, decision: Decision) -> list[PinRow]:
        layouts = {node.name: decision.chosen[node].results[0] for node in decision.chosen if node.op != "output"} if self.pins else {}
        rows = []
        for name, pin in pins_of(self.cuts.program, self.pins).items():
            like, axes = self.cuts.like(name), [SHARDED_AXES.index(axis) for axis in pin.axes]
            every = all(layouts[other][axis] == layouts[name][axis] for other in like for axis in axes)
            rows.append(PinRow(pin.name, dict(pin.axes), len(like) if every else 1))
        return rows

    def estimate(self) -> float:
        """About the least seconds of a step, memory aside."""
        return replace(self, limit=None).decided().solver["objective"]

    def quick(self, solvers=CHEAPEST) -> Plan:
        """The fastest plan, memory aside, with no more done to save memory than was asked for, or than saves time too.

        ZeRO 2 sends as much as all-reduces do, and divides by data the optimizer's step, and sums of weights that several stages read.
        """
        decision = self.decided(solvers)
        plan = self.predicted(decision)
        if self.saving.zero is not None or self.mesh.data == 1:
            return plan
        cut = replace(decision)
        save(cut, self.cut, pure_nodes(self.cut), replace(self.saving, zero=2))
        other = self.predicted(cut)
        return other if other.step_seconds < (1 - NEAR) * plan.step_seconds else plan

    def drafted(self, solvers=CHEAPEST) -> Plan:
        """The quick plan, and what it took."""
        start = time.perf_counter()
        self.schedule.check(self.m, self.mesh.pipeline, self.schedule.chunks)
        plan = self.quick(solvers)
        plan.solver["trace_seconds"] = self.captured.seconds
        plan.solver["plan_seconds"] = time.perf_counter() - start
        logger("plan").info("%d micro-batches: %.4g s a step, %.4g GiB", self.m, plan.step_seconds, plan.peak_bytes / 2**30)
        return plan

    def finished(self, quick: Plan, cutoff: float = float("inf")) -> Plan:
        """The quick plan if it fits, or if no more may be done; else the best that does more to save memory.

        cutoff: seconds of a step; what is slower is of no use. Raises InfeasibleError; SlowerError if nothing that fits is as fast.
        """
        if not self.saving.open or self.limit is None or quick.peak_bytes <= self.limit:
            return quick
        start = time.perf_counter()
        try:
            plan = self.joint(quick, cutoff)
        except (Irregular, InfeasibleError) as reason:
            logger("plan").info("no joint plan: %s", reason)
            if isinstance(reason, InfeasibleError) and (reason.proven or 0.0) > self.limit:
                raise
            plan = self.ladder()
            if isinstance(reason, InfeasibleError) and plan.peak_bytes > self.limit:
                raise too_large(plan, f"nothing fits on mesh {self.mesh}: in the smallest plan found", reason.proven) from reason
        logger("plan").info("%d micro-batches, made to fit: %.4g s a step", self.m, plan.step_seconds)
        plan.solver["trace_seconds"] = self.captured.seconds
        plan.solver["plan_seconds"] = quick.solver["plan_seconds"] + time.perf_counter() - start
        return plan

    def decided(self, solvers=CHEAPEST) -> Decision:
        """What the fastest plan is."""
        given = (self.cut, self.mesh, self.cluster, pure_nodes, self.limit, self.pins)
        return decide(*given, solvers=solvers, saving=self.saving, chunks=self.schedule.chunks, narrow=self.narrow)

    def joint(self, quick: Plan, cutoff: float) -> Plan:
        """The fastest plan that fits, over ZeRO levels and recomputation too. Raises Irregular, InfeasibleError."""
        if self.schedule.chunks > 1:
            raise Irregular("a rank holds several stages")
        transient = [row.memory["transient"] for row in quick.stage_rows]
        staged = self.staged(self.cut, self.limit, self.saving.modes)
        plan = self.made_to_fit(staged, staged.chain, transient, cutoff)
        return plan if staged.chain.repeats or plan.solver["gap"] <= CLOSE else self.no_slower(plan)

    def made_to_fit(self, staged: Staged, chain: Chain, transient: Sequence[float], cutoff: float, parts=None) -> Plan:
        """The fastest plan that fits, of a problem. chain: of the program. parts: as for ``decide_jointly``.

        Raises Irregular, InfeasibleError, SlowerError.
        """
        found: dict[int, Plan] = {}  # by decision

        def measure(decision: Decision) -> list[float]:
            plan = found[id(decision)] = self.predicted(decision)
            return [sum(row.memory.values()) for row in plan.stage_rows]

        decision = decide_jointly(staged, self.cut, chain, transient, measure, self.effort, cutoff, parts)
        return replace(found[id(decision)], solver=decision.solver)

    def staged(self, program: Program, limit: float, modes: tuple[str, ...]) -> Staged:
        """The problem of deciding everything about a program of one micro-batch at once. Raises Irregular."""
        allowed = Allowed(self.saving.levels, modes, self.saving.hosts)
        given = (self.mesh, self.cluster, pure_nodes(program), limit, self.cuts.everywhere(self.pins), allowed, self.schedule)
        return staged_of(program, *given, self.narrow)

    def no_slower(self, plan: Plan) -> Plan:
        """A plan that was decided jointly, or one of the ``ladder``, should that fit and be faster."""
        other = self.ladder()
        if other.peak_bytes > self.limit or other.step_seconds >= plan.step_seconds:
            return plan
        taken = other.step_seconds
        bound = min(plan.solver["bound"], taken)  # that of plans which need as much beside as the other
        return replace(other, solver={**plan.solver, "objective": taken, "bound": bound, "gap": 1 - bound / taken})

    def ladder(self) -> Plan:
        """The fastest of some plans that save memory everywhere alike, or the smallest if none fits."""
        plans: list[Plan] = []
        for host in self.saving.hosts:
            savings = dict.fromkeys(self.saving.settled(saving) for saving in SAVINGS if saving.offload == host)
            plans += [replace(replace(self, saving=saving, limit=None).quick(), memory_limit=self.limit) for saving in savings]
            fitting = [plan for plan in plans if plan.peak_bytes <= self.limit]
            if fitting:
                return min(fitting, key=lambda plan: plan.step_seconds)
        return min(plans, key=lambda plan: plan.peak_bytes)


@dataclass(frozen=True)
class Known:
    """A problem, and what was learnt of its parts."""

    staged: Staged
    parts: dict[int, Part] = field(default_factory=dict)


@dataclass
class Outline:
    """About the fastest way to train a long model, memory aside, in the solver's own numbers: what ``LongTask`` drafts."""

    microbatches: int
    step_seconds: float
    peak_bytes: float  # of the fullest rank, as far as the problem knows
    known: Known
    seconds: float  # that it took
    limited: Known | None = None  # under the limit, with all that may be done to save memory
    bound: float | None = None  # seconds that nothing is faster than, memory aside, once it is asked for


@dataclass(frozen=True)
class LongTask(Task):
    """A task for a model of many layers: everything is decided at once, on a program with few of them."""

    def drafted(self, solvers=CHEAPEST) -> Outline | Plan:
        """What is fastest, memory aside."""
        try:
            return self.outlined()
        except Irregular as reason:
            logger("plan").info("planned op by op: %s", reason)
            return super().drafted(solvers)

    def outlined(self, blocks: int = BLOCKS) -> Outline:
        """What is fastest, memory aside, if there are so many blocks for each stage. Raises Irregular, PlanError."""
        start = time.perf_counter()
        self.schedule.check(self.m, self.mesh.pipeline, self.schedule.chunks)
        staged = self.staged(self.cuts.short.of(self.m, self.mesh), AMPLE, Saving(0, bool(self.saving.recompute)).modes)
        if len(staged.problem.chain) < blocks * self.mesh.pipeline:
            raise Irregular(f"there are few blocks for {self.mesh.pipeline} stages")
        if self.limit is not None and staged.problem.least_state > self.limit:
            raise too_small(staged.problem.least_state, self.limit, self.mesh)
        parts: dict[int, Part] = {}
        try:
            _, found = fastest(staged.problem, parts)
        except Infeasible as error:
            raise Irregular(str(error)) from error
        logger("plan").info("%d micro-batches: %.4g s a step, %.4g GiB", self.m, found.objective, max(found.memory) / 2**30)
        return Outline(self.m, found.objective, max(found.memory), Known(staged, parts), time.perf_counter() - start)

    def limited(self, draft: Outline) -> Known:
        """The problem of making a draft fit, with what was learnt of it under whatever limit."""
        limit = AMPLE if self.limit is None else self.limit
        if draft.limited is None:
            draft.limited = Known(self.staged(self.cuts.short.of(self.m, self.mesh), limit, self.saving.modes))
        staged = draft.limited.staged
        return replace(draft.limited, staged=replace(staged, problem=replace(staged.problem, limit=limit)))

    def least(self, draft: Outline) -> float:
        """Seconds of a step, about the least that a plan that fits can take. Raises InfeasibleError."""
        if self.limit is None or draft.peak_bytes <= LITTLE * self.limit:
            return draft.step_seconds
        try:
            known = self.limited(draft)
            return max(draft.step_seconds, proven(known.staged.problem, known.parts))
        except Irregular:  # it is planned op by op
            return draft.step_seconds
        except OutOfMemory as error:
            raise nothing_fits(error, self.mesh, every=True) from error

    def finished(self, draft: Outline | Plan, cutoff: float = float("inf")) -> Plan:
        """The plan of an outline if it fits; else the best that does."""
        if isinstance(draft, Plan):
            return super().finished(draft, cutoff)
        start = time.perf_counter()
        try:
            plan = self.filled_in(draft, cutoff)
        except Irregular as reason:
            logger("plan").info("planned op by op: %s", reason)
            return super().finished(super().drafted(), cutoff)
        plan.solver["trace_seconds"] = self.captured.seconds
        plan.solver["plan_seconds"] = draft.seconds + time.perf_counter() - start
        return plan

    def filled_in(self, draft: Outline, cutoff: float) -> Plan:
        """Raises Irregular, InfeasibleError, SlowerError."""
        limit = AMPLE if self.limit is None else self.limit
        chain = chain_of(self.cut, fold(self.cut), pure_nodes(self.cut))
        transient = [0.0] * self.mesh.pipeline
        if draft.peak_bytes <= limit:
            solution = solve_folded(draft.known.staged.problem, progress=logger("plan").info, parts=draft.known.parts)
            decision = decision_of(self.cut, chain, draft.known.staged, solution.answer)
            seconds = draft.seconds + solution.seconds
            decision.solver = notes_of(solution, solution.bound, draft.known.staged.problem, len(decision.chosen), seconds)
            plan = self.predicted(decision)
            if plan.peak_bytes <= limit:
                return plan
            transient = [row.memory["transient"] for row in plan.stage_rows]
        elif draft.peak_bytes <= LITTLE * limit and self.saving.recompute is None:
            try:
                return self.squeezed(draft, limit, chain, cutoff)
            except PlanError as reason:
                logger("plan").info("not without computing again: %s", reason)
        known = self.limited(draft)
        return self.made_to_fit(known.staged, chain, transient, cutoff, known.parts)

    def squeezed(self, draft: Outline, limit: float, chain: Chain, cutoff: float) -> Plan:
        """A plan that fits, computes nothing again, and takes hardly longer than any that need not fit. Raises Irregular, PlanError."""
        staged, parts = draft.known.staged, draft.known.parts
        if draft.bound is None:
            draft.bound = solve_folded(staged.problem, parts=parts).bound
        staged = replace(staged, problem=replace(staged.problem, limit=limit))
        cutoff = min(cutoff, draft.bound * (1 + NEAR))
        plan = self.made_to_fit(staged, chain, [0.0] * self.mesh.pipeline, cutoff, parts)
        plan.solver.update(bound=draft.bound, gap=1 - draft.bound / plan.solver["objective"])
        return plan


def too_small(least: float, limit: float, mesh: Mesh) -> InfeasibleError:
    return InfeasibleError(
        f"nothing fits on mesh {mesh}: weights, gradients and optimizer states alone take {least / 2**30:.3g} GiB of a rank, in the mean "
        f"over the stages; the limit is {limit / 2**30:.3g} GiB",
        hint="use more devices along tensor or pipeline", limit=limit, least=least, always=True,
    )  # fmt: skip


def plan_for(
    captured, program: Program, title, mesh, cluster, limit, m, pins, solvers=CHEAPEST, saving=NOTHING, schedule=None
) -> Plan:
    """The plan for ``m`` micro-batches. ``program`` is the canonical one; ``limit``: bytes a rank."""
    given = (captured, Cuts(program), title, mesh, cluster, limit, pins, saving, schedule or default_schedule(mesh), m)
    task = Task(*given)
    return task.finished(task.drafted(solvers))


def convert(program: Program, decision: Decision) -> Program:
    """The program with all that was decided written on its nodes, conversions explicit."""
    placed = passes.run("zero", apply(program, decision), decision.zero)
    regions = passes.run("checkpoint_regions", passes.run("insert_conversions", placed), decision.regions, decision.kept)
    return passes.run("bucket_gathers", regions)
