"""Reader of the records in a run's folder, for runs in progress, finished runs and crashed ones.

A run is a folder with metrics.jsonl or run.jsonl (docs/profile.md). Each start of the run is a segment, so a resumed
run has several. Where their steps overlap, the later segment's count.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megapipe.checkpoint.folder import CONFIG_NAME, folder_name, steps_in
from megapipe.errors import ConfigError, DataError
from megapipe.profile.profile import Profile, profiles_in, read_profile

METRICS, RUN = "metrics.jsonl", "run.jsonl"
Record = dict[str, Any]


@dataclass
class Segment:
    """One start of the run with its records. start: None if run.jsonl has no record of it."""

    start: Record | None = None
    resumed: Record | None = None
    steps: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    notes: list[Record] = field(default_factory=list)
    warnings: list[Record] = field(default_factory=list)
    failures: list[Record] = field(default_factory=list)
    end: Record | None = None

    @property
    def records(self) -> list[Record]:
        start = [] if self.start is None else [self.start]
        return [
            *start,
            *self.steps,
            *self.evaluations,
            *self.notes,
            *self.warnings,
            *self.failures,
            *([self.end] if self.end else []),
        ]

    @property
    def first_time(self) -> float | None:
        """Time of its first record, in Unix seconds."""
        return min((record["time"] for record in self.records if "time" in record), default=None)

    @property
    def last_time(self) -> float | None:
        return max((record["time"] for record in self.records if "time" in record), default=None)

    @property
    def ending(self) -> str:
        """'ended', 'stopped' (early, on request), 'failed', 'running', or 'unknown' if no end was recorded."""
        if self.end is not None:
            return "stopped" if self.end["early"] else "ended"
        if self.failures:
            return "failed"
        return "running" if self._is_alive() else "unknown"

    def _is_alive(self) -> bool:
        if self.start is None or self.start["host"] != platform.node():
            return False
        try:
            os.kill(self.start["pid"], 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


@dataclass(frozen=True)
class Run:
    """A run's folder.

    config_text: the last segment's configuration as YAML, '' if unknown. oddities: messages about unreadable parts.
    """

    folder: Path
    segments: tuple[Segment, ...]
    config_text: str
    profile: Profile | None
    profile_path: Path | None
    num_profiles: int
    oddities: tuple[str, ...]

    @property
    def last(self) -> Segment:
        return self.segments[-1]

    @property
    def steps(self) -> list[Record]:
        """The step records in order of step; records of a later segment replace those of an earlier one."""
        return _that_count([segment.steps for segment in self.segments])

    @property
    def lost_steps(self) -> list[list[Record]]:
        """For each segment but the last, its steps that a later one repeated, preceded by the last step that counts."""
        return [_lost(segment.steps, self.segments[i + 1 :]) for i, segment in enumerate(self.segments[:-1])]

    def evaluations(self, split: str) -> list[Record]:
        """Return the evaluations on 'validation' or 'test', by step."""
        found: dict[int, Record] = {}
        for segment in self.segments:
            first = min((record["step"] for record in segment.steps), default=None)
            found = {step: record for step, record in found.items() if first is None or step < first}
            found |= {record["step"]: record for record in segment.evaluations if record["split"] == split}
        return [found[step] for step in sorted(found)]

    @property
    def started(self) -> Record:
        """The record of the last start; empty if no start was recorded."""
        return next((segment.start for segment in reversed(self.segments) if segment.start is not None), {})


def read_run(folder: Path) -> Run:
    """Read the run in a folder. Raises ConfigError if it holds no run; the message lists runs in subfolders."""
    if not is_run(folder):
        raise ConfigError(_no_run(folder))
    oddities: list[str] = []
    journal = list(_records(folder / RUN, oddities))
    metrics = list(_records(folder / METRICS, oddities))
    segments = _segments(journal, metrics)
    paths = profiles_in(folder)
    profile, path = _newest_profile(paths, oddities)
    return Run(folder, tuple(segments), _config_text(folder, segments), profile, path, len(paths), tuple(oddities))


def is_run(folder: Path) -> bool:
    """Return True if the folder holds the records of a run."""
    return (folder / METRICS).is_file() or (folder / RUN).is_file()


def _no_run(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder; give the --save folder of a run, or the folder of its --metrics-file"
    below = sorted(
        {
            path.parent
            for name in (METRICS, RUN)
            for depth in ("*", "*/*", "*/*/*")
            for path in folder.glob(f"{depth}/{name}")
        }
    )
    hint = f"; below it there {'are' if len(below) > 1 else 'is'} {', '.join(map(str, below[:4]))}" if below else ""
    return (
        f"{folder} is not a run: it holds neither {METRICS} nor {RUN}, "
        f"which a run with --save or --metrics-file writes{hint}"
    )


def _records(path: Path, oddities: list[str]) -> Iterator[Record]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record["kind"], str):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            if number < len(lines):  # the last line of a running job can be incomplete
                oddities.append(f"{path.name} line {number} cannot be read and was skipped")
            continue
        yield record


def _segments(journal: list[Record], metrics: list[Record]) -> list[Segment]:
    """Return the segments that run.jsonl records; without it, a step that repeats an earlier one begins a segment."""
    segments: list[Segment] = []
    for record in journal:
        after_its_end = segments and record["kind"] == "failure" and segments[-1].end is not None
        if record["kind"] == "start" or not segments or after_its_end:
            segments.append(Segment())
        current = segments[-1]
        if record["kind"] == "start":
            current.start = record
        elif record["kind"] == "resumed":
            current.resumed = record
        elif record["kind"] == "end":
            current.end = record
        else:
            {"note": current.notes, "warning": current.warnings, "failure": current.failures}.get(
                record["kind"], []
            ).append(record)
    if not segments:
        segments.append(Segment())
    has_starts = any(segment.start is not None for segment in segments)
    for record in metrics:
        if record["kind"] in ("step", "evaluation"):
            segment = _segment_of(record, segments, has_starts)
            (segment.steps if record["kind"] == "step" else segment.evaluations).append(record)
    return segments


def _segment_of(record: Record, segments: list[Segment], has_starts: bool) -> Segment:
    if has_starts and "time" in record:
        begun = [
            segment for segment in segments if segment.start is not None and segment.start["time"] <= record["time"]
        ]
        return begun[-1] if begun else segments[0]
    if (
        not has_starts
        and segments[-1].steps
        and record["kind"] == "step"
        and record["step"] <= segments[-1].steps[-1]["step"]
    ):
        segments.append(Segment())
    return segments[-1]


def _that_count(of_segments: list[list[Record]]) -> list[Record]:
    found: dict[int, Record] = {}
    for steps in of_segments:
        if steps:
            first = min(record["step"] for record in steps)
            found = {step: record for step, record in found.items() if step < first} | {
                record["step"]: record for record in steps
            }
    return [found[step] for step in sorted(found)]


def _lost(steps: list[Record], later: tuple[Segment, ...]) -> list[Record]:
    first = min((record["step"] for segment in later for record in segment.steps), default=None)
    lost = [record for record in steps if first is not None and record["step"] >= first]
    return [*[record for record in steps if first is not None and record["step"] < first][-1:], *lost] if lost else []


def _newest_profile(paths: list[Path], oddities: list[str]) -> tuple[Profile | None, Path | None]:
    for path in reversed(paths):
        try:
            return read_profile(path), path
        except DataError as error:
            oddities.append(str(error))
    return None, None


def _config_text(folder: Path, segments: list[Segment]) -> str:
    for segment in reversed(segments):
        if segment.start is not None:
            text: str = segment.start["config"]
            return text
    for step in reversed(steps_in(folder)):  # the run was written before run.jsonl existed
        path = folder / folder_name(step) / CONFIG_NAME
        if path.is_file():
            return path.read_text(encoding="utf-8", errors="replace")
    return ""
