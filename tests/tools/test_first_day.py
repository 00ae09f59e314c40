"""tools/bench/first_day.py: measured and planned steps, and a report that says which parts failed."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megapipe.plan.hardware import hardware_of
from megapipe.plan.resolve import resolve
from megapipe.plan.step_time import predict_step

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


@pytest.fixture
def first_day(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("first_day")


def test_every_measured_step_stands_beside_its_estimate(first_day: ModuleType) -> None:
    shapes = importlib.import_module("gpu_bench.shapes")
    shape, hardware = shapes.SHAPES["8b-8k"], hardware_of("NVIDIA H100 80GB HBM3")
    assert hardware is not None
    predicted = predict_step(resolve(shapes.configuration(shape, "bf16", "cuda"), 1), hardware)
    turns = [{"gradients": 1.5 * predicted.seconds, "update": 0.5 * predicted.seconds}] * 3
    found = {"shape": dataclasses.asdict(shape), "turns": {"megapipe": turns, "plain": turns}, "bars": []}
    figures = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.13.0", "shapes": {"8b-8k": found}}
    _, row = first_day.comparison(figures)
    assert row[:2] == ("8b-8k", "megapipe")
    assert row[4:] == ("2.000", f"{predicted.mfu / 2:.1%}", f"{predicted.mfu:.1%}")
    figures["device"] = "CPU"
    assert first_day.comparison(figures)[1][3] == "no data sheet of this device"


def test_a_part_that_fails_is_reported_and_does_not_stop_the_others(
    first_day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = first_day.Part.run
    scripts = {"doctor": "print('seen'); raise SystemExit(3)", "tests": "print('7 passed')", "bench": "print('x | y')"}

    def short(name: str, words: list[str], folder: Path) -> object:
        return run(name, [sys.executable, "-c", scripts[name]] if name in scripts else ["/no/such/program"], folder)

    monkeypatch.setattr(first_day.Part, "run", short)
    (tmp_path / "bench.json").write_text(json.dumps({"of": "an earlier day"}))
    assert first_day.main(["--out", str(tmp_path)]) == 1
    text = (tmp_path / "first_day.md").read_text()
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert "| 3 |" in rows["doctor"] and "7 passed" in rows["tests"] and "| 127 |" in rows["gpus"]
    assert "bench_gpu.py has written no figures" in text
