"""Training with offloaded activations gives the same bits and uses memory in the planned amount and order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.assembly.microbatches import Keys
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import ProcessGroups, build_process_groups
from megapipe.gpu.streams import HostPool
from megapipe.model.microbatch import Microbatch
from megapipe.optimizer.schedule import Rates
from megapipe.plan.memory import rank_memory
from megapipe.train.stream import train_step
from tests.assembly.plans import grids, make_plan
from tests.harness import RankPool
from tests.pipeline.late_copies import LateCopies

PLAIN = {"cpu_offloading_num_layers": 0, "min_offloaded_tensor_size": 1048576}
# without clipping: the norm of gradients is summed in another order over more stages
OFFLOAD = {"cpu_offloading_num_layers": 4, "min_offloaded_tensor_size": 1, "device": "cpu", "clip_grad": 0.0}
ONE_RANK, TWO_RANKS = (
    {name: changes for name, (ranks, changes) in grids("offload").items() if ranks == number} for number in (1, 2)
)


def trained(
    rank: int, world_size: int, changes: dict[str, Any], late: bool = False, steps: int = 2
) -> tuple[list[Tensor], int, list[Any]]:
    """Train for some steps; return the parameters, the bytes of host buffers, and the log of stream operations.

    late: complete copies as late as the streams allow.
    """
    plan = make_plan(world_size, "fp64", **changes)
    groups = ProcessGroups.alone() if world_size == 1 else build_process_groups(plan.topology, rank, "gloo", 30)
    runtime = TrainingRuntime(plan, groups, torch.device("cpu"))
    copies = LateCopies()
    if late:
        assert runtime.offload is not None
        runtime.offload.copies, runtime.offload.pool = copies, HostPool(copies.host_memory)
    step, count = train_step(runtime), plan.batch.full // plan.batch.samples_per_microbatch
    generator = torch.Generator().manual_seed(0)
    documents = plan.config.data.reset_attention_mask
    for number in range(steps):
        keys = Keys(1, number, runtime.coordinates.dp_rank, plan.topology.dp)
        tokens = [torch.randint(28, (2, 8), generator=generator) for _ in range(count)]
        ids = torch.tensor([[0] * 3 + [1] * 5, [0] * 6 + [1] * 2]) if documents else None
        at = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]]) if documents else None
        step.run(
            [Microbatch(each, each.clone(), None, at, ids, keys.of(k)) for k, each in enumerate(tokens)],
            Rates(1e-2, 0.0),
        )
    runtime.stores.finish_weights()
    if runtime.offload is not None:
        assert not runtime.offload._carried
        assert not runtime.offload._coming
    parameters = [tensor.clone() for _, module in sorted(runtime.stages.items()) for tensor in module.parameters()]
    return parameters, 0 if runtime.offload is None else runtime.offload.pool.num_bytes, copies.cuda.log


@pytest.mark.parametrize("name", ONE_RANK)
def test_one_rank_trains_to_the_same_bits_in_the_planned_host_memory(name: str) -> None:
    changes = OFFLOAD | ONE_RANK[name]
    (expected, _, _), (actual, num_bytes, log) = (
        trained(0, 1, changes | PLAIN),
        trained(0, 1, changes, late=True),
    )
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert num_bytes == rank_memory(make_plan(1, "fp64", **changes), 0).host["activations"] > 0
    assert {("out", "copies", ""), ("in", "copies", ""), ("compute", "waits for", "in")} <= set(log)


SLOW = ("1f1b", "interleaved")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in TWO_RANKS]
)
def test_ranks_of_a_grid_train_to_the_same_bits(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    changes, pool = OFFLOAD | TWO_RANKS[name], rank_pools(2)
    plan = make_plan(2, "fp64", **changes)
    expected, actual = pool.run(trained, changes | PLAIN), pool.run(trained, changes, True)
    for rank, ((weights, num_bytes, _), (without, _, _)) in enumerate(zip(actual, expected, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(weights, without, strict=True))
        assert num_bytes == rank_memory(plan, plan.topology.coordinates(rank).pp_rank).host["activations"]
