"""The models that are measured: small enough for a CPU, large enough that their tensors are what counts."""

from __future__ import annotations

import torch
import transformers
from torch import nn

transformers.logging.set_verbosity_error()


def gpt2(layers: int = 4, width: int = 256, batch: int = 16, length: int = 128, vocabulary: int = 2000) -> tuple[nn.Module, dict]:
    """GPT-2, and a batch of token numbers that are its own labels."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_positions=length, n_embd=width, n_layer=layers, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    ids = torch.randint(0, vocabulary, (batch, length))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def llama(layers: int = 4, width: int = 256, batch: int = 16, length: int = 128, vocabulary: int = 2000) -> tuple[nn.Module, dict]:
    """Llama with grouped heads and untied embeddings, and a batch likewise."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=length,
    )  # fmt: skip
    ids = torch.randint(0, vocabulary, (batch, length))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


MODELS = {"gpt2": gpt2, "llama": llama}
