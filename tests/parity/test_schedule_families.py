"""Schedules are bitwise equal to each other, and reduce gradients under what remains of a step.

That they equal the reference is shown by test_random_grids.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megapipe.comm.trace import Event, Tracer
from megapipe.optimizer.schedule import Rates
from megapipe.schedule.action import COMPUTE_OPS, Op, parse_action
from megapipe.schedule.families import SCHEDULES
from tests.harness import RankPool
from tests.parity.options import FAMILIES
from tests.train.grids import runtime_of, step_microbatches, trainer, whole_parameters
from tests.train.runs import tiny

Pools = Callable[[int], RankPool]

SPLIT, LOOPS, VS = FAMILIES["split backward"], FAMILIES["loop"], FAMILIES["V"]
NAMES = (*FAMILIES["whole backward"], *SPLIT, *LOOPS, *VS)


def test_no_family_is_left_out() -> None:
    # DualPipe, Chimera and asynchronous schedules have separate test files
    elsewhere = {name for name, family in SCHEDULES.items() if not family.is_synchronous}.union(FAMILIES["pairs"])
    assert set(NAMES) == set(SCHEDULES) - elsewhere


def weights_after(rank: int, world_size: int, changes: dict[str, Any]) -> dict[str, Tensor]:
    """Return this rank's parameters after three steps with dropout, fp32."""
    runtime = runtime_of(tiny(**changes), rank, world_size)
    step = trainer(runtime)
    rows = np.random.RandomState(0).randint(0, 29, (10, 9))
    for number in range(3):
        step.run(step_microbatches(runtime, rows, number), Rates(1e-2, 0.1))
    return {name: tensor.clone() for name, tensor in whole_parameters(runtime)}


# layers and vocabulary that make flat buffers start and end at odd positions, different on each rank
BITS = {
    "num_layers": 9,
    "ffn_hidden_size": 23,
    "global_batch_size": 10,
    "hidden_dropout": 0.2,
    "attention_dropout": 0.2,
}
IN_ORDER = {
    "one chunk": [(name, {}) for name in ("1f1b", "gpipe", "naive", "zb-h1", "zb-h2", "zb-auto")],
    "loop": [(name, {"num_virtual_stages_per_pipeline_rank": 2}) for name in LOOPS if name != "hanayo"],
    # tied, the embedding and the head of a V add to one gradient, in an order that depends on the schedule
    "V": [(name, {"untie_embeddings_and_output_weights": True}) for name in VS]
    + [("hanayo", {"untie_embeddings_and_output_weights": True, "num_virtual_stages_per_pipeline_rank": 2})],
}


@pytest.mark.parametrize("kind", IN_ORDER)
def test_schedules_that_sum_in_order_of_microbatches_agree_bitwise(rank_pools: Pools, kind: str) -> None:
    """Compare schedules that run the same stages in another order of actions: no sum is formed in another order."""
    runs = {}
    for name, changes in IN_ORDER[kind]:
        changes = BITS | changes | {"pipeline_model_parallel_size": 2, "pipeline_schedule": name}
        runs[name] = rank_pools(2).run(weights_after, changes)
    first, *others = runs
    for other in others:
        for one, another in zip(runs[first], runs[other], strict=True):
            assert one.keys() == another.keys()
            assert [name for name in one if not torch.equal(one[name], another[name])] == [], f"{other} against {first}"


def test_the_model_agrees_bitwise_over_loop_v_and_line(rank_pools: Pools) -> None:
    """Compare schedules with other stages on other ranks: without clipping only the loss is summed over ranks."""
    changes = BITS | {"pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": True, "clip_grad": 0.0}
    models = []
    for kind in ("one chunk", "loop", "V"):
        name, own = IN_ORDER[kind][-1]
        held: dict[str, Tensor] = {}
        for part in rank_pools(2).run(weights_after, changes | own | {"pipeline_schedule": name}):
            held |= part
        models.append(held)
    assert len(models[0]) > 100
    for other in models[1:]:
        assert other.keys() == models[0].keys()
        assert [name for name in other if not torch.equal(other[name], models[0][name])] == []


def events_of_a_step(rank: int, world_size: int, name: str) -> list[Event]:
    """Return the events of the second step, in which nothing is allocated for the first time."""
    tracer = Tracer()
    config = tiny(
        num_layers=8,
        pipeline_model_parallel_size=2,
        pipeline_schedule=name,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        ddp_bucket_size=400,
        global_batch_size=32,
    )
    runtime = runtime_of(config, rank, world_size, tracer=tracer)
    step = trainer(runtime)
    rows = np.random.RandomState(0).randint(0, 29, (32, 9))
    step.run(step_microbatches(runtime, rows, 0), Rates(1e-2, 0.0))
    start = tracer.now()
    step.run(step_microbatches(runtime, rows, 1), Rates(1e-2, 0.0))
    return [event for event in tracer.events if event.start_ns >= start]


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
def test_a_stage_is_reduced_under_what_remains_once_its_last_weight_gradient_is_there(
    rank_pools: Pools, name: str
) -> None:
    for events in rank_pools(4).run(events_of_a_step, name):
        actions = [(parse_action(event.name), event) for event in events if event.kind == "action"]
        last_weight = {action.stage: event for action, event in actions if action.op is Op.W}  # the last of each stage
        first, second = sorted(last_weight.values(), key=lambda event: event.end_ns)
        end = max(event.end_ns for action, event in actions if action.op in COMPUTE_OPS)
        reductions = [event for event in events if event.name.startswith("replicas reduce_scatter")]
        # nothing leaves before its sum is complete, and the first stage's leave while the other stage still computes
        assert all(event.start_ns > first.start_ns for event in reductions)
        assert sum(first.start_ns < event.start_ns < second.start_ns for event in reductions) > 2
        assert second.end_ns == end


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-auto"])
def test_a_bucket_leaves_within_the_last_weight_gradient(rank_pools: Pools, name: str) -> None:
    for events in rank_pools(4).run(events_of_a_step, name):
        last = max(
            (event for event in events if event.kind == "action" and event.name.endswith("W7")),
            key=lambda event: event.end_ns,
        )
        reductions = [event for event in events if event.name.startswith("replicas reduce_scatter")]
        assert sum(last.start_ns < event.start_ns < last.end_ns for event in reductions) > 2
        assert all(event.start_ns > last.start_ns for event in reductions)
