"""The profile of --profile-pipeline: how it is built from a tracer's events, and its JSON file.

    {"format": "megapipe pipeline profile", "version": 1,
     "about": {...},                    the run: schedule, grid, device, versions, date
     "schedules": {"8": {"name", "num_ranks", "rank_of_stage", "second_direction", "rows": [CSV of a rank's actions]}},
     "messages": {"bytes", "links": [{"pp_ranks": [0, 1], "latency_seconds", "transfer_seconds"}]},
     "clocks": [{"rank", "offset_ns", "error_ns", "is_shared"}],
     "pipelines": [{"tp_rank", "dp_rank", "global_ranks", "steps": [{"step", "num_microbatches", "rows": [
         {"starts_ns", "ends_ns", "message_waits_ns", "parameter_waits_ns",    one number per slot of the rank's row
          "phases": [[name, start_ns, end_ns]]}]}]}]}

Times are nanoseconds since the first recorded step began, on the clock of global rank 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from megapipe.monitor.roster import replace_file
from megapipe.schedule.action import Action, Op
from megapipe.schedule.lower import without_pairs
from megapipe.schedule.schedule import Schedule, to_csv


class RoundTrip(NamedTuple):
    """A message there and back: sent_ns and back_ns on the local clock, remote_ns on the other clock between them."""

    sent_ns: int
    remote_ns: int
    back_ns: int


class ClockReading(NamedTuple):
    """The offset of another clock from the local one, at a local time.

    The true offset is within offset_ns +- error_ns, however unequal the two directions of the round trip were.
    """

    at_ns: int
    offset_ns: int
    error_ns: int


def reading(round_trips: Sequence[RoundTrip]) -> ClockReading:
    """Return the offset by the shortest round trip, which is wrong by at most half of it."""
    best = min(round_trips, key=lambda trip: trip.back_ns - trip.sent_ns)
    middle = (best.sent_ns + best.back_ns) // 2
    return ClockReading(middle, best.remote_ns - middle, (best.back_ns - best.sent_ns + 1) // 2)


@dataclass(frozen=True)
class Clock:
    """Conversion from another rank's clock to the local one.

    The offset is interpolated linearly between the readings before and after the steps, since two quartz clocks drift
    apart by some 10 us a second. None, None: the same clock, which ranks of one machine share.
    """

    before: ClockReading | None = None
    after: ClockReading | None = None

    @property
    def error_ns(self) -> int:
        """The largest error of a time between the two readings, assuming a constant drift."""
        return max((reading.error_ns for reading in (self.before, self.after) if reading is not None), default=0)

    @property
    def is_shared(self) -> bool:
        return self.before is None

    def to_local(self, remote_ns: int) -> int:
        """Return the local time at a time of the other clock."""
        if self.before is None:
            return remote_ns
        local = remote_ns - self.before.offset_ns  # exact enough to interpolate at: the offset changes very little
        if self.after is None or self.after.at_ns == self.before.at_ns:
            return local
        share = (local - self.before.at_ns) / (self.after.at_ns - self.before.at_ns)
        return remote_ns - self.before.offset_ns - round(share * (self.after.offset_ns - self.before.offset_ns))


FORMAT, VERSION = "megapipe pipeline profile", 1

Event = tuple[str, str, int, int]  # comm.trace.Event: name, kind, start_ns, end_ns


@dataclass(frozen=True)
class MeasuredRow:
    """One rank's row in one step, with one number per slot. An action's wait for its message comes first within it."""

    starts_ns: tuple[int, ...]
    ends_ns: tuple[int, ...]
    message_waits_ns: tuple[int, ...]
    parameter_waits_ns: tuple[int, ...]
    # (name, start, end) outside the row: 'gradient-reduce', 'optimizer', and 'step', which is the whole step
    phases: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class MeasuredStep:
    """One step of one pipeline: rows[pp_rank]. step: as counted in the log, from 1."""

    step: int
    num_microbatches: int
    rows: tuple[MeasuredRow, ...]


@dataclass(frozen=True)
class PipelineSteps:
    """The recorded steps of one pipeline of the grid."""

    tp_rank: int
    dp_rank: int
    global_ranks: tuple[int, ...]  # by pp_rank
    steps: tuple[MeasuredStep, ...]


@dataclass(frozen=True)
class LinkTime:
    """The time of a message between two idle pipeline ranks: latency_seconds (of an empty one) + transfer_seconds."""

    pp_ranks: tuple[int, int]
    latency_seconds: float
    transfer_seconds: float


@dataclass(frozen=True)
class ClockOffset:
    """A rank's clock minus that of rank 0, and the bound of its error. is_shared: the two read the same clock."""

    rank: int
    offset_ns: int
    error_ns: int
    is_shared: bool


