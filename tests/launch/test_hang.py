"""A rank that stops under the launcher: the report, the status before and after, and the termination of all ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from megapipe.extras.cli.report import status as main
from tests.launch.scripts import launch
from tests.tiny import TINY_FLAGS

LIMIT_SECONDS = 2.0
MOST_SECONDS = 20.0  # from the limit to the report; 0.2 s on an idle machine
END_SECONDS = 40.0  # from the report to the end; the launcher gives the stopped rank 2, a busy machine takes longer


def test_a_stopped_rank_of_four_is_named_and_all_are_terminated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ["--pipeline-model-parallel-size", "2", "--global-batch-size", "8", "--save", "run"]
    words = [*grid, "--mock-data", "--train-iters", "100000", "--hang-timeout-seconds", str(LIMIT_SECONDS)]
    with launch(tmp_path, 4, *TINY_FLAGS, *words) as command:
        command.wait_for("step      3/")
        assert main([str(tmp_path / "run"), "--json"]) == 0
        before = json.loads(capsys.readouterr().out)["ranks"]
        assert [rank["place"] for rank in before] == ["pp 0, dp 0", "pp 0, dp 1", "pp 1, dp 0", "pp 1, dp 1"]
        assert all(rank["answers"] and rank["step"] >= 3 for rank in before), before
        os.kill(before[3]["pid"], signal.SIGSTOP)
        began = time.monotonic()
        while "training hangs" not in command.error():
            assert time.monotonic() - began < LIMIT_SECONDS + MOST_SECONDS + 2, command.error()
            time.sleep(0.02)
        seconds = time.monotonic() - began
        ended = command.ended()
        assert time.monotonic() - began - seconds < END_SECONDS
        assert command.ranks() == []
    assert ended.code == 1
    assert LIMIT_SECONDS * 0.9 < seconds < LIMIT_SECONDS + MOST_SECONDS
    # the lowest rank that is stuck at that moment reports; which of the three is stuck first depends on where they wait
    assert re.search(
        r"communication error \(rank [012]\): training hangs on rank 3 \(pp 1, dp 1, stage 1\)", ended.error
    )
    assert "the process is stopped (SIGSTOP)" in ended.error
    assert ended.error.count("error") == 1, ended.error
    assert main([str(tmp_path / "run")]) == 0
    # a rank that first notices the end of the others exits with an error
    assert re.match(
        r"run: 4 ranks, (\d gone|\d left|\d gone, \d left)\nrank  where       step", capsys.readouterr().out
    )


def test_a_folder_without_heartbeats_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "holds no heartbeats/roster.json" in capsys.readouterr().err
