"""Tiny random models of public architectures in transformers, and their weights under our names.

build(family) returns the data to compare an implementation of ours with transformers: the shape as keyword arguments
of ReferenceConfig, the full tensors by our names, and the logits of transformers' own model. FAMILIES holds the ids
for parametrize. Families that megapipe converts are compared in tests/extras/convert/test_fp64.py, all of them; here
are those that it does not, and the few that tests of packed documents and of generation use.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 96
SEQ = 24
SIZES = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "seq_length": SEQ,
    "max_position_embeddings": SEQ,
    "vocab_size": VOCAB,
    "padded_vocab_size": VOCAB,
}
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
NEOX = {"position_embedding_type": "rope", "untie_embeddings_and_output_weights": True}

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    config: dict[str, Any]  # keyword arguments of ReferenceConfig
    state: Weights  # full fp32 tensors by our parameter names
    logits: Callable[[Tensor], Tensor]  # tokens [b, s] -> [b, s, vocab] by transformers, fp32, eager attention


@dataclass(frozen=True)
class Family:
    model_type: str  # name in transformers
    theirs: dict[str, Any]  # options that differ from the sizes in their configuration
    ours: dict[str, Any]  # the same options as fields of ReferenceConfig
    convert: Callable[[dict[str, Any], Weights], Weights]  # (our config, their weights) -> our weights
    patch: Callable[[nn.Module], None] = field(
        default=lambda model: None
    )  # removes parts of their model that ours lacks


@cache
def build(family: str, seed: int = 1) -> Case:
    """Build one case. Raises KeyError for an unknown family, ImportError without transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    entry = FAMILIES[family]
    config = SIZES | entry.ours
    theirs = AutoConfig.for_model(entry.model_type, **_their_sizes(entry.model_type, config) | entry.theirs)
    model = AutoModelForCausalLM.from_config(theirs, attn_implementation="eager", dtype=torch.float32).eval()
    entry.patch(model)
    _draw(model, seed, zero_centered=config.get("layernorm_zero_centered_gamma", False))
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    @torch.no_grad()
    def logits(tokens: Tensor) -> Tensor:
        return model(tokens, use_cache=False).logits

    return Case(config, entry.convert(config, weights), logits)


