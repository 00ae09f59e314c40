"""Context parallelism of every kind equals one process in fp64: losses, gradients, weights."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from megapipe.data.batch import Batch
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from tests.harness import RankPool
from tests.parity.comparison import plan_differences
from tests.tiny import NOPE, make_config

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "seq_length": 24,
    "vocab_size": 24,
    "make_vocab_size_divisible_by": 4,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 2,
    "lr": 0.01,
    "adam_eps": 1e-3,
    "dtype": "fp64",
    "device": "cpu",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "clip_grad": 0.3,
}
ZERO = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
ROPE = {"position_embedding_type": "rope", "rope_scaling_type": "yarn", "rope_original_max_position_embeddings": 8}
DOCUMENTS = {"eod_mask_loss": True, "reset_position_ids": True, "reset_attention_mask": True}
LLAMA = ROPE | {"normalization": "RMSNorm", "activation": "swiglu", "add_bias_linear": False, "num_query_groups": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CORE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
UNTIED = {"untie_embeddings_and_output_weights": True}
A2A, GATHER = {"cp_comm_type": ("a2a",)}, {"cp_comm_type": ("all_gather",)}
BOTH = {"cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 2)}
GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp 2, p2p, queries that grow, norms without weights": (
        2,
        {"cp": 2, "qk_l2_norm": True} | LLAMA | NOPE | {"rope_scaling_type": "none"} | DOCUMENTS,
    ),
    "cp 2 tp 2, a2a, queries that grow in some layers, core": (
        4,
        {"cp": 2, "tp": 2, "sequence_parallel": True, "qk_l2_norm": True, "no_rope_freq": "2"}
        | {"nope_query_scale": 0.7, "nope_query_scale_length": 3}
        | LLAMA
        | A2A
        | CORE
        | ZERO,
    ),
    "cp 2, p2p, gated": (2, {"cp": 2, "attention_output_gate": True} | LLAMA | DOCUMENTS),
    "cp 2 pp 2 zb-h1, gated, muon": (
        4,
        {"cp": 2, "pp": 2, "pipeline_schedule": "zb-h1", "attention_output_gate": True, "num_query_groups": 1}
        | {"optimizer": "muon", "muon_tp_mode": "duplicated"},
    ),
    "cp 2 tp 4 one kv head, dropout": (
        8,
        {"cp": 2, "tp": 4, "sequence_parallel": True, "num_query_groups": 1} | DROPOUT | DOCUMENTS,
    ),
    "cp 2 pp 2 dualpipe": (
        4,
        {"cp": 2, "pp": 2, "pipeline_schedule": "dualpipe", "global_batch_size": 16} | ZERO | LLAMA,
    ),
    "cp 2 pp 2 interleaved, full": (
        4,
        {"cp": 2, "pp": 2, "chunks": 2, "num_layers": 4, "sequence_parallel": True} | FULL | LLAMA | DOCUMENTS,
    ),
    "cp 2 dp 2, a kind each": (
        4,
        {"cp": 2, "num_layers": 3, "cp_comm_type": ("a2a", "p2p", "all_gather"), "rank_order": "dp-cp-tp-pp"}
        | ZERO
        | DOCUMENTS,
    ),
    "cp 2 pp 2 pipedream": (4, {"cp": 2, "pp": 2, "pipeline_schedule": "pipedream", "clip_grad": 0.0} | LLAMA | UNTIED),
    "cp 2, offloaded": (2, {"cp": 2, "cpu_offloading_num_layers": 1, "min_offloaded_tensor_size": 1} | DOCUMENTS),
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 12,
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss"),
    "moe_aux_loss_coeff": (0.02, 0.05, 0.1),
    "moe_z_loss_coeff": 0.01,
    "sequence_parallel": True,
}
SIGMOID: dict[str, Any] = {
    "num_experts": 8,
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 8,
}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 10,
    "kv_lora_rank": 7,
    "qk_head_dim": 5,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
}
LATENT |= ROPE | {"normalization": "RMSNorm", "activation": "swiglu", "add_bias_linear": False}
SINKS, ONE = {"softmax_type": "learnable"}, {"softmax_type": "off-by-one"}
KEEPS = FULL | {"recompute_keep_attention": True}
# experts, latent attention, attention sinks, heads that ranks share, recompute with kept results
GRIDS |= {
    "experts, cp 3 etp 3": (
        3,
        {"cp": 3, "etp": 3} | EXPERTS | SIGMOID | {"moe_ffn_hidden_size": 9, "add_bias_linear": False},
    ),
    "experts, cp 2 tp 2 etp 2 ep 2 pp 2 zb-h1": (
        8,
        {"cp": 2, "tp": 2, "ep": 2, "pp": 2, "pipeline_schedule": "zb-h1"} | EXPERTS | SIGMOID | LLAMA | ZERO,
    ),
    "experts, cp 2 ep 2 pp 2, capacity padded, overlapped": (
        4,
        {"cp": 2, "ep": 2, "pp": 2, "chunks": 2, "num_layers": 4, "overlap_moe_expert_parallel_comm": True}
        | {"moe_expert_capacity_factor": 1.1, "moe_pad_expert_input_to_capacity": True}
        | EXPERTS,
    ),
    "experts, cp 2 ep 4 dp 2 pp 2 dualpipe-v": (
        8,
        {"cp": 2, "ep": 4, "pp": 2, "chunks": 2, "num_layers": 4, "pipeline_schedule": "dualpipe-v"}
        | EXPERTS
        | LATENT
        | {"global_batch_size": 16},
    ),
    "experts, cp 2 ep 2, muon": (
        2,
        {"cp": 2, "ep": 2, "optimizer": "muon", "muon_tp_mode": "duplicated"} | EXPERTS | LLAMA | {"adam_eps": 1e-3},
    ),
    "latent, cp 2, p2p, queries that grow": (
        2,
        {"cp": 2, "rope_scaling_type": "yarn", "rope_original_max_position_embeddings": 3, "yarn_query_scale": 0.7}
        | LATENT,
    ),
    "latent, cp 4, a2a+p2p, dropout": (4, {"cp": 4} | LATENT | BOTH | DROPOUT | {"v_head_dim": 9}),
    "shared heads, cp 2 tp 2, a2a, qk norm": (
        4,
        {"cp": 2, "tp": 2, "sequence_parallel": True, "qk_layernorm": True} | LLAMA | A2A | SINKS | DOCUMENTS,
    ),
    "shared heads, cp 4, a2a+p2p": (4, {"cp": 4, "num_query_groups": 1} | BOTH | DROPOUT | ZERO),
    "cp 2, p2p, keeps attention, offloaded": (
        2,
        {"cp": 2, "cpu_offloading_num_layers": 2, "min_offloaded_tensor_size": 1} | KEEPS | LLAMA,
    ),
}
SHORT = {"cp": "context_parallel_size"}


def differences(
    rank: int, world_size: int, options: dict[str, Any], change: Callable[[Batch], Batch] = lambda batch: batch
) -> list[str]:
    named = {SHORT.get(name, name): value for name, value in options.items()}
    plan = resolve(make_config(**MODEL | named), world_size)
    return plan_differences(rank, plan, [Rates(0.02, 0.1, None), Rates(0.01, 0.2, None)], change=change)


def early_tokens_count(batch: Batch) -> Batch:
    """Let the first sixth of each sequence count, which is on the first rank alone."""
    mask = np.zeros(batch.tokens.shape, dtype=np.float32)
    mask[:, : mask.shape[1] // 6] = 1.0
    return dataclasses.replace(batch, loss_mask=mask)


def documents_end_at_chunks(batch: Batch) -> Batch:
    """Let a document of one token begin at the border of each chunk of 3 tokens, and one end there."""
    ids = np.arange(batch.tokens.shape[1]) // 3 * 2 + (np.arange(batch.tokens.shape[1]) % 3 > 0)
    return dataclasses.replace(batch, document_ids=np.tile(ids, (len(batch.tokens), 1)))


@pytest.mark.parametrize("per_token", [False, True], ids=["mean of means", "tokens"])
@pytest.mark.parametrize("cp", [2, 4])
def test_cp_does_not_change_gradients_where_loss_masks_differ_over_its_ranks(
    cp: int, per_token: bool, rank_pools: Callable[[int], RankPool]
) -> None:
    """Not Megatron-LM's issues 7452 (finding 9: the gradient divided by cp) and 673 (multiplied by it)."""
    options = {"cp": cp, "calculate_per_token_loss": per_token, "eod_mask_loss": True, "clip_grad": 0.0}
    assert rank_pools(cp).run(differences, options, early_tokens_count)[0] == []


