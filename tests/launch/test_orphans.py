"""`kill -9` of the launcher: its ranks end by themselves, at once, and what was saved stays."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megapipe.cli.orphan import _is_ancestor
from megapipe.monitor.process import process_state
from tests.launch.scripts import TINY, launch
from tests.train.test_saving import contents

MOST_SECONDS = 5.0


def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    words = ["--pipeline-model-parallel-size", "2", "--save", "run", "--save-interval", "2", "--keep-last", "2", "--mock-data"]
    with launch(tmp_path, 2, *TINY, *words, "--train-iters", "100000") as door:
        door.wait_for("saved ")
        ranks = door.ranks()
        assert len(ranks) == 2
        door.signal(signal.SIGKILL)
        began = time.monotonic()
        while any(not process_state(rank, None).has_ended for rank in ranks) and time.monotonic() < began + MOST_SECONDS:
            time.sleep(0.01)
        seconds = time.monotonic() - began
        left = [rank for rank in ranks if not process_state(rank, None).has_ended]
        for rank in left:
            os.kill(rank, signal.SIGKILL)
        ended = door.ended()
    assert not left
    print(f"{seconds:.2f} s to the end of all ranks")  # docs/reliability.md says them: pytest -rP
    assert ended.error.startswith("rank 0: the launcher (process "), ended.error
    assert len(ended.error.splitlines()) == 1, ended.error
    steps = sorted(int(path.name.removeprefix("step_")) for path in (tmp_path / "run").glob("step_*"))
    assert steps and contents(tmp_path / "run", steps[-1])


def test_a_process_id_counts_only_if_it_is_an_ancestors() -> None:
    assert _is_ancestor(os.getppid())
    assert not _is_ancestor(os.getpid())
    assert not _is_ancestor(None)


pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
