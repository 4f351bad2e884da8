"""Mixed precision: what is traced is the model as ``model.to(torch.bfloat16)`` makes it, on a copy without values.

Parameters and buffers get the dtypes that ``Module.to`` gives them (integers keep theirs, and so does what a module of the user's keeps in
its own ``_apply``), floating point inputs are cast. Casts that the model does itself, ``logits.float()``, stay. Each trained parameter
that has become smaller has a master: the user's weight in fp32, of which forward reads a rounded copy.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from autoshard.errors import CaptureError

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What parameters and activations are held and computed in; None: as the model has them."""


def dtype_of(precision: str) -> torch.dtype | None:
    """The dtype of PRECISIONS. Raises CaptureError."""
    if precision not in PRECISIONS:
        raise CaptureError(f"precision={precision!r} can't be", hint=f"it is one of {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model without the values of its parameters and buffers; the model itself if it can't be copied."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # a model may hold anything: locks, files, process groups
        return model


def lowered(model: nn.Module, precision: str) -> nn.Module:
    """What is to be traced: the model itself in its own precision, else a copy in the lower one, on ``meta``. Raises CaptureError."""
    dtype = dtype_of(precision)
    if dtype is None:
        return model
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_complex():
            raise CaptureError(f"{name!r} is complex, which precision={precision!r} has no dtype for", hint="use precision='fp32'")
    copied = skeleton(model)
    if copied is model:
        hint = f"convert it yourself: model.to({dtype}), without precision="
        raise CaptureError(f"the model can't be copied, as precision={precision!r} needs", hint=hint)
    return copied.to(dtype)


def master_dtype(own: torch.dtype, held: torch.dtype) -> torch.dtype | None:
    """The dtype of a trained parameter's master: the model has it in ``own``, forward reads it in ``held``. None: it needs none."""
    wide = torch.promote_types(own, torch.float32)
    return wide if held.itemsize < wide.itemsize else None
