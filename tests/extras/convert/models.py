"""Tiny models of transformers with random weights, saved as Hugging Face folders."""

from __future__ import annotations

import contextlib
import copy
import io
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
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
GLM = {"num_experts_per_tok": 2, "moe_intermediate_size": 20, "num_mtp_layers": 0}
WITHOUT_AUTOMATIC_CLASS = {"mistral4": "Mistral4ForCausalLM"}  # AutoModelForCausalLM does not know it
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": LENGTH, "vocab_size": 61}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **parameters}}


def ropes(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions by layer type. rope_type is default unless given."""
    kinds = {"full_attention": full, "sliding_attention": sliding}
    return {"rope_parameters": {kind: {"rope_type": "default"} | parameters for kind, parameters in kinds.items()}}


def types(letters: str) -> list[str]:
    """Layer types: F for full attention, S for a sliding window."""
    return [{"F": "full_attention", "S": "sliding_attention"}[letter] for letter in letters]


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
YARN_MSCALE = rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.9, beta_fast=2.0, beta_slow=0.25)
YARN_MSCALE["rope_parameters"]["original_max_position_embeddings"] = 16
DEEPSEEK = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}
DEEPSEEK_V2 = {
    name: value for name, value in DEEPSEEK.items() if name not in ("n_group", "topk_group", "num_mtp_layers")
}
DEEPSEEK_V2 |= {"num_experts_per_tok": 3, "routed_scaling_factor": 16.0}
MISTRAL4_ROPE = rope("yarn", factor=4.0, mscale=1.0, mscale_all_dim=0.9, beta_fast=2.0, beta_slow=0.25)
MISTRAL4_ROPE["rope_parameters"] |= {
    "original_max_position_embeddings": 5,
    "llama_4_scaling_beta": 0.3,
    "max_position_embeddings": LENGTH,
}
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
    "qwen3_window_from_layer_1": Case(
        "qwen3",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "ministral": Case(
        "ministral", {"num_hidden_layers": 4, "sliding_window": 6, "layer_types": types("FSSF"), "head_dim": 12}
    ),
    "gemma": Case("gemma", rope("default") | {"head_dim": 12}),
    "gemma2": Case(
        "gemma2",
        rope("default")
        | {
            "num_hidden_layers": 4,
            "head_dim": 12,
            "query_pre_attn_scalar": 9,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 5,
        },
        "25KB",
    ),
    "gemma2_without_caps": Case(
        "gemma2",
        {
            "num_hidden_layers": 3,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window": 7,
            "layer_types": types("FSS"),
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": Case(
        "gemma3_text",
        ropes({"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}, {"rope_theta": 50.0})
        | {
            "num_hidden_layers": 5,
            "head_dim": 12,
            "query_pre_attn_scalar": 10,
            "sliding_window": 5,
            "sliding_window_pattern": 3,
        },
    ),
    "gemma3_capped": Case(
        "gemma3_text",
        ropes({"rope_theta": 500.0}, {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0})
        | {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 3.0,
            "sliding_window": 9,
            "layer_types": types("SFSF"),
            "sliding_window_pattern": 2,
        },
    ),
    "olmo2": Case("olmo2", rope("default")),
    "olmo2_one_kv_head_linear": Case("olmo2", rope("linear", factor=3.0) | {"num_key_value_heads": 1}),
    "olmo3": Case(
        "olmo3",
        ropes(
            {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "beta_fast": 2.0,
                "beta_slow": 0.25,
                "original_max_position_embeddings": 16,
            },
            {"rope_theta": 500.0},
        )
        | {"num_hidden_layers": 6, "sliding_window": 5},
        "40KB",
    ),
    "olmo3_alike_rope": Case(
        "olmo3", ropes({"rope_theta": 500.0}, {"rope_theta": 500.0}) | {"num_hidden_layers": 4, "sliding_window": 6}
    ),
    "phi3": Case("phi3", rope("default", partial_rotary_factor=0.5) | {"sliding_window": 5, "pad_token_id": 0}, "30KB"),
    "phi3_multi_head_tied": Case("phi3", {"num_key_value_heads": 4, "tie_word_embeddings": True, "pad_token_id": None}),
    "smollm3": Case(
        "smollm3",
        rope("linear", factor=3.0)
        | {"num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 5, "pad_token_id": 0}
        | {"no_rope_layer_interval": 2},
        "30KB",
    ),
    "smollm3_biases": Case(
        "smollm3",
        {"no_rope_layers": [1, 1], "attention_bias": True, "mlp_bias": True, "pad_token_id": 0}
        | {"tie_word_embeddings": False},
    ),
    "seed_oss": Case("seed_oss", LLAMA3 | {"head_dim": 12}, "30KB"),
    "seed_oss_without_biases": Case("seed_oss", {"head_dim": 8, "attention_bias": False, "residual_dropout": 0.0}),
    "exaone4": Case(
        "exaone4", LLAMA3 | {"num_hidden_layers": 5, "sliding_window": 5, "sliding_window_pattern": 3}, "30KB"
    ),
    "exaone4_without_windows": Case(
        "exaone4", {"sliding_window": None, "layer_types": types("FF"), "tie_word_embeddings": True}
    ),
    "ernie4_5": Case("ernie4_5", rope("default") | {"head_dim": 12, "use_bias": True}, "30KB"),
    "ernie4_5_untied": Case("ernie4_5", {"head_dim": 8, "tie_word_embeddings": False, "num_key_value_heads": 1}),
    "granite": Case(
        "granite",
        rope("default")
        | {"embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22}
        | {"attention_multiplier": 0.3, "attention_bias": True, "mlp_bias": True},
        "30KB",
    ),
    "granite_tied": Case("granite", {"tie_word_embeddings": True, "logits_scaling": 7.0}),
    "mixtral": Case(
        "mixtral", rope("default") | {"num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": 5}, "30KB"
    ),
    "mixtral_narrow_head": Case(
        "mixtral", {"num_experts_per_tok": 2, "num_local_experts": 3, "head_dim": 12, "num_key_value_heads": 1}
    ),
    "qwen2_moe": Case(
        "qwen2_moe",
        EXPERTS
        | {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "shared_expert_intermediate_size": 40,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
    "qwen2_moe_normalized_tied": Case(
        "qwen2_moe",
        EXPERTS
        | {
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "num_experts": 4,
            "shared_expert_intermediate_size": 24,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": Case("qwen3_moe", EXPERTS | {"num_experts": 8, "norm_topk_prob": True, "head_dim": 12}, "30KB"),
    "qwen3_moe_window": Case(
        "qwen3_moe",
        EXPERTS
        | {
            "num_hidden_layers": 3,
            "num_experts": 4,
            "mlp_only_layers": [0],
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ),
    "olmoe": Case("olmoe", rope("default") | {"num_experts_per_tok": 2, "num_experts": 4}),
    "olmoe_normalized": Case(
        "olmoe", {"num_experts_per_tok": 2, "num_experts": 5, "norm_topk_prob": True, "num_key_value_heads": 4}
    ),
    "glm4_moe": Case(
        "glm4_moe",
        GLM
        | {"n_routed_experts": 6, "use_qk_norm": True, "attention_bias": True, "head_dim": 12, "n_shared_experts": 2},
    ),
    "glm4_moe_groups": Case(
        "glm4_moe",
        GLM
        | {
            "num_hidden_layers": 3,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "solar_open": Case(
        "solar_open",
        {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "attention_bias": True}
        | {"head_dim": 12, "n_shared_experts": 2, "routed_scaling_factor": 2.5},
    ),
    "flex_olmo": Case("flex_olmo", rope("default") | {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "flex_olmo_normalized": Case(
        "flex_olmo",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "num_key_value_heads": 1,
            "pad_token_id": 0,
        },
    ),
    "gpt_oss": Case(
        "gpt_oss",
        {"num_hidden_layers": 4, "num_local_experts": 4, "head_dim": 12, "sliding_window": 5, "swiglu_limit": 0.4}
        | rope("yarn", factor=4.0, beta_fast=2.0, beta_slow=0.3, truncate=False, original_max_position_embeddings=16),
        "30KB",
    ),
    "gpt_oss_defaults": Case(
        "gpt_oss",
        {
            "num_hidden_layers": 3,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "head_dim": 8,
            "layer_types": types("FSS"),
            "num_key_value_heads": 1,
        },
    ),
    "deepseek_v3": Case("deepseek_v3", DEEPSEEK | YARN_MSCALE, "30KB"),
    "deepseek_v3_no_latent_of_queries": Case(
        "deepseek_v3",
        DEEPSEEK
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}
        | {"first_k_dense_replace": 0, "tie_word_embeddings": True, "v_head_dim": 12},
    ),
    "deepseek_v3_two_epsilons": Case("deepseek_v3", DEEPSEEK | {"rms_norm_eps": 1e-2}),
    "deepseek_v2": Case("deepseek_v2", DEEPSEEK_V2 | YARN_MSCALE, "30KB"),
    "deepseek_v2_groups": Case(
        "deepseek_v2",
        DEEPSEEK_V2
        | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
        | {"num_experts_per_tok": 2, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-2, "v_head_dim": 12},
    ),
    "deepseek_v3_any_group_topk": Case(
        "deepseek_v3",
        DEEPSEEK
        | {"num_experts_per_tok": 3, "topk_group": 2, "norm_topk_prob": False, "rope_interleave": False}
        | {"routed_scaling_factor": 1.5, "rms_norm_eps": 1e-5},
    ),
    "deepseek_v2_236b_groups": Case(
        "deepseek_v2",
        DEEPSEEK_V2 | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    ),
    "glm4_moe_any_group_topk": Case(
        "glm4_moe",
        GLM
        | {"n_routed_experts": 12, "n_group": 4, "topk_group": 3, "num_experts_per_tok": 4, "norm_topk_prob": False},
    ),
    "dots1": Case(
        "dots1",
        EXPERTS
        | {"n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": True}
        | {"sliding_window": None, "routed_scaling_factor": 2.5, "num_hidden_layers": 3, "head_dim": 12},
        "30KB",
    ),
    "dots1_window": Case(
        "dots1",
        EXPERTS
        | {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1}
        | {"sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "minimax_m2": Case(
        "minimax_m2",
        rope("default", partial_rotary_factor=0.5) | {"head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 3},
        "30KB",
    ),
    "minimax_m2_one_kv_head": Case(
        "minimax_m2", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1}
    ),
    "glm4_moe_lite": Case(
        "glm4_moe_lite",
        {name: value for name, value in DEEPSEEK.items() if name not in ("first_k_dense_replace", "num_mtp_layers")}
        | {"n_group": 1, "topk_group": 1},
        "30KB",
    ),
    "glm4_moe_lite_groups": Case(
        "glm4_moe_lite",
        {name: value for name, value in DEEPSEEK.items() if name not in ("first_k_dense_replace", "num_mtp_layers")}
        | {"num_experts_per_tok": 3, "q_lora_rank": None, "norm_topk_prob": False}
        | {"mlp_layer_types": ["dense", "dense", "sparse"]},
    ),
    "ernie4_5_moe": Case(
        "ernie4_5_moe",
        rope("default")
        | {"moe_intermediate_size": 20, "moe_k": 3, "moe_num_experts": 6, "num_hidden_layers": 4}
        | {"moe_layer_start_index": 1, "moe_layer_interval": 2},
        "30KB",
    ),
    "ernie4_5_moe_untied": Case(
        "ernie4_5_moe",
        {"moe_intermediate_size": 12, "moe_k": 2, "moe_num_experts": 4, "num_hidden_layers": 3, "head_dim": 12}
        | {"moe_layer_end_index": 1, "moe_num_shared_experts": 0, "tie_word_embeddings": False},
    ),
    "hunyuan_v1_moe": Case(
        "hunyuan_v1_moe", rope("default") | {"num_experts": 6, "moe_topk": 3, "head_dim": 12}, "30KB"
    ),
    "hunyuan_v1_moe_tied": Case(
        "hunyuan_v1_moe",
        {"num_experts": 4, "moe_topk": 2, "tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 8},
    ),
    "granitemoe": Case(
        "granitemoe",
        rope("default")
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "embedding_multiplier": 12.0, "logits_scaling": 6.0}
        | {"residual_multiplier": 0.22, "attention_multiplier": 0.3},
        "30KB",
    ),
    "granitemoe_tied": Case(
        "granitemoe",
        {"num_local_experts": 4, "tie_word_embeddings": True, "logits_scaling": 7.0, "residual_multiplier": 1.5},
    ),
    "mistral4": Case(
        "mistral4",
        {name: value for name, value in DEEPSEEK.items() if name not in ("n_group", "topk_group", "num_mtp_layers")}
        | MISTRAL4_ROPE,
        "30KB",
    ),
    "mistral4_halves": Case(
        "mistral4",
        {name: value for name, value in DEEPSEEK.items() if name not in ("n_group", "topk_group", "num_mtp_layers")}
        | MISTRAL4_ROPE
        | {"rope_interleave": False, "norm_topk_prob": False, "q_lora_rank": None, "first_k_dense_replace": 0},
    ),
    "hy_v3": Case(
        "hy_v3",
        EXPERTS
        | {"num_experts": 6, "num_shared_experts": 2, "num_hidden_layers": 3, "head_dim": 12, "num_experts_per_tok": 3},
        "30KB",
    ),
    "hy_v3_dense_between": Case(
        "hy_v3",
        EXPERTS
        | {"num_experts": 4, "num_hidden_layers": 3, "head_dim": 8, "router_scaling_factor": 1.0}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "tie_word_embeddings": True},
    ),
    "exaone_moe": Case(
        "exaone_moe",
        rope("default")
        | EXPERTS
        | {"num_experts": 6, "num_experts_per_tok": 3, "num_hidden_layers": 5, "sliding_window": 5}
        | {"sliding_window_pattern": 3, "num_shared_experts": 2, "routed_scaling_factor": 1.5},
        "30KB",
    ),
    "exaone_moe_groups": Case(
        "exaone_moe",
        EXPERTS
        | {"num_experts": 8, "sliding_window": 3, "layer_types": types("FSF"), "n_group": 4, "topk_group": 2}
        | {"num_experts_per_tok": 3, "norm_topk_prob": False, "num_hidden_layers": 3},
    ),
    "afmoe": Case(
        "afmoe",
        rope("default")
        | EXPERTS
        | {"num_experts": 6, "num_experts_per_tok": 3, "num_hidden_layers": 5, "sliding_window": 5, "head_dim": 12}
        | {"global_attn_every_n_layers": 3, "num_shared_experts": 2, "route_scale": 2.826, "mup_enabled": True},
        "30KB",
    ),
    "afmoe_one_kv_head": Case(
        "afmoe",
        EXPERTS
        | {"num_experts": 4, "sliding_window": 3, "layer_types": types("FSF"), "num_dense_layers": 0, "head_dim": 8}
        | {"num_shared_experts": 1, "num_key_value_heads": 1, "num_hidden_layers": 3, "tie_word_embeddings": True},
    ),
    "flint": Case(
        "flint",
        rope("default")
        | EXPERTS
        | {"num_experts": 6, "num_experts_per_tok": 3, "num_hidden_layers": 5, "sliding_window": 5, "head_dim": 12}
        | {"shared_expert_intermediate_size": 28},
        "30KB",
    ),
    "flint_full": Case(
        "flint",
        EXPERTS
        | {"num_experts": 4, "layer_types": types("FF"), "mlp_only_layers": [1], "norm_topk_prob": False}
        | {"shared_expert_intermediate_size": 20, "head_dim": 8},
    ),
    "mellum": Case(
        "mellum",
        ropes({"rope_theta": 500.0}, {"rope_theta": 50.0})
        | EXPERTS
        | {"num_experts": 6, "num_experts_per_tok": 3, "num_hidden_layers": 4, "sliding_window": 5, "head_dim": 12}
        | {"layer_types": types("SSFS"), "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
        "30KB",
    ),
    "mellum_alike": Case(
        "mellum",
        ropes(LLAMA3["rope_parameters"], LLAMA3["rope_parameters"])
        | EXPERTS
        | {"num_experts": 4, "norm_topk_prob": False, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "granitemoeshared": Case(
        "granitemoeshared",
        rope("default")
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "embedding_multiplier": 12.0, "logits_scaling": 6.0}
        | {"residual_multiplier": 0.22, "attention_multiplier": 0.3, "shared_intermediate_size": 28},
        "30KB",
    ),
    "granitemoe_swa": Case(
        "granitemoe_swa",
        rope("default")
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 28, "num_hidden_layers": 5}
        | {"layer_rope_theta": [0, 500.0, 100.0, 500.0, 0], "sliding_window": 5, "residual_multiplier": 0.22}
        | {"attention_multiplier": 0.3, "embedding_multiplier": 12.0, "logits_scaling": 6.0},
        "30KB",
    ),
    "granitemoe_swa_alike": Case(
        "granitemoe_swa", {"num_local_experts": 4, "layer_types": types("FF"), "tie_word_embeddings": True}
    ),
    "llama4": Case(
        "llama4_text",
        LLAMA3
        | {"num_hidden_layers": 5, "num_local_experts": 4, "intermediate_size_mlp": 40, "head_dim": 12}
        | {"no_rope_layer_interval": 2, "interleave_moe_layer_step": 2, "attention_chunk_size": 5, "floor_scale": 3}
        | {"attn_scale": 0.7},
        "30KB",
    ),
    "llama4_two_experts_no_norms": Case(
        "llama4_text",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "use_qk_norm": False, "num_hidden_layers": 3}
        | {"attn_temperature_tuning": False, "no_rope_layers": [0, 1, 1], "attention_chunk_size": 4}
        | {"intermediate_size_mlp": 40, "moe_layers": [0, 2], "tie_word_embeddings": True},
    ),
    "gpt2": Case("gpt2", GPT2),
    "gpt2_untied_relu_narrow": Case(
        "gpt2", GPT2 | {"tie_word_embeddings": False, "activation_function": "relu", "n_inner": 40}, "25KB"
    ),
}


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
