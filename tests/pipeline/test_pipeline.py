"""A pipeline of plain modules computes bit-identically what the same modules compute in sequence.

Pipeline and sequence run the same kernels on the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from megapipe.comm.groups import Group
from megapipe.errors import ConfigError
from megapipe.pipeline.pipeline import Pipeline
from tests.harness import RankPool
from tests.pipeline.stages import Plain, gradients, in_one_process, loss_of, merged, message, payloads, pp_group

CASES = [  # ranks, chunks, schedule, microbatches, tuples
    (1, 1, "1f1b", 3, True),
    (1, 2, "interleaved", 3, False),
    (1, 2, "interleaved", 1, True),
    (2, 1, "gpipe", 1, False),
    (2, 1, "gpipe", 5, True),
    (2, 1, "1f1b", 1, True),
    (2, 1, "1f1b", 6, False),
    (2, 2, "interleaved", 1, False),
    (2, 2, "interleaved", 3, True),
    (2, 2, "interleaved", 4, False),
    (3, 1, "1f1b", 2, True),
    (3, 2, "interleaved", 7, True),
    (4, 1, "gpipe", 4, False),
    (4, 1, "1f1b", 2, True),
    (4, 1, "1f1b", 9, False),
    (4, 2, "interleaved", 3, True),
    (4, 2, "interleaved", 8, True),
]


def make(rank: int, world_size: int, chunks: int, schedule: str, tuples: bool) -> Pipeline:
    return Pipeline(
        world_size * chunks,
        partial(Plain, tuples=tuples),
        partial(message, tuples=tuples),
        loss_of,
        pp_group(rank, world_size),
        schedule=schedule,
    )


def train(
    rank: int, world_size: int, chunks: int, schedule: str, count: int, tuples: bool
) -> tuple[tuple[list[Tensor], list[Tensor], list[Tensor]], dict[int, list[Tensor]]]:
    """Evaluate, train a step on fewer microbatches, then train and evaluate again.

    Each run must be independent of the ones before it.
    """
    pipeline = make(rank, world_size, chunks, schedule, tuples)
    evaluated = pipeline.evaluate(payloads(count))
    pipeline.train_step(payloads(1))
    for parameter in pipeline.parameters():
        parameter.grad = None
    losses = pipeline.train_step(payloads(count))
    again = pipeline.evaluate(payloads(count))
    return (evaluated, losses, again), {stage: gradients(module) for stage, module in pipeline.modules.items()}


@pytest.mark.parametrize(
    ("ranks", "chunks", "schedule", "count", "tuples"),
    CASES,
    ids=[f"{p}ranks-{v}chunks-{name}-m{m}-{'tuples' if t else 'tensors'}" for p, v, name, m, t in CASES],
)
def test_losses_and_gradients_equal_single_process(
    rank_pools: Callable[[int], RankPool], ranks: int, chunks: int, schedule: str, count: int, tuples: bool
) -> None:
    results = rank_pools(ranks).run(train, chunks, schedule, count, tuples)
    losses, expected = in_one_process(ranks * chunks, count, tuples)
    for measured in results[-1][0]:
        assert all(torch.equal(a, b) for a, b in zip(measured, losses, strict=True))
    assert all(measured == [] for (answers, _) in results[:-1] for measured in answers)
    found = merged(results)
    assert found.keys() == expected.keys()
    for stage, tensors in expected.items():
        for one, other in zip(found[stage], tensors, strict=True):
            assert torch.equal(one, other), f"gradient of stage {stage}"


def test_num_stages_must_be_a_multiple_of_ranks() -> None:
    group = Group("pp", (0, 1), 0)
    with pytest.raises(ConfigError, match="3 stages do not divide over 2 pipeline ranks; use a multiple of 2"):
        Pipeline(3, partial(Plain, tuples=False), (), loss_of, group)


def test_several_stages_per_rank_need_a_schedule_with_chunks() -> None:
    with pytest.raises(ConfigError, match="gpipe holds one chunk per rank, but 2 were given"):
        Pipeline(2, partial(Plain, tuples=False), (), loss_of, Group.alone("pp"), schedule="gpipe")


def test_pipeline_rejects_schedules_with_updates() -> None:
    with pytest.raises(ConfigError, match=r"pipedream updates weights within a step.*use 1f1b"):
        Pipeline(1, partial(Plain, tuples=False), (), loss_of, Group.alone("pp"), schedule="pipedream")


@pytest.mark.parametrize("schedule", ["zb-h1", "dualpipe", "dualpipe-v"])
def test_a_schedule_that_plain_modules_cannot_run_is_refused(schedule: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"schedule {schedule}, which splits the backward.*use one of naive, gpipe, 1f1b"
    ):
        Pipeline(2, partial(Plain, tuples=False), (), loss_of, Group.alone("pp"), schedule=schedule)
