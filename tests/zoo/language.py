"""Language models of transformers, from small configurations: nothing is downloaded."""

from __future__ import annotations

import torch
import transformers
from torch import nn

transformers.logging.set_verbosity_error()
VOCABULARY, LENGTH, BATCH = 99, 12, 8
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
CAUSAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length))


def next_token(config, model: type) -> tuple[nn.Module, dict]:
    """A causal language model; a few labels are ignored, more of them in the first half of the batch."""
    torch.manual_seed(0)
    ids = tokens()
    labels = ids.clone()
    labels[:3, 7:] = -100
    return model(config), {"input_ids": ids, "labels": labels}


def masked(config, model: type) -> tuple[nn.Module, dict]:
    """A masked language model: padding, and labels at one token in three."""
    torch.manual_seed(0)
    ids = tokens()
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[::2, 9:] = 0
    labels = torch.where(torch.rand(BATCH, LENGTH) < 0.34, ids, -100)
    return model(config), {"input_ids": ids, "attention_mask": mask, "labels": labels}


# --- decoders ---------------------------------------------------------------------------------------------------------


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        loss_type="ForCausalLM", **CAUSAL,
    )  # fmt: skip
    return next_token(config, transformers.GPT2LMHeadModel)


def gpt_neox():
    """Query, key and value interleaved by heads in one weight; attention and MLP in parallel."""
    config = transformers.GPTNeoXConfig(**SMALL, **CAUSAL, intermediate_size=64, rotary_pct=0.5)
    return next_token(config, transformers.GPTNeoXForCausalLM)


def opt():
    config = transformers.OPTConfig(**SMALL, **CAUSAL, ffn_dim=64, dropout=0.0, word_embed_proj_dim=32)
    return next_token(config, transformers.OPTForCausalLM)


def llama():
    """Grouped queries (4 over 2), tied embeddings."""
    config = transformers.LlamaConfig(**SMALL, **CAUSAL, intermediate_size=64, num_key_value_heads=2, tie_word_embeddings=True)
    return next_token(config, transformers.LlamaForCausalLM)


def qwen3():
    """Queries and keys are normalised by head."""
    config = transformers.Qwen3Config(**SMALL, **CAUSAL, intermediate_size=64, num_key_value_heads=2, head_dim=8)
    return next_token(config, transformers.Qwen3ForCausalLM)


def gemma():
    """One head of keys and values for all queries; embeddings scaled."""
    config = transformers.GemmaConfig(**SMALL, **CAUSAL, intermediate_size=64, num_key_value_heads=1, head_dim=8)
    return next_token(config, transformers.GemmaForCausalLM)


def phi():
    config = transformers.PhiConfig(**SMALL, **CAUSAL, intermediate_size=64, resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0)
    return next_token(config, transformers.PhiForCausalLM)


def falcon():
    """Multi-query, parallel attention and MLP."""
    config = transformers.FalconConfig(
        **SMALL, **CAUSAL, hidden_dropout=0.0, attention_dropout=0.0, ffn_hidden_size=64, multi_query=True, parallel_attn=True
    )
    return next_token(config, transformers.FalconForCausalLM)


def mpt():
    """Position biases (ALiBi) instead of embeddings."""
    config = transformers.MptConfig(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=32, expansion_ratio=2)
    return next_token(config, transformers.MptForCausalLM)


def mixtral():
    """A mixture of experts that sends tokens to their experts by index."""
    config = transformers.MixtralConfig(
        **SMALL, **CAUSAL, intermediate_size=48, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    )
    return next_token(config, transformers.MixtralForCausalLM)


def mamba():
    """A selective state space: no attention, a convolution along the sequence and a scan."""
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, intermediate_size=64, time_step_rank=4, use_cache=False,
        **CAUSAL,
    )  # fmt: skip
    return next_token(config, transformers.MambaForCausalLM)


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of rank 4."""

    def __init__(self, base: nn.Linear, rank: int = 4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) / 10)

    def forward(self, x):
        return self.base(x) + (x @ self.a.T) @ self.b.T * 2.0


def lora():
    """A Llama of which everything is frozen; queries and values get low-rank updates."""
    model, batch = llama()
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)
    return model, batch


# --- encoders ---------------------------------------------------------------------------------------------------------


def bert():
    return masked(transformers.BertConfig(**SMALL, **NO_DROPOUT, intermediate_size=64), transformers.BertForMaskedLM)


def roberta():
    config = transformers.RobertaConfig(**SMALL, **NO_DROPOUT, intermediate_size=64, **CAUSAL)
    return masked(config, transformers.RobertaForMaskedLM)


def deberta():
    """Attention to content and to relative positions, apart."""
    config = transformers.DebertaConfig(
        **SMALL, **NO_DROPOUT, intermediate_size=64, relative_attention=True, pos_att_type="c2p|p2c", type_vocab_size=0, legacy=False
    )
    return masked(config, transformers.DebertaForMaskedLM)


def albert():
    """One block, used three times."""
    config = transformers.AlbertConfig(
        **{**SMALL, "num_hidden_layers": 3}, **NO_DROPOUT, intermediate_size=64, embedding_size=16, classifier_dropout_prob=0.0
    )
    return masked(config, transformers.AlbertForMaskedLM)


def distilbert():
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=32, dropout=0.0, attention_dropout=0.0
    )
    return masked(config, transformers.DistilBertForMaskedLM)


# --- encoder and decoder ----------------------------------------------------------------------------------------------


def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {"input_ids": tokens(), "labels": tokens(9)}


def bart():
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32, dropout=0.0, **CAUSAL, decoder_start_token_id=0,
        forced_eos_token_id=None,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config), {"input_ids": tokens(), "labels": tokens(9)}


def whisper():
    """Speech to text: convolutions over time, then an encoder and a decoder."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=10, max_source_positions=12, max_target_positions=16, dropout=0.0,
        **CAUSAL, decoder_start_token_id=0,
    )  # fmt: skip
    batch = {"input_features": torch.randn(BATCH, 10, 24), "labels": tokens(9)}
    return transformers.WhisperForConditionalGeneration(config), batch
