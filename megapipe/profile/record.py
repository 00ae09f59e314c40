"""From a tracer's events to the measured row of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from megapipe.profile.profile import MeasuredRow
from megapipe.schedule.action import Action, Op
from megapipe.schedule.schedule import Schedule

Event = tuple[str, str, int, int]  # name, kind, start_ns, end_ns: comm.trace's


class _Slot(NamedTuple):
    start_ns: int
    end_ns: int
    message_wait_ns: int = 0
    parameter_wait_ns: int = 0


def as_run(schedule: Schedule, row: Sequence[Action]) -> Schedule:
    """The schedule as engines ran it whose row is `row`: without OVERLAP where they run the halves of a pair one after the other."""
    if schedule.ops <= {action.op for action in row} | (schedule.ops - {Op.OVERLAP}):
        return schedule
    rows = tuple(tuple(action for action in each if action.op is not Op.OVERLAP) for each in schedule.rows)
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, rows)


def measured_row(row: Sequence[Action], events: Iterable[Event], to_here: Callable[[int], int] = int) -> MeasuredRow:
    """The row that the events of one step tell of. to_here: from the rank's clock to that of the profile.

    A wait belongs to the action in which it lies; those within the halves of an overlapped pair stand at its OVERLAP, and both halves have
    the times of the pair. Raises ValueError if the events do not tell of every action.
    """
    found = list(events)
    actions = sorted((event for event in found if event[1] == "action"), key=lambda event: event[2])
    waits = sorted((event for event in found if event[1] == "wait"), key=lambda event: event[2])
    timed = {name: _with_waits(start, end, waits) for name, _, start, end in actions}
    slots = _slots(row, timed)
    phases = tuple((name, to_here(start), to_here(end)) for name, kind, start, end in found if kind == "phase")
    starts, ends, message_waits, parameter_waits = zip(*slots, strict=True) if slots else ((), (), (), ())
    return MeasuredRow(tuple(map(to_here, starts)), tuple(map(to_here, ends)), message_waits, parameter_waits, phases)


def _slots(row: Sequence[Action], timed: dict[str, _Slot]) -> list[_Slot]:
    slots: list[_Slot] = []
    for slot, action in enumerate(row):
        if action.op is Op.OVERLAP:
            parts = [timed[str(each)] for each in row[slot : slot + 3] if str(each) in timed]
            if not parts:
                raise ValueError(f"nothing was recorded of {action}")
            waits = (sum(part.message_wait_ns for part in parts), sum(part.parameter_wait_ns for part in parts))
            slots.append(_Slot(min(part.start_ns for part in parts), max(part.end_ns for part in parts), *waits))
        elif Op.OVERLAP in (before.op for before in row[max(0, slot - 2) : slot]):
            slots.append(_Slot(slots[-1].start_ns, slots[-1].end_ns))
        elif str(action) in timed:
            slots.append(timed[str(action)])
        else:
            raise ValueError(f"nothing was recorded of {action}")
    return slots


def _with_waits(start: int, end: int, waits: Sequence[Event]) -> _Slot:
    message = parameter = 0
    for name, _, begin, stop in waits:
        if start <= begin and stop <= end:
            if name.startswith("parameters"):
                parameter += stop - begin
            else:
                message += stop - begin
    return _Slot(start, end, message, parameter)
