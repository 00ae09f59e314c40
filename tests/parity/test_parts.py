"""Stages that run in parts, with the all-to-alls of experts under computation, equal one process and whole stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from tests.harness import RankPool
from tests.parity.comparison import plan_differences
from tests.parity.test_experts import MODEL, SHARED, SIGMOID, ZERO
from tests.tiny import make_config

OVERLAP = {"overlap_moe_expert_parallel_comm": True}
FSDP = {"data_parallel_sharding_strategy": "optim_grads_params"}
DELAY = OVERLAP | {"delay_wgrad_compute": True}
GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp 1": (2, {"ep": 2} | DELAY | SHARED),
    "pp 2 1f1b, dropout behind a combine": (4, {"ep": 2, "pp": 2, "hidden_dropout": 0.2} | OVERLAP),
    "pp 2 1f1b, dense layers, sigmoid": (4, {"ep": 2, "pp": 2, "moe_layer_freq": "[0,1,1,0]"} | DELAY | SIGMOID),
    "pp 2 interleaved": (4, {"ep": 2, "pp": 2, "chunks": 2} | DELAY | ZERO | SHARED),
    "pp 2 1f1b, weights on inputs": (
        4,
        {"ep": 2, "pp": 2, "moe_apply_probs_on_input": True} | DELAY | SIGMOID | SHARED,
    ),
    "pp 4 dualpipe": (
        8,
        {"ep": 2, "pp": 4, "pipeline_schedule": "dualpipe", "global_batch_size": 32} | DELAY | SIGMOID,
    ),
    "pp 4 dualpipe-v, no norms before": (
        8,
        {"ep": 2, "pp": 4, "chunks": 2, "pipeline_schedule": "dualpipe-v", "num_layers": 8, "global_batch_size": 32}
        | {"norm_position": "after"}
        | DELAY
        | ZERO
        | SHARED,
    ),
    "pp 2 interleaved, weights sharded by microbatch, norms after": (
        4,
        {"ep": 2, "pp": 2, "chunks": 2, "norm_position": "after", "data_parallel_sharding_granularity": "microbatch"}
        | DELAY
        | FSDP
        | SHARED,
    ),
    "pp 2 dualpipe-v, gradients of units sharded over two instances": (
        8,
        {"ep": 2, "pp": 2, "chunks": 2, "pipeline_schedule": "dualpipe-v", "global_batch_size": 32}
        | {"data_parallel_sharding_strategy": "optim_grads", "num_distributed_optimizer_instances": 2}
        | OVERLAP,
    ),
    "tp 2, etp 2, ep 2, pp 2": (
        8,
        {"tp": 2, "ep": 2, "pp": 2, "chunks": 2, "hidden_dropout": 0.2, "recompute_granularity": "selective"}
        | {"recompute_modules": ("core_attn", "layernorm")}
        | OVERLAP
        | SHARED,
    ),
}


def differences(rank: int, world_size: int, options: dict[str, Any]) -> list[str]:
    plan = resolve(make_config(**MODEL | options), world_size)
    assert plan.parts is not None
    return plan_differences(rank, plan, [Rates(0.02, 0.1, None), Rates(0.01, 0.2, None)])


@pytest.mark.parametrize("name", GRIDS)
def test_stages_in_parts_equal_one_process(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    world_size, options = GRIDS[name]
    assert rank_pools(world_size).run(differences, options)[0] == []
