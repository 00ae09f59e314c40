"""A signal to one rank at any moment: all ranks exit after the same step, and no progress is lost."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megapipe.monitor.signals import ThisProcess
from megapipe.train import run as run_module
from megapipe.train.guard import STOP_SIGNALS, Guard, stop_requests
from megapipe.train.saving import Saving
from megapipe.train.step import TrainStep
from tests.harness import REPOSITORY, RankPool
from tests.train.jobs import TINY, furthest, job_on_rank, lines_of

Pools = Callable[[int], RankPool]
FLAGS = "--train-iters 4 --save-interval 2 --eval-interval 2 --eval-iters 5 --use-distributed-optimizer"
MOMENTS = {
    "before the first step": (run_module, "build_data"),
    "in a save": (Saving, "save"),
    "in an evaluation": (TrainStep, "evaluate"),
}


def job_with_signal(
    rank: int, world_size: int, flags: str, moment: str, where: int, number: int
) -> tuple[str, str, str | None, int]:
    """Run a job in which rank `where` gets a signal at its first `moment`.

    The last element of the result is the number of times that this rank reached that moment.
    """
    owner, name = MOMENTS[moment]
    plain, calls = getattr(owner, name), 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank == where and calls == 1:
            os.kill(os.getpid(), number)
        return plain(*arguments)

    with mock.patch.object(owner, name, interrupted):
        return (*job_on_rank(rank, world_size, flags), calls)


def job_that_asks_ahead(rank: int, world_size: int, flags: str) -> tuple[str, str, str | None]:
    """Run a job whose ranks agree as on GPUs; rank 1 gets a signal during its second step."""
    build, train, steps = Guard.__init__, TrainStep.run, 0

    def ahead(self: Guard, *arguments: Any) -> None:
        build(self, *arguments)
        self._asks_ahead = True

    def interrupted(self: TrainStep, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if rank == 1 and steps == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return train(self, *arguments)

    with mock.patch.object(Guard, "__init__", ahead), mock.patch.object(TrainStep, "run", interrupted):
        return job_on_rank(rank, world_size, flags)


def test_ranks_that_do_not_wait_for_the_agreement_follow_it_one_step_later(rank_pools: Pools, tmp_path: Path) -> None:
    flags = "--train-iters 9 --exit-signal-handler --async-save --save-interval 1 --use-distributed-optimizer"
    said = rank_pools(2).run(job_that_asks_ahead, f"{flags} --save {tmp_path}")
    assert [error for _, error, _ in said] == ["", ""], said
    assert "ended after step 3: SIGUSR1 received" in said[0][0]
    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl") if line["kind"] == "step"] == [1, 2, 3]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    with RankPool(2) as pool:
        pool.run(job_on_rank, f"{FLAGS} --save {folder}")
    return folder


@pytest.mark.parametrize(
    ("moment", "where", "number", "step", "calls"),
    [
        ("before the first step", 1, signal.SIGUSR1, 0, 1),
        ("in a save", 0, signal.SIGUSR1, 3, 2),  # during the save of step 2: the next step is trained and saved
        ("in an evaluation", 1, signal.SIGTERM, 2, 1),  # four more evaluation steps were to follow
        ("in an evaluation", 0, signal.SIGUSR1, 2, 1),
    ],
)
def test_all_ranks_stop_and_a_resumed_run_equals_one_without_a_signal(
    rank_pools: Pools, tmp_path: Path, undisturbed: Path, moment: str, where: int, number: int, step: int, calls: int
) -> None:
    flags = f"{FLAGS} --save {tmp_path} --load {tmp_path}"
    results = rank_pools(2).run(job_with_signal, flags, moment, where, number)
    assert [result[1:] for result in results] == [("", None, calls)] * 2
    assert f"ended after step {step}: {signal.Signals(number).name} received" in results[0][0]
    assert lines_of(tmp_path / "run.jsonl")[-1]["early"] is True
    saved = sorted(path.name for path in tmp_path.glob("step_*"))
    assert saved == ["step_00000002", "step_00000003"][: max(0, step - 1)]
    again = rank_pools(2).run(job_on_rank, flags)
    assert [result[1:] for result in again] == [("", None)] * 2
    assert f"continuing after step {step}" in again[0][0] if step else "starting from step 0" in again[0][0]
    assert furthest(tmp_path, undisturbed) == 0.0


SAVES_SLOWLY = """
import sys, time
from megapipe.extras.cli.pretrain import main
from megapipe.train.saving import Saving

def save(self, state):
    print("saving", flush=True)
    time.sleep(1000)

Saving.save = save
sys.exit(main())
"""


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    words = [sys.executable, "-c", SAVES_SLOWLY, *TINY.split(), "--train-iters", "1000000", "--save", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            next(line for line in process.stdout if re.match(r"step +2/", line))
            process.send_signal(signal.SIGINT)
            next(line for line in process.stdout if line == "saving\n")
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=280)  # the save alone takes 1000 seconds
        finally:
            process.kill()
    assert process.returncode == 130


def test_a_run_whose_terminal_is_closed_saves_and_exits(tmp_path: Path) -> None:
    terminal, of_rank = pty.openpty()
    script = str(REPOSITORY / "pretrain_gpt.py")
    words = [sys.executable, script, *TINY.split(), "--train-iters", "1000000", "--save", str(tmp_path)]
    process = subprocess.Popen(
        words,
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=of_rank,
        stdout=of_rank,
        stderr=of_rank,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        os.close(of_rank)
        said = b""
        while not re.search(rb"step +2/", said):
            said += os.read(terminal, 4096)
        os.close(terminal)  # the kernel sends SIGHUP, and writing to the terminal fails from here on
        assert process.wait(280) == 0
    finally:
        process.kill()
    last = lines_of(tmp_path / "run.jsonl")[-1]
    assert last["kind"] == "end" and last["reason"] == "SIGHUP received"
    assert (tmp_path / f"step_{last['step']:08d}").is_dir()


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the handlers of this process."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_requests(True) as stop:
        stop.begin()
        signal.raise_signal(signal.SIGHUP)
        assert stop.signal is None
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal is signal.SIGTERM
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("is_last", [True, False], ids=["a command", "a program that continues"])
@pytest.mark.usefixtures("handlers")
def test_only_a_process_that_ends_after_the_run_ignores_repeated_requests(
    is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThisProcess, "is_command", is_last)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with pytest.raises(ZeroDivisionError), stop_requests(True):
        raise ZeroDivisionError
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
    with stop_requests(True) as stop:
        stop.begin()
    after = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    assert after == (dict.fromkeys(STOP_SIGNALS, signal.SIG_IGN) if is_last else before) | {
        signal.SIGINT: before[signal.SIGINT]
    }
