"""Reader of the records in a run's folder, for runs in progress, finished runs and crashed ones.

A run is a folder with metrics.jsonl or run.jsonl (docs/profile.md). Each start of the run is a segment, so a resumed
run has several. Where their steps overlap, the later segment's count.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megapipe.checkpoint.folder import CONFIG_NAME, folder_name, open_folder, read_listed, steps_in
from megapipe.config.config import fields_by_key, value_of
from megapipe.config.fields import value_text
from megapipe.config.flags import default_text
from megapipe.config.load import from_yaml
from megapipe.errors import CheckpointError, ConfigError, DataError
from megapipe.extras.report.profile import profiles_in, read_profile
from megapipe.profile.profile import Profile

METRICS, RUN = "metrics.jsonl", "run.jsonl"
Record = dict[str, Any]
Number = int | float
LARGEST = 1e100  # larger numbers are shown like infinite ones
MOST_DIGITS = 100
LAST_SECOND = 2.0**36  # Unix seconds that a date can be made of
# kind of a record -> the types of the values that the report needs
FORMS: dict[str, dict[str, Any]] = {
    "start": {"time": Number, "host": str, "pid": int, "versions": dict, "machine": dict, "grid": dict, "config": str},
    "resumed": {"path": str},
    "note": {"time": Number, "text": str},
    "warning": {"text": str},
    "failure": {"rank": int, "error": str, "text": str},
    "end": {"step": int, "reason": str, "early": bool},
    "step": {
        "step": int,
        "train_iters": int,
        "consumed_tokens": int,
        "global_batch_size": int,
        "phases": dict,
        "loss": Number | None,
        "step_seconds": Number,
        "tokens_per_second": Number,
    },
    "evaluation": {"step": int, "loss": Number | None, "split": str},
}
GRID = ("world_size", "tp", "cp", "pp", "dp", "chunks")
# of steps and evaluations
NOT_NUMBERS = ("kind", "bubble_note", "phases", "split", "router_losses", "router_losses_by_layer", "expert_load")


@dataclass(frozen=True)
class Segment:
    """One start of the run with its records, those of run.jsonl first."""

    records: list[Record]

    def of(self, kind: str) -> list[Record]:
        """Return the records of a kind: 'step', 'evaluation', 'note', 'warning', 'failure', ..."""
        return [record for record in self.records if record["kind"] == kind]

    def last(self, kind: str) -> Record | None:
        """Return the last record of a kind that occurs once: 'start', 'resumed' or 'end'."""
        return next(reversed(self.of(kind)), None)

    @cached_property
    def steps(self) -> list[Record]:
        return self.of("step")

    @property
    def times(self) -> list[float]:
        """The times of its records in Unix seconds."""
        return [record["time"] for record in self.records if "time" in record]

    @property
    def ending(self) -> str:
        """'ended', 'stopped' (early, on request), 'failed', 'running', or 'unknown' if no end was recorded."""
        start, end = self.last("start"), self.last("end")
        if end is not None:
            return "stopped" if end["early"] else "ended"
        if self.of("failure"):
            return "failed"
        if start is None or start["host"] != platform.node():
            return "unknown"
        try:
            os.kill(start["pid"], 0)
        except ProcessLookupError:
            return "unknown"
        except PermissionError:  # the process of another user
            pass
        return "running"


@dataclass(frozen=True)
class Run:
    """A run's folder. oddities: messages about unreadable parts."""

    folder: Path
    segments: tuple[Segment, ...]
    profile: Profile | None
    profile_path: Path | None
    num_profiles: int
    oddities: tuple[str, ...]

    @property
    def last(self) -> Segment:
        return self.segments[-1]

    @cached_property
    def steps(self) -> list[Record]:
        """The step records in order of step; records of a later segment replace those of an earlier one."""
        return self._that_count("step")

    @property
    def lost_steps(self) -> list[list[Record]]:
        """For each segment but the last, its steps that a later one repeated, preceded by the last step that counts."""
        found = []
        for index, segment in enumerate(self.segments[:-1], start=1):
            later = [record["step"] for other in self.segments[index:] for record in other.steps]
            lost = [record for record in segment.steps if later and record["step"] >= min(later)]
            kept = [record for record in segment.steps if later and record["step"] < min(later)]
            found.append([*kept[-1:], *lost] if lost else [])
        return found

    def evaluations(self, split: str) -> list[Record]:
        """Return the evaluations on 'validation' or 'test', by step."""
        return self._that_count("evaluation", split)

    @property
    def started(self) -> Record:
        """The record of the last start; empty if no start was recorded."""
        return next(filter(None, (segment.last("start") for segment in reversed(self.segments))), {})

    @property
    def has_pipeline(self) -> bool:
        """False if the last start recorded that it had one pipeline rank."""
        return bool(self.started.get("grid", {}).get("pp") != 1)

    @cached_property
    def config_text(self) -> str:
        """The configuration of the last start as YAML, '' if unknown."""
        if self.started:
            return str(self.started["config"])
        for step in reversed(steps_in(self.folder)):  # the run was written before run.jsonl existed
            with suppress(CheckpointError):  # damaged: an older one will do
                return read_listed(open_folder(self.folder / folder_name(step)), CONFIG_NAME)
        return ""

    def _that_count(self, kind: str, split: str | None = None) -> list[Record]:
        """Return the records of a kind by step, without those of steps that a later segment repeated."""
        found: dict[int, Record] = {}
        for segment in self.segments:
            first = min((record["step"] for record in segment.steps), default=None)
            found = {step: record for step, record in found.items() if first is None or step < first}
            found |= {record["step"]: record for record in segment.of(kind) if split in (None, record.get("split"))}
        return [found[step] for step in sorted(found)]


