"""Asynchronous schedules equal their emulation in one process, stale weights included, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import RankPool
from tests.parity.comparison import assert_equals_reference
from tests.parity.options import plain_grid

PLAIN = {"tied": False, "microbatches": 5}
GRIDS: dict[str, dict[str, Any]] = {
    "pipedream_p2_sgd": {
        "schedule": "pipedream",
        "pp": 2,
        "optimizer": "sgd without momentum",
        "microbatches": "1, 2, 3",
    },
    "pipedream_p4_adam": {"schedule": "pipedream", "pp": 4, "microbatches": 9},
    "pipedream_p2_dp2_momentum_zero": {
        "schedule": "pipedream",
        "pp": 2,
        "dp": 2,
        "optimizer": "sgd",
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket": "one parameter",
    },
    "pipedream_p2_tp2_recompute": {
        "schedule": "pipedream",
        "pp": 2,
        "tp": 2,
        "sequence_parallel": True,
        "recompute": "uniform 1",
        "hidden_dropout": 0.2,
        "weight_decay": 0.1,
        "decoupled_lr": 5e-3,
        "kv_heads": "one",
    },
    "2bw_p2_momentum": {"schedule": "pipedream-2bw", "pp": 2, "optimizer": "sgd", "documents": "all"},
    "2bw_p4_sgd": {"schedule": "pipedream-2bw", "pp": 4, "optimizer": "sgd without momentum", "microbatches": 14},
    "2bw_p2_dp2_adam": {
        "schedule": "pipedream-2bw",
        "pp": 2,
        "dp": 2,
        "bucket": "some parameters",
        "overlap_grad_reduce": True,
    },
    "2bw_p2_tp2_adam_zero": {
        "schedule": "pipedream-2bw",
        "pp": 2,
        "tp": 2,
        "dp": 2,
        "use_distributed_optimizer": True,
        "recompute": "core_attn layernorm mlp",
        "microbatch_group": "pp + 1",
    },
    "pipedream_one_rank": {"schedule": "pipedream", "tied": True},
}


@pytest.mark.parametrize("name", GRIDS)
def test_grid_equals_emulation(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    grid = plain_grid(**PLAIN | GRIDS[name])
    assert_equals_reference(rank_pools(grid["tp"] * grid["pp"] * grid["dp"]), grid)
