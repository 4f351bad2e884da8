"""A user's names may be those that emitted code and its runtime use themselves."""

import pytest
import torch
from torch import nn

from autoshard.verifier import verify

OURS = (
    "rt", "mesh", "loss", "data", "tensor", "params", "world", "alike", "streams", "shards", "outputs", "prologue", "layer_0", "layer_0_",
    "forward_0", "parts", "pipeline",
)  # fmt: skip


class Names(nn.Module):
    def __init__(self):
        super().__init__()
        for name in (*OURS, "lambda", "class"):
            self.register_parameter(name, nn.Parameter(torch.rand(4)))
        self.device, self.stage = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, F, torch, rt, print, self_, size, sum, data):
        x = self.device(F) + self.stage(torch) * print + rt * sum
        for name in (*OURS, "lambda", "class"):
            x = x + getattr(self, name) * data
        y = x.masked_fill(size > 0.5, float("nan")).nan_to_num(0.0, posinf=float("inf"))
        return (y * self_).pow(2).mean(), y


@pytest.mark.parametrize("mesh", ["1,2,1", "2,1,2"])
def test_names_of_ours(mesh):
    torch.manual_seed(0)
    batch = {name: torch.randn(4, 4) for name in ("F", "torch", "rt", "print", "self_", "size", "sum", "data")}
    report = verify(lambda: (Names(), batch), mesh, steps=2, backend="local")
    assert report.equal, report.text()
