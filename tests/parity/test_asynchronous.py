"""Asynchronous schedules equal their emulation in one process, stale weights included, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import RankPool
from tests.parity.comparison import assert_equals_reference
from tests.parity.options import Grid, plain_grid, world_of

SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


def pipedream(schedule: str = "pipedream", **changes: Any) -> Grid:
    return plain_grid(**{"schedule": schedule, "tied": False, "microbatches": 5} | changes)


def twice_buffered(**changes: Any) -> Grid:
    return pipedream("pipedream-2bw", pp=changes.pop("pp", 2), **changes)


GRIDS = {
    "pipedream_p2_sgd": pipedream(pp=2, optimizer="sgd without momentum", microbatches="1, 2, 3"),
    "pipedream_p4_adam": pipedream(pp=4, microbatches=9),
    "pipedream_p2_dp2_momentum_zero": pipedream(pp=2, dp=2, optimizer="sgd", bucket="one parameter", **SHARDED),
    "pipedream_p2_tp2_recompute": pipedream(
        pp=2, tp=2, sequence_parallel=True, recompute="uniform 1", hidden_dropout=0.2, weight_decay=0.1,
        decoupled_lr=5e-3, kv_heads="one",
    ),
    "2bw_p2_momentum": twice_buffered(optimizer="sgd", documents="all"),
    "2bw_p4_sgd": twice_buffered(pp=4, optimizer="sgd without momentum", microbatches=14),
    "2bw_p2_dp2_adam": twice_buffered(dp=2, bucket="some parameters", overlap_grad_reduce=True),
    "2bw_p2_tp2_adam_zero": twice_buffered(
        tp=2, dp=2, use_distributed_optimizer=True, recompute="core_attn layernorm mlp", microbatch_group="pp + 1"
    ),
    "pipedream_one_rank": pipedream(tied=True),
}  # fmt: skip


@pytest.mark.parametrize("name", GRIDS)
def test_grid_equals_emulation(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    assert_equals_reference(rank_pools(world_of(GRIDS[name])), GRIDS[name])
