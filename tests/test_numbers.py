"""Random numbers by key and position: a rank's piece has the piece of the whole value's numbers. No processes: a world of coordinates."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from autoshard.errors import RunError
from autoshard.mesh import Mesh
from autoshard.placement import local_shape, parse_layout, parse_placement
from autoshard.runtime.attention import attention
from autoshard.runtime.axis import Axis
from autoshard.runtime.drawing import Drawing, invariant_random
from autoshard.runtime.keys import TAKE, Draw, Keys, whole_numbers
from autoshard.runtime.numbers import key_words, scrambled
from autoshard.runtime.pieces import take, take_one
from autoshard.runtime.random import dropout
from autoshard.runtime.world import World

KEYS = key_words(torch.arange(7) * 3**30)


def keys_of(mesh: Mesh, rank: int, draws: dict[str, Draw], microbatches: int = 1) -> Keys:
    axes = (Axis(name, size, at) for name, size, at in zip(("data", "tensor"), mesh.sizes, mesh.coords(rank)))
    keys = Keys(len(KEYS), draws, World(mesh, rank, torch.device("cpu"), *axes), microbatches)
    keys.words = KEYS
    return keys


LAYOUTS = [
    ((8, 6, 12), "[S(0), S(1)]", "R", 1, (2, 3)),
    ((8, 6, 12), "[S(0), S(2)]", "S(0)", 2, (2, 2)),
    ((8, 6, 12), "[R, S(2/3)]", "S(0)", 4, (2, 2)),  # a fused projection by heads
    ((8, 300), "[S(0), S(0)]", "R", 1, (2, 2)),  # two axes cut one dim
    ((24, 300), "[S(0), S(0/4)]", "S(0)", 2, (2, 3)),  # (b s) flattened, b and s cut
    ((24, 5), "[S(0), S(1)]", "S(0/3)", 4, (2, 2)),
    ((7, 11, 5), "[S(0), S(1)]", "R", 1, (3, 4)),  # uneven pieces
    ((600, 9), "[S(1), S(0)]", "R", 1, (2, 4)),
    ((12,), "[S(0), R]", "S(0)", 3, (2, 2)),
    ((4, 70000), "[R, S(1)]", "S(0)", 2, (1, 3)),
    ((), "[R, R]", "R", 2, (2, 2)),
]


@pytest.mark.parametrize("shape, layout, time, m, sizes", LAYOUTS, ids=str)
def test_a_piece_has_the_numbers_of_the_whole(shape, layout, time, m, sizes):
    mesh = Mesh(*sizes)
    whole = whole_numbers(shape, KEYS[3])
    mask, uniform, normal = whole.keep(0.6), whole.uniform(torch.float64), whole.normal(torch.float32)
    placed, over_time = parse_layout(layout), parse_placement(time)
    for rank, microbatch in itertools.product(range(mesh.size), range(m)):
        keys = keys_of(mesh, rank, {"y": Draw(3, shape, layout, time)}, m)
        keys.microbatch = torch.tensor(microbatch)
        numbers = keys.numbers("y")

        def piece(x, microbatch=microbatch, rank=rank):
            x = take_one(x, over_time.dim, over_time.blocks, m, microbatch) if over_time.is_shard else x
            return take(x, placed, mesh.sizes, mesh.coords(rank)[:2])

        assert tuple(piece(mask).shape) == numbers.shape
        assert torch.equal(numbers.keep(0.6), piece(mask)) and torch.equal(numbers.uniform(torch.float64), piece(uniform))
        torch.testing.assert_close(numbers.normal(torch.float32), piece(normal), atol=1e-6, rtol=1e-6)
        if m == 1:
            assert numbers.shape == local_shape(shape, placed, mesh.sizes, mesh.coords(rank)[:2])


def test_words_are_those_of_splitmix64_and_murmur3():
    stream = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B, 0x53CB9F0C747EA2EA]
    words = (key_words(torch.tensor([0]))[0].flatten().to(torch.int64) & 0xFFFFFFFF).tolist()
    assert words == [part for word in stream for part in (word & 0xFFFFFFFF, word >> 32)]
    assert scrambled(torch.tensor([0, 1]), 0).tolist() == [0, 0x514E28B7]


def test_keys_taken_together_are_those_taken_one_by_one():
    torch.manual_seed(5)
    together, after = torch.randint(size=(40,), **TAKE), torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(together, torch.cat([torch.randint(size=(1,), **TAKE) for _ in range(40)]))
    assert torch.equal(after, torch.rand(3))


def correlation(a, b) -> float:
    """In standard deviations of what independent values would give."""
    a, b = (x.double() - x.double().mean() for x in (a, b))
    return float((a * b).sum() / (a.norm() * b.norm())) * math.sqrt(a.numel())


@pytest.mark.parametrize("shape", [(500, 768), (4, 6, 90, 90), (200_000,), (60_000, 3)], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_are_random(shape, p):
    masks = [whole_numbers(shape, key).keep(p) for key in KEYS[:3]]
    n = masks[0].numel()
    for mask in masks:
        assert abs(mask.double().mean().item() - p) < 4 * math.sqrt(p * (1 - p) / n)
        flat = mask.flatten()
        for shift in (1, 2, 3, 64, 768):
            assert abs(correlation(flat[shift:], flat[:-shift])) < 4.5
        rows = mask.flatten(0, -2).double().mean(-1) if len(shape) > 1 else flat.view(-1, 400).double().mean(-1)
        spread = rows.var() * (n / len(rows)) / (p * (1 - p))
        assert abs(spread.item() - 1) < 5 * math.sqrt(2 / len(rows)) + 0.02
    for one, other in itertools.combinations(masks, 2):
        assert abs(correlation(one, other)) < 4.5


@pytest.mark.parametrize("dtype, digits", [(torch.float64, 53), (torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)])
def test_uniform_and_normal_numbers(dtype, digits):
    numbers = whole_numbers((500, 600), KEYS[1])
    u = numbers.uniform(dtype)
    assert u.dtype == dtype and 0 <= u.min() and u.max() < 1
    u = u.double()
    assert torch.equal(u * 2.0**digits, (u * 2.0**digits).round())
    assert abs(u.mean() - (1 - 2.0**-digits) / 2) < 0.003 and abs(u.var() - 1 / 12) < 0.001
    z = numbers.normal(dtype).double()
    assert abs(z.mean()) < 0.01 and abs(z.var() - 1) < 0.02 and abs((z**4).mean() - 3) < 0.1 and abs((z**3).mean()) < 0.03


def test_integers_are_uniform():
    found = whole_numbers((100_000,), KEYS[2]).integers(-3, 7, torch.int32)
    assert found.dtype == torch.int32 and abs(torch.bincount(found + 3) - 10_000).max() < 500 and len(torch.bincount(found + 3)) == 10


def test_all_or_nothing():
    numbers = whole_numbers((50, 50), KEYS[0])
    assert numbers.keep(1.0).all() and not numbers.keep(0.0).any()
    x = torch.ones(50, 50, dtype=torch.float64, requires_grad=True)
    y = dropout(x, 0.25, numbers)
    torch.testing.assert_close(y.unique(), torch.tensor([0, 4 / 3], dtype=torch.float64))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y)


OPS = {
    "dropout": (lambda x: F.dropout(x, 0.3), None),
    "dropout2d": (lambda x: F.dropout2d(x, 0.3), (8, 6, 1, 1)),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.3, True), None),
    "feature_alpha_dropout": (lambda x: F.feature_alpha_dropout(x, 0.3, True), (8, 6, 1, 1)),
    "native_dropout": (lambda x: torch.native_dropout(x, 0.3, True)[0], None),
    "bernoulli": (lambda x: torch.bernoulli(x.sigmoid()), None),
    "bernoulli.p": (lambda x: torch.bernoulli(x, 0.3), None),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()), None),
    "rand_like": (torch.rand_like, None),
    "randn_like": (torch.randn_like, None),
    "randint_like": (lambda x: torch.randint_like(x, 2, 9), None),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 2), None),
    "normal_": (lambda x: torch.empty_like(x).normal_(1, 2), None),
    "normal": (lambda x: torch.normal(x, 2.0), None),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2), None),
}
X = torch.randn(8, 6, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("name", OPS)
def test_torchs_ops_draw_a_piece(name):
    op, shape = OPS[name]
    with Drawing(lambda shape: whole_numbers(shape, KEYS[2])):
        whole = op(X)
    mesh, layout = Mesh(2, 3), "[S(0), S(1)]"
    for rank in range(mesh.size):
        keys = keys_of(mesh, rank, {"y": Draw(2, shape or tuple(X.shape), layout)})
        with Drawing(keys.source("y")):
            piece = op(take(X, parse_layout(layout), mesh.sizes, mesh.coords(rank)[:2]))
        torch.testing.assert_close(piece, take(whole, parse_layout(layout), mesh.sizes, mesh.coords(rank)[:2]), atol=1e-12, rtol=1e-12)


def test_distributions_of_torchs_ops():
    p = torch.tensor([[0.2, 0.5, 0.3], [0.0, 0.9, 0.1]]).repeat(20_000, 1)
    torch.manual_seed(0)
    with invariant_random():
        coins, once, several = torch.bernoulli(p), torch.multinomial(p, 1), torch.multinomial(p, 2, replacement=True)
        waits, order, two = torch.empty(50_000).exponential_(4), torch.randperm(1000), torch.multinomial(p[::2], 2)
    torch.testing.assert_close(coins.view(-1, 2, 3).mean(0), p[:2], atol=0.02, rtol=0)
    for picked in (once[:, :1], several[:, :1], several[:, 1:]):
        shares = F.one_hot(picked[:, 0], 3).double().view(-1, 2, 3).mean(0)
        torch.testing.assert_close(shares, p[:2].double(), atol=0.02, rtol=0)
    assert (two[:, 0] != two[:, 1]).all()
    assert abs(waits.mean() - 0.25) < 0.01 and abs(waits.var() - 1 / 16) < 0.005
    assert torch.equal(order.sort().values, torch.arange(1000)) and not torch.equal(order, torch.arange(1000))


def test_ops_without_numbers_of_their_own_start_from_their_key():
    def draw():
        with invariant_random():
            return torch.poisson(torch.full((20,), 3.0)), torch.rand(3)

    torch.manual_seed(0)
    (one, _), (other, _), state = draw(), draw(), torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(draw()[0], one) and not torch.equal(one, other)
    draw()
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_not_drawn_takes_no_key():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    with invariant_random():
        assert torch.equal(F.dropout(x, 0.0), x) and torch.equal(F.dropout(x, 0.5, training=False), x) and not F.dropout(x, 1.0).any()
        F.rrelu(x)
        torch.rand(3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_checkpoint_on_one_device_draws_the_same_again():
    w = torch.randn(6, 6, requires_grad=True, generator=torch.Generator().manual_seed(0))

    def region(x):
        return F.dropout(torch.tanh(F.dropout(x @ w, 0.5)), 0.5)

    def train(run):
        torch.manual_seed(3)
        with invariant_random():
            loss = sum(run(x).square().sum() for x in X[0, :2].float().reshape(2, -1, 1) * torch.ones(6))
            return torch.autograd.grad(loss, w)[0], torch.rand(3)

    for one, other in zip(train(region), train(lambda x: checkpoint(region, x, use_reentrant=False))):
        assert torch.equal(one, other)


MASK = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0)) > 0.4
MASK[0, 0, 2] = False  # a query that sees nothing


@pytest.mark.parametrize("given", [
    {}, {"is_causal": True}, {"attn_mask": MASK}, {"attn_mask": MASK.double() * 3}, {"scale": 0.7}, {"enable_gqa": True, "is_causal": True},
], ids=lambda given: "+".join(given) or "plain")  # fmt: skip
def test_attention_is_torchs(given):
    made = torch.Generator().manual_seed(0)
    heads = (4, 2, 2) if "enable_gqa" in given else (4, 4, 4)
    q, k, v = (torch.randn(2, h, 6, 8, generator=made, dtype=torch.float64, requires_grad=True) for h in heads)
    with Drawing(lambda shape: whole_numbers(shape, KEYS[1])):
        want = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, **given)
    got = attention(q, k, v, 0.3, whole_numbers((2, 4, 6, 6), KEYS[1]), **given)
    torch.testing.assert_close(got, want)
    weight = torch.randn(want.shape, generator=made, dtype=torch.float64)
    for one, other in zip(*(torch.autograd.grad((y * weight).sum(), (q, k, v)) for y in (got, want))):
        torch.testing.assert_close(one, other)


def test_attention_keeps_nothing_of_the_size_of_its_weights():
    q = torch.randn(1, 2, 64, 4, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        attention(q, q, q, 0.1, whole_numbers((1, 2, 64, 64), KEYS[0]))
    assert max(kept, default=0) < 2 * 64 * 64


def test_draws_that_were_not_foreseen():
    keys = keys_of(Mesh(1), 0, {"y": Draw(0, (3, 4)), "z": Draw(1)})
    with pytest.raises(RunError, match=r"draws numbers of shape \(3, 5\), not \(3, 4\)"), Drawing(keys.source("y")):
        torch.rand(3, 5)
    with pytest.raises(RunError, match="'z' draws more than 1 times"), Drawing(keys.source("z")):
        torch.rand(2), torch.rand(2)


def test_fused_attention_is_refused():
    q = torch.randn(1, 2, 8, 4)
    with invariant_random(), pytest.raises(RunError, match="fused kernel"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)
