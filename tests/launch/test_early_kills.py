"""A rank without a launcher that is killed while ranks start: the others end within seconds and name it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megapipe.environment import read_environment
from megapipe.monitor import start_marks
from tests.comm.test_bootstrap import free_port
from tests.launch.scripts import REPOSITORY, environment
from tests.tiny import TINY_FLAGS

MOST_SECONDS = 60.0  # from the kill until all others have ended, on a busy machine
WITHIN_SECONDS = 5.0  # of a rank's first line
NUM_KILLS = 20
CHOOSE = random.Random(20)
KILLS = [(CHOOSE.randrange(3), CHOOSE.uniform(0.0, WITHIN_SECONDS)) for _ in range(NUM_KILLS)]


@pytest.mark.parametrize(("victim", "seconds"), KILLS, ids=[f"{number}" for number in range(NUM_KILLS)])
def test_the_others_end_within_seconds_of_a_rank_killed_at_any_moment(victim: int, seconds: float) -> None:
    own = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    flags = [*TINY_FLAGS, "--global-batch-size", "3", "--mock-data", "--train-iters", "1000000", "--quiet"]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(REPOSITORY / "pretrain_gpt.py"), *flags],
            env=environment() | own | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "012"
    ]
    try:
        mark = start_marks._path(read_environment(own | {"RANK": str(victim), "LOCAL_RANK": str(victim)}))
        while not mark.exists() and ranks[victim].poll() is None:
            time.sleep(0.005)
        time.sleep(seconds)
        os.kill(ranks[victim].pid, signal.SIGKILL)
        killed = time.monotonic()
        texts = [rank.communicate(timeout=200)[1] for rank in ranks]
        took = time.monotonic() - killed
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    codes = [rank.returncode for rank in ranks]
    print(f"| rank {victim} after {seconds:.1f} s | {took:.1f} s | {codes} | {[text[-150:] for text in texts]} |")
    assert took < MOST_SECONDS
    assert codes == [-signal.SIGKILL if rank == victim else 1 for rank in range(3)]
    assert all(f"rank {victim} " in text for rank, text in enumerate(texts) if rank != victim)


def test_the_mark_is_left_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os; os._exit(9)")
    own = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": str(free_port())}
    path = os.pathsep.join((str(tmp_path), environment()["PYTHONPATH"]))
    words = [sys.executable, str(REPOSITORY / "pretrain_gpt.py"), *TINY_FLAGS, "--mock-data", "--train-iters", "3"]
    words += ["--global-batch-size", "2"]
    ended = subprocess.run(words, env=environment() | own | {"PYTHONPATH": path}, capture_output=True, timeout=200)
    mark = start_marks._path(read_environment(own))
    try:
        assert ended.returncode == 9 and mark.exists()
    finally:
        mark.unlink(missing_ok=True)
        mark.parent.rmdir()
