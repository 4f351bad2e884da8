"""The time of one training step on a pipeline of p stages and m micro-batches.

    step = sum over stages of t + (m - 1) * max t + once

The first micro-batch passes every stage, and then the slowest stage hands out one more every ``max t``: exact for a chain whose stages
each take one fixed time a micro-batch (a permutation flow shop with constant times). 1F1B has the same length as GPipe, and holds fewer
activations (Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021).
"""

from __future__ import annotations

from collections.abc import Sequence


def step_seconds(stages: Sequence[float], microbatches: int, once: Sequence[float] | float = 0.0) -> float:
    """Seconds of a step.

    stages: seconds of forward plus backward of one micro-batch in each stage, its share of the sends included.
    once: seconds a step that no micro-batch overlaps (gradient sync, optimizer): of each stage (they run side by side), or in all.
    """
    slowest_once = max(once) if isinstance(once, Sequence) else once
    return sum(stages) + (microbatches - 1) * max(stages) + slowest_once


def bubble_share(stages: Sequence[float], microbatches: int) -> float:
    """The share of the pipelined part of a step that a rank waits, averaged over the stages.

    A stage works m * t of the step's sum t + (m - 1) max t. For p equal stages this is (p - 1) / (p - 1 + m).
    """
    total = step_seconds(stages, microbatches)
    return 1.0 - microbatches * sum(stages) / (len(stages) * total) if total else 0.0


def equal_bubble(p: int, microbatches: int) -> float:
    """The bubble of p equal stages, (p - 1) / (p - 1 + m): 8 stages and 4 micro-batches wait 63.6 % of the time."""
    return (p - 1) / (p - 1 + microbatches)
