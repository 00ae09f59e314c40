"""Training jobs with slices of sequences (--pipe-sp-splits)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megapipe.extras.report.profile import profiles_in, read_profile
from megapipe.extras.report.profile_summary import compare
from tests.harness import RankPool
from tests.train.jobs import job_on_rank, lines_of

BASE = (
    "--dtype fp64 --hidden-dropout 0 --attention-dropout 0 --seq-length 24 --position-embedding-type rope "
    "--group-query-attention --num-query-groups 2 --eval-iters 2 --eval-interval 2 --clip-grad 0.5 --adam-eps 1e-3"
)
PP2 = "--pipeline-model-parallel-size 2"


def losses(folder: Path) -> dict[tuple[str, int], float]:
    """Return the losses of a run by kind of record and step."""
    lines = lines_of(folder / "metrics.jsonl")
    return {(line["kind"], line["step"]): line["loss"] for line in lines if "loss" in line}


def train(rank_pools: Callable[[int], RankPool], ranks: int, flags: str) -> None:
    for _, kind, message in rank_pools(ranks).run(job_on_rank, f"{BASE} {flags}"):
        assert kind == "", message


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_run_goes_on_with_another_number_of_slices(
    schedule: str, tmp_path: Path, rank_pools: Callable[[int], RankPool]
) -> None:
    """Four steps of whole sequences equal two steps with three slices and two with five."""
    whole, sliced = tmp_path / "whole", tmp_path / "sliced"
    train(rank_pools, 1, f"--train-iters 4 --save {whole}")
    cut = f"{PP2} --pipeline-schedule {schedule} --save {sliced} --save-interval 2"
    train(rank_pools, 2, f"{cut} --train-iters 4 --exit-interval 2 --pipe-sp-splits 3")
    train(rank_pools, 2, f"{cut} --train-iters 4 --load {sliced} --pipe-sp-splits 5 --pipe-sp-strategy average")
    found, wanted = losses(sliced), losses(whole)
    shared = found.keys() & wanted.keys()
    assert {("step", 1), ("step", 2), ("step", 3), ("step", 4), ("evaluation", 4)} <= shared
    assert {key: found[key] for key in shared} == pytest.approx({key: wanted[key] for key in shared}, rel=1e-10)


def test_a_profile_has_every_action_of_every_slice(tmp_path: Path, rank_pools: Callable[[int], RankPool]) -> None:
    flags = "--train-iters 3 --pipe-sp-splits 3 --profile-pipeline --profile-step-start 1 --profile-step-end 2"
    train(rank_pools, 2, f"{PP2} {flags} --save {tmp_path}")
    (path,) = profiles_in(tmp_path / "profile") or profiles_in(tmp_path)
    profile = read_profile(path)
    (schedule,) = profile.schedules.values()
    assert schedule.num_slices == 3
    for step in profile.pipelines[0].steps:
        comparison = compare(profile, step)
        assert comparison.plan.work_seconds == pytest.approx(comparison.measured.work_seconds)


def test_a_value_that_is_not_finite_is_found_in_its_slice(
    tmp_path: Path, rank_pools: Callable[[int], RankPool]
) -> None:
    flags = f"--train-iters 2 --pipe-sp-splits 3 --check-for-nan-in-loss-and-grad --lr 1e300 --save {tmp_path}"
    for _, kind, message in rank_pools(2).run(job_on_rank, f"{BASE} {PP2} {flags}"):
        assert kind and "microbatch" in message and "slice" in message, message
