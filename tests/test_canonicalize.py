"""Canonical form: the same function, one spelling."""

import operator
import re

import pytest
import torch
from single import assert_same_gradients, gradients, run
from torch import nn
from torch.nn import functional as F

from autoshard.capture import capture
from autoshard.passes.canonicalize import canonicalize
from autoshard.program import Program, tensors
from examples import bert, gpt2, llama, mlp, t5, vit

aten = torch.ops.aten
EXAMPLES = {"mlp": mlp, "gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5, "vit": vit}


class Toy(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0).reshape(4, 4))
        self.function = function

    def forward(self, **inputs):
        return self.function(self.weight, **inputs)


def text(program: Program) -> str:
    """The ops of a program, one a line: ``name = op(arguments)  # shape``, without the overload where it is the default."""
    lines = []
    for node in program.ops:
        args = [repr(a) for a in node.args] + [f"{k}={v!r}" for k, v in node.kwargs.items()]
        name = str(node.target).removeprefix("aten.").removesuffix(".default")
        lines.append(f"{node.name} = {name}({', '.join(args).replace('torch.', '')})  # {list(node.meta['val'].shape)}")
    return "\n".join(lines)


def canonical(function, no_batch=(), **inputs) -> str:
    """Text of the canonical program, checked to be the same function with the same gradient."""
    torch.manual_seed(0)
    model = Toy(function).double()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    captured = capture(model, inputs, batch_dims=dict.fromkeys(no_batch))
    program = canonicalize(captured.program)
    expected, got = model(**inputs), run(captured, program, model, inputs)[0]
    assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12) and got.dtype == expected.dtype
    if expected.requires_grad and program.leaves[0].meta["grad"]:
        assert_same_gradients(gradients(got.sum(), model), gradients(expected.sum(), model))
    return text(program)


def golden(expected: str) -> str:
    return "\n".join(line.strip() for line in expected.strip().splitlines())


X = torch.randn(8, 4)
LABELS = torch.tensor([0, 1, -100, 3, 2, -100, 1, 0])


# --- goldens -------------------------------------------------------------------------------------------------------------------


def test_views_have_literal_sizes_and_dims_count_from_the_front():
    def f(w, x):
        y = (x @ w).view(2, -1, 4).transpose(-1, -2).flatten(0, 1).unflatten(0, (2, 4))[:, 1:]
        return y.unsqueeze(-1).expand(-1, -1, -1, 3).squeeze(0).sum(-1, keepdim=True)[..., -2:, :]

    assert canonical(f, x=X) == golden("""
        matmul = matmul(x, weight)  # [8, 4]
        reshape = reshape(matmul, [2, 4, 4])  # [2, 4, 4]
        transpose = transpose.int(reshape, 2, 1)  # [2, 4, 4]
        reshape_1 = reshape(transpose, [8, 4])  # [8, 4]
        reshape_2 = reshape(reshape_1, [2, 4, 4])  # [2, 4, 4]
        slice_1 = slice.Tensor(reshape_2, 1, 1, 4)  # [2, 3, 4]
        unsqueeze = unsqueeze(slice_1, 3)  # [2, 3, 4, 1]
        expand = expand(unsqueeze, [2, 3, 4, 3])  # [2, 3, 4, 3]
        sum_1 = sum.dim_IntList(expand, [3], True)  # [2, 3, 4, 1]
        slice_2 = slice.Tensor(sum_1, 2, 2, 4)  # [2, 3, 2, 1]
        """)


def test_what_does_nothing_is_dropped():
    def f(w, x):
        y = F.dropout(x.to(x.dtype).contiguous().clone(), 0.0) + 0
        y = F.dropout(y, 0.5, training=False) * 1.0
        y = y.reshape(8, 4).expand(8, -1).transpose(0, 0).permute(0, 1).detach()[:]
        unused = torch.relu(x)  # noqa: F841
        return y @ w

    assert canonical(f, x=X) == "matmul = matmul(x, weight)  # [8, 4]"


