"""Planned bytes against bytes counted with meta tensors, over recompute options, grids and schedules."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from megapipe.extras.dry_run.rank import STATE, count_rank
from megapipe.plan.memory import rank_memory
from tests.extras.dry_run.grids import (
    BLOCKS,
    FP8,
    FULL,
    LLAMA,
    MX,
    OVERLAP,
    PP2,
    PP4,
    SP2,
    TP2,
    UNITS,
    UNLIKE,
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
EXPERTS = {
    "num_experts": 4,
    "moe_layer_freq": "2",
    "moe_shared_expert_intermediate_size": 64,
    "add_bias_linear": False,
    "expert_model_parallel_size": 2,
}
SINKS = {"softmax_type": "learnable"}
PREDICTIONS = {"mtp_num_layers": 2, "position_embedding_type": "rope"}
WIDE_EXPERTS = EXPERTS | {"num_experts": 8, "moe_router_topk": 4, "moe_layer_freq": None}
ONCE = WIDE_EXPERTS | {"moe_token_dispatcher_type": "flex", "ranks_per_node": 2, "expert_model_parallel_size": 4}
CP2 = {"context_parallel_size": 2}
CAPPED = {"final_logit_softcapping": 30.0}
ZB_H1 = {"pipeline_schedule": "zb-h1"}
DRY = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
DOCUMENTS = {
    "reset_position_ids": True,
    "reset_attention_mask": True,
    "eod_mask_loss": True,
    "tokenizer_type": "ByteTokenizer",
    "vocab_size": 257,
}
# attention's matrices are most of the step
WRITTEN_OUT = {"num_layers": 1, "seq_length": 512, "micro_batch_size": 1, "global_batch_size": 1}
DROPPED = {"attention_dropout": 0.1}
SOFT_CAPPED = {"attn_logit_softcapping": 30.0}
PADDED = {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one_rank": (1, {}),
    "bf16": (1, {"dtype": "bf16"}),
    "fp64": (1, {"dtype": "fp64"}),
    "probabilities_dropped": (1, WRITTEN_OUT | DROPPED),
    "probabilities_dropped_bf16": (1, WRITTEN_OUT | DROPPED | {"dtype": "bf16"}),
    "logits_capped": (1, WRITTEN_OUT | SOFT_CAPPED),
    "logits_capped_and_probabilities_dropped_bf16": (1, WRITTEN_OUT | SOFT_CAPPED | DROPPED | {"dtype": "bf16"}),
    "experts_dp2_zero1_bf16": (2, EXPERTS | ZERO1 | {"dtype": "bf16"}),
    "experts_padded_dp2_bf16": (2, EXPERTS | PADDED | {"dtype": "bf16"}),
    "experts_grouped_padded_bf16": (2, EXPERTS | PADDED | {"dtype": "bf16", "moe_grouped_gemm": True}),
    "experts_dropped_sp2_dp2": (4, EXPERTS | SP2 | {"moe_expert_capacity_factor": 0.75}),
    "experts_full_sp2_dp2": (4, EXPERTS | SP2 | FULL),
    "experts_pp2_zb_h1": (4, EXPERTS | PP2 | {"pipeline_schedule": "zb-h1"}),
    "predictions_bf16": (1, PREDICTIONS | {"dtype": "bf16"}),
    "predictions_sp2_pp2_zb_h1": (4, PREDICTIONS | SP2 | PP2 | {"pipeline_schedule": "zb-h1"}),
    "predictions_full_pp2_zero1": (4, PREDICTIONS | FULL | PP2 | ZERO1 | {"dtype": "bf16"}),
    "predictions_experts_pp2": (4, PREDICTIONS | EXPERTS | PP2 | {"moe_layer_freq": "[0]+[1]*7"}),
    "experts_again_sp2_dp2": (4, WIDE_EXPERTS | SP2 | selective("moe")),
    "experts_and_norm_again_bf16": (2, WIDE_EXPERTS | selective("layernorm", "moe", "core_attn") | {"dtype": "bf16"}),
    "experts_again_pp2_zb_h1": (4, WIDE_EXPERTS | PP2 | selective("moe") | {"pipeline_schedule": "zb-h1"}),
    "experts_and_norm_again_zb_v_bf16": (
        4,
        WIDE_EXPERTS | PP2 | selective("moe", "layernorm") | {"pipeline_schedule": "zb-v", "dtype": "bf16"},
    ),
    "norms_and_activation_of_experts_again_sp2_dp2_bf16": (
        4,
        WIDE_EXPERTS | SP2 | selective("layernorm", "moe_act") | {"dtype": "bf16"},
    ),
    "norms_and_activation_of_experts_again_pp2_zb_h1": (
        4,
        WIDE_EXPERTS
        | PP2
        | selective("layernorm", "moe_act", "core_attn")
        | {"moe_shared_expert_gate": True, "pipeline_schedule": "zb-h1"},
    ),
    "weights_on_inputs_sp2_dp2_bf16": (4, WIDE_EXPERTS | SP2 | {"moe_apply_probs_on_input": True, "dtype": "bf16"}),
    "weights_on_inputs_pp2_zb_h1": (
        4,
        WIDE_EXPERTS | PP2 | {"moe_apply_probs_on_input": True, "pipeline_schedule": "zb-h1"},
    ),
    "activation_and_shared_experts_again_sp2_dp2": (4, WIDE_EXPERTS | SP2 | selective("moe_act", "shared_experts")),
    "activation_of_experts_again_zb_h1": (
        4,
        WIDE_EXPERTS | PP2 | selective("moe_act", "activation") | {"pipeline_schedule": "zb-h1"},
    ),
    "experts_once_to_a_node_bf16": (4, ONCE | {"dtype": "bf16"}),
    "experts_once_to_a_node_added_there": (4, ONCE | {"moe_combine_in_node": True}),
    "experts_once_to_a_node_again_zero1_bf16": (4, ONCE | ZERO1 | selective("moe") | {"dtype": "bf16"}),
    "experts_once_to_a_node_pp2_zb_h1": (8, ONCE | PP2 | ZB_H1),
    "experts_offload_pp2": (4, WIDE_EXPERTS | OFFLOAD | PP2),
    "experts_narrow_state_dp2_zero1": (2, NARROW | EXPERTS | ZERO1),
    "experts_budget_of_05_bf16": (2, WIDE_EXPERTS | {"recompute_memory_budget": 0.5, "dtype": "bf16"}),
    "experts_budget_of_03_pp2_zb_h1": (
        4,
        WIDE_EXPERTS | PP2 | {"recompute_memory_budget": 0.3, "pipeline_schedule": "zb-h1"},
    ),
    "experts_zero3_dp4_bf16": (4, EXPERTS | ZERO3 | {"dtype": "bf16"}),
    "experts_of_one_copy_zero3_units": (2, EXPERTS | ZERO3 | UNITS),
    "experts_zero2_pp2_zb_h1": (4, EXPERTS | ZERO2 | PP2 | {"pipeline_schedule": "zb-h1"}),
    "predictions_offload_pp2": (2, PREDICTIONS | OFFLOAD | PP2),
    "zero2_offload_zb_v": (4, PP2 | ZERO2 | OFFLOAD | {"pipeline_schedule": "zb-v"}),
    "zero3_units_offload": (2, ZERO3 | UNITS | OFFLOAD),
    "dp2_zero1_bf16": (2, ZERO1 | {"dtype": "bf16", "ddp_bucket_size": 50_000}),
    "zero2_pp2_bf16": (4, PP2 | ZERO2 | {"dtype": "bf16"}),
    "zero3_full_2_chunks_bf16": (8, PP2 | ZERO3 | FULL | {"num_virtual_stages_per_pipeline_rank": 2, "dtype": "bf16"}),
    "zero3_units_pp2_breadth_first": (
        4,
        PP2 | ZERO3 | UNITS | {"num_virtual_stages_per_pipeline_rank": 2, "pipeline_schedule": "breadth-first"},
    ),
    "zero3_units_tied_bf16": (
        2,
        ZERO3 | UNITS | {"dtype": "bf16", "untie_embeddings_and_output_weights": False},
    ),
    "zero3_zb_h1_sp2": (8, PP2 | SP2 | ZERO3 | UNITS | {"pipeline_schedule": "zb-h1"}),
    "dp2_reduce_in_bf16": (2, {"dtype": "bf16", "grad_reduce_in_bf16": True}),
    "tp2": (2, TP2),
    "tp2_bf16": (2, TP2 | {"dtype": "bf16"}),
    "sp2": (2, SP2),
    "sp2_bf16": (2, SP2 | {"dtype": "bf16"}),
    "full_uniform": (1, FULL),
    "full_uniform_3_sp2": (2, FULL | SP2 | {"recompute_num_layers": 3, "dtype": "bf16"}),
    "full_but_attention_sp2": (2, FULL | SP2 | {"recompute_keep_attention": True, "dtype": "bf16"}),
    "full_block_pp2": (2, FULL | PP2 | {"recompute_method": "block", "recompute_num_layers": 2}),
    "core_attn_with_dropout": (1, selective("core_attn") | {"attention_dropout": 0.1, "dtype": "bf16"}),
    "attention_dropout": (1, {"attention_dropout": 0.1}),
    "softmax_in_fp32_bf16": (1, {"attention_softmax_in_fp32": True, "dtype": "bf16"}),
    "soft_caps": (1, {"attn_logit_softcapping": 30.0, "final_logit_softcapping": 30.0, "dtype": "bf16"}),
    "budget_of_05_sp2": (2, {"recompute_memory_budget": 0.5} | SP2 | {"dtype": "bf16"}),
    "budget_of_03_pp2_zb_h1": (2, {"recompute_memory_budget": 0.3} | PP2 | {"pipeline_schedule": "zb-h1"}),
    "budget_of_07_offload_pp2": (2, {"recompute_memory_budget": 0.7} | PP2 | OFFLOAD),
    "norm_and_activation_sp2": (2, selective("layernorm", "activation") | SP2 | {"dtype": "bf16"}),
    "mlp": (1, selective("mlp")),
    "mlp_and_norm_sp2": (2, selective("mlp", "layernorm") | SP2 | {"dtype": "bf16"}),
    "pp2": (2, PP2),
    "pp2_tied": (2, PP2 | {"untie_embeddings_and_output_weights": False}),
    "pp4_sp2_zero1": (8, PP4 | SP2 | ZERO1 | {"dtype": "bf16"}),
    "gpipe": (4, PP4 | {"pipeline_schedule": "gpipe"}),
    "interleaved": (4, PP4 | {"num_virtual_stages_per_pipeline_rank": 2}),
    "breadth_first": (2, PP2 | {"num_virtual_stages_per_pipeline_rank": 2, "pipeline_schedule": "breadth-first"}),
    "zb_h1": (4, PP4 | {"pipeline_schedule": "zb-h1"}),
    "zb_h1_bf16_sp2": (4, PP2 | SP2 | {"pipeline_schedule": "zb-h1", "dtype": "bf16"}),
    "zb_h2": (4, PP4 | {"pipeline_schedule": "zb-h2"}),
    "zb_v": (4, PP4 | {"pipeline_schedule": "zb-v"}),
    "zb_h1_recompute": (2, PP2 | selective("layernorm", "activation") | {"pipeline_schedule": "zb-h1"}),
    "zb_h1_full": (2, PP2 | FULL | {"pipeline_schedule": "zb-h1"}),
    "v_half": (4, PP4 | {"pipeline_schedule": "v-half"}),
    "dualpipe": (4, PP4 | {"pipeline_schedule": "dualpipe"}),
    "dualpipe_v": (2, PP2 | {"pipeline_schedule": "dualpipe-v"}),
    "pipedream": (2, PP2 | {"pipeline_schedule": "pipedream", "clip_grad": 0.0}),
    "offload_sp2_pp2": (4, OFFLOAD | SP2 | PP2 | {"dtype": "bf16"}),
    "offload_large_ones_pp4": (4, OFFLOAD | PP4 | {"min_offloaded_tensor_size": 4096}),
    "offload_checkpoints_pp2": (2, OFFLOAD | FULL | PP2 | {"recompute_keep_attention": True}),
    "offload_v": (4, OFFLOAD | PP4 | {"pipeline_schedule": "zb-v"}),
    "narrow_state": (1, NARROW),
    "update_in_chunks": (1, NARROW | SHORT),
    "narrow_state_dp2_zero1": (2, NARROW | ZERO1 | {"grad_reduce_in_bf16": True}),
    "narrow_state_fp32_tp2": (2, NARROW | TP2 | {"dtype": "fp32", "exp_avg_sq_dtype": "fp32"}),
    "narrow_state_pipedream": (2, NARROW | PP2 | {"pipeline_schedule": "pipedream", "clip_grad": 0.0}),
    "slices_pp2": (2, DRY | PP2 | {"pipe_sp_splits": 3}),
    "slices_pp4_bf16": (4, DRY | PP4 | {"pipe_sp_splits": 4, "dtype": "bf16"}),
    "slices_sp2_pp2_zero1_bf16": (8, DRY | SP2 | PP2 | ZERO1 | {"pipe_sp_splits": 4, "dtype": "bf16"}),
    "slices_zb_h1_core_attn": (
        2,
        DRY | PP2 | {"pipe_sp_splits": 3, "pipeline_schedule": "zb-h1"} | selective("core_attn"),
    ),
    "slices_zb_v_full_bf16": (
        2,
        DRY | PP2 | FULL | {"pipe_sp_splits": 2, "pipeline_schedule": "zb-v", "dtype": "bf16"},
    ),
    "slices_budget_of_04_zb_h1": (
        2,
        DRY | PP2 | {"pipe_sp_splits": 4, "pipeline_schedule": "zb-h1", "recompute_memory_budget": 0.4},
    ),
    "slices_interleaved": (4, DRY | PP4 | {"pipe_sp_splits": 3, "num_virtual_stages_per_pipeline_rank": 2}),
    "slices_window_qk_norm": (2, DRY | PP2 | {"pipe_sp_splits": 4, "window_size": 24, "qk_layernorm": True}),
    "slices_documents_bf16": (2, DRY | PP2 | DOCUMENTS | {"pipe_sp_splits": 4, "dtype": "bf16"}),
    "documents": (1, DOCUMENTS),
    "window": (1, {"window_size": 32}),
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
    "cp4_p2p_window_zero1": (4, {"context_parallel_size": 4, "window_size": 24} | ZERO1),
    "cp2_p2p_documents_core_attn": (2, CP2 | {"reset_attention_mask": True} | selective("core_attn")),
    "cp2_p2p_soft_caps_dropout": (2, CP2 | {"attn_logit_softcapping": 30.0, "attention_dropout": 0.1}),
    "sp2_in_chunks_bf16": (2, SP2 | OVERLAP | {"dtype": "bf16"}),
    "zb_h1_sp2_in_chunks": (4, PP2 | SP2 | OVERLAP | {"pipeline_schedule": "zb-h1"}),
    "fp8_ends_pp2": (2, PP2 | FP8 | {"dtype": "bf16", "first_last_layers_bf16": True}),
    "fp8_zb_h1_sp2": (4, PP2 | SP2 | FP8 | {"dtype": "bf16", "pipeline_schedule": "zb-h1"}),
    "fp8_casts_compiled": (1, FP8 | {"dtype": "bf16", "compile_pointwise": True}),
    "fp8_full": (1, FULL | FP8 | {"fp8_recipe": "tensorwise"}),
    "fp8_experts_bf16": (2, EXPERTS | FP8 | {"dtype": "bf16"}),
    "fp8_experts_sp2_pp2_zb_h1": (8, WIDE_EXPERTS | SP2 | PP2 | FP8 | {"dtype": "bf16", "pipeline_schedule": "zb-h1"}),
    "fp8_blocks_zb_h1_sp2": (4, PP2 | SP2 | BLOCKS | {"dtype": "bf16", "pipeline_schedule": "zb-h1"}),
    "fp8_blocks_casts_compiled": (1, BLOCKS | {"dtype": "bf16", "compile_pointwise": True}),
    "fp8_blocks_full": (1, FULL | BLOCKS),
    "fp8_blocks_experts_bf16": (2, EXPERTS | BLOCKS | {"dtype": "bf16"}),
    "fp8_blocks_experts_sp2_pp2": (8, WIDE_EXPERTS | SP2 | PP2 | BLOCKS | {"dtype": "bf16"}),
    "mxfp8_zb_h1_sp2": (4, PP2 | SP2 | MX | {"dtype": "bf16", "pipeline_schedule": "zb-h1"}),
    "mxfp8_casts_compiled": (1, MX | {"dtype": "bf16", "compile_pointwise": True}),
    "mxfp8_experts_bf16": (2, EXPERTS | MX | {"dtype": "bf16"}),
    "fp8_predictions_sp2_bf16": (2, PREDICTIONS | SP2 | FP8 | {"dtype": "bf16"}),
    "documents_bf16": (1, DOCUMENTS | {"dtype": "bf16"}),
    "documents_bf16_core_attn": (1, DOCUMENTS | selective("core_attn") | {"dtype": "bf16", "micro_batch_size": 1}),
    "documents_bf16_full_but_attention": (1, DOCUMENTS | FULL | {"recompute_keep_attention": True, "dtype": "bf16"}),
    "cp2_p2p_keeps_attention_bf16": (2, CP2 | FULL | {"recompute_keep_attention": True, "dtype": "bf16"}),
    "cp2_sinks_window": (2, CP2 | SINKS | {"window_size": 24, "dtype": "bf16"}),
    "sinks_window_bf16": (1, SINKS | {"window_size": 24, "dtype": "bf16"}),
    "sinks_core_attn_bf16": (1, SINKS | selective("core_attn") | {"dtype": "bf16"}),
    "sinks_full_but_attention_bf16": (1, SINKS | FULL | {"recompute_keep_attention": True, "dtype": "bf16"}),
    "slices_full_but_attention_bf16": (
        2,
        DRY | PP2 | FULL | {"pipe_sp_splits": 3, "recompute_keep_attention": True, "dtype": "bf16"},
    ),
    "slices_cp2_sinks_zb_h1": (4, DRY | PP2 | CP2 | SINKS | {"pipe_sp_splits": 3, "pipeline_schedule": "zb-h1"}),
    "cp2_experts_sp2_bf16": (4, CP2 | EXPERTS | SP2 | {"dtype": "bf16"}),
    "cp4_a2a_shared_heads": (4, {"context_parallel_size": 4, "cp_comm_type": ("a2a",), "num_query_groups": 2}),
    "cp2_p2p_budget_of_04": (2, CP2 | {"recompute_memory_budget": 0.4, "dtype": "bf16"}),
    "cp2_a2a_core_attn_bf16": (2, CP2 | {"cp_comm_type": ("a2a",), "dtype": "bf16"} | selective("core_attn")),
    "cp2_a2a_qk_norm_documents": (
        2,
        CP2 | {"cp_comm_type": ("a2a",), "qk_layernorm": True, "reset_attention_mask": True},
    ),
    "update_by_sgd": (2, {"optimizer": "sgd"} | ZERO1),
    "update_by_sgd_without_momentum": (1, SHORT | {"optimizer": "sgd", "sgd_momentum": 0.0}),
}
BASES: dict[str, dict[str, Any]] = {"gpt2": {}, "llama": LLAMA} | UNLIKE
OF_UNLIKE = (
    "bf16",
    "sp2_bf16",
    "budget_of_05_sp2",
    "budget_of_03_pp2_zb_h1",
    "full_uniform_3_sp2",
    "full_block_pp2",
    "core_attn_with_dropout",
    "softmax_in_fp32_bf16",
    "norm_and_activation_sp2",
    "mlp_and_norm_sp2",
    "pp2_tied",
    "interleaved",
    "zb_h1_bf16_sp2",
    "zb_h1_full",
    "zb_h1_recompute",
    "zb_v",
    "dualpipe_v",
    "offload_sp2_pp2",
    "offload_checkpoints_pp2",
    "offload_v",
    "documents",
    "fp8_zb_h1_sp2",
)
VARIANTS = [
    pytest.param(
        name,
        base,
        device,
        id=f"{name}-{base}-{device}",
        marks=() if place == (index % 2, index // 2 % 2) else pytest.mark.slow,
    )
    for index, name in enumerate(CASES)
    for place, base, device in (
        ((0, 0), "gpt2", "cuda"),
        ((1, 0), "llama", "cuda"),
        ((0, 1), "gpt2", "cpu"),
        ((1, 1), "llama", "cpu"),
    )
    if (name, device) != ("fp64", "cuda")  # torch has no fused fp64 attention on CUDA
]
VARIANTS += [
    pytest.param(name, base, device, id=f"{name}-{base}-{device}", marks=pytest.mark.slow if index % 3 else ())
    for index, (name, base, device) in enumerate(product(OF_UNLIKE, UNLIKE, ("cuda", "cpu")))
    if not (base == "latent" and name.startswith("offload"))  # refused
]
VARIANTS += [
    pytest.param(name, "latent", device, id=f"{name}-latent-{device}", marks=pytest.mark.slow if index % 3 else ())
    for index, (name, device) in enumerate(product([name for name in CASES if name.startswith("cp")], ("cuda", "cpu")))
    if name not in ("cp2_sinks_window", "cp4_a2a_shared_heads", "cp2_a2a_qk_norm_documents")
]


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


UP: dict[str, tuple[int, dict[str, Any]]] = {
    "one_rank": (1, selective("mla_up_proj")),
    "core_attn_sp2_bf16": (2, selective("mla_up_proj", "core_attn") | SP2 | {"dtype": "bf16"}),
    "norm_pp2_zb_h1": (2, selective("mla_up_proj", "layernorm") | PP2 | {"pipeline_schedule": "zb-h1"}),
    "no_latent_of_q_norm": (1, selective("mla_up_proj", "layernorm") | {"q_lora_rank": None}),
    "wide_values_zero3_pp2": (4, selective("mla_up_proj") | ZERO3 | PP2 | {"v_head_dim": 32}),
    "cp2_p2p": (2, selective("mla_up_proj") | CP2),
    "cp2_a2a_core_attn": (2, selective("mla_up_proj", "core_attn") | CP2 | {"cp_comm_type": ("a2a",)}),
    "slices_pp2": (2, selective("mla_up_proj") | PP2 | {"pipe_sp_splits": 2}),
    "written_out_core_attn": (1, selective("mla_up_proj", "core_attn") | {"attn_logit_softcapping": 2.0}),
}


@pytest.mark.parametrize("name", UP)
def test_latents_that_are_projected_up_again_take_the_planned_bytes(name: str) -> None:
    world_size, changes = UP[name]
    plan = make_plan(world_size, changes | {"device": "cpu"}, UNLIKE["latent"])
    for rank in ranks_at_ends(plan.topology.pp, world_size):
        counted = count_rank(plan, rank, read_for(plan), "cpu")
        memory = rank_memory(plan, plan.topology.coordinates(rank).pp_rank)
        assert counted.peak == pytest.approx(memory.total, rel=0.02), (rank, counted, dict(memory.items))


MUON = {"optimizer": "muon", "muon_tp_mode": "duplicated", "dtype": "bf16"}
ON_HOST = {"optimizer_cpu_offload": True, "dtype": "bf16"}
FEW = {"num_layers": 2, "global_batch_size": 8, "vocab_size": 64}
OPTIMIZERS: dict[str, tuple[int, dict[str, Any]]] = {
    "sgd_zero1": (2, ZERO1 | {"optimizer": "sgd", "dtype": "bf16"}),
    "muon": (1, MUON),
    "muon_dp4": (4, MUON),
    "muon_cp4": (4, MUON | {"context_parallel_size": 4}),
    "muon_tp4": (4, MUON | {"tensor_model_parallel_size": 4}),
    "muon_tp2_dp2": (4, MUON | TP2),
    "muon_tp2_dp2_zero1": (4, MUON | TP2 | ZERO1),
    "muon_latent_dp4": (4, MUON | UNLIKE["latent"]),
    "muon_latent_tp2": (2, MUON | UNLIKE["latent"] | TP2),
    "muon_on_the_host": (2, MUON | ON_HOST),
    "on_the_host": (1, ON_HOST),
    "on_the_host_zero3": (2, ON_HOST | ZERO3),
    "narrow_on_the_host_zero1": (2, NARROW | ON_HOST | ZERO1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_takes_the_bytes_in_the_plan(name: str) -> None:
    world_size, changes = OPTIMIZERS[name]
    plan = make_plan(world_size, FEW | changes, LLAMA)
    counted, planned = count_rank(plan, 0, read_for(plan)), rank_memory(plan, 0)
    assert {item: counted.items[item] for item in STATE} == {item: planned.items.get(item, 0) for item in STATE}
    assert counted.peak == pytest.approx(planned.total, rel=0.02), (counted, dict(planned.items))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_soft_caps_of_slices_take_the_bytes_in_the_plan(schedule: str, dtype: str) -> None:
    changes = DRY | PP2 | {"pipe_sp_splits": 2, "attn_logit_softcapping": 30.0, "vocab_size": 64, "num_layers": 4}
    plan = make_plan(2, changes | {"pipeline_schedule": schedule, "dtype": dtype}, LLAMA)
    for rank in (0, 1):
        counted, planned = count_rank(plan, rank, read_for(plan)), rank_memory(plan, rank)
        assert counted.peak == pytest.approx(planned.total, rel=0.02), (counted, dict(planned.items))


WRITTEN_OUT: dict[str, dict[str, Any]] = {
    "dropout": {"attention_dropout": 0.1},
    "soft_cap": {"attn_logit_softcapping": 30.0},
    "softmax_in_fp32": {"attention_softmax_in_fp32": True},
    "dropout_budget_zero3": {"attention_dropout": 0.1, "recompute_memory_budget": 0.3} | ZERO3,
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_written_out_attention_takes_the_bytes_in_the_plan(name: str, dtype: str) -> None:
    plan = make_plan(2, WRITTEN_OUT[name] | {"vocab_size": 64, "num_layers": 4, "dtype": dtype}, LLAMA)
    counted, planned = count_rank(plan, 0, read_for(plan)), rank_memory(plan, 0)
    assert counted.peak == pytest.approx(planned.total, rel=0.02), (counted, dict(planned.items))


# small beside what each is about, in sizes of published runs
LARGE: dict[str, tuple[int, dict[str, Any]]] = {
    "loss in chunks": (2, {"vocab_size": 8000, "cross_entropy_chunk_size": 64}),
    "loss in one chunk, soft-cap": (1, {"vocab_size": 8000, "cross_entropy_chunk_size": 512, **CAPPED}),
    "loss in chunks, soft-cap": (1, {"vocab_size": 8000, "cross_entropy_chunk_size": 64, **CAPPED}),
    "loss in chunks, fp32": (1, {"vocab_size": 8000, "cross_entropy_chunk_size": 64, "dtype": "fp32"}),
    "loss in chunks, zb-h1": (2, PP2 | ZB_H1 | {"vocab_size": 8000, "cross_entropy_chunk_size": 64}),
    "fp8 in recomputed layers": (1, FULL | FP8 | {"seq_length": 1024}),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_large_models_make_is_planned(name: str) -> None:
    world_size, changes = LARGE[name]
    plan = make_plan(world_size, DRY | {"num_layers": 4, "dtype": "bf16", "vocab_size": 64} | changes, LLAMA)
    last = world_size - 1
    counted, planned = count_rank(plan, last, read_for(plan)), rank_memory(plan, plan.topology.pp - 1)
    assert counted.peak == pytest.approx(planned.total, rel=0.02), (counted, dict(planned.items))


def test_units_have_one_mask_and_one_rotary_table() -> None:
    changes = DRY | ZERO3 | {"seq_length": 512, "window_size": 64, "dtype": "bf16", "vocab_size": 64}
    units, whole = (make_plan(2, changes | more, LLAMA) for more in (UNITS | {"data_parallel_sharding_units": 8}, {}))
    counted, planned = count_rank(units, 0, read_for(units)), rank_memory(units, 0)
    assert planned.items["tables"] == rank_memory(whole, 0).items["tables"] > 512 * 512 * 2
    assert counted.peak == pytest.approx(planned.total, rel=0.02), (counted, dict(planned.items))


IN_PARTS = EXPERTS | PP2 | {"overlap_moe_expert_parallel_comm": True}
NORMS = {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)}
PARTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (4, IN_PARTS),
    "interleaved": (4, IN_PARTS | {"num_virtual_stages_per_pipeline_rank": 2, "delay_wgrad_compute": True}),
    "norms recomputed": (4, IN_PARTS | NORMS),
    "norms recomputed, shared experts": (4, IN_PARTS | NORMS | {"moe_shared_expert_intermediate_size": 64}),
    "dualpipe_bf16": (4, IN_PARTS | {"pipeline_schedule": "dualpipe", "dtype": "bf16", "delay_wgrad_compute": True}),
}


@pytest.mark.parametrize("name", PARTS)
def test_stages_in_parts_take_the_planned_bytes(name: str) -> None:
    world_size, changes = PARTS[name]
    plan = make_plan(world_size, changes, LLAMA)
    for rank in ranks_at_ends(plan.topology.pp, world_size):
        counted = count_rank(plan, rank, read_for(plan), "cuda")
        memory = rank_memory(plan, plan.topology.coordinates(rank).pp_rank)
        assert {item: counted.items[item] for item in STATE} == {item: memory.items.get(item, 0) for item in STATE}
        assert counted.peak == pytest.approx(memory.total, rel=0.03), (rank, counted, dict(memory.items))


def ranks_at_ends(pp: int, world_size: int) -> list[int]:
    """Return the first and the last rank: one with the embedding, one with the head."""
    return sorted({0, world_size - 1}) if pp > 1 else [0]
