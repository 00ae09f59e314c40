"""Conversion of a tracer's events to a measured row."""

from __future__ import annotations

import pytest

from megapipe.profile.profile import MeasuredRow, measured_row, schedule_as_run
from megapipe.schedule.action import parse_action
from megapipe.schedule.lower import without_pairs
from tests.profile.synthetic import lowered

ROW = tuple(map(parse_action, ("1RECV_F0", "1F0", "1B0", "1SEND_B0")))
EVENTS = [
    ("1RECV_F0", "action", 100, 110),
    ("1RECV_F0", "wait", 121, 140),
    ("parameters of stage 1", "wait", 142, 150),
    ("1F0", "action", 120, 200),
    ("1B0", "action", 201, 300),
    ("1SEND_B0", "action", 300, 310),
    ("row", "row", 99, 311),
    ("optimizer", "phase", 320, 400),
]


def test_waits_belong_to_the_action_they_lie_in_and_times_are_on_the_clock_asked_for() -> None:
    row = measured_row(ROW, EVENTS, lambda time: time - 100)
    assert row == MeasuredRow(
        (0, 20, 101, 200), (10, 100, 200, 210), (0, 19, 0, 0), (0, 8, 0, 0), (("optimizer", 220, 300),)
    )


def test_an_action_that_was_not_recorded_is_named() -> None:
    with pytest.raises(ValueError, match="1B0 was not recorded"):
        measured_row(ROW, [event for event in EVENTS if event[0] != "1B0"])


@pytest.mark.parametrize(
    "events",
    [
        [("0OVERLAP1", "action", 10, 90), ("0RECV_F1", "wait", 10, 15)],
        [("0F1", "action", 10, 50), ("1B0", "action", 50, 90), ("0RECV_F1", "wait", 10, 15)],
    ],
    ids=["as one", "as halves"],
)
def test_both_halves_of_an_overlapped_pair_have_its_times(events: list[tuple[str, str, int, int]]) -> None:
    pair = tuple(map(parse_action, ("0OVERLAP1", "0F1", "1B0")))
    row = measured_row(pair, events)
    assert row == MeasuredRow((10, 10, 10), (90, 90, 90), (5, 0, 0), (0, 0, 0))


def test_a_schedule_run_without_overlap_has_none() -> None:
    schedule = lowered("dualpipe-v", 2, 8, 2)
    in_sequence = without_pairs(schedule.rows[0])
    assert schedule_as_run(schedule, schedule.rows[0]) == schedule
    assert schedule_as_run(schedule, in_sequence).rows[0] == in_sequence != schedule.rows[0]
