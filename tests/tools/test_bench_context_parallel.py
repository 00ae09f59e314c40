"""The benchmark of context parallelism compares the kinds and prints a row for each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench" / "bench_context_parallel.py"


def test_the_kinds_agree_and_are_timed_in_turn() -> None:
    sizes = ["--cp", "2", "--seq-length", "64", "--repeats", "1"]
    run = subprocess.run([sys.executable, TOOL, *sizes], capture_output=True, text=True, timeout=280, check=True)
    assert [line.split()[0] for line in run.stdout.splitlines()[3:]] == ["p2p", "all_gather", "a2a"]
    # 32 tokens of 128 channels of keys, in the forward once, in the backward twice; 4 bytes
    assert run.stdout.splitlines()[3].split()[-2:] == ["0.1", "MB"]
