"""Regions whose activations are not kept: backward computes them again from the region's inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def recompute(region: Callable, *inputs: Any) -> Any:
    """What ``region(*inputs)`` gives, without what backward would need of it: that is computed again when backward gets there.

    Random numbers are the same both times, and conversions inside run again, so that ranks must compute their regions in one order,
    as they do.

    Args:
        region: a method of a ``StageModule``.
    """
    streams = region.__self__.streams  # all random numbers of emitted code come from there
    return checkpoint(region, *inputs, use_reentrant=False, context_fn=streams.checkpoint_contexts, preserve_rng_state=False)
