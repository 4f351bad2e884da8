"""Parameters without gradients, saving on one mesh and loading on another, precision of what is added up, ZeRO."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.errors import RunError
from cases.tools import data, equal, on_ranks, prepared, tensor


def rows(*shape):
    return lambda: {"x": torch.randn(*shape)}


class Sometimes(nn.Module):
    """A head that is never used, a branch that a flag chooses, a table of which each micro-batch reads other rows."""

    def __init__(self, branch):
        super().__init__()
        self.branch = branch
        self.body, self.left, self.right, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.table = nn.Embedding(16, 8)

    def forward(self, x, ids):
        x = F.gelu(self.body(x)) + self.table(ids)
        return (self.left(x) if self.branch == "left" else self.right(x)).pow(2).mean()


def with_ids():
    return {"x": torch.randn(4, 8), "ids": torch.tensor([0, 3, 9, 15])}


@pytest.mark.parametrize("branch", ("left", "right"))
@pytest.mark.parametrize("mesh", [(2, 2, 1), (1, 1, 2), (1, 1, 1)], ids=str)
def test_parameters_without_a_gradient(branch, mesh):
    equal(lambda: Sometimes(branch), with_ids, mesh, tensor("S(0)", "table.weight"), microbatches=1 if mesh == (2, 2, 1) else 2)


def test_unused_parameters_have_no_gradient_are_not_stepped_and_are_saved():
    model, batch = prepared(lambda: Sometimes("left"), with_ids, torch.float64)

    def trained(sharded, batch):
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            sharded(**batch).backward()
            optimizer.step()
        return {name for name, g in sharded.grad_dict().items() if g is None}, sharded.state_dict()

    unused = {"right.weight", "right.bias", "never.weight", "never.bias"}
    for mesh in ((2, 2, 1), (1, 1, 2)):
        for without, state in on_ranks(lambda: Sometimes("left"), batch, mesh, trained, microbatches=1):
            assert without == unused
            for name, value in model.state_dict().items():
                assert torch.equal(state[name], value) == (name in unused), name


class Words(nn.Module):
    """A vocabulary of 101, tied, and two blocks."""

    def __init__(self, width=16):
        super().__init__()
        self.embed, self.head = nn.Embedding(101, width), nn.Linear(width, 101, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(2))
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def words():
    return {"ids": torch.arange(36).view(12, 3) * 31 % 101}


def train(module, optimizer, scheduler, batch, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        module(**batch).backward()
        optimizer.step()
        scheduler.step()


def tools_of(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=0.02)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def saved(folder):
    def work(sharded, batch):
        optimizer, scheduler = tools_of(sharded.parameters())
        train(sharded, optimizer, scheduler, batch, 2)
        autoshard.save(sharded, optimizer, folder)
        return scheduler.state_dict()

    return work


def resumed(folder, schedule):
    def work(sharded, batch):
        optimizer, scheduler = tools_of(sharded.parameters())
        autoshard.load(sharded, optimizer, folder)
        scheduler.load_state_dict(schedule)
        train(sharded, optimizer, scheduler, batch, 2)
        return sharded.state_dict()

    return work


@pytest.mark.parametrize("there", [(1, 2, 2), (2, 2, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("zero", (0, 1, 3))
def test_saved_on_one_mesh_and_loaded_on_another(tmp_path, there, zero):
    """Two steps, a checkpoint, two more steps on another mesh: as four steps without a break on one device."""
    model, batch = prepared(Words, words, torch.float64)
    optimizer, scheduler = tools_of(model.parameters())
    train(model, optimizer, scheduler, batch, 4)
    schedule = on_ranks(Words, words, (4, 1, 1), saved(tmp_path), pin=data("S(0)", "ids"), zero=zero)[0]
    pin = tensor("S(0)", "embed.weight")
    for state in on_ranks(Words, words, there, resumed(tmp_path, schedule), pin=pin, microbatches=there[2], zero=zero):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-7, atol=1e-9, msg=name)


def test_a_checkpoint_of_another_model(tmp_path):
    on_ranks(Words, words, (1, 2, 1), saved(tmp_path), pin=tensor("S(0)", "embed.weight"))

    def load(sharded, batch):
        before = sharded.state_dict()
        with pytest.raises(RunError) as caught:
            autoshard.load(sharded, None, tmp_path)
        assert all(torch.equal(before[name], value) for name, value in sharded.state_dict().items())
        return str(caught.value)

    texts = on_ranks(lambda: Words(8), words, (1, 2, 1), load)
    assert texts[0] == texts[1] and "'embed.weight'" in texts[0] and "(101, 16)" in texts[0] and "(101, 8)" in texts[0]


@pytest.mark.parametrize("placement", ("S(0)", "S(0/3)"))
def test_a_fused_projection_is_saved_in_the_users_own_order(tmp_path, placement):
    from cases.test_shapes import Fused, hidden

    model, batch = prepared(lambda: Fused("chunk"), hidden(), torch.float64)
    options = {"pin": tensor(placement, "qkv.weight")}
    for state in on_ranks(lambda: Fused("chunk"), batch, (1, 2, 1), lambda sharded, _: sharded.state_dict(), **options):
        assert torch.equal(state["qkv.weight"], model.qkv.weight)
    on_ranks(lambda: Fused("chunk"), batch, (1, 2, 1), lambda sharded, _: autoshard.save(sharded, None, tmp_path), **options)

    def load(sharded, _):
        with torch.no_grad():
            for p in sharded.parameters():
                p.zero_()
        autoshard.load(sharded, None, tmp_path)
        return sharded.state_dict()

    (state,) = on_ranks(lambda: Fused("chunk"), batch, (1, 1, 1), load)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_a_padded_and_tied_table_loads_into_the_plain_model():
    def stepped(sharded, batch):
        optimizer, scheduler = tools_of(sharded.parameters())
        train(sharded, optimizer, scheduler, batch, 1)
        state = sharded.state_dict()
        return state, state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()

    for ways in (2, 4):
        for state, tied in on_ranks(Words, words, (1, ways, 1), stepped, pin=tensor("S(0)", "embed.weight")):
            assert tied and state["embed.weight"].shape == (101, 16)
            model = Words().double()
            model.load_state_dict(state, strict=True)
            assert model.head.weight is model.embed.weight


def test_whole_tensors_of_a_plain_model_load_on_any_mesh():
    plain = Words().double()

    def load(sharded, batch):
        sharded.load_state_dict(plain.state_dict())
        return sharded.state_dict(), sharded(**batch).item()

    batch = words()
    for mesh in ((1, 4, 1), (1, 2, 2)):
        for state, loss in on_ranks(Words, words, mesh, load, pin=tensor("S(0)", "embed.weight"), microbatches=1):
            assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
            assert loss == pytest.approx(plain(**batch).item(), rel=1e-12)


def test_gradients_of_bfloat16_over_many_micro_batches():
    """They are added up in the parameters' own precision, as on one device; sixteen additions may cost 16 roundings, 16 x 2^-9."""
    equal(lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), Square()), lambda: (torch.randn(16, 8),), (1, 1, 1),
          dtype=torch.bfloat16, microbatches=1)  # fmt: skip

    def gradients(sharded, batch):
        sharded(*batch).backward()
        return sharded.grad_dict()

    def model():
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), Square())

    batch = (torch.linspace(-1, 1, 128).view(16, 8),)
    (once,) = on_ranks(model, batch, (1, 1, 1), gradients, dtype=torch.bfloat16, microbatches=1)
    (often,) = on_ranks(model, batch, (1, 1, 1), gradients, dtype=torch.bfloat16, microbatches=16)
    for name, g in once.items():
        assert (often[name] - g).abs().max() <= 16 * 2**-9 * g.abs().max(), name


