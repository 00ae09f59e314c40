"""Checks of replicated parameters against bit flips.

A flipped bit on one rank is found within the interval, the rank and the parameter are named, and no bad checkpoint is
saved.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.checkpoint.folder import steps_in
from megapipe.data_parallel.copies import raw_bytes
from megapipe.train.copies_check import expert_biases
from megapipe.train.step import TrainStep
from tests.harness import RankPool
from tests.tables import rows
from tests.train.jobs import job_on_rank
from tests.train.test_saving import contents

Pools = Callable[[int], RankPool]
FLAG = "--check-weight-hash-across-dp-replicas-interval"
STRIKES_AFTER = 3
EXPERTS = "--num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"


def flip(values: torch.Tensor, element: int) -> None:
    """Flip the lowest bit of the second-highest byte of one element, which leaves the value finite."""
    raw_bytes(values)[element * values.element_size() + values.element_size() - 2] ^= 1


def flipping(rank: int, victim: int, name: str, where: str) -> None:
    """Flip a bit in the memory of the victim after step STRIKES_AFTER."""
    run, count = TrainStep.run, 0

    def finished(self: TrainStep, *arguments: Any) -> Any:
        nonlocal count
        result = run(self, *arguments)
        count += 1
        if count == STRIKES_AFTER:
            TrainStep.run = run  # type: ignore[method-assign]
            runtime = self.runtime
            runtime.stores.finish_weights()
            strike(runtime, name, where)
        return result

    if rank == victim:
        TrainStep.run = finished  # type: ignore[method-assign]


def strike(runtime: TrainingRuntime, name: str, where: str) -> None:
    if where == "expert_bias":
        for bias in [one for known, one in expert_biases(runtime).items() if name in known]:
            flip(bias, 1)
        return
    for buffers in runtime.buffers.values():
        for found in [one for one in buffers.names if name in one][:1]:
            if where == "parameter":
                flip(buffers.parameter(found).reshape(-1), buffers.parameter(found).numel() // 2)
                return
    for shard in runtime.optimizer.shards:
        for part, piece in shard.pieces():
            if name in piece.spec.name:
                flip(shard.master, part.start)
                return


PP2, DROPOUT = "--pipeline-model-parallel-size 2", "--hidden-dropout 0.1"
ZERO = "--use-distributed-optimizer --overlap-param-gather --ddp-bucket-size 700"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params --data-parallel-sharding-units 2"
CASES = rows(Path(__file__).with_name("flipped_bits.tsv"), {"ZERO3": ZERO3, "EXPERTS": EXPERTS, "FLAG": FLAG})


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_flipped_bit_is_found_and_named(rank_pools: Pools, tmp_path: Path, case: list[str]) -> None:
    _, world, grid, victim, name, where, words = case
    flags = f"{FLAG} 4 --train-iters 9 --save-interval 2 --save {tmp_path}/run {grid}"
    answers = rank_pools(int(world)).run(job_on_rank, flags, flipping, int(victim), name, where)
    assert {answer[1] for answer in answers} == {"TrainingError"}, answers
    assert len({answer[2] for answer in answers}) == 1
    for word in (*words.split(" & "), f"found after step {STRIKES_AFTER if '--bf16' in grid else STRIKES_AFTER + 1}"):
        assert word in answers[0][2], answers[0][2]
    assert steps_in(tmp_path / "run") == [2]


@pytest.mark.parametrize(
    ("world", "grid"),
    [
        (4, f"{PP2} --pipeline-schedule dualpipe --global-batch-size 16 {DROPOUT} {ZERO} --bf16"),
        (4, f"{PP2} --tensor-model-parallel-size 2 --sequence-parallel --qk-layernorm"),
        (8, f"{PP2} --tensor-model-parallel-size 2 --sequence-parallel {ZERO3} --bf16"),
    ],
    ids=["dualpipe_zero_bf16", "tp_sp", "zero3_tied_bf16"],
)
def test_a_healthy_run_is_not_disturbed(rank_pools: Pools, tmp_path: Path, world: int, grid: str) -> None:
    for name, extra in (("with", f"{FLAG} 2"), ("without", "")):
        for answer in rank_pools(world).run(job_on_rank, f"{grid} --train-iters 5 --save {tmp_path / name} {extra}"):
            assert answer[2] is None, answer
    found, expected = contents(tmp_path / "with", 5), contents(tmp_path / "without", 5)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_that_starts_with_different_copies_is_refused(rank_pools: Pools) -> None:
    answers = rank_pools(2).run(job_on_rank, f"--train-iters 2 {FLAG} 1000", other_start)
    assert re.search("found after step 0: .* elements differ", answers[0][2] or ""), answers


def other_start(rank: int) -> None:
    begin = TrainingRuntime.__init__

    def begun(self: TrainingRuntime, *arguments: Any, **named: Any) -> None:
        TrainingRuntime.__init__ = begin  # type: ignore[method-assign]
        begin(self, *arguments, **named)
        if rank == 1:
            for buffers in self.buffers.values():
                for buffer in buffers.buffers:
                    buffer.parameters.mul_(1.5)

    TrainingRuntime.__init__ = begun  # type: ignore[method-assign]
