"""Whole weights and gradients that exist at every action of a row are those that the plan says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import build_process_groups
from megapipe.data_parallel.store import is_allocated
from megapipe.extras.verify.oracle import drawn_slices, random_batches, share_of
from megapipe.plan.resolve import resolve
from megapipe.plan.sharded import row_bytes
from megapipe.train.step import TrainStep
from tests.harness import RankPool
from tests.tiny import tiny_config

ZERO3 = "optim_grads_params"
CASES: dict[str, dict[str, Any]] = {
    "1f1b in units": {"data_parallel_sharding_units": 2},
    "prefetch 3": {"data_parallel_sharding_units": 4, "data_parallel_sharding_prefetch": 3},
    "breadth-first": {"pipeline_schedule": "breadth-first", "chunks": 2},
    "interleaved by microbatch": {"chunks": 2, "data_parallel_sharding_granularity": "microbatch"},
    "zb-h1 in units": {"pipeline_schedule": "zb-h1", "data_parallel_sharding_units": 2},
    "zb-v, tied": {"pipeline_schedule": "zb-v", "untie_embeddings_and_output_weights": False},
    "gradients alone": {
        "data_parallel_sharding_strategy": "optim_grads",
        "data_parallel_sharding_granularity": "microbatch",
    },
    "experts with two copies": {"ep": 1, "num_experts": 4, "moe_ffn_hidden_size": 16, "chunks": 2},
    "experts with one copy": {"ep": 2, "num_experts": 4, "moe_ffn_hidden_size": 16, "data_parallel_sharding_units": 2},
    "once a step": {"data_parallel_sharding_granularity": "step"},
}


class Recorder:
    """Stands in for the heartbeat: notes what is whole before each action, and at the end."""

    def __init__(self, runtime: TrainingRuntime) -> None:
        self._runtime = runtime
        self.levels: list[tuple[int, int]] = []

    def act(self, word: bytes) -> None:
        buffers = [buffer for held in self._runtime.buffers.values() for buffer in held.buffers]
        weights = [each.parameters for each in buffers if each.level == 3]
        gradients = [each.gradients for each in buffers if each.level >= 2]
        whole = (sum(each.nbytes for each in tensors if is_allocated(each)) for tensors in (weights, gradients))
        self.levels.append(tuple(whole))  # type: ignore[arg-type]


def counted_and_planned(rank: int, world_size: int, options: dict[str, Any]) -> tuple[Any, Any]:
    config = tiny_config(**{"num_layers": 8, "pp": 2, "untie_embeddings_and_output_weights": True, **options})
    plan = resolve(config, world_size)
    groups = build_process_groups(plan.topology, rank, "gloo", 60)
    runtime = TrainingRuntime(plan, groups, torch.device("cpu"), drawn_slices(1, torch.float32))
    count, pp_rank = plan.batch.num_microbatches, runtime.coordinates.pp_rank
    recorder = Recorder(runtime)
    runtime.engine(count)._heartbeat = recorder  # type: ignore[assignment]
    (batch,) = random_batches(plan.config, plan.topology.dp, [count], seed=1)
    TrainStep(runtime).gradients(share_of(runtime, batch, 0))
    planned = row_bytes(plan, pp_rank, plan.schedule(count).rows[pp_rank]).whole
    return recorder.levels, [(0, 0), *map(tuple, planned)]


@pytest.mark.parametrize("name", CASES)
def test_whole_tensors_at_every_action_are_planned(rank_pools: Callable[[int], RankPool], name: str) -> None:
    options = {"data_parallel_sharding_strategy": ZERO3, "overlap_grad_reduce": True, **CASES[name]}
    for counted, planned in rank_pools(4).run(counted_and_planned, options):
        assert counted == planned
        assert max(gradients for _, gradients in planned) > 0
