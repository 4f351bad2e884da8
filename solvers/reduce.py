"""Presolve of the op-sharding problem: exact, so an optimum of what is left is an optimum of the whole.

The problem becomes a network over the ops. Strategies that leave a value in one placement, or demand one placement of it, share a
*class*; a table holds the price of going from class to class, infinity where there is no way.

    link    a value with one user: table[class of the producer, class of the user] is paid
    star    a value with several users: table[class of the producer, q] is paid once for every q that any user demands

A removed strategy has cost infinity. The reductions, repeated until nothing changes:

    (P1) a strategy that has no partner across some link or star is removed; an op that loses its last one is the reason of infeasibility
    (P2) a link from an op to itself, or with one class at one end, or with one price throughout, is added to op costs
    (P3) in a star, a user whose demands are all free is dropped; users that share no price are split off, as links if alone
    (P4) strategy t is removed if some s costs no more whatever all neighbours do:
         cost[s] - cost[t] + sum over links and stars of max over what the neighbour may do (price[s] - price[t]) <= 0
         (merges equal strategies too: the lower index stays)
    (P5) an op with links only, to at most two ops, is eliminated: its cheapest strategy for each pair of their classes makes a link
         between them (an op that can only follow, a weight, a unary op). ``Network.recover`` chooses its strategy afterwards.
    (P6) several links between the same two ops become one, where that makes no larger table
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .problem import Infeasible, ShardingProblem

INF = float("inf")
_LARGEST_TABLE = 4096  # entries of a table that (P5) or (P6) may make


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

    def scale(self) -> float:
        """What to multiply seconds by so that a typical answer costs about 1e4: the middle prices of ops, links and stars add up to that."""
        middle = [np.median(cost[cost < INF]) for op, cost in enumerate(self.costs) if op not in self.gone]
        middle += [np.median(edge.table[edge.table < INF]) for edge in [*self.links.values(), *self.stars.values()]]
        total = float(sum(abs(m) for m in middle))
        return 1e4 / total if total > 0.0 else 1.0

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
        if len(ends) == 1:
            net.add(Link(value.op, ends[0][0], rows, ends[0][1], table, value.name))
        else:
            net.add(Star(value.op, rows, ends, table, value.name))
    return net


def reduce(net: Network) -> None:
    """Apply (P1) to (P6) in place until nothing changes. Raises Infeasible."""
    dirty = set(range(len(net.costs)))
    while dirty:
        touched: set[int] = set()
        for key in [k for k in net.stars if _touches(net.stars[k], dirty)]:
            touched |= _simplify_star(net, key)
        for key in [k for k in net.links if _touches(net.links[k], dirty)]:
            touched |= _simplify_link(net, key)
        edges = _edges(net)
        for op in sorted(dirty | touched):
            if op not in net.gone and _dominated(net, op, *edges[op]):
                touched |= {op} | _neighbours(net, op, *edges[op])
        for op in sorted(dirty | touched):
            touched |= _eliminate(net, op)
        touched |= _merge_parallel(net)
        dirty = touched - net.gone


def _touches(edge: Link | Star, ops: set[int]) -> bool:
    return edge.a in ops or (edge.b in ops if isinstance(edge, Link) else any(op in ops for op, _ in edge.users))


def _edges(net: Network) -> list[tuple[list[int], list[int]]]:
    """Of each op: its links and its stars."""
    edges = [([], []) for _ in net.costs]
    for key, link in net.links.items():
        for op in dict.fromkeys((link.a, link.b)):
            edges[op][0].append(key)
    for key, star in net.stars.items():
        for op in dict.fromkeys([star.a, *(op for op, _ in star.users)]):
            edges[op][1].append(key)
    return edges


def _neighbours(net: Network, op: int, links: list[int], stars: list[int]) -> set[int]:
    out = {net.links[k].seen_from(op)[0] for k in links if k in net.links}
    for k in stars:
        if k in net.stars:
            out |= {net.stars[k].a, *(user for user, _ in net.stars[k].users)}
    return out - {op}


def _kill(net: Network, op: int, keep: np.ndarray, value: str) -> set[int]:
    """(P1) Remove the strategies of ``op`` that are not in ``keep``; the ops touched."""
    alive = net.costs[op] < INF
    if not (alive & keep).any():
        raise Infeasible(f"no strategy of {net.names[op]} is consistent with its neighbours across {value}", (net.names[op],), (value,))
    if (alive & ~keep).any():
        net.costs[op] = np.where(keep, net.costs[op], INF)
        return {op}
    return set()


def _compact(classes: np.ndarray, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the classes that living strategies have, each strategy's new class); dead strategies get class 0."""
    kept, inverse = np.unique(classes[alive], return_inverse=True)
    new = np.zeros(len(classes), dtype=int)
    new[alive] = inverse
    return kept, new


