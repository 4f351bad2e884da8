"""Where the pipeline may be cut, and where it is: blocks between narrow places of the graph, handed to the cut solver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from torch import fx

from autoshard.cluster import Cluster
from autoshard.cost.communication import send
from autoshard.cost.memory import state_bytes
from autoshard.errors import PlanError
from autoshard.mesh import Mesh
from autoshard.placement import cut_over_data, local_shape
from autoshard.planning.problem import move_seconds
from autoshard.program import Program, is_getitem, operands, result_of, tensors, where
from autoshard.rules.notation import Strategy
from autoshard.solvers.cuts import Boundary, CutProblem, Item

Priced = dict[fx.Node, tuple[float, float]]
"""Per op: (seconds of one micro-batch forward and backward, bytes saved for backward)."""


@dataclass
class Blocks:
    """The ops in order, grouped between legal cut points, and the cut problem over them."""

    groups: list[list[fx.Node]]
    problem: CutProblem

    def stages(self, first: tuple[int, ...]) -> dict[fx.Node, int]:
        """Stage of every op, given the first block of each stage."""
        out = {}
        for i, group in enumerate(self.groups):
            stage = sum(1 for f in first if f <= i) - 1
            out.update(dict.fromkeys(group, stage))
        return out


def alive_across(program: Program, pure: set[fx.Node]) -> list[tuple[fx.Node, list[fx.Node]]]:
    """For each op, the values that a cut right behind it would have to send."""
    ops = program.ops
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(ops):
        for x in node.all_input_nodes:
            last[x] = i
    for x in program.output.all_input_nodes:
        last[x] = len(ops)
    out, alive = [], []
    for i, node in enumerate(ops):
        if node not in pure and last.get(node, -1) > i:
            alive.append(node)
        alive = [n for n in alive if last[n] > i]
        out.append((node, list(alive)))
    return out


def blocks(
    program: Program,
    pure: set[fx.Node],
    chosen: dict[fx.Node, Strategy],
    priced: Priced,
    mesh: Mesh,
    cluster: Cluster,
    limit: float | None,
    zero: dict[str, int],
    stages: int,
) -> Blocks:
    """The cut problem, into so many stages. ``zero``: ZeRO level by parameter name.

    Raises PlanError if the graph has fewer legal cut points than the mesh has cuts.
    """
    groups, alive = groups_of(program, pure, chosen, mesh, stages)
    bounds = [Boundary(crossing_seconds(values, chosen, mesh, cluster), True) for values in alive]
    seen: set[fx.Node] = set()
    items = [_item(program, group, chosen, priced, mesh, cluster, zero, seen) for group in groups]
    return Blocks(groups, CutProblem(tuple(items), tuple(bounds), stages, program.microbatches, limit))


def groups_of(
    program: Program,
    pure: set[fx.Node],
    chosen: dict[fx.Node, Strategy],
    mesh: Mesh,
    stages: int,
    regions: Mapping[str, int] | None = None,
) -> tuple[list[list[fx.Node]], list[list[fx.Node]]]:
    """The ops in order, in groups between which the pipeline may be cut, and the values that cross each place between two.

    regions: number of its region by op name: cut within one only where there are too few other places. PlanError as for ``blocks``.
    """
    ops, regions = program.ops, regions or {}
    alive = alive_across(program, pure)
    sizes = [sum(_bytes(n, chosen, mesh) for n in values) for _, values in alive]
    window = max(1, len(ops) // (4 * stages))
    tuples = {n for n in ops if isinstance(n.meta["val"], (tuple, list))}
    # a stage needs work of its own: cuts are behind ops that are not computed in every stage anyway
    possible = [bool(values) and node not in pure and not any(v in tuples for v in values) for node, values in alive[:-1]]
    whole = [ok and (a.name not in regions or regions[a.name] != regions.get(b.name)) for ok, a, b in zip(possible, ops, ops[1:])]
    for allowed in (whole, possible):
        legal = [ok and size <= least for ok, size, least in zip(allowed, sizes, narrowest(allowed, sizes, window))]
        if sum(legal) >= stages - 1:
            break
    else:
        legal = possible
    cuts = sum(legal)
    if cuts < stages - 1:
        each = f" with {stages // mesh.pipeline} stages a rank" if stages > mesh.pipeline else ""
        at = next((n for n in ops if n not in pure), None)
        raise PlanError(
            f"the mesh has pipeline={mesh.pipeline}{each}, which needs {stages - 1} cuts; the model has only {cuts} legal cut points",
            where=where(at) if at else None,
            hint=f"use a pipeline axis of at most {(cuts + 1) * mesh.pipeline // stages}",
        )
    groups: list[list[fx.Node]] = [[]]
    for node, ends in zip(ops, [*legal, False]):
        groups[-1].append(node)
        if ends:
            groups.append([])
    return groups, [values for (_, values), ends in zip(alive, legal) if ends]


def crossing_seconds(values: Iterable[fx.Node], chosen: dict[fx.Node, Strategy], mesh: Mesh, cluster: Cluster) -> float:
    """What each of the two stages beside a cut spends on it: the one before sends forward, the one behind it backward."""
    return sum(send(_bytes(v, chosen, mesh), mesh, cluster).seconds for v in values)


def narrowest(possible: list[bool], sizes: list[float], window: int) -> list[float]:
    """The smallest size, but for zeros, of possible places at most ``window`` from each; infinite if there is none."""
    ends = [np.inf] * window
    widths = np.array([*ends, *(size if ok and size else np.inf for ok, size in zip(possible, sizes)), *ends], dtype=float)
    return np.lib.stride_tricks.sliding_window_view(widths, 2 * window + 1).min(axis=1).tolist() if possible else []


def _bytes(node: fx.Node, chosen, mesh: Mesh) -> float:
    producer, index = result_of(node)
    val = tensors(producer.meta["val"])[index]
    return prod(local_shape(tuple(val.shape), chosen[producer].results[index], mesh.sizes, (0, 0))) * val.element_size()


def _item(program: Program, group, chosen, priced: Priced, mesh: Mesh, cluster: Cluster, zero, seen: set[fx.Node]) -> Item:
    seconds = once = resident = activation = 0.0
    for node in group:
        if is_getitem(node):
            continue
        time, saved = priced[node]
        seconds += time
        activation += saved
        for x, layout in zip(operands(node), chosen[node].operands):
            producer, index = result_of(x)
            src = chosen[producer].results[index]
            level = zero.get(program.params[x.name].name, 0) if x.name in program.params else 0
            if level == 3:  # gathered forward, and again backward
                piece = cut_over_data(src, tuple(x.meta["val"].shape), mesh.sizes)
                forward, backward, step = move_seconds(program, (producer, index), piece, layout, mesh, cluster) or (0.0, 0.0, 0.0)
                backward += forward
            else:
                forward, backward, step = move_seconds(program, (producer, index), src, layout, mesh, cluster) or (0.0, 0.0, 0.0)
            seconds += forward + backward
            if x.name in program.params and x not in seen:
                seen.add(x)
                once += step
                param = program.params[x.name]
                held = prod(local_shape(param.shape, src, mesh.sizes, (0, 0)))
                itemsize = x.meta["val"].element_size()
                mixed, added_up = param.master is not None, program.microbatches > 1
                state = state_bytes(held, itemsize, mixed, level, mesh.data, param.requires_grad, added_up)
                resident += sum(state.values())
    return Item(seconds, once, resident, activation)
