"""(P4) Dominated strategies: t goes if some s of the same op costs no more than t whatever all its neighbours do,

    cost[s] - cost[t] + sum over links and stars of max over what the neighbour may do (price with s - price with t) <= 0

so that any answer with t is no worse with s. Equal strategies go too; the lower index stays.
"""

from __future__ import annotations

import numpy as np

from .network import INF, Network, Star


def _difference(better: np.ndarray, worse: np.ndarray) -> np.ndarray:
    """better - worse, where a neighbour that ``worse`` can't have does not count."""
    with np.errstate(invalid="ignore"):
        change = better - worse
    impossible = worse == INF
    return np.where(impossible, -INF, change) if impossible.any() else change


def remove_dominated(net: Network, op: int, links: list[int], stars: list[int]) -> bool:
    """Remove the dominated strategies of ``op``, whose links and stars these are; whether there was one."""
    alive = net.alive(op)
    if len(alive) < 2:
        return False
    cost = net.costs[op][alive]
    worst = cost[:, None] - cost[None, :]  # [s, t]: the most that taking s instead of t can cost more; nan: no bound
    for key in links:
        if key in net.links:
            other, mine, others, table = net.links[key].seen_from(op)
            table = table[:, np.unique(others[net.alive(other)])]
            change = _difference(table[:, None, :], table[None, :, :]).max(axis=2)
            with np.errstate(invalid="ignore"):
                worst = worst + change[np.ix_(mine[alive], mine[alive])]
    for key in stars:
        if key in net.stars:
            with np.errstate(invalid="ignore"):  # impossible with s here, with t there
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
    """The most that strategy s of ``op`` instead of t can add to a star's price, as [s, t] over the living strategies."""
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
