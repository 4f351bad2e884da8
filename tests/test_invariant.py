"""Training with dropout and other random numbers is that of one device, the user's own model, on any mesh."""

import pytest
import torch
import torch.nn.functional as F
from cases.tools import equal, on_ranks, tensor
from small import gpt2
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.compiler import sources
from autoshard.errors import PlanError, RunError
from autoshard.runtime import invariant_random
from autoshard.verifier import Reference


@pytest.fixture(scope="module")
def dropped_gpt2():
    """Dropout of embeddings, attention weights and residuals, against the plain model on one device."""
    model, batch = gpt2(dropout=0.1)
    with Reference(model, batch, dtype=torch.float64, backend="local") as reference:
        yield reference


@pytest.mark.parametrize(
    "mesh, options",
    [
        ((1, 1, 1), {}),
        ((1, 1, 1), {"microbatches": 4, "recompute": "on"}),
        ((2, 1, 1), {"zero": 3, "recompute": "on"}),
        ((1, 2, 1), {"microbatches": 2}),
        ((1, 1, 2), {"recompute": "on"}),
        ((2, 2, 2), {"zero": 2, "recompute": "on"}),
    ],
    ids=str,
)
def test_gpt2_with_dropout(dropped_gpt2, mesh, options):
    report = dropped_gpt2.verify(mesh, **options)
    assert report.equal, report.text()
    assert "those of one device" in report.text()


def test_attention_that_is_kept_in_a_recomputed_layer(dropped_gpt2):
    model, batch = dropped_gpt2.trial.model, dropped_gpt2.trial.batches[0]
    plan = autoshard.plan(model, (1, 2, 1), batch, recompute="on")
    plan.kept = [name for name in plan.strategies if name.startswith("scaled_dot_product_attention")]
    text = sources(model, (1, 2, 1), batch, plan)[0]
    assert len(plan.kept) == 2 and "with rt.kept():\n            scaled_dot_product_attention = rt.attention(" in text
    report = dropped_gpt2.verify((1, 2, 1), plan=plan)
    assert report.equal, report.text()


def test_native_numbers_are_others():
    report = autoshard.verify(Two, (2, 1, 1), {"x": torch.randn(8, 16)}, random="native", steps=1, backend="local")
    assert not report.equal and "which depend on the mesh" in report.text()


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def inner(self, y):
        return F.dropout(y, 0.4, self.training)

    def forward(self, x):
        return self.b(self.inner(self.a(x))).pow(2).mean()


class Attention(Two):
    def inner(self, y):
        heads = y.unflatten(-1, (4, 4)).transpose(1, 2)
        return F.dropout(y, 0.4) + F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).transpose(1, 2).flatten(2)


class Layer(Attention):
    def forward(self, x):
        return x + self.b(self.inner(self.a(x)))


class Mean(nn.Module):
    def forward(self, x):
        return x.pow(2).mean()


SEQUENCES = {"x": torch.randn(8, 6, 16)}


class Factories(Two):
    """Values that are whole on every rank, and for every micro-batch."""

    def inner(self, y):
        y = y * torch.rand(16, dtype=y.dtype) + torch.randn(8, 16, dtype=y.dtype)
        y = y + torch.randint(0, 5, (8, 1)) + torch.normal(0.5, 2.0, (8, 16))
        return y[:, torch.randperm(16)]


class Likes(Two):
    """In-place ops too, and numbers that nothing reads: torch drops those when it makes the graph functional."""

    def inner(self, y):
        torch.rand(3)
        y = y * torch.rand_like(y) + torch.randn_like(y) + torch.bernoulli(y.sigmoid()) + torch.randint_like(y, 3)
        y = F.alpha_dropout(y, 0.3, True) + torch.empty_like(y).bernoulli_(0.3) + torch.empty_like(y).uniform_(-1, 2)
        y = y + torch.empty_like(y).exponential_(2.0) + torch.empty_like(y).normal_(1, 2) + torch.empty_like(y).bernoulli_(y.sigmoid())
        torch.empty_like(y).bernoulli_(0.5)
        return F.gumbel_softmax(F.dropout(y, 1.0) + F.dropout(y, 0.0), tau=0.7)


class Statistics(Two):
    """A batch norm makes torch take attention apart."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def inner(self, y):
        q = self.norm(F.dropout(y, 0.3)).view(8, 2, 2, 4).transpose(1, 2)
        y = F.rrelu(F.scaled_dot_product_attention(q, q, q, dropout_p=0.3), training=True)
        return F.dropout(y.transpose(1, 2).flatten(1), 0.2)


class Choices(Two):
    def inner(self, y):
        p = y.softmax(-1)
        one, several = torch.multinomial(p, 3), torch.multinomial(p.detach(), 4, replacement=True)
        return y + p.gather(1, one).mean(1, keepdim=True) + p.gather(1, several).sum(1, keepdim=True)


class Checkpointed(Two):
    """One device computes its activations again as well."""

    def inner(self, y):
        return checkpoint(lambda z: F.dropout(torch.tanh(F.dropout(z, 0.5)), 0.3), y, use_reentrant=False)


class Channels(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 4)

    def forward(self, x):
        return self.b(F.feature_alpha_dropout(F.dropout2d(self.a(x), 0.4), 0.3, True).flatten(1)).pow(2).mean()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LSTM(16, 8, 3, dropout=0.4, batch_first=True, bidirectional=True), nn.GRU(16, 8, 2, dropout=0.3)

    def forward(self, x):
        return self.b(F.dropout(self.a(x)[0], 0.2))[0].pow(2).mean()


class Uneven(Two):
    """Pieces of 6 and 5, of 3, 3, 3 and 2."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 11), nn.Linear(11, 16)


