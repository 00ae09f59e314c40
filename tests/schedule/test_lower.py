"""Lowering and the head start.

The head start, the forwards that run before the validation of the previous step, receives exactly the messages that it
sends, changes no computation, and is just long enough that no rank waits for the validation.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ConfigError, ScheduleError
from megapipe.extras.report.schedule_csv import from_csv
from megapipe.schedule.action import COMPUTE_OPS, SEND_OPS, Op
from megapipe.schedule.families import build_lowered, build_schedule
from megapipe.schedule.generate.whole_backward import microbatch_groups
from megapipe.schedule.lower import lower
from megapipe.schedule.placement import two_directions, v_shape
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.validate import validate
from tests.schedule.strategies import named_schedules, random_schedules

depths = st.integers(0, 4)


def test_a_two_rank_1f1b_lowered_by_hand():
    schedule = lower(build_schedule("1f1b", 2, 1, 2), receive_depth=1)
    assert " ".join(map(str, schedule.rows[0])) == "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0REDUCE_GRAD"
    assert " ".join(map(str, schedule.rows[1])) == "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD"


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 24), st.integers(0, 9), depths)
@settings(max_examples=60)
def test_send_depth_of_interleaved_grows_with_group_size_above_p(p, v, m, extra, depth):
    report = validate(lower(build_schedule("interleaved", p, v, m, p + extra), depth))
    largest_group = max(map(len, microbatch_groups(m, p + extra, p)))
    assert report.send_depth <= max(1, largest_group - p + 1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(st.integers(1, 8), st.integers(1, 24), depths)
@settings(max_examples=20)
def test_send_depth_1_suffices_for_gpipe_and_1f1b(name, p, m, depth):
    assert validate(lower(build_schedule(name, p, 1, m), depth)).send_depth <= (1 if depth == 0 else 0)


@given(named_schedules(), depths)
@settings(max_examples=40)
def test_every_lowered_named_schedule_validates_with_bounded_receives(schedule, depth):
    report = validate(lower(schedule, depth))
    report = validate(lower(schedule, depth))
    assert max(report.most_posted.values(), default=0) <= depth + 1


@given(random_schedules(), depths)
@settings(max_examples=100)
def test_every_valid_schedule_can_be_lowered(schedule, depth):
    validate(schedule)
    lowered = lower(schedule, depth)
    validate(lowered)
    rank_of, last = schedule.placement.rank_of, schedule.num_stages - 1
    crossing = 0
    for stage, op, microbatch in (action for row in schedule.rows for action in row if action.op is not Op.W):
        user = stage + 1 if op is Op.F else stage - 1
        crossing += 0 <= user <= last and rank_of(user, microbatch) != rank_of(stage, microbatch)
    assert sum(a.op in SEND_OPS for row in lowered.rows for a in row) == crossing


@given(named_schedules(), depths)
@settings(max_examples=25)
def test_receives_are_posted_receive_depth_actions_before_their_use(schedule, depth):
    for row in lower(schedule, depth).rows:
        compute = [a for a in row if a.op in COMPUTE_OPS]
        for slot, action in enumerate(row):
            if action.op in (Op.RECV_F, Op.RECV_B):
                before = sum(a.op in COMPUTE_OPS for a in row[:slot])
                consumer = Op.F if action.op is Op.RECV_F else Op.B
                assert before == max(0, compute.index(action._replace(op=consumer)) - depth)


@given(random_schedules())
@settings(max_examples=40)
def test_reductions_come_once_a_stage_after_its_last_weight_gradient(schedule):
    for rank, row in enumerate(lower(schedule).rows):
        assert sorted(a.stage for a in row if a.op is Op.REDUCE_GRAD) == list(schedule.placement.stages_of(rank))
        for slot, action in enumerate(row):
            if action.op is Op.REDUCE_GRAD:
                assert not any(a.stage == action.stage and a.op in (Op.B, Op.W) for a in row[slot:])


def test_a_reduction_starts_before_the_backward_of_earlier_chunks():
    row = build_lowered("interleaved", 2, 2, 4).rows[0]
    first = next(slot for slot, a in enumerate(row) if a.op is Op.REDUCE_GRAD)
    assert row[first].stage == 2
    assert any(a.op is Op.B for a in row[first:])


def test_no_message_at_the_turn_of_a_v():
    text = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"
    schedule = lower(from_csv(text, placement=v_shape(2)))
    validate(schedule)
    crossing = {str(a) for row in schedule.rows for a in row if a.op in (Op.SEND_F, Op.SEND_B)}
    assert crossing == {"0SEND_F0", "2SEND_F0", "3SEND_B0", "1SEND_B0"}


def test_lowering_twice_or_with_negative_depth_is_an_error():
    schedule = build_schedule("1f1b", 2, 1, 2)
    with pytest.raises(ConfigError, match="receive depth -1"):
        lower(schedule, -1)
    with pytest.raises(ScheduleError, match="already holds messages"):
        lower(lower(schedule))


def test_two_ranks_with_a_shared_stage_reduce_in_one_order():
    # each rank finishes the stage of the other direction first, so the orders of completion are opposite
    rows = from_csv("0F0,1F1,1B1,0B0\n1F0,1B0,0F1,0B1\n", placement=two_directions(2)).rows
    lowered = lower(Schedule("two", two_directions(2), 2, rows))
    validate(lowered)
    orders = [[a.stage for a in row if a.op is Op.REDUCE_GRAD] for row in lowered.rows]
    assert orders == [[1, 0], [1, 0]]
    swapped = tuple(reversed_reductions(row) if rank else row for rank, row in enumerate(lowered.rows))
    with pytest.raises(ScheduleError, match="one order"):
        validate(Schedule("two", two_directions(2), 2, swapped))


def reversed_reductions(row):
    rest = [a for a in row if a.op is not Op.REDUCE_GRAD]
    return tuple(rest + [a for a in reversed(row) if a.op is Op.REDUCE_GRAD])
