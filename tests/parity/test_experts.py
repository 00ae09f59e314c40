"""Mixtures of experts on every grid equal one process in fp64: losses, gradients, weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from tests.harness import RankPool
from tests.parity.comparison import plan_differences
from tests.tiny import make_config

MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "seq_length": 8,
    "vocab_size": 24,
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
    "activation": "swiglu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "sequence_parallel": True,
    "num_experts": 4,
    "moe_ffn_hidden_size": 12,
    "moe_aux_loss_coeff": (0.02,),
    "moe_z_loss_coeff": 0.01,
    "clip_grad": 0.3,
}
ZERO = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
ZERO3 = ZERO | {"data_parallel_sharding_strategy": "optim_grads_params"}
BY_MICROBATCH = {"data_parallel_sharding_granularity": "microbatch"}
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
DROPS = {"moe_expert_capacity_factor": 0.8, "micro_batch_size": 2}
PADS = {"moe_expert_capacity_factor": 1.1, "moe_pad_expert_input_to_capacity": True}
PER_TOKEN = {"calculate_per_token_loss": True}
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
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def again(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


SINKHORN = {"moe_router_load_balancing_type": ("sinkhorn",), "moe_aux_loss_coeff": (0.0,)}
ONE = SINKHORN | {"moe_router_topk": 1}
GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "sinkhorn, two experts, ep 2 of tp 2 dp 2, again": (
        4,
        {"tp": 2, "ep": 2, "etp": 1} | SINKHORN | ZERO | again("moe"),
    ),
    "sinkhorn, ep 2 pp 2 dualpipe-v, full recompute": (
        4,
        {"ep": 2, "pp": 2, "chunks": 2, "pipeline_schedule": "dualpipe-v", "moe_layer_freq": "2"} | ONE | FULL,
    ),
    "a group's score by two experts, weights as they are, ep 2": (
        2,
        {"ep": 2} | BIAS | {"moe_router_topk": 3, "moe_router_group_score_topk": 2, "moe_router_norm_topk_prob": False},
    ),
    "Granite's factors, ep 2 pp 2": (
        4,
        {"ep": 2, "pp": 2, "embedding_scale": 3.0, "residual_scale": 0.4, "logits_scaling": 6.0, "softmax_scale": 0.1},
    ),
    "weights on inputs, biases of linears, capacity, ep 2 pp 2 zero bubble": (
        4,
        {"ep": 2, "pp": 2, "pipeline_schedule": "zb-h1", "add_bias_linear": True, "moe_apply_probs_on_input": True}
        | DROPS,
    ),
    "weights on inputs, again, ep 2 etp 2": (
        4,
        {"tp": 2, "ep": 2, "moe_apply_probs_on_input": True} | SHARED | again("moe_act", "layernorm"),
    ),
    "softmax with biases, ep 2 of tp 2": (
        4,
        {"tp": 2, "ep": 2, "etp": 1, "num_experts": 8, "moe_router_topk": 3}
        | {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.02},
    ),
    "experts again, bias, shared, ep 2 etp 2 pp 2 zero bubble": (
        8,
        {"tp": 2, "ep": 2, "pp": 2, "pipeline_schedule": "zb-h1"} | BIAS | ZERO | SHARED | again("moe", "layernorm"),
    ),
    "experts again, every loss, ep 2 of tp 2 dp 2": (
        4,
        {"tp": 2, "ep": 2, "etp": 1} | EVERY_LOSS | PER_TOKEN | ZERO | again("moe", "core_attn"),
    ),
    "experts again, capacity, dualpipe": (
        4,
        {"ep": 2, "pp": 2, "pipeline_schedule": "dualpipe", "norm_position": "after"} | DROPS | BIAS | again("moe"),
    ),
    "experts again, padded, biases of linears, zb-v": (
        4,
        {"ep": 2, "pp": 2, "chunks": 2, "pipeline_schedule": "zb-v", "add_bias_linear": True} | PADS | again("moe"),
    ),
    "activation and shared experts again, ep 2 pp 2 dualpipe-v": (
        4,
        {"ep": 2, "pp": 2, "chunks": 2, "pipeline_schedule": "dualpipe-v"}
        | SHARED
        | again("moe_act", "shared_experts"),
    ),
    "norms and shared experts again, 3 of 2 groups, softmax not before the choice, ep 2 pp 2 zero bubble": (
        4,
        {"ep": 2, "pp": 2, "pipeline_schedule": "zb-h1", "moe_router_pre_softmax": True, "num_experts": 8}
        | SIGMOID
        | {"moe_router_topk": 3, "moe_router_num_groups": 4, "moe_router_group_topk": 2}
        | EVERY_LOSS
        | SHARED
        | again("layernorm", "shared_experts"),
    ),
    "norms and activations again, ep 4 of tp 2 dp 2, biases, norms around": (
        4,
        {"tp": 2, "ep": 4, "etp": 1, "add_bias_linear": True, "norm_position": "around", "hidden_dropout": 0.2}
        | SHARED
        | again("core_attn", "layernorm", "moe_act"),
    ),
    "dense layers and activations again, ep 2 of tp 2 interleaved": (
        4,
        {"tp": 2, "ep": 2, "etp": 1, "pp": 2, "chunks": 2, "moe_layer_freq": "2"}
        | SHARED
        | again("activation", "moe_act"),
    ),
    "one rank, sigmoid, groups, shared": (1, SIGMOID | SHARED | {"moe_layer_freq": "2"}),
    "biases of linears, etp 2 of dp 4, full recompute": (4, {"etp": 2, "ep": 2, "add_bias_linear": True} | ZERO | FULL),
    "global loss, one rank": (1, GLOBAL | PER_TOKEN),
    "global loss, dp 2 pp 2 dualpipe-v": (4, {"pp": 2, "chunks": 2, "pipeline_schedule": "dualpipe-v"} | GLOBAL),
    "capacity, ep 2 of tp 2 dp 2, etp 1, position": (
        4,
        {"tp": 2, "ep": 2, "etp": 1, "moe_token_drop_policy": "position"} | DROPS | FULL | ZERO,
    ),
    "capacity padded, ep 4 of tp 2 dp 2, biases of linears": (
        4,
        {"tp": 2, "ep": 4, "etp": 1, "add_bias_linear": True} | PADS | SIGMOID,
    ),
    "sinks and clamped gates, ep 2 tp 2 pp 2 zero bubble": (
        4,
        {"tp": 2, "ep": 2, "etp": 1, "pp": 2, "pipeline_schedule": "zb-h1"} | GPT_OSS | ZERO,
    ),
    "bias, dp 2 pp 2 dualpipe": (4, {"pp": 2, "pipeline_schedule": "dualpipe"} | BIAS),
    "bias, ep 2 pp 2 zb-h2": (4, {"ep": 2, "pp": 2, "pipeline_schedule": "zb-h2"} | BIAS | ZERO),
    "sharded weights in units, ep 2 of dp 4": (4, {"ep": 2, "data_parallel_sharding_units": 2} | ZERO3 | BIAS | SHARED),
    "sharded weights, one copy of the experts, ep 4 of tp 2 dp 2": (
        4,
        {"tp": 2, "ep": 4, "etp": 1, "add_bias_linear": True} | ZERO3 | BY_MICROBATCH | PER_TOKEN,
    ),
    "sharded weights of experts alone, tp 2": (2, {"tp": 2, "etp": 1} | ZERO3 | BY_MICROBATCH | SHARED),
    "sharded weights, ep 2 pp 2 dualpipe": (
        4,
        {"ep": 2, "pp": 2, "pipeline_schedule": "dualpipe", "untie_embeddings_and_output_weights": True} | ZERO3,
    ),
    "sharded weights, ep 2 of tp 2 dp 2 breadth-first, Muon": (
        4,
        {
            "tp": 2,
            "ep": 2,
            "etp": 1,
            "chunks": 2,
            "pipeline_schedule": "breadth-first",
            "optimizer": "muon",
            "muon_tp_mode": "duplicated",
        }
        | ZERO3,
    ),
    "etp 2 of tp 2": (2, {"tp": 2, "ddp_bucket_size": 100, "moe_router_pre_softmax": True, "moe_router_topk": 1}),
    "ep 2 pp 2 zb-v, no balance": (
        4,
        {"ep": 2, "pp": 2, "chunks": 2, "pipeline_schedule": "zb-v", "moe_router_load_balancing_type": ("none",)}
        | {"moe_aux_loss_coeff": (0.0,)}
        | ZERO,
    ),
    "ep 4 etp 2 of dp 8": (8, {"ep": 4, "etp": 2} | ZERO | SIGMOID | {"moe_router_pre_softmax": False}),
    "ep 4 etp 1 of tp 2 dp 4, norms around": (
        8,
        {"tp": 2, "ep": 4, "etp": 1, "norm_position": "around", "activation": "squared_relu", "hidden_dropout": 0.2},
    ),
}


def differences(rank: int, world_size: int, options: dict[str, Any]) -> list[str]:
    plan = resolve(make_config(**MODEL | options), world_size)
    return plan_differences(rank, plan, [Rates(0.02, 0.1, None), Rates(0.01, 0.2, None)])


def masked(rank: int, world_size: int, options: dict[str, Any]) -> list[str]:
    plan = resolve(make_config(**MODEL | options), world_size)
    return plan_differences(rank, plan, [Rates(0.02, 0.1, None)], without_loss=(1, 4))


def test_router_losses_weigh_as_the_loss_of_their_microbatch(rank_pools: Callable[[int], RankPool]) -> None:
    """With --calculate-per-token-loss a microbatch without a token that counts has no router loss either."""
    assert rank_pools(2).run(masked, {"ep": 2} | EVERY_LOSS | PER_TOKEN)[0] == []


@pytest.mark.parametrize("name", GRIDS)
def test_grid_with_experts_equals_one_process(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    world_size, options = GRIDS[name]
    assert rank_pools(world_size).run(differences, options)[0] == []
