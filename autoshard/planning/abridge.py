"""A program with few of its identical layers: all can be decided on it that can be on the whole, in a time that depth does not change."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autoshard.planning.fold import Layers, fold
from autoshard.program import Program, copied_node

MANY = 16
"""Layers of one kind in a row, from which on they are left out: with fewer, the pipeline may have to be cut within one."""


def abridged(program: Program) -> Program | None:
    """The program without most of its identical layers; None if it has none that could be left out.

    Of n layers in a row the first, the second and the last stay; the last reads what the second gives. ``meta["stands_for"]`` of the second
    one's nodes is n - 2.

    before::

        a = f(x, w0); b = f(a, w1); c = f(b, w2); d = f(c, w3); loss = g(d)

    after::

        a = f(x, w0); b = f(a, w1); d = f(b, w3); loss = g(d)        # b stands for 2
    """
    ops = program.ops
    replaced: dict[fx.Node, fx.Node] = {}  # what is left out, by what is read instead
    stands_for: dict[fx.Node, int] = {}
    for layers in fold(program).layers:
        starts, period = _row(layers), layers.period
        if len(starts) < MANY:
            continue
        gone = {ops[start + i]: ops[starts[1] + i] for start in starts[2:-1] for i in range(period)}
        last = set(ops[starts[-1] : starts[-1] + period])
        if any(user not in gone and user not in last for node in gone for user in node.users):
            continue  # the model returns something of every layer, say
        replaced.update(gone)
        stands_for.update(dict.fromkeys(ops[starts[1] : starts[1] + period], len(starts) - 2))
    if not replaced:
        return None
    graph, mapping = fx.Graph(), {}
    for node in program.graph.nodes:
        if node in replaced:
            mapping[node] = mapping[replaced[node]]
        elif node.op != "placeholder" or not node.users or any(user not in replaced for user in node.users):
            new = copied_node(graph, node, mapping)
            if node in stands_for:
                new.meta["stands_for"] = stands_for[node]
    names = {node.name for node in graph.nodes if node.op == "placeholder"}
    return replace(program, graph=graph, params={name: param for name, param in program.params.items() if name in names})


def _row(layers: Layers) -> tuple[int, ...]:
    """The longest run of instances that follow each other at once."""
    best = row = layers.starts[:1]
    for start in layers.starts[1:]:
        row = (*row, start) if start == row[-1] + layers.period else (start,)
        best = max(best, row, key=len)
    return best
