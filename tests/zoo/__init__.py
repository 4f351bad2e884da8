"""Models of every kind, small: what autoshard must plan and run. See ``python -m tests.zoo --help``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from . import handwritten, language, vision

ZOO: dict[str, Callable[[], tuple[nn.Module, dict]]] = {
    "gpt2": language.gpt2,
    "gpt_neox": language.gpt_neox,
    "opt": language.opt,
    "llama": language.llama,
    "qwen3": language.qwen3,
    "gemma": language.gemma,
    "phi": language.phi,
    "falcon": language.falcon,
    "mpt": language.mpt,
    "mixtral": language.mixtral,
    "mamba": language.mamba,
    "lora": language.lora,
    "bert": language.bert,
    "roberta": language.roberta,
    "deberta": language.deberta,
    "albert": language.albert,
    "distilbert": language.distilbert,
    "t5": language.t5,
    "bart": language.bart,
    "whisper": language.whisper,
    "vit": vision.vit,
    "swin": vision.swin,
    "convnext": vision.convnext,
    "resnet": vision.resnet,
    "clip": vision.clip,
    "unet": handwritten.unet,
    "dcgan": handwritten.dcgan,
    "lstm": handwritten.lstm,
    "gru": handwritten.gru,
    "graph_network": handwritten.graph_network,
    "mesh_network": handwritten.mesh_network,
    "dlrm": handwritten.dlrm,
    "mlp_mixer": handwritten.mlp_mixer,
    "dense_experts": handwritten.dense_experts,
    "two_towers": handwritten.two_towers,
    "diffusion": handwritten.diffusion,
    "nested": handwritten.nested,
    "complex_rotary": handwritten.complex_rotary,
}
"""Name -> a function that returns (model, global batch): dropout 0, seeded, a batch of 8 (of 16 for recurrent models)."""


def make(name: str) -> tuple[nn.Module, dict]:
    torch.manual_seed(0)
    return ZOO[name]()
