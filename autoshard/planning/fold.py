"""Identical layers, found by the structure of the graph: what is planned for one of them is planned for all."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import fx

from autoshard.program import Program, likeness


@dataclass(frozen=True)
class Layers:
    """Instances of one layer: its number of ops, and the positions in ``program.ops`` where the instances start."""

    period: int
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Folding:
    """Which values are alike.

    nodes: a class for each op of ``program.ops``; corresponding ops of identical layers share one, all others have their own.
    params: a class for each param by placeholder name; no class is both an op's and a param's.
    layers: the repeats that were found.
    """

    nodes: list[int]
    params: dict[str, int]
    layers: list[Layers] = field(default_factory=list)

    def by_node(self, program: Program) -> dict[fx.Node, int]:
        """Classes of ops and param placeholders, by node of ``program``."""
        classes = dict(zip(program.ops, self.nodes))
        classes.update({n: self.params[n.name] for n in program.graph.nodes if n.op == "placeholder" and n.name in self.params})
        return classes


def fold(program: Program) -> Folding:
    """Find the layers that repeat, and give corresponding ops and params of all instances one class.

    A layer is a run of ops that is repeated at once at least once: same ops, same constants, same shapes, dtypes and gradients; inside, the
    same wiring; from outside, the same values (a mask for all layers), params that correspond one to one, and what comes from before
    (each instance reads something of the one before it). Of all repeats the one that covers most ops is taken, with the shortest
    period that does so; then the rest is searched again. Instances elsewhere, behind a different layer, are found as well.

    >>> fold(program).nodes           # embedding, 3 x (linear, relu), loss
    [0, 1, 2, 1, 2, 1, 2, 3]
    """
    graph = Encoded(program)
    count = len(graph.ops)
    free = np.ones(count, dtype=bool)
    found: list[Layers] = []
    while True:
        layers = best_repeat(graph, free)
        if layers is None:
            break
        layers = with_lone_instances(graph, layers, free)
        for start in layers.starts:
            free[start : start + layers.period] = False
        found.append(layers)
    return number(graph, found)


class Encoded:
    """A program as arrays: a kind per op (equal for ops that only differ in the values they read), and the operands of each."""

    def __init__(self, program: Program):
        self.ops = program.ops
        self.params = {n: program.params[n.name] for n in program.graph.nodes if n.op == "placeholder" and n.name in program.params}
        self.index = {node: i for i, node in enumerate(self.ops)}
        self.operands = [operands_of(node) for node in self.ops]
        kinds: dict[Any, int] = {}
        self.kinds = np.array([kinds.setdefault(self._kind(node), len(kinds)) for node in self.ops], dtype=np.int64)
        self.last_use = np.array([max((self.index.get(u, len(self.ops)) for u in n.users), default=-1) for n in self.ops], dtype=np.int64)

    def _kind(self, node: fx.Node) -> tuple:
        return likeness(node), tuple([x in self.params and self.params[x].kind for x in self.operands[self.index[node]]])


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Every value that an op reads, in order, repeated where it is read again."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def best_repeat(graph: Encoded, free: np.ndarray) -> Layers | None:
    """The repeat among free ops that covers most of them, the shortest period first among equals."""
    candidates = sorted(candidate_runs(graph.kinds, free), key=lambda run: (-(run[1] // run[2]) * run[2], run[2], run[0]))
    for start, length, period in candidates:
        for first in narrowest(graph, start, length, period):
            starts = longest_chain(graph, range(first, start + length - period + 1, period), period)
            if starts:
                return Layers(period, starts)
    return None


def candidate_runs(kinds: np.ndarray, free: np.ndarray) -> list[tuple[int, int, int]]:
    """(start, length, period) of every maximal run of free ops whose kinds repeat with a period, at least two periods long.

    Such a run has two multiples of its period one period apart, and is found from these: it reaches as far back and forth as what is
    there is the same. There are n log n pairs of multiples, and most differ at once.
    """
    count = len(kinds)
    apart = np.where(free, kinds, -1 - np.arange(count))  # what is not free is like nothing else
    periods = np.arange(1, count // 2 + 1)
    pairs = (count - 1) // periods
    period = np.repeat(periods, pairs)
    at = period * (np.arange(len(period)) - np.repeat(np.cumsum(pairs) - pairs, pairs))
    alike = apart[at] == apart[at + period]
    at, period = at[alike], period[alike]
    names = windows(apart)
    back, forth = at.copy(), at.copy()  # the first place, and the one behind the last, that equals the one a period on
    for size, name in reversed(names):
        whole = forth + period + size <= count
        forth[whole] += size * (name[forth[whole]] == name[forth[whole] + period[whole]])
        whole = back >= size
        back[whole] -= size * (name[back[whole] - size] == name[back[whole] - size + period[whole]])
    long = forth - back >= period
    runs = np.unique(np.stack([back, forth - back + period, period], axis=1)[long], axis=0)
    return [tuple(run) for run in runs.tolist()]


def windows(values: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(size, name of the window that starts at each place) for windows of 1, 2, 4, ... values; equal windows have one name."""
    size, name = 1, np.unique(values, return_inverse=True)[1]
    found = [(size, name)]
    while 2 * size <= len(values):
        name = np.unique(name[: len(name) - size] * len(values) + name[size:], return_inverse=True)[1]
        size *= 2
        found.append((size, name))
    return found


