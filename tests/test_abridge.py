"""Deep models are planned on a program with few of their layers: the problem is that of the whole, and so is what comes of it."""

from dataclasses import replace

import pytest
import torch
from small import Case
from torch import nn

from autoshard import passes
from autoshard.capture import capture
from autoshard.cluster import Cluster
from autoshard.errors import PlacementError
from autoshard.mesh import Mesh
from autoshard.passes.cut_stages import pure_nodes
from autoshard.planning.abridge import MANY, abridged
from autoshard.planning.joint import staged_of
from autoshard.planning.plan import Plan
from autoshard.planning.saving import Saving
from autoshard.planning.staging import Allowed
from autoshard.report.explain import explain_text
from autoshard.schedule import SCHEDULES
from autoshard.searching import wanted_of
from autoshard.tasks import AMPLE, LongTask, Outline
from examples import gpt2, llama, t5

DEEP = MANY + 2


class Stack(nn.Module):
    """Linear layers between two others; with ``all_of_them`` it returns what each layer gives."""

    def __init__(self, layers: int, all_of_them: bool = False):
        super().__init__()
        self.first, self.last, self.all_of_them = nn.Linear(3, 4), nn.Linear(4, 1), all_of_them
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x):
        found = [torch.relu(self.first(x))]
        for layer in self.layers:
            found.append(torch.tanh(layer(found[-1])))
        loss = self.last(found[-1]).sum()
        return (loss, *found) if self.all_of_them else (loss,)


def stack(layers: int, all_of_them: bool = False):
    return passes.run("canonicalize", capture(Stack(layers, all_of_them), {"x": torch.randn(8, 3)}).program)


def deep(module, config: str, layers: int = DEEP):
    """A target of an example's tiny model with more layers."""
    model, batch = module.tiny()
    for name in config.split():
        setattr(model.config, name, layers)
    torch.manual_seed(0)
    return type(model)(model.config), batch


def test_the_first_the_second_and_the_last_layer_stay():
    program = abridged(stack(DEEP))
    ops = program.ops
    assert [str(node.target).split(".")[1] for node in ops] == ["linear", "relu", *["linear", "tanh"] * 3, "linear", "sum"]
    assert [node.meta.get("stands_for", 1) for node in ops] == [1, 1, 1, 1, DEEP - 2, DEEP - 2, 1, 1, 1, 1]
    weights = [param.name for param in program.params.values() if param.name.endswith("weight")]
    assert sorted(weights) == ["first.weight", "last.weight", "layers.0.weight", "layers.1.weight", f"layers.{DEEP - 1}.weight"]
    assert [node.name for node in ops[6].all_input_nodes][0] == ops[5].name, "the last reads what the second gives"
    program.graph.lint()


def test_what_needs_every_layer_is_not_abridged():
    assert abridged(stack(MANY - 1)) is None
    assert abridged(stack(DEEP, all_of_them=True)) is None


@pytest.mark.parametrize(
    "module, config, mesh, m",
    [
        (gpt2, "n_layer", (2, 2, 2), 4),
        (llama, "num_hidden_layers", (1, 2, 1), 1),
        (t5, "num_layers num_decoder_layers", (2, 1, 4), 2),
    ],
)
def test_the_problem_is_that_of_the_whole(module, config, mesh, m):
    """Every op, value, use and price; names of nodes apart, which count what came before."""
    program = passes.run("canonicalize", capture(*deep(module, config)).program)
    problems = []
    for whole in (program, abridged(program)):
        whole.mesh = Mesh.of(mesh)
        cut = passes.run("microbatch", whole, m).program
        allowed, schedule = Allowed((0, 2, 3), Saving(None, None).modes), SCHEDULES["1F1B" if mesh[2] > 1 else "none"]
        problem = staged_of(cut, whole.mesh, Cluster.of(), pure_nodes(cut), AMPLE, {}, allowed, schedule).problem
        named = {"ops": tuple(replace(op, name="") for op in problem.ops), "values": tuple(replace(v, name="") for v in problem.values)}
        problems.append(replace(problem, **named))
    assert len(program.ops) > 2 * len(abridged(program).ops)
    assert problems[0] == problems[1]


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_a_deep_model_trains_as_on_one_device(share):
    model, batch = deep(gpt2, "n_layer")
    one, mesh = Case(model, batch, steps=1), Mesh(2, 2, 2)
    wanted = wanted_of(one.captured, "model", microbatches=4)
    task = wanted.task(mesh, 4)
    draft = task.drafted()
    assert isinstance(task, LongTask) and isinstance(draft, Outline)
    free = task.finished(draft)
    assert draft.step_seconds == pytest.approx(free.step_seconds, rel=0.1)
    limit = share * free.peak_bytes
    plan = wanted_of(one.captured, "model", microbatches=4, memory=limit).best(mesh)
    assert plan.peak_bytes <= limit and (share == 1 or plan.regions or any(plan.zero.values()))
    assert plan.solver["bound"] <= plan.solver["objective"]
    one.check_plan(plan)


def test_pins_of_one_layer_hold_in_all_like_it_and_the_plan_says_so():
    model, batch = deep(gpt2, "n_layer")
    one, mesh, weight = Case(model, batch, steps=1), Mesh(1, 2, 2), "transformer.h.{}.mlp.c_fc.weight"
    free = wanted_of(one.captured, "model", microbatches=4).best(mesh)
    pin = {weight.format(7): {"tensor": "S(0)"}, "transformer.h.9.attn.c_proj": {"tensor": "R"}}  # of layers that the short program lacks
    wanted = wanted_of(one.captured, "model", microbatches=4, pin=pin)
    task = wanted.task(mesh, 4)
    assert isinstance(task.drafted(), Outline)
    plan = Plan.from_json(wanted.best(mesh).to_json())
    assert "[R, S(0)]" not in {free.params[weight.format(i)] for i in range(DEEP)}
    assert {plan.params[weight.format(i)] for i in range(DEEP)} == {"[R, S(0)]"}
    outputs = [[op for op in plan.ops if op.module == f"transformer.h.{i}.attn.c_proj"][-1].layout for i in range(DEEP)]
    assert set(outputs) == {"[R, R]"}
    assert [pin.layers for pin in plan.pins] == [DEEP, DEEP] and "in all 18 layers like it" in explain_text(plan)
    one.check_plan(plan)


def test_like_values_that_are_not_pinned_alike_are_so():
    captured, weight = capture(*deep(gpt2, "n_layer")), "transformer.h.{}.mlp.c_fc.weight"
    pin = {weight.format(0): {"tensor": "S(0)"}, weight.format(8): {"tensor": "R"}}
    plan = wanted_of(captured, "model", pin=pin).best(Mesh(1, 2))
    assert [plan.params[weight.format(i)] for i in (0, 8)] == ["[R, S(0)]", "[R, R]"]
    assert [pin.layers for pin in plan.pins] == [1, 1]
    match = r"'transformer.h.8.mlp.c_fc' .* can't be S\(0\) along tensor .*possible: .*R(.|\n)*in transformer.h.8"
    with pytest.raises(PlacementError, match=match):
        wanted_of(captured, "model", pin={"transformer.h.8.mlp.c_fc": {"tensor": "S(0)"}}).best(Mesh(1, 2))
