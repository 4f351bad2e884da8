"""A few random models, that the fuzzer itself works, and the small models that it has found."""

from __future__ import annotations

from random import Random

import pytest
import torch
from fuzz.__main__ import outcomes, subject
from fuzz.draws import Draw
from fuzz.generate import generate
from fuzz.maker import Maker, SkipStep
from fuzz.shrink import shrink
from fuzz.spec import Spec, Step, Weight
from fuzz.table import OPS, call_op
from fuzz.trial import Subject, doubles

from autoshard.rules import rule_for
from autoshard.rules.notation import choices


@pytest.mark.parametrize("seed", [1, 2, 7, 11, 16, 25])
def test_random_models(seed):
    with doubles():
        found = list(outcomes(seed, 2))
        assert all(outcome.good for _, _, outcome in found), [f"{draw}: {o.kind} {o.text}\n{one.spec.source()}" for one, draw, o in found]


def test_a_seed_is_always_the_same_model():
    with doubles():
        one, again = (subject(5)[0] for _ in range(2))
        assert one.spec == again.spec and one.spec.source() == again.spec.source()
        assert all(torch.equal(p, q) for p, q in zip(one.model.parameters(), again.model.parameters()))


def test_models_are_of_many_kinds():
    text = ""
    with doubles():
        for seed in range(60):
            torch.manual_seed(seed)
            text += generate(Random(seed)).source()
    kinds = (
        "softmax",
        "cross_entropy",
        "unflatten",
        "chunk",
        "scaled_dot_product",
        "LayerNorm",
        "embedding",
        "cat",
        "Conv",
        "gather",
        "flatten",
    )
    assert all(kind in text for kind in kinds), [kind for kind in kinds if kind not in text]


def test_every_op_that_has_a_rule_is_drawn():
    never = set()
    with doubles():
        for op in OPS:
            for seed in range(4):  # of several samples, some are of use
                maker = Maker(Random(seed))
                try:
                    call_op(maker, op)
                    break
                except (SkipStep, RuntimeError):
                    continue
            else:
                never.add(str(op).split(".")[1])
    assert never <= set(UNUSABLE), sorted(never - set(UNUSABLE))


UNUSABLE = (
    "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training binary_cross_entropy_with_logits copy floor_divide "
    "heaviside instance_norm lift_fresh lift_fresh_copy multi_margin_loss prod soft_margin_loss to upsample_nearest3d upsample_trilinear3d"
).split()
"""Ops whose samples have no gradient on one device, or are too large, and what no user calls."""


def test_a_failure_is_made_small():
    """Of a model of many steps and a mesh of eight ranks, what a failure needs is left: here a softmax on a tensor axis of two."""
    spec = Spec(
        inputs=(("x0", "torch.randn(4, 6)"),),
        weights=(Weight("w0", "nn.Parameter(torch.randn(6, 6))"), Weight("w1", "nn.Parameter(torch.randn(6))")),
        steps=(
            Step(("v0",), "v0 = {0} @ {1}", ("x0", "self.w0")),
            Step(("v1",), "v1 = {0} + {1}", ("v0", "self.w1")),
            Step(("v2",), "v2 = torch.softmax({0}, -1)", ("v1",)),
            Step(("v3",), "v3 = torch.tanh({0})", ("v2",)),
            Step(("v4",), "v4 = {0} * {1}", ("v3", "v1")),
        ),
        loss="v4.square().mean() + v1.square().mean()",
        outputs=("v1",),
    )

    def fails(candidate: Spec, draw: Draw) -> bool:
        candidate.load()
        return "softmax" in candidate.source() and draw.mesh[1] >= 2

    with doubles():
        small, draw = shrink(spec, Draw((2, 2, 2), 4, {"w0": {"tensor": "R"}}, 3), fails)
    assert draw == Draw((1, 2, 1))
    assert [step.template for step in small.steps if "torch" in step.template] == ["v2 = torch.softmax({0}, -1)"]
    assert small.outputs == () and len(small.loss.split(" + ")) == 1


def test_ties_are_no_failures():
    """Which of two equal numbers is larger, rounding decides: such a model says nothing."""
    spec = Spec(
        inputs=(("x0", "torch.randn(4, 6)"),),
        weights=(Weight("w0", "nn.Parameter(torch.randn(6, 3))"),),
        steps=(Step(("v0",), "v0 = {0} @ {1}", ("x0", "self.w0")), Step(("v1",), "v1 = torch.minimum({0}, {0}.detach())", ("v0",))),
        loss="v1.square().mean()",
    )
    with doubles():
        assert max(Subject(spec, 0).unsteady.values()) > 1e-3


