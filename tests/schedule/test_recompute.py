"""RECOMPUTE in rows: the pass that places it, its proof, its times and what is held, for every synchronous schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.extras.report.schedule_csv import from_csv
from megapipe.schedule.action import Action, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.families import SCHEDULES, build_schedule
from megapipe.schedule.lifetimes import Held, lifetimes
from megapipe.schedule.lower import lower
from megapipe.schedule.recompute import replay_ahead
from megapipe.schedule.schedule import Schedule, to_csv
from megapipe.schedule.sharding import ShardingPolicy, shard, split_stages
from megapipe.schedule.simulate import Timeline, simulate
from megapipe.schedule.validate import validate
from tests.schedule.strategies import family_shapes

# zb-auto is searched for given times
SYNCHRONOUS = [name for name, family in SCHEDULES.items() if family.is_synchronous and not family.is_automatic]
TENTHS = st.integers(1, 30).map(lambda tenths: tenths / 10)


def costs_with_replay(num_stages: int, forward: float, inputs: float, weights: float, replay: float) -> Costs:
    """Return equal costs whose B and I repeat a forward."""
    costs = Costs.equal(num_stages, forward, inputs + replay, weights)
    return replace(costs, seconds={**costs.seconds, **{(stage, Op.RECOMPUTE): replay for stage in range(num_stages)}})


def times(timeline: Timeline) -> dict[Action, tuple[float, float]]:
    """Return start and end of every action but the replays."""
    return {
        action: (start, end)
        for row, starts, ends in zip(timeline.schedule.rows, timeline.starts, timeline.ends, strict=True)
        for action, start, end in zip(row, starts, ends, strict=True)
        if action.op is not Op.RECOMPUTE
    }


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    """Draw a schedule, with units of its stages, and costs that differ from stage to stage, some without replay."""
    name = draw(st.sampled_from(SYNCHRONOUS))
    shape = family_shapes(name, draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.integers(1, 12)))
    schedule = build_schedule(*shape)
    seconds: dict[tuple[int, Op], float] = {}
    for stage in range(schedule.num_stages):
        forward, inputs, weights = draw(TENTHS), draw(TENTHS), draw(TENTHS)
        replay = draw(st.sampled_from([0.0, forward, forward / 2]))
        seconds |= {(stage, Op.F): forward, (stage, Op.I): inputs + replay, (stage, Op.W): weights}
        seconds |= {(stage, Op.B): inputs + weights + replay, (stage, Op.RECOMPUTE): replay}
    return schedule, Costs(seconds)


@given(cases())
def test_no_action_ends_later_and_no_rank_computes_more(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    ahead = replay_ahead(schedule, costs)
    before, after = simulate(schedule, costs), simulate(ahead, costs)
    later = times(after)
    assert all(later[action][1] <= end + 1e-6 for action, (_, end) in times(before).items())
    assert after.work_seconds == pytest.approx(before.work_seconds)
    assert [[a for a in row if a.op is not Op.RECOMPUTE] for row in ahead.rows] == [list(row) for row in schedule.rows]


@given(cases())
def test_no_backward_with_a_replay_inside_follows_a_wait(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    timeline = simulate(replay_ahead(schedule, costs), costs)
    for row, starts, ends in zip(timeline.schedule.rows, timeline.starts, timeline.ends, strict=True):
        end, replayed = 0.0, set[tuple[int, int | None]]()
        for slot, action in enumerate(row):
            backward = row[slot + 2] if action.op is Op.OVERLAP else action
            if action.op is Op.RECOMPUTE:
                replayed.add((action.stage, action.microbatch))
            elif backward.op in (Op.B, Op.I) and costs.seconds[backward.stage, Op.RECOMPUTE]:
                assert (backward.stage, backward.microbatch) in replayed or starts[slot] <= end + 1e-6
            end = max(end, ends[slot])


@given(cases(), st.lists(st.integers(1, 3), min_size=40, max_size=40))
def test_it_is_lowered_sharded_and_proven(case: tuple[Schedule, Costs], units: list[int]) -> None:
    schedule, costs = case
    ahead = replay_ahead(schedule, costs)
    validate(ahead)
    lowered = lower(ahead)
    validate(lowered)
    assert lowered.compute_only() == ahead
    assert simulate(lowered, costs).makespan_seconds == pytest.approx(simulate(ahead, costs).makespan_seconds)
    assert from_csv(to_csv(ahead), ahead.name, ahead.placement).rows == ahead.rows
    split = split_stages(ahead, units[: schedule.num_stages])
    validate(shard(lower(split), ShardingPolicy(gathers=True)))


@given(cases())
def test_what_it_makes_is_held_until_the_backward(case: tuple[Schedule, Costs]) -> None:
    ahead = replay_ahead(*case)
    for row in ahead.rows:
        held: set[tuple[int, int | None]] = set()
        for (stage, op, microbatch), changes in lifetimes(row):
            if (Held.REPLAYED, stage) in changes.creates:
                assert op is Op.RECOMPUTE
                held.add((stage, microbatch))
            if (Held.REPLAYED, stage) in changes.frees:
                assert op in (Op.B, Op.I)
                held.remove((stage, microbatch))
        assert not held


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize(("forward", "backward", "replay"), [(1.0, 2.0, 1.0), (1.0, 2.5, 0.75), (2.0, 3.0, 2.0)])
def test_the_bubble_of_one_chunk_has_no_replay(
    name: str, p: int, m: int, forward: float, backward: float, replay: float
) -> None:
    """(p - 1) (F + B) in place of (p - 1) (F + R + B)."""
    costs = costs_with_replay(p, forward, backward / 2, backward / 2, replay)
    schedule = build_schedule(name, p, 1, m)
    before, after = simulate(schedule, costs), simulate(replay_ahead(schedule, costs), costs)
    assert max(before.barrier_idle_seconds) == pytest.approx((p - 1) * (forward + backward + replay))
    assert max(after.barrier_idle_seconds) == pytest.approx((p - 1) * (forward + backward))


def test_without_replay_the_schedule_stays() -> None:
    schedule = build_schedule("1f1b", 4, 1, 8)
    assert replay_ahead(schedule, Costs.equal(4)) == schedule


@pytest.mark.parametrize("schedule", [lower(build_schedule("1f1b", 2, 1, 4)), build_schedule("pipedream", 2, 1, 4)])
def test_rows_with_messages_or_updates_are_refused(schedule: Schedule) -> None:
    with pytest.raises(ScheduleError, match="no messages, no updates"):
        replay_ahead(schedule, Costs.equal(2))
