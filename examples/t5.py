"""T5, an encoder and a decoder with cross attention, from a configuration alone."""

import torch
import transformers

transformers.logging.set_verbosity_error()


def tiny():
    """Two layers each of width 32, tied embeddings; a batch of 8: 16 tokens in, 12 out."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids, labels = torch.randint(1, 99, (8, 16)), torch.randint(1, 99, (8, 12))
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": labels}
