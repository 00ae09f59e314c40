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
from tests.harness import RankPool
from tests.parity.grids import AVERAGE, CORE, DOCUMENTS, FULL, H1, LLAMA, LONG, SP, ZERO, differences

V = {"pipeline_schedule": "zb-v", "chunks": 2, "num_layers": 4}
INTERLEAVED = {"pipeline_schedule": "interleaved", "chunks": 2, "num_layers": 4}


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
    assert rank_pools(2).run(differences, LONG | options, first_slice_counts)[0] == []


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
        assert rank_pools(world_size).run(differences, LONG | options)[0] == []

    check()
