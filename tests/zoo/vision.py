"""Vision models of transformers, and those that see and read, from small configurations."""

from __future__ import annotations

import torch
import transformers
from torch import nn

transformers.logging.set_verbosity_error()
BATCH, CLASSES = 8, 11


def classify(config, model: type, size: int = 16) -> tuple[nn.Module, dict]:
    """Images of 3 x size x size into 11 classes."""
    torch.manual_seed(0)
    return model(config), {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, CLASSES, (BATCH,))}


def labels() -> dict:
    return {"num_labels": CLASSES, "problem_type": "single_label_classification"}


def vit():
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **labels(),
    )  # fmt: skip
    return classify(config, transformers.ViTForImageClassification)


def swin():
    """Attention inside windows, which are shifted every other layer; patches are merged between stages."""
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=4, drop_path_rate=0.0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **labels(),
    )  # fmt: skip
    return classify(config, transformers.SwinForImageClassification)


def convnext():
    """Depthwise convolutions, normalised over channels."""
    config = transformers.ConvNextConfig(
        num_stages=2, hidden_sizes=[16, 32], depths=[1, 2], patch_size=4, image_size=32, drop_path_rate=0.0, **labels()
    )
    return classify(config, transformers.ConvNextForImageClassification, 32)


def resnet():
    """Batch norm, in training: statistics of the whole batch, and running ones."""
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], layer_type="basic", **labels())
    return classify(config, transformers.ResNetForImageClassification, 32)


def clip():
    """Images against captions: the loss compares every sample with every other one."""
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": 16}
    config = transformers.CLIPConfig(
        text_config={**small, "vocab_size": 99, "max_position_embeddings": 16, "eos_token_id": 98, "bos_token_id": 0, "pad_token_id": 1},
        vision_config={**small, "image_size": 16, "patch_size": 4},
        projection_dim=16,
    )
    ids = torch.randint(2, 98, (BATCH, 9))
    ids[:, -1] = 98
    batch = {"input_ids": ids, "pixel_values": torch.randn(BATCH, 3, 16, 16), "return_loss": True}
    return transformers.CLIPModel(config), batch
