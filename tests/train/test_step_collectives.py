"""The numbers at the end of a step are one message: loss, tokens, gradient norm and number of zeros, over the world.

They were three (loss over the world, norm over the replicas' shards and then over the model), or two without sharding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megapipe.comm.trace import Tracer
from megapipe.optimizer.schedule import Rates
from megapipe.train.stream import train_step
from tests.harness import RankPool
from tests.train.grids import runtime_of, step_microbatches
from tests.train.runs import tiny

PP2 = {"pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
UNTIED = {"untie_embeddings_and_output_weights": True}
PER_TOKEN = {"calculate_per_token_loss": True}
GRIDS: dict[str, dict[str, Any]] = {
    "pp2_dp2": PP2,
    "pp2_dp2_zero1": PP2 | {"use_distributed_optimizer": True},
    "tp2_dp2_per_token": TP2 | PER_TOKEN,
    "pp2_dp2_dualpipe": PP2 | {"pipeline_schedule": "dualpipe"},
    "pp2_dp2_pipedream": PP2 | {"pipeline_schedule": "pipedream", "clip_grad": 0.0},
    "pp2_tp2": PP2 | TP2,
}


def sums_of_a_step(rank: int, world_size: int, changes: dict[str, Any]) -> tuple[dict[str, int], float, float, int]:
    """Return the all-reduces of the second step by group, and its loss, norm and number of zeros."""
    tracer, rows = Tracer(), np.random.RandomState(0).randint(0, 29, (16, 9))
    config = tiny(**changes, global_batch_size=16, log_num_zeros_in_grad=True)
    runtime = runtime_of(config, rank, world_size, tracer=tracer)
    step, results = train_step(runtime), []
    for number in range(2):
        tracer.events.clear()
        results.append(step.run(step_microbatches(runtime, rows, number), Rates(1e-2, 0.0)))
        runtime.stores.finish_weights()
    result = results[-1]
    assert result.update.num_zeros is not None
    found = Counter(event.name for event in tracer.events if event.kind == "collective" and "all_reduce" in event.name)
    return dict(found), result.loss, result.update.grad_norm, result.update.num_zeros


@pytest.mark.parametrize("grid", GRIDS)
def test_the_numbers_of_a_step_are_one_message(grid: str, rank_pools: Callable[[int], RankPool]) -> None:
    found = rank_pools(4).run(sums_of_a_step, UNTIED | GRIDS[grid])
    for collectives, *_ in found:
        assert collectives["world all_reduce"] == 1
        assert not {"model all_reduce", "dp_cp all_reduce"} & set(collectives)
    assert len({numbers for _, *rest in found for numbers in [tuple(rest)]}) == 1  # the same bits on every rank
