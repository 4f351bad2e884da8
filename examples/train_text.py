"""Train a small GPT-2 on the bytes of a file, on one device or on a mesh: the loop is the same, and so are the losses.

python examples/train_text.py --text FILE
torchrun --nproc-per-node 8 examples/train_text.py --text FILE --mesh 2,2,2
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import autoshard


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", required=True, metavar="FILE", help="what to learn")
    parser.add_argument("--mesh", default="1,1,1", metavar="DATA,TENSOR,PIPELINE", help="default: one device")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8, help="samples of the global batch")
    parser.add_argument("--seq", type=int, default=64, help="bytes of a sample")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", metavar="FILE", help="write the loss of every step here, one a line")
    return parser.parse_args()


def make_model(args):
    """A GPT-2 over bytes, without dropout."""
    torch.manual_seed(args.seed)
    sizes = {"vocab_size": 256, "n_positions": args.seq, "n_embd": args.hidden, "n_layer": args.layers, "n_head": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def make_batch(text, step, args):
    """The global batch of a step, the same on every rank: random pieces of the text."""
    generator = torch.Generator().manual_seed(1_000_003 * args.seed + step)
    starts = torch.randint(len(text) - args.seq, (args.batch,), generator=generator).tolist()
    ids = torch.stack([text[start : start + args.seq] for start in starts])
    return {"input_ids": ids, "labels": ids}


def main():
    args = parse_arguments()
    torch.set_num_threads(max(1, os.cpu_count() // int(os.environ.get("WORLD_SIZE", 1))))
    first = int(os.environ.get("RANK", 0)) == 0
    text = torch.tensor(list(Path(args.text).read_bytes()))

    model = autoshard.compile(make_model(args), mesh=args.mesh, example_inputs=make_batch(text, 1, args))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses = []
    for step in range(1, args.steps + 1):
        loss = model(**make_batch(text, step, args)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if first:
            print(f"step {step} loss {losses[-1]:.4f}", flush=True)

    if first and args.losses:
        Path(args.losses).write_text("".join(f"{loss:.8f}\n" for loss in losses))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