@pytest.mark.parametrize("kind", [{}, GATHER, A2A, BOTH], ids=["p2p", "all_gather", "a2a", "a2a+p2p"])
@pytest.mark.parametrize("window", [None, 2], ids=["all", "window of 2"])
def test_documents_of_one_token_at_the_border_of_a_chunk(
    kind: dict[str, Any], window: int | None, rank_pools: Callable[[int], RankPool]
) -> None:
    options = {"cp": 4, "reset_attention_mask": True, "window_size": window} | kind
    assert rank_pools(4).run(differences, options, documents_end_at_chunks)[0] == []


# what a drawn grid takes one of
KINDS = ({}, GATHER, A2A, {"cp_comm_type": ("a2a+p2p",)})
SIZES: dict[str, tuple[Any, ...]] = {"cp": (2, 3, 4), "tp": (1, 2), "pp": (1, 2), "dp": (1, 2)}
CHOICES: dict[str, tuple[dict[str, Any], ...]] = {
    "kind": KINDS,
    "masks": ({}, DOCUMENTS, {"window_size": 5}, {"window_size": 2} | DOCUMENTS, {"eod_mask_loss": True}),
    "model": (
        {},
        LLAMA,
        LLAMA | {"num_query_groups": 4, "qk_layernorm": True},
        {"num_query_groups": 1, "attn_logit_softcapping": 2.0},
        {"position_embedding_type": "none", "attention_softmax_in_fp32": True},
        LATENT,
        LLAMA | SINKS,
        ONE,
    ),
    # by position: without positions two tokens can be equal up to rounding, and their scores in any order
    "experts": (
        {},
        {},
        EXPERTS,
        EXPERTS | SIGMOID,
        EXPERTS | {"moe_expert_capacity_factor": 0.8, "moe_token_drop_policy": "position"},
    ),
    "ep": ({}, {"ep": 2, "etp": 1}, {"ep": 4, "etp": 1}),
    "dropout": ({}, DROPOUT),
    "recompute": ({}, CORE, FULL, KEEPS, {"recompute_memory_budget": 0.4}),
    "optimizer": ({}, ZERO),
    "loss": ({}, {"calculate_per_token_loss": True}),
    "sequence parallel": ({}, {"sequence_parallel": True}),
    "schedule": ({}, {"pipeline_schedule": "zb-h1"}, {"pipeline_schedule": "zb-v", "chunks": 2, "num_layers": 4}),
}
MOST_RANKS = 12
Choice = Callable[[str, Sequence[Any]], Any]  # takes one of several values of what has this name