def _their_sizes(model_type: str, config: dict[str, Any]) -> dict[str, Any]:
    sizes = {
        "num_hidden_layers": config["num_layers"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["ffn_hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_query_groups"],
        "head_dim": config["kv_channels"],
        "max_position_embeddings": config["max_position_embeddings"],
        "vocab_size": config["vocab_size"],
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": not config.get("untie_embeddings_and_output_weights", False),
    }
    words: dict[str, dict[str, str | None]] = {  # options that a family lacks or names differently
        "gpt2": {"intermediate_size": "n_inner", "num_key_value_heads": None, "head_dim": None},
        "gpt_neox": {"num_key_value_heads": None, "head_dim": None},
        "smollm3": {"head_dim": None},
        "starcoder2": {"head_dim": None},
    }
    absent = words.get(model_type, {})
    named = {absent.get(name, name): value for name, value in sizes.items()}
    return {name: value for name, value in named.items() if name is not None}


@torch.no_grad()
def _draw(model: nn.Module, seed: int, zero_centered: bool) -> None:
    """Draw every parameter at random.

    Norm scales are near 1 (zero-centred ones near 0), biases are not zero, and matrices are large enough to make
    softmax outputs uneven.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        norm_scale = parameter.ndim == 1 and name.endswith("weight")
        parameter.normal_(1.0 if norm_scale and not zero_centered else 0.0, 0.15, generator=generator)


# ---------------------------------------------------------------------------------- weights under our names


def fuse_qkv(config: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Merge q [heads * c, ...] and k, v [groups * c, ...] into rows per query group, [q_0 .. q_{n-1}, k, v]."""
    groups = config["num_query_groups"]
    parts = [part.reshape(groups, -1, *part.shape[1:]) for part in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _rename(weights: Weights, table: dict[str, str]) -> Weights:
    """Rename the tensors of the table's modules: weights, and biases where they exist."""
    return {
        f"{ours}.{kind}": weights[f"{theirs}.{kind}"]
        for theirs, ours in table.items()
        for kind in ("weight", "bias")
        if f"{theirs}.{kind}" in weights
    }


def _used_up(config: dict[str, Any], weights: Weights, state: Weights) -> Weights:
    """Assert that all their values are used (a tied head is one parameter on both sides)."""
    numbers = [sum(tensor.numel() for tensor in tensors.values()) for tensors in (weights, state)]
    if numbers[0] != numbers[1]:
        raise AssertionError(f"transformers' model has {numbers[0]} numbers, the converted one {numbers[1]}")
    return state


def from_llama(config: dict[str, Any], weights: Weights) -> Weights:
    """Convert Llama and similar models: separate q, k, v, gate and up if gated, and two names for the plain MLP."""
    state = _rename(
        weights,
        {
            "model.embed_tokens": "embedding.word_embeddings",
            "model.norm": "decoder.final_layernorm",
            "lm_head": "output_layer",
        },
    )
    for i in range(config["num_layers"]):
        theirs, ours = f"model.layers.{i}", f"decoder.layers.{i}"
        table = {
            "input_layernorm": "input_layernorm",
            "self_attn.o_proj": "self_attention.linear_proj",
            "self_attn.q_norm": "self_attention.q_layernorm",
            "self_attn.k_norm": "self_attention.k_layernorm",
            "mlp.c_fc": "mlp.linear_fc1",
            "mlp.c_proj": "mlp.linear_fc2",
            "mlp.down_proj": "mlp.linear_fc2",
        }
        sandwich = f"{theirs}.pre_feedforward_layernorm.weight" in weights  # Gemma 2's name of the norm before the MLP
        table["pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"] = "pre_mlp_layernorm"
        gated = f"{theirs}.mlp.gate_proj.weight" in weights
        if not gated:
            table["mlp.up_proj"] = "mlp.linear_fc1"
        state |= _rename(weights, {f"{theirs}.{a}": f"{ours}.{b}" for a, b in table.items()})
        if gated:
            gate, up = weights[f"{theirs}.mlp.gate_proj.weight"], weights[f"{theirs}.mlp.up_proj.weight"]
            state[f"{ours}.mlp.linear_fc1.weight"] = torch.cat((gate, up))
        state |= _separate_qkv(config, weights, f"{theirs}.self_attn", ours)
    return _used_up(config, weights, state)


def _separate_qkv(config: dict[str, Any], weights: Weights, theirs: str, ours: str) -> Weights:
    return {
        f"{ours}.self_attention.linear_qkv.{kind}": fuse_qkv(
            config, *(weights[f"{theirs}.{part}_proj.{kind}"] for part in "qkv")
        )
        for kind in ("weight", "bias")
        if f"{theirs}.q_proj.{kind}" in weights
    }


def from_gemma(config: dict[str, Any], weights: Weights) -> Weights:
    """Fold Gemma's factor sqrt(hidden) on embeddings into the weight, which unties the head in these tests."""
    state = from_llama(config, weights)
    state["embedding.word_embeddings.weight"] = state["embedding.word_embeddings.weight"] * config["hidden_size"] ** 0.5
    return state


def from_gpt2(config: dict[str, Any], weights: Weights) -> Weights:
    """Transpose Conv1D weights, stored as [in, out], and regroup c_attn, which is [q; k; v] over all heads."""
    weights = {n: t.T if t.ndim == 2 and ".h." in n else t for n, t in weights.items()}
    state = _rename(
        weights,
        {
            "transformer.wte": "embedding.word_embeddings",
            "transformer.wpe": "embedding.position_embeddings",
            "transformer.ln_f": "decoder.final_layernorm",
        },
    )
    for i in range(config["num_layers"]):
        theirs, ours = f"transformer.h.{i}", f"decoder.layers.{i}"
        table = {
            "ln_1": "input_layernorm",
            "attn.c_proj": "self_attention.linear_proj",
            "ln_2": "pre_mlp_layernorm",
            "mlp.c_fc": "mlp.linear_fc1",
            "mlp.c_proj": "mlp.linear_fc2",
        }
        state |= _rename(weights, {f"{theirs}.{a}": f"{ours}.{b}" for a, b in table.items()})
        for kind in ("weight", "bias"):
            state[f"{ours}.self_attention.linear_qkv.{kind}"] = fuse_qkv(
                config, *weights[f"{theirs}.attn.c_attn.{kind}"].chunk(3)
            )
    return _used_up(config, weights, state)


def from_gpt_neox(config: dict[str, Any], weights: Weights) -> Weights:
    """Keep query_key_value, [q, k, v] head by head: with one query group per head that is our layout."""
    table = {
        "gpt_neox.embed_in": "embedding.word_embeddings",
        "gpt_neox.final_layer_norm": "decoder.final_layernorm",
        "embed_out": "output_layer",
        "lm_head": "output_layer",
    }
    for i in range(config["num_layers"]):
        theirs, ours = f"gpt_neox.layers.{i}", f"decoder.layers.{i}"
        table |= {
            f"{theirs}.input_layernorm": f"{ours}.input_layernorm",
            f"{theirs}.attention.query_key_value": f"{ours}.self_attention.linear_qkv",
            f"{theirs}.attention.dense": f"{ours}.self_attention.linear_proj",
            f"{theirs}.post_attention_layernorm": f"{ours}.pre_mlp_layernorm",
            f"{theirs}.mlp.dense_h_to_4h": f"{ours}.mlp.linear_fc1",
            f"{theirs}.mlp.dense_4h_to_h": f"{ours}.mlp.linear_fc2",
        }
    return _used_up(config, weights, _rename(weights, table))


def _without_sandwich_norms(model: nn.Module) -> None:
    """Remove Gemma 2's norms on the outputs of attention and MLP, which our model lacks."""
    layers: Any = model.get_submodule("model.layers")
    for layer in layers:
        layer.post_attention_layernorm = nn.Identity()
        layer.post_feedforward_layernorm = nn.Identity()


# -------------------------------------------------------------------------------------------------- families


def _rope(kind: str, base: float = 500.0, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": base, **parameters}}


# The original context is 16 of 24 positions and the base is small, so that each scaling changes the result.
FAMILIES: dict[str, Family] = {
    "llama": Family(
        "llama",
        _rope("default") | {"rms_norm_eps": 1e-6},
        LLAMA | {"rotary_base": 500.0, "norm_epsilon": 1e-6},
        from_llama,
    ),
    "llama_rope_yarn": Family(
        "llama",
        _rope("yarn", factor=4.0, beta_fast=2.0, beta_slow=0.25, original_max_position_embeddings=16)
        | {"rms_norm_eps": 1e-5},
        LLAMA
        | {
            "rotary_base": 500.0,
            "rope_scaling_type": "yarn",
            "rope_scaling_factor": 4.0,
            "rope_original_max_position_embeddings": 16,
            "yarn_beta_fast": 2.0,
            "yarn_beta_slow": 0.25,
        },
        from_llama,
    ),
    "mistral_window": Family(
        "mistral",
        _rope("default") | {"sliding_window": 5, "rms_norm_eps": 1e-5},
        LLAMA | {"rotary_base": 500.0, "window_size": 5},
        from_llama,
    ),
    "smollm3_no_positions": Family(
        "smollm3",
        {"no_rope_layers": [0, 0], "rms_norm_eps": 1e-5},
        LLAMA | {"position_embedding_type": "none", "untie_embeddings_and_output_weights": False},
        from_llama,
    ),
    "gemma2_soft_cap": Family(
        "gemma2",
        _rope("default")
        | {
            "rms_norm_eps": 1e-5,
            "query_pre_attn_scalar": 9,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "sliding_attention"],
        },
        LLAMA
        | {
            "rotary_base": 500.0,
            "activation": "geglu_tanh",
            "layernorm_zero_centered_gamma": True,
            "softmax_scale": 1.0 / 3.0,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "window_size": 7,
        },
        from_gemma,
        _without_sandwich_norms,
    ),
    "nemotron_squared_relu": Family(
        "nemotron",
        _rope("default", partial_rotary_factor=0.5) | {"norm_eps": 1e-5},
        NEOX
        | {
            "rotary_base": 500.0,
            "rotary_percent": 0.5,
            "activation": "squared_relu",
            "layernorm_zero_centered_gamma": True,
            "add_bias_linear": False,
        },
        from_llama,
    ),
    "starcoder2_mqa": Family(
        "starcoder2",
        _rope("default") | {"norm_epsilon": 1e-5},
        {"position_embedding_type": "rope", "rotary_base": 500.0, "activation": "gelu_tanh", "num_query_groups": 1},
        from_llama,
    ),
    "gpt2": Family("gpt2", {}, {"activation": "gelu_tanh", "num_query_groups": 4}, from_gpt2),
    "gpt_neox_rotary_percent": Family(
        "gpt_neox",
        _rope("default", partial_rotary_factor=0.25) | {"use_parallel_residual": False, "layer_norm_eps": 1e-5},
        NEOX | {"rotary_base": 500.0, "rotary_percent": 0.25, "activation": "gelu", "num_query_groups": 4},
        from_gpt_neox,
    ),
}
