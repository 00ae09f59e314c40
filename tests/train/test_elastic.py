"""A run restarted on fewer ranks and then on more trains on the same batches of the same samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megapipe.errors import CheckpointError
from megapipe.train.loading import load
from megapipe.train.state import Schedules, TrainingState
from tests.harness import RankPool
from tests.train.jobs import furthest, job_on_rank, steps_of
from tests.train.runs import runtime_of, save

Pools = Callable[[int], RankPool]
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1 --train-iters 6"
ZERO = f"{DROPOUT} --fp64 --adam-eps 1e-4 --use-distributed-optimizer"
# (flags, ranks of one replica, tolerance of weights, moments and losses against the undisturbed run): gradients are
# summed by GEMMs on one rank and by a reduction between two, so their sums are rounded in another order
CASES = {
    "dp": (f"{DROPOUT} --fp64 --adam-eps 1e-4 --global-batch-size 4", 1, 1e-12),
    "dp_sharded_optimizer": (ZERO, 1, 1e-12),
    "dp_sharded_weights": (f"{ZERO} --data-parallel-sharding-strategy optim_grads_params", 1, 1e-12),
    "tp2_pp2_sharded_optimizer": (f"{ZERO} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4, 1e-12),
}


@pytest.mark.parametrize(
    ("flags", "ranks", "limit"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] if case[1] > 1 else []) for name, case in CASES.items()],
)
def test_halving_and_doubling_dp_changes_no_step(
    rank_pools: Pools, tmp_path: Path, flags: str, ranks: int, limit: float
) -> None:
    straight, elastic = tmp_path / "straight", tmp_path / "elastic"
    parts = [
        (2, f"--save {straight}"),
        *((dp, f"--save {elastic} --load {elastic} --exit-interval 2") for dp in (2, 1, 2)),
    ]
    for dp, where in parts:
        results = rank_pools(ranks * dp).run(job_on_rank, f"{flags} {where}")
        assert [result[1:] for result in results] == [("", None)] * ranks * dp
    assert furthest(straight, elastic) <= limit
    undisturbed, steps = (steps_of(path / "metrics.jsonl") for path in (straight, elastic))
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    for name in ("consumed_samples", "lr"):
        assert [line[name] for line in steps] == [line[name] for line in undisturbed]
    for name in ("loss", "grad_norm"):
        assert max(abs(line[name] - other[name]) for line, other in zip(steps, undisturbed, strict=True)) <= limit
    assert len({line["loss"] for line in steps}) == 6


def test_a_derived_batch_size_must_not_change_with_the_number_of_ranks(tmp_path: Path) -> None:
    before = runtime_of(0, 1, global_batch_size=None, micro_batch_size=4)  # as two ranks of 2 make it
    config = before.plan.config
    save(before, TrainingState(step=3, consumed_samples=12), Schedules.of(config), tmp_path)
    with pytest.raises(CheckpointError, match=r"size 1 .*2, .*--global-batch-size 4"):
        load(runtime_of(0, 1, global_batch_size=None, micro_batch_size=2), tmp_path)
    assert load(runtime_of(0, 1, global_batch_size=4, micro_batch_size=2), tmp_path).state.consumed_samples == 12
