"""Llama for next-token prediction, from configurations alone: nothing is downloaded."""

import torch
import transformers

transformers.logging.set_verbosity_error()


def llama_8b():
    """Llama 3 8B in bfloat16 and a batch of 64 x 4096 tokens, both on the meta device: for planning."""
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, rms_norm_eps=1e-5,
    )  # fmt: skip
    return on_meta(config, 64, 4096)


def llama_70b():
    """Llama 3 70B in bfloat16 and a batch of 128 x 4096 tokens, both on the meta device: for planning."""
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, rms_norm_eps=1e-5,
    )  # fmt: skip
    return on_meta(config, 128, 4096)


def on_meta(config, batch: int, length: int):
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(batch, length, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


def tiny():
    """Four layers of width 32, four query heads over two of keys and values, tied embeddings; a batch of 8 x 16 tokens."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    ids = torch.randint(0, 99, (8, 16))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}
