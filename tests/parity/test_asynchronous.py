"""Streams of asynchronous schedules equal their emulation in one process, in fp64, over six steps and two drains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from megapipe.schedule.families import SCHEDULES
from tests.harness import RankPool
from tests.parity.comparison import assert_equals_reference, plan_differences
from tests.parity.grids import Options, grids
from tests.parity.options import Grid, plain_grid, world_of
from tests.tiny import make_config

SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


def stream(schedule: str, **changes: Any) -> Grid:
    return plain_grid(**{"schedule": schedule, "pp": 2, "microbatches": 3} | changes)


def alone(schedule: str, **changes: Any) -> Grid:
    """Return a schedule whose stages update at their own times, and share no weights."""
    return stream(schedule, **{"tied": False} | changes)


GRIDS = {
    "2bw_p2_momentum_tied": stream("pipedream-2bw", optimizer="sgd", documents="all", clip_grad=0.5),
    "2bw_p4_sgd": stream("pipedream-2bw", pp=4, optimizer="sgd without momentum", microbatches=4),
    "2bw_p2_dp2_adam": stream("pipedream-2bw", dp=2, bucket="some parameters", overlap_grad_reduce=True),
    "2bw_p2_tp2_dp2_zero": stream(
        "pipedream-2bw", tp=2, dp=2, use_distributed_optimizer=True, recompute="core_attn layernorm mlp", clip_grad=0.5
    ),
    "2bw_p4_ramp_per_token": stream("pipedream-2bw", pp=4, microbatches="4, 5, 6", calculate_per_token_loss=True),
    "2bw_one_rank": stream("pipedream-2bw", pp=1, clip_grad=0.5),
    "pipedream_p2_sgd": alone("pipedream", optimizer="sgd without momentum", microbatches="2, 3, 4", clip_grad=0.5),
    "pipedream_p4_adam": alone("pipedream", pp=4, microbatches=5),
    "pipedream_p2_dp2_momentum_zero": alone(
        "pipedream", dp=2, optimizer="sgd", bucket="one parameter", clip_grad=0.5, **SHARDED
    ),
    "pipedream_p2_tp2_recompute": alone(
        "pipedream", tp=2, sequence_parallel=True, recompute="uniform 1", hidden_dropout=0.2, weight_decay=0.1,
        decoupled_lr=5e-3, kv_heads="one",
    ),
    "vertical_sync_p4": alone("pipedream-vertical-sync", pp=4, microbatches=4),
    "paci_p4_clipped": alone("paci", pp=4, microbatches=4, clip_grad=0.5),
    "paci_p2_dp2_zero": alone("paci", dp=2, **SHARDED),
    "pipedream_one_rank": stream("pipedream", pp=1),
}  # fmt: skip


@pytest.mark.parametrize("name", GRIDS)
def test_grid_equals_emulation(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    assert_equals_reference(rank_pools(world_of(GRIDS[name])), GRIDS[name], steps=6, drains=(2,))


MODELS = {
    f"{kind}: {name}": grid
    for kind in ("experts", "context")
    for name, grid in grids(kind).items()
    if "pipeline_schedule" in grid[1] and not SCHEDULES[grid[1]["pipeline_schedule"]].is_synchronous
}


def differences_over_drains(rank: int, world_size: int, options: Options) -> list[str]:
    plan = resolve(make_config(**options), world_size)
    rates = [Rates(0.02 / (1 + step), 0.1, None) for step in range(6)]
    return plan_differences(rank, plan, rates, drains=(2,))


@pytest.mark.parametrize("name", MODELS)
def test_other_models_equal_emulation(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    """Also after a drain; test_grids.py has their first two steps."""
    world_size, options = MODELS[name]
    assert rank_pools(world_size).run(differences_over_drains, options)[0] == []
