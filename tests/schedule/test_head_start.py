"""The head start: the forwards that run before the validation of the previous step.

It receives exactly the messages that it sends, changes no computation, and is just long enough that no rank waits for
the validation.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedule.action import RECV_OPS, Action, Op
from megapipe.schedule.families import build_schedule
from megapipe.schedule.lower import give_head_start, lower
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.simulate import Costs, simulate
from megapipe.schedule.validate import validate
from tests.schedule.strategies import family_schedules, random_schedules


@settings(max_examples=80)
@given(family_schedules() | random_schedules(), st.integers(0, 3))
def test_no_message_is_under_way_at_the_border_and_the_computation_stays(
    schedule: Schedule, receive_depth: int
) -> None:
    lowered = lower(schedule, receive_depth)
    started = give_head_start(lowered)
    assert started.schedule.compute_only() == lowered.compute_only()
    assert [sorted(map(str, row)) for row in started.schedule.rows] == [sorted(map(str, row)) for row in lowered.rows]
    validate(started.schedule)
    heads = [row[:length] for row, length in zip(started.schedule.rows, started.lengths, strict=True)]
    assert {action.op for head in heads for action in head} <= {Op.F, Op.SEND_F, Op.RECV_F}
    sent = {(action.stage + 1, action.microbatch) for head in heads for action in head if action.op is Op.SEND_F}
    received = {(action.stage, action.microbatch) for head in heads for action in head if action.op is Op.RECV_F}
    used = {(action.stage, action.microbatch) for head in heads for action in head if action.op is Op.F}
    assert sent == received
    assert received <= used
    assert all(
        stage < schedule.num_stages - 1 for stage, _ in used
    )  # the loss scale of the step is unknown before the validation


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min"])
def test_messages_that_wait_at_the_border_delay_no_rank(name: str) -> None:
    schedule = lower(build_schedule(name, 4, 2 if name in ("interleaved", "zb-v", "v-half", "v-min") else 1, 12), 1)
    started = give_head_start(schedule)
    costs = Costs.equal(schedule.num_stages, 1.0, 1.0, 1.0)
    assert simulate(started.schedule, costs).makespan_seconds == simulate(schedule, costs).makespan_seconds
    forwards = [
        sum(action.op is Op.F for action in row[:n])
        for row, n in zip(started.schedule.rows, started.lengths, strict=True)
    ]
    assert forwards == ([2, 1, 1, 0] if name == "v-min" else [3, 2, 1, 0])  # in v-min the forwards are further apart


def two_steps(schedule: Schedule) -> Schedule:
    """Combine a step and the next one without a barrier into one schedule of twice the microbatches."""
    m = schedule.num_microbatches
    later = tuple(
        tuple(Action(a.stage, a.op, a.microbatch + m) for a in row if a.microbatch is not None) for row in schedule.rows
    )
    return Schedule(
        schedule.name,
        schedule.placement,
        2 * m,
        tuple(map(lambda row, next_row: (*row, *next_row), schedule.rows, later)),
    )


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize(("name", "gained"), [("zb-h2", 1.0), ("zb-v", 0.5), ("1f1b", 0.0)])
def test_no_rank_waits_for_the_validation_and_the_step_is_shorter_by_the_barrier(
    name: str, gained: float, p: int
) -> None:
    chunks = 2 if name == "zb-v" else 1
    schedule = build_schedule(name, p, chunks, 3 * p)
    started = give_head_start(lower(schedule, 1))
    layer = 1.0 / chunks  # F, I and W of a rank are 1 each
    costs = Costs.equal(schedule.num_stages, layer, layer, layer)
    step = simulate(schedule, costs)
    both = simulate(two_steps(schedule), costs)
    rows = [sum(action.op not in RECV_OPS for action in row) for row in schedule.rows]
    verdict = max(ends[count - 1] for ends, count in zip(both.ends, rows, strict=True))
    for rank, count in enumerate(rows):
        forwards = sum(action.op is Op.F for action in started.schedule.rows[rank][: started.lengths[rank]])
        assert both.starts[rank][count + forwards] >= verdict - 1e-9  # later actions begin no earlier anyway
    assert 2 * step.makespan_seconds - both.makespan_seconds == pytest.approx(gained * (p - 1))
