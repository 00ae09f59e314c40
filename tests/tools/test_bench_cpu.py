from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BENCH = REPOSITORY / "tools" / "bench"
SIZES = "--layers 3 --hidden 16 --heads 2 --seq 8 --vocab 64 --micro-batch 1 --microbatches 4"


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(BENCH)])}
    return subprocess.run(
        [sys.executable, program, *arguments], capture_output=True, text=True, env=environment, timeout=280
    )


def test_a_tiny_run_prints_a_row_for_each_loop_and_writes_every_turn(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    flags = ("--rows", "one", "pp2", "--pairs", "2", "--markdown", "--json", str(figures))
    done = run(str(BENCH / "bench_cpu.py"), *flags, *SIZES.split())
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("|")]
    assert [row[0].removeprefix("| ") for row in rows[2:]] == [
        "plain PyTorch loop",
        "megapipe, one process",
        "megapipe, pp 2 cut 2|1",
    ]
    assert re.search(r"pp 2, simulated to measured step: \d\.\d{3}, at least 0.93 required", done.stdout)
    turns = json.loads(figures.read_text())["turns"]
    assert {name: len(row) for name, row in turns.items()} == {"plain": 2, "one": 2, "pp2": 2}
    for turn in turns["pp2"]:  # the simulation never waits for messages, and the row is only a part of the step
        assert 0 < turn["simulated_seconds"] <= turn["row_seconds"] <= turn["step_seconds"]


AGREEMENT = """
import torch
from bench_job import agreement
from plain_loop import PlainLoop, Shape

torch.set_num_threads(1)
shape = Shape(layers=2, hidden=16, heads=2, seq=8, vocab=128, micro_batch=2, microbatches=3)
print(agreement(shape))
whole = PlainLoop.step
PlainLoop.step = lambda self, rows: whole(self, rows[2:])
print(agreement(shape))
PlainLoop.step = whole
made = PlainLoop.__init__
PlainLoop.__init__ = lambda self, shape, lr, weight_decay, clip: made(self, shape, lr * 30, weight_decay, clip)
print(agreement(shape))
"""


def test_both_loops_train_the_same_model_and_planted_differences_are_found() -> None:
    done = run("-c", AGREEMENT)
    assert done.returncode == 0, done.stderr
    same, dropped, faster = map(float, done.stdout.split())
    assert same < 1e-5
    assert dropped > 1e-3 and faster > 1e-3
