"""capture: the program computes what the model does, the model is left alone, and failures speak of the user's own code."""

import warnings

import pytest
import torch
from single import assert_same_gradients, gradients, run
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoshard.capture import capture
from autoshard.errors import CaptureError, RunError
from autoshard.passes.canonicalize import canonicalize
from examples import gpt2, llama


class Wrapped(nn.Module):
    """A linear layer of width 4 and what a test makes of it."""

    def __init__(self, function, **modules):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for name, module in modules.items():
            setattr(self, name, module)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def traced(function, **modules):
    torch.manual_seed(0)
    return capture(Wrapped(function, **modules), {"x": torch.randn(3, 4)})


def check_equal(function, **modules):
    """Result and gradients of the program are those of the model."""
    torch.manual_seed(0)
    model, x = Wrapped(function, **modules).double(), torch.randn(3, 4, dtype=torch.float64)
    captured = capture(model, {"x": x})
    expected, (got,) = model(x.clone()), run(captured, canonicalize(captured.program), model, {"x": x})
    assert torch.allclose(got, expected, rtol=0, atol=1e-12)
    assert got.requires_grad == expected.requires_grad == captured.program.leaves[0].meta["grad"]
    if expected.requires_grad:
        assert_same_gradients(gradients(got.sum(), model), gradients(expected.sum(), model))
    return captured


def targets(captured) -> list[str]:
    return [str(n.target).removeprefix("aten.") for n in captured.program.ops]


# --- the same function ---------------------------------------------------------------------------------------------------------


def test_in_place_operations_are_functional():
    def forward(model, x):
        y = model.linear(x).mul_(3)
        y[:, 0] = 0
        y[1:3] += 1
        y.view(-1).mul_(2)
        return y.masked_fill_(x > 0, 3)

    captured = check_equal(forward)
    assert not any(t.partition(".")[0].endswith("_") for t in targets(captured))


def test_whole_ops_survive_the_functional_form():
    def forward(model, x):
        y = F.layer_norm(model.linear(x).relu_(), (4,))
        q = y[None, None]
        return F.cross_entropy(F.scaled_dot_product_attention(q, q, q)[0, 0], y.argmax(1))

    kept = targets(check_equal(forward))
    assert {"linear.default", "layer_norm.default", "scaled_dot_product_attention.default", "cross_entropy_loss.default"} <= set(kept)


def test_no_grad_regions_cut_the_gradient():
    def forward(model, x):
        with torch.no_grad():
            y = model.linear(x)
            with torch.enable_grad():
                z = model.linear(y)
        return y + 2 * z + model.linear(x).detach()

    check_equal(forward)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_models_own_checkpoints(reentrant):
    check_equal(lambda model, x: checkpoint(model.linear, model.linear(x), use_reentrant=reentrant))


def test_grad_flags():
    captured = traced(lambda model, x: (model.linear(x) * x.sum(), model.linear(x).detach() + 1, model.linear(x).argmax(1)))
    assert [leaf.meta["grad"] for leaf in captured.program.leaves] == [True, False, False]


def test_frozen_parameters_have_no_gradient():
    model = Wrapped(lambda model, x: model.linear(x), frozen=nn.Linear(4, 4))
    model.linear.requires_grad_(False)
    captured = capture(model, {"x": torch.randn(3, 4)})
    assert not captured.program.leaves[0].meta["grad"]
    assert not any(p.requires_grad for p in captured.program.params.values())


# --- names and places ----------------------------------------------------------------------------------------------------------


def test_tied_parameters_are_one_placeholder_with_all_names():
    model, batch = llama.tiny()
    program = capture(model, batch).program
    tied = [p for p in program.params.values() if len(p.names) > 1]
    assert [p.names for p in tied] == [("model.embed_tokens.weight", "lm_head.weight")]
    assert sum(n.op == "placeholder" for n in program.graph.nodes) == len(program.params) + len(program.inputs)


def test_one_module_under_two_names_and_a_parameter_used_by_its_second_name_only():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = self.used = nn.Linear(4, 4)
            self.idle = nn.Linear(4, 4)

        def forward(self, x):
            return self.used(x)

    captured = capture(Shared(), {"x": torch.randn(3, 4)})
    assert [p.names for p in captured.program.params.values()] == [("unused.weight", "used.weight"), ("unused.bias", "used.bias")]
    assert [p.name for p in captured.params] == ["unused.weight", "unused.bias", "idle.weight", "idle.bias"]


