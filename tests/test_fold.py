"""Folding: one class for corresponding ops of identical layers, and none for others."""

import random

import numpy as np
import pytest
import torch
import transformers
from torch import fx, nn
from torch.nn import functional as F

from autoshard.capture import capture
from autoshard.passes.canonicalize import canonicalize
from autoshard.planning.fold import Layers, candidate_runs, fold, operands_of
from autoshard.program import Input, Param, Program, facts, likeness
from examples import bert, gpt2, llama, t5, vit

aten = torch.ops.aten


def program_of(model: nn.Module, batch) -> Program:
    return canonicalize(capture(model, batch).program)


def check_sound(program: Program) -> None:
    """Ops of one class are the same op on operands that are alike; seen from the classes alone, without what found them."""
    folding = fold(program)
    classes = folding.by_node(program)
    first: dict[int, fx.Node] = {}
    for node in classes:
        if (lead := first.setdefault(classes[node], node)) is node:
            continue
        assert node.op == lead.op and facts(node) == facts(lead)
        if node.op == "placeholder":
            a, b = program.params[node.name], program.params[lead.name]
            assert (a.kind, a.requires_grad) == (b.kind, b.requires_grad)
            continue
        assert node.target is lead.target and likeness(node) == likeness(lead)
        for x, y in zip(operands_of(node), operands_of(lead), strict=True):
            assert facts(x) == facts(y)
            assert (x.name in program.params) == (y.name in program.params)
            if x.name in program.params:
                assert classes[x] == classes[y]
    assert not set(folding.nodes) & set(folding.params.values())


def layer_modules(program: Program, layers: Layers, ops: int | None = None) -> list[set[str]]:
    """Names of the modules of each instance, cut to ``ops`` parts: {"transformer.h.0"}, ..."""
    return [{".".join(n.meta["module"].split(".")[:ops]) for n in program.ops[s : s + layers.period]} for s in layers.starts]


def gpt2_of(layers: int):
    config = transformers.GPT2Config(
        vocab_size=99, n_positions=32, n_embd=32, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"
    )
    return transformers.GPT2LMHeadModel(config).eval(), gpt2.tiny()[1]


def llama_of(layers: int):
    config = llama.tiny()[0].config
    config.num_hidden_layers = layers
    return transformers.LlamaForCausalLM(config), llama.tiny()[1]


def t5_of(layers: int):
    config = t5.tiny()[0].config
    config.num_layers = config.num_decoder_layers = layers
    return transformers.T5ForConditionalGeneration(config), t5.tiny()[1]


@pytest.mark.parametrize("make, path, per_layer", [(gpt2_of, "transformer.h", 12), (llama_of, "model.layers", 9)])
@pytest.mark.parametrize("count", [2, 3, 12])
def test_one_class_per_position_of_a_layer(make, path, per_layer, count):
    program = program_of(*make(count))
    folding = fold(program)
    (layers,) = folding.layers
    assert len(layers.starts) == count
    assert layer_modules(program, layers, 3) == [{f"{path}.{i}"} for i in range(count)]
    ops, params = len(program.ops), len(program.params)
    assert len(set(folding.nodes)) == ops - (count - 1) * layers.period
    assert len(set(folding.params.values())) == params - (count - 1) * per_layer
    for offset in range(layers.period):
        assert len({folding.nodes[start + offset] for start in layers.starts}) == 1
    check_sound(program)


def test_numbers_are_in_order_of_appearance():
    pairs = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.ReLU())]
    program = program_of(nn.Sequential(*pairs, nn.Linear(4, 2)), (X,))
    # the first linear reads an input without a gradient, so its backward is another: it is no instance
    assert fold(program).nodes == [0, 1, 2, 1, 2, 3, 4]
    assert list(fold(program).params.values()) == [5, 6, 7, 8, 7, 8, 9, 10]


X = torch.randn(3, 4)


def test_encoder_and_decoder_are_two_repeats():
    program = program_of(*t5_of(3))
    decoder, encoder = (layer_modules(program, layers, 3) for layers in fold(program).layers)
    # the first layer of each has the table of relative positions besides
    assert encoder == [{"encoder.block.1"}, {"encoder.block.2"}]
    assert decoder == [{"decoder.block.1"}, {"decoder.block.2"}]
    check_sound(program)


@pytest.mark.parametrize("example", [bert, vit])
def test_other_examples(example):
    program = program_of(*example.tiny())
    (layers,) = fold(program).layers
    assert len(layers.starts) == 4
    check_sound(program)


class Block(nn.Module):
    def __init__(self, width: int, activation=F.relu, bias: bool = True):
        super().__init__()
        self.up, self.down = nn.Linear(width, 16, bias=bias), nn.Linear(16, width, bias=bias)
        self.activation = activation

    def forward(self, x):
        return x + self.down(self.activation(self.up(x)))


class Stack(nn.Module):
    """Blocks behind a linear layer, so that all of them have a gradient on their input."""

    def __init__(self, *blocks):
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(blocks)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def blocks_alike(*blocks) -> list[int]:
    """For each block the number of the first block that is folded with it."""
    program = program_of(Stack(*blocks), {"x": X})
    check_sound(program)
    folding = fold(program)
    ops = {i: [c for n, c in zip(program.ops, folding.nodes) if n.meta["module"].startswith(f"blocks.{i}")] for i in range(len(blocks))}
    return [next(j for j in ops if ops[j] == ops[i]) for i in ops]