def read_run(folder: Path) -> Run:
    """Read the run in a folder. Raises ConfigError if it holds no run; the message lists runs in subfolders."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the --save folder of a run, or that of its --metrics-file")
    if not any((folder / name).is_file() for name in (METRICS, RUN)):
        patterns = [f"{depth}/{name}" for name in (METRICS, RUN) for depth in ("*", "*/*", "*/*/*")]
        below = sorted({path.parent for pattern in patterns for path in folder.glob(pattern)})
        hint = f"; below it there {'are' if len(below) > 1 else 'is'} {', '.join(map(str, below[:4]))}" if below else ""
        raise ConfigError(
            f"{folder} is not a run: it holds neither {METRICS} nor {RUN}, "
            f"which a run with --save or --metrics-file writes{hint}"
        )
    oddities: list[str] = []
    segments = _segments(list(_records(folder / RUN, oddities)), list(_records(folder / METRICS, oddities)))
    paths = profiles_in(folder)
    profile, profile_path = None, None
    for path in reversed(paths):  # the newest that can be read
        try:
            profile, profile_path = read_profile(path), path
            break
        except DataError as error:
            oddities.append(str(error))
    return Run(folder, tuple(segments), profile, profile_path, len(paths), tuple(oddities))


def logged_load(path: Path) -> tuple[int, dict[str, list[float]]]:
    """Return the last step whose load of experts a run has logged, and that load by layer, relative to the mean.

    path: its metrics file, or its folder. Raises ConfigError if it holds none.
    """
    path = path / METRICS if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"{path} is not a metrics file; give that of a run, or its --save folder")
    found = [record for record in _records(path, []) if record.get("expert_load")]
    if not found:
        raise ConfigError(f"{path} has no expert_load; a run with experts logs it with --moe-per-layer-logging")
    return found[-1]["step"], found[-1]["expert_load"]


def _records(path: Path, oddities: list[str]) -> Iterator[Record]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line, parse_float=_finite, parse_int=_finite, parse_constant=_finite)
            if not _has_its_form(record):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            if number < len(lines):  # the last line of a running job can be incomplete
                oddities.append(f"{path.name} line {number} cannot be read and was skipped")
            continue
        yield record


def _finite(text: str) -> float | None:
    """Return a number of JSON, None for one that is not finite or that no chart can show."""
    value = int(text) if len(text) < MOST_DIGITS and text.lstrip("-").isdigit() else float(text)
    return value if abs(value) < LARGEST else None


def _has_its_form(record: Record) -> bool:
    """Return True if the values of a record that the report reads have the types that a run writes."""
    kind = record["kind"]
    if not isinstance(kind, str) or not all(isinstance(record[key], of) for key, of in FORMS.get(kind, {}).items()):
        return False
    if "time" in record and not (isinstance(record["time"], Number) and 0 <= record["time"] < LAST_SECOND):
        return False
    if kind == "start":
        return all(isinstance(record["grid"].get(key), int) for key in GRID)
    if kind not in ("step", "evaluation"):
        return True
    loads = record.get("expert_load", {})
    if not isinstance(loads, dict) or not all(isinstance(each, list) and each for each in loads.values()):
        return False
    numbers = [value for key, value in record.items() if key not in NOT_NUMBERS and value is not None]
    return all(isinstance(value, Number) for value in (*numbers, *(load for each in loads.values() for load in each)))


def _segments(journal: list[Record], metrics: list[Record]) -> list[Segment]:
    """Return the segments that run.jsonl records; without it, a step that repeats an earlier one begins a segment."""
    segments: list[Segment] = []
    for record in journal:
        is_late_failure = segments and record["kind"] == "failure" and segments[-1].last("end") is not None
        if record["kind"] == "start" or not segments or is_late_failure:
            segments.append(Segment([]))
        segments[-1].records.append(record)
    segments = segments or [Segment([])]
    starts = [(start["time"], segment) for segment in segments if (start := segment.last("start")) is not None]
    latest_step = -1
    for record in metrics:
        if record["kind"] not in ("step", "evaluation"):
            continue
        segment = segments[-1]
        if starts and "time" in record:
            segment = next((each for time, each in reversed(starts) if time <= record["time"]), segments[0])
        elif not starts and record["kind"] == "step":
            if record["step"] <= latest_step:
                segment = Segment([])
                segments.append(segment)
            latest_step = record["step"]
        segment.records.append(record)
    return segments


class Setting(NamedTuple):
    """A field whose value differs from the default."""

    section: str
    flag: str
    value: str
    default: str
    origin: str  # 'flag --x', 'yaml FILE line N', or '' if unknown


def _remarks(text: str) -> dict[str, tuple[str, str]]:
    """Return the origin of each value in a run's YAML, and what was derived in place of null, by the key of the field.

    `to_yaml` has written both as a comment.
    """
    section, found = "", {}
    for line in text.splitlines():
        if match := re.match(r"(\w+):\s*$", line):
            section = match[1]
        elif match := re.match(r"  (\w+): .*?# (.*)$", line):
            origin, _, derived = match[2].partition("; derived: ")
            found[f"{section}.{match[1]}"] = (origin, derived)
    return found


def changed_settings(text: str) -> tuple[list[Setting], str]:
    """Return the fields of a run's YAML that differ from their defaults, and the reason if the list is empty."""
    if not text:
        return [], "the run recorded no configuration"
    try:
        config = from_yaml(text)
    except ConfigError as error:
        return [], f"this version of megapipe cannot read the run's configuration: {error}"
    found, written = [], _remarks(text)
    for key, field in fields_by_key().items():
        value, origin = value_of(config, field), written.get(key, ("", ""))[0]
        if value != field.default and origin != "default":  # of the version that ran
            default = default_text(field).removeprefix("default: ")
            found.append(Setting(field.section, field.main_flag, value_text(value), default, origin))
    return found, "" if found else "all settings have their default values"


