"""Streams of asynchronous schedules: what a rank does does not depend on the number of steps, ranks never idle, and the
versions of the weights follow the published formulas.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ConfigError, ScheduleError
from megapipe.schedule.action import COMPUTE_OPS, Action, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.families import SCHEDULES, build_lowered, build_schedule, build_stream
from megapipe.schedule.lifetimes import peak_live_chunks
from megapipe.schedule.lower import lower
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.stream import STRETCH, Stream, Versions, WeightVersions, one_step_old, steady, weight_versions
from megapipe.schedule.validate import validate

ASYNCHRONOUS = [name for name, family in SCHEDULES.items() if not family.is_synchronous]
NAMES = st.sampled_from(ASYNCHRONOUS)
RANKS = st.integers(1, 8)
MORE = st.integers(0, 9)  # microbatches of a step above the ranks


def versions_of(name: str, p: int, m: int) -> list[WeightVersions]:
    rule, stream = SCHEDULES[name].versions, build_stream(name, p, m)
    assert rule is not None
    return [weight_versions(stream.stretch, rank, rule) for rank in range(p)]


def test_the_asynchronous_families() -> None:
    assert ASYNCHRONOUS == ["pipedream", "pipedream-vertical-sync", "pipedream-2bw", "paci"]
    assert all(SCHEDULES[name].summary.startswith("NOT synchronous") for name in ASYNCHRONOUS)


def joined(stream: Stream, steps: int) -> Schedule:
    """Return the schedule of a stream of some steps, of the parts that ranks run."""
    size, rows = stream.stretch.step_size, []
    for rank in range(stream.stretch.num_ranks):
        row, seen = [], {}
        for step in range(steps):
            for action in stream.row(rank, step, drains=step == steps - 1):
                # the next number that has this remainder
                key = action._replace(microbatch=action.microbatch % (2 * size))
                number = seen[key] = seen.get(key, action.microbatch - 2 * size) + 2 * size
                row.append(action._replace(microbatch=number))
        rows.append(tuple(row))
    return replace(stream.stretch, num_microbatches=steps * size, num_steps=steps, rows=tuple(rows))


@settings(max_examples=60)
@given(NAMES, RANKS, MORE, st.integers(1, 7), st.integers(0, 5))
def test_parts_of_any_number_of_steps_make_up_the_whole_schedule(
    name: str, p: int, more: int, steps: int, receive_depth: int
) -> None:
    m = p + more
    found = joined(build_stream(name, p, m, receive_depth), steps)
    whole = build_schedule(name, p, 1, m, num_steps=steps)
    computed = {*COMPUTE_OPS, Op.UPDATE}
    assert [[a for a in row if a.op in computed] for row in found.rows] == list(map(list, whole.rows))
    validate(found)  # no deadlock, and every message has its receive


@pytest.mark.parametrize("name", ASYNCHRONOUS)
@pytest.mark.parametrize("p", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("m", [1.0, 1.25, 2.0, 4.0])
def test_ranks_never_idle_in_the_steady_state_and_keep_no_more_than_1f1b(name: str, p: int, m: float) -> None:
    count = -int(-m * p // 1)
    stream = build_stream(name, p, count)
    costs = Costs({(stage, op): seconds for stage in range(p) for op, seconds in ((Op.F, 1.0), (Op.B, 2.0))})
    period = steady(lower(stream.stretch.compute_only()), costs)
    assert period.seconds == pytest.approx(3.0 * count)
    assert period.bubble.share == pytest.approx(0.0, abs=1e-12)
    assert peak_live_chunks(stream.stretch) == peak_live_chunks(build_lowered("1f1b", p, 1, 2 * p))


@settings(max_examples=30)
@given(RANKS, MORE)
def test_pipedream_is_p_minus_1_minus_r_updates_late_and_stashes_p_minus_r_versions(p: int, more: int) -> None:
    m = p + more
    for r, found in enumerate(versions_of("pipedream", p, m)):
        assert found.of_forward == tuple(max(0, k - (p - 1 - r)) for k in range(STRETCH * m))
        assert found.num_held == p - r
    for found in versions_of("pipedream-vertical-sync", p, m):
        assert found.of_forward == tuple(max(0, k - (p - 1)) for k in range(STRETCH * m))
        assert found.num_held == p


@settings(max_examples=30)
@given(RANKS, MORE)
def test_2bw_is_one_step_late_and_needs_two_versions(p: int, more: int) -> None:
    m = p + more
    for found in versions_of("pipedream-2bw", p, m):
        assert found.of_forward == tuple(max(0, k // m - 1) for k in range(STRETCH * m))
        assert found.num_held == 2


@settings(max_examples=30)
@given(RANKS, MORE)
def test_paci_keeps_one_version_and_crosses_at_most_one_update(p: int, more: int) -> None:
    for r, found in enumerate(versions_of("paci", p, p + more)):
        assert found.num_held == 1
        assert found.num_crossed == (1 if r < p - 1 else 0)


@settings(max_examples=30)
@given(RANKS, MORE)
def test_2bw_sums_gradients_between_their_last_and_the_update_that_uses_them(p: int, more: int) -> None:
    m = p + more
    for row in build_stream("pipedream-2bw", p, m).stretch.rows:
        slots = {(op, k): slot for slot, (_, op, k) in enumerate(row)}
        for step in range(STRETCH - 1):
            last = (step + 1) * m - 1
            order = [slots[Op.B, last], slots[Op.REDUCE_GRAD, last], slots[Op.NORM, last], slots[Op.UPDATE, last]]
            assert order == sorted(order)
            assert slots[Op.UPDATE, last] < slots[Op.B, last + m]  # whose reduction needs the same memory
            if step + 2 < STRETCH:
                assert slots[Op.UPDATE, last] < slots[Op.F, (step + 2) * m]


def test_a_forward_before_the_version_it_uses_is_an_error() -> None:
    late = build_stream("paci", 4, 4).stretch
    rows = tuple(tuple(a for a in row if a.op is not Op.UPDATE or a.microbatch > 4) for row in late.rows)
    with pytest.raises(ScheduleError, match=r"0F8 on rank 0 .*version 1, .*0"):
        weight_versions(replace(late, rows=rows), 0, Versions(one_step_old))


def swapped(row: tuple[Action, ...], one: Action) -> tuple[Action, ...]:
    """Return a row in which an action comes one place later."""
    slot = row.index(one)
    return (*row[:slot], row[slot + 1], one, *row[slot + 2 :])


def test_a_row_that_does_not_repeat_is_no_stream() -> None:
    stream = build_stream("paci", 2, 4)
    update = Action(1, Op.UPDATE, 2 * 4 - 1)
    rows = (stream.stretch.rows[0], tuple(a for a in stream.stretch.rows[1] if a != update))
    with pytest.raises(ScheduleError, match=r"rank 1.* not those of the step before"):
        Stream(replace(stream.stretch, rows=rows), stream.alone)


def test_updates_of_a_step_take_equally_many_microbatches() -> None:
    stream = build_stream("pipedream", 2, 4)
    assert (stream.update_size, build_stream("paci", 2, 4).update_size) == (1, 4)
    rows = tuple(tuple(a for a in row if a.op is not Op.UPDATE or a.microbatch != 1) for row in stream.alone.rows)
    with pytest.raises(ScheduleError, match="updates follow microbatches 0 2 3"):
        Stream(stream.stretch, replace(stream.alone, rows=rows))


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_a_step_has_a_microbatch_for_each_rank(name: str) -> None:
    with pytest.raises(ConfigError, match="3 were given: use 4"):
        build_stream(name, 4, 3)
