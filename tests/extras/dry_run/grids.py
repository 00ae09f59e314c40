"""Configurations on which plan, dry run and real ranks are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from tests.tables import options, rows
from tests.tiny import make_config

LLAMA: dict[str, Any] = {
    "num_query_groups": 2,
    "ffn_hidden_size": 384,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
}
# layers that differ, and other places of norms than before attention and MLP: as in Gemma-3, as in OLMo-3, and any
UNLIKE: dict[str, dict[str, Any]] = {
    "gemma": LLAMA
    | {"activation": "geglu_tanh", "norm_position": "around", "qk_layernorm": True, "embedding_scale": 11.5}
    | {"window_size": 32, "layer_pattern": ("3 rotary_base=500", "1 window_size=none", "...")},
    "olmo": LLAMA
    | {"norm_position": "after", "qk_layernorm": True, "qk_layernorm_scope": "projection"}
    | {"window_size": 32, "window_attn_skip_freq": "4", "no_rope_freq": "2"},
    "mixed": {
        "layer_pattern": (
            "1 attention=none ffn_hidden_size=256",
            "1 mlp=none norm_position=after",
            "1 norm_position=around num_query_groups=2",
            "1 window_size=16 activation=swiglu",
            "...",
        )
    },
}
# latent attention in the proportions of DeepSeek-V3, without experts
UNLIKE["latent"] = LLAMA | {"num_query_groups": None, "multi_latent_attention": True, "qk_layernorm": True}
UNLIKE["latent"] |= {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
}
TP2 = {"tensor_model_parallel_size": 2}
SP2 = TP2 | {"sequence_parallel": True}
OVERLAP = {"tp_comm_overlap": True}
PP2 = {"pipeline_model_parallel_size": 2}
PP4 = {"pipeline_model_parallel_size": 4}
FP8 = {"fp8_format": "hybrid"}
BLOCKS = {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}
MX = BLOCKS | {"fp8_recipe": "mxfp8"}
ZERO1 = {"use_distributed_optimizer": True}
ZERO2 = {"data_parallel_sharding_strategy": "optim_grads"}
ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params"}
UNITS = {"data_parallel_sharding_units": 2, "overlap_grad_reduce": True, "overlap_param_gather": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_layer_freq": "2",
    "moe_shared_expert_intermediate_size": 64,
    "add_bias_linear": False,
    "expert_model_parallel_size": 2,
}
WIDE_EXPERTS = EXPERTS | {"num_experts": 8, "moe_router_topk": 4, "moe_layer_freq": None}
PADDED = {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}
ZB_H1 = {"pipeline_schedule": "zb-h1"}
DOCUMENTS = {
    "reset_position_ids": True,
    "reset_attention_mask": True,
    "eod_mask_loss": True,
    "tokenizer_type": "ByteTokenizer",
    "vocab_size": 257,
}


OFFLOAD = {"cpu_offloading_num_layers": 8, "min_offloaded_tensor_size": 1}
SHORT = {"seq_length": 8, "micro_batch_size": 1, "global_batch_size": 1, "hidden_size": 256}
NARROW = {
    "dtype": "bf16",
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": "bf16",
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
SINKS = {"softmax_type": "learnable"}
PREDICTIONS = {"mtp_num_layers": 2, "position_embedding_type": "rope"}
ONCE = WIDE_EXPERTS | {"moe_token_dispatcher_type": "flex", "ranks_per_node": 2, "expert_model_parallel_size": 4}
CP2 = {"context_parallel_size": 2}
CAPPED = {"final_logit_softcapping": 30.0}
DRY = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
# attention's matrices are most of the step
WRITTEN_OUT = {"num_layers": 1, "seq_length": 512, "micro_batch_size": 1, "global_batch_size": 1}
DROPPED = {"attention_dropout": 0.1}
SOFT_CAPPED = {"attn_logit_softcapping": 30.0}
LARGE = {"vocab_size": 8000, "num_layers": 4}  # beside the layers
MUON = {"optimizer": "muon", "muon_tp_mode": "duplicated", "dtype": "bf16"}
GEMMA, OLMO, MIXED, LATENT = UNLIKE.values()


def cases(kind: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """Return ranks and options of the grids of a kind by name, as grids.tsv has them."""
    table = rows(Path(__file__).with_name("grids.tsv"))
    return {name: (int(ranks), options(words, globals())) for row, name, ranks, words in table if row == kind}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


GPT2: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "seq_length": 128,
    "vocab_size": 1000,
    "make_vocab_size_divisible_by": 8,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.0,
    "untie_embeddings_and_output_weights": True,
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "train_iters": 10,
    "lr": 1e-2,
}


def make_plan(world_size: int, changes: dict[str, Any], base: dict[str, Any] | None = None) -> RunPlan:
    """Plan a GPT-2 shape of 8 layers, hidden 128, sequence 128. base: options that differ from it. changes: of them,
    perhaps with `ranks_per_node`.
    """
    whole = GPT2 | (base or {}) | changes
    per_node = whole.pop("ranks_per_node", None)
    return resolve(make_config(**whole), world_size, per_node)