def test_what_does_something_stays():
    def f(w, x):
        return ((x @ w).detach() + x.sum(0, keepdim=True) * 0 + 1).float() * 2 + F.dropout(w, 0.5)[0] * 0

    assert [line.split(" = ")[1].split("(")[0] for line in canonical(f, x=X).splitlines()] == [
        "matmul", "detach", "sum.dim_IntList", "mul.Tensor", "add.Tensor", "add.Tensor", "to.dtype", "mul.Tensor",
        "dropout", "select.int", "mul.Tensor", "add.Tensor",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "split",
    [
        lambda y: y.split(2, -1)[1],
        lambda y: torch.split(y, [1, 1, 2], dim=1)[2],
        lambda y: y.chunk(2, 1)[1],
        lambda y: y.tensor_split(2, -1)[-1],
        lambda y: y.narrow(1, -2, 2),
        lambda y: y[:, 2:],
        lambda y: y[..., -2:9],
    ],
)
def test_pieces_are_slices(split):
    assert canonical(lambda w, x: split(x @ w), x=X).splitlines()[1] == "slice_1 = slice.Tensor(matmul, 1, 2, 4)  # [8, 2]"


def test_unbind_is_select():
    assert canonical(lambda w, x: (x @ w).unbind(-1)[-1], x=X).splitlines()[1] == "select = select.int(matmul, 1, 3)  # [8]"


def test_writes_are_concatenations():
    def f(w, x):
        y = (x @ w).clone()
        y[:, 1:3] = x[:, :2]
        y[0] = 7
        return y

    assert canonical(f, x=X) == golden("""
        matmul = matmul(x, weight)  # [8, 4]
        slice_1 = slice.Tensor(x, 1, 0, 2)  # [8, 2]
        slice_2 = slice.Tensor(matmul, 1, 0, 1)  # [8, 1]
        slice_3 = slice.Tensor(matmul, 1, 3, 4)  # [8, 1]
        cat = cat([slice_2, slice_1, slice_3], 1)  # [8, 4]
        full = full([4], 7.0, dtype=float64)  # [4]
        unsqueeze = unsqueeze(full, 0)  # [1, 4]
        slice_4 = slice.Tensor(cat, 0, 1, 8)  # [7, 4]
        cat_1 = cat([unsqueeze, slice_4])  # [8, 4]
        """)


def test_factories_and_other_names():
    def f(w, x):
        mask = torch.ones_like(x, dtype=torch.bool) & (x > 0) | x.new_zeros(4, dtype=torch.bool)
        return torch.multiply(x, mask).movedim(0, 1).swapaxes(0, 1) @ w + torch.full((4,), 2.0, device=x.device, dtype=x.dtype)

    assert canonical(f, x=X) == golden("""
        full = full([8, 4], 1, dtype=bool)  # [8, 4]
        gt = gt.Scalar(x, 0)  # [8, 4]
        bitwise_and = bitwise_and.Tensor(full, gt)  # [8, 4]
        full_1 = full([4], 0, dtype=bool)  # [4]
        bitwise_or = bitwise_or.Tensor(bitwise_and, full_1)  # [8, 4]
        mul = mul.Tensor(x, bitwise_or)  # [8, 4]
        permute = permute(mul, [1, 0])  # [4, 8]
        transpose = transpose.int(permute, 0, 1)  # [8, 4]
        matmul = matmul(transpose, weight)  # [8, 4]
        full_2 = full([4], 2.0, dtype=float64)  # [4]
        add = add.Tensor(matmul, full_2)  # [8, 4]
        """)


def test_mean_of_cross_entropy_is_sum_over_count():
    assert canonical(lambda w, x, labels: F.cross_entropy(x @ w, labels, label_smoothing=0.1), x=X, labels=LABELS) == golden("""
        matmul = matmul(x, weight)  # [8, 4]
        cross_entropy_loss = cross_entropy_loss(matmul, labels, None, 2, -100, 0.1)  # []
        ne = ne.Scalar(labels, -100)  # [8]
        sum_1 = sum(ne)  # []
        to = to.dtype(sum_1, float64)  # []
        div = div.Tensor(cross_entropy_loss, to)  # []
        """)


def test_class_weights_count_what_labels_pick():
    def f(w, x, labels, weights):
        return F.cross_entropy(x @ w, labels, weights, label_smoothing=0.2)

    weights = torch.tensor([0.5, 1.0, 2.0, 0.1])
    assert (
        canonical(f, ["weights"], x=X, labels=LABELS, weights=weights).splitlines()[2:]
        == golden("""
        ne = ne.Scalar(labels, -100)  # [8]
        where = where.ScalarOther(ne, labels, 0)  # [8]
        index = index.Tensor(weights, [where])  # [8]
        mul = mul.Tensor(index, ne)  # [8]
        sum_1 = sum(mul)  # []
        div = div.Tensor(cross_entropy_loss, sum_1)  # []
        """).splitlines()
    )


