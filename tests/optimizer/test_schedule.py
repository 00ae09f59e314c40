from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from megapipe.config.training import (
    LR_DECAY_STYLES,
    WEIGHT_DECAY_STYLES,
    WSD_DECAY_STYLES,
    OptimizerConfig,
    TrainingConfig,
)
from megapipe.errors import ConfigError
from megapipe.optimizer.schedule import (
    LrSchedule,
    WeightDecaySchedule,
    lr_schedule,
    weight_decay_schedule,
)

FIXTURES = Path(__file__).parent.parent / "fixtures"


def test_learning_rates_are_megatrons_to_the_bit() -> None:
    expected = json.loads((FIXTURES / "megatron_llama" / "expected.json").read_text())
    steps, style = expected["steps"], expected["optimizer"]
    config = OptimizerConfig(
        lr=style["lr"], min_lr=style["min_lr"], lr_decay_style="cosine", lr_decay_iters=steps, lr_warmup_iters=2
    )
    schedule = lr_schedule(config, TrainingConfig(global_batch_size=8, train_iters=steps))
    assert [schedule(8 * step) for step in range(steps)] == expected["lrs"]


# lr 1e-2, min 1e-3, warm-up 100 from 2e-3, decay over 500, last WSD phase 200; values computed by hand
TABLE = {
    ("constant", ""): {300: 1e-2, 500: 1e-2, 900: 1e-2},
    ("linear", ""): {300: 1e-3 + 0.5 * 9e-3, 500: 1e-3, 501: 1e-3},
    ("cosine", ""): {200: 1e-3 + 0.5 * (1 + math.sqrt(0.5)) * 9e-3, 300: 1e-3 + 0.5 * 9e-3, 500: 1e-3, 900: 1e-3},
    ("inverse-square-root", ""): {400: 5e-3, 225: 1e-2 / 1.5, 501: 1e-3},
    ("WSD", "linear"): {300: 1e-2, 400: 1e-3 + 0.5 * 9e-3, 500: 1e-3},
    ("WSD", "cosine"): {300: 1e-2, 350: 1e-3 + 0.5 * (1 + math.sqrt(0.5)) * 9e-3, 500: 1e-3},
    ("WSD", "exponential"): {300: 1e-2, 400: 1e-3 + (math.sqrt(2) - 1) * 9e-3, 500: 1e-3},
    ("WSD", "minus_sqrt"): {300: 1e-2, 350: 1e-3 + 0.5 * 9e-3, 500: 1e-3},
}


@pytest.mark.parametrize(("style", "wsd_style"), TABLE, ids="-".join)
def test_learning_rate_follows_its_closed_form(style: str, wsd_style: str) -> None:
    schedule = LrSchedule(1e-2, 1e-3, 2e-3, style, 100, 500, wsd_style, 200)
    assert [schedule(samples) for samples in (0, 50, 100)] == pytest.approx([2e-3, 6e-3, 1e-2], rel=1e-12)
    for samples, expected in TABLE[style, wsd_style].items():
        assert schedule(samples) == pytest.approx(expected, rel=1e-12), samples
    after_warmup = [schedule(samples) for samples in range(100, 700)]
    assert all(a >= b * (1 - 1e-14) for a, b in pairwise(after_warmup))


def test_every_style_of_the_configuration_has_a_shape() -> None:
    assert {style for style, _ in TABLE} == set(LR_DECAY_STYLES)
    assert {wsd for style, wsd in TABLE if style == "WSD"} == set(WSD_DECAY_STYLES)
    for style in WEIGHT_DECAY_STYLES:
        WeightDecaySchedule(0.1, 0.1, style, 10)(5)


def test_inverse_square_root_never_falls_below_min_lr() -> None:
    schedule = LrSchedule(1e-2, 5e-3, 0.0, "inverse-square-root", 100, 10_000)
    assert schedule(9_000) == 5e-3


