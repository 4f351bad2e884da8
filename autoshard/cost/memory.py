"""Bytes that one rank holds: parameters, gradients, optimizer state, saved activations, and what comes and goes.

Adam keeps two moments of every parameter. In single precision that is 4 + 4 + 8 = 16 bytes a parameter; in mixed precision 2 + 2 + 12
= 16 as well, since the optimizer also keeps the parameter in fp32 (Rajbhandari et al., "ZeRO: memory optimizations toward training
trillion parameter models", SC 2020). ZeRO divides over the k data ranks: level 1 the optimizer state (4 + 12/k in mixed precision),
level 2 the gradients too (2 + 14/k), level 3 the parameters too (16/k).
"""

from __future__ import annotations

from collections.abc import Container, Iterable

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "transient")
"""The keys of every memory table, in the order in which reports print them."""


def state_bytes(
    elements: float, itemsize: int = 4, mixed: bool = False, zero: int = 0, ranks: int = 1, trainable: bool = True
) -> dict[str, float]:
    """Bytes of parameters, gradients and Adam's state of ``elements`` parameters that a rank would hold without ZeRO.

    itemsize: of the model's parameters (4 for fp32). mixed: they are held and differentiated in 2 bytes, with an fp32 copy in the
    optimizer. zero: level 0 to 3, over ``ranks`` data ranks. trainable: a frozen parameter has no gradient and no optimizer state.
    """
    if mixed:
        parameter, gradient, optimizer = 2.0, 2.0, 12.0
    else:
        parameter, gradient, optimizer = float(itemsize), float(itemsize), 2.0 * itemsize
    if not trainable:
        gradient = optimizer = 0.0
    return {
        "parameters": elements * parameter / (ranks if zero >= 3 else 1),
        "gradients": elements * gradient / (ranks if zero >= 2 else 1),
        "optimizer": elements * optimizer / (ranks if zero >= 1 else 1),
    }


def saved_bytes(costs: Iterable, but: Container = ()) -> float:
    """Bytes of the activations that some ops (``OpCost``) save for backward, one micro-batch; what several ops save is held once.

    but: where values lie that do not count.
    """
    held: dict = {}
    for cost in costs:
        held.update(cost.saved)
    return sum(nbytes for at, nbytes in held.items() if at not in but)


def transient_bytes(costs: Iterable) -> float:
    """Bytes that come and go: the largest working set of any one op (``OpCost``), one micro-batch."""
    return max((cost.working_bytes for cost in costs), default=0.0)


def rank_memory(states: Iterable[dict[str, float]], activations: float, flight: int = 1, transient: float = 0.0) -> dict[str, float]:
    """The memory table of one rank, bytes by category (``CATEGORIES``).

    states: one ``state_bytes`` a parameter (or group of them). activations: saved bytes of one micro-batch, of which ``flight`` are held.
    """
    table = dict.fromkeys(CATEGORIES, 0.0)
    for state in states:
        for key, nbytes in state.items():
            table[key] += nbytes
    table["activations"] = activations * flight
    table["transient"] = transient
    return table
