"""Batch norm over samples that are cut, against torch's own."""

import pytest
import torch

from autoshard.checking.local import run_ranks
from autoshard.checking.lockstep import Lockstep
from autoshard.mesh import Mesh
from autoshard.placement import pieces
from autoshard.runtime import batch_norm


def on_pieces(x, weight, bias, g, ways, eps=1e-5):
    """What each rank gives for its samples, and the gradients of its operands."""
    widths = pieces(x.shape[0], ways)

    def work(world):
        mine = slice(sum(widths[: world.rank]), sum(widths[: world.rank + 1]))
        leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x[mine], weight, bias)]
        out, mean, deviation = batch_norm(*leaves, world.data, x.shape[0], eps)
        assert not mean.requires_grad and not deviation.requires_grad
        out.backward(g[mine])
        return out.detach(), mean, deviation, [None if t is None else t.grad for t in leaves]

    lockstep = Lockstep(ways)
    results = run_ranks(lockstep, Mesh(ways), work, 60)
    assert results is not None, lockstep.mismatch
    return results


@pytest.mark.parametrize("shape", [(6, 3), (7, 3, 5), (5, 2, 4, 3)], ids=str)
@pytest.mark.parametrize("affine", (True, False))
@pytest.mark.parametrize("ways", (2, 3))
def test_equals_the_whole(shape, affine, ways):
    torch.manual_seed(0)
    x = (torch.randn(shape, dtype=torch.float64) * 3 + 50).requires_grad_()
    weight, bias = ((torch.randn(shape[1], dtype=torch.float64).requires_grad_() for _ in range(2)) if affine else (None, None))
    g = torch.randn(shape, dtype=torch.float64)
    want, mean, deviation = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    want.backward(g)
    ranks = on_pieces(x, weight, bias, g, ways)

    def close(got, wanted):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)

    close(torch.cat([out for out, *_ in ranks]), want.detach())
    close(torch.cat([grads[0] for *_, grads in ranks]), x.grad)
    for _, rank_mean, rank_deviation, _ in ranks:
        close(rank_mean, mean.detach())
        close(rank_deviation, deviation.detach())
    if affine:
        close(sum(grads[1] for *_, grads in ranks), weight.grad)
        close(sum(grads[2] for *_, grads in ranks), bias.grad)


def test_a_mean_far_larger_than_the_deviation():
    """In float32 a sum of squares around 0 would have lost the deviation."""
    x, g = torch.randn(8, 4) + 3000.0, torch.randn(8, 4)
    want, _, deviation = torch.native_batch_norm(x.double(), None, None, None, None, True, 0.1, 1e-5)
    for _, _, got, _ in on_pieces(x, None, None, g, 2):
        torch.testing.assert_close(got.double(), deviation, rtol=1e-3, atol=0)


def test_half_precision_is_normed_in_float32():
    x, g = torch.randn(8, 4, dtype=torch.bfloat16) + 3, torch.randn(8, 4, dtype=torch.bfloat16)
    weight = torch.rand(4, dtype=torch.bfloat16)
    for out, mean, deviation, grads in on_pieces(x, weight, weight, g, 2):
        assert (out.dtype, mean.dtype, deviation.dtype) == (torch.bfloat16, torch.float32, torch.float32)
        assert [t.dtype for t in grads] == [torch.bfloat16] * 3
