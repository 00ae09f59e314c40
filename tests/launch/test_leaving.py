"""A rank that the launcher terminates because a peer has failed prints nothing; one with its own error prints it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from megapipe.errors import TrainingError
from megapipe.extras.cli.frame import guarded
from tests.launch.scripts import REPOSITORY, environment

LEAVES = """
import signal, sys
from megapipe.errors import CommunicationError, TrainingError
from megapipe.train.guard import stop_requests

with stop_requests(True) as request:
    request.begin()
    if sys.argv[1] == "terminated":
        signal.raise_signal(signal.SIGTERM)
        assert request.signal is signal.SIGTERM
    raise {"lost": CommunicationError, "stopped": TrainingError}[sys.argv[2]]("its message")
"""


@pytest.mark.parametrize(
    ("asked", "error", "code", "speaks"),
    [("terminated", "lost", -signal.SIGTERM, False), ("terminated", "stopped", 1, True), ("running", "lost", 1, True)],
    ids=["ended with its peers", "own message", "a peer lost without a launcher"],
)
def test_a_rank_prints_only_its_own_error(asked: str, error: str, code: int, speaks: bool) -> None:
    words = [sys.executable, "-c", LEAVES, asked, error]
    ended = subprocess.run(words, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=280)
    assert (ended.returncode, "its message" in ended.stderr) == (code, speaks), ended.stderr


def test_an_error_is_printed_once_with_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise TrainingError("step 3: loss nan")

    assert guarded(fails, global_rank=0, world_size=8) == 1
    assert capsys.readouterr().err == "training stopped (rank 0): step 3: loss nan\n"
    assert guarded(fails, global_rank=0, world_size=1) == 1
    assert capsys.readouterr().err == "training stopped: step 3: loss nan\n"


def test_a_bug_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise ZeroDivisionError

    assert guarded(fails, global_rank=0, world_size=1) == 1
    error = capsys.readouterr().err
    assert "this is a bug in megapipe" in error and "ZeroDivisionError" in error
