"""GPT-2 for next-token prediction, from configurations alone: nothing is downloaded."""

import torch
import transformers

transformers.logging.set_verbosity_error()


def gpt2():
    """The 124M model and a batch of 32 x 1024 tokens, both on the meta device: for planning."""
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
        ids = torch.zeros(32, 1024, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


def tiny():
    """Four layers of width 32 with an odd vocabulary, and a batch of 8 x 16 tokens."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=99, n_positions=32, n_embd=32, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    ids = torch.randint(0, 99, (8, 16))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}
