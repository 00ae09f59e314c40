"""Training that resumes from a checkpoint equals uninterrupted training bit-identically."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.data.batch import Batch, DocumentRules
from megapipe.train.loading import load
from megapipe.train.state import Schedules, TrainingState
from megapipe.train.stream import train_step
from tests.harness import RankPool
from tests.token_files import IndexedWriter
from tests.train.jobs import TINY, job, steps_of
from tests.train.runs import runtime_of, save, state_of

INTERLEAVED_ZERO = {
    "pipeline_model_parallel_size": 2,
    "num_virtual_stages_per_pipeline_rank": 2,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_bucket_size": 700,
    "dtype": "bf16",
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
SHARDED_FROZEN = {
    "pipeline_model_parallel_size": 2,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "dtype": "bf16",
    "freeze": ("embedding.*", "decoder.layers.[01].*", "*.linear_fc1.*"),
}
TENSOR_PARALLEL_FP16 = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "dtype": "fp16",
    "initial_loss_scale": 2.0**24,  # overflows at first: skipped steps and the loss scale must be restored, too
    "hysteresis": 1,
    "loss_scale_window": 3,
    "hidden_dropout": 0.1,
    "train_iters": 6,
}


def train(runtime: TrainingRuntime, state: TrainingState, schedules: Schedules, stop: int) -> list[float]:
    """Train up to step `stop` on samples generated from their index and return the losses."""
    config, coordinates, dp = runtime.plan.config, runtime.coordinates, runtime.plan.topology.dp
    step = train_step(runtime)
    micro, batch_size = config.training.micro_batch_size, config.training.global_batch_size
    assert batch_size is not None
    losses = []
    while state.step < stop:
        start = state.consumed_samples

        def read(k: int, start: int = start) -> Batch:
            ids = tuple(start + (k * dp + coordinates.dp_rank) * micro + row for row in range(micro))
            tokens = np.stack(
                [np.random.RandomState(number).randint(0, 29, config.model.seq_length + 1) for number in ids]
            )
            return Batch.of(tokens.astype(np.int64), ids, DocumentRules())

        batch = runtime.microbatches(batch_size // (micro * dp), read, state.step)
        result = step.run(batch, schedules.rates(start))
        state.advance(batch_size, int(result.num_tokens))
        state.skipped_steps += result.update.skipped
        losses.append(result.loss)
    return losses


def straight(
    rank: int, world_size: int, changes: dict[str, Any], steps: int
) -> tuple[list[float], dict[str, Tensor], TrainingState]:
    runtime, state = runtime_of(rank, world_size, **changes), TrainingState()
    losses = train(runtime, state, Schedules.of(runtime.plan.config), steps)
    return losses, state_of(runtime), state


def interrupted(
    rank: int, world_size: int, changes: dict[str, Any], steps: int, root: str
) -> tuple[list[float], dict[str, Tensor], TrainingState]:
    runtime, state = runtime_of(rank, world_size, **changes), TrainingState()
    schedules = Schedules.of(runtime.plan.config)
    losses = train(runtime, state, schedules, steps // 2)
    save(runtime, state, schedules, Path(root))
    del runtime
    runtime = runtime_of(rank, world_size, **changes)
    resumed = load(runtime, Path(root))
    assert resumed.schedules is not None and resumed.state == state
    losses += train(runtime, resumed.state, resumed.schedules, steps)
    return losses, state_of(runtime), resumed.state


@pytest.mark.parametrize(
    ("world", "changes", "steps"),
    [(4, INTERLEAVED_ZERO, 10), (2, TENSOR_PARALLEL_FP16, 6), (4, SHARDED_FROZEN, 4)],
    ids=["interleaved_zero_bf16_dropout", "tp_fp16_with_overflows", "frozen_zero3_bf16"],
)
def test_a_run_resumed_halfway_equals_an_uninterrupted_one(
    rank_pools: Callable[[int], RankPool], tmp_path: Path, world: int, changes: dict[str, Any], steps: int
) -> None:
    at_once = rank_pools(world).run(straight, changes, steps)
    in_two = rank_pools(world).run(interrupted, changes, steps, str(tmp_path))
    for (losses, tensors, state), (again_losses, again_tensors, again_state) in zip(at_once, in_two, strict=True):
        assert (again_losses, again_state) == (losses, state)
        assert len(losses) == steps and len(set(losses)) > steps // 2
        assert (state.skipped_steps > 0) == (changes["dtype"] == "fp16")
        assert again_tensors.keys() == tensors.keys()
        for name, values in tensors.items():
            assert torch.equal(again_tensors[name], values), name


def test_a_smaller_batch_that_lacks_samples_is_known_at_the_start(tmp_path: Path) -> None:
    """The data are read as often as 4 steps of the new batch need; 2 steps of the old one have taken as many."""
    with IndexedWriter(tmp_path / "tokens", np.uint16) as writer:
        for start in range(16):
            writer.add_document(list(range(start, start + 9)))
    data = f"--data-path 1.0 {tmp_path / 'tokens'} --split 1,0,0 --train-iters 4 --save {tmp_path / 'run'}"
    base = TINY.replace("--mock-data", data)
    assert job("--exit-interval 2", base)[0] == 0
    code, said = job(f"--override-opt-param-scheduler --load {tmp_path / 'run'} --global-batch-size 4", base)
    assert code == 1
    assert "the train data has 17 samples" in said
    assert [line["step"] for line in steps_of(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert job(f"--override-opt-param-scheduler --load {tmp_path / 'run'} --global-batch-size 16", base)[0] == 0


def test_a_finished_run_with_more_steps_says_that_its_rate_rises_again(tmp_path: Path) -> None:
    rates = "--lr-decay-style linear --override-opt-param-scheduler"
    saves = f"--save {tmp_path / 'run'} --load {tmp_path / 'run'}"
    assert job(f"{rates} {saves} --train-iters 4")[0] == 0
    code, said = job(f"{rates} {saves} --train-iters 8 --exit-interval 5")
    assert code == 0 and said.count("--lr: had decayed to 0 in the checkpoint, and is 0.005 here") == 1, said
    code, said = job(f"{rates} {saves} --train-iters 8")
    assert code == 0 and "had decayed" not in said, said
