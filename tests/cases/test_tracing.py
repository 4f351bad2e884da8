"""What models do that a tracer must see, or refuse."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.errors import CaptureError, RunError
from autoshard.rules import RuleWarning
from cases.tools import data, equal, on_ranks, prepared, refused, tensor


def rows(*shape):
    return lambda: {"x": torch.randn(*shape)}


class Decides(nn.Module):
    """Decides in Python by the values of a tensor."""

    def __init__(self, how):
        super().__init__()
        self.how, self.linear = how, nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        if self.how == "if":
            if x.sum() > 0:  # here: if
                y = y * 2
        elif self.how == "loop":
            for i in x[:, 0].gt(0).nonzero():  # here: loop
                y = y + y[i]
        elif self.how == "slice":
            y = y[: int((x[:, 0] > 0).sum())]  # here: slice
        elif self.how == "mask":
            y = y[x[:, 0] > 0]  # here: mask
        elif self.how == "shape":
            y = y * 2 if x.shape[0] > 2 else y
        return y.pow(2).mean()


@pytest.mark.parametrize("how", ("if", "loop", "slice", "mask"))
def test_control_flow_that_depends_on_data(how):
    text = refused(lambda: Decides(how), rows(4, 8), (2, 1, 1), "test_tracing.py:", "hint:", error=CaptureError)
    assert f"# here: {how}" in text


def test_control_flow_that_depends_on_shapes():
    equal(lambda: Decides("shape"), rows(4, 8), (2, 1, 1), data("S(0)", "x"))


class Shared(nn.Module):
    """One layer under two names, three norms with one weight, an alias, a weight that is used transposed as well."""

    def __init__(self):
        super().__init__()
        self.a = self.b = nn.Linear(8, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        for norm in self.norms[1:]:
            norm.weight = self.norms[0].weight
        self.first = nn.Parameter(torch.randn(8, 8))
        self.second = self.first  # only this name is read

    def forward(self, x):
        for layer, norm in zip((self.a, self.b, self.a), self.norms):
            x = x + norm(layer(x))
        return (x @ self.second @ self.a.weight.t()).pow(2).mean()


def test_tied_and_aliased_parameters():
    equal(Shared, rows(4, 8), (1, 2, 1), tensor("S(0)", "a.weight"))
    equal(Shared, rows(4, 8), (2, 1, 2), microbatches=2)


def test_the_users_module_is_left_as_it_was():
    model, batch = prepared(Shared, rows(4, 8), None)
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters(remove_duplicate=False)}
    sharded = autoshard.compile(model, (1, 1, 1), batch)
    sharded(**batch).backward()
    sharded.optimizer(torch.optim.SGD, lr=0.1).step()
    assert sharded.state_dict().keys() == model.state_dict().keys()
    for name, p in model.named_parameters(remove_duplicate=False):
        assert (id(p), p.grad) == (before[name][0], None) and torch.equal(p, before[name][1]), name


class Modes(nn.Module):
    """Dropout and batch norm: what train and eval mode tell apart."""

    def __init__(self, p=0.5):
        super().__init__()
        self.first, self.bn, self.drop, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(p), nn.Linear(8, 8)

    def forward(self, x):
        y = self.last(self.drop(F.relu(self.bn(self.first(x)))))
        return {"loss": y.pow(2).mean(), "y": y}


MODES = [((2, 1, 1), data("S(0)", "x")), ((2, 2, 1), tensor("S(0)", "first.weight")), ((1, 1, 2), {})]


def whole(leaf):
    return leaf.full_tensor().detach() if hasattr(leaf, "full_tensor") else leaf.detach()


@pytest.mark.parametrize("mesh, pin", MODES, ids=str)
def test_train_mode_then_eval_mode_then_train_mode(mesh, pin):
    """Each mode has a program of its own, on the same weights and running statistics."""
    model, batch = prepared(lambda: Modes(0.0), rows(4, 8), torch.float64)

    def work(module, batch):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        found = []
        for mode in (True, True, False, True, False):
            module.train(mode)
            optimizer.zero_grad()
            out = module(**batch)
            found.append((out["loss"].item(), whole(out["y"])))
            if mode:
                out["loss"].backward()
                optimizer.step()
        return found, {name: value.clone() for name, value in module.state_dict().items()}

    wanted, state = work(model, batch)
    for found, got in on_ranks(lambda: Modes(0.0), batch, mesh, work, pin=pin):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(got, state, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mesh, pin", MODES, ids=str)
def test_eval_mode_does_not_drop(mesh, pin):
    model, batch = prepared(Modes, rows(4, 8), torch.float64)
    wanted = model.eval()(**batch)["loss"].item()

    def work(sharded, batch):
        with torch.no_grad():
            kept = {sharded.eval()(**batch)["loss"].item() for _ in range(3)}
        dropped = {sharded.train()(**batch)["loss"].item() for _ in range(3)}
        return kept, dropped

    for kept, dropped in on_ranks(lambda: Modes().eval(), batch, mesh, work, pin=pin):
        assert len(kept) == 1 and len(dropped) == 3
        assert kept.pop() == pytest.approx(wanted, rel=1e-10)


def test_the_users_module_keeps_its_mode():
    model, batch = prepared(Modes, rows(4, 8), None)
    model.bn.eval()
    sharded = autoshard.compile(model, (1, 1, 1), batch)
    sharded.eval()(**batch)
    assert [m.training for m in (model, model.bn, model.drop)] == [True, False, True]
    loss = sharded.train()(**batch)["loss"]
    assert loss.requires_grad and sharded.state_dict()["bn.num_batches_tracked"] == 0


def test_compiled_in_eval_mode():
    equal(lambda: Modes().eval(), rows(4, 8), (2, 2, 1), data("S(0)", "x"))


class Constants(nn.Module):
    """Tensors made in forward, with a device and without, and an attribute that is no buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = torch.linspace(0.5, 2.0, 8, dtype=torch.float64)

    def forward(self, x):
        t = x.shape[1]
        y = self.first(x) * self.scale + torch.arange(t, device=x.device)[:, None]
        y = y + torch.zeros(t, 8) + torch.full((8,), 0.5, device=x.device)
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        scores = (y @ y.transpose(1, 2)).masked_fill(~mask, float("-inf"))
        return self.last(scores.softmax(-1) @ y).pow(2).mean()


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_tensors_made_in_forward(mesh):
    equal(Constants, rows(4, 6, 8), mesh, tensor("S(0)", "first.weight") | data("S(0)", "x"), microbatches=mesh[2])