class Square(nn.Module):
    def forward(self, x):
        return x.pow(2).mean()


@pytest.mark.parametrize("level", (1, 2, 3))
@pytest.mark.parametrize("mesh", [(2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 1)], ids=str)
def test_zero(level, mesh):
    plan = equal(Words, words, mesh, tensor("S(0)", "embed.weight") | data("S(0)", "ids"), zero=level)
    assert set(plan.zero.values()) == ({level} if mesh[0] > 1 else set())


@pytest.mark.parametrize("level", (1, 2, 3))
def test_zero_leaves_unused_parameters_without_a_gradient(level):
    equal(lambda: Sometimes("left"), with_ids, (2, 1, 1), data("S(0)", "x"), zero=level)


@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 1, 2)], ids=str)
def test_overflow_of_half_precision_on_one_rank(mesh):
    """All ranks skip the step, the scale of 2^16 halves everywhere, and the next step is that of one device."""

    def overflow(sharded, batch):
        optimizer = sharded.optimizer(torch.optim.SGD, lr=0.1)
        before, last = sharded.state_dict(), sharded.world.mesh.size - 1
        assert sharded.loss_scale == 2.0**16
        sharded(**batch).backward()
        if sharded.world.rank == last:
            next(p for p in sharded.parameters() if p.grad is not None).grad.view(-1)[0] = torch.inf
        optimizer.step()
        assert all(torch.equal(before[name], value) for name, value in sharded.state_dict().items())
        assert sharded.loss_scale == 2.0**15
        optimizer.zero_grad()
        sharded(**batch).backward()
        optimizer.step()
        assert sharded.loss_scale == 2.0**15
        return sharded.state_dict()

    torch.manual_seed(0)
    model = Words()
    masters, low = dict(model.named_parameters()), copy.deepcopy(model).half()
    scale = 2.0**15
    (low(**words()).float() * scale).backward()
    with torch.no_grad():
        for name, p in low.named_parameters():
            masters[name].sub_(0.1 * p.grad.float() / scale)
    options = {"pin": tensor("S(0)", "embed.weight"), "dtype": None, "precision": "fp16"}
    for state in on_ranks(Words, words, mesh, overflow, **options):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-4, msg=name)
