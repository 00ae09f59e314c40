"""tools/bench/step_accuracy.py prints predicted and measured steps; the measurement is tested with
tools/bench/bench_cpu.py."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from megapipe.plan.hardware import read_hardware
from megapipe.plan.step_time import predict_step

REPOSITORY = Path(__file__).resolve().parents[2]
BENCH = REPOSITORY / "tools" / "bench"


def test_the_table_holds_the_prediction_of_each_grid_and_the_median_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    tool, bench, job = (importlib.import_module(name) for name in ("step_accuracy", "bench_cpu", "bench_job"))
    path = tmp_path / "here.yaml"
    path.write_text("like: h100\nname: here\nflops: {fp32: 1e10}\nmemory_bytes_per_second: 1e10\n")
    turns = {name: [bench.Turn(seconds, 0.5, 0.0, 0.0) for seconds in (9.0, 1.25, 1.0)] for name in ("one", "tp2")}
    monkeypatch.setattr(tool, "measure", lambda shape, names, rounds, steps: {name: turns[name] for name in names})
    assert tool.main(["--hardware", str(path), "--rows", "one", "tp2", "--layers", "2"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| megapipe")]
    for name, cells in zip(("one", "tp2"), rows, strict=True):
        predicted = predict_step(job.make_plan(bench.Shape(layers=2), bench.GRIDS[name]), read_hardware(path)).seconds
        assert cells[1:4] == [f"{1000 * predicted:.0f}", "1250", f"{predicted / 1.25:.2f}"]


def test_a_missing_file_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    assert importlib.import_module("step_accuracy").main(["--hardware", "missing.yaml"]) == 2
    assert "missing.yaml cannot be read" in capsys.readouterr().err
