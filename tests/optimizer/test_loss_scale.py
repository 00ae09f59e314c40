from __future__ import annotations

import pytest

from megapipe.config.model import PrecisionConfig
from megapipe.optimizer.gradients import LossScaler


def scales(scaler: LossScaler, steps: str) -> list[float]:
    """Return the scale after each step; 'x' is an overflow, '.' a step without one."""
    found = []
    for step in steps:
        scaler.update(step == "x")
        found.append(scaler.scale)
    return found


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("...", [8, 8, 16]),
        ("x", [8]),
        ("xx", [8, 4]),
        ("xxx", [8, 4, 2]),  # the hysteresis stays used up until the scale grows
        ("x.x", [8, 8, 4]),  # steps without overflow do not restore it
        ("x...x", [8, 8, 8, 16, 16]),  # growth does
        ("..x...", [8, 8, 8, 8, 8, 16]),  # an overflow restarts the window
        ("xxxxxx", [8, 4, 2, 2, 2, 2]),  # the minimum
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_dynamic_scale_follows_the_table(steps: str, expected: list[float]) -> None:
    assert scales(LossScaler(8.0, window=3, hysteresis=2, minimum=2.0), steps) == expected


def test_state_goes_on_where_it_stopped() -> None:
    steps = "x..x.x.....xx..."
    whole = scales(LossScaler(2.0**16, window=3, hysteresis=2), steps)
    for cut in range(len(steps)):
        first, second = LossScaler(2.0**16, window=3, hysteresis=2), LossScaler(1.0, window=3, hysteresis=2)
        head = scales(first, steps[:cut])
        second.load_state(first.state())
        assert head + scales(second, steps[cut:]) == whole


@pytest.mark.parametrize(
    ("precision", "scale", "after_overflows"),
    [
        (PrecisionConfig(dtype="bf16", loss_scale=64.0), 1.0, 1.0),
        (PrecisionConfig(dtype="fp16", loss_scale=64.0), 64.0, 64.0),
        (PrecisionConfig(dtype="fp16"), 2.0**32, 2.0**30),
        (PrecisionConfig(dtype="fp16", hysteresis=1, initial_loss_scale=8.0, min_loss_scale=2.0), 8.0, 2.0),
    ],
    ids=["bf16", "constant", "dynamic", "dynamic, at its minimum"],
)
def test_scale_is_the_configured_one(precision: PrecisionConfig, scale: float, after_overflows: float) -> None:
    scaler = LossScaler.of(precision)
    assert scaler.scale == scale
    assert scaler.is_dynamic == (precision.dtype == "fp16" and precision.loss_scale is None)
    assert scales(scaler, "xxx")[-1] == after_overflows
