"""What autoshard costs over the same parallelism written by hand: one training step each, in turn, in the same processes.

    mesh     baseline
    1,1,1    the eager model
    2,1,1    DistributedDataParallel
    1,2,1    parallelize_module, by columns and by rows, with a vocabulary-parallel loss
    1,1,2    two hand-cut stages under torch.distributed.pipelining, 1F1B with 4 micro-batches

Each is a GPT-2 of 4 layers, width 256, vocabulary 1024, on 16 x 128 tokens, one thread a process. The first two run transformers' GPT-2;
its Conv1D can't be parallelised by torch, and its tied embedding not cut by hand, so the other two run the same
blocks made of nn.Linear, with a head of its own. A step is forward, backward, AdamW. Printed are medians of interleaved runs (A B A B ...).

    python tests/benchmarks/overhead.py [--rounds 10] [--mesh 2,1,1]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

import autoshard
from autoshard.checking.processes import Process, Status, wait_for
from autoshard.mesh import Mesh

LAYERS, WIDTH, HEADS, VOCAB, BATCH, LENGTH, MICROBATCHES = 4, 256, 4, 1024, 16, 128, 4
Step = Callable[[], object]


class Block(nn.Module):
    """A GPT-2 block of nn.Linear. The number of heads follows from the width that the projections give, so that it can be cut."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.ln_1(x)
        q, k, v = (p(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class First(nn.Module):
    """Embeddings, and the first blocks."""

    def __init__(self, layers: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))

    def forward(self, ids):
        return self.blocks(self.tokens(ids) + self.positions(torch.arange(LENGTH, device=ids.device)))


class Last(nn.Module):
    """The last blocks, and the head."""

    def __init__(self, layers: int):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x):
        return self.head(self.norm(self.blocks(x)))


class GPT(nn.Module):
    """The whole model, and its loss."""

    def __init__(self):
        super().__init__()
        self.first, self.last = First(LAYERS // 2), Last(LAYERS // 2)

    def forward(self, ids, labels):
        return cross_entropy(self.last(self.first(ids)), labels)


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM", use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def make_blocks() -> nn.Module:
    torch.manual_seed(0)
    return GPT()


def training(model: nn.Module, batch: dict, loss_of: Callable = lambda output: output) -> Step:
    """A step of the usual loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        loss = loss_of(model(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def eager(batch: dict) -> Step:
    return training(make_gpt2(), batch, lambda output: output.loss)


def data_parallel(batch: dict) -> Step:
    mine = {name: x.chunk(dist.get_world_size())[dist.get_rank()] for name, x in batch.items()}
    return training(nn.parallel.DistributedDataParallel(make_gpt2()), mine, lambda output: output.loss)


def tensor_parallel(batch: dict) -> Step:
    model = make_blocks()
    plan = {
        "first.tokens": RowwiseParallel(input_layouts=Replicate()),
        "last.head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for part in ("first", "last"):
        plan |= {f"{part}.blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan |= {f"{part}.blocks.*.{name}": RowwiseParallel() for name in ("o", "down")}
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    step = training(model, batch)

    def with_parallel_loss():
        with loss_parallel():
            return step()

    return with_parallel_loss


def pipeline(batch: dict) -> Step:
    model, rank = make_blocks(), dist.get_rank()
    part = (model.first, model.last)[rank]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)

    def step():
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch["ids"])
        else:
            schedule.step(target=batch["labels"], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses) / MICROBATCHES if losses else None

    return step


PAIRS = {
    "1,1,1": ("eager", eager, make_gpt2, {}),
    "2,1,1": ("DistributedDataParallel", data_parallel, make_gpt2, {"microbatches": 1}),
    "1,2,1": ("parallelize_module", tensor_parallel, make_blocks, {"microbatches": 1}),
    "1,1,2": ("pipelining, 1F1B", pipeline, make_blocks, {"microbatches": MICROBATCHES}),
}


def measure(mesh: str, rounds: int, store: str, rank: int, status: Status) -> tuple[list[float], list[float], list]:
    """Seconds of each round of autoshard and of the baseline, and the last loss of both; on one rank of the mesh."""
    _, baseline, make, options = PAIRS[mesh]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=Mesh.of(mesh).size)
    torch.manual_seed(1)
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH))
    batch = {"ids" if make is make_blocks else "input_ids": ids, "labels": ids}
    model = autoshard.compile(make(), mesh, batch, **options)
    steps = (training(model, batch, lambda output: output if make is make_blocks else output.loss), baseline(batch))
    seconds: tuple[list[float], list[float]] = ([], [])
    losses = [None, None]
    for turn in range(rounds + 2):  # the first two warm up
        for i, step in enumerate(steps):
            status(f"round {turn} of {'autoshard' if i == 0 else 'the baseline'}")
            dist.barrier()
            start = time.perf_counter()
            losses[i] = step()
            dist.barrier()
            if turn >= 2:
                seconds[i].append(time.perf_counter() - start)
    return *seconds, [None if loss is None else float(loss) for loss in losses]


def compare(mesh: str, rounds: int) -> str:
    """A line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        work = partial(measure, mesh, rounds, f"{folder}/store")
        processes = [Process(f"rank {rank}", partial(work, rank), Path(folder)) for rank in range(Mesh.of(mesh).size)]
        wait_for(processes, timeout=600)
        results = [process.result for process in processes]
    ours, theirs, _ = results[0]
    losses = [statistics.mean(r[2][i] for r in results if r[2][i] is not None) for i in (0, 1)]
    a, b = statistics.median(ours), statistics.median(theirs)
    return f"{mesh:8}{PAIRS[mesh][0]:26}{a * 1e3:9.0f} ms{b * 1e3:9.0f} ms{a / b:8.2f}   {losses[0]:.5f} {losses[1]:.5f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mesh", choices=PAIRS, action="append", help="only this pair (repeatable)")
    args = parser.parse_args()
    print(f"{'mesh':8}{'baseline':26}{'autoshard':>12}{'baseline':>12}{'ratio':>8}   last losses")
    for mesh in args.mesh or PAIRS:
        print(compare(mesh, args.rounds), flush=True)


if __name__ == "__main__":
    main()
