"""Random numbers that are equal on ranks where a value is replicated, and differ where it is sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import contextmanager

import torch

from autoshard.runtime.axis import Axis
from autoshard.runtime.numbers import Numbers


class Streams:
    """One ``torch.Generator`` for each set of axes that may shard a value: ``streams()``, ``streams("data")`` and so on.

    A stream is seeded from the seed, this rank's coordinates along those axes, and the stage: ranks that differ only along other axes
    draw the same numbers, so long as they draw in the same order.

    Args:
        axes: the axes along which values are placed.
        stage: the pipeline stage.
        device: where the numbers are drawn.
        seed: the same on every rank; ``torch.initial_seed()`` if not given.
    """

    def __init__(self, axes: Iterable[Axis], stage: int = 0, device: torch.device | str = "cpu", seed: int | None = None):
        self.axes = {axis.name: axis for axis in axes}
        self.stage, self.device = stage, torch.device(device)
        self.generators: dict[tuple[str, ...], torch.Generator] = {}
        self.manual_seed(torch.initial_seed() if seed is None else seed)

    def manual_seed(self, seed: int):
        """Starts every stream anew."""
        self.seed = seed
        for names, generator in self.generators.items():
            generator.manual_seed(self._seed(names))

    def __call__(self, *names: str) -> torch.Generator:
        """The stream of values sharded over the axes of these names."""
        names = tuple(name for name in self.axes if name in names)
        if names not in self.generators:
            self.generators[names] = torch.Generator(self.device).manual_seed(self._seed(names))
        return self.generators[names]

    def _seed(self, names: tuple[str, ...]) -> int:
        key = repr((self.seed, self.stage, [(name, self.axes[name].index) for name in names]))
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big")

    @contextmanager
    def fork(self, *names: str):
        """Lets ops that can only use torch's default generator draw from a stream; the default one is left as it was."""
        stream, default = self(*names), _default_generator(self.device)
        before = default.get_state()
        default.set_state(stream.get_state())
        try:
            yield
        finally:
            stream.set_state(default.get_state())
            default.set_state(before)

    def checkpoint_contexts(self):
        """``context_fn`` of ``torch.utils.checkpoint.checkpoint``: what is computed again draws the numbers that it drew before."""
        before: dict[tuple[str, ...], torch.Tensor] = {}

        @contextmanager
        def forward():
            before.update(self.states())
            yield

        @contextmanager
        def again():
            now = self.states()
            # a stream that was first used in the region started from its seed
            self.restore(before)
            try:
                yield
            finally:
                self.restore(now)

        return forward(), again()

    def restore(self, states: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        """Every stream goes on from where it was when ``states`` were taken; one that was not there, from its seed."""
        for names, generator in self.generators.items():
            generator.set_state(states[names]) if names in states else generator.manual_seed(self._seed(names))

    def states(self) -> dict[tuple[str, ...], torch.Tensor]:
        """Where every stream is now, by the axes of its values."""
        return {names: generator.get_state() for names, generator in self.generators.items()}


def dropout(x: torch.Tensor, p: float, source: torch.Generator | Numbers) -> torch.Tensor:
    """``F.dropout`` in training, with the mask drawn from ``source``; only a byte an element is kept for backward.

    torch.compile can't trace a generator: it breaks the graph there.
    """
    if p == 0:
        return x
    if p == 1:
        return x * 0
    if isinstance(source, Numbers):
        keep = source.keep(1 - p)
    else:
        keep = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=source)
    return x * keep * (1 / (1 - p))


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator
