"""The model as it trains on one device, in any precision."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.precision import dtype_of
from autoshard.signature import read_call

LEARNING_RATE = 1e-3


def eager(model: nn.Module, batch: Any, loss_fn) -> Any:
    """What the captured model returns, from the model itself: its output, or ``(loss, output)`` with a loss function."""
    extra = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}
    call = read_call(model.forward, batch, loss_fn is not None, extra)
    output = model(*call.args, **call.kwargs)
    if loss_fn is None:
        return output
    return loss_fn(output, {**call.kwargs, **call.loss_only} if isinstance(batch, Mapping) else call.args), output


def loss_of(output: Any, has_loss_fn: bool) -> torch.Tensor | None:
    """The scalar to be minimised in an output, found as capture finds it; None if there is none."""
    if has_loss_fn:
        return output[0]
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    scalars = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.dim() == 0 and t.requires_grad]
    if any(named is t for t in scalars):
        return named
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    return first if len(scalars) == 1 and scalars[0] is first else None


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW | None:
    parameters = [p for p in parameters if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE) if parameters else None


def is_low(model: nn.Module) -> bool:
    """Whether some of the model is in less than fp32."""
    return any(p.is_floating_point() and p.dtype.itemsize < 4 for p in model.parameters())


def cast(batch: Any, dtype: torch.dtype | None) -> Any:
    """A batch with its floating point tensors in ``dtype``."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if dtype and t.is_floating_point() else t, batch)


class OneDevice:
    """The model, and AdamW.

    In mixed precision that is ``model.to(torch.bfloat16)``, of whose trained parameters an fp32 copy each is what AdamW updates, and in
    fp16 a ``torch.amp.GradScaler``: torch's own parts, nothing of ours.

    model: what computes. masters: what is updated, by all names of all parameters; where nothing is lower, they are the model's own.
    """

    def __init__(self, model: nn.Module, loss_fn, precision: str):
        self.loss_fn, self.dtype = loss_fn, dtype_of(precision)
        self.model = copy.deepcopy(model)
        if self.dtype is not None:
            self.model.to(self.dtype)
        made: dict[nn.Parameter, nn.Parameter] = {}
        own = dict(model.named_parameters(remove_duplicate=False))
        self.masters: dict[str, nn.Parameter] = {}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            wide = torch.promote_types(own[name].dtype, torch.float32)
            lower = self.dtype is not None and p.requires_grad and p.dtype.itemsize < wide.itemsize
            self.masters[name] = made.setdefault(p, nn.Parameter(own[name].detach().to(wide, copy=True)) if lower else p)
        self._copies = [(p, master) for p, master in made.items() if p is not master]
        self.optimizer = adamw(made.values())
        self.scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")

    def run(self, batch: Any) -> Any:
        """The model's output, as ``eager`` gives it."""
        return eager(self.model, cast(batch, self.dtype), self.loss_fn)

    def step(self, loss: torch.Tensor) -> None:
        """Backward, and one step of AdamW."""
        self.scaler.scale(loss).backward()
        if self.optimizer is None:
            return
        for p, master in self._copies:
            master.grad = None if p.grad is None else p.grad.to(master.dtype)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with torch.no_grad():
            for p, master in self._copies:
                p.copy_(master)
        self.model.zero_grad()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's, with the masters in place of what they are rounded to."""
        return {**self.model.state_dict(), **{name: p.detach() for name, p in self.masters.items()}}

    def gradients(self, batch: Any, scale: float) -> dict[str, torch.Tensor | None] | None:
        """The gradients of the masters at the model's present parameters, computed from the loss times ``scale``; None without a loss."""
        self.model.zero_grad()
        loss = loss_of(self.run(batch), self.loss_fn is not None)
        if loss is None:
            return None
        (loss if scale == 1.0 else loss.float() * scale).backward()
        found = {name: p.grad for name, p in self.model.named_parameters()}
        if scale == 1.0:
            return found
        return {name: g if g is None else g.to(self.masters[name].dtype) / scale for name, g in found.items()}


class Exact:
    """A model of lower precision in fp32, at the same parameters: how far its own rounding takes it from the truth."""

    def __init__(self, one: OneDevice):
        self.one = one
        self.model = copy.deepcopy(one.model).float()

    def __call__(self, batch: Any) -> Any | None:
        """What the model would return; None if its code insists on the lower precision."""
        self.model.load_state_dict(self.one.model.state_dict())
        self.model.zero_grad()
        try:
            return eager(self.model, cast(cast(batch, self.one.dtype), torch.float32), self.one.loss_fn)
        except RuntimeError:  # of dtypes that do not fit together
            return None

    def gradients(self, batch: Any) -> dict[str, torch.Tensor | None] | None:
        output = self(batch)
        if output is None:
            return None
        loss_of(output, self.one.loss_fn is not None).backward()
        return {name: p.grad for name, p in self.model.named_parameters()}