MODELS = {
    Factories: (8, 16),
    Likes: (8, 16),
    Choices: (8, 16),
    Checkpointed: (8, 16),
    Channels: (8, 3, 8, 8),
    Recurrent: (8, 5, 16),
}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_way_to_draw(model):
    torch.manual_seed(0)
    with Reference(model(), {"x": torch.randn(MODELS[model])}, dtype=torch.float64, backend="local") as reference:
        for mesh, options in (((2, 2, 1), {"recompute": "on"}), ((1, 1, 1), {"microbatches": 4}), ((1, 1, 2), {"microbatches": 2})):
            report = reference.verify(mesh, **options)
            assert report.equal, report.text()


def test_ops_that_are_taken_apart_draw_the_same():
    equal(Statistics, {"x": torch.randn(8, 16)}, (2, 2, 1))


@pytest.mark.parametrize("mesh", [(1, 4, 1), (3, 2, 1)], ids=str)
def test_uneven_pieces(mesh):
    equal(Uneven, {"x": torch.randn(7, 16)}, mesh, tensor("S(0)", "a.weight"))


@pytest.mark.parametrize("mesh, options", [((1, 2, 2), {"microbatches": 2}), ((1, 1, 2), {"schedule": "ZBVZeroBubble"})], ids=str)
def test_on_processes(mesh, options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4)), Mean())
    report = autoshard.verify(model, mesh, {"input": SEQUENCES["x"]}, dtype=torch.float64, **options)
    assert report.equal, report.text()


def test_one_device_and_the_mesh_go_on_with_the_same_random_state():
    def work(sharded, batch):
        torch.manual_seed(11)
        losses = [sharded(**batch).item() for _ in range(2)]
        return losses, torch.rand(4)

    batch = SEQUENCES
    found = on_ranks(Attention, batch, (2, 2, 1), work, dtype=None)
    torch.manual_seed(0)
    model = Attention()
    torch.manual_seed(11)
    with invariant_random():
        losses = [model(**batch).item() for _ in range(2)]
    after = torch.rand(4)
    assert losses[0] != losses[1]
    for mine, state in found:
        assert mine == pytest.approx(losses, rel=1e-5) and torch.equal(state, after)


def test_rank_0_seeds_them_all():
    """Ranks that drew other numbers before still agree on what is replicated."""
    seeds = iter(range(8))

    def work(sharded, batch):
        torch.manual_seed(next(seeds))
        return sharded(**batch).item()

    assert len(set(on_ranks(Attention, SEQUENCES, (2, 2, 1), work))) == 1


def test_without_randomness_nothing_is_drawn_or_sent():
    def work(sharded, batch):
        sharded.eval()
        torch.manual_seed(0)
        sharded(**batch)
        return torch.equal(torch.get_rng_state(), torch.manual_seed(0).get_state())

    assert all(on_ranks(Two, {"x": torch.randn(8, 16)}, (2, 1, 1), work))


def test_emitted_code_says_what_is_drawn():
    model, batch = Attention(), SEQUENCES
    pins = tensor("S(0)", "a.weight")
    plan = autoshard.plan(model, (2, 2, 1), batch, pin=pins, microbatches=2)
    text = sources(model, (2, 2, 1), batch, plan)[3]
    assert 'rt.dropout(linear, 0.4, self.numbers("dropout"))' in text
    assert '"dropout": rt.Draw(0, (8, 6, 16), "[S(0), S(2)]", time="S(0)"),' in text
    assert '"scaled_dot_product_attention": rt.Draw(1, (8, 4, 6, 6), "[S(0), S(1)]", time="S(0)")' in text and "random_keys = 2" in text


def test_torch_compile_takes_a_stage_that_draws():
    torch.manual_seed(0)
    model, batch = Attention(), SEQUENCES
    sharded = autoshard.compile(model, (1, 1, 1), batch)
    run = torch.compile(sharded.stage.forward, fullgraph=True, backend="aot_eager")
    for seed in (1, 2):
        torch.manual_seed(seed)
        want = sharded(**batch)
        grads = torch.autograd.grad(want, list(sharded.parameters()))
        torch.manual_seed(seed)
        sharded.stage.keys.next_step()
        (got,) = run(**batch)
        assert torch.equal(got, want)
        for one, other in zip(torch.autograd.grad(got, list(sharded.parameters())), grads):
            torch.testing.assert_close(one, other)


def test_what_can_not_be():
    batch = {"x": torch.randn(8, 16)}
    with pytest.raises(PlanError, match="random='fast' can't be"):
        autoshard.plan(Two(), (1, 1, 1), batch, random="fast")
    plan = autoshard.plan(Two(), (1, 1, 1), batch, random="native")
    assert autoshard.Plan.from_json(plan.to_json()).random == "native"
    with pytest.raises(PlanError, match="the plan is for random='native', not 'invariant'"):
        autoshard.compile(Two(), (1, 1, 1), batch, plan=plan, random="invariant")
    with Reference(Two, batch, backend="local") as reference, pytest.raises(RunError, match="the plan is for random='native'"):
        reference.verify((1, 1, 1), plan=plan)
