"""GPT-2 for next-token prediction, from configurations alone: nothing is downloaded."""

import torch
import transformers

transformers.logging.set_verbosity_error()

PLAIN = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "loss_type": "ForCausalLM"}


def gpt2():
    """The 124M model and a batch of 32 x 1024 tokens, both on the meta device: for planning."""
    return on_meta(transformers.GPT2Config(**PLAIN), 32, 1024)


def gpt3_13b():
    """The 40 layers of the GPT-3 of 13 billion parameters (the same table) and a batch of 1024 x 2048 tokens: for planning."""
    return on_meta(transformers.GPT2Config(n_positions=2048, n_embd=5120, n_layer=40, n_head=40, **PLAIN), 1024, 2048)


def gpt3_175b():
    """The 96 layers of GPT-3 (arXiv:2005.14165, table 2.1) and a batch of 1536 x 2048 tokens, both on the meta device: for planning."""
    return on_meta(transformers.GPT2Config(n_positions=2048, n_embd=12288, n_layer=96, n_head=96, **PLAIN), 1536, 2048)


def gpt_1000():
    """1000 layers of width 1024 and a batch of 1024 x 1024 tokens, both on the meta device: for planning."""
    return on_meta(transformers.GPT2Config(n_embd=1024, n_layer=1000, n_head=16, **PLAIN), 1024, 1024)


def on_meta(config, batch: int, length: int):
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
        ids = torch.zeros(batch, length, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


def tiny():
    """Four layers of width 32 with an odd vocabulary, and a batch of 8 x 16 tokens."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=99, n_positions=32, n_embd=32, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0, **PLAIN,
    )  # fmt: skip
    ids = torch.randint(0, 99, (8, 16))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}
