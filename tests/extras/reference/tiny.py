"""A tiny reference model and batch: one call, every field changeable."""

from typing import Any

import torch
from torch import Tensor

from megapipe.extras.reference.config import ReferenceConfig
from megapipe.extras.reference.gpt import ReferenceGPT

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 6,
    "seq_length": 8,
    "max_position_embeddings": 8,
    "vocab_size": 21,
    "padded_vocab_size": 24,
}

# all switches that add an operation, at once
EVERYTHING: dict[str, Any] = {
    "position_embedding_type": "rope",
    "rotary_percent": 0.7,
    "rope_scaling_type": "yarn",
    "rope_original_max_position_embeddings": 4,
    "normalization": "LayerNorm",
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "activation": "swiglu",
    "untie_embeddings_and_output_weights": True,
    "window_size": 3,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
    "hidden_dropout": 0.25,
    "attention_dropout": 0.25,
    "label_smoothing": 0.1,
    "z_loss": 1e-2,
}


def build(dtype: torch.dtype = torch.float64, seed: int = 1, **changed: Any) -> ReferenceGPT:
    model = ReferenceGPT(ReferenceConfig(**SIZES | changed)).to(dtype)
    draw_weights(model, seed, std=0.4)
    return model


@torch.no_grad()
def draw_weights(model: ReferenceGPT, seed: int, std: float = 0.15) -> None:
    """Draw every parameter, norms and biases too: with their usual 1 and 0 an omission would not show."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        norm_scale = "layernorm.weight" in name and not model.config.layernorm_zero_centered_gamma
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std
        parameter.copy_(noise + 1.0 if norm_scale else noise)


def batch(seed: int = 2, rows: int = 2) -> dict[str, Any]:
    """Build tokens, labels and a loss mask that excludes some tokens, a different number in each batch."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(SIZES["vocab_size"], (rows, SIZES["seq_length"] + 1), generator=generator)
    kept = torch.rand(rows, SIZES["seq_length"], generator=generator) < 0.7
    kept[0, 0] = True
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": kept.long()}


def dropout_masks(layer: int, site: str, shape: tuple[int, ...]) -> Tensor:
    """Keep 3 of 4 elements by a fixed pattern for each site, drawn in fp64 for every dtype of the model."""
    generator = torch.Generator().manual_seed(1000 * (layer + 1) + len(site))
    return (torch.rand(shape, generator=generator, dtype=torch.float64) < 0.75) / torch.tensor(
        0.75, dtype=torch.float64
    )
