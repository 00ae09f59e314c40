"""tools/bench/bench_post_validation.py: its rows, and turns too short to be timed."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("bench_post_validation")


def test_a_row_has_medians_their_ratio_and_the_simulated_one(bench: ModuleType) -> None:
    row = bench.line("zb-h2", {"barrier": [0.3], "ahead": [0.1, 0.2, 0.3]}, {"barrier": 3.0, "ahead": 2.0})
    assert row == "| zb-h2 | 300 [300, 300] | 200 [150, 250] | 1.500 | 1.500 |"


def test_turns_without_a_timed_step_are_refused(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "read_environment", lambda: pytest.fail("it started"))
    monkeypatch.setattr("sys.argv", ["bench_post_validation.py", "--steps", "3"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "--steps 3 is too few" in capsys.readouterr().err
