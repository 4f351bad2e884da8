"""How long planning takes by the number of layers: GPT-3's layers of width 12288 on 128 A100s, with memory for as large a share of them.

    python tests/benchmarks/planning_depth.py

Processor seconds of one thread; planning is all that comes after tracing, up to the finished plan.
"""

from __future__ import annotations

import time

from transformers import GPT2Config

from autoshard.capture import capture
from autoshard.mesh import Mesh
from autoshard.searching import search
from examples.gpt2 import PLAIN, on_meta

LAYERS = (12, 24, 48, 96)
MEMORY = 74.5  # GiB for 96 layers, of which the embeddings and the loss take about
ENDS = 14.0


def main() -> None:
    print(f"{'layers':>6} {'GiB':>6} {'trace':>8} {'plan':>8} {'solver':>8} {'gap':>8}   step")
    for layers in LAYERS:
        model, inputs = on_meta(GPT2Config(n_positions=2048, n_embd=12288, n_layer=layers, n_head=96, **PLAIN), 1536, 2048)
        memory = ENDS + (MEMORY - ENDS) * layers / max(LAYERS)
        start = time.process_time()
        captured = capture(model, inputs, precision="bf16")
        traced = time.process_time()
        plan = search(captured, "GPT-3", Mesh(4, 8, 4), memory=memory * 2**30)
        planned = time.process_time()
        solver = plan.solver
        print(
            f"{layers:>6} {memory:>6.1f} {traced - start:>6.1f} s {planned - traced:>6.1f} s {solver['seconds']:>6.1f} s "
            f"{solver['gap']:>7.2%}   {plan.step_seconds:.4g} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
