"""Targets for the command line: a small model, and functions that go wrong."""

import torch
from torch import nn


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x, target):
        out = self.down(torch.relu(self.up(x)))
        return {"loss": (out - target).square().mean(), "out": out}


def toy():
    return Toy(), {"x": torch.randn(8, 8), "target": torch.randn(8, 8)}


def wider():
    return Toy(), {"x": torch.randn(16, 8), "target": torch.randn(16, 8)}


def only_a_model():
    return Toy()


def nonsense():
    return 3, {}


def wrong_inputs():
    return Toy(), torch.randn(8, 8)


def wants_an_argument(size):
    return Toy(), size


def raises():
    raise ValueError("out of flour")


NOT_A_FUNCTION = 3
