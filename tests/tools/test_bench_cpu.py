"""The CPU benchmark: its rows, its check that both loops train the same model, and the steps that it predicts."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.extras.calibrate.hardware_reader import read_hardware
from megapipe.plan.step_time import predict_step

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
    flags = ("--rows", "one", "pp2", "--pairs", "2", "--json", str(figures))
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
    for turn in turns["pp2"]:  # the simulation never waits for messages
        assert 0 < turn["replay_seconds"] <= turn["measured_seconds"]


AGREEMENT = """
import torch
from bench_job import PlainJob, agreement
from plain_loop import Shape

torch.set_num_threads(1)
shape = Shape(layers=2, hidden=16, heads=2, seq=8, vocab=128, micro_batch=2, microbatches=3)
def worst():
    found = agreement(shape)
    return max(found.loss, found.norm)
print(worst())
made = PlainJob.__init__
def dropped(self, shape):
    made(self, shape)
    self._batches = self._batches[1:]
def faster(self, shape):
    made(self, shape)
    for group in self._optimizer.param_groups:
        group["lr"] *= 30
for PlainJob.__init__ in (dropped, faster):
    print(worst())
"""


def test_both_loops_train_the_same_model_and_planted_differences_are_found() -> None:
    done = run("-c", AGREEMENT)
    assert done.returncode == 0, done.stderr
    same, dropped, faster = map(float, done.stdout.split())
    assert same < 1e-5
    assert dropped > 1e-3 and faster > 1e-3


def test_the_predicted_step_of_each_grid_stands_beside_the_median_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    bench, job = importlib.import_module("bench_cpu"), importlib.import_module("bench_job")
    path = tmp_path / "here.yaml"
    path.write_text("like: h100\nname: here\nflops: {fp32: 1e10}\nmemory_bytes_per_second: 1e10\n")
    steps = [bench.StepFigures(seconds, 0.0, 0.5) for seconds in (9.0, 1.25, 1.0)]
    turns = dict.fromkeys(("plain", "one", "tp2"), steps)
    monkeypatch.setattr(bench, "measure", lambda shape, names, rounds: turns)
    monkeypatch.setattr(bench, "check_agreement", lambda shape: "the same model")
    flags = ["--hardware", str(path), "--rows", "one", "tp2", "--layers", "2"]
    assert bench.main(flags) == 0
    table = capsys.readouterr().out.partition("predicted parts")[2]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| megapipe")]
    for name, cells in zip(("one", "tp2"), rows, strict=True):
        predicted = predict_step(job.make_plan(bench.Shape(layers=2), bench.GRIDS[name]), read_hardware(path)).seconds
        assert cells[1:4] == [f"{1000 * predicted:.0f}", "1250", f"{predicted / 1.25:.2f}"]


def test_a_missing_hardware_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    main = importlib.import_module("bench_cpu").main
    assert importlib.import_module("bench_processes").exit_code(main, ["--hardware", "missing.yaml"]) == 2
    assert "missing.yaml" in capsys.readouterr().err
