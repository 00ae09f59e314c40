"""`megapipe status`: the run that was started last, and a line for each rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megapipe.errors import ConfigError
from megapipe.extras.cli.report import status as main
from megapipe.extras.report.status import newest_run, table
from megapipe.monitor import roster
from megapipe.monitor.process import host, process_space, start_ticks
from megapipe.monitor.roster import NAME, Member, Roster, Sighting, write_roster
from tests.monitor.test_diagnosis import seen

MEMBER = Member(0, host(), os.getpid(), start_ticks(os.getpid()), process_space(), "pp 0", (0,))


def started(run: Path, live: Path, second: int) -> None:
    """Write the files of a run that started at a Unix second."""
    for folder in (live, run / NAME):
        write_roster(folder, Roster((MEMBER,), {}), live, run)
        os.utime(folder / roster.ROSTER, (second, second))


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The folders of live records and of the user's work."""
    (tmp_path / "shm").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(roster, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "shm" / f"megapipe-{os.getuid()}-", tmp_path / "work"


def test_the_run_that_started_last_is_shown_wherever_it_is(
    places: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live, work = places
    assert main([]) == 2
    assert f"no run was found below {work} or on this host" in capsys.readouterr().err
    started(work / "a" / "checkpoints", Path(f"{live}1"), 1000)
    started(work / "b", Path(f"{live}2"), 2000)
    assert newest_run(Path()) == Path("b")
    started(tmp_path / "elsewhere", Path(f"{live}3"), 3000)
    assert newest_run(Path()) == tmp_path / "elsewhere"
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"the newest run is {tmp_path / 'elsewhere'}\nelsewhere: 1 rank, ")


def test_damaged_and_removed_runs_are_passed_over(places: tuple[Path, Path], tmp_path: Path) -> None:
    live, work = places
    Path(f"{live}1").mkdir()
    (Path(f"{live}1") / roster.ROSTER).write_text("{")
    started(tmp_path / "gone", Path(f"{live}2"), 3000)
    (tmp_path / "gone" / NAME / roster.ROSTER).unlink()
    with pytest.raises(ConfigError, match="no run was found"):
        newest_run(work)


def test_the_table_has_a_line_for_a_rank_of_which_nothing_is_known() -> None:
    lines = table([seen(0, peer=1), Sighting(seen(1).member, None)], {0: (1,)})
    assert len(lines) == 3
    assert lines[1].endswith("20 s  in 0F1, waits for the activation from stage 0 to 1 from rank 1")
    assert "nothing is known of it" in lines[2]