class Checkpointed(nn.Module):
    """The user's own activation checkpointing."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x.pow(2).mean()


@pytest.mark.parametrize("reentrant", (False, True))
def test_the_users_own_checkpoints(reentrant):
    if reentrant:  # torch's own rule: without an input that has a gradient, reentrant checkpoints train nothing on one device
        model = lambda: nn.Sequential(nn.Linear(8, 8), Checkpointed(True))  # noqa: E731
        equal(model, lambda: (torch.randn(4, 8),), (1, 2, 1), tensor("S(0)", "1.blocks.0.0.weight"))
    else:
        equal(lambda: Checkpointed(False), rows(4, 8), (1, 2, 1), tensor("S(0)", "blocks.0.0.weight"))


class InPlace(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(8, 8), nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn(8))

    def forward(self, x):
        y = self.first(x)
        if self.how == "relu_":
            y.relu_()
        elif self.how == "add_":
            y.add_(x)
        elif self.how == "column":
            y[:, 0] = 0
        elif self.how == "row_of_ranks":
            y[1:3] = x[1:3] * 2
        elif self.how == "masked_fill_on_a_view":
            y.view(-1, 2, 4)[:, 1].masked_fill_(x[:, :4] > 0, 3.0)
        elif self.how == "scatter_add_":
            y = torch.zeros_like(y).scatter_add_(1, (x > 0).long(), y)
        elif self.how == "clamp_parameter":
            with torch.no_grad():
                self.table.clamp_(-1, 1)
            y = y * self.table
        elif self.how == "clamp_data":
            self.table.data.clamp_(-1, 1)
            y = y * self.table
        elif self.how == "input":
            x.mul_(2)
            y = y + x
        return self.last(y).pow(2).mean()


@pytest.mark.parametrize("how", ("relu_", "add_", "column", "row_of_ranks", "masked_fill_on_a_view", "scatter_add_"))
def test_in_place(how):
    equal(lambda: InPlace(how), rows(6, 8), (1, 2, 1), tensor("S(0)", "first.weight"))
    equal(lambda: InPlace(how), rows(6, 8), (2, 1, 1), data("S(0)", "x"))


@pytest.mark.parametrize("how, name", [("clamp_parameter", "'table'"), ("input", "'x'")])
def test_in_place_on_what_is_the_users(how, name):
    refused(lambda: InPlace(how), rows(6, 8), (1, 2, 1), name, "test_tracing.py:", error=CaptureError)


def test_in_place_on_the_data_of_a_parameter():
    refused(lambda: InPlace("clamp_data"), rows(6, 8), (1, 2, 1), ".data", "hint:", error=CaptureError)


def test_a_transformers_model_with_a_cache_and_a_result_of_its_own_type():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=True, max_position_embeddings=16,
    )  # fmt: skip
    assert config.use_cache

    def batch():
        ids = torch.randint(0, 99, (4, 8))
        return {"input_ids": ids, "labels": ids}

    pin = tensor("S(0)", "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight")
    equal(lambda: transformers.LlamaForCausalLM(config), batch, (1, 2, 1), pin, dtype=torch.float32)


class Literal(nn.Module):
    """A view with literal sizes, which another batch would pass through wrongly."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.first(x).reshape(x.shape[0], 2, -1, 8).softmax(2).reshape(x.shape)
        return self.last(y).pow(2).mean()


