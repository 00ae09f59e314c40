"""Planned bytes against bytes counted with meta tensors, over recompute options, grids and schedules."""

from __future__ import annotations

from typing import Any

import pytest

from megapipe.extras.dry_run.rank import STATE, count_rank
from megapipe.plan.memory import rank_memory
from tests.extras.dry_run.grids import (
    BLOCKS,
    DOCUMENTS,
    EXPERTS,
    FP8,
    FULL,
    LLAMA,
    MX,
    OVERLAP,
    PADDED,
    PP2,
    PP4,
    SP2,
    TP2,
    UNITS,
    UNLIKE,
    WIDE_EXPERTS,
    ZB_H1,
    ZERO1,
    ZERO2,
    ZERO3,
    make_plan,
    read_for,
    selective,
)

CLOSE = 0.05
OFFLOAD = {"cpu_offloading_num_layers": 8, "min_offloaded_tensor_size": 1}
SHORT = {"seq_length": 8, "micro_batch_size": 1, "global_batch_size": 1, "hidden_size": 256}
NARROW = {
    "dtype": "bf16",
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": "bf16",
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
SINKS = {"softmax_type": "learnable"}
PREDICTIONS = {"mtp_num_layers": 2, "position_embedding_type": "rope"}
ONCE = WIDE_EXPERTS | {"moe_token_dispatcher_type": "flex", "ranks_per_node": 2, "expert_model_parallel_size": 4}
CP2 = {"context_parallel_size": 2}
CAPPED = {"final_logit_softcapping": 30.0}
DRY = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
# attention's matrices are most of the step
WRITTEN_OUT = {"num_layers": 1, "seq_length": 512, "micro_batch_size": 1, "global_batch_size": 1}
DROPPED = {"attention_dropout": 0.1}
SOFT_CAPPED = {"attn_logit_softcapping": 30.0}
LARGE = {"vocab_size": 8000, "num_layers": 4}  # beside the layers
MUON = {"optimizer": "muon", "muon_tp_mode": "duplicated", "dtype": "bf16"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one_rank": (1, {}),
    "bf16": (1, {"dtype": "bf16"}),
    "fp64": (1, {"dtype": "fp64"}),
    "probabilities_dropped": (1, WRITTEN_OUT | DROPPED),
    "logits_capped": (1, WRITTEN_OUT | SOFT_CAPPED),
    "experts_dp2_zero1_bf16": (2, EXPERTS | ZERO1 | {"dtype": "bf16"}),
    "experts_padded_dp2_bf16": (2, EXPERTS | PADDED | {"dtype": "bf16"}),
    "experts_grouped_padded_bf16": (2, EXPERTS | PADDED | {"dtype": "bf16", "moe_grouped_gemm": True}),
    "experts_dropped_sp2_dp2": (4, EXPERTS | SP2 | {"moe_expert_capacity_factor": 0.75}),
    "experts_pp2_zb_h1": (4, EXPERTS | PP2 | {"pipeline_schedule": "zb-h1"}),
    "predictions_sp2_pp2_zb_h1": (4, PREDICTIONS | SP2 | PP2 | {"pipeline_schedule": "zb-h1"}),
    "predictions_experts_pp2": (4, PREDICTIONS | EXPERTS | PP2 | {"moe_layer_freq": "[0]+[1]*7"}),
    "norms_and_activation_of_experts_again_pp2_zb_h1": (
        4,
        WIDE_EXPERTS
        | PP2
        | selective("layernorm", "moe_act", "core_attn")
        | {"moe_shared_expert_gate": True, "pipeline_schedule": "zb-h1"},
    ),
    "weights_on_inputs_pp2_zb_h1": (
        4,
        WIDE_EXPERTS | PP2 | {"moe_apply_probs_on_input": True, "pipeline_schedule": "zb-h1"},
    ),
    "experts_once_to_a_node_added_there": (4, ONCE | {"moe_combine_in_node": True}),
    "zero2_pp2_bf16": (4, PP2 | ZERO2 | {"dtype": "bf16"}),
    "zero3_units_pp2_breadth_first": (
        4,
        PP2 | ZERO3 | UNITS | {"num_virtual_stages_per_pipeline_rank": 2, "pipeline_schedule": "breadth-first"},
    ),
    "zero3_units_tied_bf16": (
        2,
        ZERO3 | UNITS | {"dtype": "bf16", "untie_embeddings_and_output_weights": False},
    ),
    "dp2_reduce_in_bf16": (2, {"dtype": "bf16", "grad_reduce_in_bf16": True}),
    "full_but_attention_sp2": (2, FULL | SP2 | {"recompute_keep_attention": True, "dtype": "bf16"}),
    "full_block_pp2": (2, FULL | PP2 | {"recompute_method": "block", "recompute_num_layers": 2}),
    "core_attn_with_dropout": (1, selective("core_attn") | {"attention_dropout": 0.1, "dtype": "bf16"}),
    "attention_dropout": (1, {"attention_dropout": 0.1}),
    "softmax_in_fp32_bf16": (1, {"attention_softmax_in_fp32": True, "dtype": "bf16"}),
    "pp2_tied": (2, PP2 | {"untie_embeddings_and_output_weights": False}),
    "gpipe": (4, PP4 | {"pipeline_schedule": "gpipe"}),
    "zb_h2": (4, PP4 | {"pipeline_schedule": "zb-h2"}),
    "dualpipe": (4, PP4 | {"pipeline_schedule": "dualpipe"}),
    "dualpipe_v": (2, PP2 | {"pipeline_schedule": "dualpipe-v"}),
    "pipedream": (2, PP2 | {"pipeline_schedule": "pipedream", "clip_grad": 0.0}),
    "offload_sp2_pp2": (4, OFFLOAD | SP2 | PP2 | {"dtype": "bf16"}),
    "offload_large_ones_pp4": (4, OFFLOAD | PP4 | {"min_offloaded_tensor_size": 4096}),
    "update_in_chunks": (1, NARROW | SHORT),
    "narrow_state_dp2_zero1": (2, NARROW | ZERO1 | {"grad_reduce_in_bf16": True}),
    "narrow_state_pipedream": (2, NARROW | PP2 | {"pipeline_schedule": "pipedream", "clip_grad": 0.0}),
    "slices_zb_v_full_bf16": (
        2,
        DRY | PP2 | FULL | {"pipe_sp_splits": 2, "pipeline_schedule": "zb-v", "dtype": "bf16"},
    ),
    "cp2_p2p": (2, CP2),
    "cp4_all_gather_sp2_bf16": (
        8,
        SP2 | {"context_parallel_size": 4, "cp_comm_type": ("all_gather",), "dtype": "bf16"},
    ),
    "cp2_a2a_zb_h1_bf16": (4, CP2 | PP2 | {"cp_comm_type": ("a2a",), "pipeline_schedule": "zb-h1", "dtype": "bf16"}),
    "cp4_a2a_p2p_full": (
        4,
        {"context_parallel_size": 4, "cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 2)}
        | FULL,
    ),
    "sp2_in_chunks_bf16": (2, SP2 | OVERLAP | {"dtype": "bf16"}),
    "fp8_ends_pp2": (2, PP2 | FP8 | {"dtype": "bf16", "first_last_layers_bf16": True}),
    "fp8_zb_h1_sp2": (4, PP2 | SP2 | FP8 | {"dtype": "bf16", "pipeline_schedule": "zb-h1"}),
    "fp8_casts_compiled": (1, FP8 | {"dtype": "bf16", "compile_pointwise": True}),
    "fp8_blocks_experts_sp2_pp2": (8, WIDE_EXPERTS | SP2 | PP2 | BLOCKS | {"dtype": "bf16"}),
    "mxfp8_zb_h1_sp2": (4, PP2 | SP2 | MX | {"dtype": "bf16", "pipeline_schedule": "zb-h1"}),
    "documents_bf16": (1, DOCUMENTS | {"dtype": "bf16"}),
    "cp2_sinks_window": (2, CP2 | SINKS | {"window_size": 24, "dtype": "bf16"}),
    "cp4_a2a_shared_heads": (4, {"context_parallel_size": 4, "cp_comm_type": ("a2a",), "num_query_groups": 2}),
    "update_by_sgd": (2, {"optimizer": "sgd"} | ZERO1),
    "update_by_sgd_without_momentum": (1, SHORT | {"optimizer": "sgd", "sgd_momentum": 0.0}),
    "slices_capped_zb_h1": (2, DRY | PP2 | SOFT_CAPPED | {"pipe_sp_splits": 2, "pipeline_schedule": "zb-h1"}),
    "latents_again_core_attn_sp2_bf16": (
        2,
        UNLIKE["latent"] | selective("mla_up_proj", "core_attn") | SP2 | {"dtype": "bf16"},
    ),
    "latents_again_norm_pp2_zb_h1": (2, UNLIKE["latent"] | selective("mla_up_proj", "layernorm") | PP2 | ZB_H1),
    "loss_in_chunks_capped_bf16": (1, DRY | CAPPED | {"cross_entropy_chunk_size": 64, "dtype": "bf16"} | LARGE),
    "experts_in_parts_interleaved": (
        4,
        LLAMA
        | EXPERTS
        | PP2
        | {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}
        | {"num_virtual_stages_per_pipeline_rank": 2},
    ),
    "muon_tp2_dp2_zero1": (4, LLAMA | MUON | TP2 | ZERO1),
    "narrow_on_the_host_zero1": (2, LLAMA | NARROW | ZERO1 | {"optimizer_cpu_offload": True}),
}
BASES: dict[str, dict[str, Any]] = {"gpt2": {}, "llama": LLAMA}
VARIANTS = [(name, ("gpt2", "llama")[index % 2], ("cuda", "cpu")[index // 2 % 2]) for index, name in enumerate(CASES)]


@pytest.mark.parametrize(("name", "base", "device"), VARIANTS)
def test_planned_bytes_equal_the_counted_ones(name: str, base: str, device: str) -> None:
    world_size, changes = CASES[name]
    plan = make_plan(world_size, changes | {"device": device}, BASES[base])
    for rank in ranks_at_ends(plan.topology.pp, world_size):
        counted = count_rank(plan, rank, read_for(plan), device)
        memory = rank_memory(plan, plan.topology.coordinates(rank).pp_rank)
        assert {item: counted.items[item] for item in STATE} == {item: memory.items.get(item, 0) for item in STATE}
        assert counted.peak == pytest.approx(memory.total, rel=CLOSE), (rank, counted, dict(memory.items))


def test_copies_of_sharded_gradients_are_planned_until_the_next_reduction() -> None:
    changes = PREDICTIONS | SP2 | PP2 | ZERO2 | FULL | {"data_parallel_sharding_granularity": "microbatch"}
    changes |= {"num_virtual_stages_per_pipeline_rank": 2, "overlap_grad_reduce": True, "grad_reduce_in_bf16": True}
    changes |= {"dtype": "bf16", "untie_embeddings_and_output_weights": False, "device": "cpu"}
    plan = make_plan(16, changes | {"global_batch_size": 64}, LLAMA)
    counted = count_rank(plan, 15, read_for(plan), "cpu")
    assert counted.peak == pytest.approx(rank_memory(plan, 1).total, rel=CLOSE)


def test_units_have_one_mask_and_one_rotary_table() -> None:
    changes = DRY | ZERO3 | {"seq_length": 512, "window_size": 64, "dtype": "bf16", "vocab_size": 64}
    units, whole = (make_plan(2, changes | more, LLAMA) for more in (UNITS | {"data_parallel_sharding_units": 8}, {}))
    counted, planned = count_rank(units, 0, read_for(units)), rank_memory(units, 0)
    assert planned.items["tables"] == rank_memory(whole, 0).items["tables"] > 512 * 512 * 2
    assert counted.peak == pytest.approx(planned.total, rel=0.02), (counted, dict(planned.items))


def ranks_at_ends(pp: int, world_size: int) -> list[int]:
    """Return the first and the last rank: one with the embedding, one with the head."""
    return sorted({0, world_size - 1}) if pp > 1 else [0]
