"""A whole step of real ranks on CPUs, counting every storage, against the plan and the dry run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from megapipe.comm.groups import build_process_groups
from megapipe.extras.dry_run.rank import RankCount, count_rank, count_step, random_reader
from megapipe.plan.memory import rank_memory
from megapipe.plan.run_plan import RunPlan
from megapipe.trace.meta import LiveBytes
from tests.extras.dry_run.grids import (
    LLAMA,
    cases,
    make_plan,
)
from tests.harness import RankPool

CLOSE = 0.05
CASES = cases("real")


def counted_on_a_rank(rank: int, world_size: int, changes: dict[str, Any]) -> RankCount:
    plan = make_plan(world_size, changes | {"device": "cpu"})
    groups = build_process_groups(plan.topology, rank, "gloo", 30)
    with LiveBytes() as live:
        return count_step(plan, groups, torch.device("cpu"), live, random_reader(plan))[0]


@pytest.mark.parametrize("name", CASES)
def test_plan_and_dry_run_equal_real_ranks(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    world_size, changes = CASES[name]
    plan = make_plan(world_size, changes | {"device": "cpu"})
    check_ranks(plan, rank_pools(world_size).run(counted_on_a_rank, changes))


def check_ranks(plan: RunPlan, counted: Sequence[RankCount]) -> None:
    """Compare what real ranks counted with the plan and the dry run."""
    for rank, real in enumerate(counted):
        with_meta = count_rank(plan, rank, random_reader(plan), "cpu", in_full=True)
        planned = rank_memory(plan, plan.topology.coordinates(rank).pp_rank)
        assert with_meta.peak == pytest.approx(real.peak, rel=CLOSE), (rank, with_meta, real)
        assert planned.total == pytest.approx(real.peak, rel=CLOSE), (rank, dict(planned.items), real)
        assert with_meta.items | {"step": 0} == real.items | {"step": 0}


LONG = LLAMA | {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 192,
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "seq_length": 32768,
    "vocab_size": 512,
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "context_parallel_size": 2,
    "use_distributed_optimizer": True,
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_step_of_32768_tokens_on_two_ranks_takes_the_planned_bytes(rank_pools: Callable[[int], RankPool]) -> None:
    """A step of a small Llama with two ranks to a sequence."""
    counted = rank_pools(2).run(counted_on_a_rank, LONG, timeout=500)
    check_ranks(make_plan(2, LONG | {"device": "cpu"}), counted)
    assert counted[0].peak == pytest.approx(counted[1].peak, rel=0.01), "both ranks have as many tokens"


def test_a_kept_tensor_raises_the_count_of_a_real_step() -> None:
    """A tensor that is kept without being planned raises the count."""
    with LiveBytes() as live:
        kept = [torch.ones(1000) for _ in range(3)]
        before = live.now
        kept.append(kept[0].view(10, 100)[2:])  # a view adds no bytes
        assert live.now == before == 3 * 4000
        del kept[1]
        assert live.now == before - 4000
        temporary = kept[0] + 1
        del temporary
    assert live.peak == before and live.now == before - 4000
