"""tools/bench_gpu.py on a CPU: all three contenders train the same model, and a difference is found before anything is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
TINY = ("--shapes", "tiny", "--rounds", "2", "--warm-ups", "1", "--no-compile")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOOLS.parent), str(TOOLS)])}
    return subprocess.run([sys.executable, str(TOOLS / "bench_gpu.py"), *arguments], capture_output=True, text=True, env=environment)


def test_contenders_that_train_the_same_model_are_timed_in_turns(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    figures = tmp_path / "figures.json"
    done = bench(*TINY, "--device", "cpu", "--dtype", "fp32", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ")[0] for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows[1:] == ["| megapipe", "| plain", "| transformers"]
    turns = json.loads(figures.read_text())["shapes"]["tiny"]["turns"]
    assert {name: len(found) for name, found in turns.items()} == {"megapipe": 2, "plain": 2, "transformers": 2}
    assert "at least" not in done.stdout, "a CPU is held to no bar"


PLANTED = """
import sys
import bench_gpu
from gpu_bench import plain

plain.rotated = lambda x, cos, sin: x
sys.exit(bench_gpu.main(sys.argv[1:]))
"""


def test_a_model_that_computes_something_else_is_not_timed() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOOLS.parent), str(TOOLS)])}
    words = [*TINY, "--device", "cpu", "--dtype", "fp32", "--contenders", "megapipe", "plain"]
    done = subprocess.run([sys.executable, "-c", PLANTED, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "plain has a loss of" in done.stderr and "in step 1" in done.stderr and "they are not the same model" in done.stderr


def test_without_a_card_the_tool_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOLS / "bench_gpu.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TOOLS.parent), str(TOOLS)]), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "bench_gpu: torch sees no GPU (--device cpu tries the tool)\n"