@pytest.mark.filterwarnings("ignore:reduction:UserWarning")
@pytest.mark.parametrize(
    "loss, divisor",
    [
        (lambda y, x: F.mse_loss(y, x), 32),
        (lambda y, x: F.l1_loss(y, x), 32),
        (lambda y, x: F.huber_loss(y, x, delta=0.5), 32),
        (lambda y, x: F.binary_cross_entropy_with_logits(y, x.sigmoid()), 32),
        (lambda y, x: F.kl_div(y.log_softmax(1), x.softmax(1)), 32),
        (lambda y, x: F.kl_div(y.log_softmax(1), x.softmax(1), reduction="batchmean"), 8),
        (lambda y, x: F.cross_entropy(y, x.softmax(1)), 8),
    ],
)
def test_other_means(loss, divisor):
    assert re.fullmatch(rf"div\w* = div.Tensor\(\w+, {divisor}\)  # \[\]", canonical(lambda w, x: loss(x @ w, x), x=X).splitlines()[-1])


def test_nll_loss_and_spatial_labels():
    assert "sum_1 = sum(ne)" in canonical(lambda w, x, labels: F.nll_loss((x @ w).log_softmax(1), labels), x=X, labels=LABELS)

    def spatial(w, x, labels):
        return F.cross_entropy((x @ w).reshape(2, 4, 4), labels)

    assert "[2, 4]" in canonical(spatial, ["labels"], x=X, labels=LABELS.reshape(2, 4)).splitlines()[-4]
    assert "div" not in canonical(lambda w, x, labels: F.cross_entropy(x @ w, labels, reduction="sum"), x=X, labels=LABELS)


def test_sums_of_half_precision_are_float32():
    model = nn.Linear(4, 4).half()
    captured = capture(model, {"input": X.half(), "labels": LABELS}, lambda y, batch: F.cross_entropy(y, batch["labels"]))
    program = canonicalize(captured.program)
    loss = next(n for n in program.ops if n.target is aten.cross_entropy_loss.default)
    assert loss.meta["val"].dtype == torch.float32 and program.leaves[0].meta["val"].dtype == torch.float16


def test_ops_are_whole_though_others_work_in_place():
    def f(w, x):
        y = F.batch_norm(x @ w, torch.zeros(4).double(), torch.ones(4).double())
        return F.dropout(y.mul_(2), 0.5) * 0

    assert "batch_norm = batch_norm(matmul, None, None, to, to_1, False, 0.1, 1e-05, True)" in canonical(f, x=X)
    assert "dropout = dropout(mul, 0.5, True)" in canonical(f, x=X)


def test_an_index_that_goes_along_with_the_samples_is_a_gather():
    def f(w, x, i):
        y = (x @ w).reshape(8, 2, 2)
        return y[torch.arange(8), i] + y[torch.arange(8)[:, None], i[:, None].expand(8, 3).to(torch.int32)].sum(1)

    assert canonical(f, x=X, i=torch.tensor([0, 1, -1, 1, 0, 0, -2, 1])) == golden("""
        matmul = matmul(x, weight)  # [8, 4]
        reshape = reshape(matmul, [8, 2, 2])  # [8, 2, 2]
        lt = lt.Scalar(i, 0)  # [8]
        add = add.Tensor(i, 2)  # [8]
        where = where.self(lt, add, i)  # [8]
        reshape_1 = reshape(where, [8, 1, 1])  # [8, 1, 1]
        expand = expand(reshape_1, [8, 1, 2])  # [8, 1, 2]
        gather = gather(reshape, 1, expand)  # [8, 1, 2]
        reshape_2 = reshape(gather, [8, 2])  # [8, 2]
        unsqueeze = unsqueeze(i, 1)  # [8, 1]
        expand_1 = expand(unsqueeze, [8, 3])  # [8, 3]
        to = to.dtype(expand_1, int32)  # [8, 3]
        lt_1 = lt.Scalar(to, 0)  # [8, 3]
        add_1 = add.Tensor(to, 2)  # [8, 3]
        where_1 = where.self(lt_1, add_1, to)  # [8, 3]
        to_1 = to.dtype(where_1, int64)  # [8, 3]
        reshape_3 = reshape(to_1, [8, 3, 1])  # [8, 3, 1]
        expand_2 = expand(reshape_3, [8, 3, 2])  # [8, 3, 2]
        gather_1 = gather(reshape, 1, expand_2)  # [8, 3, 2]
        sum_1 = sum.dim_IntList(gather_1, [1])  # [8, 2]
        add_2 = add.Tensor(reshape_2, sum_1)  # [8, 2]
    """)
    assert "index.Tensor(" in canonical(lambda w, x, i: (x @ w)[torch.arange(7), i], no_batch=("i",), x=X, i=torch.zeros(7).long())


