"""Attention masks that are the same for all data become ``is_causal``, or nothing."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.passes.constants import Constants
from autoshard.passes.edit import arguments, written
from autoshard.program import Program, shape_of

aten = torch.ops.aten

LARGEST = 1 << 26
"""Elements of a mask that is looked at (8192 x 8192); larger ones stay as they are."""


def drop_constant_masks(program: Program) -> Program:
    """Models build a mask of batch x heads x queries x keys when traced, even for plain causal attention: large, and slow in the kernel.

    before:  le = aten.le(cols, rows)                                             # rows, cols: aranges; le: [8, 1, 16, 16]
             y = aten.scaled_dot_product_attention(q, k, v, le, 0.0, False)
    after:   y = aten.scaled_dot_product_attention(q, k, v, None, 0.0, True)

    A mask that hides nothing is dropped. Masks that depend on an input or a parameter stay.
    """
    constants = Constants(program)
    kinds: dict[fx.Node, str | None] = {}
    for node in program.ops:
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        values = arguments(node)
        mask = values["attn_mask"]
        if mask is None or values["is_causal"]:
            continue
        if mask not in kinds:
            kinds[mask] = kind_of(mask, constants)
        if kinds[mask] is not None:
            values.update(attn_mask=None, is_causal=kinds[mask] == "causal")
            node.args, node.kwargs = written(node, values, full=True)
    return program


def kind_of(mask: fx.Node, constants: Constants) -> str | None:
    """ "causal", "whole" (hides nothing), or None: neither, or not known."""
    rows, columns = shape_of(mask)[-2:]
    value = constants.value(mask) if rows * columns <= LARGEST else None
    if value is None or value.numel() > LARGEST:
        return None
    if value.dtype == torch.bool:
        kept = value
    else:
        kept = value == 0
        if not (kept | (value <= torch.finfo(value.dtype).min)).all():
            return None  # a bias rather than a mask
    if kept.all():
        return "whole"
    kept = kept.expand(*kept.shape[:-2], rows, columns)
    causal = torch.ones(rows, columns, dtype=torch.bool).tril()
    return "causal" if (kept == causal).all() else None