def _simplify_link(net: Network, key: int) -> set[int]:
    """(P1), (P2) on one link; the ops whose costs or links changed."""
    link = net.links[key]
    a, b = link.a, link.b
    if a == b:
        del net.links[key]
        price = link.table[link.rows, link.cols]
        touched = _kill(net, a, price < INF, link.name)
        net.costs[a] = net.costs[a] + price
        return touched | {a}
    kept_rows, rows = _compact(link.rows, net.alive(a))
    kept_cols, cols = _compact(link.cols, net.alive(b))
    table = link.table[np.ix_(kept_rows, kept_cols)]
    possible = table < INF
    touched = _kill(net, a, possible.any(axis=1)[rows], link.name) | _kill(net, b, possible.any(axis=0)[cols], link.name)
    if touched:
        kept_rows, rows = _compact(link.rows, net.alive(a))
        kept_cols, cols = _compact(link.cols, net.alive(b))
        table = link.table[np.ix_(kept_rows, kept_cols)]
    unique, of_row = np.unique(table, axis=0, return_inverse=True)
    unique, of_col = np.unique(unique, axis=1, return_inverse=True)
    link.rows, link.cols, link.table = of_row.reshape(-1)[rows], of_col.reshape(-1)[cols], unique
    if unique.shape[0] == 1 or unique.shape[1] == 1:
        del net.links[key]
        if unique.size == 1:
            net.offset += float(unique[0, 0])
            return touched | {a, b}
        if unique.shape[0] == 1:
            net.costs[b] = net.costs[b] + unique[0][link.cols]
        else:
            net.costs[a] = net.costs[a] + unique[:, 0][link.rows]
        return touched | {a, b}
    return touched


def _simplify_star(net: Network, key: int) -> set[int]:
    """(P1), (P3) on one star; the ops whose costs or links changed."""
    star = net.stars[key]
    touched: set[int] = set()
    for op, cols in star.users:
        if op == star.a:
            touched |= _kill(net, op, star.table[star.rows, cols] < INF, star.name)
            continue
        possible = star.table[np.ix_(np.unique(star.rows[net.alive(star.a)]), np.unique(cols[net.alive(op)]))] < INF
        kept_rows, rows = _compact(star.rows, net.alive(star.a))
        kept_cols, new = _compact(cols, net.alive(op))
        touched |= _kill(net, star.a, possible.any(axis=1)[rows], star.name) | _kill(net, op, possible.any(axis=0)[new], star.name)
    kept_rows, rows = _compact(star.rows, net.alive(star.a))
    used = [np.unique(cols[net.alive(op)]) for op, cols in star.users]
    kept_cols = np.unique(np.concatenate(used))
    column = np.zeros(star.table.shape[1], dtype=int)
    column[kept_cols] = np.arange(len(kept_cols))
    table, of_row = np.unique(star.table[np.ix_(kept_rows, kept_cols)], axis=0, return_inverse=True)
    star.rows, star.table = of_row.reshape(-1)[rows], table
    priced = np.where(table < INF, table, 0.0).any(axis=0)
    free = ~(table != 0.0).any(axis=0)
    users: dict[tuple[int, bytes], tuple[int, np.ndarray, np.ndarray]] = {}
    for (op, cols), columns in zip(star.users, used):
        columns, cols = column[columns], np.where(net.costs[op] < INF, column[cols], column[columns[0]])
        if not free[columns].all():
            users[op, cols.tobytes()] = (op, cols, columns)
    groups: list[list[tuple[int, np.ndarray, np.ndarray]]] = []
    for user in users.values():
        mine = set(user[2][priced[user[2]]].tolist())
        joined = [g for g in groups if any(mine.intersection(other[2].tolist()) for other in g)]
        groups = [g for g in groups if g not in joined] + [[*(u for g in joined for u in g), user]] if joined else [*groups, [user]]
    if len(groups) == 1 and len(groups[0]) > 1:
        if len(groups[0]) < len(star.users):
            touched |= {star.a, *(op for op, _ in star.users)}
        star.users = [(op, cols) for op, cols, _ in groups[0]]
        return touched
    del net.stars[key]
    touched |= {star.a, *(op for op, _ in star.users)}
    for group in groups:
        ends = [(op, cols) for op, cols, _ in group]
        if len(ends) == 1:
            net.add(Link(star.a, ends[0][0], star.rows, ends[0][1], star.table, star.name))
        else:
            net.add(Star(star.a, star.rows, ends, star.table, star.name))
    return touched


