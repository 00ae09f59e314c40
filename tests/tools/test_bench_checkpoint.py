"""The checkpoint benchmark prints its figures and leaves no files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_small_round_prints_a_row_for_each_figure(tmp_path: Path) -> None:
    arguments = ["--ranks", "2", "--mebibytes", "64", "--rounds", "1"]
    command = [sys.executable, "tools/bench/bench_checkpoint.py", "--folder", str(tmp_path), *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()]
    titles = [row[0] for row in rows[2:]]
    assert titles[1] == "save, 0.0625 GiB, 2 ranks" and len(titles) == 6
    assert all(float(row[1].split()[0]) > 0 for row in rows[2:])
    assert list(tmp_path.iterdir()) == []
