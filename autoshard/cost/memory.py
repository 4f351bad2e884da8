"""Bytes that one rank holds, in pieces that add up: parameters, gradients, optimizer state, saved activations, and what comes and goes.

Adam keeps two moments of every parameter. In single precision that is 4 + 4 + 8 = 16 bytes a parameter; in mixed precision 2 + 2 + 12
= 16 as well, since the optimizer also keeps the parameter in fp32 (Rajbhandari et al., "ZeRO: memory optimizations toward training
trillion parameter models", SC 2020). ZeRO divides over the k data ranks: level 1 the optimizer state (4 + 12/k in mixed precision),
level 2 the gradients too (2 + 14/k), level 3 the parameters too (16/k).

``moments`` puts the pieces together, linear in each of them, as a planner needs them; ``rank.step_peak`` follows a whole program op by op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "transient")
"""The keys of every memory table, in the order in which reports print them."""


def state_bytes(
    elements: float,
    itemsize: int = 4,
    mixed: bool = False,
    zero: int = 0,
    ranks: int = 1,
    trainable: bool = True,
    added_up: bool = False,
) -> dict[str, float]:
    """Bytes of parameters, gradients and Adam's state of ``elements`` parameters that a rank would hold without ZeRO.

    itemsize: of the model's parameters (4 for fp32). mixed: they are held and differentiated in 2 bytes, with an fp32 copy in the
    optimizer. zero: level 0 to 3, over ``ranks`` data ranks. trainable: a frozen parameter has no gradient and no optimizer state.
    added_up: the step has several micro-batches. At level 2 their gradients are added up whole, and only the sum is cut.
    """
    if mixed:
        parameter, gradient, optimizer = 2.0, 2.0, 12.0
    else:
        parameter, gradient, optimizer = float(itemsize), float(itemsize), 2.0 * itemsize
    if not trainable:
        gradient = optimizer = 0.0
    return {
        "parameters": elements * parameter / (ranks if zero >= 3 else 1),
        "gradients": elements * gradient / (ranks if zero >= (3 if added_up else 2) else 1),
        "optimizer": elements * optimizer / (ranks if zero >= 1 else 1),
    }


def saved_bytes(costs: Iterable) -> float:
    """Bytes of the activations that some ops (``OpCost``) save for backward, one micro-batch; what several ops save is held once."""
    held: dict = {}
    for cost in costs:
        held.update(cost.saved)
    return sum(held.values())


def working_bytes(costs: Iterable) -> float:
    """Bytes that come and go: the largest working set of any one op (``OpCost``), one micro-batch."""
    return max((cost.working_bytes for cost in costs), default=0.0)


def moments(
    state: Mapping[str, float], saved: float, working: float, flight: int, microbatches: int, standing: float = 0.0, finishing: float = 0.0
) -> tuple[float, float, float]:
    """Bytes of a rank at the three moments of a step when it may need most; the largest one counts.

    state: its parameters, gradients and optimizer state, all there are. saved, working: of one micro-batch, of which ``flight`` are held.
    standing: what is there all the time, as what the model returns for each micro-batch.
    finishing: what comes and goes after the last backward (``scratch.optimizer_scratch``, ``buckets``).

    First, ``flight`` micro-batches have run forward; gradients are there if another one ran backward before. Second, the last micro-batch
    has run forward (in backward activations go as gradients come, layer by layer, so that the sum is largest at one of its ends). Third,
    activations are gone.
    """
    always = state["parameters"] + state["optimizer"] + standing
    gradients = state["gradients"]
    return (
        always + (gradients if microbatches > flight else 0.0) + flight * saved + working,
        always + (gradients if microbatches > 1 else 0.0) + saved + working,
        always + gradients + finishing,
    )
