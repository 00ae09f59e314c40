"""`megapipe launch --max-restarts`: recoverable failures are restarted from the newest checkpoint, others end the
job."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.launch.scripts import launch
from tests.tiny import TINY_FLAGS

ENDS_WITH = """
import os, sys
count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("start", count, flush=True)
sys.exit({0: 1, 1: 3}[count])
"""
KILLED_IN_STEP = """
import os, signal, sys
from megapipe.extras.cli.pretrain import main
from megapipe.train.step import TrainStep

launch, taken = TrainStep.run, []


def one_step(self, *arguments):
    taken.append(1)
    if len(taken) == 4 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return launch(self, *arguments)


TrainStep.run = one_step
sys.exit(main())
"""
SAVING = ("--mock-data", "--global-batch-size", "2", "--save", "run", "--save-interval", "2")


def test_an_unrecoverable_exit_code_ends_the_restarts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDS_WITH)
    with launch(tmp_path, 1, script=script, before=("--max-restarts", "5")) as command:
        ended = command.ended()
    assert (ended.code, ended.out) == (3, "start 0\nstart 1\n")
    assert ended.error == "restart 1 of at most 5 (--max-restarts): see above\n"


def test_a_signal_causes_no_restart(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    with launch(tmp_path, 1, script=script, before=("--max-restarts", "5")) as command:
        command.wait_for("here")
        command.signal(signal.SIGTERM)
        ended = command.ended()
    assert ended.code == 143 and ended.out == "here\n"
    assert ended.error.startswith("ended by SIGTERM")


def test_a_job_that_loses_a_rank_resumes_from_its_newest_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED_IN_STEP)
    with launch(
        tmp_path, 2, *TINY_FLAGS, *SAVING, "--train-iters", "5", script=script, before=("--max-restarts", "9")
    ) as command:
        ended = command.ended()
    assert ended.code == 0, ended.error
    assert ended.error == "restart 1 of at most 9 (--max-restarts): rank 1 was killed by SIGKILL\n"
    assert "a restart: continuing from --save run" in ended.out and "continuing after step 2" in ended.out
    assert (tmp_path / "run" / "step_00000005").is_dir() and not (tmp_path / "run" / "starts.json").exists()
