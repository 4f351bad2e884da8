"""Writes into a part of a tensor become a concatenation of parts."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.passes.edit import arguments, new_op, replace
from autoshard.program import Program, shape_of

aten = torch.ops.aten


def writes_to_cat(program: Program) -> Program:
    """Rewrite what functionalisation makes of ``x[:, 1:] = y`` and ``x[:, 0] = 3``: fewer rules, and ops that all have a derivative.

    before:  z = aten.full([8, 12], 0); c = aten.copy(aten.slice(z, 1, 1, 12), y); out = aten.slice_scatter(z, c, 1, 1, 12)
    after:   z = aten.full([8, 12], 0); out = aten.cat([aten.slice(z, 1, 0, 1), y], 1)
    """
    graph = program.graph
    for node in program.ops:
        rewrite = REWRITES.get(node.target)
        if rewrite is None:
            continue
        with graph.inserting_before(node):
            new = rewrite(graph, node)
        if new is not None:
            replace(node, new)
    return program


def spread(graph: fx.Graph, node: fx.Node, value: fx.Node) -> fx.Node:
    """``value`` with the dtype and shape of ``node``."""
    if value.target is aten.full.default and not shape_of(value):
        return new_op(graph, aten.full.default, (list(shape_of(node)), value.args[1]), {"dtype": node.meta["val"].dtype}, like=node)
    if value.meta["val"].dtype != node.meta["val"].dtype:
        value = new_op(graph, aten.to.dtype, (value, node.meta["val"].dtype), like=node)
    if shape_of(value) != shape_of(node):
        value = new_op(graph, aten.expand.default, (value, list(shape_of(node))), like=node)
    return value


def over(graph: fx.Graph, node: fx.Node, old: fx.Node, value: fx.Node) -> fx.Node:
    """``value`` in place of ``old``, whose gradient is zeros then: parameters behind it have a gradient of zeros, not none."""
    if not old.meta["grad"]:
        return value
    return new_op(graph, aten.add.Tensor, (new_op(graph, aten.fill.Scalar, (old, 0), like=node), value), like=node)


def written_back(old: fx.Node, node: fx.Node) -> bool:
    """Whether what stands in place of ``old``, a part of something, is only put back there: then the whole has the gradient."""
    return old.target in PARTS and all(user.target in SCATTERS and user.args[0] is old.args[0] for user in node.users)


def copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    old, value = node.args[0], spread(graph, node, node.args[1])
    return value if written_back(old, node) else over(graph, node, old, value)


def filled(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    old, value = node.args
    if old.meta["grad"] and not written_back(old, node):
        return None
    if isinstance(value, fx.Node):
        return spread(graph, node, value)
    return new_op(graph, aten.full.default, (list(shape_of(node)), value), {"dtype": node.meta["val"].dtype}, like=node)


def slice_written(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    values = arguments(node)
    x, src, size = values["self"], values["src"], shape_of(values["self"])[values["dim"]]
    if values["step"] != 1:
        return None
    start, end = values["start"] or 0, size if values["end"] is None else values["end"]
    start, end = (min(max(v + size if v < 0 else v, 0), size) for v in (start, end))
    return joined(graph, node, x, src, values["dim"] % len(shape_of(x)), start, max(start, end))


def select_written(graph: fx.Graph, node: fx.Node) -> fx.Node:
    values = arguments(node)
    x, dim = values["self"], values["dim"] % len(shape_of(values["self"]))
    index = values["index"] % shape_of(x)[dim]
    row = new_op(graph, aten.unsqueeze.default, (values["src"], dim), like=node)
    return joined(graph, node, x, row, dim, index, index + 1)


def joined(graph: fx.Graph, node: fx.Node, x: fx.Node, src: fx.Node, dim: int, start: int, end: int) -> fx.Node:
    """``x`` with ``src`` in place of its part from ``start`` to ``end`` along ``dim``."""
    size = shape_of(x)[dim]
    parts = [new_op(graph, aten.slice.Tensor, (x, dim, a, b), like=node) for a, b in ((0, start), (end, size)) if a < b]
    if start < end:
        parts.insert(1 if start else 0, src)
    if parts == [src]:
        return over(graph, node, x, src)
    return parts[0] if len(parts) == 1 else new_op(graph, aten.cat.default, (parts, dim), like=node)


PARTS = (aten.slice.Tensor, aten.select.int)
SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default)
REWRITES = {
    aten.copy.default: copied,
    aten.fill.Tensor: filled,
    aten.fill.Scalar: filled,
    aten.slice_scatter.default: slice_written,
    aten.select_scatter.default: select_written,
}
