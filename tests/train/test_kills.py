"""Training under `kill -9`.

Every restart continues from a complete checkpoint, and the final state equals that of an undisturbed run.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import find_checkpoint
from megapipe.checkpoint.starts import STARTS_NAME
from megapipe.data_parallel.stores import Stores
from megapipe.extras.cli.frame import wait_for_end
from megapipe.train.loop import Training
from tests.harness import RankPool
from tests.train.jobs import job_on_rank
from tests.train.test_saving import contents

NUM_STEPS = 12
LAUNCHER_SECONDS = 20.0  # far longer than a rank takes to notice that a connected peer is gone
GRIDS = {
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2_zero_bf16": (
        2,
        "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce --ddp-bucket-size 700 --bf16",
    ),
    "pp2_2bw": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule pipedream-2bw"),
    "tp2_pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}


@dataclass(frozen=True)
class Kill:
    """A rank that kills itself or all ranks.

    It strikes after `seconds` of training, or at its disk event number `event` (from 0).
    """

    rank: int
    is_all: bool
    seconds: float
    event: int | None

    @classmethod
    def draw(cls, choose: random.Random, world: int, is_aimed: bool) -> Kill:
        rank = choose.randrange(world)
        events = 30 if rank == 0 else 8  # disk events in the first saves of a run; rank 0 commits
        return cls(
            rank, choose.random() < 0.5, choose.uniform(0.0, 0.5), choose.randrange(events) if is_aimed else None
        )


@dataclass(frozen=True)
class InCollective:
    """A rank that kills itself with the gather or the reduction of sharded weights in flight that it starts as number
    `number` (from 1).
    """

    rank: int
    kind: str  # 'gather' or 'reduction'
    number: int
    is_all: bool = False


def end_as_a_launcher_would(path: Path) -> None:
    """End this rank some time after the killed one.

    A rank that is still in the rendezvous would otherwise wait for the dead one until its timeout.
    """
    while not path.exists() or not path.read_text():
        time.sleep(0.05)
    wait_for_end(int(path.read_text()))
    time.sleep(LAUNCHER_SECONDS)
    os._exit(1)


def arm(rank: int, folder: str, kill: Kill | InCollective) -> None:
    """Prepare this rank for the kill; called on every rank before the job."""
    (Path(folder) / f"rank{rank}.pid").write_text(str(os.getpid()))
    if rank != kill.rank:
        threading.Thread(
            target=end_as_a_launcher_would, args=(Path(folder) / f"rank{kill.rank}.pid",), daemon=True
        ).start()
        return

    def strike() -> None:
        others = [int(path.read_text()) for path in Path(folder).glob("*.pid")] if kill.is_all else []
        for process in (*(other for other in others if other != os.getpid()), os.getpid()):
            os.kill(process, signal.SIGKILL)

    if isinstance(kill, InCollective):
        arm_in_collective(kill, strike)
        return
    if kill.event is None:
        begin = Training._next_batch

        def first(self: Training, *arguments: Any) -> Any:
            Training._next_batch = begin  # type: ignore[method-assign]
            threading.Timer(kill.seconds, strike).start()
            return begin(self, *arguments)

        Training._next_batch = first  # type: ignore[method-assign]
        return
    done, seen = Disk._done, 0

    def counted(self: Disk, what: str, path: Path) -> None:
        if STARTS_NAME in path.name:  # written before the rendezvous, when the other ranks would not notice a death
            return
        nonlocal seen
        if seen == kill.event:
            (Path(folder) / "struck").write_text(
                f"{what} {re.sub('[0-9a-f]{8,}|step_[0-9]+|rank_[0-9]+', '*', path.name)}"
            )
            strike()
        seen += 1
        done(self, what, path)

    Disk._done = counted  # type: ignore[method-assign]


def arm_in_collective(kill: InCollective, strike: Callable[[], None]) -> None:
    """Strike when the collective has been started."""
    owner: Any = Stores
    name = "unshard" if kill.kind == "gather" else "_start"
    start, seen = getattr(owner, name), 0

    def started(self: Any, *arguments: Any) -> None:
        nonlocal seen
        start(self, *arguments)
        seen += 1
        if seen == kill.number:
            strike()

    setattr(owner, name, started)


def one_life(rank: int, world_size: int, flags: str, folder: str, kill: Kill | InCollective | None) -> str:
    """Run the job once and return its output; a rank that loses a peer exits, as it would under a launcher."""
    armed: tuple[Any, ...] = () if kill is None else (arm, folder, kill)
    said, kind, text = job_on_rank(rank, world_size, flags, *armed)
    if kind:
        (Path(folder) / f"rank{rank}.error").write_text(f"{kind}: {text}")
        os._exit(1)
    return said


class Victim:
    """A run that is killed and restarted until it ends, repeated in new folders."""

    def __init__(self, folder: Path, world: int, flags: str, seed: int) -> None:
        self.folder, self.world, self.flags = (
            folder,
            world,
            f"{flags} --train-iters {NUM_STEPS} --save-interval 2 --keep-last 2",
        )
        self.choose = random.Random(seed)
        self.num_ended = 0
        self.struck: Counter[str] = Counter()
        folder.mkdir()
        self.live(folder / "undisturbed", None)
        self.expected = contents(folder / "undisturbed", NUM_STEPS)

    @property
    def root(self) -> Path:
        return self.folder / f"run{self.num_ended}"

    def live(self, root: Path, kill: Kill | InCollective | None, extra: str = "") -> bool:
        """Start the run once; return True if it was killed."""
        before = find_checkpoint(root) if root.exists() else None
        for pattern in ("*.pid", "*.error", "struck"):
            for left in self.folder.glob(pattern):
                left.unlink()
        with RankPool(self.world) as pool:
            flags = f"{self.flags} --save {root} --load {root} {extra}"
            answers = pool.run(one_life, flags, str(self.folder), kill, may_die=range(self.world))
        errors = [path.read_text() for path in self.folder.glob("*.error")]
        assert all(error.startswith("CommunicationError") for error in errors), errors
        is_killed = None in answers
        assert is_killed == (len(errors) < answers.count(None)), (answers, errors)
        if before is not None and answers[0] is not None:
            assert f"continuing after step {before.step}" in answers[0], answers[0]
        after = find_checkpoint(root)  # raises if no checkpoint is complete
        assert before is None or (after is not None and after.step >= before.step)
        return is_killed

    def disturb(self, is_aimed: bool, extra: str) -> bool:
        """Start the run once more with a random kill; return False if it ended before the kill."""
        killed = self.live(self.root, Kill.draw(self.choose, self.world, is_aimed), extra)
        place = self.folder / "struck"
        if killed:
            self.struck[place.read_text() if place.exists() else "any instant"] += 1
        else:
            self.compare()
        return killed

    def end(self) -> None:
        """Let the current run finish undisturbed."""
        if not self.live(self.root, None):
            self.compare()

    def compare(self) -> None:
        found = contents(self.root, NUM_STEPS)
        assert found.keys() == self.expected.keys() and len(found) > 20
        assert [name for name in found if not torch.equal(found[name], self.expected[name])] == []
        assert not list(self.root.glob(".*"))
        self.num_ended += 1


def kill_often(victim: Victim, number: int) -> None:
    """Kill the run `number` times.

    Half of the kills are aimed inside a save, and half of those saves run in the background.
    """
    kinds = ((is_aimed, extra) for _ in iter(int, 1) for extra in ("--async-save", "") for is_aimed in (True, False))
    for _ in range(number):
        is_aimed, extra = next(kinds)
        assert any(victim.disturb(is_aimed, extra) for _ in range(30)), "no blow strikes any more"
    victim.end()
    assert sum(victim.struck.values()) == number
    assert number - victim.struck["any instant"] == number // 2


def test_a_kill_during_a_gather_or_a_reduction_changes_nothing(tmp_path: Path) -> None:
    flags = (
        "--data-parallel-sharding-strategy optim_grads_params --data-parallel-sharding-granularity microbatch "
        "--data-parallel-sharding-units 2 --overlap-param-gather --overlap-grad-reduce --bf16"
    )
    victim = Victim(tmp_path / "victim", 2, flags, seed=1)
    # a step of two microbatches and two units has six gathers and four reductions, and every second step is saved
    for kill in (InCollective(1, "gather", 6 * 4 + 2), InCollective(0, "reduction", 4 * 3 + 2)):
        assert victim.live(victim.root, kill)
    victim.end()
    assert victim.num_ended == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("world", "flags", "number"),
    [(*GRIDS["pp2"], 40), (*GRIDS["dp2_zero_bf16"], 40), (*GRIDS["pp2_2bw"], 20), (*GRIDS["tp2_pp2"], 20)],
    ids=GRIDS.keys(),
)
def test_a_hundred_kills_change_nothing(tmp_path: Path, world: int, flags: str, number: int) -> None:
    victim = Victim(tmp_path / "victim", world, flags, seed=world + number)
    kill_often(victim, number)
    print(f"{number} kills, {victim.num_ended} runs ended; struck at {dict(victim.struck.most_common())}")