SIZES = [((2, 1, 1), data("S(0)", "x")), ((1, 2, 1), tensor("S(0)", "first.weight")), ((1, 1, 2), {})]


@pytest.mark.parametrize("mesh, pin", SIZES, ids=str)
def test_another_batch_or_sequence_than_was_traced(mesh, pin):
    """A plan for each size, on the same weights: also a short last batch, which the data axis cuts in uneven pieces."""
    model, _ = prepared(Literal, rows(4, 8, 8), torch.float64)
    batches = [torch.randn(shape, dtype=torch.float64) for shape in [(4, 8, 8), (8, 8, 8), (4, 12, 8), (4, 8, 8), (3, 8, 8), (1, 8, 8)]]

    def work(module, _):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        losses = []
        for x in batches:
            optimizer.zero_grad()
            loss = module(x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, dict(module.state_dict())

    wanted, state = work(model, None)
    for losses, got in on_ranks(Literal, {"x": batches[0]}, mesh, work, pin=pin):
        assert losses == pytest.approx(wanted, rel=1e-10)
        torch.testing.assert_close(got, dict(state), rtol=1e-7, atol=1e-9)


def test_a_batch_that_can_not_be_trained_on_the_weights_of_the_first():
    """One sample can't be cut over data, so its gradients are no summands: an error, the same on all ranks. It can be evaluated."""

    def model():
        return nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 1), nn.Flatten(0), Mean())

    def call(sharded, batch):
        with torch.no_grad():
            loss = sharded(one).item()
        with pytest.raises(RunError) as caught:
            sharded(one)
        return loss, str(caught.value)

    one = torch.linspace(-1, 1, 8, dtype=torch.float64).view(1, 8)
    plain, _ = prepared(model, (one,), torch.float64)
    for loss, text in on_ranks(model, lambda: (torch.randn(4, 8),), (2, 1, 1), call):
        assert loss == pytest.approx(plain(one).item(), rel=1e-10)
        assert "'input'" in text and "(1, 8)" in text and "(4, 8)" in text


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


def test_sizes_without_end():
    def call(sharded, batch):
        with pytest.raises(RunError, match="more than 8") as caught:
            for n in range(2, 24, 2):
                sharded(torch.randn(n, 8, 8, dtype=torch.float64))
        return str(caught.value)

    (text,) = on_ranks(Literal, rows(4, 8, 8), (1, 1, 1), call)
    assert "'x'" in text and "pad" in text


@torch.library.custom_op("cases::flip_and_scale", mutates_args=())
def flip_and_scale(x: torch.Tensor, by: float) -> torch.Tensor:
    return x.flip(0) * by


@flip_and_scale.register_fake
def _(x, by):
    return torch.empty_like(x)


flip_and_scale.register_autograd(
    lambda ctx, grad: (grad.flip(0) * ctx.by, None), setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1])
)


class NoRule(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op, self.first, self.last, self.lstm = op, nn.Linear(8, 8), nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        y = self.first(x)
        if self.op == "custom":
            y = flip_and_scale(flip_and_scale(y, 2.0), 0.5)
        elif self.op == "fft":
            y = torch.fft.rfft(y, dim=1).abs()
        elif self.op == "solve":
            y = torch.linalg.solve(torch.eye(8) * 9 + y.transpose(1, 2) @ y, y.transpose(1, 2)).transpose(1, 2)
        elif self.op == "lstm":
            y = self.lstm(y)[0]
        elif self.op == "grid_sample":
            y = F.grid_sample(y[:, None], y[:, :, :2].tanh()[:, None], align_corners=False).squeeze(1).expand(-1, 8, -1).transpose(1, 2)
            y = y.expand(-1, -1, 8) + 0 * x[:, :1]
        elif self.op == "unfold":
            y = y.unfold(1, 3, 2).sum(-1)
        return self.last(y).pow(2).mean()


WARNED = {"custom": "cases::flip_and_scale", "fft": "fft", "solve": "solve", "lstm": "lstm", "grid_sample": "grid", "unfold": "unfold"}


@pytest.mark.parametrize("op", WARNED)
def test_op_without_a_rule(op):
    """Every rank computes it whole, and one warning says which op and where; or it has a rule, and no one is warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        equal(lambda: NoRule(op), rows(4, 8, 8), (2, 2, 1), data("S(0)", "x") | tensor("S(0)", "first.weight"))
    texts = {str(w.message).split("\n  hint")[0] for w in caught if w.category is RuleWarning}
    assert all(WARNED[op] in text and "test_tracing.py:" in text for text in texts), texts
    if op == "custom":
        assert len(texts) == 1