def _difference(better: np.ndarray, worse: np.ndarray) -> np.ndarray:
    """better - worse, where a neighbour that ``worse`` can't have does not count."""
    with np.errstate(invalid="ignore"):
        return np.where(worse == INF, -INF, better - worse)


def _dominated(net: Network, op: int, links: list[int], stars: list[int]) -> bool:
    """(P4) on one op; whether a strategy was removed."""
    alive = net.alive(op)
    if len(alive) < 2:
        return False
    cost = net.costs[op][alive]
    worst = cost[:, None] - cost[None, :]  # [s, t]: the most that taking s instead of t can cost more
    for key in links:
        if key in net.links:
            other, mine, others, table = net.links[key].seen_from(op)
            table = table[:, np.unique(others[net.alive(other)])]
            change = _difference(table[:, None, :], table[None, :, :]).max(axis=2)
            worst = worst + change[np.ix_(mine[alive], mine[alive])]
    for key in stars:
        if key in net.stars:
            worst = worst + _star_change(net, net.stars[key], op, alive)
    np.fill_diagonal(worst, INF)
    removed = False
    left = np.ones(len(alive), dtype=bool)
    for t in range(len(alive) - 1, -1, -1):
        if (worst[left, t] <= 0.0).any():
            left[t], removed = False, True
            net.costs[op][alive[t]] = INF
    return removed


def _star_change(net: Network, star: Star, op: int, alive: np.ndarray) -> np.ndarray:
    """(P4) The most that strategy s of ``op`` instead of t can add to a star's price, as [s, t] over the living strategies."""
    change = np.zeros((len(alive), len(alive)))
    demanded = [np.unique(cols[net.alive(user)]) for user, cols in star.users]
    if op == star.a:
        diff = _difference(star.table[:, None, :], star.table[None, :, :])
        most = np.stack([diff[:, :, columns].max(axis=2) for columns in demanded])
        own = np.where((most <= 0.0).all(axis=0), most.min(axis=0), np.maximum(most, 0.0).sum(axis=0))
        change = change + own[np.ix_(star.rows[alive], star.rows[alive])]
    table = star.table[np.unique(star.rows[net.alive(star.a)])]
    for i, (user, cols) in enumerate(star.users):
        if user == op:
            others = [columns for j, columns in enumerate(demanded) if j != i]
            alone = np.setdiff1d(demanded[i], np.concatenate(others)) if others else demanded[i]
            saved = np.zeros_like(table)
            saved[:, alone] = table[:, alone]
            after, before = table[:, :, None], table[:, None, :]
            with np.errstate(invalid="ignore"):
                most = np.where(before == INF, -INF, after - saved[:, None, :]).max(axis=0)
            np.fill_diagonal(most, 0.0)
            change = change + most[np.ix_(cols[alive], cols[alive])]
    return change


