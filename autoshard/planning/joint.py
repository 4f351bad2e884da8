"""Decide everything at once, under memory: shardings, ZeRO levels, what is computed again, and stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from autoshard.cluster import Cluster
from autoshard.errors import MORE_ROOM, InfeasibleError, PlanError, SlowerError
from autoshard.logs import logger
from autoshard.mesh import Mesh
from autoshard.planning.chain import Chain, Irregular, chain_of
from autoshard.planning.pins import Pin
from autoshard.planning.planner import Decision, Narrow, choices_of
from autoshard.planning.saving import ANY, KEPT, PLAIN
from autoshard.planning.staging import Allowed, Staged, stage_problem
from autoshard.program import Program
from autoshard.schedule import Schedule
from autoshard.solvers.columns import Part
from autoshard.solvers.exact import StagedSolution, TooSlow
from autoshard.solvers.folded import Effort, OutOfMemory
from autoshard.solvers.problem import SolverError
from autoshard.solvers.staged import StagedAnswer, StagedProblem, evaluate_staged, stage_of
from autoshard.solvers.whole import proven, solve_staged

_TRIES = 8  # of plans whose memory was estimated badly
_ROUGH = 0.02  # a gap that is small enough while it is not known what plans need beside
_SLOW, _ROOM = 0.01, 0.03  # a plan so much above the bound that leaves so much memory: the limit was felt too early


def staged_of(
    program: Program,
    mesh: Mesh,
    cluster: Cluster,
    pure: set[fx.Node],
    limit: float,
    pins: Mapping[str, Pin],
    allowed: Allowed,
    schedule: Schedule,
    narrow: Narrow | None = None,
) -> Staged:
    """The problem of deciding everything at once.

    Args:
        program: of one micro-batch; it may be abridged.
        pure: values that any stage can compute for itself.
        limit: bytes a rank.
        pins: of the values in all like layers, by name of node.
        narrow: as for ``decide``.

    Raises Irregular: the model has no blocks that could be told apart, or fewer than there are stages.
    """
    folding, _, annotated = choices_of(program, mesh, pins, narrow)
    try:
        return _staged(program, annotated, chain_of(program, folding, pure), pure, mesh, cluster, schedule, limit, allowed)
    except Irregular as reason:
        if not folding.layers or any("stands_for" in node.meta for node in program.ops):
            raise
        logger("plan").info("layers are taken for different ones: %s", reason)
    chain = chain_of(program, replace(folding, layers=[]), pure)
    return _staged(program, annotated, chain, pure, mesh, cluster, schedule, limit, allowed)


def _staged(program: Program, annotated, chain: Chain, pure, mesh: Mesh, *known) -> Staged:
    if len(chain.parts) < mesh.pipeline:
        raise Irregular(f"{len(chain.parts)} blocks can't fill {mesh.pipeline} stages")
    return stage_problem(program, annotated, chain, pure, mesh, *known)


def decide_jointly(
    staged: Staged,
    program: Program,
    chain: Chain,
    transient: Sequence[float],
    measure: Callable[[Decision], Sequence[float]],
    effort: Effort,
    cutoff: float = float("inf"),
    parts: dict[int, Part] | None = None,
) -> Decision:
    """The fastest decision found that fits, with a proven bound.

    The problem is told what a plan needs beside what it accounts for, its ``reserve``; how much that is, only a plan can tell. The bound
    that a decision comes with is that of the problem with the decision's own reserve: no plan that needs as much beside is faster.

    Args:
        staged: the problem.
        program, chain: of one micro-batch, whole; what is decided is decided for it.
        transient: bytes of each stage that the problem knows nothing of, as a first guess.
        measure: predicted peak bytes of each stage, of a decision.
        effort: how hard the solver tries, but it looks at least once.
        cutoff: seconds of a step; what is slower is of no use.
        parts: what was learnt from the same problem with another limit; is added to.

    Raises InfeasibleError: nothing fits. SlowerError: nothing that fits is as fast as that.
    """
    start = time.perf_counter()
    mesh, limit = program.mesh, staged.problem.limit
    parts = {} if parts is None else parts
    room = _Room(tuple(transient))
    best: Decision | None = None
    rough = replace(effort, gap=max(effort.gap, _ROUGH))  # until the reserve is a plan's
    for _ in range(_TRIES):
        if room.known() and best is not None:
            break
        problem = replace(staged.problem, reserve=room.now)
        try:
            now = replace(rough or effort, seconds=max(1.0, start + effort.seconds - time.perf_counter()))
            solution = solve_staged(problem, now, progress=logger("plan").info, parts=parts, cutoff=cutoff)
        except TooSlow as error:
            if best is not None:
                break
            raise SlowerError(str(error), least=error.least) from error
        except SolverError as error:
            if best is not None:
                break
            raise PlanError(f"no plan was found: {error}", hint="try another mesh, or another number of micro-batches") from error
        except OutOfMemory as error:
            if best is not None:
                break
            if room.less():
                continue
            if error.answer is None or room.smallest:
                raise nothing_fits(error, mesh, not any(room.now)) from error
            room.smallest = True  # by the problem; what it needs beside may be less, too
            evaluation = evaluate_staged(problem, error.answer)
            solution = StagedSolution(error.answer, evaluation, 0.0, time.perf_counter() - start, "smallest")
            refusal = error
        decision = decision_of(program, chain, staged, solution.answer)
        needed = measure(decision)
        # what the problem did not see of this plan, or saw too large, it is told of the next
        unseen = tuple(r + n - known for r, n, known in zip(room.now, needed, solution.evaluation.memory))
        first, rough = rough is not None, None
        if max(needed) > limit:
            if room.smallest and best is None:
                raise nothing_fits(refusal, mesh, False) from refusal
            room.missed(unseen)
            continue
        room.found(unseen)
        bound = min(solution.objective, proven(problem, unseen, solution, parts, effort.seconds))
        decision.solver = notes_of(solution, bound, problem, len(decision.chosen), time.perf_counter() - start)
        gap = solution.gap if staged.chain.repeats else decision.solver["gap"]  # of large problems, no more than two are solved
        last = best is not None and (staged.chain.repeats or decision.solver["objective"] >= best.solver["objective"])
        best = decision if best is None else min(best, decision, key=lambda d: d.solver["objective"])
        if last or gap < max(_SLOW, effort.gap) or (not first and max(needed) > limit * (1 - _ROOM)):
            break
    if best is not None:
        return best
    worst = max(range(len(needed)), key=needed.__getitem__)
    raise InfeasibleError(
        f"no plan was found that fits: in the last, a rank of stage {worst} needs {needed[worst] / 2**30:.3g} GiB, "
        f"the limit is {limit / 2**30:.3g} GiB",
        hint=MORE_ROOM, limit=limit, least=needed[worst], stage=worst,
    )  # fmt: skip


class _Room:
    """What the problem's reserve is to be, by stage, from what plans needed that were found with others.

    now: bytes. smallest: whether the smallest answer was looked at, as there was no other.
    """

    def __init__(self, first: tuple[float, ...]):
        self.now, self.smallest = first, False
        self._nothing = (0.0,) * len(first)
        self._solved: tuple[float, ...] | None = None  # the last that the problem had an answer with, which did not fit
        self._full: tuple[float, ...] | None = None  # the last that it had none with, if it has one with less
        self._enough = self._nothing  # of the best plan
        self._failed: list[tuple[float, ...]] = []
        self._tried: set[tuple[int, ...]] = set()

    def known(self) -> bool:
        """Whether this was tried; from now on, it was."""
        key = tuple(map(round, self.now))
        found = key in self._tried
        self._tried.add(key)
        return found

    def missed(self, unseen: tuple[float, ...]) -> None:
        """A plan needed more beside than it was given, and did not fit."""
        self._solved = self.now
        self._failed.append(unseen)
        if self._full is not None:
            self.now = _between(self.now, self._full)
            return
        self.now = tuple(map(max, *self._failed)) if len(self._failed) > 1 else unseen  # plans that differ must not take turns
        if tuple(map(round, self.now)) in self._tried:
            self.now = _between(self.now, self._enough)

    def found(self, unseen: tuple[float, ...]) -> None:
        """A plan fits that needs so much beside."""
        self.now = self._enough = unseen

    def less(self) -> bool:
        """The problem has no answer: go on with less, if that was not tried."""
        less = self._nothing if self._solved is None else _between(self._solved, self.now)
        if tuple(map(round, less)) in self._tried:
            return False
        self._full, self.now = self.now if self._solved else None, less
        return True


def _between(some: tuple[float, ...], others: tuple[float, ...]) -> tuple[float, ...]:
    return tuple((a + b) / 2 for a, b in zip(some, others))


def notes_of(solution: StagedSolution, bound: float, problem: StagedProblem, nodes: int, seconds: float) -> dict:
    """The solver's account, as a plan keeps it."""
    strategies = sum(len(op.costs) for op in problem.ops)
    return {
        "name": "HiGHS",
        "status": solution.status,
        "objective": solution.objective,
        "bound": bound,
        "gap": max(0.0, 1 - bound / solution.objective),
        "variables": strategies,
        "ops": len(problem.ops),
        "strategies": strategies,
        "folded": nodes - len(problem.ops),
        "seconds": seconds,
    }


