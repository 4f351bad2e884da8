"""Sharded embedding and cross-entropy against torch's own."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from workers import run_on

from autoshard.runtime.axis import Axis
from autoshard.runtime.kernels import vocab_cross_entropy, vocab_embedding

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def close(ours, theirs, message):
    """Largest absolute difference over largest absolute value, or over 1 if all are less (a tiny loss is a difference of logits)."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, message
    error = (ours - theirs).abs().max() / theirs.abs().max().clamp_min(1) if theirs.numel() else torch.zeros(())
    assert error <= TOLERANCE[theirs.dtype], f"{message}: error {error:.1e}"


def rows(x, axis, dim=0):
    """This rank's piece of x, by torch.chunk."""
    return [*x.chunk(axis.size, dim), *[x.narrow(dim, 0, 0)] * axis.size][axis.index]


def summed(x, axis):
    x = x.detach().contiguous().clone()
    if axis.size > 1:
        dist.all_reduce(x)
    return x


def check_embedding(axis, size, dtype, ids_shape, padding_idx, by_freq):
    where = f"embedding of {size} over {axis.size}, {dtype}, ids {ids_shape}, padding {padding_idx}"
    table = torch.randn(size, 5, dtype=dtype, requires_grad=True)
    ids, g = torch.randint(0, size, ids_shape), torch.randn(*ids_shape, 5, dtype=dtype)
    want = F.embedding(ids, table, padding_idx, scale_grad_by_freq=by_freq)
    want.backward(g)
    mine = rows(table.detach(), axis).clone().requires_grad_()
    out = vocab_embedding(mine, ids, axis, size, padding_idx, by_freq)
    out.backward(g)
    close(summed(out, axis), want.detach(), where)
    close(mine.grad, rows(table.grad, axis), f"gradient of {where}")


def check_cross_entropy(axis, size, dtype, shape, weighted, smoothing, reduction, ignore_index):
    where = f"cross-entropy of {size} over {axis.size}, {dtype}, {shape}, {weighted=}, {smoothing=}, {reduction}, {ignore_index=}"
    labels = torch.randint(0, size, shape)
    labels[torch.rand(labels.shape) < 0.3] = ignore_index
    logits = (10 * torch.randn(shape[:1] + (size,) + shape[1:] if shape else (size,), dtype=dtype) + 30).requires_grad_()
    dim = 1 if shape else 0
    weight = torch.rand(size, dtype=dtype) if weighted else None
    options = dict(weight=weight, reduction=reduction, ignore_index=ignore_index, label_smoothing=smoothing)
    want = F.cross_entropy(logits, labels, **options)
    g = torch.randn_like(want)
    want.backward(g)
    mine = rows(logits.detach(), axis, dim).clone().requires_grad_()
    out = vocab_cross_entropy(mine, labels, axis, size, **options)
    out.backward(g)
    close(out.detach(), want.detach(), where)
    close(mine.grad, rows(logits.grad, axis, dim), f"gradient of {where}")


def check_errors(axis):
    """A bad index raises the same on every rank, and the ranks can go on together afterwards."""
    table, logits = rows(torch.zeros(7, 3), axis), rows(torch.zeros(2, 7), axis, 1)
    for bad in (7, -1):
        with pytest.raises(IndexError, match="index out of range in self"):
            F.embedding(torch.tensor([bad]), torch.randn(7, 3))
        with pytest.raises(IndexError, match="index out of range in self"):
            vocab_embedding(table, torch.tensor([0, bad]), axis, 7)
        with pytest.raises(IndexError, match=f"Target {bad} is out of bounds."):
            F.cross_entropy(torch.randn(2, 7), torch.tensor([0, bad]))
        with pytest.raises(IndexError, match=f"Target {bad} is out of bounds."):
            vocab_cross_entropy(logits, torch.tensor([0, bad]), axis, 7)
    with pytest.raises(ValueError, match="mean"):
        vocab_cross_entropy(logits, torch.tensor([0, 1]), axis, 7, reduction="mean")


def check_half(axis):
    """bf16 logits: as good as eager's, judged by fp64."""
    logits, labels = torch.randn(64, 50, dtype=torch.bfloat16), torch.randint(0, 50, (64,))
    exact = F.cross_entropy(logits.double(), labels, reduction="sum")
    eager = F.cross_entropy(logits, labels, reduction="sum")
    ours = vocab_cross_entropy(rows(logits, axis, 1), labels, axis, 50)
    assert ours.dtype == torch.bfloat16 and (ours - exact).abs() <= (eager - exact).abs() + exact * 2**-8


def check_compiled(axis):
    def loss(table, ids, labels):
        logits = vocab_embedding(table, ids, axis, 7) @ torch.ones(3, len(table))
        return vocab_cross_entropy(logits, labels, axis, 7, weight=weight, label_smoothing=0.1)

    (ids, labels), weight = torch.randint(0, 7, (2, 4)), torch.rand(7)
    results = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        table = rows(torch.linspace(-1, 1, 21).view(7, 3), axis).clone().requires_grad_()
        value = run(table, ids, labels)
        value.backward()
        results.append((value.detach(), table.grad))
    torch.testing.assert_close(*results)


def check_all(rank, k):
    axis = Axis("tensor", k, rank, dist.group.WORLD)
    torch.manual_seed(0)
    sizes = (4 * k, 4 * k - 1, k + 1)  # even; uneven; with ranks that hold nothing
    for size, dtype, (padding_idx, by_freq) in itertools.product(
        sizes, (torch.float32, torch.float64), ((None, False), (1, False), (-1, False), (1, True))
    ):
        for ids_shape in ((3, 6), (), (0,)):
            check_embedding(axis, size, dtype, ids_shape, padding_idx, by_freq)
    for size, dtype, weighted, smoothing, reduction in itertools.product(
        sizes, (torch.float32, torch.float64), (False, True), (0.0, 0.1), ("sum", "none")
    ):
        for shape, ignore_index in (((9,), -100), ((2, 3), 1), ((2, 3, 2), -1), ((), -100), ((0,), -100)):
            check_cross_entropy(axis, size, dtype, shape, weighted, smoothing, reduction, ignore_index)
    check_errors(axis)
    check_half(axis)
    if k == 2:
        check_compiled(axis)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_like_torch_on_sharded_vocabularies(k):
    run_on(k, check_all, k)