class Used(NamedTuple):
    """The value of a field with which a run ran.

    follows: it was not given, so that of another field decided. has_effect: the option that it needs was given.
    """

    text: str
    follows: bool = False
    has_effect: bool = True


def values_used(text: str) -> dict[str, Used]:
    """Return the values with which a run ran, by the key of the field. text: its YAML. Raises ConfigError.

    Where a field was not given: the recorded value that was derived, else that of the field it takes over, else
    'automatic' if a rule decided, 'none' if nothing did.
    """
    config, derived, fields = from_yaml(text), _remarks(text), fields_by_key()
    keys = {field.main_flag: key for key, field in fields.items()}

    def used(key: str) -> Used:
        option, value, needs = fields[key].option, value_of(config, fields[key]), fields[key].option.needs
        has_effect = needs is None or needs.is_met(value_of(config, fields[needs.key]))
        if value is not None:
            return Used(value_text(value).strip("[]") or "none", has_effect=has_effect)
        rule, source = option.derived, keys.get(f"--{option.derived}")
        found = derived.get(key, ("", ""))[1] or rule
        if found == rule and not re.fullmatch(r"[\d,]+", rule):  # the value was not recorded
            found = used(source).text if source else "automatic" if rule else "none"
        return Used(found.strip("[]"), source is not None or not rule, has_effect)

    return {key: used(key) for key in fields}
