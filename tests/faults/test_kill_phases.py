"""A killed rank in every phase of a run: whatever the others do at that moment, they have all ended within seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from megapipe.comm import bootstrap
from megapipe.errors import CommunicationError
from tests.harness import run_ranks
from tests.train.jobs import job_on_rank

MOST_SECONDS = 60.0  # from the kill until all survivors have ended, on a busy machine
FLAGS = "--train-iters 6 --save-interval 2 --eval-interval 3 --eval-iters 2"
GRIDS = {"pp2": "--pipeline-model-parallel-size 2", "dp2": "--use-distributed-optimizer --overlap-param-gather"}
BUSY_SECONDS = 60.0  # of a survivor that neither communicates nor ends


@dataclass(frozen=True)
class Phase:
    """A place in a run: MODULE:NAME of the function whose call number `call` (from 1) is the moment.

    busy: a call in which the survivor stays for long meanwhile, without communication.
    """

    where: str
    call: int = 1
    flags: str = ""
    busy: tuple[str, int] | None = None


PHASES = {
    "groups": Phase("megapipe.train.run:build_process_groups"),
    "starts": Phase("megapipe.train.run:share_starts"),
    "heartbeats": Phase("megapipe.train.watch:_Watch.__init__"),
    "building": Phase("megapipe.train.run:TrainingRuntime"),
    "data": Phase("megapipe.train.run:build_data"),
    "loading": Phase("megapipe.train.run:resume"),
    "first step": Phase("megapipe.train.step:TrainStep.run"),
    "forward and backward": Phase("megapipe.pipeline.engine:Engine.run", 3),
    "optimizer": Phase("megapipe.optimizer.optimizer:Optimizer.step", 3),
    "evaluation": Phase("megapipe.train.step:TrainStep.evaluate", 2),
    "save begins": Phase("megapipe.train.saving:Saving.save"),
    "writing": Phase("megapipe.checkpoint.save:Attempt.write"),
    "written": Phase("megapipe.checkpoint.save:gather_objects"),
    "commit": Phase("megapipe.checkpoint.save:from_rank_0", 2),
    "writing in the background": Phase("megapipe.checkpoint.save:Attempt.write", flags="--async-save"),
    "commit in the background": Phase("megapipe.checkpoint.save:BackgroundSave.advance", flags="--async-save"),
    "last save": Phase("megapipe.train.saving:Saving.finish", flags="--async-save"),
    "end": Phase("megapipe.train.run:Journal.close"),
    "exit": Phase("megapipe.comm.bootstrap:disband"),
    "building, the other reads data": Phase("megapipe.train.run:build_data", busy=("megapipe.train.run:build_data", 1)),
    "step, the other computes": Phase(
        "megapipe.train.step:TrainStep.run", 3, busy=("megapipe.train.step:TrainStep.run", 3)
    ),
    "save, the other writes": Phase(
        "megapipe.checkpoint.save:Attempt.write", busy=("megapipe.checkpoint.save:Attempt.write", 1)
    ),
    "save, rank 0 commits": Phase(
        "megapipe.checkpoint.save:from_rank_0", 2, busy=("megapipe.checkpoint.save:Attempt.finish", 1)
    ),
}


def before(where: str, call: int, action: Callable[[], None]) -> None:
    """Run `action` when the function at MODULE:NAME is called for the `call`-th time."""
    module, _, name = where.partition(":")
    owner: Any = import_module(module)
    *classes, name = name.split(".")
    for each in classes:
        owner = getattr(owner, each)
    function, count = getattr(owner, name), 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            action()
        return function(*arguments, **named)

    setattr(owner, name, counted)


def arm(rank: int, phase: Phase, victim: int, folder: str) -> None:
    """Prepare a rank for its part."""

    def strike() -> None:
        (Path(folder) / "struck").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        before(phase.where, phase.call, strike)
    elif phase.busy is not None:
        before(*phase.busy, lambda: time.sleep(BUSY_SECONDS))


def life(rank: int, world_size: int, flags: str, phase: Phase, victim: int, folder: str) -> tuple[str, str]:
    arm(rank, phase, victim, folder)
    _, kind, text = job_on_rank(rank, world_size, f"{FLAGS} {flags} --save {folder}/run")
    if not kind:
        try:
            bootstrap.disband()  # as a command does at its end
        except CommunicationError as error:
            kind, text = type(error).__name__, str(error)
    return kind, text


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("victim", [0, 1], ids=["rank 0", "rank 1"])
@pytest.mark.parametrize("name", PHASES)
def test_all_survivors_of_a_killed_rank_end_within_seconds(name: str, victim: int, grid: str, tmp_path: Path) -> None:
    phase = PHASES[name]
    flags = f"{GRIDS[grid]} {phase.flags}"
    survivor = run_ranks(life, 2, flags, phase, victim, str(tmp_path), may_die=range(2))[1 - victim]
    seconds = time.time() - float((tmp_path / "struck").read_text())
    print(f"| {name} | {victim} | {grid} | {seconds:.1f} | {survivor} |")
    assert seconds < MOST_SECONDS, survivor
    assert survivor is None or survivor[0] == "CommunicationError", survivor