BAGS = torch.tensor([[0, 3, 1], [1, 1, 2], [3, 0, 2], [2, 2, 2], [1, 0, 3], [0, 0, 1], [2, 3, 3], [1, 2, 0]])


def test_bags_of_one_length_are_rows_and_a_sum():
    assert canonical(lambda w, ids: F.embedding_bag(ids, w, mode="sum"), ids=BAGS) == golden("""
        reshape = reshape(ids, [24])  # [24]
        embedding = embedding(weight, reshape)  # [24, 4]
        reshape_1 = reshape(embedding, [8, 3, 4])  # [8, 3, 4]
        sum_1 = sum.dim_IntList(reshape_1, [1])  # [8, 4]
    """)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("more", [{}, {"padding_idx": 2}, {"include_last_offset": True}], ids=str)
def test_bags_of_any_length_are_added_up_by_index(mode, more):
    offsets = torch.tensor([0, 3, 3, 4, 9, 9, 20, 24])  # two of them empty
    weights = {"weights": torch.rand(24)} if mode == "sum" else {}

    def f(w, ids, offsets, weights=None):
        return F.embedding_bag(ids, w, offsets, mode=mode, per_sample_weights=weights, **more)

    found = canonical(f, no_batch=("ids", "offsets", *weights), ids=BAGS.flatten(), offsets=offsets, **weights)
    assert "index_add(" in found and "embedding_bag" not in found
    if "include_last_offset" not in more:
        found = canonical(lambda w, ids: F.embedding_bag(ids, w, mode=mode, **more), ids=BAGS)
        assert "sum.dim_IntList(" in found and "embedding_bag" not in found


# --- whole models ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name):
    """Loss, outputs and gradients are the model's; the graph is canonical in every respect that can be checked from outside."""
    model, batch = EXAMPLES[name].tiny()
    model = model.double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    captured = capture(model, batch)
    before = text_of_graph(captured.program)
    program = canonicalize(captured.program)
    assert text_of_graph(captured.program) == before

    expected = model(**batch)
    expected = list(expected) if isinstance(expected, tuple) else [v for v in expected.values() if isinstance(v, torch.Tensor)]
    got = run(captured, program, model, batch)
    assert program.loss == 0 and len(got) == captured.out_spec.num_leaves
    for a, b in zip(got, expected):
        assert torch.allclose(a, b, rtol=0, atol=1e-12 * b.abs().max().item())
    assert_same_gradients(gradients(got[0], model), gradients(expected[0], model))
    check_form(program)


def text_of_graph(program: Program) -> str:
    return str(program.graph) + str(sorted(program.params))


def check_form(program: Program) -> None:
    for node in program.graph.nodes:
        assert node.op in ("placeholder", "call_function", "output")
        if node.op == "output":
            continue
        assert node.users or node.name in program.inputs, f"{node} is dead"
        assert all(isinstance(size, int) and size >= 0 for t in tensors(node.meta["val"]) for size in t.shape)
        assert isinstance(node.meta["grad"], bool)
        if node.op == "placeholder":
            assert (node.name in program.params) != (node.name in program.inputs)
            continue
        assert isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
        assert not {"device", "layout", "pin_memory", "memory_format"} & node.kwargs.keys()
        assert "view" not in str(node.target) and "split" not in str(node.target) and "clone" not in str(node.target)
        assert {"module", "source", "val", "grad"} <= node.meta.keys()
        numbers = [a for a in node.args if isinstance(a, list) and all(isinstance(n, int) for n in a)]
        assert all(n >= 0 for list_ in numbers for n in list_)
    assert program.params.keys() == {n.name for n in program.graph.nodes if n.op == "placeholder"} - program.inputs.keys()
