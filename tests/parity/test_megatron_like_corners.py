"""Unusual grids of a 3D-parallel trainer, each against the plain reference; half precision across grids."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megapipe.assembly.microbatches import Microbatches
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import build_process_groups
from megapipe.config.config import Config
from megapipe.config.parallel import ParallelConfig
from megapipe.extras.verify.oracle import Oracle, drawn_slices, random_batches, share_of, whole_weights
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from megapipe.train.step import TrainStep
from tests.harness import RankPool
from tests.parity.comparison import assert_equals_reference
from tests.parity.configuration import configuration
from tests.parity.options import plain_grid, world_of

Pools = Callable[[int], RankPool]

SHARDED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket": "some parameters",
}
INTERLEAVED = {"chunks": 2, "schedule": "loop"}
CORNERS = {
    "fewer microbatches than interleaved stages": plain_grid(pp=4, **INTERLEAVED, microbatches=3),
    "interleaved groups longer than pp, with a remainder": plain_grid(
        pp=2, chunks=3, microbatch_group="pp + 1", microbatches=5
    ),
    "tp 2, sequence parallel, split backward, attention kept through full recompute, dropout": plain_grid(
        tp=2,
        pp=2,
        schedule="zb-h1",
        sequence_parallel=True,
        recompute="uniform 2",
        cut="even",
        hidden_dropout=0.2,
        microbatches=3,
    ),
    "tp 2, sequence parallel, split backward, recompute by a memory budget, dropout": plain_grid(
        tp=2,
        pp=2,
        schedule="zb-h1",
        sequence_parallel=True,
        recompute="budget 0.4",
        cut="even",
        hidden_dropout=0.2,
        microbatches=3,
    ),
    "embedding alone, head alone, tied, two chunks": plain_grid(
        pp=2, dp=2, **INTERLEAVED, cut="empty stages", microbatches=3, clip_grad=0.05, **SHARDED
    ),
}


@pytest.mark.parametrize("name", CORNERS)
def test_corner_equals_reference(rank_pools: Pools, name: str) -> None:
    assert_equals_reference(rank_pools(world_of(CORNERS[name])), CORNERS[name])


@pytest.mark.parametrize("per_token", [False, True], ids=["mean of microbatches", "mean of tokens"])
def test_microbatches_without_a_counted_token_equal_reference(rank_pools: Pools, per_token: bool) -> None:
    """Train a global batch 0 1 | 2 3 | 4 5 in which dp_rank 0 has no loss at all and dp_rank 1 none in its last
    microbatch."""
    grid = plain_grid(
        tp=2,
        pp=2,
        dp=2,
        microbatches=3,
        sequence_parallel=True,
        calculate_per_token_loss=per_token,
        z_loss=1e-2,
        **SHARDED,
    )
    assert_equals_reference(rank_pools(8), grid, without_loss=(0, 2, 4, 5))


def runtime_of(config: Config, rank: int, world_size: int) -> TrainingRuntime:
    plan = resolve(config, world_size)
    groups = build_process_groups(plan.topology, rank, "gloo", 60)
    return TrainingRuntime(plan, groups, torch.device("cpu"), drawn_slices(7, torch.float32))


def evaluation_and_oracle(rank: int, world_size: int, config: Config, count: int) -> tuple[float, float]:
    """Return the losses of one batch without dropout after two steps of `count` microbatches with it: grid,
    reference."""
    runtime = runtime_of(config, rank, world_size)
    oracle = Oracle(runtime.plan.config, whole_weights(runtime.plan.specs, drawn_slices(7, torch.float32)))
    batches = random_batches(runtime.plan.config, 2, [count, count, count - 1], seed=1)
    step = TrainStep(runtime)
    for number, batch in enumerate(batches[:2]):
        step.run(share_of(runtime, batch, number), Rates(0.02, 0.0))
        oracle.step(batch, number, Rates(0.02, 0.0))
    parts = [(torch.from_numpy(part.tokens), torch.from_numpy(part.labels)) for part in batches[2]]
    sums = [oracle.model(tokens, labels, torch.ones(tokens.shape))[0] for tokens, labels in parts]
    expected = torch.stack(sums).mean().item() / parts[0][0].numel()
    dp_rank = runtime.coordinates.dp_rank
    without_keys = Microbatches(count - 1, lambda k: batches[2][2 * k + dp_rank], None, runtime.device)
    return step.evaluate(without_keys).loss, expected


@pytest.mark.parametrize(
    ("schedule", "count"),
    [(INTERLEAVED, 3), ({"schedule": "dualpipe"}, 4), ({"schedule": "dualpipe-v", "chunks": 2}, 4)],
    ids=["interleaved", "two directions, more microbatches in one", "V"],
)
def test_evaluation_equals_reference_without_dropout(rank_pools: Pools, schedule: dict[str, Any], count: int) -> None:
    grid = (
        plain_grid(tp=2, pp=2, dp=2, hidden_dropout=0.2, attention_dropout=0.3, **SHARDED)
        | schedule
        | {"microbatches": count}
    )
    for loss, expected in rank_pools(8).run(evaluation_and_oracle, configuration(grid), count):
        assert loss == pytest.approx(expected, rel=1e-10)


def losses_of(rank: int, world_size: int, config: Config) -> list[float]:
    runtime = runtime_of(config, rank, world_size)
    batches = random_batches(runtime.plan.config, runtime.plan.topology.dp, [6 // runtime.plan.topology.dp] * 3, seed=1)
    return [
        TrainStep(runtime).run(share_of(runtime, batch, step), Rates(0.02, 0.1)).loss
        for step, batch in enumerate(batches)
    ]


def test_bf16_losses_of_two_grids_agree_to_rounding(rank_pools: Pools) -> None:
    """Compare two grids with tp 2, on which dropout streams depend; their global batches are the same six
    microbatches."""
    dropout = {"tp": 2, "hidden_dropout": 0.1, "attention_dropout": 0.1, "microbatches": 5}
    pipeline = plain_grid(pp=2, **INTERLEAVED, **dropout, recompute="uniform 1", cut="even")
    replicas = plain_grid(dp=2, **dropout, sequence_parallel=False, cut="layout", **SHARDED)
    pipeline_config, replicas_config = (configuration(grid, "bf16") for grid in (pipeline, replicas))
    replicas_config = dataclasses.replace(
        replicas_config, model=pipeline_config.model, parallel=without_cut(replicas_config)
    )
    one, other = (rank_pools(4).run(losses_of, config) for config in (pipeline_config, replicas_config))
    assert all(losses == one[0] for losses in one)
    assert all(losses == other[0] for losses in other)
    assert one[0][-1] < one[0][0] - 0.05  # it learns more than the tolerance
    assert one[0] == pytest.approx(other[0], rel=4e-3)  # one ulp of bf16


def without_cut(config: Config) -> ParallelConfig:
    return dataclasses.replace(config.parallel, pipeline_model_parallel_layout=None)


def scale_history(rank: int, world_size: int, config: Config, num_steps: int) -> list[tuple[bool, float, float]]:
    """Return (skipped, next loss scale, this rank's largest weight) of each step."""
    runtime = runtime_of(config, rank, world_size)
    step, found = TrainStep(runtime), []
    batches = random_batches(runtime.plan.config, runtime.plan.topology.dp, [2] * num_steps, seed=1)
    for number, batch in enumerate(batches):
        update = step.run(share_of(runtime, batch, number), Rates(0.02, 0.0)).update
        runtime.stores.finish_weights()
        largest = max(
            buffers.parameter(name).abs().max().item() for buffers in runtime.buffers.values() for name in buffers.names
        )
        found.append((update.skipped, runtime.optimizer.loss_scale, largest))
    return found


def test_fp16_ranks_skip_the_same_steps(rank_pools: Pools) -> None:
    """The scale falls from where every gradient overflows, through where only some ranks' do, to where updates are
    made."""
    config = configuration(plain_grid(tp=2, pp=2, dp=2, microbatches=2, **SHARDED), "fp16")
    precision = dataclasses.replace(config.precision, initial_loss_scale=2.0**24, hysteresis=1, loss_scale_window=2)
    histories = rank_pools(8).run(scale_history, dataclasses.replace(config, precision=precision), 16)
    decisions = [[(skipped, scale) for skipped, scale, _ in history] for history in histories]
    assert all(other == decisions[0] for other in decisions)
    assert {skipped for skipped, _ in decisions[0]} == {True, False}
    assert all(math.isfinite(largest) for history in histories for _, _, largest in history)
    rises = [after > before for (_, before), (_, after) in zip(decisions[0], decisions[0][1:], strict=False)]
    assert any(rises), "the scale never grew again"
