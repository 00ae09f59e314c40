"""What ranks hold over a timeline: live chunks and waiting messages."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.extras.report.curves import live_curve, peak_waiting_messages, waiting_message_curves
from megapipe.schedule.costs import Costs
from megapipe.schedule.families import build_schedule
from megapipe.schedule.lower import lower
from megapipe.schedule.simulate import simulate
from tests.schedule.strategies import family_schedules


@given(family_schedules(max_m=12))
@settings(max_examples=25)
def test_live_curve_reaches_the_peak_and_ends_at_zero(schedule):
    timeline = simulate(schedule, Costs.equal(schedule.num_stages, 1.0, 1.0, 1.0))
    for rank, peak in enumerate(timeline.peak_live_chunks):
        curve = live_curve(timeline, rank)
        assert max(count for _, count in curve) == peak
        assert curve[-1][1] == 0
        assert [time for time, _ in curve] == sorted({time for time, _ in curve})


def test_the_live_curve_of_one_rank_by_hand():
    timeline = simulate(build_schedule("zb-h1", 1, 1, 2), Costs.equal(1, 1.0, 2.0, 3.0))
    assert live_curve(timeline, 0) == [
        (0, 1),
        (6, 1),
        (12, 0),
    ]  # F I W, then the second microbatch reuses the memory of the first


@pytest.mark.parametrize("is_lowered", [False, True], ids=["compute only", "lowered"])
@pytest.mark.parametrize(("p", "m"), [(2, 6), (4, 12), (8, 32)])
def test_rank_0_of_breadth_first_holds_m_minus_p_inputs(p, m, is_lowered):
    schedule = build_schedule("breadth-first", p, 2, m)
    held = peak_waiting_messages(simulate(lower(schedule) if is_lowered else schedule, Costs.equal(2 * p)))
    assert held[0] == m - p


@given(st.integers(1, 6), st.integers(1, 12))
@settings(max_examples=15)
def test_last_rank_of_gpipe_uses_inputs_on_arrival(p, m):
    timeline = simulate(build_schedule("gpipe", p, 1, m), Costs.equal(p))
    assert peak_waiting_messages(timeline)[-1] == 0
    assert waiting_message_curves(timeline)[-1] == []


def test_a_message_waits_from_its_arrival_not_from_its_sending():
    timeline = simulate(
        build_schedule("gpipe", 2, 1, 2), Costs.equal(2, 1.0, 1.0, 1.0, transfer_seconds=0.5, latency_seconds=0.25)
    )
    # rank 1 receives inputs at 1.75 and 2.75 and starts the second at 2.75; rank 0 receives gradients at 6.5 and 8.5,
    # one at a time
    assert waiting_message_curves(timeline)[1] == []
    late = simulate(
        build_schedule("gpipe", 2, 1, 2), Costs({**Costs.equal(2).seconds, (1, timeline.schedule.rows[1][0].op): 3.0})
    )
    assert waiting_message_curves(late)[1] == [(2, 1), (4, 0)]
