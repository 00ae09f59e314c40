"""Multi-token prediction on every grid and schedule equals one process in fp64: losses, gradients, weights."""

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
    "vocab_size": 21,
    "make_vocab_size_divisible_by": 4,
    "position_embedding_type": "rope",
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
    "mtp_num_layers": 1,
    "mtp_loss_scaling_factor": 0.7,
}
ZERO = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
DOCUMENTS = {"eod_mask_loss": True, "reset_position_ids": True, "reset_attention_mask": True}
UNTIED = {"untie_embeddings_and_output_weights": True}
LLAMA = {"normalization": "RMSNorm", "activation": "swiglu", "add_bias_linear": False, "num_query_groups": 2}
TWO = {"mtp_num_layers": 2}
PER_TOKEN = {"calculate_per_token_loss": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
BLOCK = FULL | {"recompute_method": "block", "recompute_num_layers": 1}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
SP = {"tp": 2, "sequence_parallel": True}
EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 12,
    "moe_aux_loss_coeff": (0.02,),
    "moe_z_loss_coeff": 0.01,
    "moe_layer_freq": "[0]+[1]*3",
    "sequence_parallel": True,
} | LLAMA
BIAS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
    "moe_shared_expert_intermediate_size": 8,
}


def schedule(name: str, **options: Any) -> dict[str, Any]:
    return {"pp": 2, "pipeline_schedule": name} | options


V = {"chunks": 2}
GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank, two modules, documents": (1, TWO | DOCUMENTS | LLAMA),
    "one rank, untied, dropout, per token": (1, UNTIED | DROPOUT | PER_TOKEN | TWO | {"eod_mask_loss": True}),
    "one rank, loss in chunks, norms around": (
        1,
        {"cross_entropy_chunk_size": 3, "norm_position": "around", "label_smoothing": 0.1, "z_loss": 0.01},
    ),
    "pp 2, tied, zero": (4, schedule("1f1b") | ZERO | TWO),
    "pp 4, untied, tp 2 sequence parallel": (8, schedule("1f1b", pp=4) | SP | UNTIED | DROPOUT | ZERO),
    "pp 2, tied, tp 2, without sequence parallelism": (4, schedule("gpipe", tp=2) | TWO | BLOCK),
    "pp 2, zero bubble, untied, per token": (4, schedule("zb-h1") | UNTIED | TWO | ZERO | PER_TOKEN | DOCUMENTS),
    "pp 2, zb-v, untied": (4, schedule("zb-v") | V | UNTIED | TWO | ZERO | {"ddp_bucket_size": 300}),
    "pp 2, dualpipe, untied": (4, schedule("dualpipe") | UNTIED | ZERO),
    "pp 2, dualpipe-v, tied": (4, schedule("dualpipe-v") | V | TWO | DROPOUT),
    "cp 2 of pp 2 tp 2, a2a, untied": (
        8,
        schedule("1f1b", context_parallel_size=2, seq_length=16, cp_comm_type=("a2a",)) | SP | UNTIED | PER_TOKEN,
    ),
    "experts, ep 2 of tp 2, pp 2, zero bubble": (
        4,
        schedule("zb-h1", ep=2, etp=1) | SP | EXPERTS | BIAS | ZERO | UNTIED,
    ),
    "experts, ep 2, pp 2, in parts": (
        4,
        schedule("1f1b", ep=2, overlap_moe_expert_parallel_comm=True) | EXPERTS | BIAS | UNTIED,
    ),
    "factor 0": (2, {"mtp_loss_scaling_factor": 0.0} | ZERO),
}


def differences(rank: int, world_size: int, options: dict[str, Any]) -> list[str]:
    plan = resolve(make_config(**MODEL | options), world_size)
    return plan_differences(rank, plan, [Rates(0.02, 0.1, None), Rates(0.01, 0.2, None)])


@pytest.mark.parametrize("name", GRIDS)
def test_grid_with_predictions_equals_one_process(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    world_size, options = GRIDS[name]
    assert rank_pools(world_size).run(differences, options)[0] == []
