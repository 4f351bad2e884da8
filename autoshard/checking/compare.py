"""How far two tensors, or two runs, are apart, and how far they may be.

The error of a tensor is its largest absolute difference over the largest absolute value of the reference. It may be 1e-5 in float32 and
1e-10 in float64. Adam needs care, and gets it without anything being loosened.

Adam divides a gradient by its own size, so that an element whose gradient is next to zero moves by the learning rate in a direction
that rounding decides. The key bias of attention is such a parameter (its true gradient is zero), and so are single elements of
any weight whose gradient happens to be small. Two *correct* runs that only add the batch up in another order then differ after three
steps by 1e-3 in those parameters, and by 1e-4 in the gradients of the others, which are now taken at another point. So:

* Gradients, and the loss, are compared step by step: the one-device model is given the parameters that the sharded run had before the step.
  Rounding then can't pile up, and the tolerance holds for every gradient of every step.
* A gradient tensor that is *nothing but* rounding, max |g| <= 16 eps G, where G is the largest gradient of the model in that step and eps
  the precision of the dtype, has no relative error. Its difference must be at most 16 eps G: absolute, and below any other tolerance.
  (A bias before a normalisation has such a gradient: a sum, over the batch and all positions, of terms that cancel.)
* Parameters after the steps must be, in every element, what AdamW on one device makes of the sharded run's own gradients. None is excused.
* They are also compared with an independent run on one device that never sees the sharded one. There, elements over the tolerance
  are *excused* and counted: by the two checks above, each step had the right gradient and the right update, so what is left
  is rounding that Adam has amplified. The loss of every step must still agree with the independent run.

In bfloat16 and float16 a model's own rounding is no small matter: it depends on the model how far two correct runs are apart, and 16 eps of
the largest gradient would hide whole tensors. So the model is also run in float32, at the same (rounded) parameters, and twice with all of
its parameters moved by one rounding step. An output or gradient may differ from one device's by

    max(4 eps |one device|, 3 |one device - each of these|, for gradients eps G)     |x| the largest absolute value, eps of the low dtype

where the rule for gradients that are nothing but rounding is not applied. Under ``precision=`` the optimizer's fp32 masters are the
parameters that are compared, with float32's tolerance: what AdamW makes of the sharded run's own gradients, rounded or not, is exact. So
are the parameters of a model in float32 whose forward computes in a lower dtype, as in torch.autocast; all else that it gives is compared
as above, in eps of that dtype, without a run in float32.

In float64 rounding is 1e-16, Adam's own epsilon (1e-8) swallows it, and next to nothing is excused: float64 settles doubts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest error by dtype of the model."""

LOW = 4
"""Rounding steps that lower precisions get."""

ROUNDING = 16
"""Rounding steps of the largest gradient that a gradient which is truly zero may differ from zero by."""


SPREAD = 3
"""How many times as far as from runs nearby one device may be from a sharded run, in lower precision: two roundings, and chance."""


def tolerance_of(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, LOW * torch.finfo(dtype).eps)


@dataclass(frozen=True)
class Row:
    """One comparison. ``kind`` is loss, output, gradient, parameter, buffer or copy (what a rank holds against what rank 0 gathered);
    step 0 is before the first.

    error and allowed are relative to the reference's largest absolute value, unless ``note`` says otherwise.
    """

    kind: str
    name: str
    step: int
    rank: int
    error: float
    allowed: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed

    def where(self) -> str:
        parts = [self.name] if self.name else []
        return ", ".join([*parts, f"step {self.step}", f"rank {self.rank}"]) + (f" ({self.note})" if self.note else "")


def largest(t: torch.Tensor) -> float:
    """The largest absolute finite value."""
    if t.numel() == 0:
        return 0.0
    t = t.detach().abs() if not t.dtype == torch.bool else t.detach().int()
    t = t.double()
    return torch.where(t.isfinite(), t, 0.0).max().item()


