"""Random streams: equal where a value is replicated, different where it is sharded. No processes: a stream needs coordinates only."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from autoshard.runtime.axis import Axis
from autoshard.runtime.random import Streams, dropout


def streams_of(data, tensor, stage=0, seed=7):
    return Streams((Axis("data", 2, data), Axis("tensor", 2, tensor)), stage, seed=seed)


@pytest.mark.parametrize("names", [(), ("data",), ("tensor",), ("tensor", "data")])
def test_equal_along_the_axes_that_do_not_shard(names):
    draws = {at: torch.rand(9, generator=streams_of(*at)(*names)) for at in itertools.product((0, 1), repeat=2)}
    for one, other in itertools.combinations(draws, 2):
        sharded_apart = any(one[axis] != other[axis] for axis, name in enumerate(("data", "tensor")) if name in names)
        assert torch.equal(draws[one], draws[other]) != sharded_apart


def test_stages_and_seeds_differ_and_a_seed_can_be_set_again():
    streams = streams_of(0, 1)
    first, second = (torch.rand(9, generator=streams("data")) for _ in range(2))
    assert not torch.equal(first, second)
    assert not torch.equal(first, torch.rand(9, generator=streams_of(0, 1, stage=1)("data")))
    assert not torch.equal(first, torch.rand(9, generator=streams_of(0, 1, seed=8)("data")))
    streams.manual_seed(7)
    assert torch.equal(first, torch.rand(9, generator=streams("data")))
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand(9, generator=streams_of(0, 1, seed=None)("data")))


def test_dropout_and_its_gradient():
    x = torch.ones(10_000, dtype=torch.float64, requires_grad=True)
    y = dropout(x, 0.25, streams_of(0, 0)())
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y.unique(), torch.tensor([0, 4 / 3], dtype=torch.float64))
    assert torch.equal(grad, y) and abs(y.mean() - 1) < 0.03
    assert dropout(x, 0, streams_of(0, 0)()) is x
    assert not dropout(x, 1, streams_of(0, 0)()).any()


def test_fork_lends_a_stream_to_ops_that_use_the_default_generator():
    q = torch.randn(1, 1, 8, 4)

    def attend(streams, *names):
        with streams.fork(*names):
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    before = torch.random.get_rng_state()
    one, other = streams_of(0, 0), streams_of(0, 1)
    assert torch.equal(attend(one, "data"), attend(other, "data"))
    assert not torch.equal(attend(one, "tensor"), attend(other, "tensor"))
    assert not torch.equal(attend(one), attend(one))
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_checkpointed_region_draws_the_same_numbers_again():
    w = torch.randn(6, 6, requires_grad=True)
    xs = torch.randn(2, 5, 6)

    def region(streams, x):
        return dropout(torch.tanh(dropout(x @ w, 0.5, streams("data"))), 0.5, streams())

    def train(run):
        streams = streams_of(1, 0)
        losses = [run(streams, x).square().sum() for x in xs]  # both regions run forward before either is computed again
        return torch.autograd.grad(sum(losses), w)[0], torch.rand(3, generator=streams("data"))

    plain = train(region)
    again = train(lambda s, x: checkpoint(region, s, x, use_reentrant=False, context_fn=s.checkpoint_contexts))
    for one, other in zip(plain, again):
        assert torch.equal(one, other)
