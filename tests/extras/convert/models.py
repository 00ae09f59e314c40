"""Tiny models of transformers with random weights, saved as Hugging Face folders."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LENGTH = 24
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "vocab_size": 61,
}
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": LENGTH, "vocab_size": 61}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **parameters}}


@dataclass(frozen=True)
class Case:
    """A model of transformers.

    model_type: name in transformers. settings: options that differ from SIZES. shard: size of the largest weight
    file.
    """

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    shard: str = "1GB"


# The original context is 16 of 24 positions and the base is small, so that each scaling changes frequencies that matter
# at these positions.
LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=2.5, original_max_position_embeddings=16)
CASES: dict[str, Case] = {
    "llama": Case("llama", rope("default") | {"head_dim": 12}),
    "llama3_tied_odd_vocabulary_sharded": Case(
        "llama", LLAMA3 | {"tie_word_embeddings": True, "vocab_size": 67}, "20KB"
    ),
    "llama_linear_biases_multi_head": Case(
        "llama", rope("linear", factor=3.0) | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}
    ),
    "llama_yarn": Case(
        "llama", rope("yarn", factor=4.0, beta_fast=2.0, beta_slow=0.25, original_max_position_embeddings=16)
    ),
    "llama_yarn_mscale": Case(
        "llama",
        rope(
            "yarn",
            factor=8.0,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=0.7,
            mscale_all_dim=0.3,
            original_max_position_embeddings=16,
        ),
    ),
    "mistral_window": Case("mistral", {"sliding_window": 5, "num_key_value_heads": 1}),
    "mistral_without_window": Case("mistral", {"sliding_window": None}),
    "qwen2_tied": Case("qwen2", {"tie_word_embeddings": True}, "30KB"),
    "qwen2_window_in_all_layers": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
    ),
    "qwen3": Case("qwen3", {"head_dim": 12}),
    "gpt2": Case("gpt2", GPT2),
    "gpt2_untied_relu_narrow": Case(
        "gpt2", GPT2 | {"tie_word_embeddings": False, "activation_function": "relu", "n_inner": 40}, "25KB"
    ),
}


@torch.no_grad()
def make(case: Case, seed: int = 3) -> Any:
    """Build a model with every parameter random.

    Norms are around 1, biases are not 0, and matrices are large enough to make softmax outputs uneven.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {} if case.model_type == "gpt2" else SIZES
    config = AutoConfig.for_model(case.model_type, **sizes | case.settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        is_norm = parameter.ndim == 1 and name.endswith("weight")
        parameter.normal_(1.0 if is_norm else 0.0, 0.15, generator=generator)
    return model


def save(model: Any, folder: Path, shard: str = "1GB") -> Path:
    """Save the model as a user's folder would be, in files of at most `shard`."""
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder, max_shard_size=shard)
    return folder


@torch.no_grad()
def logits(model: Any, tokens: Tensor) -> Tensor:
    found: Tensor = model(tokens, use_cache=False).logits
    return found


def draw_tokens(vocab_size: int, seed: int = 5) -> Tensor:
    return torch.randint(vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