@pytest.mark.parametrize(
    "lengths",
    [
        {"lr_warmup_iters": 5, "lr_decay_iters": 20},
        {"lr_warmup_samples": 40, "lr_decay_samples": 160},
        {"lr_warmup_fraction": 0.25, "lr_decay_iters": 20},
        {"lr_warmup_fraction": 0.25},
    ],
    ids=["steps", "samples", "fraction", "fraction of the training"],
)
def test_lengths_in_steps_samples_and_fractions_mean_the_same(lengths: dict[str, float]) -> None:
    training = TrainingConfig(global_batch_size=8, train_iters=20)
    schedule = lr_schedule(OptimizerConfig(lr=1.0, **lengths), training)
    assert (schedule.warmup_samples, schedule.decay_samples) == (40, 160)
    assert (schedule(40), schedule(100), schedule(160)) == (1.0, 0.5, 0.0)


def test_length_defaults_to_the_samples_of_the_training() -> None:
    assert (
        lr_schedule(OptimizerConfig(lr=1.0), TrainingConfig(global_batch_size=7, train_samples=1000)).decay_samples
        == 1000
    )


def test_embedding_and_head_take_the_decoupled_learning_rate() -> None:
    training = TrainingConfig(global_batch_size=1, train_iters=10)
    config = OptimizerConfig(lr=1.0, min_lr=0.1, decoupled_lr=0.5)
    assert (lr_schedule(config, training)(0), lr_schedule(config, training)(10)) == (1.0, 0.1)
    decoupled = lr_schedule(config, training, decoupled=True)
    assert (decoupled(0), decoupled(10)) == (0.5, 0.1)
    assert lr_schedule(OptimizerConfig(lr=1.0), training, decoupled=True)(0) == 1.0


def test_weight_decay_ramps_over_the_training() -> None:
    training = TrainingConfig(global_batch_size=10, train_iters=10)

    def values(style: str, **ends: float) -> list[float]:
        schedule = weight_decay_schedule(
            OptimizerConfig(weight_decay=0.3, weight_decay_incr_style=style, **ends), training
        )
        return [schedule(samples) for samples in (0, 25, 50, 100, 200)]

    assert values("constant") == [0.3] * 5
    assert values("linear", start_weight_decay=0.0, end_weight_decay=0.4) == pytest.approx([0, 0.1, 0.2, 0.4, 0.4])
    quarter = 0.4 * 0.5 * (1 - math.sqrt(0.5))
    assert values("cosine", start_weight_decay=0.0, end_weight_decay=0.4) == pytest.approx([0, quarter, 0.2, 0.4, 0.4])


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (OptimizerConfig(), "--lr is not set"),
        (OptimizerConfig(lr=1.0, min_lr=2.0), r"--min-lr 2.0 is above --lr 1.0"),
        (OptimizerConfig(lr=1.0, lr_warmup_init=2.0), r"--lr-warmup-init 2.0 is above --lr 1.0"),
        (
            OptimizerConfig(lr=1.0, lr_warmup_iters=10),
            "the warm-up of 80 samples is not shorter than the decay length of 80",
        ),
        (OptimizerConfig(lr=1.0, lr_decay_style="WSD"), "set --lr-wsd-decay-iters"),
        (OptimizerConfig(lr=1.0, lr_decay_style="WSD", lr_wsd_decay_iters=11), "last phase of 88 samples"),
    ],
    ids=["no lr", "min above max", "init above max", "warm-up too long", "WSD without length", "WSD too long"],
)
def test_impossible_schedule_is_refused(optimizer: OptimizerConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lr_schedule(optimizer, TrainingConfig(global_batch_size=8, train_iters=10))


def test_impossible_weight_decay_ramp_and_endless_training_are_refused() -> None:
    with pytest.raises(ConfigError, match="use linear or cosine"):
        WeightDecaySchedule(0.0, 0.1)
    with pytest.raises(ConfigError, match="neither --train-iters nor --train-samples"):
        weight_decay_schedule(OptimizerConfig(lr=1.0), TrainingConfig(global_batch_size=8))


def test_schedules_import_no_torch() -> None:
    code = "import sys, megapipe.optimizer.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=FIXTURES.parent.parent).returncode == 0
