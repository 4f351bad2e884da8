"""Which ids a model looks up, as far as they follow from its inputs, so that every rank can check all of them before the step.

Ids out of range would otherwise be an error on the ranks alone whose piece of the batch holds them, while the others wait for those.

of (vocabulary of 99)::

    pad = aten.constant_pad_nd(labels, [0, 1], -100)
    slice_1 = aten.slice(pad, 1, 1)
    embedding = aten.embedding(weight, ids)
    sum_1 = aten.cross_entropy_loss(logits, slice_1, reduction=sum)

it finds::

    ids in 0 to 98; slice_1, which is pad and slice of ``labels``, in 0 to 98 or -100
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autoshard.program import Program, ancestors, draws, op_kind, tensors
from autoshard.rules.call import argument, shape


@dataclass(frozen=True)
class IdCheck:
    """The values of ``ids`` must be from low to high, or ``ignored``. op: the plain name of the op that looks them up, in ``module``."""

    ids: fx.Node
    low: int
    high: int
    ignored: int | None
    op: str
    module: str


@dataclass(frozen=True)
class IdChecks:
    """The checks in the order of their ops, and the ops that make their ids from the inputs of the *whole* batch."""

    checks: tuple[IdCheck, ...] = ()
    ops: tuple[fx.Node, ...] = ()


def _rows(node: fx.Node):
    yield argument(node, "indices"), 0, shape(node, "weight")[0], None


def _classes(node: fx.Node):
    logits = shape(node, "self")
    yield argument(node, "target"), 0, logits[1 if len(logits) > 1 else 0], argument(node, "ignore_index")


def _along(node: fx.Node):
    size = shape(node, "self")
    yield argument(node, "index"), 0, size[argument(node, "dim")] if size else 1, None


def _each_dim(node: fx.Node):
    for ids, size in zip(argument(node, "indices"), shape(node, "self")):
        yield ids, -size, size, None


LOOKUPS = {
    **dict.fromkeys(("embedding",), _rows),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"), _classes),
    **dict.fromkeys(("gather", "index_select", "scatter", "scatter_add", "index_add", "index_copy"), _along),
    **dict.fromkeys(("index", "index_put"), _each_dim),
}
"""Op -> its (ids, lowest, one more than the highest, ignored)."""


def id_checks(program: Program) -> IdChecks:
    """The checks of a canonical program of the whole batch. Ids that depend on anything but inputs are left to the op itself."""
    program, known = program.copy(), {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            known[node] = node.name in program.inputs
            if known[node]:
                node.meta["expr"] = f'batch["{program.inputs[node.name].name}"]'
        elif node.op == "call_function":
            whole = all(not t.is_floating_point() and not t.is_complex() for t in tensors(node.meta["val"]))
            sources = node.all_input_nodes
            known[node] = whole and bool(sources) and not draws(node) and all(known[x] for x in sources)
    checks = []
    for node in program.ops:
        for ids, low, end, ignored in LOOKUPS.get(op_kind(node), lambda node: ())(node):
            if ids is not None and known[ids] and tensors(ids.meta["val"])[0].dtype in (torch.int32, torch.int64):
                checks.append(IdCheck(ids, low, end - 1, ignored, op_kind(node), node.meta.get("module", "")))
    needed = ancestors(check.ids for check in checks)
    return IdChecks(tuple(checks), tuple(node for node in program.ops if node in needed))

