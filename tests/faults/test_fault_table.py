"""The faults of docs/reliability.md: each is injected into real ranks in the middle of a run. It is reported
within seconds, and the next start resumes from the newest complete checkpoint and ends with bitwise the weights of an
undisturbed run.

`pytest -rP` prints a row for each: seconds from the fault to the first message, and the repeated steps.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megapipe.checkpoint.folder import find_checkpoint
from megapipe.model.stage import GPTStage
from megapipe.monitor.process import process_state
from megapipe.train.step import TrainStep
from tests.faults.disks import fill, free
from tests.faults.plants import damage_newest, flipped_bit, nan_in_one_microbatch, unreadable_data
from tests.harness import RankPool
from tests.launch.scripts import Command, launch
from tests.train.jobs import TINY, job_on_rank
from tests.train.test_hangs import at_step
from tests.train.test_saving import contents

SCRIPT = Path(__file__).with_name("pretrain.py")
PAUSE_SECONDS = "0.2"  # in every step under the launcher, so that the fault comes in time
NUM_RANKS, NUM_STEPS, STRUCK_STEP, SAVE_INTERVAL = 4, 12, 8, 3
FLAGS = (
    f"--pipeline-model-parallel-size 2 --train-iters {NUM_STEPS} --save-interval {SAVE_INTERVAL} "
    "--hang-timeout-seconds 1.5 "
    "--check-weight-hash-across-dp-replicas-interval 2"
)


@dataclass(frozen=True)
class Fault:
    """A fault inside a rank.

    strike: what the victim does when step STRUCK_STEP begins. words: of the message. error: its type, None if the run
    exits on its own decision. most_lost: the most steps that are repeated.
    """

    strike: Callable[[TrainStep], object]
    words: tuple[str, ...]
    error: str | None
    most_lost: int = SAVE_INTERVAL
    victim: int = 3


def stop_for_ever(step: TrainStep) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die(step: TrainStep) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ask_to_leave(step: TrainStep) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def loop_for_ever(step: TrainStep) -> None:
    def endless(self: GPTStage, *arguments: object) -> None:
        while True:
            time.sleep(0.01)

    GPTStage.forward = endless  # type: ignore[method-assign, assignment]


FAULTS: dict[str, Fault] = {
    "kill -9 of a rank, no launcher": Fault(
        die, ("Died without an error message: rank 3 (pp 1, dp 1, stage 1)",), "CommunicationError"
    ),
    "SIGSTOP of a rank": Fault(
        stop_for_ever, ("training hangs on rank 3", "the process is stopped (SIGSTOP)"), "CommunicationError"
    ),
    "a stage that does not end": Fault(loop_for_ever, ("training hangs on rank 3", "in endless"), "CommunicationError"),
    "SIGTERM to a rank": Fault(ask_to_leave, ("SIGTERM received",), None, most_lost=0),
    "NaN in one microbatch": Fault(
        nan_in_one_microbatch, ("loss nan", "stage 1", "rank 3, microbatch 0"), "TrainingError"
    ),
    "data that cannot be read": Fault(unreadable_data, ("of the train data cannot be read: [Errno 5]",), "DataError"),
    "a flipped bit of a parameter": Fault(
        flipped_bit, ("bits of the parameters have changed", "rank 3"), "TrainingError", victim=3
    ),
}


def life(rank: int, world_size: int, flags: str, folder: str, fault: str | None) -> str:
    """Run a job and return its output. A rank that fails writes why and exits, as it does under a launcher."""

    def prepare(_: int) -> None:
        if fault is not None and rank == FAULTS[fault].victim:

            def strike(step: TrainStep) -> None:
                (Path(folder) / "struck").write_text(str(time.time()))
                FAULTS[fault].strike(step)

            at_step(STRUCK_STEP, strike)

    said, kind, text = job_on_rank(rank, world_size, flags, prepare)
    if kind:
        (Path(folder) / f"rank{rank}.error").write_text(f"{time.time()}\n{kind}\n{text}")
        os._exit(1)
    return said


def run(pool: RankPool, save: Path, folder: Path, fault: str | None = None) -> str:
    """Make one start and return rank 0's output."""
    said: str | None = pool.run(
        life, f"{FLAGS} --save {save} --load {save}", str(folder), fault, may_die=range(NUM_RANKS)
    )[0]
    return said or ""


def errors(folder: Path) -> list[tuple[float, str, str]]:
    """Return (Unix seconds, type, text) of every rank that raised, the first one first."""
    found = [path.read_text().split("\n", 2) for path in folder.glob("*.error")]
    return sorted((float(when), kind, text) for when, kind, text in found)


@dataclass(frozen=True)
class Undisturbed:
    """The final state of a run without faults, and ranks for the next starts."""

    pool: RankPool
    expected: dict[str, Tensor]

    def assert_equal(self, save: Path) -> None:
        after = contents(save, NUM_STEPS)
        assert after.keys() == self.expected.keys() and len(after) > 20
        assert [name for name in after if not torch.equal(after[name], self.expected[name])] == []

    def assert_recovers(self, save: Path, folder: Path, most_lost: int, words: str = "") -> int:
        """Start again, require the same end, and return the number of repeated steps. words: have to be in the
        output."""
        for left in folder.glob("*.error"):
            left.unlink()
        said = run(self.pool, save, folder)
        assert errors(folder) == []
        found = re.search(r"continuing after step (\d+)", said)
        assert found is not None and words in said, said
        lost = max(0, STRUCK_STEP - 1 - int(found[1]))
        assert lost <= most_lost
        self.assert_equal(save)
        return lost


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Undisturbed]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with RankPool(NUM_RANKS) as pool:
        run(pool, folder / "run", folder)
        yield Undisturbed(pool, contents(folder / "run", NUM_STEPS))


