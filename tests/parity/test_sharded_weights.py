"""Sharded gradients and weights (ZeRO-2, ZeRO-3, HSDP) train like one process, under every schedule: fp64, 1e-10."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from tests.harness import RankFailure, RankPool
from tests.parity.comparison import plan_differences
from tests.parity.configuration import configuration
from tests.parity.options import Grid, plain_grid, world_of

Pools = Callable[[int], RankPool]

ZERO2, ZERO3 = "optim_grads", "optim_grads_params"
OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


def differences(rank: int, world_size: int, grid: Grid, sharding: dict[str, Any]) -> list[str]:
    """Return a line for each loss, norm, gradient and weight of two steps that differs; run by all ranks."""
    config = configuration(grid)
    names = {"data_parallel_sharding_" + name: value for name, value in sharding.items() if name != "instances"} | {
        "num_distributed_optimizer_instances": sharding.get("instances", 1)
    }
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **names))
    rates = [Rates(lr, grid["weight_decay"] * decay, grid["decoupled_lr"]) for lr, decay in ((0.02, 1), (0.01, 2))]
    return plan_differences(rank, resolve(config, world_size), rates)


def assert_equals_reference(pool: RankPool, grid: Grid, sharding: dict[str, Any]) -> None:
    try:
        wrong = pool.run(differences, grid, sharding)[0]
    except RankFailure as failure:
        wrong = [failure.report]
    assert not wrong, f"{len(wrong)} differences. The grid:\n\n    {grid}\n\n{sharding}\n\n" + "\n".join(wrong)


@pytest.mark.parametrize("units", [1, 2])
@pytest.mark.parametrize("strategy", [ZERO2, ZERO3])
@pytest.mark.parametrize("granularity", ["microbatch", "run", "step"])
def test_try(rank_pools: Pools, strategy: str, granularity: str, units: int) -> None:
    grid = plain_grid(dp=2, pp=2, microbatches=5, cut="even", **OVERLAP)
    assert_equals_reference(
        rank_pools(world_of(grid)), grid, {"strategy": strategy, "granularity": granularity, "units": units}
    )
