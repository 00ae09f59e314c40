"""Slices of sequences in the pipeline (--pipe-sp-splits) equal one process in fp64: losses, gradients, weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, seed, settings

from megapipe.data.batch import Batch
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from tests.harness import RankPool
from tests.parity.comparison import plan_differences
from tests.parity.test_context_parallel import (
    A2A,
    CORE,
    DOCUMENTS,
    EXPERTS,
    FULL,
    GATHER,
    LATENT,
    LLAMA,
    MODEL,
    SINKS,
    UNTIED,
    ZERO,
)
from tests.parity.test_experts import BIAS, EVERY_LOSS, GLOBAL, PER_TOKEN, SHARED, again
from tests.tiny import NOPE, make_config

SHORT = {"k": "pipe_sp_splits", "cp": "context_parallel_size"}
LOSSES = {
    "every loss": EVERY_LOSS,
    "global loss, tokens": GLOBAL | PER_TOKEN,
    "sigmoid scores, biases, shared experts": BIAS | SHARED | {"moe_aux_loss_coeff": (0.02,)},
}
AVERAGE = {"pipe_sp_strategy": "average"}
SP = {"sequence_parallel": True}
H1 = {"pipeline_schedule": "zb-h1"}
V = {"pipeline_schedule": "zb-v", "chunks": 2, "num_layers": 4}
INTERLEAVED = {"pipeline_schedule": "interleaved", "chunks": 2, "num_layers": 4}
ONE = {"global_batch_size": 2}  # one microbatch on one replica
SHARDED = {"data_parallel_sharding_strategy": "optim_grads_params", "use_distributed_optimizer": True}
UNSCALED = {"rope_scaling_type": "none"}
GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"pp 2, {k} slices": (2, {"pp": 2, "k": k}) for k in range(1, 6)},
    **{f"pp 1, {k} slices, one microbatch": (1, {"k": k} | LLAMA | ONE) for k in (2, 5)},
    "pp 4, 24 slices of one token": (4, {"pp": 4, "k": 24, "num_layers": 4} | LLAMA),
    "pp 2, queries that grow": (2, {"pp": 2, "k": 3} | LLAMA | NOPE | UNSCALED),
    "pp 2 tp 4, one kv head": (8, {"pp": 2, "tp": 4, "k": 4, "num_query_groups": 1} | SP | AVERAGE),
    "pp 2 dp 2, weights sharded in units": (
        4,
        {"pp": 2, "k": 3, "num_layers": 4, "data_parallel_sharding_units": 2} | SHARDED | LLAMA,
    ),
    "pp 2, window of 1, equal lengths": (2, {"pp": 2, "k": 5, "window_size": 1} | AVERAGE),
    "pp 2, windows in some layers": (
        2,
        {"pp": 2, "k": 4, "window_size": 7, "window_attn_skip_freq": "2", "num_layers": 4} | LLAMA | CORE,
    ),
    "pp 2, norm, attention and mlp recomputed": (
        2,
        {
            "pp": 2,
            "k": 3,
            "recompute_granularity": "selective",
            "recompute_modules": ("core_attn", "layernorm", "mlp"),
        }
        | LLAMA
        | H1,
    ),
    "pp 2, ramp, chunked loss": (
        2,
        {"pp": 2, "k": 4, "cross_entropy_chunk_size": 5, "num_query_groups": 2} | UNTIED | INTERLEAVED,
    ),
    "pp 2, attention kept": (2, {"pp": 2, "k": 3} | LLAMA | FULL | {"recompute_keep_attention": True}),
    "pp 2, two modules of multi-token prediction": (2, {"pp": 2, "k": 3, "mtp_num_layers": 2} | LLAMA | H1),
    "cp 2, all_gather, documents": (2, {"cp": 2, "k": 3} | GATHER | DOCUMENTS),
    "cp 2, a2a, latent attention": (2, {"cp": 2, "k": 2} | A2A | LATENT),
    "pp 2 cp 2, sinks, window": (4, {"pp": 2, "cp": 2, "k": 3, "window_size": 7} | LLAMA | SINKS),
    "pp 2 cp 2 tp 2, full": (8, {"pp": 2, "cp": 2, "tp": 2, "k": 3} | SP | LLAMA | FULL | H1),
    **{f"pp 2 ep 2, {name}": (4, {"pp": 2, "k": 3, "ep": 2} | EXPERTS | own) for name, own in LOSSES.items()},
    "pp 2 cp 2, experts again": (4, {"pp": 2, "cp": 2, "k": 2} | EXPERTS | LOSSES["every loss"] | again("moe")),
    "pp 2, chunks of 5": (2, {"pp": 2, "k": 3, "window_size": 5, "attention_kind": "chunked"} | LLAMA),
    "pp 2 cp 2, chunks of 7 in every second layer, documents": (
        4,
        {"pp": 2, "cp": 2, "k": 2, "num_layers": 4}
        | {"window_size": 7, "window_attn_skip_freq": "2", "attention_kind": "chunked"}
        | DOCUMENTS,
    ),
}


def differences(
    rank: int, world_size: int, options: dict[str, Any], change: Callable[[Batch], Batch] = lambda batch: batch
) -> list[str]:
    named = {SHORT.get(name, name): value for name, value in options.items()}
    plan = resolve(make_config(**MODEL | named), world_size)
    return plan_differences(rank, plan, [Rates(0.02, 0.1, None), Rates(0.01, 0.2, None)], change=change)


@pytest.mark.parametrize("name", GRIDS)
def test_slices_equal_whole_sequences_in_one_process(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    ranks, options = GRIDS[name]
    assert rank_pools(ranks).run(differences, options)[0] == []


def first_slice_counts(batch: Batch) -> Batch:
    """Let the first sixth of each sequence count, which is in the first slice."""
    mask = np.zeros(batch.tokens.shape, dtype=np.float32)
    mask[:, : mask.shape[1] // 6] = 1.0
    return dataclasses.replace(batch, loss_mask=mask)


@pytest.mark.parametrize("per_token", [False, True], ids=["mean of means", "tokens"])
def test_slices_do_not_change_gradients_where_loss_masks_differ_between_them(
    per_token: bool, rank_pools: Callable[[int], RankPool]
) -> None:
    options = {"pp": 2, "k": 3, "calculate_per_token_loss": per_token, "eod_mask_loss": True, "clip_grad": 0.0}
    assert rank_pools(2).run(differences, options, first_slice_counts)[0] == []


# what a drawn grid takes one of
CHOICES: dict[str, tuple[dict[str, Any], ...]] = {
    "masks": ({}, DOCUMENTS, {"window_size": 5}, {"window_size": 2} | DOCUMENTS, {"eod_mask_loss": True}),
    "model": (
        {},
        LLAMA,
        LLAMA | {"num_query_groups": 4, "qk_layernorm": True},
        {"num_query_groups": 1, "attn_logit_softcapping": 2.0},
        {"position_embedding_type": "none", "attention_softmax_in_fp32": True},
    ),
    "recompute": ({}, CORE, FULL, {"recompute_memory_budget": 0.5}),
    "optimizer": ({}, ZERO),
    "loss": ({}, {"calculate_per_token_loss": True}),
    "tp": ({}, SP),
    "cut": ({}, AVERAGE),
    "batch": ({}, {"global_batch_size": 4}),
    "schedule": ({}, H1, V, INTERLEAVED),
}


@st.composite
def drawn_grids(draw: st.DrawFn) -> tuple[int, dict[str, Any]]:
    """Draw a grid of up to 8 ranks, a number of slices and options."""
    tp, pp, dp = draw(st.sampled_from([(1, 2, 1), (1, 3, 1), (2, 2, 1), (1, 2, 2), (2, 3, 1), (2, 2, 2), (4, 2, 1)]))
    options: dict[str, Any] = {"tp": tp, "pp": pp, "k": draw(st.integers(1, 6)), "num_layers": pp}
    for choices in CHOICES.values():
        options |= draw(st.sampled_from(choices))
    options["num_layers"] = pp * options.get("chunks", 1)
    assume(options["k"] > 1 or "pipe_sp_strategy" not in options)
    assume(options.get("global_batch_size", 8) % (2 * dp) == 0)
    return math.prod((tp, pp, dp)), options


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shard", range(3))
def test_drawn_grids_with_slices_equal_one_process(shard: int, rank_pools: Callable[[int], RankPool]) -> None:
    @seed(shard)
    @settings(max_examples=10, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(drawn_grids())
    def check(drawn: tuple[int, dict[str, Any]]) -> None:
        world_size, options = drawn
        assert rank_pools(world_size).run(differences, options)[0] == []

    check()
