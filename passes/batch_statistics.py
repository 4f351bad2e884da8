"""Batch norm in training: the norm, and what it does to its running statistics, as ops that say so."""

from __future__ import annotations

import operator
from math import prod

import torch
from torch import fx

from autoshard.passes.edit import arguments, new_op, replace
from autoshard.program import Program, shape_of

aten = torch.ops.aten

WITH_UPDATES = aten._native_batch_norm_legit_functional.default
WITHOUT = aten._native_batch_norm_legit.no_stats
PLAIN = aten.batch_norm.default


def batch_statistics(program: Program) -> Program:
    """One op for batch norm by the statistics of the batch, and the update of running statistics from its results.

    before:  n = aten._native_batch_norm_legit_functional(x, w, b, mean, var, True, 0.1, 1e-5); y = n[0]; new_mean = n[3]
    after:   n = aten.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5); y = n[0]
             detach = aten.detach(n[1]); new_mean = aten.add(aten.mul(mean, 0.9), aten.mul(detach, 0.1))
    """
    graph = program.graph
    for node in program.ops:
        if node.target not in (WITH_UPDATES, WITHOUT, PLAIN):
            continue
        a = arguments(node)
        if not a["training"] or (node.target is PLAIN and isinstance(a["running_mean"], fx.Node)):
            continue
        with graph.inserting_before(node):
            args = (a["input"], a["weight"], a["bias"], None, None, True, a["momentum"], a["eps"])
            norm = new_op(graph, aten.native_batch_norm.default, args, like=node)
            if node.target is PLAIN:
                replace(node, new_op(graph, operator.getitem, (norm, 0), like=node))
                continue
            for user in list(node.users):
                which = user.args[1]
                new = new_op(graph, operator.getitem, (norm, which), like=node) if which < 3 else updated(graph, norm, a, which, node)
                replace(user, new)
        graph.erase_node(node)
    return program


def updated(graph: fx.Graph, norm: fx.Node, a: dict, index: int, like: fx.Node) -> fx.Node:
    """The new running mean (3) or variance (4)."""

    def op(target, *args) -> fx.Node:
        return new_op(graph, target, args, like=like)

    running = a["running_mean" if index == 3 else "running_var"]
    now = op(aten.detach.default, op(operator.getitem, norm, index - 2))
    if index == 4:  # from the reciprocal deviation of n values, which divides by n; the running variance divides by n - 1
        n = prod(shape_of(a["input"])) // shape_of(a["input"])[1]
        variance = op(aten.sub.Tensor, op(aten.pow.Tensor_Scalar, now, -2), a["eps"])
        now = op(aten.mul.Tensor, variance, n / (n - 1))
    if now.meta["val"].dtype != running.meta["val"].dtype:
        now = op(aten.to.dtype, now, running.meta["val"].dtype)
    return op(aten.add.Tensor, op(aten.mul.Tensor, running, 1 - a["momentum"]), op(aten.mul.Tensor, now, a["momentum"]))
