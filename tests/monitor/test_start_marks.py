"""Marks of starting ranks: only one that ended in this start counts, nothing stays, and nothing foreign is trusted."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megapipe.environment import read_environment
from megapipe.monitor import start_marks
from megapipe.monitor.start_marks import SKEW_SECONDS, ended_rank, leave_mark, remove_mark
from tests.launch.scripts import environment

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
RANK_0 = read_environment({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
RANK_1 = dataclasses.replace(RANK_0, global_rank=1, local_rank=1)
LEAVES = """
import os, signal, sys
from megapipe.environment import read_environment
from megapipe.monitor.start_marks import leave_mark
leave_mark(read_environment())
if sys.argv[1:] == ["killed"]:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep live folders below the test's folder."""
    monkeypatch.setattr("megapipe.monitor.roster.SHARED_MEMORY", tmp_path)
    return tmp_path


def mark_of(rank: int) -> Path:
    return start_marks._path(RANK_0).with_name(f"rank_{rank:05d}")


def killed_rank_1(age: float = 0.0) -> int:
    """Leave the mark of a rank 1 that has ended, and return its process id. age: seconds since it was left."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        ticks = start_marks.start_ticks(process.pid)
        mark_of(1).parent.mkdir(mode=0o700, exist_ok=True)
        mark_of(1).write_text(f"{process.pid} {ticks} {start_marks.process_space()}")
        os.utime(mark_of(1), (time.time() - age,) * 2)
        process.kill()
    return process.pid


def test_a_rank_that_ended_in_this_start_is_named_and_one_of_an_earlier_start_is_not() -> None:
    leave_mark(RANK_0)
    assert ended_rank(RANK_0) == ""
    pid = killed_rank_1()
    assert f"rank 1 (process {pid} " in ended_rank(RANK_0)
    killed_rank_1(age=2 * SKEW_SECONDS)
    assert ended_rank(RANK_0) == ""


def test_a_living_rank_and_one_that_is_connected_are_not_named() -> None:
    leave_mark(RANK_0)
    leave_mark(RANK_1)
    assert ended_rank(RANK_0) == "" == ended_rank(RANK_1)
    remove_mark(RANK_1)
    assert ended_rank(RANK_0) == "" and not mark_of(1).exists()
    remove_mark(RANK_0)
    assert not mark_of(0).parent.exists()


def test_a_broken_mark_counts_as_none() -> None:
    leave_mark(RANK_0)
    mark_of(1).write_text("no process")
    assert ended_rank(RANK_0) == ""


@pytest.mark.parametrize("end", ["exits", "killed"])
def test_a_rank_that_exits_takes_its_mark_along_and_the_next_job_removes_that_of_a_killed_one(end: str) -> None:
    folder = start_marks.live_path("").parent
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    script = f"from pathlib import Path\nimport megapipe.monitor.roster as r\nr.SHARED_MEMORY = Path({str(folder)!r})\n"
    subprocess.run([sys.executable, "-c", script + LEAVES, end], env=environment() | variables, timeout=200)
    assert mark_of(1).exists() == (end == "killed")
    leave_mark(dataclasses.replace(RANK_0, master_port=2))
    assert not mark_of(1).parent.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes links of other users")
def test_the_folder_of_another_user_and_a_link_of_one_are_not_used(base: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for foreign in (True, False):
        folder = mark_of(0).parent
        if foreign:
            folder.mkdir()
            os.chown(folder, 12345, 12345)
        else:
            folder.rmdir()
            folder.symlink_to(target)
            os.lchown(folder, 12345, 12345)
        leave_mark(RANK_0)
        assert list(folder.iterdir()) == []
        mark_of(0).touch()
        os.mkfifo(mark_of(1))  # reading it would wait for a writer
        assert ended_rank(RANK_0) == ""
        leave_mark(dataclasses.replace(RANK_0, master_port=2))
        for path in folder.iterdir():
            path.unlink()


def test_ranks_of_an_agent_and_single_ranks_leave_none(base: Path) -> None:
    leave_mark(dataclasses.replace(RANK_0, has_agent_store=True))
    leave_mark(read_environment({}))
    assert list(base.iterdir()) == []