def drawn_grid(choose: Choice) -> tuple[int, dict[str, Any]] | None:
    """Return the ranks and options of a grid of such choices; None if they do not go together."""
    cp, tp, pp, dp = (choose(name, sizes) for name, sizes in SIZES.items())
    taken = {name: choose(name, choices) for name, choices in CHOICES.items()}
    options: dict[str, Any] = {"cp": cp, "tp": tp, "pp": pp}
    for each in taken.values():
        options |= each
    experts = options.get("num_experts") is not None
    levels = [size for size in range(1, cp + 1) if cp % size == 0 and 4 // tp % size == 0]
    if options.get("cp_comm_type") == ("a2a+p2p",):
        inner = choose("inner", levels)
        options["hierarchical_context_parallel_sizes"] = (inner, cp // inner)
    is_fused = taken["model"] in ({}, LLAMA, CHOICES["model"][2], LATENT) and not taken["dropout"]
    fits = (
        cp * tp * pp * dp <= MOST_RANKS
        and (options.get("cp_comm_type") != ("a2a",) or cp in levels)
        and (pp > 1 or not taken["schedule"])
        and (tp > 1 or not taken["sequence parallel"])
        and (experts or not taken["ep"])
        and tp * cp * dp % options.get("ep", 1) == 0
        and not (experts and "recompute_memory_budget" in options)
        and (is_fused or not options.get("recompute_keep_attention"))
    )
    return (cp * tp * pp * dp, options) if fits else None


@functools.cache
def covering() -> list[tuple[int, dict[str, Any]]]:
    """Return grids in which every pair of values occurs that some grid has: of random ones those with the most new
    pairs.
    """
    random, sample = Random(7), []
    while len(sample) < 4000:
        values: dict[str, int] = {}

        def choose(name: str, choices: Sequence[Any], values: dict[str, int] = values) -> Any:
            values[name] = random.randrange(len(choices))
            return choices[values[name]]

        grid = drawn_grid(choose)
        if grid is not None:
            sample.append((grid, set(itertools.combinations(sorted(values.items()), 2))))
    left, found = set.union(*(pairs for _, pairs in sample)), []
    while left:
        grid, pairs = max(sample, key=lambda each: len(each[1] & left))
        left -= pairs
        found.append(grid)
    return found


NUM_COVERING = 56


@pytest.mark.parametrize("row", range(NUM_COVERING))
def test_grid_of_a_covering_array_equals_one_process(row: int, rank_pools: Callable[[int], RankPool]) -> None:
    world_size, options = covering()[row]
    assert rank_pools(world_size).run(differences, options)[0] == []


def test_every_row_of_the_covering_array_is_run() -> None:
    assert len(covering()) == NUM_COVERING


@pytest.mark.parametrize("per_token", [False, True], ids=["mean of means", "tokens"])
@pytest.mark.parametrize("cp", [2, 4])
def test_losses_of_routers_do_not_depend_on_cp(cp: int, per_token: bool, rank_pools: Callable[[int], RankPool]) -> None:
    """Not Megatron-LM's 3768 and 5047 (a scale that depends on cp), nor 7452 (finding 10: with several losses counts
    are summed twice).
    """
    options = {"cp": cp, "ep": 2, "calculate_per_token_loss": per_token, "clip_grad": 0.0, "eod_mask_loss": True}
    assert rank_pools(cp).run(differences, options | EXPERTS, early_tokens_count)[0] == []


@pytest.mark.parametrize("name", GRIDS)
def test_grid_with_context_parallelism_equals_one_process(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    world_size, options = GRIDS[name]
    assert rank_pools(world_size).run(differences, options)[0] == []
