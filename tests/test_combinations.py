"""Combinations of features: a few draws take the planned memory and train as one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megapipe.config.features import FEATURES
from tests import combinations
from tests.combinations import BY_NAME, MAX_FEATURES, MAX_WORLD, MIN_FEATURES, Combination, drawn, examine
from tests.harness import RankFailure, RankPool
from tools import draw_combinations

Pools = Callable[[int], RankPool]
GOOD = ("zero1", "window", "grad overlap", "chunked loss")


def no_pools(world_size: int) -> RankPool:
    raise AssertionError("nothing is trained")


# a pipeline with latent attention, fp8 in the grid, sharded weights, experts beside context parallelism
@pytest.mark.parametrize("number", [119, 72, 94, 77])
def test_a_drawn_combination_trains_as_one_process_in_the_planned_memory(
    number: int, rank_pools: Callable[[int], RankPool]
) -> None:
    found = examine(drawn(1, number), rank_pools)
    assert found.verdict == "equal" and {"memory", "exact"} <= set(found.compared), found.why


@pytest.mark.parametrize(
    "features",
    [
        ("moe ep2", "fp8 local"),
        ("moe grouped", "fp8 local"),
        ("mla", "fp8 local"),
        ("mtp", "fp8 local"),
        pytest.param(("moe ep2", "mla", "mtp", "fp8 local"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_fp8_reaches_experts_latents_and_predictions_in_the_planned_memory(
    features: tuple[str, ...], rank_pools: Callable[[int], RankPool]
) -> None:
    found = examine(Combination(0, features), rank_pools)
    assert found.verdict == "equal" and found.compared == ("memory", "exact", "rounded"), found.why


@pytest.mark.parametrize(
    "features",
    [
        ("slices2", "moe ep2", "mtp", "cp2 p2p"),
        ("slices2", "sinks", "window", "cp2 ag", "act offload"),
        pytest.param(("slices2", "mla", "recompute full", "zb-h1", "moe grouped"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_slices_train_as_whole_sequences_in_one_process_in_the_planned_memory(
    features: tuple[str, ...], rank_pools: Callable[[int], RankPool]
) -> None:
    found = examine(Combination(0, features), rank_pools)
    assert found.verdict == "equal" and {"memory", "exact"} <= set(found.compared), found.why


def test_draws_have_no_flag_with_two_values_and_fit_the_largest_world() -> None:
    draws = [drawn(1, number) for number in range(300)]
    assert all(MIN_FEATURES <= len(each.features) <= MAX_FEATURES for each in draws)
    assert all(each.options and each.world_size <= MAX_WORLD for each in draws)
    assert {name for each in draws for name in each.features} == set(BY_NAME)
    assert draws == [drawn(1, number) for number in range(300)] != [drawn(2, number) for number in range(300)]


def test_there_are_43_features_with_names_of_their_own() -> None:
    assert len(FEATURES) == len(BY_NAME) == 43


def test_a_combination_that_the_plan_refuses_is_not_trained() -> None:
    found = examine(Combination(0, ("muon", "precision-aware", "window", "documents")), no_pools)
    assert found.verdict == "refused" and "--use-precision-aware-optimizer" in found.why


def test_other_memory_than_planned_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combinations, "MEMORY_TOLERANCE", -0.5)
    found = examine(Combination(0, GOOD), no_pools, trains=False)
    assert found.verdict == "memory" and "planned" in found.why


@pytest.mark.parametrize("verdict", ["wrong", "crash"])
def test_wrong_results_and_crashes_are_found(verdict: str) -> None:
    def run(*arguments: object) -> list[tuple[bool, str]]:
        if verdict == "crash":
            raise RankFailure(1, "ValueError", "it broke", "rank 1 raised ValueError: it broke")
        return [(False, "the gradient of one weight differs")]

    pools: Any = lambda world_size: SimpleNamespace(run=run)  # noqa: E731
    found = examine(Combination(0, GOOD), pools)
    assert found.verdict == verdict and found.compared == ("memory",)
    assert ("differs" if verdict == "wrong" else "it broke") in found.why


def test_an_interrupted_pass_goes_on_where_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--seed", "2", "--memory-only", "--record", str(tmp_path / "pass.jsonl"), "--count"]
    assert draw_combinations.main([*arguments, "1"]) == 0
    first = (tmp_path / "pass.jsonl").read_text()
    assert draw_combinations.main([*arguments, "2"]) == 0
    both = (tmp_path / "pass.jsonl").read_text()
    assert both.startswith(first) and len(both) > len(first)
    assert "2 accepted" in capsys.readouterr().out
