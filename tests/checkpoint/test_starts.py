"""The count of restarts without progress, which is kept across processes.

It starts over when a user starts the run or a newer checkpoint exists.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megapipe.checkpoint.starts import MAX_STARTS, STARTS_NAME, Starts, clear_starts, count_start, no_progress_error
from megapipe.errors import CheckpointError, NoProgressError
from tests.checkpoint.layouts import save_one


def counted(root: Path, job: str | None = None, is_restart: bool = True) -> int:
    return len(count_start(root, job, is_restart).times)


def test_the_third_start_from_one_checkpoint_is_refused_for_good(tmp_path: Path) -> None:
    assert MAX_STARTS == 2
    assert [counted(tmp_path / "run", is_restart=number > 0) for number in range(5)] == [1, 2, 3, 3, 3]
    starts = count_start(tmp_path / "run", None, True)
    assert starts.exhausted and starts.step == -1
    error = no_progress_error(starts, tmp_path / "run", "rank 3: loss nan")
    assert isinstance(error, NoProgressError) and error.exit_code == 3
    assert "start number 3 from the beginning" in str(error) and "rank 3: loss nan" in str(error)


def test_a_newer_checkpoint_resets_the_count_and_an_older_one_does_not(tmp_path: Path) -> None:
    save_one(tmp_path, 2)
    assert [counted(tmp_path, is_restart=False), counted(tmp_path)] == [1, 2]
    save_one(tmp_path, 4)
    assert counted(tmp_path) == 1
    (tmp_path / "step_00000004").rename(tmp_path / "step_00000004.damaged-1")
    assert counted(tmp_path) == 2


@pytest.mark.parametrize(
    ("jobs", "counts"),
    [((None, None), [1, 1]), (("a", "b"), [1, 1]), (("a", "a"), [1, 2])],
    ids=["no name", "another job", "the same job"],
)
def test_who_is_not_restarted_counts_only_under_the_name_of_the_same_job(
    tmp_path: Path, jobs: tuple[str | None, ...], counts: list[int]
) -> None:
    assert [counted(tmp_path, job, is_restart=False) for job in jobs] == counts


def test_a_finished_run_or_a_truncated_file_resets_the_count(tmp_path: Path) -> None:
    assert [counted(tmp_path), counted(tmp_path)] == [1, 2]
    clear_starts(tmp_path)
    assert counted(tmp_path) == 1
    (tmp_path / STARTS_NAME).write_text('{"job": nul')
    assert counted(tmp_path) == 1
    assert not [path for path in tmp_path.iterdir() if path.name != STARTS_NAME]


def test_after_a_rollback_the_run_has_come_further(tmp_path: Path) -> None:
    before = Starts(None, 120, 0, (1.0, 2.0), True)
    assert before.followed_by(Starts(None, 100, 1, (3.0,), True)).times == (3.0,)
    assert before.followed_by(Starts(None, 120, 0, (3.0,), True)).times == (1.0, 2.0, 3.0)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"--save .*file/run cannot be written"):
        count_start(tmp_path / "file" / "run", None, False)
