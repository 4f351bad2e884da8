"""The rule table as a whole: every op, every choice of an axis, in pieces equals the whole op, forward and backward.

No process group: ``autoshard.rules.check`` cuts the operands, runs the op on each rank's pieces and puts the results together.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from rule_samples import ARBITRARY, FROZEN, NO_BACKWARD, SAMPLES
from torch import fx

from autoshard.capture import capture
from autoshard.errors import RuleError
from autoshard.passes.canonicalize import canonicalize
from autoshard.placement import local_shape
from autoshard.program import is_getitem, operands, tensors
from autoshard.rules import NAMED, RULES, RuleWarning, bind, choices, has_rule, kernel, parse, register_rule, rule_for, strategies
from autoshard.rules.call import argument, aten, operand_names
from autoshard.rules.check import call, compare, node_of, tolerance

torch.manual_seed(0)
RESHAPES = {aten(*name.split(".")) for name in "reshape view _unsafe_view unflatten.int".split()}
EXPANDS = {aten("expand"), aten("broadcast_to")}


def resize(node: fx.Node, values, shapes):
    """The op and arguments of a rank: sizes in arguments are those of its pieces, whose results have these shapes."""
    args = list(node.args)
    if node.target in RESHAPES:
        return aten("reshape"), [args[0], list(shapes[0])]
    if node.target in EXPANDS:
        return node.target, [args[0], list(shapes[0])]
    if node.target in (aten("slice", "Tensor"), aten("narrow")):
        dim = args[1]
        whole, piece, part = node.args[0].meta["val"].shape[dim], values[0].shape[dim], shapes[0][dim]
        start = args[2] % whole * piece // whole
        args[2:4] = [
            start,
            start + part if node.target is aten("slice", "Tensor") and len(args) < 5 else args[3] if len(args) > 4 else part,
        ]
    names = [a.name for a in node.target._schema.arguments]
    if "groups" in names and len(args) > names.index("groups"):
        whole, result = node.args[0].meta["val"].shape[1], node.meta["val"].shape[1]
        if values[0].shape[1] < whole and shapes[0][1] < result:  # whole groups on each rank
            args[names.index("groups")] = args[names.index("groups")] * values[0].shape[1] // whole
    if node.target is aten("group_norm"):
        args[1] = args[1] * values[0].shape[1] // node.args[0].meta["val"].shape[1]
    return node.target, args


def run_mean(node: fx.Node, values):
    """Local kernel "mean": the sum, divided by the count of the whole dims."""
    whole = operands(node)[0].meta["val"].shape
    dims = argument(node, "dim") if node.target is aten("mean", "dim") else None
    dims = [d % len(whole) for d in dims or range(len(whole))]
    keep = node.target is aten("mean", "dim") and argument(node, "keepdim")
    return [values[0].sum(dims, keepdim=keep) / torch.Size(whole[d] for d in dims).numel()]


def run_embedding(node: fx.Node, values, coords, layout, sizes):
    """Local kernel "vocab_embedding": rows of other ranks give 0."""
    table, ids = values
    rows = operands(node)[0].meta["val"].shape[0]
    axis = next(a for a, p in enumerate(layout) if p.is_shard and p.dim == 0)
    step = -(-rows // sizes[axis])
    ids = ids - coords[axis] * step
    mine = (ids >= 0) & (ids < len(table))
    padding = argument(node, "padding_idx")
    padding = (padding % rows if padding < 0 and padding != -1 else padding) - coords[axis] * step if padding != -1 else -1
    padding = padding if 0 <= padding < len(table) else -1
    return [torch.where(mine[..., None], torch.embedding(table, ids.clamp(0, len(table) - 1), padding), 0.0)]


def run_cross_entropy(node: fx.Node, coords, values, peers, layout):
    """Local kernel "vocab_cross_entropy": the whole loss; of the logits only its own piece has a gradient on a rank."""
    axis = next(a for a, p in enumerate(layout) if p.is_shard and p.dim == 1)
    group = [c for c in sorted(peers) if c[:axis] + c[axis + 1 :] == coords[:axis] + coords[axis + 1 :]]
    logits = torch.cat([values[0] if c == coords else peers[c][0].detach() for c in group], 1)
    return call(node, [logits, *values[1:]])


def check(op, sample, sizes, blocks=None) -> int:
    """Run one call under every strategy of a mesh; how many there were."""
    args, kwargs = (sample[:-1], sample[-1]) if isinstance(sample[-1], dict) else (sample, {})
    node, values = node_of(op, args, kwargs)
    rule = rule_for(node)
    assert not rule.fallback and len(rule.operands) == len(values)
    names = operand_names(node)
    frozen = frozenset(
        i for i, name in enumerate(names) if op in NO_BACKWARD or {name, f"{op._schema.name.split('::')[1]}.{name}"} & FROZEN
    )
    wholes = [tuple(t.shape) for t in tensors(node.meta["val"])]
    per_axis = tuple(choices(rule, k, blocks) for k in sizes)
    found = strategies(rule, per_axis, sizes, tuple(tuple(v.shape) for v in values), tuple(wholes))
    for strategy in found:
        kernels = {kernel(rule, c): c.factor for c in strategy.choices if kernel(rule, c)}
        if "batch_norm" in kernels:  # its backward communicates: see test_batch_norm.py
            continue

        def run(coords, local, peers, strategy=strategy, kernels=kernels):
            if not coords:
                return call(node, local)
            if "mean" in kernels:
                return run_mean(node, local)
            if "vocab_cross_entropy" in kernels:
                return run_cross_entropy(node, coords, local, peers, strategy.operands[0])
            if "vocab_embedding" in kernels:
                return run_embedding(node, local, coords, strategy.operands[0], sizes)
            shapes = [local_shape(s, layout, sizes, coords) for s, layout in zip(wholes, strategy.results)]
            target, changed = resize(node, local, shapes)
            return call(node, local, target, changed)

        try:
            if op in ARBITRARY:
                corner = (0,) * len(sizes)
                shapes = [local_shape(tuple(v.shape), layout, sizes, corner) for v, layout in zip(values, strategy.operands)]
                got = run(corner, [v.new_empty(s) for v, s in zip(values, shapes)], {})
                assert [tuple(t.shape) for t in got] == [
                    local_shape(s, layout, sizes, corner) for s, layout in zip(wholes, strategy.results)
                ]
                continue
            errors = compare(values, strategy.operands, strategy.results, sizes, run, frozen)
        except Exception as error:
            raise AssertionError(f"{op} {strategy.name} on {sizes}: {error}\n{rule}") from error
        wrong = {what: off for what, off in errors.items() if off > tolerance([*values, *tensors(node.meta["val"])])}
        assert not wrong, f"{op} {strategy.name} on {sizes}: {wrong}\n{strategy}\n{rule}"
    return len(found)


def test_every_op_has_a_sample():
    assert set(SAMPLES) == set(RULES)
    assert all(SAMPLES.values())


@pytest.mark.parametrize("op", sorted(SAMPLES, key=str), ids=str)
def test_every_choice_equals_the_whole_op(op):
    for sample in SAMPLES[op]:
        for k in (2, 3):
            assert check(op, sample, (k,)) >= 2


ON_TWO_AXES = [
    ("linear", (torch.rand(4, 4, 8), torch.rand(4, 8), torch.rand(4))),
    ("add.Tensor", (torch.rand(4, 8), torch.rand(8))),
    ("mean.dim", (torch.rand(4, 8, 3), [0, 1])),
    ("embedding", (torch.rand(9, 4), torch.randint(9, (4, 4)))),
    ("cross_entropy_loss", (torch.rand(6, 9), torch.randint(9, (6,)), None, 2)),
    ("reshape", (torch.rand(4, 8, 12), [32, 12])),
    ("reshape", (torch.rand(32, 12), [4, 8, 4, 3])),
    ("slice.Tensor", (torch.rand(4, 24), 1, 8, 16)),
    ("cat", ([torch.rand(4, 8), torch.rand(4, 16)], 1)),
    ("scaled_dot_product_attention", (torch.rand(2, 8, 4, 3), *[torch.rand(2, 2, 5, 3)] * 2, None, 0.0, False, {"enable_gqa": True})),
    ("index_add", (torch.rand(4, 6), 0, torch.randint(4, (8,)), torch.rand(8, 6))),
    ("layer_norm", (torch.rand(4, 6, 5), [5], torch.rand(5), torch.rand(5))),
]  # fmt: skip


@pytest.mark.parametrize("name,sample", ON_TWO_AXES, ids=[name for name, _ in ON_TWO_AXES])
def test_pairs_of_choices_equal_the_whole_op(name, sample):
    op = aten(*name.split("."))
    sample = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, sample)
    assert check(op, sample, (2, 2)) > 4


@pytest.mark.parametrize(
    "name,sample,blocks",
    [
        ("linear", (torch.rand(5, 6), torch.rand(12, 6), torch.rand(12)), {"n": (1, 2, 3)}),
        ("add.Tensor", (torch.rand(5, 12), torch.rand(12)), {"d1": (1, 3)}),
        ("slice.Tensor", (torch.rand(5, 24), 1, 0, 12), {"x": (1, 3)}),
        ("embedding", (torch.rand(7, 12), torch.randint(7, (5,))), {"e": (3,)}),
    ],
)
def test_blocked_shards_equal_the_whole_op(name, sample, blocks):
    assert check(aten(*name.split(".")), sample, (2,), blocks) > 2


def names_of(op: str, *args, k: int = 2, **kwargs) -> list[str]:
    return [c.name for c in choices(rule_for(node_of(aten(*op.split(".")), args, kwargs)[0]), k)]


def demands(op: str, choice: str, *args, k: int = 2, **kwargs) -> str:
    rule = rule_for(node_of(aten(*op.split(".")), args, kwargs)[0])
    found = next(c for c in choices(rule, k) if c.name == choice)
    return f"{', '.join(map(str, found.operands))} -> {', '.join(map(str, found.results))}"


def test_megatron_and_its_relatives_can_be_read_off_the_rules():
    x, w, bias = torch.rand(4, 6, 8), torch.rand(12, 8), torch.rand(12)
    assert demands("linear", "shard n", x, w, bias) == "R*, S(0), S(0) -> S(2)"  # column parallel
    assert demands("linear", "shard k", x, w, bias) == "S(2), S(1), P -> P"  # row parallel, the bias counted once
    assert demands("linear", "shard d0", x, w, bias) == "S(0), R*, R* -> S(0)"  # data parallel
    assert demands("embedding", "shard v", torch.rand(9, 4), torch.randint(9, (4, 6))) == "S(0), R* -> P"
    assert demands("cross_entropy_loss", "shard v", torch.rand(6, 9), torch.randint(9, (6,)), None, 2) == "S(1), R -> R"
    assert demands("cross_entropy_loss", "shard d0", torch.rand(6, 9), torch.randint(9, (6,)), None, 2) == "S(0), S(0) -> P"


def test_fused_heads_are_blocked_shards():
    assert demands("slice.Tensor", "shard x", torch.rand(2, 8, 96), 2, 32, 64) == "S(2/3) -> S(2)"
    assert demands("slice.Tensor", "shard x", torch.rand(2, 8, 32), 2, 0, 16) == "S(2/2) -> S(2)"  # [16 | 8 | 8]: the first piece is a half
    assert demands("slice.Tensor", "shard x", torch.rand(2, 8, 32), 2, 16, 24) == "S(2/4) -> S(2)"
    assert demands("reshape", "shard f1", torch.rand(4, 6, 8), [24, 8]) == "S(1) -> S(0/4)"  # a sequence shard inside the batch


def test_grouped_query_heads_shard_their_repeats_where_kv_heads_are_too_few():
    q, kv = torch.rand(2, 8, 4, 3), torch.rand(2, 2, 4, 3)
    args = (q, kv, kv, None, 0.0, True)
    assert demands("scaled_dot_product_attention", "shard kv", *args, enable_gqa=True) == "S(1), S(1), S(1) -> S(1)"
    assert demands("scaled_dot_product_attention", "shard rep", *args, enable_gqa=True, k=4) == "S(1/2), R*, R* -> S(1/2)"
    assert "shard kv" not in names_of("scaled_dot_product_attention", *args, enable_gqa=True, k=4)
    assert not any("s" == name.removeprefix("shard ") for name in names_of("scaled_dot_product_attention", *args, enable_gqa=True))


@pytest.mark.parametrize(
    "op,args,passes",
    [
        ("add.Tensor", (torch.rand(4), 1.0), []),
        ("add.Tensor", (torch.rand(4), torch.rand(4)), ["partial 0,1"]),
        ("mul.Tensor", (torch.rand(4), 2.0), ["partial 0"]),
        ("mul.Tensor", (torch.rand(4), torch.rand(4)), ["partial 0", "partial 1"]),
        ("div.Tensor", (torch.rand(4), torch.rand(4)), ["partial 0"]),
        ("where.self", (torch.rand(4) < 0.5, torch.rand(4), torch.rand(4)), ["partial 1,2"]),
        ("relu", (torch.rand(4),), []),
        ("linalg_vector_norm", (torch.rand(4),), []),
        ("amax", (torch.rand(4),), []),
        ("softmax.int", (torch.rand(4), 0), []),
        ("clamp", (torch.rand(4), 0.0, 0.5), []),
        ("to.dtype", (torch.rand(4), torch.int64), []),
        ("dropout", (torch.rand(4), 0.5, True), []),
    ],
)
def test_only_linear_ops_take_partial_sums(op, args, passes):
    assert [name for name in names_of(op, *args) if name.startswith("partial")] == passes


def test_flops_and_saved_values():
    linear = rule_for(node_of(aten("linear"), (torch.rand(4, 6, 8), torch.rand(12, 8)))[0])
    assert linear.flops == 2 * 4 * 6 * 8 * 12 and linear.saved == (0, 1)
    q, k, v = torch.rand(2, 4, 6, 8), torch.rand(2, 4, 5, 8), torch.rand(2, 4, 5, 3)
    attention = rule_for(node_of(aten("scaled_dot_product_attention"), (q, k, v))[0])
    assert attention.flops == 2 * 2 * 4 * 6 * 5 * (8 + 3) and attention.saved == (0, 1, 2, -1)
    convolution = rule_for(node_of(aten("conv2d"), (torch.rand(2, 3, 8, 8), torch.rand(5, 3, 2, 2), None, [2, 2]))[0])
    assert convolution.flops == 2 * (2 * 5 * 4 * 4) * (3 * 2 * 2)
    frozen, _ = node_of(aten("linear"), (torch.rand(4, 8), torch.rand(12, 8)))
    operands(frozen)[1].meta["grad"] = False
    assert rule_for(frozen).saved == (1,)  # the weight for the input's gradient; the input would be for the weight's
    assert rule_for(node_of(aten("add", "Tensor"), (torch.rand(4), torch.rand(4)))[0]).saved == ()


# --- text ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text,message",
    [
        ("b s", "rule 'b s' has 0 arrows; it needs one '->'"),
        ("a -> a -> a", "rule 'a -> a -> a' has 2 arrows; it needs one '->'"),
        ("a, (b (c d)) -> a", "rule 'a, (b (c d)) -> a': nested group in operand 1: '(b (c d))'"),
        ("a -> (a b", "rule 'a -> (a b': group not closed in result 0: '(a b'"),
        ("a -> a ()", "rule 'a -> a ()': empty or unopened group in result 0: 'a ()'"),
        ("a 2b -> a", "rule 'a 2b -> a': '2b' is not a factor name in operand 0: 'a 2b'"),
        ("a, +b -> +a", "rule 'a, +b -> +a': '+' marks operands, not result 0: '+a'"),
        ("a a -> a", "rule 'a a -> a': 'a' occurs twice in operand 0; mark it a^ (never sharded)"),
        ("... a ... -> a", "rule '... a ... -> a': '...' twice in operand 0: '... a ...'"),
        ("(... a) -> a", "rule '(... a) -> a': '...' inside a group in operand 0: '(... a)'"),
    ],
)
def test_parse_errors_quote_the_guilty_token(text, message):
    with pytest.raises(RuleError) as error:
        parse(text)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "text,message",
    [
        ("a, b -> a", "rule 'a, b -> a' has 2 operands and 1 results, the op has 1 and 2"),
        ("a b c -> a, b", "rule 'a b c -> a, b': operand 0 has 2 dims, its spec 3"),
        ("a b -> b, a", "rule 'a b -> b, a': operand 0 has a dim of 4 where (a=6) is expected"),
        ("(x y) b -> b, b", "rule '(x y) b -> b, b': operand 0 has a dim of 4 where (x=unknown, y=unknown) is expected"),
    ],
)
def test_bind_errors_say_what_does_not_fit(text, message):
    with pytest.raises(RuleError) as error:
        bind(text, [(4, 6)], [(4,), (6,)])
    assert str(error.value) == message


def test_a_factor_that_only_some_results_have_is_fixed():
    assert bind("a b -> a b, a", [(4, 6)], [(4, 6), (4,)]).fixed == {"b"}


# --- ops without a rule, and rules of users -----------------------------------------------------------------------------


@torch.library.custom_op("rulestest::double_rows", mutates_args=())
def double_rows(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double_rows.register_autograd(lambda ctx, g: g * 2)


@torch.library.custom_op("rulestest::center", mutates_args=())
def center(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True) + shift


center.register_autograd(
    lambda ctx, g: (g - g.mean(-1, keepdim=True), g.sum(tuple(range(g.dim() - 1)))),
)


@torch.library.custom_op("rulestest::bad_backward", mutates_args=())
def bad_backward(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


bad_backward.register_autograd(lambda ctx, g: g.cumsum(0))


@pytest.fixture
def registered():
    before = dict(NAMED)
    yield NAMED
    NAMED.clear()
    NAMED.update(before)


def test_an_op_without_a_rule_is_replicated_with_one_warning():
    op = torch.ops.aten.cov.default
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.rand(4, 6)
    nodes = [graph.call_function(op, (x,)) for _ in range(2)]
    for node in nodes:
        node.meta.update(val=torch.cov(x.meta["val"]), module="encoder.mixer", source="model.py:12: torch.cov(x)")
    with pytest.warns(RuleWarning) as caught:
        rules = [rule_for(node) for node in (*nodes, nodes[0])]
    assert [str(w.message) for w in caught] == [
        "aten::cov has no sharding rule and is replicated\n"
        "  at node 'cov_default' in encoder.mixer (model.py:12: torch.cov(x))\n"
        '  hint: autoshard.register_rule("aten::cov", ...) would let it be sharded'
    ]
    assert all(r.fallback for r in rules)
    assert [c.name for c in choices(rules[0], 2)] == ["replicate", "defer"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = fx.Graph()
        copied.graph_copy(graph, {})
        rule_for(nodes[1])


def test_a_call_that_a_rule_does_not_cover_is_replicated():
    node, _ = node_of(aten("linear"), (torch.rand(4, 8), torch.rand(6, 8), torch.rand(4, 6)))  # a bias of the result's shape
    with pytest.warns(RuleWarning, match="aten::linear is called in a way that its sharding rule does not cover"):
        assert rule_for(node).fallback


def test_what_has_no_gradient_saves_nothing():
    node, _ = node_of(aten("gelu"), (torch.rand(4, 8),))
    assert rule_for(node).saved == (0,)
    node.meta["grad"] = False
    assert rule_for(node).saved == ()


def hugging_face_models():
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    ids, labels = torch.randint(0, 99, (2, 8)), torch.randint(0, 99, (2, 8))
    text, plain = {"input_ids": ids, "labels": labels}, {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
    gpt2 = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, n_positions=16, use_cache=False, **plain)
    llama = transformers.LlamaConfig(num_key_value_heads=2, use_cache=False, **small, **plain)
    t5 = transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, use_cache=False, decoder_start_token_id=0
    )
    vit = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, **small)
    return {
        "gpt2": (transformers.GPT2LMHeadModel(gpt2), text),
        "llama": (transformers.LlamaForCausalLM(llama), text),
        "bert": (
            transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=99, **small)),
            {**text, "attention_mask": torch.ones(2, 8).long()},
        ),
        "t5": (transformers.T5ForConditionalGeneration(t5), text),
        "vit": (
            transformers.ViTForImageClassification(vit),
            {"pixel_values": torch.rand(2, 3, 16, 16), "labels": torch.randint(0, 5, (2,))},
        ),
    }


@pytest.mark.slow
def test_every_op_of_hugging_face_models_has_a_rule():
    for name, (model, batch) in hugging_face_models().items():
        program = canonicalize(capture(model.train(), batch).program)
        missing = {str(n.target) for n in program.ops if not is_getitem(n) and rule_for(n).fallback}
        assert not missing, f"{name}: {missing}"


def test_a_users_rule_is_used_and_checked(registered):
    op = torch.ops.rulestest.double_rows.default
    assert not has_rule(op)
    register_rule("rulestest::double_rows", "b s -> b s", samples=(torch.rand(4, 6),))
    assert has_rule(op)
    assert rule_for(node_of(op, (torch.rand(4, 6),))[0]).sizes == {"b": 4, "s": 6}


def test_a_users_rule_may_sum_and_fix(registered):
    register_rule("rulestest::center", "b s h^, h^ -> b s h^", samples=(torch.rand(4, 6, 5), torch.rand(5)))


@pytest.mark.parametrize(
    "op,text,samples,message",
    [
        ("nothing", "a -> a", None, "there is no op 'rulestest::nothing'"),
        ("double_rows", "a -> ", (torch.rand(4),), "rule 'a -> ': result 0 has 1 dims, its spec 0"),
        ("double_rows", "a b -> a", None, None),
        ("center", "b s h, h -> b s h", (torch.rand(4, 6, 8), torch.rand(8)), "factor 'h' (S(2), S(0) -> S(2)), result 0 is off by"),
        ("center", "b s h^, h^ -> b s h^", (torch.rand(4, 1, 8), torch.rand(8)), "factor 's' is 1 in the samples and can't be cut in two"),
        ("bad_backward", "a b -> a b", (torch.rand(4, 6),), "cut in two along factor 'a' (S(0) -> S(0)), gradient of operand 0 is off by"),
        ("center", "b s h, k -> b s h", (torch.rand(4, 6, 8), torch.rand(8)), "factor 'h' (S(2), R* -> S(2)), the op fails"),
        ("center", "b s h, h -> b s h", ("x",), "rulestest::center fails on the samples"),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_refused_by_name(registered, op, text, samples, message):
    if message is None:
        register_rule(f"rulestest::{op}", text)  # without samples nothing is run; the call itself says what does not fit
        with pytest.raises(RuleError, match="the rule of rulestest::double_rows does not fit this call"):
            rule_for(node_of(torch.ops.rulestest.double_rows.default, (torch.rand(4, 6),))[0])
        return
    with pytest.raises(RuleError) as error:
        register_rule(f"rulestest::{op}", text, samples)
    assert message in str(error.value)
    assert f"rulestest::{op}" not in NAMED
