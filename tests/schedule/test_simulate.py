"""The simulator: times and bubbles."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.extras.report.schedule_csv import from_csv
from megapipe.schedule.action import COMPUTE_OPS, SEND_OPS, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.dependencies import MAKES, NEEDS, ValueKind
from megapipe.schedule.families import build_lowered, build_schedule
from megapipe.schedule.lifetimes import peak_live_chunks
from megapipe.schedule.lower import lower
from megapipe.schedule.placement import v_shape
from megapipe.schedule.simulate import simulate
from megapipe.schedule.validate import validate
from tests.schedule.strategies import (
    named_schedules,
    peak_live_microbatches,
    random_schedules,
    uneven_costs,
)

schedules = st.one_of(named_schedules(), random_schedules())


def compute_times(timeline):
    """Return {action: (start, end)} of the compute actions."""
    return {
        action: (start, end)
        for row, starts, ends in zip(timeline.schedule.rows, timeline.starts, timeline.ends, strict=True)
        for action, start, end in zip(row, starts, ends, strict=True)
        if action.op in COMPUTE_OPS
    }


@given(schedules, st.integers(0, 4), st.data())
@settings(max_examples=80)
def test_lowered_schedule_takes_as_long_as_compute_only_at_zero_latency(schedule, depth, data):
    costs = data.draw(uneven_costs(schedule.num_stages))
    assert compute_times(simulate(lower(schedule, depth), costs)) == compute_times(simulate(schedule, costs))


def values(table, action):
    return [(kind, action.stage + offset, action.microbatch) for kind, offset in table[action.op]]


@given(schedules, st.data())
@settings(max_examples=40)
def test_action_starts_when_rank_is_free_and_inputs_are_there(schedule, data):
    timeline = simulate(schedule, data.draw(uneven_costs(schedule.num_stages)))
    times = compute_times(timeline)
    made_at = {value: times[action][1] for action in times for value in values(MAKES, action)}
    for m in range(schedule.num_microbatches):  # the data, and the gradient of the loss
        made_at[ValueKind.ACT, -1, m] = made_at[ValueKind.GRAD, schedule.num_stages, m] = 0.0
    for row in schedule.rows:
        free = 0.0
        for action in row:
            ready = [made_at[value] for value in values(NEEDS, action)]
            assert times[action][0] == max([free, *ready])
            free = times[action][1]


@given(schedules)
@settings(max_examples=30)
def test_latency_never_makes_a_step_faster(schedule):
    lowered = lower(schedule)
    spans = [
        simulate(lowered, Costs.equal(schedule.num_stages, latency_seconds=x)).makespan_seconds
        for x in (0.0, 0.25, 1.0)
    ]
    assert spans == sorted(spans)


def test_two_ranks_one_microbatch_by_hand():
    lowered = build_lowered("1f1b", 2, 1, 1)
    beside = simulate(lowered, Costs.equal(2, 1.0, 1.0, 1.0, transfer_seconds=0.5, latency_seconds=0.25))
    # F 1, transfer .5, latency .25, F 1, B 2, transfer and latency again, B 2
    assert beside.makespan_seconds == 1 + 0.75 + 1 + 2 + 0.75 + 2
    assert [sum(a.op in SEND_OPS for a in row) for row in lowered.rows] == [1, 1]
    assert beside.work_seconds == (3, 3)
    assert beside.barrier_idle_seconds == (4.5, 4.5)
    assert beside.chained_idle_seconds == (4.5, 0)
    assert beside.barrier_bubble.share == beside.chained_bubble.share == 4.5 / 7.5
    assert beside.barrier_bubble.ratio == 1.5


def test_a_channel_carries_one_message_after_another():
    costs = Costs.equal(2, 1.0, 1.0, 1.0, transfer_seconds=3.0)
    timeline = simulate(build_lowered("gpipe", 2, 1, 2), costs)
    starts = {str(a): s for a, s in zip(timeline.schedule.rows[1], timeline.starts[1], strict=True)}
    assert (starts["1F0"], starts["1F1"]) == (4.0, 7.0)  # computed at 1 and 2, in transfer 1..4 and 4..7


def test_without_overlap_a_rank_is_idle_while_it_sends_and_reduces():
    seconds = dict(Costs.equal(2, 1.0, 1.0, 1.0, transfer_seconds=0.5).seconds) | {
        (0, Op.REDUCE_GRAD): 4.0,
        (1, Op.REDUCE_GRAD): 4.0,
    }
    lowered = build_lowered("gpipe", 2, 1, 2)
    beside, alone = simulate(lowered, Costs(seconds)), simulate(lowered, Costs(seconds, overlap=False))
    starts = {str(a): s for a, s in zip(lowered.rows[0], alone.starts[0], strict=True)}
    assert (starts["0F0"], starts["0F1"]) == (0.0, 1.5)
    assert alone.makespan_seconds > beside.makespan_seconds
    with pytest.raises(ScheduleError, match="lower it first"):
        simulate(build_schedule("gpipe", 2, 1, 2), Costs(seconds, overlap=False))


def test_reduction_of_later_chunk_overlaps_backward_of_earlier_chunk():
    lowered = build_lowered("interleaved", 2, 2, 4)
    without = Costs.equal(4)
    costs = Costs(dict(without.seconds) | {(stage, Op.REDUCE_GRAD): 1.0 for stage in range(4)})
    assert simulate(lowered, costs).makespan_seconds == simulate(lowered, without).makespan_seconds + 1.0


def test_a_missing_cost_is_named():
    with pytest.raises(ScheduleError, match=r"stage 1, B"):
        simulate(build_schedule("1f1b", 2, 1, 2), Costs({(0, Op.F): 1, (0, Op.B): 1, (1, Op.F): 1}))


def test_peaks_of_a_split_backward_end_at_w_or_at_i():
    text = "0F0,3F0,3I0,0F1,3F1,0I0,3W0,0W0,3I1,0I1,3W1,0W1\n1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1\n"
    schedule = from_csv(text, placement=v_shape(2))
    validate(schedule)
    assert peak_live_chunks(schedule) == (4, 2)
    assert peak_live_chunks(schedule, until_input_gradient=True) == (3, 2)
    assert peak_live_microbatches(simulate(schedule, Costs.equal(4))) == (2.0, 1.0)


def test_planning_8_ranks_and_32_microbatches_takes_less_than_50_ms():
    def plan():
        start = time.process_time()
        simulate(build_lowered("interleaved", 8, 2, 32), Costs.equal(16))
        return time.process_time() - start

    assert min(plan() for _ in range(5)) < 0.05


@pytest.mark.slow
def test_64_ranks_4_chunks_and_1024_microbatches_take_the_steps_of_interleaving():
    """Require (m v + p - 1) forwards and backwards (Narayanan et al. 2021)."""
    timeline = simulate(build_lowered("interleaved", 64, 4, 1024), Costs.equal(256))
    assert timeline.makespan_seconds == (1024 * 4 + 63) * 2
