"""Plans of a tiny model for tests of a runtime on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from tests.tables import options, rows
from tests.tiny import tiny_config
from tests.train.runs import FOUR_LAYERS

UNEVEN = {"pipeline_model_parallel_layout": "Ettt|tt|t|L", "num_layers": 6}
UNLIKE: dict[str, Any] = {
    "device": "cpu",  # CUDA's kernel for fp32 and several query groups keeps its output twice
    "norm_position": "after",
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "layer_pattern": (
        "1 qk_layernorm_scope=projection",
        "1 attention=none ffn_hidden_size=32",
        "1 norm_position=around num_query_groups=2",
        "1 mlp=none",
    ),
}

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SP2 = TP2 | {"sequence_parallel": True}
TIED, ZERO1 = {"untie_embeddings_and_output_weights": False}, {"use_distributed_optimizer": True}
OVERLAP = {"tp_comm_overlap": True, "tp_comm_overlap_chunks": 3}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS = {
    "num_experts": 4,
    "moe_router_force_load_balancing": True,
    "moe_layer_freq": "2",
    "add_bias_linear": False,
}
LATENT = {
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "num_query_groups": None,
    "kv_channels": None,
    "qk_layernorm": True,
    "q_lora_rank": 8,
    "kv_lora_rank": 12,
    "qk_head_dim": 3,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
}
SIX = {"num_layers": 6}
OFFLOADED_EXPERTS: dict[str, Any] = SIX | {
    "num_experts": 4,
    "add_bias_linear": False,
    "moe_shared_expert_intermediate_size": 8,
    "moe_router_force_load_balancing": True,  # else the rows of a microbatch are not those of the plan
    "moe_aux_loss_coeff": (0.1,),
}


def grids(kind: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """Return ranks and options of the grids of a kind by name, as grids.tsv has them."""
    table = rows(Path(__file__).with_name("grids.tsv"))
    return {name: (int(ranks), options(words, globals())) for row, name, ranks, words in table if row == kind}


def make_plan(world_size: int, dtype: str, **changes: Any) -> RunPlan:
    untied = {"untie_embeddings_and_output_weights": True, "attention_dropout": 0.0, "global_batch_size": 24}
    untied["device"] = "cpu"
    per_node = changes.pop("ranks_per_node", None)
    return resolve(tiny_config(**FOUR_LAYERS | untied | {"dtype": dtype} | changes), world_size, per_node)
