"""Tiny models of transformers with random weights, saved as Hugging Face folders."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tables import rows

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
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}  # other kernels of experts refuse fp64
WITHOUT_AUTOMATIC_CLASS = {"mistral4": "Mistral4ForCausalLM"}  # AutoModelForCausalLM does not know it
ROPE = {"rope_type": "default", "rope_theta": 500.0}
# The original context is below the 24 positions and the base is small, so that each scaling changes frequencies that
# matter at these positions.
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale_all_dim": 0.9, "beta_fast": 2.0}
YARN |= {"beta_slow": 0.25}
# settings that several models share, by the names that models.tsv has for them
SETS: dict[str, dict[str, Any]] = {
    "ROPE": {"rope_parameters": ROPE},
    "LLAMA3": {
        "rope_parameters": ROPE
        | {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16}
        | {"low_freq_factor": 1.0, "high_freq_factor": 2.5}
    },
    "YARN_MSCALE": {"rope_parameters": YARN | {"mscale": 0.7, "original_max_position_embeddings": 16}},
    "MISTRAL4_ROPE": {
        "rope_parameters": YARN
        | {"mscale": 1.0, "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.3}
        | {"max_position_embeddings": LENGTH}
    },
    "GPT2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": LENGTH, "vocab_size": 61},
    "EXPERTS": {"num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "GROUPS": {"n_group": 4, "topk_group": 2},
    "GRANITE": {
        "embedding_multiplier": 12.0,
        "logits_scaling": 6.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.3,
    },
    "DEEPSEEK": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 12,
        "n_shared_experts": 2,
    },
}


@dataclass(frozen=True)
class Case:
    """A model of transformers.

    model_type: name in transformers. settings: options that differ from SIZES. shard: size of the largest weight
    file.
    """

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    shard: str = "1GB"


def _cases() -> dict[str, Case]:
    """Return the models of models.tsv by name."""
    sets = {name: json.dumps(settings)[1:-1] for name, settings in SETS.items()}  # the last value of a key counts
    table = rows(Path(__file__).with_name("models.tsv"), sets)
    return {name: Case(kind, json.loads(f"{{{settings}}}"), shard) for name, kind, shard, settings in table}


CASES = _cases()


@torch.no_grad()
def make(case: Case, seed: int = 3) -> Any:
    """Build a model with every parameter random.

    Norms scale by about 1, biases are not 0, and matrices are large enough to make softmax outputs uneven.
    """
    model = built(case, torch.float32)
    centre = 0.0 if case.model_type.startswith("gemma") else 1.0  # Gemma's norms scale by 1 + weight
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        is_norm = parameter.ndim == 1 and name.endswith("weight")
        parameter.normal_(centre if is_norm else 0.0, 0.15, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.15, generator=generator)
    return model


def built(case: Case, dtype: torch.dtype) -> Any:
    """Build a model as transformers initializes it."""
    import transformers

    # its own dict of rotary positions, which transformers fills
    settings = copy.deepcopy(({} if case.model_type == "gpt2" else SIZES) | case.settings)
    config = transformers.AutoConfig.for_model(case.model_type, **settings)
    if case.model_type in WITHOUT_AUTOMATIC_CLASS:
        kind: Any = getattr(transformers, WITHOUT_AUTOMATIC_CLASS[case.model_type])
        return kind._from_config(config, dtype=dtype, **EAGER).eval()
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, **EAGER).eval()


@contextlib.contextmanager
def without_casts() -> Iterator[None]:
    """Make torch.float32 mean fp64, so that a model of transformers computes in fp64 where it casts to fp32, or where
    it divides integers.
    """
    patched = {(torch, "float32"): torch.float64, (torch, "float"): torch.float64}
    patched |= {(Tensor, "float"): Tensor.double}
    before, default = {(owner, name): getattr(owner, name) for owner, name in patched}, torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        for (owner, name), value in patched.items():
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)
        torch.set_default_dtype(default)


def in_fp64(case: Case, model: Any) -> Any:
    """Return a copy of a model in fp64. Call it, and run the result, under `without_casts`."""
    copied = built(case, torch.float64)  # with rotary frequencies in fp64
    copied.load_state_dict(model.state_dict())
    return copied


def gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradients under the names that transformers gives to stored weights."""
    from transformers.core_model_loading import revert_weight_conversion

    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return revert_weight_conversion(model, found)


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


def refused_settings(model: str) -> list[list[str]]:
    """Return the rows of refused_settings.tsv for a model: changes of its settings as JSON, what the message names."""
    return [row[1:] for row in rows(Path(__file__).with_name("refused_settings.tsv")) if row[0] == model]