# --- found --------------------------------------------------------------------------------------------------------------


def found(inputs: dict[str, str], weights: dict[str, str], body: str, loss: str, outputs: tuple[str, ...] = ()) -> Spec:
    """A model whose forward is given as text; a weight "buffer ..." is one."""
    made = tuple(Weight(name, text.removeprefix("buffer "), buffer=text.startswith("buffer ")) for name, text in weights.items())
    return Spec(tuple(inputs.items()), made, (Step((), body),), loss, outputs)


CLASS_WEIGHTS = found(
    {"ids": "torch.randint(0, 7, (6, 8))", "labels": "torch.randint(-1, 7, (6, 8))"},
    {
        "table": "nn.Parameter(torch.randn(7, 8))",
        "up": "nn.Linear(8, 12)",
        "down": "nn.Linear(12, 7)",
        "classes": "buffer 0.5 + torch.rand(7)",
    },
    "h = F.embedding(ids, self.table)\nlogits = self.down(torch.relu(self.up(h)))",
    "F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1, weight=self.classes)",
)
CASES = {
    # the prologue read a buffer that its stage did not hold, or held a piece of
    "class weights on a later stage": (CLASS_WEIGHTS, Draw((1, 1, 2), 2)),
    "class weights, vocabulary cut": (CLASS_WEIGHTS, Draw((1, 2, 1), 2)),
    # results of an op with several kept the shape of the whole batch
    "max of micro-batches": (
        found(
            {"x": "torch.randn(12, 6)"},
            {"w": "nn.Parameter(torch.randn(6, 8))"},
            "h = x @ self.w\ntop, at = h.max(-1)",
            "h.square().mean()",
            ("top", "at"),
        ),
        Draw((2, 1, 2), 3),
    ),
    "recurrent micro-batches": (
        found({"x": "torch.randn(6, 3, 4)"}, {"gru": "nn.GRU(4, 4, batch_first=True)"}, "h = self.gru(x)[0]", "h.square().mean()", ("h",)),
        Draw((2, 2, 1), 3),
    ),
    # a parameter that only an output reads has no gradient; the next stage sent zeros
    "an output beside the loss": (
        found(
            {"x": "torch.randn(4, 6)"},
            {"side": "nn.Linear(6, 6)", "main": "nn.Linear(6, 8)", "end": "nn.Linear(8, 4)"},
            "aside = self.side(x)\nh = self.end(torch.tanh(self.main(x)))\nboth = aside * 2.0",
            "h.square().mean()",
            ("aside", "both"),
        ),
        Draw((1, 1, 2), 2),
    ),
    # what is wholly overwritten has a gradient of zeros, not none
    "overwritten": (
        found(
            {"x": "torch.randn(4, 6)"},
            {name: "nn.Parameter(torch.randn(6, 8))" for name in "abcd"} | {"s": "nn.Parameter(torch.randn(()))"},
            "h = torch.fill(x @ self.a, self.s)\nk = (x @ self.b).clone()\nk[:] = x @ self.c\n"
            "l = (x @ self.d)[:, :1].clone()\nl[:, 0] = k[:, 1]",
            "h.square().mean() + k.square().mean() + l.square().mean()",
        ),
        Draw((2, 2, 1), 2, {}, 5),
    ),
    # how often each dim is repeated was taken for dims
    "tile": (
        found({"x": "torch.randn(4, 6)"}, {"up": "nn.Linear(12, 4)"}, "h = self.up(torch.tile(x, (1, 2)))", "h.square().mean()", ("h",)),
        Draw((2, 2, 1)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_found(name):
    spec, draw = CASES[name]
    with doubles():
        outcome = Subject(spec, 3).run(draw)
    assert outcome.kind == "equal", f"{outcome.kind} {outcome.text}"


def test_a_vocabulary_is_cut_in_one_stretch_a_rank():
    """Its kernel knows where a rank's rows start, not that they lie in several places."""
    spec = found({"ids": "torch.randint(0, 8, (4,))"}, {"w": "nn.Parameter(torch.randn(8, 6))"}, "h = F.embedding(ids, self.w)", "h.sum()")
    with doubles():
        program = Subject(spec, 0).captured.program
    rule = rule_for(next(node for node in program.ops if "embedding" in str(node.target)))
    assert {choice.blocks for choice in choices(rule, 2, {"v": (1, 2, 4), "e": (1, 3)}) if choice.factor == "v"} == {1}
