"""Cut a program anew whose ops are decided: for a schedule under which ranks hold several stages, all ranks about as long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, permutations

from torch import fx

from autoshard.cluster import Cluster
from autoshard.cost.pipeline import StageTime, step_seconds
from autoshard.errors import PlanError
from autoshard.mesh import Mesh
from autoshard.planning.planner import Decision
from autoshard.planning.stages import crossing_seconds, groups_of
from autoshard.program import Program
from autoshard.schedule import Schedule
from autoshard.solvers.fastest import even

_STRIDES = (16, 4, 1)  # groups that are moved at once


def recut(
    program: Program, decision: Decision, pure: set[fx.Node], mesh: Mesh, cluster: Cluster, placed: Schedule, seconds: Mapping[str, float]
) -> dict[fx.Node, int]:
    """The stage of every op.

    Args:
        program: of one micro-batch.
        pure: values that any stage can compute for itself.
        placed: how many stages a rank holds, and which.
        seconds: of a micro-batch, by op name.

    Every stage reads a weight that none before does: by these a stage is known in another mode of the model. Raises PlanError if there are
    too few for so many stages.
    """
    stages = mesh.pipeline * placed.chunks
    groups, crossing = _with_weights(program, *groups_of(program, pure, decision.chosen, mesh, stages, decision.regions))
    if len(groups) < stages:
        raise PlanError(f"{len(groups)} groups of ops with weights can't fill {stages} stages", hint="use another schedule")
    times = [sum(seconds.get(node.name, 0.0) for node in group) for group in groups]
    sends = [crossing_seconds(values, decision.chosen, mesh, cluster) for values in crossing]
    first = balanced(times, sends, placed, mesh.pipeline, program.microbatches)
    ends = [*first[1:], len(groups)]
    return {node: s for s, (start, end) in enumerate(zip(first, ends)) for group in groups[start:end] for node in group}


def _with_weights(program: Program, groups: list[list[fx.Node]], crossing: list[list[fx.Node]]) -> tuple[list, list]:
    """The same with groups joined until each reads a weight that none before does."""
    seen: set[fx.Node] = set()
    found, at = [], []
    for group, values in zip(groups, [*crossing, []]):
        read = {x for node in group for x in node.all_input_nodes if x.name in program.params}
        weights = {x for x in read if program.params[x.name].kind == "parameter"} - seen
        if weights or not found:
            found.append([])
            at.append(values)
        seen |= weights
        found[-1] += group
        at[-1] = values
    return found, at[:-1]


def balanced(times: Sequence[float], sends: Sequence[float], placed: Schedule, ranks: int, microbatches: int) -> tuple[int, ...]:
    """The first group of each stage: stages as even as can be, and then groups passed from one to another while the step gets shorter.

    times: seconds of a micro-batch in each group. sends: between each two, what a cut there costs both sides if they are on two ranks.
    """
    stages, until = ranks * placed.chunks, [0.0, *accumulate(times)]
    apart = [placed.rank_of(s, ranks) != placed.rank_of(s + 1, ranks) for s in range(stages - 1)]

    def step(first: Sequence[int]) -> float:
        cuts = [apart[s] * sends[at - 1] for s, at in enumerate(first[1:])]
        work = [until[b] - until[a] for a, b in zip(first, [*first[1:], len(times)])]
        totals = [t + before + behind for t, before, behind in zip(work, [0.0, *cuts], [*cuts, 0.0])]
        return step_seconds(placed.name, ranks, [StageTime(t / 3, t / 3, t / 3) for t in totals], microbatches)

    best = even(times, stages)
    least = step(best)
    for stride in _STRIDES:
        moved = True
        while moved:
            moved = False
            for giver, taker in permutations(range(stages), 2):
                other = _passed_on(best, giver, taker, stride)
                if all(a < b for a, b in zip(other, [*other[1:], len(times)])):
                    seconds = step(other)
                    if seconds < least * (1 - 1e-9):
                        best, least, moved = other, seconds, True
    return best


def _passed_on(first: Sequence[int], giver: int, taker: int, groups: int) -> tuple[int, ...]:
    """The first group of each stage after one has given some to another, and those between have handed on as many."""
    if giver < taker:
        return tuple(at - groups if giver < s <= taker else at for s, at in enumerate(first))
    return tuple(at + groups if taker < s <= giver else at for s, at in enumerate(first))
