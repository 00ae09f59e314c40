"""Every bug planted into the code of the ranks is detected in fp64 and in fp32, and its place is named.

The same grids pass without the bug.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.extras.verify import planted
from tests.extras.verify.grids import compared
from tests.extras.verify.planted import Plant
from tests.harness import RankPool
from tests.tables import options, rows
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
    wrong: list[str]
    loss: str  # right or wrong
    report: list[str]


CASES = {
    name: Case(
        getattr(planted, plant), int(ranks), options(words, {}), first, wrong.split(","), loss, report.split(" & ")
    )
    for plant, ranks, words, first, wrong, loss, report, name in rows(Path(__file__).with_name("planted_bugs.tsv"))
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
    assert first.loss_passes == (case.loss == "right")
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
