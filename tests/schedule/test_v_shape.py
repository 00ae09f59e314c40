"""ZB-V, V-Half and V-Min against the slots that their authors' own generators need."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedule.action import Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.families import build_schedule
from megapipe.schedule.simulate import simulate

# Slots at T_F = T_B = T_W = 1: the fewest of the three generators of sail-sg/zero-bubble-pipeline-parallelism (commit
# 39f2c18: zbv.py, zbv_greedy.py and v_auto_schedule.py, the last only up to p 6) at a peak no higher than documented.
PUBLISHED = {  # (p, m): (zb-v, v-half, v-min)
    (2, 1): (9, 9, 9),
    (2, 2): (13, 13, 13),
    (2, 4): (25, 25, 25),
    (3, 2): (16, 16, 16),
    (3, 3): (20, 23, 23),
    (3, 6): (38, 41, 41),
    (4, 3): (23, 23, 29),
    (4, 4): (27, 29, 35),
    (4, 6): (39, 41, 47),
    (4, 8): (51, 53, 59),
    (5, 3): (26, 26, 26),
    (5, 5): (34, 41, 41),
    (5, 7): (46, 53, 53),
    (5, 10): (64, 71, 71),
    (6, 4): (33, 33, 41),
    (6, 6): (41, 47, 53),
    (6, 9): (59, 65, 71),
    (6, 12): (77, 83, 89),
    (8, 8): (55, 65, 71),  # v-min by v_auto_schedule.py
    (8, 16): (103, 113, 119),
    (9, 9): (62, 82, 83),
    (9, 18): (116, 131, 137),
    (12, 12): (83, 101, 113),
    (12, 24): (155, 173, 185),
}
PEAKS = {"zb-v": lambda p: p, "v-half": lambda p: (p + 2) // 2, "v-min": lambda p: (p + 4) // 3}  # microbatches


def timeline_of(name, p, m):
    return simulate(build_schedule(name, p, 2, m), Costs.equal(2 * p, 1.0, 1.0, 1.0))


@pytest.mark.parametrize(("p", "m"), PUBLISHED)
def test_no_more_slots_than_published_at_no_higher_peak(p, m):
    for (name, peak), slots in zip(PEAKS.items(), PUBLISHED[p, m], strict=True):
        timeline = timeline_of(name, p, m)
        assert timeline.makespan_seconds <= slots, name
        assert max(timeline.peak_live_chunks) <= 2 * peak(p), name


@given(st.sampled_from(sorted(PEAKS)), st.integers(1, 12), st.integers(0, 14))
@settings(max_examples=40)
def test_idle_slots_depend_only_on_the_peak_from_two_fills_on(name, p, extra):
    timeline = timeline_of(name, p, 2 * p + extra)
    idle = 6 * p - 1 - 3 * 2 * PEAKS[name](p)
    assert set(timeline.barrier_idle_seconds) == {max(idle, p - 1)}
    assert max(timeline.peak_live_chunks) == 2 * min(PEAKS[name](p), p)


@given(st.sampled_from(sorted(PEAKS)), st.integers(2, 8), st.integers(1, 20))
@settings(max_examples=40)
def test_rows_hold_every_action_once_and_microbatches_in_order(name, p, m):
    for rank, row in enumerate(build_schedule(name, p, 2, m).rows):
        for stage in (rank, 2 * p - 1 - rank):
            for op in (Op.F, Op.I, Op.W):
                assert [a.microbatch for a in row if a[:2] == (stage, op)] == list(range(m))


@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_many_microbatches_repeat_the_middle_of_few(name):
    """Six slots a microbatch, in the order of the microbatches before."""
    few, many = build_schedule(name, 6, 2, 13), build_schedule(name, 6, 2, 40)
    for short, long in zip(few.rows, many.rows, strict=True):
        start = next(slot for slot, pair in enumerate(zip(short, long, strict=False)) if pair[0] != pair[1])
        assert start > 4 * 6
        assert [a._replace(microbatch=a.microbatch + 27) for a in short[start:]] == list(long[start + 6 * 27 :])
