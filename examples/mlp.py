"""A perceptron of two layers: small enough to read every pass's result."""

import torch
from torch import nn
from torch.nn import functional as F


class MLP(nn.Module):
    def __init__(self, width: int = 16, hidden: int = 32, classes: int = 8):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, classes)

    def forward(self, x, labels):
        logits = self.down(F.relu(self.up(x)))
        return F.cross_entropy(logits, labels), logits


def tiny():
    """The model, and a batch of 8."""
    torch.manual_seed(0)
    return MLP(), {"x": torch.randn(8, 16), "labels": torch.randint(0, 8, (8,))}