def test_layers_that_differ_are_not_folded():
    assert blocks_alike(Block(4), Block(4), Block(4)) == [0, 0, 0]
    assert blocks_alike(Block(4), Block(4), Block(4, F.gelu), Block(4, F.silu), Block(4), Block(4)) == [0, 0, 2, 3, 0, 0]
    assert blocks_alike(Block(4), Block(4), Block(4, bias=False), Block(4)) == [0, 0, 2, 0]
    assert blocks_alike(Block(4), Block(4, lambda x: F.leaky_relu(x, 0.1)), Block(4, lambda x: F.leaky_relu(x, 0.2))) == [0, 1, 2]


def test_a_frozen_layer_is_another_layer():
    frozen = Block(4)
    frozen.up.weight.requires_grad_(False)
    assert blocks_alike(Block(4), Block(4), frozen, Block(4)) == [0, 0, 2, 0]


def test_layers_in_pairs_fold_in_pairs():
    a, b = (lambda: Block(4)), (lambda: Block(4, F.gelu))
    assert blocks_alike(a(), b(), a(), b(), a(), b()) == [0, 1, 0, 1, 0, 1]


def test_layers_of_shared_weights():
    block = Block(4)
    assert blocks_alike(block, block, block) == [0, 0, 0]
    assert blocks_alike(block, Block(4), block, Block(4, F.gelu)) == [0, 0, 0, 3]


def test_wiring_is_part_of_a_layer():
    class Crossed(Block):
        def __init__(self, order):
            super().__init__(4)
            self.order = order

        def forward(self, x):
            y = self.activation(self.up(x)), self.activation(self.up(x.sin()))
            return x + self.down(y[self.order[0]] - y[self.order[1]])

    assert blocks_alike(Crossed((0, 1)), Crossed((0, 1)), Crossed((1, 0))) == [0, 0, 2]


def test_projections_side_by_side_are_no_layers():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return torch.cat([part(x).relu() for part in self.parts]).sum()

    assert fold(program_of(Three(), {"x": X})).layers == []


def random_program(rng: random.Random) -> Program:
    """A chain of ops with jumps back, in which pieces repeat now and then, with or without a change."""
    graph = fx.Graph()
    params: dict[str, Param] = {}
    val = torch.empty(4, 4, device="meta")
    placeholders = [graph.placeholder(f"w{i}") for i in range(40)]
    x = graph.placeholder("x")
    for node in (*placeholders, x):
        node.meta = {"val": val, "grad": node is not x, "module": "", "source": ""}
    for node in placeholders:
        params[node.name] = Param((node.name,), (4, 4), torch.float32, True, "parameter")
    weights = iter(placeholders)
    values = [graph.call_function(aten.mm.default, (x, next(weights)))]
    values[0].meta = {"val": val, "grad": True}

    def step(kind: int, back: int) -> None:
        a, b = values[-1], values[max(len(values) - back, 0)]
        weight = next(weights, placeholders[0])
        calls = (aten.mm.default, (a, weight)), (aten.relu.default, (a,)), (aten.add.Tensor, (a, b)), (aten.mul.Tensor, (a, kind))
        node = graph.call_function(*calls[kind % 4])
        node.meta = {"val": val, "grad": True}
        values.append(node)

    while len(values) < 60:
        piece = [(rng.randrange(8), rng.randrange(1, 6)) for _ in range(rng.randrange(1, 6))]
        for _ in range(rng.randrange(1, 5)):
            for kind, back in piece:
                step(kind, back if rng.random() < 0.97 else rng.randrange(1, 8))
    graph.output([values[-1]])
    return Program(graph, params, {"x": Input("x", (4, 4), torch.float32)}, None)


def test_random_graphs_never_fold_what_differs():
    found = 0
    for seed in range(150):
        program = random_program(random.Random(seed))
        check_sound(program)
        for layers in fold(program).layers:
            found += 1
            check_instances(program, layers)
    assert found > 50


def check_instances(program: Program, layers: Layers) -> None:
    """Instances are isomorphic: the same edges inside, a one-to-one map of what comes from outside."""
    ops = program.ops
    index = {n: i for i, n in enumerate(ops)}

    def shape(start: int) -> list:
        names: dict[fx.Node, int] = {}
        inside = range(start, start + layers.period)

        def name(x: fx.Node):
            return index[x] - start if index.get(x) in inside else ("outside", names.setdefault(x, len(names)))

        return [[name(x) for x in operands_of(ops[i])] for i in inside]

    shapes = [shape(start) for start in layers.starts]
    assert all(s == shapes[0] for s in shapes)
    assert all(b - a >= layers.period for a, b in zip(layers.starts, layers.starts[1:]))


def test_candidate_runs_are_all_that_there_are():
    """Against their definition, period by period."""
    choose = random.Random(0)
    for _ in range(300):
        base = [choose.randrange(3) for _ in range(choose.randint(1, 5))]
        kinds = [choose.randrange(3) for _ in range(choose.randint(0, 8))] + base * choose.randint(0, 5) + base[:1]
        free = [choose.random() < 0.95 for _ in kinds]
        found, count = set(), len(kinds)
        for period in range(1, count // 2 + 1):
            equal = [kinds[i] == kinds[i + period] and free[i] and free[i + period] for i in range(count - period)]
            start = 0
            for i, same in enumerate([*equal, False]):
                if not same:
                    if i - start >= period:
                        found.add((start, i - start + period, period))
                    start = i + 1
        runs = candidate_runs(np.array(kinds, dtype=np.int64), np.array(free, dtype=bool))
        assert len(runs) == len(found) and set(runs) == found
