"""Latent attention on every grid equals one process in fp64: losses, gradients, weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, note, settings

from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from tests.harness import RankPool
from tests.parity.comparison import plan_differences
from tests.parity.configuration import configuration
from tests.parity.options import Grid, world_of
from tests.parity.test_experts import MODEL as EXPERTS
from tests.parity.test_experts import SHARED, SIGMOID, ZERO
from tests.parity.test_random_grids import DRAW, grids
from tests.tiny import make_config

LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "qk_layernorm": True,
    "q_lora_rank": 10,
    "kv_lora_rank": 7,
    "qk_head_dim": 5,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
}
YARN = {
    "rope_scaling_type": "yarn",
    "rope_scaling_factor": 4.0,
    "rope_original_max_position_embeddings": 4,
    "rotary_base": 50.0,
    "yarn_mscale": 0.7,
    "yarn_mscale_all_dim": 0.9,
}
MODEL = EXPERTS | {"num_experts": None, "moe_ffn_hidden_size": None} | LATENT
MODEL |= {"moe_aux_loss_coeff": (0.0,), "moe_z_loss_coeff": None}
DEEPSEEK = {"num_experts": 8, "moe_ffn_hidden_size": 12, "moe_layer_freq": "[0]+[1]*3"} | SIGMOID | YARN
DEEPSEEK |= SHARED | {"moe_shared_expert_gate": False}
CORE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm")}
UP = {"recompute_granularity": "selective", "recompute_modules": ("mla_up_proj", "layernorm")}
UP_AND_CORE = CORE | {"recompute_modules": ("mla_up_proj", "core_attn", "layernorm")}
GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank, yarn": (1, YARN),
    "one rank, no latent of q, no norms, biases, equal heads": (
        1,
        {"q_lora_rank": None, "qk_layernorm": False, "add_bias_linear": True, "v_head_dim": 9},
    ),
    "queries that grow, tp 2": (
        2,
        {"tp": 2, "yarn_query_scale": 0.7} | YARN | {"rope_original_max_position_embeddings": 3},
    ),
    "tp 2": (2, {"tp": 2, "sequence_parallel": False, "latent_norm_epsilon": 0.1} | YARN),
    "tp 4, zero, core and norms recomputed": (4, {"tp": 4} | ZERO | CORE),
    "one rank, no latent of q, no norms, projected up again": (1, UP | {"q_lora_rank": None, "qk_layernorm": False}),
    "tp 2, sequence parallel, written out, projected up again": (
        2,
        {"tp": 2, "attn_logit_softcapping": 2.0, "attention_dropout": 0.2} | UP_AND_CORE,
    ),
    "tp 2 dp 2, zero 3, no latent of q, projected up again": (
        4,
        {"tp": 2, "q_lora_rank": None, "use_distributed_optimizer": True}
        | {"data_parallel_sharding_strategy": "optim_grads_params"}
        | UP,
    ),
    "tp 2 pp 2 zero bubble, core and projections again, offloaded": (
        4,
        {"tp": 2, "pp": 2, "pipeline_schedule": "zb-h1", "cpu_offloading_num_layers": 4}
        | {"min_offloaded_tensor_size": 1}
        | UP_AND_CORE,
    ),
    "tp 2 in chunks": (2, {"tp": 2, "tp_comm_overlap": True, "tp_comm_overlap_chunks": 2}),
    "experts, tp 2 ep 2 pp 2 zero bubble": (
        4,
        {"tp": 2, "ep": 2, "etp": 1, "pp": 2, "pipeline_schedule": "zb-h1"} | DEEPSEEK | ZERO,
    ),
    "experts balanced within sequences, cp 2 pp 2 dualpipe-v, six receives ahead": (
        4,
        {
            "context_parallel_size": 2,
            "cp_comm_type": ("p2p",),
            "seq_length": 8,
            "pp": 2,
            "chunks": 2,
            "pipeline_schedule": "dualpipe-v",
        }
        | {"pipeline_receive_depth": 6, "global_batch_size": 12, "q_lora_rank": None, "num_experts": 8}
        | {"moe_ffn_hidden_size": 12, "moe_router_score_function": "sigmoid", "moe_aux_loss_coeff": (0.03,)}
        | {"moe_router_load_balancing_type": ("seq_aux_loss",)},
    ),
}


def differences(rank: int, world_size: int, options: dict[str, Any]) -> list[str]:
    plan = resolve(make_config(**MODEL | options), world_size)
    return plan_differences(rank, plan, [Rates(0.02, 0.1, None), Rates(0.01, 0.2, None)])


@pytest.mark.parametrize("name", GRIDS)
def test_grid_with_latent_attention_equals_one_process(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    world_size, options = GRIDS[name]
    assert rank_pools(world_size).run(differences, options)[0] == []


def with_latents(grid: Grid) -> Grid:
    """Return a drawn grid with the values of its options that fit latent attention."""
    return grid | {
        "kv_heads": "all",
        "qk_layernorm_scope": "head",
        "qk_layernorm_after_rope": False,
        "attention_output_gate": False,
        "qk_l2_norm": False,
        "positions": grid["positions"] if grid["positions"] in ("rope, yarn", "rope, linear") else "rope",
        "layers": grid["layers"] if grid["layers"] in ("windows skipped", "widths", "missing parts") else "alike",
        "biases": "none" if grid["biases"] == "qkv" else grid["biases"],
    }


def drawn_differences(rank: int, world_size: int, grid: Grid) -> list[str]:
    config, sizes = configuration(grid), LATENT | {"qk_layernorm": grid["qk_layernorm"], "kv_channels": None}
    sizes |= {"q_lora_rank": None if grid["tied"] else 10, "v_head_dim": 9 if grid["embedding_scale"] == 1.0 else 6}
    sizes |= {"yarn_mscale_all_dim": 0.9}
    sizes["position_embedding_type"] = config.model.position_embedding_type
    plan = resolve(dataclasses.replace(config, model=dataclasses.replace(config.model, **sizes)), world_size)
    return plan_differences(rank, plan, [Rates(0.02, 0.1, grid["decoupled_lr"]), Rates(0.01, 0.2, None)])


@settings(DRAW, max_examples=4)
@given(grid=grids())
def test_drawn_grid_with_latent_attention_equals_one_process(rank_pools: Callable[[int], RankPool], grid: Grid) -> None:
    grid = with_latents(grid)
    note(str(grid))
    assert rank_pools(world_of(grid)).run(drawn_differences, grid)[0] == []
