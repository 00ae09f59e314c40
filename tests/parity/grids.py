"""The grids of grids.tsv, written by hand: their models, and the sets of options that they share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megapipe.data.batch import Batch
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from tests import tiny
from tests.parity.comparison import plan_differences
from tests.tables import options, rows

Options = dict[str, Any]
RATES = (Rates(0.02, 0.1, None), Rates(0.01, 0.2, None))
SHORT = {"k": "pipe_sp_splits", "cp": "context_parallel_size"}
BASE: Options = {
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "make_vocab_size_divisible_by": 4,
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "train_iters": 2,
    "lr": 0.01,
    "adam_eps": 1e-3,
    "dtype": "fp64",
    "device": "cpu",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "clip_grad": 0.3,
}
GATED = {"normalization": "RMSNorm", "activation": "swiglu", "add_bias_linear": False}

# --- what any model may have
ZERO = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
FSDP = {"data_parallel_sharding_strategy": "optim_grads_params"}
ZERO3 = ZERO | FSDP
BY_MICROBATCH = {"data_parallel_sharding_granularity": "microbatch"}
PER_TOKEN = {"calculate_per_token_loss": True}
DOCUMENTS = {"eod_mask_loss": True, "reset_position_ids": True, "reset_attention_mask": True}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
UNTIED = {"untie_embeddings_and_output_weights": True}
MUON = {"optimizer": "muon", "muon_tp_mode": "duplicated"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = FULL | {"recompute_method": "block"}
KEEPS = FULL | {"recompute_keep_attention": True}


def again(*modules: str) -> Options:
    """Return the options that recompute these modules."""
    return {"recompute_granularity": "selective", "recompute_modules": modules}


CORE = again("core_attn")

# --- mixtures of experts
MODEL = BASE | GATED
MODEL |= {
    "num_layers": 4,
    "seq_length": 8,
    "vocab_size": 24,
    "sequence_parallel": True,
    "num_experts": 4,
    "moe_ffn_hidden_size": 12,
    "moe_aux_loss_coeff": (0.02,),
    "moe_z_loss_coeff": 0.01,
}
SIGMOID = {
    "num_experts": 8,
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_load_balancing_type": ("seq_aux_loss",),
}
BIAS = SIGMOID | {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.05}
GLOBAL = {"moe_router_load_balancing_type": ("global_aux_loss",), "moe_aux_loss_coeff": (0.3,)}
EVERY_LOSS = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss"),
    "moe_aux_loss_coeff": (0.02, 0.05, 0.1),
}
SINKHORN = {"moe_router_load_balancing_type": ("sinkhorn",), "moe_aux_loss_coeff": (0.0,)}
DROPS = {"moe_expert_capacity_factor": 0.8, "micro_batch_size": 2}
PADS = {"moe_expert_capacity_factor": 1.1, "moe_pad_expert_input_to_capacity": True}
GPT_OSS = {
    "add_bias_linear": True,
    "activation": "quick_geglu",
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 0.1,
    "softmax_type": "learnable",
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "window_size": 4,
    "window_attn_skip_freq": "2",
}
SHARED = {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True}
CHATS = {
    "sft": True,
    "tokenizer_type": "HuggingFaceTokenizer",
    "tokenizer_model": "unread",
    "position_embedding_type": "rope",
}
PREDICTS = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5}
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
DELAY = OVERLAP | {"delay_wgrad_compute": True}

# --- context parallelism, and slices of sequences
LONG = BASE | {"num_layers": 2, "seq_length": 24, "vocab_size": 24, "global_batch_size": 8}
ROPE = {"position_embedding_type": "rope", "rope_scaling_type": "yarn", "rope_original_max_position_embeddings": 8}
LLAMA = ROPE | GATED | {"num_query_groups": 2}
A2A, GATHER = {"cp_comm_type": ("a2a",)}, {"cp_comm_type": ("all_gather",)}
BOTH = {"cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 2)}
NOPE = tiny.NOPE
SINKS = {"softmax_type": "learnable"}
EXPERTS: Options = EVERY_LOSS | {
    "num_experts": 4,
    "moe_ffn_hidden_size": 12,
    "moe_z_loss_coeff": 0.01,
    "sequence_parallel": True,
}
GROUPS: Options = {
    "num_experts": 8,
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 8,
}
LATENTS: Options = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 10,
    "kv_lora_rank": 7,
    "qk_head_dim": 5,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
}
LATENT = LATENTS | ROPE | GATED
SP = {"sequence_parallel": True}
AVERAGE = {"pipe_sp_strategy": "average"}
H1 = {"pipeline_schedule": "zb-h1"}
OFFLOAD = {"cpu_offloading_num_layers": 1, "min_offloaded_tensor_size": 1}

# --- latent attention
LATENT_MODEL = MODEL | LATENTS | {"position_embedding_type": "rope", "num_experts": None, "moe_ffn_hidden_size": None}
LATENT_MODEL |= {"moe_aux_loss_coeff": (0.0,), "moe_z_loss_coeff": None}
YARN = {
    "rope_scaling_type": "yarn",
    "rope_scaling_factor": 4.0,
    "rope_original_max_position_embeddings": 4,
    "rotary_base": 50.0,
    "yarn_mscale": 0.7,
    "yarn_mscale_all_dim": 0.9,
}
DEEPSEEK = SIGMOID | YARN | SHARED
DEEPSEEK |= {"moe_ffn_hidden_size": 12, "moe_layer_freq": "[0]+[1]*3", "moe_shared_expert_gate": False}

# --- multi-token prediction
MTP_MODEL = BASE | {"num_layers": 4, "seq_length": 8, "vocab_size": 21, "position_embedding_type": "rope"}
MTP_MODEL |= {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.7}
TWO = {"mtp_num_layers": 2}
MTP_EXPERTS = GATED | {
    "num_query_groups": 2,
    "num_experts": 4,
    "moe_ffn_hidden_size": 12,
    "moe_aux_loss_coeff": (0.02,),
    "moe_z_loss_coeff": 0.01,
    "moe_layer_freq": "[0]+[1]*3",
    "sequence_parallel": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
    "moe_shared_expert_intermediate_size": 8,
}

# --- beside one process as --verify-grid does it
NARROW = {"dtype": "bf16", "use_precision_aware_optimizer": True, "main_grads_dtype": "bf16", "exp_avg_dtype": "bf16"}
TINY_LLAMA = tiny.LLAMA
PIPELINE = TINY_LLAMA | {"pp": 2, "num_layers": 4}

MODELS: dict[str, Options] = {
    "experts": MODEL,
    "parts": MODEL,
    "padded": MODEL | CHATS,
    "node": MODEL | {"num_layers": 2},
    "context": LONG,
    "slices": LONG,
    "latent": LATENT_MODEL,
    "prediction": MTP_MODEL,
    "frozen": {},
    "fp64": {},
    "native": {},
}
SETS = {name: value for name, value in globals().items() if name.isupper() and name not in ("RATES", "SHORT", "MODELS")}


def options_of(words: str) -> Options:
    """Return the options of words (tables.options)."""
    return {SHORT.get(name, name): value for name, value in options(words, SETS).items()}


@functools.cache
def grids(kind: str) -> dict[str, tuple[int, Options]]:
    """Return ranks and options of the grids of a kind, by name."""
    table = rows(Path(__file__).with_name("grids.tsv"))
    return {name: (int(ranks), MODELS[kind] | options_of(text)) for row, name, ranks, text in table if row == kind}


def differences(
    rank: int,
    world_size: int,
    grid: Options,
    change: Callable[[Batch], Batch] = lambda batch: batch,
    without_loss: tuple[int, ...] = (),
    rates: Sequence[Rates] = RATES,
) -> list[str]:
    """Return what differs from one process, over a step for each of the rates; run by all ranks.

    change: of each random batch. without_loss: microbatches of each global batch in which no token counts.
    """
    named = {SHORT.get(name, name): value for name, value in grid.items()}
    plan = resolve(tiny.make_config(**named), world_size)
    return plan_differences(rank, plan, rates, without_loss, change)
