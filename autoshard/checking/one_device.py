"""The model as it trains on one device, in any precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from autoshard.precision import dtype_of
from autoshard.signature import read_call
from autoshard.torch_private import TorchDispatchMode, pytree

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
    return any(_below_fp32(p) for p in model.parameters())


def _below_fp32(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype.itemsize < 4


def lowest_dtype(one: OneDevice, batch: Any) -> torch.dtype | None:
    """The dtype below fp32 of what one device computes, of those the coarsest; None if there is none.

    It is the model's own, or, in fp32, what forward casts to: with ``torch.autocast``, or itself.
    """
    if is_low(one.model):
        found = {p.dtype for p in one.model.parameters() if _below_fp32(p)}
    elif any(p.dtype == torch.float64 for p in one.model.parameters()):
        return None  # nothing that matters is allowed to be lower, see precise.py
    else:
        with torch.no_grad(), _Computed() as computed:
            eager(copy.deepcopy(one.model), cast(batch, one.dtype), one.loss_fn)
        found = computed.below_fp32
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=None)


class _Computed(TorchDispatchMode):
    """The dtypes below fp32 of all that is computed inside."""

    def __init__(self):
        super().__init__()
        self.below_fp32: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.below_fp32 |= {t.dtype for t in pytree.tree_leaves(result) if _below_fp32(t)}
        return result


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

    def gradients(self, batch: Any, scale: float) -> Gradients | None:
        """The gradients of the masters at the model's present parameters, computed from the loss times ``scale``; None without a loss."""
        found = gradients_of(self.model, cast(batch, self.dtype), self.loss_fn, scale)
        if found is None or scale == 1.0:
            return found
        return {name: g if g is None else g.to(self.masters[name].dtype) / scale for name, g in found.items()}


Gradients = dict[str, torch.Tensor | None]


def gradients_of(model: nn.Module, batch: Any, loss_fn, scale: float = 1.0) -> Gradients | None:
    """The gradients of a model's parameters, times ``scale``; None if it returns no loss."""
    model.zero_grad()
    loss = loss_of(eager(model, batch, loss_fn), loss_fn is not None)
    if loss is None:
        return None
    (loss if scale == 1.0 else loss.float() * scale).backward()
    return {name: p.grad for name, p in model.named_parameters()}


class Nearby:
    """Runs that are as right as one device's own in lower precision, so that their distance says how much rounding matters: the model in
    fp32 at the same parameters, and, twice, the model as it is with every parameter moved by one rounding step.

    low: the dtype whose rounding matters, see ``lowest_dtype``. A model in fp32 that casts to it has no run without rounding.
    """

    def __init__(self, one: OneDevice, low: torch.dtype):
        self.one, self.low = one, low
        self.exact, self.moved = copy.deepcopy(one.model).float(), copy.deepcopy(one.model)

    def _models(self):
        """The models, and the dtype of their inputs if it is another."""
        state = self.one.model.state_dict()
        if is_low(self.one.model):
            self.exact.load_state_dict(state)
            yield self.exact, torch.float32
        for seed in (1, 2):
            self.moved.load_state_dict(state)
            draw = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for p in self.moved.parameters():
                    if p.is_floating_point():
                        way = torch.randint(0, 2, p.shape, generator=draw) * 2 - 1
                        p.mul_(1 + max(torch.finfo(p.dtype).eps, torch.finfo(self.low).eps) * way.to(p.device))
            yield self.moved, None

    def _each(self, fresh: Callable[[], Any], run: Callable[[nn.Module, Any], Any]) -> list[Any]:
        found = []
        for model, wide in self._models():
            try:
                found.append(run(model, cast(cast(fresh(), self.one.dtype), wide)))
            except RuntimeError:  # code that insists on the lower precision can't be run in fp32
                continue
        return found

    def outputs(self, fresh: Callable[[], Any]) -> list[Any]:
        """What each returns. ``fresh()`` gives the batch, and seeds the random numbers anew."""
        return self._each(fresh, lambda model, batch: eager(model, batch, self.one.loss_fn))

    def gradients(self, fresh: Callable[[], Any], scale: float) -> list[Gradients]:
        """The gradients of each, without the scale."""

        def run(model: nn.Module, batch: Any) -> Gradients:
            found = gradients_of(model, batch, self.one.loss_fn, scale)
            return {name: g if g is None else g.float() / scale for name, g in found.items()}

        return self._each(fresh, run)
