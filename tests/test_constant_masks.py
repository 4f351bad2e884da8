"""Attention masks that are the same for all data."""

import pytest
import torch
from test_canonicalize import X, canonical
from torch import nn
from torch.nn import functional as F

from autoshard.capture import capture
from autoshard.passes.canonicalize import canonicalize


def attention(mask):
    """Attention of 2 x 4 queries whose mask is ``mask(x)``; the arguments after q, k, v in the canonical program."""

    def f(w, x):
        q = (x @ w).reshape(2, 1, 4, 4)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask(x))

    line = next(line for line in canonical(f, x=X).splitlines() if "scaled_dot_product_attention(" in line)
    return line.partition("(")[2].partition(")")[0].split(", ", 3)[3]


ROWS, COLUMNS = torch.arange(4)[:, None], torch.arange(4)[None, :]
TAIL = "scale=None, enable_gqa=False"


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: torch.arange(4)[None] <= torch.arange(4)[:, None],
        lambda x: torch.ones(2, 1, 4, 4, dtype=torch.bool).tril(),
        lambda x: torch.full((4, 4), float("-inf"), dtype=x.dtype).triu(1),
        lambda x: torch.zeros(4, 4, dtype=x.dtype).masked_fill(torch.arange(4) > torch.arange(4)[:, None], torch.finfo(x.dtype).min),
        lambda x: (torch.arange(2)[:, None, None, None] >= 0) & (torch.arange(4) <= torch.arange(4)[:, None]),
    ],
)
def test_a_constant_causal_mask_is_is_causal(mask):
    assert attention(mask) == f"None, 0.0, True, {TAIL}"


def test_a_mask_that_hides_nothing_is_none():
    assert attention(lambda x: torch.ones(4, 4, dtype=torch.bool)) == f"None, 0.0, False, {TAIL}"
    assert attention(lambda x: torch.zeros(4, 4, dtype=x.dtype)) == f"None, 0.0, False, {TAIL}"


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: torch.arange(4)[None] < torch.arange(1, 5)[:, None] - (torch.arange(4)[:, None] == 3).long(),  # one place is not causal
        lambda x: (COLUMNS <= ROWS) & (torch.arange(2)[:, None, None, None] + torch.arange(4) < 4),  # not in each sample
        lambda x: torch.zeros(4, 4, dtype=x.dtype).tril() - torch.arange(4).to(x.dtype),  # a bias
        lambda x: (x.sum() < 1e9).expand(4, 4),  # depends on data
    ],
)
def test_other_masks_stay(mask):
    assert not attention(mask).startswith("None")


def test_a_mask_is_looked_at_without_the_memory_of_the_batch():
    class Masked(nn.Module):
        def forward(self, q):
            batch, length = torch.arange(q.shape[0]), torch.arange(q.shape[2])
            mask = (batch[:, None, None, None] >= 0) & (length <= length[:, None])
            packed = length.expand(q.shape[0], -1)[batch[:, None, None, None], length[None, None, :, None]] >= 0
            return F.scaled_dot_product_attention(q, q, q, mask & packed)

    # as a whole 2^38 elements
    program = canonicalize(capture(Masked(), {"q": torch.empty(1 << 18, 1, 1024, 8, device="meta")}).program)
    (node,) = program.ops
    assert node.args[3:] == (None, 0.0, True)
