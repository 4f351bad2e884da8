"""BERT for masked language modelling, from a configuration alone."""

import torch
import transformers

transformers.logging.set_verbosity_error()


def tiny():
    """Four layers of width 32; a batch of 8 x 16 tokens with padding, and labels at one token in four."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=101, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, max_position_embeddings=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids = torch.randint(0, 101, (8, 16))
    attention_mask = torch.ones(8, 16, dtype=torch.int64)
    attention_mask[::2, 12:] = 0
    labels = torch.where(torch.rand(8, 16) < 0.25, ids, -100)
    return transformers.BertForMaskedLM(config), {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}
