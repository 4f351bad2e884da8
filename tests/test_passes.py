"""Each pass on a toy graph, as text: before and after."""
# ruff: noqa: E501

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoshard import passes
from autoshard.capture import capture
from autoshard.cluster import Cluster
from autoshard.errors import PlanError
from autoshard.mesh import Mesh
from autoshard.passes.cut_stages import pure_nodes
from autoshard.passes.levels import show
from autoshard.passes.loss_alone import loss_alone
from autoshard.placement import R, S
from autoshard.planning.planner import apply, decide


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, labels):
        y = self.down(torch.relu(self.up(x)))
        return F.cross_entropy(y, labels), y


def canonical(model, batch):
    return passes.run("canonicalize", capture(model, batch).program)


@pytest.fixture(scope="module")
def toy():
    return canonical(Toy(), {"x": torch.randn(8, 8), "labels": torch.randint(0, 8, (8,))})


def planned(program, mesh, m=1, **pins):
    cut = passes.run("microbatch", program, m)
    cut.program.mesh = Mesh.of(mesh)
    decision = decide(cut.program, cut.program.mesh, Cluster.of("a100-dgx"), pure_nodes, pins=pins)
    return apply(cut.program, decision)


def check(program, text):
    assert show(program).strip() == text.strip()


def test_canonical_turns_a_mean_loss_into_sum_and_count(toy):
    check(
        toy,
        """
up_weight = placeholder  # float32[16, 8]
up_bias = placeholder  # float32[16]
down_weight = placeholder  # float32[8, 16]
down_bias = placeholder  # float32[8]
x = placeholder  # float32[8, 8]
labels = placeholder  # int64[8]
linear = aten.linear.default(x, up_weight, up_bias)  # float32[8, 16]
relu = aten.relu.default(linear)  # float32[8, 16]
linear_1 = aten.linear.default(relu, down_weight, down_bias)  # float32[8, 8]
cross_entropy_loss = aten.cross_entropy_loss.default(linear_1, labels, None, 2, -100, 0.0)  # float32[]
ne = aten.ne.Scalar(labels, -100)  # bool[8]
sum_1 = aten.sum.default(ne)  # int64[]
to = aten.to.dtype(sum_1, torch.float32)  # float32[]
div = aten.div.Tensor(cross_entropy_loss, to)  # float32[]
return [div, linear_1]
""",
    )


def test_the_loss_may_be_all_that_is_returned():
    program = capture(Toy(), {"x": torch.randn(8, 8), "labels": torch.randint(0, 8, (8,))}).program
    alone = loss_alone(program)
    assert len(program.results) == 2 and [leaf.name for leaf in alone.results] == [program.results[program.loss].name]
    assert len(alone.leaves) == len(program.leaves) - 1 and alone.loss == 0
    assert len(passes.run("canonicalize", alone).results) == 1


def test_microbatch_computes_the_count_before(toy):
    cut = passes.run("microbatch", toy, 4)
    assert [str(e) for e in cut.extras] == ["Extra(name='to_of_batch', src=P, dst=R)"]
    check(
        cut.program,
        """
up_weight = placeholder  # float32[16, 8]
up_bias = placeholder  # float32[16]
down_weight = placeholder  # float32[8, 16]
down_bias = placeholder  # float32[8]
x = placeholder  # float32[2, 8]
labels = placeholder  # int64[2]
to_of_batch = placeholder  # float32[]
linear = aten.linear.default(x, up_weight, up_bias)  # float32[2, 16]
relu = aten.relu.default(linear)  # float32[2, 16]
linear_1 = aten.linear.default(relu, down_weight, down_bias)  # float32[2, 8]
cross_entropy_loss = aten.cross_entropy_loss.default(linear_1, labels, None, 2, -100, 0.0)  # float32[]
div = aten.div.Tensor(cross_entropy_loss, to_of_batch)  # float32[]
return [div, linear_1]
""",
    )
    check(
        cut.prologue,
        """
up_weight = placeholder  # float32[16, 8]
up_bias = placeholder  # float32[16]
down_weight = placeholder  # float32[8, 16]
down_bias = placeholder  # float32[8]
x = placeholder  # float32[2, 8]
labels = placeholder  # int64[2]
ne = aten.ne.Scalar(labels, -100)  # bool[2]
sum_1 = aten.sum.default(ne)  # int64[]
to = aten.to.dtype(sum_1, torch.float32)  # float32[]
return [to]
""",
    )


