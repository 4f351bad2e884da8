"""A model in float64 throughout: where its code asks for float32, as losses and norms of many libraries do, it is given float64.

Otherwise a comparison in float64 would compare float32 in these places, and settle no doubt there.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoshard.torch_private import pytree


class _Wide(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, kwargs = pytree.tree_map(_widen, (args, kwargs or {}))
        return func(*args, **kwargs)


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def precise(model: nn.Module) -> nn.Module:
    """``model``, already in float64, with a forward that computes nothing in float32."""
    forward = type(model).forward

    @functools.wraps(forward)
    def wide(self, *args, **kwargs):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # of torch.ones(8) and its like
        try:
            with _Wide():
                return forward(self, *args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    model.forward = types.MethodType(wide, model)
    return model