def test_buffers_and_constants():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("saved", torch.ones(4))
            self.register_buffer("temporary", torch.ones(4), persistent=False)
            self.plain = torch.arange(4.0)

        def forward(self, x):
            return x + self.saved + self.temporary + self.plain + torch.tensor(2.5)

    captured = capture(Holder(), {"x": torch.randn(3, 4)})
    kinds = {p.name: (p.kind, p.persistent) for p in captured.program.params.values()}
    assert kinds == {"saved": ("buffer", True), "temporary": ("buffer", False), "plain": ("constant", False)}
    assert captured.constants_values["plain"].tolist() == [0, 1, 2, 3]
    assert [n.args[1] for n in captured.program.ops if "full" in str(n.target)] == [2.5]


def test_modules_and_source_lines():
    program = capture(*gpt2.tiny()).program
    addmm = next(n for n in program.ops if "addmm" in str(n.target))
    assert addmm.meta["module"] == "transformer.h.0.attn.c_attn"
    assert addmm.meta["source"].startswith("pytorch_utils.py:") and "torch.addmm" in addmm.meta["source"]
    linear = next(n for n in program.ops if "linear" in str(n.target))
    assert linear.meta["module"] == "lm_head" and "self.lm_head(" in linear.meta["source"]


def test_one_tensor_given_twice_is_two_inputs():
    ids = torch.randint(0, 99, (8, 16))
    program = capture(gpt2.tiny()[0], {"input_ids": ids, "labels": ids}).program
    assert [i.name for i in program.inputs.values()] == ["input_ids", "labels"]
    assert all(i.shape == (8, 16) and i.dtype == torch.int64 and i.batch_dim == 0 for i in program.inputs.values())


def test_meta_models_are_never_allocated():
    with torch.device("meta"):
        model = nn.Linear(1 << 22, 1 << 22)  # 64 TiB
    program = capture(model, (torch.empty(4, 1 << 22, device="meta"),)).program
    assert program.params["weight"].shape == (1 << 22, 1 << 22)
    assert {n.meta["val"].device.type for n in program.graph.nodes if "val" in n.meta} == {"meta"}