def difference(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Absolute differences, element by element; 0 where both are the same infinity or both NaN, infinite where only one is."""
    got, want = got.detach(), want.detach()
    if not (want.is_floating_point() or want.is_complex()):
        return torch.where(got != want, torch.inf, 0.0)
    wide = torch.complex128 if want.is_complex() else torch.float64
    got, want = got.to(wide), want.to(wide)
    same = (got == want) | (got.isnan() & want.isnan())
    return torch.where(same, 0.0, (got - want).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference over the reference's largest absolute value; infinite if the reference is zero and ``got`` is not."""
    if want.numel() == 0:
        return 0.0
    apart = difference(got, want).max().item()
    return 0.0 if apart == 0.0 else apart / scale if (scale := largest(want)) else torch.inf


def compare(kind: str, name: str, step: int, rank: int, got, want, tolerance: float) -> Row:
    """A row for two values: tensors, or python constants, or None."""

    def unlike(note: str) -> Row:
        return Row(kind, name, step, rank, torch.inf, tolerance, note)

    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        if isinstance(want, torch.Tensor) or isinstance(got, torch.Tensor):
            return unlike(f"{_kind(got)} instead of {_kind(want)}")
        plain = isinstance(want, (int, float, complex, str, bytes, type(None)))
        if type(got) is not type(want) or (plain and got != want):
            return unlike(f"{got!r} instead of {want!r}")
        return Row(kind, name, step, rank, 0.0, tolerance)
    if got.shape != want.shape:
        return unlike(f"shape {tuple(got.shape)} instead of {tuple(want.shape)}")
    if got.dtype != want.dtype:
        return unlike(f"{got.dtype} instead of {want.dtype}")
    return Row(kind, name, step, rank, relative_error(got, want), tolerance)


def _kind(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "none" if value is None else type(value).__name__


def allowance(want, nearby: list, tolerance: float) -> float:
    """The relative error that a value of lower precision may have, given what it is in runs nearby."""
    if not isinstance(want, torch.Tensor) or not want.is_floating_point():
        return tolerance
    errors = [relative_error(t, want) for t in nearby if isinstance(t, torch.Tensor) and t.shape == want.shape]
    return max([tolerance, *(SPREAD * error for error in errors if error < torch.inf)])


def compare_gradients(step: int, got: dict, want: dict, tolerance: float, nearby: list[dict] | None = None) -> list[Row]:
    """Rows for the gradients of one step, by parameter name; None is a parameter without a gradient. ``nearby``: those of runs nearby, of a
    model of lower precision."""
    largest_of_all = max((largest(g) for g in want.values() if g is not None), default=0.0)
    rows = []
    for name, reference in want.items():
        gradient = got.get(name)
        if nearby is not None and reference is not None:
            others = [found[name] for found in nearby if found[name] is not None]
            rows.append(_low_gradient(step, name, gradient, reference, others, tolerance, largest_of_all))
            continue
        row = compare("gradient", name, step, 0, gradient, reference, tolerance)
        if not row.ok and row.error < torch.inf or reference is not None and gradient is not None and largest(reference) == 0.0:
            eps = ROUNDING * torch.finfo(reference.dtype).eps
            if largest(reference) <= eps * largest_of_all:
                apart = difference(gradient, reference).max().item()
                apart = apart and (apart / largest_of_all if largest_of_all else torch.inf)
                row = Row("gradient", name, step, 0, apart, eps, "all rounding: relative to the model's largest gradient")
        rows.append(row)
    return rows


def _low_gradient(step: int, name: str, got, want: torch.Tensor, nearby: list, tolerance: float, largest_of_all: float) -> Row:
    apart = [difference(want, other).max().item() for other in nearby if want.numel()]
    size = largest(want)
    allowed = max(tolerance * size, tolerance / LOW * largest_of_all, *(SPREAD * error for error in apart if error < torch.inf))
    row = compare("gradient", name, step, 0, got, want, tolerance)
    if row.ok or row.note:
        return row
    if size:
        return replace(row, allowed=allowed / size, note="given how far rounding moves it on one device")
    error = largest(got) / largest_of_all if largest_of_all else torch.inf
    return replace(row, error=error, allowed=tolerance / LOW, note="zero on one device: relative to the model's largest gradient")


def elements_over(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> int:
    """How many elements are further apart than the tolerance allows."""
    return int((difference(got, want) > tolerance * largest(want)).sum()) if want.numel() else 0
