"""What is left of a network solved by elimination: op after op is replaced by a table over its neighbours, of what it costs at best.

Exact, and fast where some order keeps the tables small, as with the layers of models (a chain with a few shortcuts): at every step the op
goes whose joint table, over itself and all that it shares a table with, is smallest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from .network import INF, Link, Network, Star

LARGEST = 1 << 22
"""Entries of a joint table; with more, the integer program is faster."""


@dataclass
class Table:
    """Seconds, by the living strategies of ``ops``: one axis each."""

    ops: tuple[int, ...]
    seconds: np.ndarray

    def over(self, ops: tuple[int, ...]) -> np.ndarray:
        """With one axis for each of ``ops``, which include its own: of length 1 for those that are not."""
        at = {op: i for i, op in enumerate(self.ops)}
        order = [at[op] for op in ops if op in at]
        shape = [self.seconds.shape[at[op]] if op in at else 1 for op in ops]
        return self.seconds.transpose(order).reshape(shape)


class Eliminated:
    """The cheapest way to complete any choice for the ops ``kept``: ``table`` over them."""

    def __init__(self, net: Network, order: list[int], kept: tuple[int, ...]):
        self.alive = {op: net.alive(op) for op in range(len(net.costs)) if op not in net.gone}
        tables = [Table((op,), net.costs[op][alive]) for op, alive in self.alive.items()]
        tables += [_link(link, self.alive) for link in net.links.values()]
        tables += [_star(star, self.alive) for star in net.stars.values()]
        self.steps: list[tuple[int, list[Table]]] = []
        for op in order:
            mine = [table for table in tables if op in table.ops]
            tables = [table for table in tables if op not in table.ops]
            around = tuple(dict.fromkeys(other for table in mine for other in table.ops if other != op))
            tables.append(Table(around, _joined(mine, (*around, op)).min(axis=-1)))
            self.steps.append((op, mine))
        shape = tuple(len(self.alive[op]) for op in kept)
        self.table = Table(kept, np.broadcast_to(_joined(tables, kept), shape))

    def recover(self, chosen: dict[int, int]) -> dict[int, int]:
        """The strategy of every op that ``reduce`` left, given those of the kept ones."""
        chosen = dict(chosen)
        at = {op: int(np.flatnonzero(self.alive[op] == strategy)[0]) for op, strategy in chosen.items()}
        for op, tables in reversed(self.steps):
            around = [[o for o in table.ops if o != op] for table in tables]
            price = sum(table.over((*others, op))[tuple(at[o] for o in others)] for table, others in zip(tables, around))
            at[op] = int(np.argmin(price))
            chosen[op] = int(self.alive[op][at[op]])
        return chosen


def eliminate(net: Network, kept: tuple[int, ...] = ()) -> Eliminated | None:
    """Eliminate all ops but ``kept``; None if a table would be too large. ``net`` stays as it is."""
    sizes = {op: len(net.alive(op)) for op in range(len(net.costs)) if op not in net.gone}
    groups = [{op} for op in sizes]
    for edge in [*net.links.values(), *net.stars.values()]:
        groups.append({edge.a, edge.b} if isinstance(edge, Link) else {edge.a, *(op for op, _ in edge.users)})
    if any(prod(sizes[op] for op in group) > LARGEST for group in [*groups, *([kept] if kept else [])]):
        return None
    around = {op: set().union(*(group for group in groups if op in group)) - {op} for op in sizes}
    order: list[int] = []
    while left := [op for op in around if op not in kept]:
        size, op = min((sizes[op] * prod(sizes[o] for o in around[op]), op) for op in left)
        if size > LARGEST:
            return None
        order.append(op)
        others = around.pop(op)
        for other in others:
            around[other] = (around[other] | others) - {op, other}
    return Eliminated(net, order, kept)


def _joined(tables: list[Table], ops: tuple[int, ...]) -> np.ndarray:
    """The sum of tables, small ones first."""
    parts = sorted((table.over(ops) for table in tables), key=lambda part: part.size)
    return sum(parts[1:], parts[0]) if parts else np.zeros(())


def _link(link: Link, alive: dict[int, np.ndarray]) -> Table:
    return Table((link.a, link.b), link.table[np.ix_(link.rows[alive[link.a]], link.cols[alive[link.b]])])


def _star(star: Star, alive: dict[int, np.ndarray]) -> Table:
    """Every class that a user demands is paid for by the first that does."""
    ops = tuple(dict.fromkeys([star.a, *(op for op, _ in star.users)]))
    seconds: np.ndarray = np.zeros(())
    before: list[np.ndarray] = []
    rows = Table((star.a,), star.rows[alive[star.a]]).over(ops)
    for op, cols in star.users:
        mine = Table((op,), cols[alive[op]]).over(ops)
        price = star.table[rows, mine]
        if before:
            again = np.logical_or.reduce(np.broadcast_arrays(*(mine == other for other in before)))
            price = np.where(again, 0.0, price)
        seconds = seconds + price
        before.append(mine)
    return Table(ops, np.broadcast_to(seconds, tuple(len(alive[op]) for op in ops)))


def cheapest(net: Network) -> dict[int, int] | None:
    """The best strategy of every op that ``reduce`` left; None if the tables are too large, or no choice is possible."""
    found = eliminate(net)
    return found.recover({}) if found is not None and float(found.table.seconds) < INF else None
