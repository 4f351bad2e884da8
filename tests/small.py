"""Small models, and one way to train them on a mesh of ranks in lockstep under any ZeRO level, with or without recomputation."""

import functools

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from autoshard import passes
from autoshard.capture import capture
from autoshard.checking.local import run_ranks
from autoshard.checking.lockstep import Lockstep
from autoshard.cluster import Cluster
from autoshard.compiler import Prepared, convert, plan_for
from autoshard.mesh import Mesh
from autoshard.planning.planner import restore
from autoshard.planning.saving import Saving
from autoshard.predict import predict
from autoshard.runtime.world import open_world
from autoshard.schedule import SCHEDULES
from autoshard.verifier import Reference


def gpt2(dropout=0.0):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=99, n_positions=16, n_embd=32, n_layer=2, n_head=4, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout
    )
    ids = torch.randint(0, 99, (8, 16))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    ids = torch.randint(0, 99, (8, 16))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


class Odd(nn.Module):
    """Sizes that nothing divides, a scalar, a weight of one element, a frozen layer, a weight that is read twice; no layer repeats."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(7, 13)
        self.frozen = nn.Linear(13, 11).requires_grad_(False)
        self.twice = nn.Parameter(torch.randn(11, 11) / 4)
        self.down = nn.Linear(11, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.25]))

    def forward(self, x, target):
        h = torch.tanh(self.frozen(torch.tanh(self.up(x))))
        h = torch.tanh(h @ self.twice) @ self.twice.t()
        y = self.down(h) * self.scale + self.shift
        return ((y - target) ** 2).mean(), y


def odd():
    torch.manual_seed(0)
    return Odd().double(), {"x": torch.randn(12, 7).double(), "target": torch.randn(12, 5).double()}


class Widths(nn.Module):
    """Linear layers of which none is like another."""

    def __init__(self, widths=(16, 64, 24, 96, 32, 80, 20, 7)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return self.layers[-1](x)


class Towers(nn.Module):
    """Two encoders of unlike widths and depths, whose outputs are compared, every sample with every other."""

    def __init__(self):
        super().__init__()
        self.query, self.document = Widths(), Widths((12, 40, 7))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, query, document):
        q, d = F.normalize(self.query(query), dim=-1), F.normalize(self.document(document), dim=-1)
        scores = q @ d.T * self.temperature.exp()
        right = torch.arange(len(query))
        return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2


class UNet(nn.Module):
    """Levels of unlike widths, down and up; each is read again on the way up."""

    def __init__(self, widths=(8, 12, 20)):
        super().__init__()
        pairs = list(zip(widths, widths[1:]))
        self.enter = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairs)
        self.norm = nn.ModuleList(nn.GroupNorm(4, b) for _, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(nn.Conv2d(2 * a, a, 3, padding=1) for a, _ in reversed(pairs))
        self.leave = nn.Conv2d(widths[0], 5, 1)

    def forward(self, image, mask):
        x, skips = F.silu(self.enter(image)), []
        for down, norm in zip(self.down, self.norm):
            skips.append(x)
            x = F.silu(norm(down(x)))
        for up, join in zip(self.up, self.join):
            x = F.silu(join(torch.cat([up(x), skips.pop()], 1)))
        return F.cross_entropy(self.leave(x), mask)


class Trained(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x, labels):
        return F.cross_entropy(self.model(x), labels)


def widths():
    torch.manual_seed(0)
    return Trained(Widths()).double(), {"x": torch.randn(64, 16).double(), "labels": torch.randint(0, 7, (64,))}


def towers():
    torch.manual_seed(0)
    return Towers().double(), {"query": torch.randn(64, 16).double(), "document": torch.randn(64, 12).double()}


def unet():
    torch.manual_seed(0)
    return UNet().double(), {"image": torch.randn(8, 3, 16, 16).double(), "mask": torch.randint(0, 5, (8, 16, 16))}


MODELS = {"gpt2": gpt2, "llama": llama, "odd": odd, "widths": widths, "towers": towers, "unet": unet}


class Case:
    """A model on one device, and whatever one wants to compare with it. Traced once."""

    def __init__(self, model: nn.Module, batch: dict, steps: int = 2):
        self.model, self.batch = model, batch
        self.captured = capture(model, batch)
        self.program = passes.run("canonicalize", self.captured.program)
        self.steps = steps

    @functools.cached_property
    def reference(self) -> Reference:
        return Reference(self.model, self.batch, steps=self.steps, backend="local")

    def plan(self, mesh, zero=0, recompute="off", microbatches=None, schedule=None, offload=False):
        mesh = Mesh.of(mesh)
        self.program.mesh = mesh
        m = microbatches or (4 if mesh.pipeline > 1 else 1)
        saving, placed = Saving.of(zero, recompute, "optimizer" if offload else "off"), schedule and SCHEDULES[schedule]
        cluster = Cluster.of("a100-dgx")
        common = {"saving": saving, "schedule": placed}
        return plan_for(self.captured, self.program, "model", mesh, cluster, cluster.device.memory, m, {}, **common)

    def priced(self, plan):
        """The plan, predicted anew after something of it was changed."""
        self.program.mesh = plan.mesh
        cut = passes.run("microbatch", self.program, plan.microbatches)
        decision = restore(cut.program, plan.mesh, plan.strategies, plan.stages)
        decision.zero, decision.regions, decision.kept = plan.zero, plan.regions, plan.kept
        return predict(plan, convert(cut.program, decision), Cluster.of(plan.cluster))

    def prepared(self, plan) -> Prepared:
        return Prepared.of(self.captured, plan, plan.mesh, self.batch)

    def check(self, mesh, *args, **options):
        """Train on the mesh as on one device; returns the plan."""
        return self.check_plan(self.plan(mesh, *args, **options))

    def check_plan(self, plan):
        ready = self.prepared(plan)
        report = self.reference.verify(plan.mesh, build=lambda model, batch: ready.sharded(model, open_world(plan.mesh)))
        assert report.equal, report.text()
        return plan

    def on_ranks(self, plan, work):
        """What ``work(sharded)`` gives on every rank."""
        ready, lockstep = self.prepared(plan), Lockstep(plan.mesh.size)
        results = run_ranks(lockstep, plan.mesh, lambda world: work(ready.sharded(self.model, world)), 60)
        assert results is not None, lockstep.mismatch
        return results


@functools.cache
def case(name: str) -> Case:
    return Case(*MODELS[name]())
