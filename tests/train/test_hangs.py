"""Real hangs on gloo ranks: within seconds one report names the missing rank, and then all ranks end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megapipe.comm.collectives import barrier
from megapipe.data.dataset import SyntheticDataset
from megapipe.extras.report.status import read_folder
from megapipe.model.stage import GPTStage
from megapipe.train.step import TrainStep
from tests.harness import RankPool
from tests.train.jobs import job_on_rank

LIMIT_SECONDS = 1.0
MOST_SECONDS = 30.0  # from the limit to the report; 0.2 s on an idle machine
PP2 = "--pipeline-model-parallel-size 2 --train-iters 50"
Pools = Callable[[int], RankPool]


def at_step(number: int, strike: Callable[[Any], None]) -> None:
    """Run `strike` on this rank when step `number` begins."""
    launch, count = TrainStep.run, 0

    def launched(self: TrainStep, *arguments: Any) -> bool:
        nonlocal count
        count += 1
        if count == number:
            strike(self)
        return launch(self, *arguments)

    TrainStep.run = launched  # type: ignore[method-assign]


def struck(folder: str) -> None:
    (Path(folder) / "struck").write_text(str(time.time()))


def sleeps_for_ever(folder: str) -> None:
    struck(folder)
    while True:
        time.sleep(0.01)


def in_the_loader(rank: int, folder: str) -> None:
    def unreadable(self: SyntheticDataset, index: int) -> Any:
        sleeps_for_ever(folder)

    if rank == 1:
        at_step(3, lambda step: setattr(SyntheticDataset, "__getitem__", unreadable))


def in_a_stage(rank: int, folder: str) -> None:
    def endless(self: GPTStage, *arguments: Any) -> Any:
        sleeps_for_ever(folder)

    if rank == 1:
        at_step(3, lambda step: setattr(GPTStage, "forward", endless))


def stopped(rank: int, folder: str) -> None:
    def stop(step: Any) -> None:
        struck(folder)
        os.kill(os.getpid(), signal.SIGSTOP)

    if rank == 1:
        at_step(3, stop)


def in_another_collective(rank: int, folder: str) -> None:
    def meets(step: Any) -> None:
        struck(folder)
        barrier(step.runtime.groups.world)

    if rank == 1:
        at_step(3, meets)


HANGS: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "loader": (
        in_the_loader,
        ("hangs on rank 1 (pp 1, stage 1)", "reading data", "stack of rank 1", "in sleeps_for_ever"),
    ),
    "stage": (
        in_a_stage,
        ("hangs on rank 1 (pp 1, stage 1)", "in 1F0", "in endless", "for the gradient from stage 1 to 0 from rank 1"),
    ),
    "stopped": (
        stopped,
        ("hangs on rank 1 (pp 1, stage 1)", "the process is stopped (SIGSTOP)", "from rank 1", "no stack of rank 1"),
    ),
    "mismatch": (
        in_another_collective,
        ("wait for each other", "in world barrier", "for the gradient from stage 1 to 0", "stack of rank 0"),
    ),
}


@pytest.mark.parametrize(("fault", "words"), HANGS.values(), ids=HANGS)
def test_a_hang_is_reported_once_and_ends_all_ranks(
    fault: Callable[..., None], words: tuple[str, ...], rank_pools: Pools, tmp_path: Path
) -> None:
    flags = f"{PP2} --save {tmp_path}/run --hang-timeout-seconds {LIMIT_SECONDS}"
    answers = rank_pools(2).run(job_on_rank, flags, fault, str(tmp_path), may_die=range(2))
    assert answers == [None, None], "a rank outlived the hang"
    lines = [json.loads(line) for line in (tmp_path / "run" / "run.jsonl").read_text().splitlines()]
    (report,) = (line for line in lines if line["kind"] == "failure")
    for word in words:
        assert word in report["text"], report["text"]
    seconds = report["time"] - float((tmp_path / "struck").read_text())
    print(f"{seconds:.1f} s to the report")
    assert LIMIT_SECONDS * 0.9 < seconds < LIMIT_SECONDS + MOST_SECONDS
    _, sightings = read_folder(tmp_path / "run")  # read by megapipe status afterwards
    assert [sighting.record.step for sighting in sightings if sighting.record is not None] == [3, 3]
    assert all(sighting.process is not None and sighting.process.has_ended for sighting in sightings)


def slow(rank: int) -> None:
    """Make each step take several times the limit while no single action does."""
    forward = GPTStage.forward

    def slowed(self: GPTStage, *arguments: Any) -> Any:
        time.sleep(0.5)
        return forward(self, *arguments)

    if rank == 1:
        GPTStage.forward = slowed  # type: ignore[method-assign]


def test_a_slow_run_that_makes_progress_is_not_ended(rank_pools: Pools, tmp_path: Path) -> None:
    flags = (
        f"--pipeline-model-parallel-size 2 --train-iters 2 --save {tmp_path}/run --hang-timeout-seconds {LIMIT_SECONDS}"
    )
    pool = rank_pools(2)
    answers = pool.run(job_on_rank, flags, slow)
    pool.close()  # the slow stage
    assert [answer[1] for answer in answers] == ["", ""], answers
    assert "all 2 steps done" in answers[0][0]
    _, sightings = read_folder(tmp_path / "run")
    assert all(sighting.has_left for sighting in sightings)


def test_without_a_limit_there_are_no_heartbeats(rank_pools: Pools, tmp_path: Path) -> None:
    answers = rank_pools(2).run(job_on_rank, f"--train-iters 1 --save {tmp_path}/run --hang-timeout-seconds 0")
    assert [answer[1] for answer in answers] == ["", ""], answers
    assert not (tmp_path / "run" / "heartbeats").exists()