def narrowest(graph: Encoded, start: int, length: int, period: int) -> list[int]:
    """The best three places to start a run that is longer than whole periods.

    Best where the fewest values pass to the next instance; then where an instance lies deepest within one module of the user's.
    """

    def badness(first: int) -> tuple[int, int, int]:
        crossing = int(np.count_nonzero(graph.last_use[first : first + period] >= first + period))
        paths = [node.meta.get("module", "").split(".") for node in graph.ops[first : first + period]]
        return crossing, -len(os.path.commonprefix([min(paths), max(paths)])), first

    return sorted(range(start, start + length % period + 1), key=badness)[:3]


def longest_chain(graph: Encoded, starts: range, period: int) -> tuple[int, ...]:
    """The longest stretch of instances that are the same as their neighbour and read from it; empty if shorter than two."""
    best: tuple[int, ...] = ()
    chain: list[int] = []
    for start in starts:
        if chain and not (reads(graph, start, period) and same(graph, chain[-1], start, period) and same(graph, chain[0], start, period)):
            chain = []
        chain.append(start)
        if len(chain) > max(len(best), 1):
            best = tuple(chain)
    return best if best and has_params(graph, best[0], period) else ()


def reads(graph: Encoded, start: int, period: int) -> bool:
    """Whether an instance reads a value of the instance just before it: a layer, not one of three projections side by side."""
    before = range(start - period, start)
    return any(graph.index.get(x) in before for i in range(start, start + period) for x in graph.operands[i])


def has_params(graph: Encoded, start: int, period: int) -> bool:
    return any(x in graph.params for i in range(start, start + period) for x in graph.operands[i])


def same(graph: Encoded, a: int, b: int, period: int) -> bool:
    """Whether the ``period`` ops from ``a`` and from ``b``, of equal kinds, are wired alike."""
    forth: dict[fx.Node, fx.Node] = {}
    back: dict[fx.Node, fx.Node] = {}
    for offset in range(period):
        for x, y in zip(graph.operands[a + offset], graph.operands[b + offset], strict=True):
            i, j = graph.index.get(x, -1) - a, graph.index.get(y, -1) - b
            inside, inside_too = 0 <= i < period, 0 <= j < period
            if inside != inside_too or (inside and i != j):
                return False
            if not inside and (forth.setdefault(x, y) is not y or back.setdefault(y, x) is not x):
                return False
    return True


def with_lone_instances(graph: Encoded, layers: Layers, free: np.ndarray) -> Layers:
    """Add instances that stand apart from the run, behind some other layer."""
    first, period = layers.starts[0], layers.period
    pattern = graph.kinds[first : first + period]
    taken = free.copy()
    for start in layers.starts:
        taken[start : start + period] = False
    starts = list(layers.starts)
    for start in np.flatnonzero(graph.kinds[: len(graph.kinds) - period + 1] == pattern[0]).tolist():
        window = slice(start, start + period)
        if taken[window].all() and (graph.kinds[window] == pattern).all() and same(graph, first, start, period):
            starts.append(start)
            taken[window] = False
    return Layers(period, tuple(sorted(starts)))


def number(graph: Encoded, found: list[Layers]) -> Folding:
    """Classes in order of appearance."""
    leader: dict[fx.Node, fx.Node] = {}

    def lead(node: fx.Node) -> fx.Node:
        while node in leader:
            node = leader[node]
        return node

    def join(a: fx.Node, b: fx.Node) -> None:
        a, b = lead(a), lead(b)
        if a is not b:
            leader[b] = a

    for layers in found:
        first = layers.starts[0]
        for start in layers.starts[1:]:
            for offset in range(layers.period):
                join(graph.ops[first + offset], graph.ops[start + offset])
                for x, y in zip(graph.operands[first + offset], graph.operands[start + offset], strict=True):
                    if x in graph.params:
                        join(x, y)
    ids: dict[fx.Node, int] = {}
    nodes = [ids.setdefault(lead(node), len(ids)) for node in graph.ops]
    params = {node.name: ids.setdefault(lead(node), len(ids)) for node in graph.params}
    return Folding(nodes, params, found)
