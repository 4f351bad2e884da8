"""Deep models are planned in time that hardly grows with their depth, and to the same plan on every run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

from autoshard import passes
from autoshard.capture import capture
from autoshard.cluster import Cluster
from autoshard.cost.compute import Pricing, op_costs
from autoshard.mesh import Mesh
from autoshard.planning.fold import fold
from autoshard.planning.strategies import annotate
from autoshard.program import is_getitem, likeness
from autoshard.rules import rule_for
from examples import gpt2, llama, t5

ROOT = Path(__file__).parent.parent


def cut(target, m: int = 4):
    """The program of one micro-batch."""
    program = passes.run("canonicalize", capture(*target()).program)
    program.mesh = Mesh(2, 2, 2)
    return passes.run("microbatch", program, m).program


def explained(seed: str) -> subprocess.Popen:
    """A process that prints a plan under a seed of Python's hashes."""
    code = "import sys; from autoshard.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "explain", "examples/mlp.py:tiny", "--mesh", "2,2,2", "--format", "json"]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)


@pytest.mark.timeout(300)
def test_the_plan_does_not_depend_on_the_order_of_hashes():
    plans = []
    for process in [explained("1"), explained("2")]:
        out, _ = process.communicate()
        assert process.returncode == 0
        plan = json.loads(out)
        plan["solver"] = {name: value for name, value in plan["solver"].items() if "seconds" not in name}  # clocks differ
        plans.append(plan)
    assert plans[0] == plans[1]


def test_what_is_known_of_an_op_is_that_of_the_op_alone():
    """Rules, strategies and prices that alike ops share are those that each would be given by itself."""
    for target in (gpt2.tiny, llama.tiny, t5.tiny):
        program = cut(target)
        shared = annotate(program, program.mesh, alike=fold(program).by_node(program))
        alone = annotate(program, program.mesh)
        pricing = Pricing((2, 2), Cluster.of())
        for node, item in shared.items():
            assert item.strategies == alone[node].strategies, node
            if item.rule is not None:
                assert item.rule == rule_for(node)
                assert pricing.costs(node, item.rule, item.strategies) == op_costs(node, item.rule, item.strategies, (2, 2), Cluster.of())


def test_ops_are_alike_if_only_their_values_differ():
    graph = fx.Graph()
    a, b, c = (graph.placeholder(name) for name in "abc")
    for node, shape in ((a, (4, 8)), (b, (4, 8)), (c, (8, 4))):
        node.meta = {"val": torch.empty(shape, device="meta"), "grad": True}

    def op(*args):
        node = graph.call_function(torch.ops.aten.add.Tensor, args)
        node.meta = {"val": torch.empty(4, 8, device="meta"), "grad": True}
        return likeness(node)

    assert op(a, b) == op(b, a)
    assert len({op(a, b), op(a, c), op(a, 1), op(a, 1.0), op(a, True)}) == 5
    b.meta["grad"] = False
    assert op(a, b) != op(b, a)


def test_a_deeper_model_has_no_more_to_plan():
    """Each of its many layers is cut, annotated and priced as one: 20 layers make no rule, strategy or price that 4 do not make."""

    def made(layers: int) -> tuple[int, int]:
        def target():
            model, batch = gpt2.tiny()
            config = model.config
            config.n_layer = layers
            return type(model)(config), batch

        program = cut(target)
        annotated = annotate(program, program.mesh, alike=fold(program).by_node(program))
        items = [item for node, item in annotated.items() if node.op == "call_function" and not is_getitem(node)]
        return len({id(item.rule) for item in items}), len({id(item.strategies) for item in items})

    assert made(4) == made(20)