def _eliminate(net: Network, op: int) -> set[int]:
    """(P5) on one op; the ops whose costs or links changed."""
    if op in net.gone or any(_touches(star, {op}) for star in net.stars.values()):
        return set()
    keys = [key for key, link in net.links.items() if op in (link.a, link.b)]
    links = [net.links[key] for key in keys]
    if any(link.a == link.b for link in links):
        return set()  # (P2) comes first
    ends = list(dict.fromkeys(link.seen_from(op)[0] for link in links))
    if len(ends) > 2:
        return set()
    sides = []  # per neighbour: its strategies' classes, price[strategy of op, class]
    for end in ends:
        mine = [link for link in links if link.seen_from(op)[0] == end]
        if len(mine) > 1:
            codes = np.stack([link.seen_from(op)[2] for link in mine])
            unique, classes = np.unique(codes, axis=1, return_inverse=True)
            price = sum(link.seen_from(op)[3][link.seen_from(op)[1]][:, unique[i]] for i, link in enumerate(mine))
            sides.append((classes.reshape(-1), price))
        else:
            _, own, classes, table = mine[0].seen_from(op)
            sides.append((classes, table[own]))
    alive = net.alive(op)
    cost = net.costs[op][alive]
    if len(ends) == 2 and sides[0][1].shape[1] * sides[1][1].shape[1] > _LARGEST_TABLE:
        return set()
    net.eliminated.append((op, net.costs[op], [_frozen(link) for link in links]))
    net.gone.add(op)
    for key in keys:
        del net.links[key]
    if not ends:
        net.offset += float(cost.min())
    elif len(ends) == 1:
        classes, price = sides[0]
        net.costs[ends[0]] = net.costs[ends[0]] + (cost[:, None] + price[alive]).min(axis=0)[classes]
        if not (net.costs[ends[0]] < INF).any():
            raise Infeasible(f"no strategy of {net.names[op]} is consistent with {net.names[ends[0]]}", (net.names[op], net.names[ends[0]]))
    else:
        (left, to_left), (right, to_right) = sides
        table = (to_left[alive][:, :, None] + (cost[:, None] + to_right[alive])[:, None, :]).min(axis=0)
        net.add(Link(ends[0], ends[1], left, right, table, net.names[op]))
    return set(ends)


def _frozen(link: Link) -> Link:
    return Link(link.a, link.b, link.rows.copy(), link.cols.copy(), link.table, link.name)


def _merge_parallel(net: Network) -> set[int]:
    """(P6) on all links; the ops whose links changed."""
    pairs: dict[tuple[int, int], list[int]] = {}
    for key, link in net.links.items():
        if link.a != link.b:
            pairs.setdefault((min(link.a, link.b), max(link.a, link.b)), []).append(key)
    touched: set[int] = set()
    for (a, b), keys in pairs.items():
        if len(keys) == 1:
            continue
        views = [net.links[key].seen_from(a) for key in keys]
        rows, row_class = np.unique(np.stack([v[1] for v in views])[:, net.alive(a)], axis=1, return_inverse=True)
        cols, col_class = np.unique(np.stack([v[2] for v in views])[:, net.alive(b)], axis=1, return_inverse=True)
        if rows.shape[1] * cols.shape[1] > max(sum(v[3].size for v in views), _LARGEST_TABLE):
            continue
        table = sum(v[3][np.ix_(rows[i], cols[i])] for i, v in enumerate(views))
        all_rows, all_cols = np.zeros(len(net.costs[a]), dtype=int), np.zeros(len(net.costs[b]), dtype=int)
        all_rows[net.alive(a)], all_cols[net.alive(b)] = row_class.reshape(-1), col_class.reshape(-1)
        name = " and ".join(net.links[key].name for key in keys)
        for key in keys:
            del net.links[key]
        net.add(Link(a, b, all_rows, all_cols, table, name))
        touched |= {a, b}
    return touched
