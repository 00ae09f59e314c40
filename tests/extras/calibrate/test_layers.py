"""`megapipe profile-layers` writes the file that --pipeline-layer-times reads.

The times apply to the same shapes on another grid.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megapipe.dtypes import FP8
from megapipe.extras.calibrate.rates import SIZES, Stopwatch, square_gemms, timed
from megapipe.extras.cli.calibrate import profile_layers as main
from megapipe.gpu.device_clock import EventClock
from megapipe.schedule.action import Op
from tests.pipeline.fake_device import FakeDevice
from tests.tiny import plan_for

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 512 --micro-batch-size 1 "
    "--device cpu"
).split()


def test_measured_layers_are_the_clock_of_a_pipeline(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    assert main(["--output", str(file), "--seconds", "0.01", *MODEL]) == 0
    plan = plan_for([*MODEL, "--pipeline-model-parallel-size", "2", "--pipeline-layer-times", str(file)], 2)
    assert all(plan.stage_costs.seconds[stage, op] > 0 for stage in (0, 1) for op in (Op.F, Op.B, Op.I, Op.W))
    assert sum(plan.partition.layer_counts) == 4


def test_each_kind_of_layer_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    pattern = ["--layer-pattern", "2 attention=none", "2 ffn_hidden_size=2048"]
    assert main(["--output", str(file), "--seconds", "0.05", *MODEL, *pattern]) == 0
    plan = plan_for([*MODEL, *pattern, "--pipeline-model-parallel-size", "2", "--pipeline-layer-times", str(file)], 2)
    layers = plan.layer_costs.layers
    assert layers[0] == layers[1] != layers[2] == layers[3]
    assert layers[0].forward < layers[2].forward, "an eighth of the MLP, and no attention"


def test_an_fp8_gemm_has_a_rate_that_its_size_gives() -> None:
    clock = SimpleNamespace(mark=lambda: 0, seconds=lambda begin, end: 0.5)
    first = SIZES["cpu"].first_gemm
    stopwatch = Stopwatch(torch.device("cpu"), clock)  # type: ignore[arg-type]
    assert square_gemms(FP8, stopwatch, 0.0) == 2.0 * first**3 / 0.5


def test_on_a_gpu_kernels_and_layers_are_timed_by_events_with_its_queue_kept_full() -> None:
    device = FakeDevice()
    clock = EventClock(torch.device("cpu"), device, device.now)
    watch = Stopwatch(torch.device("cuda"), clock)
    assert watch.seconds(lambda: device.launch(2_000_000), 0.1) == pytest.approx(0.002, rel=1e-3)
    assert watch.seconds(lambda: device.launch(20_000), 0.1) == pytest.approx(20e-6, rel=1e-1), (
        "calls too short for one event"
    )
    launched = device.host_ns
    steps = (lambda: device.launch(3_000_000), lambda: device.launch(5_000_000))
    seconds = timed(clock, steps, 4)
    assert seconds == [[pytest.approx(0.003, rel=1e-2), pytest.approx(0.005, rel=1e-2)]] * 4
    assert device.host_ns - launched == pytest.approx(32_000_000, rel=1e-2), "one synchronization, at the end"