@dataclass(frozen=True)
class Profile:
    """The recorded steps of a run."""

    about: dict[str, Any]  # the run, for readers
    schedules: dict[int, Schedule]  # by number of microbatches
    message_bytes: int  # of one activation
    links: tuple[LinkTime, ...]
    clocks: tuple[ClockOffset, ...]
    pipelines: tuple[PipelineSteps, ...] = field(repr=False)


def profile_name(first: int, last: int) -> str:
    """Return the file name of a profile of steps first..last, as counted in the log."""
    return f"pipeline_profile_{first:08d}_{last:08d}.json"


def trace_path(path: Path) -> Path:
    """Return the path of a profile's Chrome trace."""
    return path.with_name(path.name.replace("pipeline_profile_", "pipeline_trace_", 1))


def schedule_as_run(schedule: Schedule, row: Sequence[Action]) -> Schedule:
    """Return the schedule without OVERLAP if the engine that ran `row` ran the halves of a pair one after the other."""
    if Op.OVERLAP not in schedule.ops or any(action.op is Op.OVERLAP for action in row):
        return schedule
    return replace(schedule, rows=tuple(map(without_pairs, schedule.rows)))


def measured_row(
    row: Sequence[Action],
    events: Iterable[Event],
    to_local: Callable[[int], int] = int,
    text: Callable[[Action], str] = str,
) -> MeasuredRow:
    """Return the measured row from the events of one step. to_local: from the rank's clock to that of the profile.
    text: that of actions in the schedule.

    A wait belongs to the action that contains it. An overlapped pair has its waits at its OVERLAP, and its halves have
    the times of the pair. Raises ValueError if an action of the row was not recorded.
    """
    found = list(events)
    spans = {name: (start, end) for name, kind, start, end in found if kind == "action"}
    waits = [(name, start, end) for name, kind, start, end in found if kind == "wait"]
    slots: list[tuple[int, int, int, int]] = []  # start, end, waits for messages and for parameters
    for index, action in enumerate(row):
        if Op.OVERLAP in (before.op for before in row[max(0, index - 2) : index]):  # a half of a pair
            slots.append((*slots[-1][:2], 0, 0))
            continue
        size = 3 if action.op is Op.OVERLAP else 1  # a pair was recorded as one action or as its two halves
        parts = [spans[text(part)] for part in row[index : index + size] if text(part) in spans]
        if not parts:
            raise ValueError(f"{text(action)} was not recorded")
        messages = parameters = 0
        for name, begin, stop in waits:
            if any(start <= begin and stop <= end for start, end in parts):
                if name.startswith("parameters"):
                    parameters += stop - begin
                else:
                    messages += stop - begin
        slots.append((min(start for start, _ in parts), max(end for _, end in parts), messages, parameters))
    phases = tuple((name, to_local(start), to_local(end)) for name, kind, start, end in found if kind == "phase")
    starts, ends, message_waits, parameter_waits = zip(*slots, strict=True) if slots else ((), (), (), ())
    return MeasuredRow(tuple(map(to_local, starts)), tuple(map(to_local, ends)), message_waits, parameter_waits, phases)


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile, of which a reader sees all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(to_json(profile), separators=(",", ":")).encode())


def to_json(profile: Profile) -> dict[str, Any]:
    """Return the JSON form described at the top of this file."""
    schedules = {}
    for count, schedule in profile.schedules.items():
        rows = to_csv(schedule).splitlines()
        schedules[str(count)] = {"name": schedule.name, **asdict(schedule.placement), "rows": rows}
    return {
        "format": FORMAT,
        "version": VERSION,
        "about": profile.about,
        "schedules": schedules,
        "messages": {"bytes": profile.message_bytes, "links": [asdict(link) for link in profile.links]},
        "clocks": [asdict(clock) for clock in profile.clocks],
        "pipelines": [asdict(pipeline) for pipeline in profile.pipelines],
    }
