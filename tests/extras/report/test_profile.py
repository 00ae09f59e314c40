"""Profile files round-trip, and other files are refused with a message that names them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megapipe.errors import DataError
from megapipe.extras.report.profile import profiles_in, read_profile
from megapipe.profile.profile import profile_name, trace_path, write_profile
from tests.profile.synthetic import lowered, profile_of, step_of


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("dualpipe", 1), ("zb-v", 2)])
def test_a_profile_is_read_as_it_was_written(name: str, chunks: int, tmp_path: Path) -> None:
    schedule = lowered(name, 4, 16, chunks)
    profile = profile_of(schedule, (step_of(schedule), step_of(schedule, number=12)), 1e-4, 2e-4)
    path = tmp_path / "runs" / profile_name(11, 12)
    write_profile(profile, path)
    assert read_profile(path) == profile
    assert profiles_in(path.parent) == [path] and trace_path(path) not in (path, *profiles_in(path.parent))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.update(version=2), "has version 2 of the profile format; this megapipe reads version 1"),
        (lambda found: found.update(format="other"), "is not a pipeline profile: its format is 'other'"),
        (lambda found: found.pop("links", found.pop("messages")), "is damaged: KeyError: 'messages'"),
        (
            lambda found: found["pipelines"][0]["steps"][0]["rows"][0]["ends_ns"].pop(),
            "is damaged: ValueError: step 11 has rows of",
        ),
        (lambda found: found["schedules"]["8"]["rows"].__setitem__(0, "0X0"), "'0X0' is not an action"),
    ],
    ids=["version", "format", "part missing", "short row", "no action"],
)
def test_what_is_no_profile_is_refused_by_name(change: object, message: str, tmp_path: Path) -> None:
    schedule = lowered("1f1b", 2, 8)
    path = tmp_path / profile_name(11, 11)
    write_profile(profile_of(schedule, (step_of(schedule),)), path)
    found = json.loads(path.read_text())
    change(found)  # type: ignore[operator]
    path.write_text(json.dumps(found))
    with pytest.raises(DataError, match="pipeline_profile") as caught:
        read_profile(path)
    assert message in str(caught.value)


def test_a_missing_or_torn_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_profile(tmp_path / "none.json")
    (tmp_path / "torn.json").write_text('{"format": ')
    with pytest.raises(DataError, match="is damaged: JSONDecodeError"):
        read_profile(tmp_path / "torn.json")
