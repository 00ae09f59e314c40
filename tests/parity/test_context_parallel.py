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
from tests.harness import RankPool
from tests.parity.grids import (
    A2A,
    BOTH,
    CORE,
    DOCUMENTS,
    DROPOUT,
    EXPERTS,
    FULL,
    GATHER,
    GROUPS,
    KEEPS,
    LATENT,
    LLAMA,
    LONG,
    SINKS,
    ZERO,
    differences,
)

ONE = {"softmax_type": "off-by-one"}


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
    assert rank_pools(cp).run(differences, LONG | options, early_tokens_count)[0] == []


@pytest.mark.parametrize("kind", [{}, GATHER, A2A, BOTH], ids=["p2p", "all_gather", "a2a", "a2a+p2p"])
@pytest.mark.parametrize("window", [None, 2], ids=["all", "window of 2"])
def test_documents_of_one_token_at_the_border_of_a_chunk(
    kind: dict[str, Any], window: int | None, rank_pools: Callable[[int], RankPool]
) -> None:
    options = {"cp": 4, "reset_attention_mask": True, "window_size": window} | kind
    assert rank_pools(4).run(differences, LONG | options, documents_end_at_chunks)[0] == []


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
        EXPERTS | GROUPS,
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
    assert rank_pools(world_size).run(differences, LONG | options)[0] == []


def test_every_row_of_the_covering_array_is_run() -> None:
    assert len(covering()) == NUM_COVERING


@pytest.mark.parametrize("per_token", [False, True], ids=["mean of means", "tokens"])
@pytest.mark.parametrize("cp", [2, 4])
def test_losses_of_routers_do_not_depend_on_cp(cp: int, per_token: bool, rank_pools: Callable[[int], RankPool]) -> None:
    """Not Megatron-LM's 3768 and 5047 (a scale that depends on cp), nor 7452 (finding 10: with several losses counts
    are summed twice).
    """
    options = {"cp": cp, "ep": 2, "calculate_per_token_loss": per_token, "clip_grad": 0.0, "eod_mask_loss": True}
    assert rank_pools(cp).run(differences, LONG | options | EXPERTS, early_tokens_count)[0] == []
