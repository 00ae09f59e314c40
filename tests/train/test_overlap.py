"""Overlap of gradient reductions, parameter gathers and messages with computation, seen in the events of a step.

The tests compare the order of events, not times. Grid: pp 2 x 2 chunks x dp 2 with the distributed optimizer. An event
starts when its operation is launched and ends when it is known to be complete.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from megapipe.comm.trace import Event, Tracer
from megapipe.optimizer.schedule import Rates
from megapipe.schedule.action import Op, parse_action
from tests.harness import RankPool
from tests.train.grids import runtime_of, step_microbatches, trainer
from tests.train.runs import tiny

GRID = {
    "pipeline_model_parallel_size": 2,
    "num_virtual_stages_per_pipeline_rank": 2,
    "num_layers": 8,
    "use_distributed_optimizer": True,
    "ddp_bucket_size": 400,
    "global_batch_size": 16,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def two_steps(rank: int, world_size: int, overlap: bool) -> list[Event]:
    """Return the events of the second step and of the gathers at the end of the first."""
    tracer = Tracer()
    changes = GRID | {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    runtime = runtime_of(tiny(**changes), rank, world_size, tracer=tracer)
    step = trainer(runtime)
    rows = np.random.RandomState(0).randint(0, 29, (16, 9))
    step.run(step_microbatches(runtime, rows, 0), Rates(1e-2, 0.0))
    last = max(event.end_ns for event in tracer.of_kind("row"))
    step.run(step_microbatches(runtime, rows, 1), Rates(1e-2, 0.0))
    runtime.stores.finish_weights()
    return [event for event in tracer.events if event.start_ns > last]


@pytest.fixture(scope="module")
def traces(rank_pools: Callable[[int], RankPool]) -> dict[bool, list[list[Event]]]:
    """Run two steps with and without overlap and return the events of each rank."""
    return {overlap: rank_pools(4).run(two_steps, overlap) for overlap in (True, False)}


def actions(events: list[Event], *ops: Op) -> list[Event]:
    found = [event for event in events if event.kind == "action" and parse_action(event.name).op in ops]
    return sorted(found, key=lambda event: event.start_ns)


def named(events: list[Event], name: str) -> list[Event]:
    return sorted((event for event in events if event.name.startswith(name)), key=lambda event: event.start_ns)


def reductions_of_step(events: list[Event]) -> list[Event]:
    first = actions(events, Op.F)[0]
    return [event for event in named(events, "replicas reduce_scatter") if event.start_ns > first.start_ns]


def test_without_overlap_reductions_start_after_the_last_backward(traces: dict[bool, list[list[Event]]]) -> None:
    for events in traces[False]:
        last_backward = actions(events, Op.B)[-1]
        reductions = reductions_of_step(events)
        assert reductions
        assert all(event.start_ns > last_backward.end_ns for event in reductions)


def test_parameters_are_gathered_under_the_next_forwards(traces: dict[bool, list[list[Event]]]) -> None:
    for rank, events in enumerate(traces[True]):
        forwards = actions(events, Op.F)
        launched = [event for event in named(events, "replicas all_gather") if event.start_ns < forwards[0].start_ns]
        waits = named(events, "parameters of stage")
        waits = [event for event in waits if event.start_ns < forwards[-1].end_ns]
        assert len(launched) > len(waits) > 2  # all are launched before the first forward ...
        assert all(
            event.start_ns > forwards[0].start_ns for event in waits
        )  # ... and waited for only after it has begun
        stages = sorted({event.name for event in waits})
        assert len(stages) == 2
        first_of_second_stage = next(event for event in forwards if event.name.startswith(f"{2 + rank // 2}F"))
        for event in waits:  # a stage waits in its first forward, so the second waits long after the first
            is_second = event.name == stages[1]
            assert is_second == (event.start_ns > first_of_second_stage.start_ns)


def test_without_overlap_no_forward_waits_for_parameters(traces: dict[bool, list[list[Event]]]) -> None:
    for events in traces[False]:
        first, last = actions(events, Op.F)[0], actions(events, Op.F)[-1]
        assert not [
            event for event in named(events, "parameters of stage") if first.start_ns < event.start_ns < last.end_ns
        ]
