"""The bytes that a plan expects of a checkpoint are those of the tensors in the one that is written."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megapipe.checkpoint.manifest import ITEM_BYTES, read_manifest
from megapipe.config.load import load_config
from megapipe.extras.report.goodput import checkpoint_bytes
from megapipe.plan.resolve import resolve
from tests.harness import RankPool
from tests.train.jobs import TINY, job_on_rank

NARROW = "--use-precision-aware-optimizer --use-distributed-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, "--bf16"),
        (1, "--fp64"),
        (1, f"--bf16 {NARROW}"),
        (1, "--bf16 --no-save-optim"),
        (1, "--no-save-optim"),
        (1, "--optimizer muon"),
        (1, "--optimizer sgd --sgd-momentum 0"),
        (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --vocab-size 29"),
        (4, "--pipeline-model-parallel-size 2 --use-distributed-optimizer --untie-embeddings-and-output-weights"),
        (2, "--num-experts 4 --disable-bias-linear --expert-model-parallel-size 2 --use-distributed-optimizer"),
    ],
    ids="bf16 fp64 narrow weights fp32_weights muon sgd tp2_pp2_padded pp2_dp2_zero ep2_zero".split(),
)
def test_the_planned_bytes_are_written(tmp_path: Path, world: int, flags: str) -> None:
    command = f"{flags} --train-iters 1 --save {tmp_path}"
    with RankPool(world) as pool:
        for result in pool.run(job_on_rank, command):
            assert result[2] is None, result
    tensors = read_manifest(tmp_path / "step_00000001").tensors
    written = sum(math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in tensors.values())
    plan = resolve(load_config([*TINY.split(), *command.split()]).config, world)
    whole, of_rank = checkpoint_bytes(plan)
    assert whole == written
    # the fullest rank also counts padding and, without shards, what all replicas have
    assert whole / world <= of_rank <= whole * (1.0 if world == 1 else 0.75) + 12_288
