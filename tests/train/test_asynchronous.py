"""Training with the asynchronous schedules.

Covers the cases in which they equal the synchronous ones, resuming, and messages to the user.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.plan.report import plan_text
from megapipe.plan.resolve import resolve
from tests.harness import RankPool
from tests.train.runs import tiny
from tests.train.test_resume import interrupted, straight

COMMON = {"clip_grad": 0.0, "untie_embeddings_and_output_weights": True, "hidden_dropout": 0.1, "weight_decay": 0.1}
PP2 = COMMON | {"pipeline_model_parallel_size": 2, "micro_batch_size": 1}
SHARDED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_bucket_size": 700,
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("pipedream", {"global_batch_size": 1, "dtype": "bf16"}),
        ("pipedream-2bw", {"global_batch_size": 2, "dtype": "fp32", "optimizer": "sgd"}),
        ("pipedream-2bw", {"global_batch_size": 2, "dtype": "fp16", "loss_scale": 256.0}),
    ],
    ids=["pipedream bf16", "2bw fp32", "2bw fp16"],
)
def test_steps_of_one_update_are_those_of_1f1b_to_the_bit(
    name: str, changes: dict[str, Any], rank_pools: Callable[[int], RankPool]
) -> None:
    found, plain = (
        rank_pools(2).run(straight, PP2 | changes | {"pipeline_schedule": which}, 3) for which in (name, "1f1b")
    )
    for (losses, tensors, _), (plain_losses, plain_tensors, _) in zip(found, plain, strict=True):
        assert losses == plain_losses
        assert tensors.keys() == plain_tensors.keys()
        assert all(torch.equal(values, plain_tensors[name]) for name, values in tensors.items())


def test_several_updates_are_not_those_of_1f1b(rank_pools: Callable[[int], RankPool]) -> None:
    names = ("pipedream", "pipedream-2bw", "1f1b")
    losses = [
        rank_pools(2).run(straight, PP2 | {"pipeline_schedule": name, "global_batch_size": 6}, 2)[0][0]
        for name in names
    ]
    assert len({first for first, _ in losses}) == 3


@pytest.mark.parametrize(
    ("name", "world", "changes"),
    [
        ("pipedream", 4, {"dtype": "bf16", "global_batch_size": 10} | SHARDED),
        ("pipedream-2bw", 2, {"global_batch_size": 6}),
    ],
    ids=["pipedream zero bf16", "2bw fp32"],
)
def test_a_run_resumed_halfway_equals_an_uninterrupted_one(
    name: str, world: int, changes: dict[str, Any], rank_pools: Callable[[int], RankPool], tmp_path: Path
) -> None:
    changes = PP2 | changes | {"pipeline_schedule": name}
    at_once = rank_pools(world).run(straight, changes, 4)
    in_two = rank_pools(world).run(interrupted, changes, 4, str(tmp_path))
    for (losses, tensors, state), (again_losses, again_tensors, again_state) in zip(at_once, in_two, strict=True):
        assert (again_losses, again_state) == (losses, state)
        assert again_tensors.keys() == tensors.keys()
        assert all(torch.equal(again_tensors[name], values) for name, values in tensors.items())


def test_the_plan_says_that_it_is_not_synchronous() -> None:
    changes = PP2 | {"pipeline_model_parallel_size": 4, "global_batch_size": 8}
    text = plan_text(resolve(tiny(**changes, pipeline_schedule="pipedream"), 4))
    assert "NOT synchronous: 8 updates in a step" in text and "4 to 1 versions of the weights" in text
    assert "NOT" not in plan_text(resolve(tiny(**changes, pipeline_schedule="1f1b"), 4))
