"""Both copies of every parameter of DualPipe are bitwise equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.collectives import gather_objects
from megapipe.comm.groups import build_process_groups
from megapipe.config.config import Config
from megapipe.extras.verify.oracle import drawn_slices, random_batches, share_of
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from megapipe.train.step import TrainStep
from tests.harness import RankPool
from tests.parity.configuration import configuration
from tests.parity.options import Grid, plain_grid

Pools = Callable[[int], RankPool]

SHARDED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket": "some parameters",
}


def two_ways(microbatches: int, **changes: Any) -> Grid:
    return plain_grid(**changes) | {"schedule": "dualpipe", "microbatches": microbatches}


def different_copies(rank: int, world_size: int, config: Config) -> list[str]:
    """Train two steps and return the names of the parameters whose copies on two ranks differ in a bit."""
    plan = resolve(config, world_size)
    runtime = TrainingRuntime(
        plan, build_process_groups(plan.topology, rank, "gloo", 60), torch.device("cpu"), drawn_slices(7, torch.float32)
    )
    step, dp = TrainStep(runtime), plan.topology.dp
    for number, batch in enumerate(random_batches(plan.config, dp, [4, 4], seed=1)):
        step.run(share_of(runtime, batch, number), Rates(0.02, 0.1))
    runtime.stores.finish_weights()
    mine = {
        (stage, name): bits(buffers.parameter(name))
        for stage, buffers in runtime.buffers.items()
        for name in buffers.names
    }
    every = gather_objects(mine, runtime.groups.replicas)
    assert len(every) == 2 * dp and all(other.keys() == mine.keys() for other in every)
    return [
        f"stage {stage} {name}"
        for other in every
        for (stage, name), found in other.items()
        if found != mine[stage, name]
    ]


def bits(parameter: torch.Tensor) -> bytes:
    return parameter.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated optimizer", "distributed optimizer"])
def test_both_copies_of_every_parameter_are_bitwise_equal_after_updates(
    rank_pools: Pools, dtype: str, sharded: bool
) -> None:
    config = configuration(two_ways(4, pp=2, dp=2, hidden_dropout=0.1, **(SHARDED if sharded else {})), dtype)
    assert rank_pools(4).run(different_copies, config) == [[]] * 4