def reports(folder: Path) -> list[tuple[float, str, str]]:
    """Return `errors`, or the report of a hang, after which ranks exit without an error."""
    record = folder / "run" / "run.jsonl"
    lines = map(json.loads, record.read_text().splitlines()) if record.exists() else ()
    return errors(folder) or [
        (line["time"], line["error"], line["text"]) for line in lines if line["kind"] == "failure"
    ]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported_and_the_next_start_ends_like_an_undisturbed_run(
    name: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    fault, save = FAULTS[name], tmp_path / "run"
    with RankPool(NUM_RANKS) as pool:
        said = run(pool, save, tmp_path, name)
    found = reports(tmp_path)
    text = said + "\n".join(text for _, _, text in found)
    for word in fault.words:
        assert word in text, text
    assert not found if fault.error is None else {kind for _, kind, _ in found} <= {fault.error, "CommunicationError"}
    seconds = f"{found[0][0] - float((tmp_path / 'struck').read_text()):.1f}" if found else "-"
    lost = undisturbed.assert_recovers(save, tmp_path, fault.most_lost)
    print(f"| {name} | {seconds} | {fault.words[0]} ... | {lost} | bit-exact |")


LAUNCHED: dict[
    str, tuple[Callable[[Command], None], int, str, float]
] = {  # the last: the most seconds until all ranks have ended
    "kill -9 of a rank, under the launcher": (
        lambda command: os.kill(command.ranks()[2], signal.SIGKILL),
        137,
        "rank 2 was killed by SIGKILL",
        60.0,
    ),
    "kill -9 of the launcher": (
        lambda command: command.signal(signal.SIGKILL),
        -9,
        "rank 0: the launcher (process ",
        60.0,
    ),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_kill_under_the_launcher_ends_all_ranks_and_the_next_start_ends_like_an_undisturbed_run(
    name: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    strike, code, words, most_seconds = LAUNCHED[name]
    save = tmp_path / "run"
    flags = (
        f"{TINY} {FLAGS} --save {save} --hang-timeout-seconds 30".split()
    )  # a busy machine imports for seconds in the first step
    with launch(tmp_path, NUM_RANKS, PAUSE_SECONDS, *flags, script=SCRIPT) as command:
        command.wait_for(f"step {STRUCK_STEP - 1:2}/{NUM_STEPS}")
        ranks = command.ranks()
        began = time.monotonic()
        strike(command)
        ended = command.ended()
        while (
            not all(process_state(rank, None).has_ended for rank in ranks) and time.monotonic() < began + most_seconds
        ):
            time.sleep(0.01)
        seconds = time.monotonic() - began
        assert not [rank for rank in ranks if not process_state(rank, None).has_ended]
        error = command.error()  # a rank may print after the launcher has ended
    assert (ended.code, len(error.splitlines())) == (code, 1), error
    assert error.startswith(words), error
    lost = undisturbed.assert_recovers(save, tmp_path, SAVE_INTERVAL)
    print(f"| {name} | {seconds:.1f} | {words} ... | {lost} | bit-exact |")


def test_a_damaged_newest_checkpoint_costs_one_interval_more(tmp_path: Path, undisturbed: Undisturbed) -> None:
    save = tmp_path / "run"
    with RankPool(NUM_RANKS) as pool:
        run(pool, save, tmp_path, "kill -9 of a rank, no launcher")
    damage_newest(save)
    lost = undisturbed.assert_recovers(save, tmp_path, 2 * SAVE_INTERVAL, "is damaged")
    assert lost == STRUCK_STEP - 1 - SAVE_INTERVAL
    print(f"| corrupted newest checkpoint | at the next start | ... is damaged | {lost} | bit-exact |")


def fill_disk(rank: int, world_size: int, flags: str, folder: str) -> str:
    """Run a job whose disk is full from step STRUCK_STEP on."""

    def strike(step: TrainStep) -> None:
        (Path(folder) / "struck").write_text(str(time.time()))
        fill(Path(folder) / "disk")

    said, kind, text = job_on_rank(
        rank, world_size, flags, lambda _: at_step(STRUCK_STEP, strike) if rank == 0 else None
    )
    (Path(folder) / f"rank{rank}.error").write_text(f"{time.time()}\n{kind}\n{text}")
    return said


def test_a_full_disk_costs_the_save_and_not_the_checkpoints(
    tmp_path: Path, small_disk: Path, undisturbed: Undisturbed
) -> None:
    save = small_disk / "run"
    with RankPool(NUM_RANKS) as pool:
        pool.run(fill_disk, f"{FLAGS} --save {save}", str(tmp_path))
    found = errors(tmp_path)
    assert {kind for _, kind, _ in found} == {"CheckpointError"}
    assert "No space left on device" in found[0][2], found
    newest = find_checkpoint(save)
    assert newest is not None and newest.step == 6
    free(small_disk)
    seconds = found[0][0] - float((tmp_path / "struck").read_text())
    lost = undisturbed.assert_recovers(save, tmp_path, SAVE_INTERVAL)
    print(f"| disk full | {seconds:.1f} (at the next save) | ... No space left on device | {lost} | bit-exact |")
