"""What --profile-pipeline measured, and its JSON form: one file for all steps of a profile, read again without torch.

    {"format": "megapipe pipeline profile", "version": 1,
     "about": {...},                    the run: schedule, grid, device, versions, when
     "schedules": {"8": {"name", "num_ranks", "rank_of_stage", "second_direction", "rows": [CSV of a rank's actions]}},
     "messages": {"bytes", "links": [{"pp_ranks": [0, 1], "latency_seconds", "transfer_seconds"}]},
     "clocks": [{"rank", "offset_ns", "error_ns", "is_shared"}],
     "pipelines": [{"tp_rank", "dp_rank", "global_ranks", "steps": [{"step", "num_microbatches", "rows": [
         {"starts_ns", "ends_ns", "message_waits_ns", "parameter_waits_ns",    each one number a slot of the rank's row
          "phases": [[name, start_ns, end_ns]]}]}]}]}

Times are nanoseconds since the first recorded step began, on the clock of global rank 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megapipe.errors import DataError, MegapipeError
from megapipe.schedule.placement import Placement
from megapipe.schedule.schedule import Schedule, from_csv, to_csv

FORMAT, VERSION = "megapipe pipeline profile", 1
FILE_PATTERN = "pipeline_profile_*.json"


def profile_name(first: int, last: int) -> str:
    """The file of a profile of the steps first..last, as the log counts them. Its Chrome trace is beside it."""
    return f"pipeline_profile_{first:08d}_{last:08d}.json"


def trace_path(path: Path) -> Path:
    """Where the Chrome trace of a profile lies."""
    return path.with_name(path.name.replace("pipeline_profile_", "pipeline_trace_", 1))


@dataclass(frozen=True)
class MeasuredRow:
    """One rank's row in one step, one number a slot. Waits lie within their action: for a message at its beginning.

    phases: (name, start, end) of what the step did beside the row: 'gradient-reduce', 'optimizer', and 'step', the whole.
    """

    starts_ns: tuple[int, ...]
    ends_ns: tuple[int, ...]
    message_waits_ns: tuple[int, ...]
    parameter_waits_ns: tuple[int, ...]
    phases: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class MeasuredStep:
    """One step of one pipeline: rows[pp_rank]. step: as the log counts, the first is 1."""

    step: int
    num_microbatches: int
    rows: tuple[MeasuredRow, ...]


@dataclass(frozen=True)
class PipelineSteps:
    """One pipeline of the grid."""

    tp_rank: int
    dp_rank: int
    global_ranks: tuple[int, ...]  # by pp_rank
    steps: tuple[MeasuredStep, ...]


@dataclass(frozen=True)
class Link:
    """A message between two pipeline ranks, both idle: its time is latency_seconds (an empty one) + transfer_seconds."""

    pp_ranks: tuple[int, int]
    latency_seconds: float
    transfer_seconds: float


@dataclass(frozen=True)
class ClockNote:
    """A rank's clock less that of rank 0, and the most that this may be wrong by. is_shared: both read the same clock."""

    rank: int
    offset_ns: int
    error_ns: int
    is_shared: bool


@dataclass(frozen=True)
class Profile:
    """about: of the run, for people. schedules: by number of microbatches. message_bytes: of one activation."""

    about: dict[str, Any]
    schedules: dict[int, Schedule]
    message_bytes: int
    links: tuple[Link, ...]
    clocks: tuple[ClockNote, ...]
    pipelines: tuple[PipelineSteps, ...] = field(repr=False)

    @property
    def clock_error_seconds(self) -> float:
        """The most that a time of any rank may be wrong by, beside those of rank 0."""
        return max((note.error_ns for note in self.clocks), default=0) / 1e9

    def link_of(self, pp_rank: int, peer: int) -> Link | None:
        """The link between two pipeline ranks."""
        return next((link for link in self.links if set(link.pp_ranks) == {pp_rank, peer}), None)


def write_profile(profile: Profile, path: Path) -> None:
    """Write it beside, then rename: a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(to_json(profile), separators=(",", ":")), encoding="utf-8")
    os.replace(temporary, path)


def read_profile(path: Path) -> Profile:
    """Raises DataError for a file that cannot be read, is none of ours, or is of another version."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("format") != FORMAT:
            raise DataError(
                f"{path} is not a profile of a pipeline: its format is {found.get('format')!r}, not {FORMAT!r}"
            )
        if found.get("version") != VERSION:
            raise DataError(
                f"{path} has version {found.get('version')!r} of the profile's format, this megapipe reads {VERSION}"
            )
        return from_json(found)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except MegapipeError as error:
        raise DataError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def to_json(profile: Profile) -> dict[str, Any]:
    """The form above."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "about": profile.about,
        "schedules": {str(count): _schedule_json(schedule) for count, schedule in profile.schedules.items()},
        "messages": {"bytes": profile.message_bytes, "links": [asdict(link) for link in profile.links]},
        "clocks": [asdict(note) for note in profile.clocks],
        "pipelines": [asdict(pipeline) for pipeline in profile.pipelines],
    }


def from_json(found: dict[str, Any]) -> Profile:
    """The way back from to_json."""
    profile = Profile(
        found["about"],
        {int(count): _schedule_of(entry, int(count)) for count, entry in found["schedules"].items()},
        found["messages"]["bytes"],
        tuple(Link(**link | {"pp_ranks": tuple(link["pp_ranks"])}) for link in found["messages"]["links"]),
        tuple(ClockNote(**note) for note in found["clocks"]),
        tuple(_pipeline_of(entry) for entry in found["pipelines"]),
    )
    for step in (step for pipeline in profile.pipelines for step in pipeline.steps):
        rows = profile.schedules[step.num_microbatches].rows
        held = [
            {len(row.starts_ns), len(row.ends_ns), len(row.message_waits_ns), len(row.parameter_waits_ns)}
            for row in step.rows
        ]
        if held != [{len(row)} for row in rows]:
            raise ValueError(
                f"step {step.step} holds rows of {held} actions, its schedule {[len(row) for row in rows]}"
            )
    return profile


def profiles_in(folder: Path) -> Iterator[Path]:
    """The profiles of a run, by step."""
    return iter(sorted(folder.glob(FILE_PATTERN)))


def _schedule_json(schedule: Schedule) -> dict[str, Any]:
    placement = schedule.placement
    return {
        "name": schedule.name,
        "num_ranks": placement.num_ranks,
        "rank_of_stage": placement.rank_of_stage,
        "second_direction": placement.second_direction,
        "rows": to_csv(schedule).splitlines(),
    }


def _schedule_of(entry: dict[str, Any], num_microbatches: int) -> Schedule:
    second = None if entry["second_direction"] is None else tuple(entry["second_direction"])
    placement = Placement(entry["num_ranks"], tuple(entry["rank_of_stage"]), second)
    return from_csv("\n".join(entry["rows"]), entry["name"], placement, num_microbatches)


def _pipeline_of(entry: dict[str, Any]) -> PipelineSteps:
    steps = tuple(
        MeasuredStep(step["step"], step["num_microbatches"], tuple(_row_of(row) for row in step["rows"]))
        for step in entry["steps"]
    )
    return PipelineSteps(entry["tp_rank"], entry["dp_rank"], tuple(entry["global_ranks"]), steps)


def _row_of(entry: dict[str, Any]) -> MeasuredRow:
    starts, ends, messages, parameters = (
        tuple(entry[name]) for name in ("starts_ns", "ends_ns", "message_waits_ns", "parameter_waits_ns")
    )
    return MeasuredRow(
        starts, ends, messages, parameters, tuple((name, start, end) for name, start, end in entry["phases"])
    )
