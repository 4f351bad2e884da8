"""The list of all steps that a random model may be grown from."""

from __future__ import annotations

from collections.abc import Callable

from .maker import Maker

STEPS: list[tuple[float, Callable[[Maker], None]]] = []
"""(how often, step). A step adds to the model, or raises ``SkipStep`` where it has nothing to work on."""


def step(often: float = 1.0):
    """Adds a function to ``STEPS``."""

    def add(fn: Callable[[Maker], None]) -> Callable[[Maker], None]:
        STEPS.append((often, fn))
        return fn

    return add
