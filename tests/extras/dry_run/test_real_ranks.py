"""A whole step of real ranks on CPUs, counting every storage, against the plan and the dry run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from megapipe.comm.groups import build_process_groups
from megapipe.extras.dry_run.rank import RankCount, count_rank, count_step
from megapipe.plan.memory import rank_memory
from megapipe.plan.run_plan import RunPlan
from megapipe.trace.meta import LiveBytes
from tests.extras.dry_run.grids import (
    DOCUMENTS,
    FULL,
    LLAMA,
    OVERLAP,
    PADDED,
    PP2,
    SP2,
    TP2,
    UNITS,
    UNLIKE,
    WIDE_EXPERTS,
    ZB_H1,
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
    "experts_padded_again": (2, WIDE_EXPERTS | PADDED | selective("layernorm", "moe_act", "core_attn")),
    "experts_shared_zb_h1": (4, LLAMA | WIDE_EXPERTS | PP2 | {"moe_shared_expert_gate": True} | ZB_H1),
    "documents_window_pp2_zb_h1": (2, LLAMA | DOCUMENTS | PP2 | ZB_H1 | {"window_size": 32, "qk_layernorm": True}),
    "latents_again_zb_h1": (2, UNLIKE["latent"] | PP2 | ZB_H1 | selective("mla_up_proj", "layernorm")),
    "zero3_units_pp2": (4, PP2 | ZERO3 | UNITS),
    "cp2_p2p": (2, LLAMA | {"context_parallel_size": 2}),
    "cp2_all_gather_core_attn": (
        2,
        LLAMA | {"context_parallel_size": 2, "cp_comm_type": ("all_gather",)} | selective("core_attn"),
    ),
    "cp2_a2a_latent": (2, UNLIKE["latent"] | {"context_parallel_size": 2, "cp_comm_type": ("a2a",)}),
    "cp2_p2p_latent_keeps_attention": (
        2,
        UNLIKE["latent"] | FULL | {"context_parallel_size": 2, "recompute_keep_attention": True},
    ),
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
    check_ranks(plan, rank_pools(world_size).run(counted_on_a_rank, changes))


def check_ranks(plan: RunPlan, counted: Sequence[RankCount]) -> None:
    """Compare what real ranks counted with the plan and the dry run."""
    for rank, real in enumerate(counted):
        with_meta = count_rank(plan, rank, read_for(plan), "cpu", in_full=True)
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
