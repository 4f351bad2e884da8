"""What a model's blocks are: the layers that repeat, and what lies between them, which is cut at narrow places where it is long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np
from torch import fx

from autoshard.cost.compute import ALIASES, WINDOWS
from autoshard.planning.fold import Folding
from autoshard.planning.stages import alive_across
from autoshard.program import Program, is_getitem, op_kind, tensors
from autoshard.rules import rule_for

EVEN = 2.0
"""What the sum of the squares of the pieces' shares of the work weighs, beside the bytes that are alive at cuts, as a share of all that are
made: a chain of n values that are alike is cut into about sqrt(EVEN n) pieces."""

STEP = 1.5
"""By which that is changed where pieces are too many, or too few."""

CUT = 0.01
"""What every cut weighs, in the same measure."""

FEWEST, MOST = 8, 24
"""Pieces of a model without layers, where its narrow places allow it: two for each stage, if those are more, but one for each matmul."""

SHORT = 4
"""Matmuls of a run between layers, with fewer of which it stays whole: embeddings, heads and losses."""


@dataclass(frozen=True)
class Span:
    """Ops from position ``start`` of ``program.ops`` up to ``end``. layer: which of the folding's layers they are an instance of, if one.
    again: backward may compute them again."""

    start: int
    end: int
    layer: int | None
    again: bool


def spans_of(program: Program, folding: Folding, pure: set[fx.Node]) -> list[Span]:
    """All ops in spans, in order: instances of layers, and pieces of the runs between them.

    A long run is cut where few bytes are alive, into pieces of about equal work; pieces, and layers, may be computed again, but not the
    piece that ends the model, which backward needs at once. ``pure``: values that any stage can compute for itself.
    """
    ops = program.ops
    layers = sorted((start, start + each.period, kind) for kind, each in enumerate(folding.layers) for start in each.starts)
    ends = [0, *(end for _, end, _ in layers)]
    runs = [(a, b) for a, b in zip(ends, [*(start for start, _, _ in layers), len(ops)]) if a < b]
    matmuls = {run: sum(_flops(node) > 0 for node in ops[slice(*run)] if node not in pure) for run in runs}
    long = [run for run in runs if not layers or matmuls[run] >= SHORT]
    fewest = 0 if layers else min(max(FEWEST, 2 * program.mesh.pipeline), sum(matmuls.values()))
    cuts = _cuts(program, pure, long, fewest) if long else {}
    found = [Span(start, end, kind, True) for start, end, kind in layers]
    for start, end in runs:
        bounds = [start, *cuts.get((start, end), ()), end]
        found += [Span(a, b, None, len(bounds) > 2 and b < len(ops)) for a, b in zip(bounds, bounds[1:])]
    return sorted(found, key=lambda span: span.start)


def _cuts(program: Program, pure: set[fx.Node], runs: list[tuple[int, int]], fewest: int) -> dict[tuple[int, int], list[int]]:
    """Where the pieces of each run start, but for the first: ``fewest`` at least, and ``MOST`` at most, where that can be."""
    done, alive = [0.0, *accumulate(_work(program))], _alive(program, pure)

    def cut(even: float) -> tuple[dict[tuple[int, int], list[int]], int]:
        found = {run: narrowest_cuts(*run, done, alive, even) for run in runs}
        return found, sum(len(cuts) + 1 for cuts in found.values())

    even = EVEN
    found, pieces = cut(even)
    while pieces > MOST and even > EVEN / 256:
        even /= STEP
        found, pieces = cut(even)
    while pieces < min(fewest, MOST) and even < EVEN * 256:
        even *= STEP
        found, pieces = cut(even)
    return found


def narrowest_cuts(start: int, end: int, done: list[float], alive: dict[int, float], even: float) -> list[int]:
    """The places of a run at which the bytes alive, and the squares of the work between, are least in all.

    done: share of the work before each place. alive: bytes, as a share of all, by the places that may be cut."""
    places = [start, *(at for at in range(start + 1, end) if at in alive), end]
    before = np.array([done[at] for at in places])
    best, back = [0.0], [0]
    for i, at in enumerate(places[1:], 1):
        prices = np.array(best) + even * (before[i] - before[:i]) ** 2
        back.append(int(prices.argmin()))
        best.append(float(prices.min()) + CUT + alive.get(at, 0.0))
    cuts, i = [], back[-1]
    while i:
        cuts.append(places[i])
        i = back[i]
    return cuts[::-1]


def _work(program: Program) -> list[float]:
    """Of every op, about its share of the model's time and of the memory that it fills."""
    shares = []
    for measure in (_flops, _made):
        total = _total(program, measure)
        shares.append([measure(node) / total for node in program.ops])
    return [(flops + nbytes) / 2 for flops, nbytes in zip(*shares)]


def _total(program: Program, measure: Callable[[fx.Node], float]) -> float:
    """Over all ops, and those that are left out of an abridged program."""
    return sum(measure(node) * node.meta.get("stands_for", 1) for node in program.ops) or 1.0


def _flops(node: fx.Node) -> float:
    return 0.0 if is_getitem(node) else rule_for(node).flops


def _made(node: fx.Node) -> float:
    """Bytes that an op fills."""
    return 0.0 if is_getitem(node) or op_kind(node) in ALIASES | WINDOWS else _bytes(node)


def _bytes(node: fx.Node) -> float:
    return sum(prod(t.shape) * t.element_size() for t in tensors(node.meta["val"]))


def _alive(program: Program, pure: set[fx.Node]) -> dict[int, float]:
    """Bytes alive as a share of all that are made, by the places where the model may be cut: something is alive, no tuple is, and the op
    before is a stage's own work."""
    total, found = _total(program, _made), {}
    for i, (node, values) in enumerate(alive_across(program, pure)[:-1]):
        if values and node not in pure and not any(isinstance(value.meta["val"], (tuple, list)) for value in values):
            found[i + 1] = sum(map(_bytes, values)) / total
    return found
