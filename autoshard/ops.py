"""Ops of our own that passes put into a program, beside ATen's. The emitter prints each as the runtime function of the same name.

They are names, not code: a program is rewritten and printed, never run. An ``axis`` argument is the axis's name.
"""

from __future__ import annotations


def convert(x, text: str, axis: str, size: int):
    """``x`` from one placement to another along one axis, ``text`` like "S(1) -> R*"; ``size``: see ``runtime.convert``."""
    raise NotImplementedError


def vocab_embedding(weight, ids, axis: str, size: int, padding_idx: int = -1):
    """Embedding whose table is cut by rows over ``axis``; the result is P along it. ``size``: rows of the whole table."""
    raise NotImplementedError


def vocab_cross_entropy(
    logits, labels, axis: str, size: int, weight=None, reduction: str = "sum", ignore_index: int = -100, label_smoothing: float = 0.0
):
    """Cross-entropy whose classes are cut over ``axis``; the result is whole along it. ``size``: number of classes."""
    raise NotImplementedError


def scaled_sum(x, dims, keepdim: bool, count: int):
    """The rank's summand of a mean over ``count`` elements: the sum of its own, divided by the count of all."""
    raise NotImplementedError


def batch_norm(x, weight, bias, axis: str, size: int, eps: float):
    """Batch norm in training whose samples, ``size`` in all, are cut over ``axis``: (result, mean, reciprocal deviation)."""
    raise NotImplementedError


LOCAL_OPS = (convert, vocab_embedding, vocab_cross_entropy, scaled_sum, batch_norm)
