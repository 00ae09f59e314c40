"""A whole step of real ranks on CPUs, counting every storage, against the plan and the dry run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megapipe.comm.groups import build_process_groups
from megapipe.extras.dry_run.meta import LiveBytes
from megapipe.extras.dry_run.rank import RankCount, count_rank, count_step
from megapipe.plan.memory import rank_memory
from tests.extras.dry_run.grids import (
    FULL,
    LLAMA,
    OVERLAP,
    PP2,
    SP2,
    TP2,
    UNITS,
    UNLIKE,
    ZERO1,
    ZERO3,
    make_plan,
    read_for,
    selective,
)
from tests.harness import RankPool

CLOSE = 0.05
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one_rank": (1, {}),
    "one_rank_bf16_full": (1, FULL | {"dtype": "bf16"}),
    "llama_core_attn": (1, LLAMA | selective("core_attn")),
    "dp2_zero1": (2, LLAMA | ZERO1 | {"dtype": "bf16", "ddp_bucket_size": 50_000}),
    "tp2": (2, TP2),
    "sp2_norm_and_activation_in_chunks": (2, LLAMA | SP2 | OVERLAP | selective("layernorm", "activation")),
    "pp2": (2, PP2 | {"untie_embeddings_and_output_weights": False}),
    "pp2_interleaved": (2, LLAMA | PP2 | {"num_virtual_stages_per_pipeline_rank": 2}),
    "pp2_zb_h1": (2, PP2 | {"pipeline_schedule": "zb-h1"}),
    "dualpipe_v": (2, LLAMA | PP2 | {"pipeline_schedule": "dualpipe-v"}),
    "offload": (1, LLAMA | {"cpu_offloading_num_layers": 8, "min_offloaded_tensor_size": 1}),
    "gemma_sp2": (2, UNLIKE["gemma"] | SP2 | {"dtype": "bf16"}),
    "gemma_pp2_full": (2, UNLIKE["gemma"] | PP2 | FULL | {"pipeline_schedule": "zb-h1"}),
    "olmo_tp2": (2, UNLIKE["olmo"] | TP2 | selective("layernorm", "mlp")),
    "olmo_pp2_interleaved": (2, UNLIKE["olmo"] | PP2 | {"num_virtual_stages_per_pipeline_rank": 2, "dtype": "bf16"}),
    "mixed_pp2_zb_v": (2, UNLIKE["mixed"] | PP2 | {"pipeline_schedule": "zb-v"}),
    "mixed_offload": (1, UNLIKE["mixed"] | {"cpu_offloading_num_layers": 8, "min_offloaded_tensor_size": 1}),
    "zero3_units_pp2": (4, PP2 | ZERO3 | UNITS),
    "post_validation_zero1": (4, PP2 | ZERO1 | {"optimizer_post_validation": True}),
}


def counted_on_a_rank(rank: int, world_size: int, changes: dict[str, Any]) -> RankCount:
    plan = make_plan(world_size, changes | {"device": "cpu"})
    groups = build_process_groups(plan.topology, rank, "gloo", 30)
    with LiveBytes() as live:
        return count_step(plan, groups, torch.device("cpu"), live, read_for(plan))[0]


@pytest.mark.parametrize("name", CASES)
def test_plan_and_dry_run_equal_real_ranks(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    world_size, changes = CASES[name]
    plan = make_plan(world_size, changes | {"device": "cpu"})
    for rank, real in enumerate(rank_pools(world_size).run(counted_on_a_rank, changes)):
        with_meta = count_rank(plan, rank, read_for(plan), "cpu", in_full=True)
        planned = rank_memory(plan, plan.topology.coordinates(rank).pp_rank)
        assert with_meta.peak == pytest.approx(real.peak, rel=CLOSE), (rank, with_meta, real)
        assert planned.total == pytest.approx(real.peak, rel=CLOSE), (rank, dict(planned.items), real)
        assert with_meta.items | {"step": 0} == real.items | {"step": 0}


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
