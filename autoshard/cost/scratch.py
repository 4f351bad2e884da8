"""Memory of kernels beside operands and results: what backward finds saved of them, and what comes and goes while they run.

Bytes on one rank, as torch 2.13's own kernels and derivative formulas allocate. An op that is not listed takes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Bytes = Sequence[float]


@dataclass(frozen=True)
class Scratch:
    """saved: kept for backward, neither operand nor result. forward, backward: what comes and goes beside operands and results."""

    saved: float = 0.0
    forward: float = 0.0
    backward: float = 0.0


NOTHING = Scratch()


def _cross_entropy(ins: Bytes, outs: Bytes) -> Scratch:
    """log_softmax of the logits is kept; backward makes the gradient of that before the logits' own."""
    return Scratch(saved=ins[0], backward=ins[0])


def _vocab_cross_entropy(ins: Bytes, outs: Bytes) -> Scratch:
    """``runtime.kernels``: the shifted logits are exponentiated in place; backward has their gradient alone."""
    return Scratch(forward=ins[0])


def _power(ins: Bytes, outs: Bytes) -> Scratch:
    """grad * (n * x ** (n - 1)): the power and its multiple."""
    return Scratch(backward=2 * ins[0])


def _dropout(ins: Bytes, outs: Bytes) -> Scratch:
    return Scratch(saved=ins[0])


def _broadcast(ins: Bytes, outs: Bytes) -> Scratch:
    """An operand that was broadcast gets the sum of a gradient as large as the result."""
    return Scratch(backward=outs[0]) if any(0 < b < outs[0] for b in ins) else NOTHING


OPS: dict[str, Callable[[Bytes, Bytes], Scratch]] = {
    "cross_entropy_loss": _cross_entropy,
    "vocab_cross_entropy": _vocab_cross_entropy,
    "pow": _power,
    "dropout": _dropout,
    "mul": _broadcast,
    "div": _broadcast,
}


def op_scratch(kind: str, ins: Bytes, outs: Bytes) -> Scratch:
    """Of an op, by its kind and the local bytes of its operands and results."""
    return OPS[kind](ins, outs) if kind in OPS and ins and outs else NOTHING


def conversion_scratch(kind: str, before: float, after: float, first_dim: bool, copies: bool) -> float:
    """Bytes that come and go in a collective, beside what it is given and what it returns (``runtime.collectives``).

    before, after: bytes of the value on this rank. first_dim: the pieces are of dim 0, in one block, so nothing need be put in order.
    copies: the backend works on a flat copy, as gloo does to gather and to reduce-scatter.
    """
    if kind == "all_gather":
        return (after if copies else 0.0) if first_dim else after
    if kind == "reduce_scatter":
        return (0.0 if first_dim else before) + (before if copies else 0.0)
    if kind == "all_to_all":
        return before + after
    return 0.0


def optimizer_scratch(pieces: Bytes, one_by_one: bool) -> float:
    """Bytes that an Adam step needs for a while. ``pieces``: bytes of each parameter that it updates.

    On a CPU parameters are updated one by one (the root of the second moment, and that over the bias correction); on a GPU all at once
    (torch's ``foreach``), which needs the root of all second moments.
    """
    return 2 * max(pieces, default=0.0) if one_by_one else float(sum(pieces))