def test_the_module_is_left_as_it_was():
    model, batch = llama.tiny()
    model.config.use_cache = True
    model.last = []
    layers = list(model.modules())
    before = [dict(vars(m)) for m in layers]
    state = {k: (v.data_ptr(), v.clone()) for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    capture(model, batch)
    assert torch.equal(torch.get_rng_state(), rng)
    assert [dict(vars(m)) for m in layers] == before and model.config.use_cache and model.training
    assert all(v.data_ptr() == state[k][0] and torch.equal(v, state[k][1]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_attributes_that_forward_writes_are_taken_back():
    def forward(model, x):
        model.last = model.linear(x)
        model.seen.append(model.last)
        model.calls = model.calls + 1
        return model.last

    model = Wrapped(forward, seen=[], calls=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(model, {"x": torch.randn(3, 4)})
    assert not hasattr(model, "last") and model.seen == [] and model.calls == 0


# --- calls ----------------------------------------------------------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch, scale=1.0, *, mode="sum"):
        y = self.linear(batch["x"]) * scale + batch["more"][0]
        return y.sum() if mode == "sum" else y.mean()


def nested_batch():
    return {"x": torch.randn(3, 4), "more": [torch.randn(3, 4)]}


def test_nested_inputs_and_constants():
    captured = capture(Nested(), {"batch": nested_batch(), "mode": "mean"})
    assert [i.name for i in captured.program.inputs.values()] == ["batch.x", "batch.more.0"]
    assert captured.constants == {"mode": "mean"}
    batch = nested_batch()
    for args, kwargs in (((batch,), {"mode": "mean"}), ((), {"batch": batch, "mode": "mean", "scale": 1.0})):
        bound = captured.in_spec.bind(args, kwargs)
        assert list(bound) == ["batch.x", "batch.more.0"] and bound["batch.x"] is batch["x"]


@pytest.mark.parametrize(
    "args, kwargs, text",
    [
        ((), {"mode": "mean"}, "missing argument 'batch.x'"),
        ((nested_batch(), 2.0), {"mode": "mean"}, "argument 'scale' is 2.0, but the model was captured with 1.0"),
        ((nested_batch(),), {"mode": "sum"}, "argument 'mode' is 'sum', but the model was captured with 'mean'"),
        ((nested_batch(),), {}, "missing argument 'mode'"),
        ((nested_batch(),), {"mode": "mean", "mask": torch.ones(3)}, "unexpected argument 'mask'"),
        ((nested_batch(),), {"mode": "mean", "batch": nested_batch()}, "'batch' is given twice"),
        ((nested_batch(), 1.0, 3), {"mode": "mean"}, "3 positional arguments given, but forward takes 2"),
        (({"x": torch.randn(3, 4), "more": [1]},), {"mode": "mean"}, "argument 'batch.more.0' is 1; the model was captured with a tensor"),
    ],
)
def test_calls_that_do_not_fit(args, kwargs, text):
    signature = capture(Nested(), {"batch": nested_batch(), "mode": "mean"}).in_spec
    with pytest.raises(RunError) as caught:
        signature.bind(args, kwargs)
    assert text in str(caught.value)


def test_use_cache_is_off_and_need_not_be_said():
    model, batch = gpt2.tiny()
    captured = capture(model, batch)
    assert captured.constants == {"use_cache": False}
    assert list(captured.in_spec.bind((), batch)) == ["input_ids", "labels"]
    with pytest.raises(RunError, match="'use_cache' is True"):
        captured.in_spec.bind((), {**batch, "use_cache": True})


def test_loss_functions_see_what_forward_does_not_take():
    def loss_fn(output, batch):
        return F.cross_entropy(output, batch["labels"]) + batch["x"].sum() * 0

    batch = {"input": torch.randn(3, 4), "x": torch.randn(3), "labels": torch.zeros(3, dtype=torch.int64)}
    captured = capture(nn.Linear(4, 5), batch, loss_fn)
    assert captured.program.loss == 0 and captured.out_spec.num_leaves == 2
    assert [i.name for i in captured.program.inputs.values()] == ["input", "x", "labels"]
    captured = capture(nn.Linear(4, 5), (torch.randn(3, 4),), lambda output, batch: (output.sum(1) - batch[0].sum(1)).square().mean())
    assert captured.program.loss == 0
    with pytest.raises(CaptureError, match="loss_fn does not return a scalar"):
        capture(nn.Linear(4, 5), (torch.randn(3, 4),), lambda output, batch: output)


@pytest.mark.parametrize(
    "output, loss",
    [
        (lambda y: y.sum(), 0),
        (lambda y: (y.sum(), y), 0),
        (lambda y: {"logits": y, "loss": y.sum()}, 1),
        (lambda y: (y, y.sum()), None),
        (lambda y: (y.sum(), y.mean()), None),
        (lambda y: y.sum().detach(), None),
        (lambda y: {"logits": y, "loss": y}, None),
        (lambda y: y, None),
    ],
)
def test_which_leaf_is_the_loss(output, loss):
    assert traced(lambda model, x: output(model.linear(x))).program.loss == loss


def test_batch_dims():
    class Two(nn.Module):
        def forward(self, x, y):
            return x.sum() + y.sum()

    def dims(x, y, **given):
        return [i.batch_dim for i in capture(Two(), {"x": torch.zeros(x), "y": torch.zeros(y)}, **given).program.inputs.values()]

    assert dims((8, 3), (8,)) == [0, 0]
    assert dims((8, 3), (1, 3)) == [0, None]
    assert dims((8, 3), ()) == [0, None]
    assert dims((3, 8), (8, 2), batch_dims={"x": -1}) == [1, 0]
    assert dims((8, 3), (5,), batch_dims={"y": None}) == [0, None]
    with pytest.raises(CaptureError, match=r"inputs 'x' and 'y' have 8 and 5 samples in dim 0"):
        dims((8, 3), (5,))
    with pytest.raises(CaptureError, match="batch_dims names 'z', which is no input"):
        dims((8, 3), (8,), batch_dims={"z": 0})
    with pytest.raises(CaptureError, match=r"batch_dims\['y'\] is 3"):
        dims((8, 3), (8,), batch_dims={"y": 3})
