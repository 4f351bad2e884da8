"""A vision transformer for image classification, from a configuration alone."""

import torch
import transformers

transformers.logging.set_verbosity_error()


def tiny():
    """Four layers of width 32 over patches of 4 x 4; a batch of 8 images of 3 x 16 x 16, 11 classes."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4, num_labels=11,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, problem_type="single_label_classification",
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(8, 3, 16, 16), "labels": torch.randint(0, 11, (8,))}
    return transformers.ViTForImageClassification(config), batch
