"""Which views copy: strides of values, as torch gives them, without running an op."""

from __future__ import annotations

from collections.abc import Sequence

Ints = tuple[int, ...]


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
