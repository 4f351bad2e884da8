"""Put back together what torch takes apart to make a graph functional."""

from __future__ import annotations

import torch

from autoshard.passes.edit import arguments, only_first_result, replace
from autoshard.program import Program

aten = torch.ops.aten


def whole_ops(program: Program) -> Program:
    """One op with one result instead of a native one that also returns what its backward needs; the backward here is autograd's.

    before:  n = aten.native_dropout(x, 0.1, True); y = getitem(n, 0)
    after:   y = aten.dropout(x, 0.1, True)
    """
    for node in program.ops:
        whole = WHOLE.get(node.target)
        if whole is None or not only_first_result(node):
            continue
        node.target, node.args = whole(arguments(node))
        node.kwargs = {}
        node.meta["val"] = node.meta["val"][0]
        for user in list(node.users):
            replace(user, node)
    return program


def dropout(a: dict) -> tuple:
    return aten.dropout.default, (a["input"], a["p"], a["train"] is not False)


def batch_norm(a: dict) -> tuple:
    return aten.batch_norm.default, (
        *(a[name] for name in ("input", "weight", "bias", "running_mean", "running_var")),
        False,
        a["momentum"],
        a["eps"],
        True,
    )


WHOLE = {aten.native_dropout.default: dropout, aten._native_batch_norm_legit_no_training.default: batch_norm}
