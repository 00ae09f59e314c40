"""The families against the closed forms of their papers, in the domain of each form."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ConfigError
from megapipe.schedule.action import SEND_OPS, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.families import build_forward_only, build_lowered, build_schedule
from megapipe.schedule.generate.whole_backward import microbatch_groups
from megapipe.schedule.lifetimes import peak_live_chunks
from megapipe.schedule.simulate import simulate
from tests.schedule.strategies import peak_live_microbatches, placements

ranks, microbatches, chunks = st.integers(1, 8), st.integers(1, 24), st.integers(1, 4)
HALF, THIRD = 0.5, 0.75  # times of I and W that floats add exactly


def timeline_of(schedule):
    return simulate(schedule, Costs.equal(schedule.num_stages, 1.0, HALF, THIRD))


def warm_up(row):
    return next(slot for slot, action in enumerate(row) if action.op is Op.B)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(ranks, microbatches)
@settings(max_examples=30)
def test_gpipe_and_1f1b_idle_and_makespan(name, p, m):
    timeline = timeline_of(build_schedule(name, p, 1, m))
    both = 1.0 + HALF + THIRD
    assert timeline.makespan_seconds == (m + p - 1) * both
    assert max(timeline.chained_idle_seconds) == (p - 1) * both
    assert set(timeline.barrier_idle_seconds) == {(p - 1) * both}
    for bubble in (timeline.chained_bubble, timeline.barrier_bubble):
        assert bubble.share == pytest.approx((p - 1) / (m + p - 1))
        assert bubble.ratio == pytest.approx((p - 1) / m)


@given(ranks, microbatches)
@settings(max_examples=30)
def test_gpipe_and_1f1b_peaks_and_warm_up(p, m):
    assert peak_live_chunks(build_schedule("gpipe", p, 1, m)) == (m,) * p
    schedule = build_schedule("1f1b", p, 1, m)
    assert peak_live_chunks(schedule) == tuple(min(p - r, m) for r in range(p))
    assert [warm_up(row) for row in schedule.rows] == [min(p - 1 - r, m - 1) + 1 for r in range(p)]


@given(ranks, microbatches, chunks)
@settings(max_examples=60)
def test_interleaved_idle(p, m, v):
    timeline = timeline_of(build_schedule("interleaved", p, v, m))
    both = 1.0 + HALF + THIRD  # of one chunk
    idle = (p - 1) * both if m >= p else both * (p * v + m - 1 - m * v)
    assert max(timeline.chained_idle_seconds) == idle
    assert set(timeline.barrier_idle_seconds) == {idle}
    if m >= p:
        assert timeline.barrier_bubble.ratio == pytest.approx((p - 1) / (v * m))
        assert timeline.barrier_bubble.share == pytest.approx((p - 1) / (v * m + p - 1))


@given(ranks, microbatches, chunks, st.integers(0, 9))
@settings(max_examples=60)
def test_interleaved_peak_and_warm_up(p, m, v, extra):
    schedule = build_schedule("interleaved", p, v, m, p + extra)
    largest = max(map(len, microbatch_groups(m, p + extra, p)))
    warm = [min(2 * (p - r - 1) + (v - 1) * largest, v * m) for r in range(p)]
    assert [warm_up(row) for row in schedule.rows] == [min(w + 1, v * m) for w in warm]
    assert peak_live_chunks(schedule) == tuple(min(w + 1, v * m) for w in warm)
    assert peak_live_microbatches(timeline_of(schedule))[0] == min(warm[0] + 1, v * m) / v


@given(ranks, microbatches, st.integers(0, 9))
def test_groups_cover_all_microbatches_and_fold_a_small_rest(p, m, extra):
    groups = microbatch_groups(m, p + extra, p)
    assert [k for group in groups for k in group] == list(range(m))
    assert all(len(group) >= p for group in groups) or len(groups) == 1


@given(ranks, chunks, microbatches)
@settings(max_examples=30)
def test_num_messages_of_interleaved(p, v, m):
    rows = build_lowered("interleaved", p, v, m).rows
    assert sum(a.op in SEND_OPS for row in rows for a in row) == (2 * m * (p * v - 1) if p > 1 else 0)


@given(placements(), microbatches)
@settings(max_examples=30)
def test_forward_only_rows_are_valid_on_every_placement(placement, m):
    schedule = build_forward_only(placement, m)
    assert not schedule.has_backward
    assert schedule.is_lowered is any(a.op is not Op.F for row in schedule.rows for a in row)
    assert sum(a.op is Op.F for row in schedule.rows for a in row) == m * placement.num_stages
    assert max(peak_live_chunks(schedule)) == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        pytest.param(("1f1v", 2, 1, 4), "did you mean 1f1b", id="misspelt"),
        pytest.param(("zigzag!", 2, 1, 4), "choose one of naive, gpipe, 1f1b, interleaved", id="unknown"),
        pytest.param(("1f1b", 2, 2, 4), "one chunk per rank.*interleaved", id="chunks"),
        pytest.param(("1f1b", 2, 1, 4, 2), "no microbatch groups", id="group size"),
        pytest.param(("interleaved", 4, 2, 8, 3), "use 4 or more", id="small group"),
        pytest.param(("gpipe", 0, 1, 4), "0 pipeline ranks", id="no ranks"),
        pytest.param(("gpipe", 2, 1, 0), "0 microbatches", id="no microbatches"),
    ],
)
def test_impossible_requests_are_refused_with_a_remedy(arguments, complaint):
    with pytest.raises(ConfigError, match=complaint):
        build_schedule(*arguments)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved", "breadth-first"])
def test_one_rank_one_microbatch_is_a_schedule_too(name):
    assert [str(action) for action in build_schedule(name, 1, 1, 1).rows[0]] == ["0F0", "0B0"]
