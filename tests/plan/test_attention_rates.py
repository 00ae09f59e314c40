"""Rates of attention kernels: the curves are those of the published benchmarks, and plans use them."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import fmean

import pytest

from megapipe.extras.calibrate.hardware_reader import read_hardware
from megapipe.plan.attention_rates import BLACKWELL, HOPPER, AttentionRate, Curve
from megapipe.plan.hardware import hardware_named
from megapipe.plan.step_time import predict_step
from tests.tiny import plan_for

# Points were read from the labels of the bars in figures 5 and 6 of Shah et al. 2024 (arXiv:2407.08608), and from the
# CSV files of NVIDIA/cudnn-frontend at 3929da2 (MIT licence), below benchmark/sdpa_benchmark_training/results.
with (Path(__file__).parent / "attention_benchmarks.csv").open(encoding="utf-8") as file:
    POINTS = list(csv.DictReader(file))
RATES = {"hopper": HOPPER, "blackwell": BLACKWELL}
# generation, kernel, direction -> the mask of the points that the curve is fitted to
FITTED = {
    ("hopper", "flash2", "forward"): "causal",
    ("hopper", "flash2", "backward"): "none",
    ("hopper", "flash3", "forward"): "causal",
    ("hopper", "flash3", "backward"): "none",
    ("hopper", "cudnn", "forward"): "causal",
    ("hopper", "cudnn", "backward"): "causal",
    ("blackwell", "cudnn", "forward"): "causal",
    ("blackwell", "cudnn", "backward"): "causal",
}


def points(generation: str, kernel: str, direction: str, mask: str, *heads: str) -> list[tuple[float, float]]:
    """Return (mean keys of a query, share of the peak)."""
    wanted = {"generation": generation, "kernel": kernel, "direction": direction, "mask": mask}
    return [
        (int(row["sequence"]) / (2 if mask == "causal" else 1), float(row["tflops"]) / float(row["peak"]))
        for row in POINTS
        if wanted.items() <= row.items() and row["head_size"] in heads
    ]


def fitted(found: list[tuple[float, float]]) -> Curve:
    """Least squares of the relative error of 1 / share, which is linear in 1 / keys."""
    weights = [share**2 for _, share in found]
    x, y = [1 / keys for keys, _ in found], [1 / share for _, share in found]
    total = sum(weights)
    mean_x = sum(w * v for w, v in zip(weights, x, strict=True)) / total
    mean_y = sum(w * v for w, v in zip(weights, y, strict=True)) / total
    above = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in zip(weights, x, y, strict=True))
    slope = above / sum(w * (a - mean_x) ** 2 for w, a in zip(weights, x, strict=True))
    highest = 1 / (mean_y - slope * mean_x)
    return Curve(highest, slope * highest)


@pytest.mark.parametrize(
    ("which", "mask"), FITTED.items(), ids=lambda value: "-".join(value) if isinstance(value, tuple) else ""
)
def test_the_curves_are_fitted_to_the_points(which: tuple[str, str, str], mask: str) -> None:
    generation, kernel, direction = which
    curve = getattr(RATES[generation][kernel], direction)
    found = points(*which, mask, "128", "192")
    assert curve == pytest.approx(fitted(found), rel=0.01)
    errors = [curve.share(keys) / share - 1 for keys, share in found]
    assert max(map(abs, errors)) < (0.04 if generation == "hopper" else 0.18)
    assert abs(fmean(errors)) < 0.02


@pytest.mark.parametrize("kernel", HOPPER)
def test_heads_of_64_channels_have_the_mean_share_of_the_points(kernel: str) -> None:
    ratios = []
    for direction in ("forward", "backward"):
        wide, small = (points("hopper", kernel, direction, "none", size) for size in ("128", "64"))
        ratios += [narrow / full for (_, narrow), (_, full) in zip(small, wide, strict=True)]
    assert HOPPER[kernel].small_heads == pytest.approx(fmean(ratios), abs=0.01)


def test_the_share_grows_with_keys_and_head_size() -> None:
    rate = AttentionRate(Curve(0.8, 100), Curve(0.4, 100), 0.5)
    assert rate.share(100, 128, False) == rate.share(100, 256, False) == pytest.approx(0.4)
    assert rate.share(100, 64, False) == pytest.approx(0.2) and rate.share(100, 96, False) == pytest.approx(0.3)
    assert rate.share(100, 32, False) == pytest.approx(0.1)
    assert rate.share(300, 128, True) == pytest.approx(0.3)


SHAPE = (
    "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --max-position-embeddings 65536 --swiglu --bf16 "
    "--disable-bias-linear --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --device cuda "
    "--vocab-size 32000 --micro-batch-size 1 --global-batch-size 8"
)


def attention_seconds(flags: str, hardware: str = "h100", world: int = 8) -> float:
    plan = plan_for(f"{SHAPE} {flags}".split(), world, 8)
    return predict_step(plan, hardware_named(hardware)).parts["attention"]


def test_a_plan_takes_the_kernel_that_runs() -> None:
    """Longer sequences take less than the square; flash-attn 2 is slower than cuDNN, and its 2.2 at most."""
    short, long = attention_seconds("--seq-length 2048"), attention_seconds("--seq-length 32768")
    assert 16**2 / 2.2 < long / short < 16**2
    slower = attention_seconds("--seq-length 32768 --attention-impl flash") / long
    assert 1.8 < slower < 2.2
    assert attention_seconds("--seq-length 32768", "a100-80") == attention_seconds(
        "--seq-length 32768 --attention-impl flash", "a100-80"
    )


def test_a_ring_of_short_pieces_reaches_less() -> None:
    one = attention_seconds("--seq-length 8192", world=1)
    ring = attention_seconds("--seq-length 8192 --context-parallel-size 8 --cp-comm-type p2p")
    assert 8 * ring > 1.3 * one  # 512 keys a call on average, 4,096 in one


def test_a_measured_share_replaces_the_curves(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("like: h100\nname: ours\nattention_share: 0.2\n")
    measured = read_hardware(tmp_path / "file.yaml")
    assert measured.attention_rates == {} and hardware_named("h100").attention_rates == HOPPER
    plan = plan_for(f"{SHAPE} --seq-length 32768".split(), 8, 8)
    slow, fast = predict_step(plan, measured).seconds, predict_step(plan, hardware_named("h100")).seconds
    assert slow > 1.3 * fast
