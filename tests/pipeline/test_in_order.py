"""Schedules over in-order, blocking communicators that all channels of a route share, as over NCCL."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.schedule.action import Op
from megapipe.schedule.families import build_forward_only, build_lowered
from megapipe.schedule.placement import loop, v_shape
from megapipe.schedule.schedule import Schedule
from tests.comm.in_order import in_order_communicators
from tests.harness import RankFailure, RankPool
from tests.pipeline.stages import merged
from tests.pipeline.test_engine import run_lowered
from tests.schedule.strategies import exchange_receives

Result = tuple[Any, dict[int, list[Tensor]]]


def run(rank: int, world_size: int, schedule: Schedule, is_in_order: bool) -> Result:
    with in_order_communicators() if is_in_order else nullcontext():
        return run_lowered(rank, world_size, schedule)


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "count", "depth"),
    [
        ("1f1b", 4, 1, 6, 1),
        ("interleaved", 2, 4, 4, 1),
        ("interleaved", 4, 2, 6, 4),
        ("breadth-first", 2, 3, 4, 2),
        ("breadth-first", 4, 2, 6, 1),
        ("zb-h1", 4, 1, 6, 2),
        ("zb-v", 4, 2, 8, 1),
        ("v-half", 4, 2, 6, 4),
        ("dualpipe", 4, 1, 8, 1),
        ("dualpipe-v", 4, 2, 8, 1),
        ("dualpipe-v", 2, 2, 4, 4),
    ],
)
def test_a_step_over_shared_communicators_equals_one_over_tags(
    rank_pools: Callable[[int], RankPool], name: str, ranks: int, chunks: int, count: int, depth: int
) -> None:
    schedule = build_lowered(name, ranks, chunks, count, receive_depth=depth)
    tags, shared = (rank_pools(ranks).run(run, schedule, is_in_order) for is_in_order in (False, True))
    for ((reports, _), _), ((found, _), _) in zip(tags, shared, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, reports, strict=True))
    expected, gradients = merged(tags), merged(shared)
    for stage, tensors in expected.items():
        assert all(tensor.abs().sum() > 0 for tensor in tensors)
        assert all(torch.equal(a, b) for a, b in zip(gradients[stage], tensors, strict=True)), stage


@pytest.mark.parametrize("placement", [loop(2, 3), v_shape(4)], ids=["loop", "V"])
def test_an_evaluation_runs_over_shared_communicators(rank_pools: Callable[[int], RankPool], placement: Any) -> None:
    schedule = build_forward_only(placement, 5, 4)
    tags, shared = (rank_pools(placement.num_ranks).run(run, schedule, is_in_order) for is_in_order in (False, True))
    losses = [[loss for (reports, _), _ in result for loss in reports] for result in (tags, shared)]
    assert len(losses[0]) == 5 and all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_receives_in_another_order_run_only_over_tags(rank_pools: Callable[[int], RankPool]) -> None:
    schedule = build_lowered("breadth-first", 2, 2, 4)
    first, second = schedule.rows
    exchanged = replace(schedule, rows=(first, exchange_receives(second, Op.RECV_F)))
    expected, found = (merged(rank_pools(2).run(run, each, False)) for each in (schedule, exchanged))
    for stage, tensors in expected.items():
        assert all(torch.equal(a, b) for a, b in zip(found[stage], tensors, strict=True))
    with pytest.raises(RankFailure, match=r"a receive with tag \d+ meets a send with tag \d+"):
        rank_pools(2).run(run, exchanged, True)
