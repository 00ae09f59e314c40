"""Sharded gradients and weights (ZeRO-2, ZeRO-3, HSDP) train like one process: fp64, two steps, 1e-10 a tensor.

The grids cover every possible pair of option values, schedules among them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

from megapipe.data_parallel.store import is_allocated
from megapipe.extras.inference.generate import Generator, Limits, Sampling
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from megapipe.train.step import TrainStep
from tests.harness import RankFailure, RankPool
from tests.parity.comparison import plan_differences
from tests.parity.configuration import configuration
from tests.parity.options import FAMILIES, MIRRORED, Grid, plain_grid, world_of
from tests.train.grids import runtime_of, step_microbatches
from tests.train.runs import tiny

Pools = Callable[[int], RankPool]
Choice = dict[str, Any]

ZERO1, ZERO2, ZERO3 = "optim", "optim_grads", "optim_grads_params"
SCHEDULES = tuple(name for family in FAMILIES.values() for name in family if name != "auto")
TWO_CHUNKS = (*FAMILIES["loop"], *FAMILIES["V"], "dualpipe-v")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "schedule": SCHEDULES,
    "strategy": (ZERO3, ZERO2, ZERO1),
    "granularity": ("run", "microbatch", "step"),
    "units": (2, 1, 3),
    "prefetch": (1, 0, 3),
    "instances": (1, 2),
    "dp": (2, 4, 3),
    "tp": (1, 2),
    "overlap": (True, False),
    "bucket": ("whole stage", "some parameters", "one parameter"),
    "recompute": ("none", "uniform 1", "core_attn mlp", "core_attn layernorm activation"),
    "tied": (True, False),
    "kv_heads": ("all", "one"),
    "optimizer": ("adam", "sgd"),
    "microbatches": (8, "1, 2, 3"),
}
NUM_GRIDS = 61


def holds(choice: Choice) -> bool:
    """Return False if no grid has these values of some options."""
    get = choice.get
    mirrored = get("schedule") in MIRRORED
    pairs = get("schedule") in FAMILIES["pairs"]
    return not (
        (get("strategy", ZERO3) != ZERO3 and get("prefetch", 1) != 1)
        or (get("strategy") == ZERO1 and (get("units", 1) != 1 or get("granularity", "run") != "run"))
        or (get("instances") == 2 and get("dp") == 3 and not mirrored)
        or get("dp", 1) * get("tp", 1) > 4
        or (mirrored and get("strategy") == ZERO3 and get("tied", False))
        or (pairs and get("microbatches", 8) != 8)
    )


@functools.cache
def grids() -> tuple[Choice, ...]:
    """Return grids that together have every possible pair of values, chosen greedily."""
    random = Random(3)
    values = [(name, value) for name, each in OPTIONS.items() for value in each]
    wanted = {pair for pair in itertools.combinations(values, 2) if pair[0][0] != pair[1][0] and _fits(dict(pair))}
    found: list[Choice] = []
    while wanted:
        candidates = [_completed(dict(min(wanted, key=repr)), random, wanted) for _ in range(12)]
        best = max(candidates, key=lambda choice: len(wanted.intersection(_pairs(choice))))
        wanted.difference_update(_pairs(best))
        found.append(best)
    return tuple(found)


def _pairs(choice: Choice) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    return itertools.combinations([(name, choice[name]) for name in OPTIONS], 2)


def _gain(one: tuple[str, Any], choice: Choice, wanted: set[Any]) -> int:
    return sum((one, other) in wanted or (other, one) in wanted for other in choice.items())


def _completed(choice: Choice, random: Random, wanted: set[Any]) -> Choice:
    for name in random.sample(list(OPTIONS), len(OPTIONS)):
        if name not in choice:
            fitting = [value for value in OPTIONS[name] if _fits(choice | {name: value})]
            random.shuffle(fitting)
            choice = choice | {name: max(fitting, key=lambda value: _gain((name, value), choice, wanted))}
    return choice


def _fits(choice: Choice) -> bool:
    """Return True if the values can be completed to a whole grid: options not chosen yet take their first value or a
    value that the rules allow."""
    if not holds(choice):
        return False
    constrained = ("strategy", "dp", "schedule", "tied")
    missing = [name for name in constrained if name not in choice]
    return any(
        holds(choice | dict(zip(missing, values, strict=True)))
        for values in itertools.product(*(OPTIONS[name] for name in missing))
    )


def grid_of(choice: Choice) -> tuple[Grid, dict[str, Any]]:
    """Return the grid, and what its configuration has besides."""
    same = ("schedule", "dp", "tp", "bucket", "recompute", "tied", "kv_heads", "optimizer", "microbatches")
    grid = plain_grid(
        **{name: choice[name] for name in same},
        pp=2,
        chunks=2 if choice["schedule"] in TWO_CHUNKS else 1,
        sequence_parallel=choice["tp"] > 1,
        overlap_grad_reduce=choice["overlap"],
        overlap_param_gather=choice["overlap"],
        use_distributed_optimizer=True,
        clip_grad=0.05,
        weight_decay=0.1,
        qk_layernorm=True,
    )
    sharding = {f"data_parallel_sharding_{name}": choice[name] for name in ("strategy", "granularity", "units")}
    sharding |= {"data_parallel_sharding_prefetch": choice["prefetch"]}
    return grid, sharding | {"num_distributed_optimizer_instances": choice["instances"]}


def differences(
    rank: int, world_size: int, grid: Grid, sharding: dict[str, Any], steps: int, chunk: int | None = None
) -> list[str]:
    """Return a line for each loss, norm, gradient and weight that differs; run by all ranks. chunk: of the loss."""
    config = configuration(grid)
    training = dataclasses.replace(config.training, cross_entropy_chunk_size=chunk)
    config = dataclasses.replace(config, training=training, parallel=dataclasses.replace(config.parallel, **sharding))
    rates = [Rates(lr, grid["weight_decay"] * decay, grid["decoupled_lr"]) for lr, decay in ((0.02, 1), (0.01, 2))]
    return plan_differences(rank, resolve(config, world_size), [*rates, rates[0]][:steps])


@pytest.mark.parametrize("number", range(NUM_GRIDS), ids="{:02}".format)
def test_sharded_grid_equals_one_process(rank_pools: Pools, number: int) -> None:
    grid, sharding = grid_of(grids()[number])
    steps = 3 if grid["microbatches"] == "1, 2, 3" else 2
    try:
        wrong = rank_pools(world_of(grid)).run(differences, grid, sharding, steps)[0]
    except RankFailure as failure:
        wrong = [failure.report]
    assert not wrong, f"{len(wrong)} differences. The grid:\n\n    {grid}\n\n    {sharding}\n\n" + "\n".join(wrong)


@pytest.mark.parametrize("granularity", ["run", "microbatch"])
@pytest.mark.parametrize("recompute", ["none", "core_attn layernorm activation"], ids=["chunks", "chunks and norms"])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zb-auto", "zb-v", "dualpipe"])
def test_weight_gradients_that_read_weights_equal_one_process(
    rank_pools: Pools, schedule: str, recompute: str, granularity: str
) -> None:
    """W computes the logits of a chunked loss again, and recomputed norms, from weights that are gathered for it."""
    grid = plain_grid(
        schedule=schedule,
        dp=2,
        pp=2,
        chunks=2 if schedule in TWO_CHUNKS else 1,
        microbatches=8,
        recompute=recompute,
        tied=False,
        use_distributed_optimizer=True,
    )
    sharding = {"data_parallel_sharding_strategy": ZERO3, "data_parallel_sharding_granularity": granularity}
    sharding |= {"data_parallel_sharding_units": 2 if granularity == "run" else 1}
    assert not rank_pools(world_of(grid)).run(differences, grid, sharding, 2, 5)[0]


@pytest.mark.parametrize("schedule", ["breadth-first", "interleaved"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_chunks_of_a_single_pipeline_rank_equal_one_process(rank_pools: Pools, schedule: str, tied: bool) -> None:
    """Without a pipeline, chunks are gathered one by one: breadth-first twice a step (Lamy-Poirier 2022)."""
    grid = plain_grid(schedule="1f1b", dp=2, pp=1, tied=tied, use_distributed_optimizer=True, weight_decay=0.1)
    chunks = {"pipeline_schedule": schedule, "num_virtual_stages_per_pipeline_rank": 2}
    strategy = {"data_parallel_sharding_strategy": ZERO3}
    assert not rank_pools(2).run(differences, grid, chunks | strategy, 2)[0]


@pytest.mark.parametrize("strategy", [ZERO2, ZERO3])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_offloaded_activations_with_shards_equal_one_process(rank_pools: Pools, strategy: str, schedule: str) -> None:
    chunks = 2 if schedule in TWO_CHUNKS else 1
    grid = plain_grid(schedule=schedule, dp=2, pp=2, chunks=chunks, tied=False, use_distributed_optimizer=True)
    grid |= {"micro_batch_size": 2}  # these grids offload larger ones
    assert not rank_pools(4).run(differences, grid, {"data_parallel_sharding_strategy": strategy}, 2)[0]


def test_every_pair_of_values_occurs() -> None:
    assert len(grids()) == NUM_GRIDS
    seen = {pair for choice in grids() for pair in _pairs(choice)}
    values = [(name, value) for name, each in OPTIONS.items() for value in each]
    order = list(OPTIONS)
    for one, other in itertools.combinations(values, 2):
        assert order.index(one[0]) <= order.index(other[0])
        assert one[0] == other[0] or (one, other) in seen or not _fits({one[0]: one[1], other[0]: other[1]})
    assert all(holds(choice) for choice in grids())


def evaluated(rank: int, world_size: int, changes: dict[str, Any]) -> tuple[float, float, list[list[int]], bool]:
    """Train a step, evaluate and generate; return losses and texts, and whether weights are whole afterwards."""
    runtime = runtime_of(tiny(**changes), rank, world_size)
    step, rows = TrainStep(runtime), np.random.RandomState(0).randint(0, 29, (8, 9))
    trained = step.run(step_microbatches(runtime, rows, 0), Rates(1e-2, 0.1)).loss
    loss = step.evaluate(step_microbatches(runtime, rows, 1)).loss
    texts = Generator(runtime, Sampling(temperature=0.0)).continue_prompts([[1, 2, 3], [4, 5]], Limits(4))
    flat = [buffer for held in runtime.buffers.values() for buffer in held.buffers]
    return trained, loss, texts, any(is_allocated(buffer.parameters) for buffer in flat)


def test_evaluation_and_generation_gather_and_free(rank_pools: Pools) -> None:
    pp2 = {"pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": True}
    sharding = {"data_parallel_sharding_strategy": ZERO3, "data_parallel_sharding_units": 2}
    *losses, texts, is_whole = rank_pools(4).run(evaluated, pp2 | {"data_parallel_sharding_strategy": ZERO1})[0]
    assert is_whole
    for *found, found_texts, is_still_whole in rank_pools(4).run(evaluated, pp2 | sharding):
        assert found == pytest.approx(losses, rel=1e-6)  # other buckets are summed in another order, in fp32
        assert found_texts == texts and not is_still_whole