def nothing_fits(error: OutOfMemory, mesh: Mesh, every: bool) -> InfeasibleError:
    """every: what is proven holds for every plan, not only for those that need as much beside as one that was tried."""
    gib = 2.0**30
    known = error.proven if every and error.proven > 0 else None
    bound = f" (no plan needs less than {known / gib:.3g} GiB)" if known else ""
    return InfeasibleError(
        f"nothing fits on mesh {mesh}, with any ZeRO level and recomputation that is allowed: a rank of stage {error.stage} needs "
        f"{error.least / gib:.3g} GiB in the smallest plan found{bound}, the limit is {error.limit / gib:.3g} GiB",
        hint=MORE_ROOM, limit=error.limit, least=error.least, proven=known, stage=error.stage,
    )  # fmt: skip


def decision_of(program: Program, chain: Chain, staged: Staged, answer: StagedAnswer) -> Decision:
    """What an answer means for the whole program. Raises Irregular if it was made for another."""
    ways = staged.read(answer, program, chain)
    again = {chain.block_of[node] for node, way in ways.items() if node in chain.block_of and way.mode not in (ANY, PLAIN)}
    stages = [stage_of(answer.first, block) for block in range(len(chain.blocks))]
    return Decision(
        chosen={node: way.strategy for node, way in ways.items()},
        stages={node: stages[chain.block_of[node]] for node in program.ops},
        zero={program.params[node.name].name: way.level for node, way in ways.items() if way.level},
        regions={node.name: chain.block_of[node] for node in program.ops if chain.block_of[node] in again},
        kept=[node.name for node, way in ways.items() if way.mode == KEPT],
        offload=[program.params[node.name].name for node, way in ways.items() if way.host],
    )
