"""Stages in parts: the order that ranks must share, and the warm-up of pairs. tests/parity has their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import build_process_groups
from megapipe.errors import ScheduleError
from megapipe.extras.verify.oracle import drawn_slices
from megapipe.plan.resolve import resolve
from megapipe.schedule.lifetimes import peak_live_chunks
from megapipe.schedule.lower import lower
from megapipe.schedule.parts import expand
from tests.harness import RankPool
from tests.parity.grids import MODEL
from tests.tiny import make_config

OVERLAP = {"overlap_moe_expert_parallel_comm": True}
DELAY = OVERLAP | {"delay_wgrad_compute": True}


def engine_with_another_row(rank: int, world_size: int) -> Any:
    """Build an engine where rank 1 has no pairs."""
    plan = resolve(make_config(**MODEL | DELAY | {"ep": 2}), world_size)
    if rank:
        serial = replace(plan.config.parallel, overlap_moe_expert_parallel_comm=False)
        other = replace(plan, config=replace(plan.config, parallel=serial)).schedule(plan.batch.num_microbatches)
        assert plan.parts is not None
        rows = lower(expand(other.compute_only(), plan.parts), 4)
        object.__setattr__(plan, "part_schedule", lambda count: rows)
    groups = build_process_groups(plan.topology, rank, "gloo", 60)
    runtime = TrainingRuntime(plan, groups, torch.device("cpu"), drawn_slices(1, torch.float64))
    with pytest.raises(ScheduleError, match="would issue different all-to-alls"):
        runtime.engine(plan.batch.num_microbatches)


def test_ranks_that_would_issue_all_to_alls_in_other_orders_are_refused(rank_pools: Callable[[int], RankPool]) -> None:
    rank_pools(2).run(engine_with_another_row)


PP2 = {"ep": 2, "pp": 2}


def test_1f1b_in_pairs_has_a_warm_up_long_enough() -> None:
    """Each pair of 1F1B's own rows would wait for that of the next rank."""
    plan = resolve(make_config(**MODEL | PP2 | OVERLAP | {"global_batch_size": 32}), 4)
    plain = resolve(make_config(**MODEL | PP2 | {"global_batch_size": 32}), 4)
    assert [peak_live_chunks(made.schedule(8)) for made in (plan, plain)] == [(4, 2), (2, 1)]
