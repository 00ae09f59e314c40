"""Planned bytes against bytes counted with meta tensors, over recompute options, grids and schedules."""

from __future__ import annotations

from typing import Any

import pytest

from megapipe.extras.dry_run.rank import STATE, count_rank, random_reader
from megapipe.plan.memory import rank_memory
from tests.extras.dry_run.grids import (
    DRY,
    FULL,
    LLAMA,
    PP2,
    PREDICTIONS,
    SP2,
    UNITS,
    ZERO2,
    ZERO3,
    cases,
    make_plan,
)

CLOSE = 0.05
CASES = cases("planned")
BASES: dict[str, dict[str, Any]] = {"gpt2": {}, "llama": LLAMA}
VARIANTS = [(name, ("gpt2", "llama")[index % 2], ("cuda", "cpu")[index // 2 % 2]) for index, name in enumerate(CASES)]


@pytest.mark.parametrize(("name", "base", "device"), VARIANTS)
def test_planned_bytes_equal_the_counted_ones(name: str, base: str, device: str) -> None:
    world_size, changes = CASES[name]
    plan = make_plan(world_size, changes | {"device": device}, BASES[base])
    for rank in ranks_at_ends(plan.topology.pp, world_size):
        counted = count_rank(plan, rank, random_reader(plan), device)
        memory = rank_memory(plan, plan.topology.coordinates(rank).pp_rank)
        assert {item: counted.items[item] for item in STATE} == {item: memory.items.get(item, 0) for item in STATE}
        assert counted.peak == pytest.approx(memory.total, rel=CLOSE), (rank, counted, dict(memory.items))


def test_copies_of_sharded_gradients_are_planned_until_the_next_reduction() -> None:
    changes = PREDICTIONS | SP2 | PP2 | ZERO2 | FULL | {"data_parallel_sharding_granularity": "microbatch"}
    changes |= {"num_virtual_stages_per_pipeline_rank": 2, "overlap_grad_reduce": True, "grad_reduce_in_bf16": True}
    changes |= {"dtype": "bf16", "untie_embeddings_and_output_weights": False, "device": "cpu"}
    plan = make_plan(16, changes | {"global_batch_size": 64}, LLAMA)
    counted = count_rank(plan, 15, random_reader(plan), "cpu")
    assert counted.peak == pytest.approx(rank_memory(plan, 1).total, rel=CLOSE)


def test_units_have_one_mask_and_one_rotary_table() -> None:
    changes = DRY | ZERO3 | {"seq_length": 512, "window_size": 64, "dtype": "bf16", "vocab_size": 64}
    units, whole = (make_plan(2, changes | more, LLAMA) for more in (UNITS | {"data_parallel_sharding_units": 8}, {}))
    counted, planned = count_rank(units, 0, random_reader(units)), rank_memory(units, 0)
    assert planned.items["tables"] == rank_memory(whole, 0).items["tables"] > 512 * 512 * 2
    assert counted.peak == pytest.approx(planned.total, rel=0.02), (counted, dict(planned.items))


def ranks_at_ends(pp: int, world_size: int) -> list[int]:
    """Return the first and the last rank: one with the embedding, one with the head."""
    return sorted({0, world_size - 1}) if pp > 1 else [0]
