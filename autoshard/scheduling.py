"""The schedule of a plan. Plans are made for 1F1B, for which the solvers know times, memory and bounds; here the others are tried.

What was decided about ops, weights and layers stays. Where ranks hold several stages the pipeline is cut anew; every try is predicted as
any plan is. GPipe is not tried: it takes as long as 1F1B, and holds more.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autoshard.cost.pipeline import StageTime, crowded_seconds, step_seconds
from autoshard.errors import PlanError
from autoshard.logs import logger
from autoshard.passes.cut_stages import pure_nodes
from autoshard.planning.comparison import NEAR
from autoshard.planning.plan import Plan
from autoshard.planning.planner import restore
from autoshard.planning.recut import recut
from autoshard.schedule import TRIED, Schedule, schedule_of
from autoshard.solvers.folded import Effort
from autoshard.tasks import LITTLE, Outline, Task

TRIES = 2
"""Plans that are made, at most, of one schedule."""

MORE = 1.25
"""Times what a plan needs too much under a schedule, it is to need less under 1F1B: cut anew, not all ranks need less by the same."""

ROUGH = Effort(20.0, gap=0.02)
"""How hard solvers try to make a plan fit in less memory than there is."""

USUAL = schedule_of("1F1B")


@dataclass(frozen=True)
class _Trial:
    """Seconds that a schedule may take if all goes well, of what was planned for another."""

    hoped: float
    task: Task
    made: Plan | Outline
    placed: Schedule


def quickest(best: Plan, made: Iterable[tuple[Task, Plan | Outline]], draft: Plan | Outline | None) -> Plan:
    """``best``, a plan for 1F1B, or a plan that another schedule makes faster, by at least ``NEAR``.

    made: ``best`` and what else was planned for 1F1B, memory aside; what does not fit as it is, is left out.
    draft: what ``best`` was made of. Where the fastest schedule needs more memory than there is, that is made to fit in less.
    """
    start = time.perf_counter()
    made = list(made)
    trials = [
        _Trial(hoped(task, plan, placed), task, plan, placed)
        for task, plan in made
        if plan.peak_bytes <= best.memory_limit and task.mesh.pipeline > 1
        for placed in TRIED
        if _possible(placed, task)
    ]
    plans: dict[int, Plan] = {}  # by outline
    found: dict[Schedule, Plan] = {USUAL: best}
    misfits: dict[Schedule, Plan] = {}
    tried: Counter[Schedule] = Counter()
    for trial in sorted(trials, key=lambda trial: trial.hoped):
        if trial.hoped > (1 - NEAR) * min(plan.step_seconds for plan in found.values()):
            break
        if tried[trial.placed] == TRIES:
            continue
        tried[trial.placed] += 1
        try:
            usual = trial.made
            if isinstance(usual, Outline):
                usual = plans[id(trial.made)] = plans.get(id(trial.made)) or trial.task.finished(trial.made)
            plan = under(trial.placed, trial.task, usual)
        except PlanError as reason:
            logger("plan").info("%s: %s", trial.placed.title, reason)
            continue
        logger("plan").info("%s: %.4g s a step, %.4g GiB", trial.placed.title, plan.step_seconds, plan.peak_bytes / 2**30)
        into = found if plan.peak_bytes <= best.memory_limit else misfits
        if trial.placed not in into or plan.step_seconds < into[trial.placed].step_seconds:
            into[trial.placed] = plan
    least = min(plan.step_seconds for plan in found.values())
    hopes = [placed for placed, plan in misfits.items() if plan.step_seconds < (1 - NEAR) * least]
    if hopes and draft is not None:
        hope = min(hopes, key=lambda placed: misfits[placed].peak_bytes)
        task = next(task for task, plan in made if (task.mesh, task.m) == (misfits[hope].mesh, misfits[hope].microbatches))
        plan = in_less(hope, task, misfits[hope], draft, least)
        if plan is not None:
            found[hope] = min(found.get(hope, plan), plan, key=lambda plan: plan.step_seconds)
            least = min(least, plan.step_seconds)
    winner = next(found[placed] for placed in (USUAL, *TRIED) if placed in found and (1 - NEAR) * found[placed].step_seconds <= least)
    rows = [_row(plan) for plan in (*found.values(), *(plan for placed, plan in misfits.items() if placed not in found))]
    facts = {**winner.solver, "schedules": rows}
    if winner is not best:
        facts["solved_for"] = USUAL.name
        facts.pop("gap", None)  # it is of another schedule
    if "plan_seconds" in best.solver:
        facts["plan_seconds"] = best.solver["plan_seconds"] + time.perf_counter() - start
    return replace(winner, solver=facts)


def in_less(placed: Schedule, task: Task, misfit: Plan, draft: Plan | Outline, cutoff: float) -> Plan | None:
    """A plan under a schedule whose ``misfit`` needs too much memory: planned for 1F1B with as much less. None if that does not help.

    cutoff: seconds of a step; what is slower is of no use.
    """
    room = task.limit - MORE * (misfit.peak_bytes - task.limit)
    if isinstance(draft, Outline) and draft.peak_bytes > LITTLE * room:  # layers would be computed again, and solvers take long
        return None
    try:
        plan = under(placed, task, replace(task, limit=room, effort=ROUGH).finished(draft))
    except PlanError as reason:
        logger("plan").info("%s in %.4g GiB: %s", placed.title, room / 2**30, reason)
        return None
    logger("plan").info("%s in less: %.4g s a step, %.4g GiB", placed.title, plan.step_seconds, plan.peak_bytes / 2**30)
    return plan if plan.step_seconds < cutoff and plan.peak_bytes <= task.limit else None


def _row(plan: Plan) -> dict:
    placed = replace(schedule_of(plan.schedule), chunks=plan.chunks)
    known = {"schedule": placed.title, "mesh": str(plan.mesh), "microbatches": plan.microbatches}
    return {**known, "step_seconds": plan.step_seconds, "fits": plan.peak_bytes <= plan.memory_limit}


def _possible(placed: Schedule, task: Task) -> bool:
    try:
        placed.check(task.m, task.mesh.pipeline, placed.chunks)
    except PlanError:
        return False
    return True


def under(placed: Schedule, task: Task, plan: Plan) -> Plan:
    """What was planned for ``task``, run by another schedule. Raises PlanError."""
    placed.check(task.m, task.mesh.pipeline, placed.chunks)
    decision = restore(task.cut, task.mesh, plan.strategies, plan.stages)
    decision.zero, decision.regions, decision.kept, decision.offload = plan.zero, plan.regions, plan.kept, plan.offload
    if placed.chunks > 1:
        decision.stages = recut(task.cut, decision, pure_nodes(task.cut), task.mesh, task.cluster, placed, _op_seconds(plan))
    return replace(replace(task, schedule=placed).predicted(decision), solver=plan.solver)


def _op_seconds(plan: Plan) -> dict[str, float]:
    """Seconds of a micro-batch by op name: a stage's communication and what it computes again are spread over its ops."""
    own: Counter[int] = Counter()
    for op in plan.ops:
        own[op.stage] += op.forward + op.backward
    sends: Counter[int] = Counter()
    for row in plan.collectives:
        if row.kind == "send":
            sends[row.stage] += row.seconds
    more = defaultdict(lambda: 1.0, {s.index: (s.seconds - sends[s.index]) / own[s.index] for s in plan.stage_rows if own[s.index]})
    return {op.node: (op.forward + op.backward) * more[op.stage] for op in plan.ops}


def hoped(task: Task, made: Plan | Outline, placed: Schedule) -> float:
    """About the least seconds of a step under a schedule, of what was planned for 1F1B: if no more is sent."""
    m, ranks, crowding = task.m, task.mesh.pipeline, task.cluster.crowding(task.mesh.size)
    if isinstance(made, Outline):
        once, crowding = 0.0, 1.0
        work = [made.step_seconds / (m + ranks - 1)] * ranks
        forward, parts = 1 / 3, placed.splits
    else:
        once = max(row.once for row in made.stage_rows)
        work = [row.seconds for row in made.stage_rows]
        forward = sum(op.forward for op in made.ops) / (sum(op.forward + op.backward for op in made.ops) or 1.0)
        parts = placed.splits and not made.regions
    longest = max(work) if placed.chunks == 1 else (max(work) + sum(work) / ranks) / 2  # smaller pieces are dealt out more evenly
    rest = longest / placed.chunks * (1 - forward)
    stage = StageTime(longest / placed.chunks * forward, rest / 2 if parts else rest, rest / 2 if parts else 0.0)
    seconds = step_seconds(placed.name, ranks, [stage] * ranks * placed.chunks, m, [once])
    return crowded_seconds(seconds, [m * t + once for t in work], crowding)
