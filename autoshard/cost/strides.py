"""Which views copy: strides of values, as torch gives them, without running an op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import fx

Ints = tuple[int, ...]

RESHAPES = frozenset("reshape view".split())
PERMUTES = frozenset("permute transpose t numpy_T unsqueeze squeeze alias detach slice select expand narrow diagonal".split())


class Laid(Protocol):
    """A tensor as it lies in memory; itemsize: bytes an element."""

    shape: Ints
    strides: Ints
    itemsize: int


def contiguous(shape: Sequence[int]) -> Ints:
    """Strides of a tensor without gaps, last dim innermost."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def dense_like(shape: Ints, strides: Ints) -> Ints:
    """Strides of a new result of an elementwise op: without gaps, its dims in the order of the operand's."""
    order = sorted(range(len(shape)), key=lambda d: (strides[d], -d))
    out, step = [0] * len(shape), 1
    for d in order:
        out[d] = step
        step *= max(shape[d], 1)
    return tuple(out) if all(strides) else contiguous(shape)


def viewed(shape: Ints, strides: Ints, wanted: Ints) -> Ints | None:
    """Strides of ``reshape(wanted)`` if that is a view, None if it copies: torch's own rule (``computeStride``).

    Neighbouring dims can be merged, and cut elsewhere, only where they lie in memory like one dim.
    """
    if 0 in shape:
        return contiguous(wanted)
    out = [0] * len(wanted)
    at = len(wanted) - 1
    elements, step = 1, strides[-1] if strides else 1
    for d in range(len(shape) - 1, -1, -1):
        elements *= shape[d]
        if d == 0 or (shape[d - 1] != 1 and strides[d - 1] != elements * step):
            size = 1
            while at >= 0 and (size < elements or wanted[at] == 1):
                out[at] = size * step
                size *= wanted[at]
                at -= 1
            if size != elements:
                return None
            if d:
                elements, step = 1, strides[d - 1]
    return tuple(out) if at < 0 or not shape else None


def of_view(node: fx.Node, kind: str, ins: Sequence[Laid], results) -> Ints | None:
    """Strides of the result, where it shares its operand's memory."""
    if len(results) != 1 or not ins:
        return None
    (shape, itemsize), x = results[0], ins[0]
    if kind in RESHAPES:
        return viewed(x.shape, x.strides, shape)
    if kind == "contiguous":
        return x.strides if x.strides == contiguous(x.shape) else None
    if kind == "to":
        return x.strides if x.itemsize == itemsize else None
    return _permuted(node, kind, x, shape) if kind in PERMUTES else None


def _permuted(node: fx.Node, kind: str, x: Laid, shape: Ints) -> Ints:
    rank, strides = len(x.shape), list(x.strides)
    if kind == "permute":
        return tuple(strides[d] for d in node.args[1])
    if kind in ("transpose", "t", "numpy_T"):
        a, b = node.args[1:3] if kind == "transpose" else (0, rank - 1)
        if rank:
            strides[a], strides[b] = strides[b], strides[a]
        return tuple(strides)
    if kind == "unsqueeze":
        d = node.args[1] % (rank + 1)
        return (*strides[:d], (strides[d] * x.shape[d] if d < rank else 1), *strides[d:])
    if kind in ("squeeze", "select"):
        gone = set(range(rank)) - set(_kept(x.shape, shape, node, kind))
        return tuple(s for d, s in enumerate(strides) if d not in gone)
    if kind == "expand":
        lead = len(shape) - rank
        return tuple(0 if d < lead or (x.shape[d - lead] == 1 and n != 1) else strides[d - lead] for d, n in enumerate(shape))
    if kind == "slice" and len(node.args) > 4:
        strides[node.args[1]] *= node.args[4]
    return tuple(strides) if len(strides) == len(shape) else contiguous(shape)


def _kept(before: Ints, after: Ints, node: fx.Node, kind: str) -> list[int]:
    if kind == "select":
        return [d for d in range(len(before)) if d != node.args[1] % len(before)]
    dims = node.args[1] if len(node.args) > 1 else list(range(len(before)))
    dims = {d % len(before) for d in ([dims] if isinstance(dims, int) else dims)}
    return [d for d in range(len(before)) if d not in dims or before[d] != 1]


def of_result(kind: str, shape: Ints, ins: Sequence[Laid]) -> Ints:
    """Of a new result: elementwise ops keep their operand's order, attention's kernels write heads beside each other."""
    if "attention" in kind and len(shape) == 4:
        b, h, s, d = shape
        return (s * h * d, d, h * d, 1)
    like = next((x for x in ins if x.shape == shape), None)
    if like is None or kind in ("linear", "addmm", "mm", "bmm", "matmul", "embedding", "cat"):
        return contiguous(shape)
    return dense_like(shape, like.strides)
