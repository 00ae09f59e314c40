"""Grids equal one process, in fp64 and in their own dtypes, with features that the ledger does not combine.

tests/test_ledger.py compares its combinations in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.extras.verify.grids import compared
from tests.harness import RankPool
from tests.tiny import LLAMA, tiny_config

GPT2 = {"hidden_dropout": 0.1, "attention_dropout": 0.2, "seq_length": 16}
WIDE = {
    "tp": 2,
    "pp": 2,
    "sp": True,
    "zero": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "num_layers": 4,
}
OVERLAP = {"tp_comm_overlap": True, "tp_comm_overlap_chunks": 3}
NARROW = {
    "dtype": "bf16",
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": "bf16",
    "exp_avg_dtype": "bf16",
}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "gpt2-interleaved": (
        8,
        "fp64",
        GPT2
        | WIDE
        | {"chunks": 2, "global_batch_size": 6, "qk_layernorm": True, "num_query_groups": 1, "eod_mask_loss": True},
    ),
    "ring of three": (3, "native", LLAMA | {"context_parallel_size": 3, "window_size": 5, "seq_length": 24}),
    "two directions": (
        8,
        "fp64",
        GPT2
        | WIDE
        | OVERLAP
        | {
            "pipeline_schedule": "dualpipe",
            "global_batch_size": 12,
            "calculate_per_token_loss": True,
            "eod_mask_loss": True,
        },
    ),
    "llama-documents": (
        4,
        "fp64",
        LLAMA
        | OVERLAP
        | {
            "tp": 4,
            "rope_scaling_type": "llama3",
            "window_size": 5,
            "reset_position_ids": True,
            "reset_attention_mask": True,
        }
        | {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "optimizer": "sgd",
        },
    ),
    "layers that differ": (
        4,
        "fp64",
        LLAMA
        | OVERLAP
        | {"tp": 2, "pp": 2, "sp": True, "num_layers": 6, "num_query_groups": 1, "hidden_dropout": 0.1}
        | {"norm_position": "around", "qk_layernorm": True, "qk_layernorm_scope": "projection", "embedding_scale": 5.65}
        | {"layer_pattern": ("2 window_size=3 rotary_base=100", "1 attention=none ffn_hidden_size=64", "...")}
        | {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")},
    ),
    "experts": (
        4,
        "fp64",
        LLAMA
        | {"tp": 2, "ep": 4, "etp": 1, "sp": True, "zero": True, "num_layers": 6, "moe_layer_freq": "[0]*2+[1]*4"}
        | {"num_experts": 8, "moe_ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": 16}
        | {"moe_aux_loss_coeff": (0.1,), "moe_router_dtype": "fp32", "moe_router_score_function": "sigmoid"}
        | {"moe_router_load_balancing_type": ("global_aux_loss",), "moe_router_enable_expert_bias": True}
        | {"moe_expert_capacity_factor": 1.0},
    ),
    "muon": (
        4,
        "fp64",
        LLAMA
        | {"tp": 4, "sp": True, "num_query_groups": 2, "optimizer": "muon", "muon_tp_mode": "distributed"}
        | {"attention_output_gate": True, "muon_nesterov": True, "muon_scale_mode": "unit_rms_norm"},
    ),
    "many norms after branches": (1, "fp64", LLAMA | {"norm_position": "after", "num_layers": 24}),
    "bf16, norms around branches": (1, "native", LLAMA | {"norm_position": "around", "num_layers": 6, "dtype": "bf16"}),
    "every loss term": (
        2,
        "fp64",
        {
            "pp": 2,
            "position_embedding_type": "none",
            "qk_layernorm": True,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        }
        | {
            "label_smoothing": 0.1,
            "z_loss": 1e-2,
            "calculate_per_token_loss": True,
            "eod_mask_loss": True,
            "activation": "squared_relu",
        }
        | {"rampup_batch_size": (2, 3, 8), "train_iters": None, "train_samples": 99, "decoupled_lr": 1e-2}
        | {"start_weight_decay": 0.0, "end_weight_decay": 0.1, "weight_decay_incr_style": "linear"},
    ),
    "bf16": (
        4,
        "native",
        LLAMA | {"tp": 2, "dtype": "bf16", "zero": True, "qk_layernorm": True, "grad_reduce_in_bf16": True},
    ),
    "bf16 with narrow state": (2, "native", NARROW | {"pp": 2, "zero": True, "exp_avg_sq_dtype": "bf16"}),
    "narrow state in fp64": (2, "fp64", NARROW | {"tp": 2}),
    "fp16": (2, "native", {"pp": 2, "dtype": "fp16", "hidden_dropout": 0.1}),
    "fp32": (
        4,
        "native",
        GPT2 | {"tp": 2, "sp": True, "pp": 2, "position_embedding_type": "none", "qk_layernorm": True},
    ),
    "one rank": (1, "fp64", GPT2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_grid_equals_one_process(case: str, rank_pools: Callable[[int], RankPool]) -> None:
    world, mode, options = CASES[case]
    steps, report = rank_pools(world).run(compared, tiny_config(**options), mode)[0]
    assert len(steps) == 3 and all(step.passes for step in steps), report
    if mode == "fp64":
        worst = max(
            rank.gradients.worst.ratio for step in steps for rank in step.ranks if rank.gradients.worst is not None
        )
        assert worst < 1e-11 or case == "every loss term", "the tolerance has a margin"