MEGATRON = {"up.weight": {"tensor": "S(0)"}, "down.weight": {"tensor": "S(1)"}}


def test_conversions_of_a_megatron_pair(toy):
    program = passes.run("insert_conversions", planned(toy, (1, 2), **MEGATRON))
    check(
        program,
        """
up_weight = placeholder  # float32[16, 8]; [R, S(0)]
up_bias = placeholder  # float32[16]; [R, S(0)]
down_weight = placeholder  # float32[8, 16]; [R, S(1)]
down_bias = placeholder  # float32[8]; [R, R]
x = placeholder  # float32[8, 8]; [R, R]
labels = placeholder  # int64[8]; [R, R]
linear = aten.linear.default(x, up_weight, up_bias)  # float32[8, 16]; [R, S(1)]; replicate | shard n
relu = aten.relu.default(linear)  # float32[8, 16]; [R, S(1)]; replicate | shard d1
down_bias_p = convert(down_bias, 'R -> P', 'tensor', 0)  # float32[8]; [R, P]
linear_1 = aten.linear.default(relu, down_weight, down_bias_p)  # float32[8, 8]; [R, P]; replicate | shard k
linear_1_r = convert(linear_1, 'P -> R', 'tensor', 0)  # float32[8, 8]; [R, R]
cross_entropy_loss = aten.cross_entropy_loss.default(linear_1_r, labels, None, 2, -100, 0.0)  # float32[]; [R, R]; replicate | replicate
ne = aten.ne.Scalar(labels, -100)  # bool[8]; [R, R]; replicate | replicate
sum_1 = aten.sum.default(ne)  # int64[]; [R, R]; replicate | replicate
to = aten.to.dtype(sum_1, torch.float32)  # float32[]; [R, R]; replicate | replicate
div = aten.div.Tensor(cross_entropy_loss, to)  # float32[]; [R, R]; replicate | replicate
return [div, linear_1]
""",
    )


def test_stages_relay_what_is_needed_and_compute_again_what_is_not_sent(toy):
    converted = passes.run("insert_conversions", planned(toy, (1, 2, 2), 4, **MEGATRON))
    first, second = passes.run("cut_stages", converted, 2)
    assert (first.receives, first.sends, second.receives, second.sends) == ((), ("relu",), ("relu",), ())
    check(
        passes.run("localize", second.program, (0, 1)),
        """
relu = placeholder  # float32[2, 8]; [R, S(1)]; stage 0
down_weight = placeholder  # float32[8, 8]; [R, S(1)]
down_bias = placeholder  # float32[8]; [R, R]
labels = placeholder  # int64[2]; [R, R]
to_of_batch = placeholder  # float32[]; [R, R]
down_bias_p = convert(down_bias, 'R -> P', 'tensor', None)  # float32[8]; [R, P]; stage 1
linear_1 = aten.linear.default(relu, down_weight, down_bias_p)  # float32[2, 8]; [R, P]; replicate | shard k; stage 1
linear_1_r = convert(linear_1, 'P -> R', 'tensor', None)  # float32[2, 8]; [R, R]; stage 1
cross_entropy_loss = aten.cross_entropy_loss.default(linear_1_r, labels, None, 2, -100, 0.0)  # float32[]; [R, R]; replicate | replicate; stage 1
div = aten.div.Tensor(cross_entropy_loss, to_of_batch)  # float32[]; [R, R]; replicate | replicate; stage 1
return [div, linear_1]
""",
    )


