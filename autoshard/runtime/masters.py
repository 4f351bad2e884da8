"""Optimizers over parameters whose gradients are of lower precision than they are, or scaled: fp32 masters, dynamic scaling of the loss.

A master's ``.grad`` is in the precision of backward, and in fp16 times the scale of the loss. For the time of an optimizer's step, of any
``torch.optim.Optimizer``, it is the true gradient in the master's own precision: hooks that torch runs around every step see to that.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoshard.errors import RunError
from autoshard.runtime.world import World

FIRST_SCALE, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""Those of torch.amp.GradScaler."""


class Masters:
    """The trained parameters of one model on this rank, and the scale of its loss.

    As with ``torch.amp.GradScaler``, a step whose gradients are not all finite is skipped, and the scale halves; after 2000 steps that
    are not, it doubles. Ranks agree on both: any gradient of any rank counts.

    Args:
        scaled: whether the loss is scaled, as fp16 needs; else the scale is 1.

    skipped: whether the last step was skipped.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], world: World, scaled: bool):
        self.params, self.world, self.scaled = list(params), world, scaled
        self.skipped = False
        self._scale, self._good = FIRST_SCALE if scaled else 1.0, 0
        self._stepped = self._overflowed = False
        self._aside: dict[torch.nn.Parameter, torch.Tensor] = {}
        for p in self.params:
            p.masters = self

    @property
    def scale(self) -> float:
        """That of the next backward. It changes between steps, not within one that several optimizers share; gradients that wait to be
        added to change with it."""
        if self._stepped:
            old = self._scale
            self._good = 0 if self._overflowed else self._good + 1
            if self._overflowed:
                self._scale *= BACKOFF
            elif self._good == INTERVAL:
                self._scale, self._good = self._scale * GROWTH, 0
            self._stepped = self._overflowed = False
            self._rescale(old)
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        old, self._scale = self.scale, float(value)
        self._rescale(old)

    @torch.no_grad()
    def _rescale(self, old: float) -> None:
        for p in self.params if self._scale != old else ():
            if p.grad is not None:
                p.grad.mul_(self._scale / old)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "good": self._good}

    def load(self, state: dict[str, float]) -> None:
        self._scale, self._good, self._stepped = state["scale"], state["good"], False

    def true(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A gradient without the scale."""
        return gradient.to(dtype).div(self._scale) if self.scaled else gradient.to(dtype)

    @torch.no_grad()
    def before(self, params: list[torch.nn.Parameter]) -> None:
        """Give these parameters what an optimizer's step may read: no gradient, if the step is skipped. A collective if scaled."""
        self._aside = {p: p.grad for p in params if p.grad is not None}
        for p, gradient in self._aside.items():
            p.grad = self.true(gradient, p.dtype)
        if not self.scaled:
            return
        device = self.world.device
        bad = [~p.grad.isfinite().all().to(device) for p in self._aside] or [torch.tensor(False, device=device)]
        bad = torch.stack(bad).any().float()
        if self.world.mesh.size > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX, group=self.world.everyone)
        self.skipped, self._stepped = bool(bad), True
        self._overflowed |= self.skipped
        if self.skipped:
            for p in self._aside:
                p.grad = None

    def after(self) -> None:
        """Put the gradients back."""
        for p, gradient in self._aside.items():
            p.grad = gradient
        self._aside = {}


def _before(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    of: dict[Masters, list[torch.nn.Parameter]] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if hasattr(p, "masters"):
                of.setdefault(p.masters, []).append(p)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if of and closure is not None:
        raise RunError("step(closure) can't be used in mixed precision", hint="call backward, then step()")
    for masters, params in of.items():
        masters.before(params)


def _after(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    for masters in {p.masters for group in optimizer.param_groups for p in group["params"] if hasattr(p, "masters")}:
        masters.after()


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)
