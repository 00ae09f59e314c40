"""`megapipe profile-layers`: what it writes is what --pipeline-layer-times reads, for the same shapes on another grid."""

from __future__ import annotations

from pathlib import Path

from megapipe.cli.plan import plan_for
from megapipe.cli.profile_layers import main
from megapipe.schedule.action import Op

MODEL = [
    "--num-layers",
    "4",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "32",
    "--vocab-size",
    "512",
    "--micro-batch-size",
    "1",
    "--device",
    "cpu",
]


def test_measured_layers_are_the_clock_of_a_pipeline(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    assert main(["--output", str(file), "--seconds", "0.01", *MODEL]) == 0
    plan = plan_for([*MODEL, "--pipeline-model-parallel-size", "2", "--pipeline-layer-times", str(file)], 2)
    assert all(plan.stage_costs.seconds[stage, op] > 0 for stage in (0, 1) for op in (Op.F, Op.B, Op.I, Op.W))
    assert sum(plan.partition.layer_counts) == 4
