"""The op-sharding problem as a network over its ops.

Strategies that leave a value in one placement, or demand one placement of it, share a *class*; a table holds the price of going from
class to class, infinity where there is no way.

    link    a value with one user: table[class of the producer, class of the user] is paid
    star    a value with several users: table[class of the producer, q] is paid once for every class q that any user demands

A strategy that is out of the question has cost infinity.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .problem import Infeasible, ShardingProblem

INF = float("inf")


@dataclass
class Link:
    """A price between two ops. rows/cols: class of each strategy of op a / b; table[row, col] in seconds."""

    a: int
    b: int
    rows: np.ndarray
    cols: np.ndarray
    table: np.ndarray
    name: str

    def seen_from(self, op: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """(the other op, own classes, the other's classes, table with own classes as rows)."""
        return (self.b, self.rows, self.cols, self.table) if op == self.a else (self.a, self.cols, self.rows, self.table.T)


@dataclass
class Star:
    """A value of op a and its users: (op, class of each of its strategies). table[row, col] in seconds, paid once per col."""

    a: int
    rows: np.ndarray
    users: list[tuple[int, np.ndarray]]
    table: np.ndarray
    name: str


@dataclass
class Network:
    """What is left of a problem. ``costs`` in seconds by op and strategy; ``offset`` is already certain to be paid."""

    names: list[str]
    costs: list[np.ndarray]
    links: dict[int, Link] = field(default_factory=dict)
    stars: dict[int, Star] = field(default_factory=dict)
    offset: float = 0.0
    eliminated: list[tuple[int, np.ndarray, list[Link]]] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    _next: int = 0

    def alive(self, op: int) -> np.ndarray:
        """Indices of the strategies of ``op`` that are left."""
        return np.flatnonzero(self.costs[op] < INF)

    def add(self, edge: Link | Star) -> int:
        (self.links if isinstance(edge, Link) else self.stars)[self._next] = edge
        self._next += 1
        return self._next - 1

    def join(self, op: int, rows: np.ndarray, ends: list[tuple[int, np.ndarray]], table: np.ndarray, name: str) -> None:
        """Add a value of ``op`` that others read: a link if it is one, else a star."""
        if len(ends) == 1:
            self.add(Link(op, ends[0][0], rows, ends[0][1], table, name))
        else:
            self.add(Star(op, rows, ends, table, name))

    def scale(self) -> float:
        """What to multiply seconds by so that the middle prices of all ops, links and stars add up to 1e4."""
        prices = [cost for op, cost in enumerate(self.costs) if op not in self.gone]
        prices += [edge.table for edge in [*self.links.values(), *self.stars.values()]]
        positive = [price[(price > 0.0) & (price < INF)] for price in prices]
        total = float(sum(np.median(price) for price in positive if len(price)))
        return 1e4 / total if total > 0.0 else 1.0

    def forget(self, most: float) -> None:
        """Remove every strategy and every way between classes that alone costs more than ``most`` seconds; no price is negative."""
        most = (most - self.offset) * (1 + 1e-9)
        for op, cost in enumerate(self.costs):
            if op not in self.gone:
                self.costs[op] = np.where(cost > most, INF, cost)
        for edge in [*self.links.values(), *self.stars.values()]:
            edge.table = np.where(edge.table > most, INF, edge.table)

    def recover(self, chosen: dict[int, int]) -> tuple[int, ...]:
        """The strategy of every op, given those of the ops that were not eliminated."""
        chosen = dict(chosen)
        for op, costs, links in reversed(self.eliminated):
            price = costs.copy()
            for link in links:
                other, mine, others, table = link.seen_from(op)
                price += table[mine, others[chosen[other]]]
            chosen[op] = int(np.argmin(price))
        return tuple(chosen[op] for op in range(len(self.costs)))


def network(problem: ShardingProblem) -> Network:
    """The problem as a network, nothing reduced yet."""
    net = Network([op.name for op in problem.ops], [op.count * np.array(op.costs, dtype=float) for op in problem.ops])
    for op in problem.ops:
        if not op.costs:
            raise Infeasible(f"{op.name} has no strategy", (op.name,))
    users: dict[int, dict[tuple[int, tuple[int, ...]], None]] = {}
    for use in problem.uses:
        users.setdefault(use.value, {})[use.op, use.demands] = None  # a repeated use pays nothing more
    for index, value in enumerate(problem.values):
        if index not in users:
            continue
        row_of = {p: i for i, p in enumerate(dict.fromkeys(value.placements))}
        col_of = {q: i for i, q in enumerate(dict.fromkeys(q for _, demands in users[index] for q in demands))}
        table = np.full((len(row_of), len(col_of)), INF)
        for (p, q), seconds in value.moves.items():
            if p in row_of and q in col_of:
                table[row_of[p], col_of[q]] = value.count * seconds
        for p, row in row_of.items():
            if p in col_of:
                table[row, col_of[p]] = 0.0
        rows = np.array([row_of[p] for p in value.placements])
        ends = [(op, np.array([col_of[q] for q in demands])) for op, demands in users[index]]
        net.join(value.op, rows, ends, table, value.name)
    return net