def test_passes_leave_their_input_alone(toy):
    before = show(toy)
    converted = passes.run("insert_conversions", planned(toy, (2, 2, 2), 2))
    text = show(converted)
    for stage in passes.run("cut_stages", converted, 2):
        passes.run("localize", stage.program, (0, 0))
    assert show(toy) == before and show(converted) == text


class Skip(nn.Module):
    """The embedding is added again at the end: a residual over all stages."""

    def __init__(self, depth=4):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

    def forward(self, ids, labels):
        first = h = self.embed(ids)
        mask = (ids > 0).unsqueeze(-1)
        for layer in self.layers:
            h = torch.relu(layer(h)) * mask
        return F.cross_entropy((h + first).mean(1), labels)


def test_a_skip_connection_is_relayed_and_a_mask_is_not():
    program = canonical(Skip(), {"ids": torch.randint(0, 12, (8, 3)), "labels": torch.randint(0, 8, (8,))})
    stages = passes.run("cut_stages", passes.run("insert_conversions", planned(program, (1, 1, 3), 2)), 3)
    assert all("embedding" in stage.sends for stage in stages[:-1])
    assert all("embedding" in stage.receives for stage in stages[1:])
    masked = [stage for stage in stages if any(n.name == "gt" for n in stage.program.graph.nodes)]
    assert len(masked) > 1 and not any("gt" in s or "unsqueeze" in s for stage in stages for s in stage.sends)


class Mixes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        return (y @ y.t()).softmax(-1).diagonal().sum()


def test_samples_that_meet_forbid_microbatches():
    program = canonical(Mixes(), {"x": torch.randn(8, 8)})
    with pytest.raises(PlanError, match=r"can't be cut into 2 micro-batches: aten\.\w+\.\w+ mixes the samples") as caught:
        passes.run("microbatch", program, 2)
    assert "test_passes.py" in str(caught.value) and "y @ y.t()" in str(caught.value)
    assert passes.run("microbatch", program, 1).prologue is None


def test_a_batch_that_does_not_divide_is_refused(toy):
    with pytest.raises(PlanError, match="input 'x' has a batch of 8, which 3 micro-batches do not divide"):
        passes.run("microbatch", toy, 3)


def test_the_batch_dim_is_followed(toy):
    marks = {n.name: n.meta["batch"] for n in passes.run("microbatch", toy, 1).program.graph.nodes if n.op != "output"}
    assert marks["linear"] == S(0) and marks["up_weight"] == R and marks["cross_entropy_loss"] == R


def test_a_wrong_local_shape_is_found(toy):
    from autoshard.rules.notation import Strategy

    program = planned(toy, (1, 2), **MEGATRON)
    node = next(n for n in program.ops if n.name == "relu")
    strategy = node.meta["strategy"]
    wrong = ((R, S(0)),)
    node.meta.update(strategy=Strategy(strategy.choices, strategy.operands, wrong), layouts=wrong)
    with pytest.raises(PlanError, match="gives pieces of shape"):
        passes.run("localize", passes.run("cut_stages", passes.run("insert_conversions", program), 1)[0].program, (0, 0))


def test_dump_writes_every_level(toy, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOSHARD_DUMP", str(tmp_path))
    passes.run("cut_stages", passes.run("insert_conversions", planned(toy, (1, 1, 2), 2)), 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "1_microbatch.py",
        "1_microbatch_prologue.py",
        "3_insert_conversions.py",
        "6_cut_stages_stage0.py",
        "6_cut_stages_stage1.py",
    ]


def test_logs_follow_the_grammar_of_torch_logs():
    import logging

    from autoshard.errors import AutoshardError
    from autoshard.logs import levels

    assert levels("") == {} and levels("+passes, plan") == {"passes": logging.DEBUG, "plan": logging.INFO}
    assert levels("all,-plan") == {"passes": logging.INFO, "plan": logging.ERROR}
    with pytest.raises(AutoshardError, match="AUTOSHARD_LOGS names 'pass'"):
        levels("pass")
