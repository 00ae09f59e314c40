"""The send depth of a schedule: with it no send blocks; with less, schedules that run ahead stall."""

from __future__ import annotations

import pytest

from megapipe.schedule.costs import Costs
from megapipe.schedule.families import SCHEDULES, build_schedule
from megapipe.schedule.lower import lower
from megapipe.schedule.machine import ScheduleWalk
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.sharding import split_stages
from megapipe.schedule.simulate import unhindered_send_depth
from megapipe.schedule.validate import validate

FAMILIES = [(name, family.chunks or (2 if family.takes_chunks else 1)) for name, family in SCHEDULES.items()]


def makespan(schedule: Schedule, send_depth: int | None) -> float:
    """Return the makespan when a send blocks once `send_depth` earlier messages have no posted receive."""
    machine = ScheduleWalk(schedule, Costs.equal(schedule.num_stages, 1.0, 1.0, 1.0), send_depth)
    assert machine.run()
    return max(machine.clocks)


@pytest.mark.parametrize(("name", "chunks"), FAMILIES, ids=lambda value: str(value))
@pytest.mark.parametrize("depth", [0, 1, 2], ids=lambda depth: f"receives {depth} ahead")
def test_no_send_waits_with_the_unhindered_depth(name: str, chunks: int, depth: int) -> None:
    schedule = lower(build_schedule(name, 4, chunks, 12), depth)
    send_depth = unhindered_send_depth(schedule)
    assert makespan(schedule, send_depth) == makespan(schedule, None)
    assert send_depth >= validate(schedule).send_depth


def test_breadth_first_needs_m_minus_p_sends_in_flight() -> None:
    schedule = lower(build_schedule("breadth-first", 4, 2, 32), 1)
    assert unhindered_send_depth(schedule) == 32 - 4
    assert makespan(schedule, 8) > makespan(schedule, None)


def test_one_rank_sends_nothing() -> None:
    assert unhindered_send_depth(lower(build_schedule("1f1b", 1, 1, 4), 1)) == 0


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1"])
def test_units_of_stages_need_no_more_sends_in_flight_than_the_stages(name: str) -> None:
    schedule, num_units = build_schedule(name, 4, 1 if name != "interleaved" else 2, 8), [5, 1, 3, 2, 1, 4, 2, 2]
    num_units = num_units[: schedule.num_stages]
    split = lower(split_stages(schedule, num_units), 1)
    assert unhindered_send_depth(split, num_units) == unhindered_send_depth(lower(schedule, 1))
