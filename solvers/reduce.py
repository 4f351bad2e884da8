"""Presolve of a network: exact, so an optimum of what is left is an optimum of the whole.

The reductions, repeated until nothing changes:

    (P1) a strategy that has no partner across some link or star is removed; an op that loses its last one is the reason of infeasibility
    (P2) a link from an op to itself, or with one class at one end, or with one price throughout, is added to op costs
    (P3) in a star, a user whose demands are all free is dropped; users that share no price are split off, as links if alone
    (P4) dominated strategies are removed: see ``dominance``
    (P5) an op with links only, to at most two ops, is eliminated: its cheapest strategy for each pair of their classes makes a link
         between them (an op that can only follow, a weight, a unary op). ``Network.recover`` chooses its strategy afterwards
    (P6) several links between the same two ops become one, where that makes no large table
"""

from __future__ import annotations

import numpy as np

from .dominance import remove_dominated
from .network import INF, Link, Network, Star
from .problem import Infeasible

_LARGEST_TABLE = 4096  # entries of a table that (P5) or (P6) may make


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
            if op not in net.gone and remove_dominated(net, op, *edges[op]):
                touched |= {op} | _neighbours(net, op, *edges[op])
        for op in sorted(dirty | touched):
            touched |= _eliminate(net, op)
        touched |= _merge_parallel(net)
        dirty = touched - net.gone


def thin(net: Network) -> None:
    """A round of (P3) and (P4) in place, and (P2) where an op links to itself: often enough for ``elimination``. Raises Infeasible."""
    for key in list(net.stars):
        _simplify_star(net, key)
    for key in [key for key, link in net.links.items() if link.a == link.b]:
        _simplify_link(net, key)
    edges = _edges(net)
    for op, (links, stars) in enumerate(edges):
        remove_dominated(net, op, links, stars)


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
    groups = _sharing([(op, cols, set(columns[priced[columns]].tolist())) for op, cols, columns in users.values()])
    if len(groups) == 1 and len(groups[0]) > 1:
        if len(groups[0]) < len(star.users):
            touched |= {star.a, *(op for op, _ in star.users)}
        star.users = groups[0]
        return touched
    del net.stars[key]
    touched |= {star.a, *(op for op, _ in star.users)}
    for ends in groups:
        if len(ends) == 1:
            net.add(Link(star.a, ends[0][0], star.rows, ends[0][1], star.table, star.name))
        else:
            net.add(Star(star.a, star.rows, ends, star.table, star.name))
    return touched


def _sharing(users: list[tuple[int, np.ndarray, set[int]]]) -> list[list[tuple[int, np.ndarray]]]:
    """(P3) The users (op, classes, priced classes) in groups that have no priced class in common, in the order of their first users."""
    groups: list[tuple[set[int], list[tuple[int, np.ndarray]]]] = []
    for op, cols, priced in users:
        apart = [group for group in groups if not group[0] & priced]
        joined = [group for group in groups if group[0] & priced]
        ends = [end for _, group in joined for end in group] + [(op, cols)]
        groups = [*apart, (priced.union(*(classes for classes, _ in joined)), ends)]
    return [ends for _, ends in groups]


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
