"""Reads the profiles that --profile-pipeline wrote."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from megapipe.errors import DataError, MegapipeError
from megapipe.extras.report.schedule_csv import from_csv
from megapipe.profile.profile import (
    FORMAT,
    VERSION,
    ClockOffset,
    LinkTime,
    MeasuredRow,
    MeasuredStep,
    PipelineSteps,
    Profile,
)
from megapipe.schedule.placement import Placement

FILE_PATTERN = "pipeline_profile_*.json"


def profiles_in(folder: Path) -> list[Path]:
    """Return the profiles of a run, by step."""
    return sorted(folder.glob(FILE_PATTERN))


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises DataError for a file that cannot be read, is not a profile, or has another version."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("format") != FORMAT:
            raise DataError(f"{path} is not a pipeline profile: its format is {found.get('format')!r}, not {FORMAT!r}")
        if found.get("version") != VERSION:
            raise DataError(
                f"{path} has version {found.get('version')!r} of the profile format; "
                f"this megapipe reads version {VERSION}"
            )
        return _from_json(found)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except MegapipeError as error:
        raise DataError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def _from_json(found: dict[str, Any]) -> Profile:
    """Return the profile of a JSON form. Raises ValueError if its rows do not match its schedules."""
    schedules = {}
    for key, entry in found["schedules"].items():
        placement = Placement(*(_as_tuples(entry[each.name]) for each in fields(Placement)))
        schedules[int(key)] = from_csv("\n".join(entry["rows"]), entry["name"], placement, int(key))
    pipelines = []
    for entry in found["pipelines"]:
        steps = []
        for step in entry["steps"]:
            values = [[_as_tuples(row[each.name]) for each in fields(MeasuredRow)] for row in step["rows"]]
            lengths = [set(map(len, times)) for *times, _phases in values]
            expected = [len(row) for row in schedules[step["num_microbatches"]].rows]
            if lengths != [{length} for length in expected]:
                raise ValueError(f"step {step['step']} has rows of {lengths} actions, its schedule {expected}")
            rows = tuple(MeasuredRow(*row) for row in values)
            steps.append(MeasuredStep(step["step"], step["num_microbatches"], rows))
        pipelines.append(PipelineSteps(entry["tp_rank"], entry["dp_rank"], tuple(entry["global_ranks"]), tuple(steps)))
    return Profile(
        found["about"],
        schedules,
        found["messages"]["bytes"],
        tuple(LinkTime(**link | {"pp_ranks": tuple(link["pp_ranks"])}) for link in found["messages"]["links"]),
        tuple(ClockOffset(**clock) for clock in found["clocks"]),
        tuple(pipelines),
    )


def _as_tuples(value: Any) -> Any:
    """Return JSON with tuples in place of lists."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
