"""tools/bench/card_bench/calibrate.py: the rates of calibrate beside those that plans use."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from megapipe.config.load import load_config
from megapipe.plan.hardware import HARDWARE
from megapipe.plan.resolve import resolve
from megapipe.plan.step_time import predict_step

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("card_bench.calibrate")


def test_measured_rates_stand_beside_those_of_the_table(tool: ModuleType) -> None:
    h100 = HARDWARE["h100"]
    rows = dict(tool.rates(h100, h100, "cuda", 2))
    assert all(found == sheet for found, sheet in rows.values()) and len(rows) == 6
    reached = rows["GEMM of 8192 in bf16, TFLOP/s"][0]
    assert reached == pytest.approx(989 * h100.gemm_share(8192, 8192, 8192), rel=0.01)
    measured = dataclasses.replace(h100, gemm_shares=((64, 0.1), (512, 0.5)))  # there was no time for larger ones
    found, sheet = dict(tool.rates(measured, h100, "cuda", 1))["GEMM of 512 in bf16, TFLOP/s"]
    assert found == pytest.approx(494.5, rel=0.01)
    assert sheet == pytest.approx(989 * h100.gemm_share(512, 512, 512), rel=0.01)
    assert {sheet for _, (_, sheet) in tool.rates(h100, None, "cuda", 1)} == {None}


@pytest.mark.parametrize("gpu", ["h100", "a100-80", "b200", "mi300x"])
def test_the_assumed_share_of_attention_is_the_one_that_plans_use(tool: ModuleType, gpu: str) -> None:
    """Measured in place of the kernel's curves, the share gives the same seconds of attention in a plan."""
    parts = importlib.import_module("gpu_day.parts")
    hardware = HARDWARE[gpu]
    (run,) = (part for part in parts.PARTS if part.name == "run-dense")
    plan = resolve(load_config(parts.flags_of(run.words("cuda", Path("out")))[0]).config, 1)
    share = tool.attention_share(hardware, "cuda")
    measured = dataclasses.replace(hardware, attention_share=share, attention_rates={})
    curves, one_share = (predict_step(plan, each).parts["attention"] for each in (hardware, measured))
    assert one_share == pytest.approx(curves, rel=1e-3)
    assert tool.attention_share(measured, "cuda") == pytest.approx(share)
    rows = dict(tool.rates(measured, hardware, "cuda", 1))
    (rate,) = (pair for name, pair in rows.items() if name.startswith("attention") and name.endswith("TFLOP/s"))
    (shown,) = (pair for name, pair in rows.items() if "(attention_share)" in name)
    assert shown == pytest.approx((share, share)) and rate[0] == pytest.approx(share * hardware.peak("bf16") / 1e12)
