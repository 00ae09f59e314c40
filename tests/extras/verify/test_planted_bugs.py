"""Every bug planted into the code of the ranks is detected in fp64 and in fp32, and its place is named.

The same grids pass without the bug.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.extras.verify import planted
from tests.extras.verify.grids import compared
from tests.extras.verify.planted import Plant
from tests.harness import RankPool
from tests.tiny import tiny_config

MODES = ("fp64", "native")  # the configurations below are fp32
Pools = Callable[[int], RankPool]


@dataclass(frozen=True)
class Case:
    """A planted bug and how it has to be reported.

    first: end of the first wrong tensor's name. wrong: parts of the names of all gradients that are wrong in step 1.
    """

    plant: Plant
    world: int
    options: dict[str, Any]
    first: str
    wrong: tuple[str, ...]
    loss_is_right: bool = True
    report: tuple[str, ...] = field(default=())


EVERYTHING = ("embedding", "layernorm", "linear")
CASES = {
    "norm": Case(
        planted.norm_without_tp_sum,
        2,
        {"tp": 2, "sp": True},
        "layers.0.input_layernorm.weight",
        ("input_layernorm",),
        report=("which ranks 0 1 (every tp_rank)", "gradient not summed over tp", "the forwards are right"),
    ),
    "qk-norm": Case(
        planted.qk_norm_without_tp_sum,
        2,
        {"tp": 2, "qk_layernorm": True},
        "layers.0.self_attention.q_layernorm.weight",
        ("q_layernorm",),
    ),
    "norm of a projection": Case(
        planted.projection_norm_without_tp_sum,
        2,
        {"tp": 2, "normalization": "RMSNorm", "qk_layernorm": True, "qk_layernorm_scope": "projection"},
        "word_embeddings.weight",
        EVERYTHING,
        report=("the forwards are right",),
    ),
    "tokens of a cp shard": Case(
        planted.loss_divided_by_tokens_of_a_shard,
        2,
        {"context_parallel_size": 2, "eod_mask_loss": True},
        "word_embeddings.weight",
        EVERYTHING,
        loss_is_right=False,
    ),
    "gradients of a ring": Case(
        planted.gradients_of_keys_not_sent_back,
        2,
        {"context_parallel_size": 2},
        "word_embeddings.weight",
        EVERYTHING,
        report=("the forwards are right",),
    ),
    "gradients of a slice": Case(
        planted.gradients_of_keys_of_earlier_slices_lost,
        2,
        {"pp": 2, "pipe_sp_splits": 3},
        "word_embeddings.weight",
        EVERYTHING,
        report=("the forwards are right",),
    ),
    "kv-head": Case(
        planted.key_value_head_without_sum,
        2,
        {"tp": 2, "num_query_groups": 1},
        "layers.0.self_attention.linear_qkv.weight",
        ("linear_qkv",),
        report=("head 0): grid",),
    ),
    "tied": Case(
        planted.tied_embedding_summed_twice,
        2,
        {"pp": 2},
        "word_embeddings.weight",
        ("word_embeddings",),
        report=(
            "the grid's values are 2 times the plain ones",
            "summed over the embedding group",
            "stage 0",
            "which ranks 0 1 (every pp_rank)",
        ),
    ),
    "microbatch": Case(
        planted.dropped_microbatch,
        2,
        {"pp": 2},
        "word_embeddings.weight",
        EVERYTHING,
        loss_is_right=False,
        report=("which microbatches run",),
    ),
    "second holder": Case(
        planted.second_holder_forgotten,
        2,
        {"pp": 2, "pipeline_schedule": "dualpipe", "overlap_grad_reduce": True},
        "word_embeddings.weight",
        EVERYTHING,
    ),
    "divisor": Case(
        planted.divisor_without_dp,
        2,
        {"zero": True, "overlap_grad_reduce": True},
        "word_embeddings.weight",
        EVERYTHING,
        report=("the grid's values are 2 times the plain ones", "a wrong divisor"),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_planted_bug_is_found_and_named(case: Case, mode: str, rank_pools: Pools) -> None:
    answers = rank_pools(case.world).run(compared, tiny_config(**case.options), mode, case.plant)
    assert all(answer == answers[0] for answer in answers), "all ranks have all results"
    (first, *_), report = answers[0]
    assert not first.passes
    kind, found = first.first_wrong()
    name = found[0][1].name
    assert kind == "gradient"
    assert name.endswith(case.first)
    wrong = {name for rank in first.ranks for name in rank.gradients.wrong}
    assert all(any(kind in name for kind in case.wrong) for name in wrong), wrong
    assert all(any(kind in name for name in wrong) for kind in case.wrong), wrong
    assert first.loss_passes == case.loss_is_right
    for words in ("DIFFERENT in step 1, first of all in the gradient of", name, *case.report):
        assert words in " ".join(report.split()), report


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_same_grid_passes_without_the_bug(case: Case, mode: str, rank_pools: Pools) -> None:
    steps, report = rank_pools(case.world).run(compared, tiny_config(**case.options), mode)[0]
    assert [step.passes for step in steps] == [True] * 3, report
    assert report.splitlines()[-1].strip().startswith("same:")


def test_a_loss_scale_that_is_not_divided_out_is_found_in_fp16(rank_pools: Pools) -> None:
    config = tiny_config(dtype="fp16", hidden_size=8, num_layers=1)
    assert all(step.passes for step in rank_pools(2).run(compared, config, "native")[0][0])
    (first, *_), report = rank_pools(2).run(compared, config, "native", planted.loss_scale_misread)[0]
    assert not first.passes and first.loss_passes
    assert "a wrong divisor" in report


def test_shards_that_are_not_gathered_are_found_as_weights(rank_pools: Pools) -> None:
    steps, report = rank_pools(2).run(compared, tiny_config(zero=True), "fp64", planted.shards_not_gathered)[0]
    assert all(not rank.gradients.wrong for rank in steps[0].ranks)
    assert not steps[0].passes
    assert "DIFFERENT in step 1" in report and "weight of embedding.word_embeddings.weight" in report


@pytest.mark.parametrize("mode", MODES)
def test_a_single_wrong_rank_is_named_and_no_rank_hangs(mode: str, rank_pools: Pools) -> None:
    answers = rank_pools(4).run(compared, tiny_config(tp=2, pp=2), mode, planted.one_rank_differs)
    assert all(answer == answers[0] for answer in answers)
    steps, report = answers[0]
    assert [bool(rank.gradients.wrong) for rank in steps[0].ranks] == [False, False, False, True]
    assert "rank 3 (tp_rank 1, pp_rank 1, dp_rank 0), stage 1" in report
    assert "worst        [0, 6]: grid" in report
    assert "which ranks  3 (tp_rank 1 of 2, pp_rank 1 of 2)" in report
    assert "which rows   0 to 0, 1 of the" in report


def test_a_comparison_that_omits_a_gradient_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no rank has compared the whole gradients of"):
        compared(0, 1, tiny_config(), "fp64", planted.gradient_left_out)
