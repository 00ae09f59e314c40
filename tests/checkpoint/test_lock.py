"""One run at a time saves in a directory: a second one is refused with its owner's name, and a former owner stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.checkpoint import lock as lock_module
from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import steps_in
from megapipe.checkpoint.lock import DEAD_SECONDS, Owner, SaveLock, acquire, lock_path, newest_lock, numbers_in, take
from megapipe.environment import read_environment
from megapipe.errors import CheckpointError, SaveRefusedError
from megapipe.train.saving import Saving
from megapipe.train.state import TrainingState
from tests.checkpoint.layouts import save_one
from tests.train.jobs import job

ENVIRONMENT = read_environment({})
Changes = dict[str, Any]  # of an owner
ELSEWHERE = {"space": "another host's", "host": "node-b"}
# holds the lock of argv[1], prints a line, and removes argv[2] when it reads a line
HOLDER = """
import sys
from pathlib import Path
from megapipe.checkpoint import lock
from megapipe.checkpoint.disk import Disk
from megapipe.environment import read_environment
lock.BEAT_SECONDS = 0.05
try:
    held = lock.acquire(Path(sys.argv[1]), lock.Owner.here(read_environment({})), lambda line: None)
except Exception as error:
    sys.exit(f"{type(error).__name__} {error}")
print("held", flush=True)
while sys.stdin.readline().strip() == "remove":
    try:
        Disk(may_change=held.check).remove(Path(sys.argv[2]))
    except Exception as error:
        print(type(error).__name__, error, flush=True)
held.release()
"""


class Clock:
    """A clock that only sleeping moves. on_tick: called at every poll."""

    def __init__(self, on_tick: Callable[[float], None] = lambda now: None) -> None:
        self.now, self._on_tick = 0.0, on_tick

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._on_tick(self.now)


def here(**changes: object) -> Owner:
    return replace(Owner.here(ENVIRONMENT), **changes)  # type: ignore[arg-type]


def quiet(line: str) -> None:
    pass


@pytest.fixture
def slow_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off the beats of the thread."""
    monkeypatch.setattr(lock_module, "BEAT_SECONDS", 1e6)


@pytest.mark.usefixtures("slow_beats")
def test_a_released_lock_is_taken_at_once_and_its_number_rises(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        held = acquire(tmp_path / "run", here(**ELSEWHERE), pytest.fail)
        assert numbers_in(tmp_path / "run") == [number]
        held.check()
        held.release()
    assert sorted(os.listdir(tmp_path / "run")) == ["lock.3.json"]


@pytest.mark.usefixtures("slow_beats")
@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"pid": 2**22 + 1}, {}),
        ({"ticks": 1}, {}),
        ({"job": "slurm 7", **ELSEWHERE}, {"job": "slurm 7", "restarts": 1}),
    ],
    ids=["ended", "process_id_used_again", "requeued"],
)
def test_an_owner_that_is_known_to_be_gone_is_not_waited_for(tmp_path: Path, before: Changes, now: Changes) -> None:
    assert take(tmp_path, 4, here(**before))
    held = acquire(tmp_path, here(**now), pytest.fail)
    held.check()
    assert numbers_in(tmp_path) == [5]


@pytest.mark.usefixtures("slow_beats")
@pytest.mark.parametrize("now", [{"job": "slurm 7"}, {"job": "slurm 8", "restarts": 1}, {"restarts": 3}])
def test_a_silent_owner_is_dead_after_a_minute_of_the_watchers_clock(tmp_path: Path, now: Changes) -> None:
    assert take(tmp_path, 4, here(job="slurm 7", **ELSEWHERE))
    os.utime(lock_path(tmp_path, 4), (1, 1))  # clocks of hosts mean nothing
    clock, said = Clock(), list[str]()
    acquire(tmp_path, here(**now), said.append, clock, clock.sleep).check()
    assert DEAD_SECONDS <= clock.now < DEAD_SECONDS + 1 and len(said) == 2
    assert "is locked by process" in said[0] and "on node-b, started" in said[0] and "job slurm 7" in said[0]


@pytest.mark.usefixtures("slow_beats")
def test_a_lock_file_that_is_removed_alone_is_written_again(tmp_path: Path) -> None:
    held = acquire(tmp_path, here(**ELSEWHERE), pytest.fail)
    lock_path(tmp_path, 1).unlink()
    held.check()
    assert numbers_in(tmp_path) == [1]


@pytest.mark.usefixtures("slow_beats")
@pytest.mark.parametrize("then", ["gone", "empty", "another run", "another run of the same number"])
def test_a_folder_that_is_moved_during_a_run_is_not_made_anew(tmp_path: Path, then: str) -> None:
    for _ in range(2):  # the second owner has lock.2.json
        held = acquire(tmp_path / "run", here(**ELSEWHERE), pytest.fail)
        held.release() if numbers_in(tmp_path / "run") == [1] else held.check()
    (tmp_path / "run").rename(tmp_path / "moved")
    others: list[SaveLock] = []
    if then == "empty":
        (tmp_path / "run").mkdir()
    for _ in range({"another run": 1, "another run of the same number": 2}.get(then, 0)):
        for other in others:
            other.release()
        others.append(acquire(tmp_path / "run", here(**ELSEWHERE), pytest.fail))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for _ in range(2):
        with pytest.raises(SaveRefusedError, match="moved or removed"):
            held.check()
    with pytest.raises(SaveRefusedError, match="was moved or removed"):
        Disk(may_change=held.check).make_folder(tmp_path / "run" / "step")
    held.release()
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert (tmp_path / "run").exists() == (then != "gone")
    if others:
        others[-1].check()


@pytest.mark.usefixtures("slow_beats")
@pytest.mark.parametrize("sign", ["beat", "touched"])
def test_any_sign_of_life_refuses_the_second_run(tmp_path: Path, sign: str) -> None:
    held = acquire(tmp_path, here(**ELSEWHERE), pytest.fail)

    def tick(now: float) -> None:
        if now >= 30 and sign == "beat":
            held._beat()
        elif now >= 30:
            os.utime(lock_path(tmp_path, 1))

    clock = Clock(tick)
    with pytest.raises(SaveRefusedError, match=r"process \d+ on node-b"):
        acquire(tmp_path, here(), quiet, clock, clock.sleep)
    assert clock.now == 30
    held.check()


@pytest.mark.usefixtures("slow_beats")
def test_a_file_that_cannot_be_read_is_not_dead_before_a_minute(tmp_path: Path) -> None:
    lock_path(tmp_path, 2).write_text("")  # one is being created without hard links
    clock = Clock()
    acquire(tmp_path, here(), quiet, clock, clock.sleep)
    assert clock.now >= DEAD_SECONDS and numbers_in(tmp_path) == [3]


def test_without_hard_links_creation_is_exclusive_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert take(tmp_path, 1, here()) and not take(tmp_path, 1, here())
    assert numbers_in(tmp_path) == [1] and not list(tmp_path.glob(".*"))


STEP = st.tuples(st.sampled_from(["take", "check", "beat", "release"]), st.integers(0, 2))


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(STEP, max_size=14))
def test_in_every_order_of_steps_only_the_last_that_took_the_lock_may_write(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    root = tmp_path_factory.mktemp("root")
    held: dict[int, SaveLock] = {}
    last: int | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock_module, "BEAT_SECONDS", 1e6)
        for action, runner in steps:
            mine = held.get(runner)
            if action == "take":
                clock = Clock()
                held[runner] = acquire(root, here(**ELSEWHERE), quiet, clock, clock.sleep)
                if mine is not None:
                    mine._ended.set()
                last = runner
            elif mine is not None and action == "beat":
                mine._beat()  # also by one that was paused: it changes nothing for the owner
            elif mine is not None and action == "release":
                mine.release()
                last = None if last == runner else last
            elif mine is not None:
                if runner == last:
                    mine.check()
                else:
                    with pytest.raises(SaveRefusedError):
                        mine.check()
        for one in held.values():
            one._ended.set()


def test_of_many_that_take_over_at_once_one_succeeds(tmp_path: Path) -> None:
    for number in range(1, 20):
        won, barrier = list[Owner](), threading.Barrier(6)

        def run(number: int = number, won: list[Owner] = won, barrier: threading.Barrier = barrier) -> None:
            own = here()
            barrier.wait()
            if take(tmp_path, number, own):
                won.append(own)

        threads = [threading.Thread(target=run) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = newest_lock(tmp_path)
        assert found is not None and found.number == number and won == [found.owner]


Start = Callable[[], subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process that takes the lock of `tmp_path/run`."""
    started: list[subprocess.Popen[str]] = []

    def run() -> subprocess.Popen[str]:
        words = [sys.executable, "-c", HOLDER, str(tmp_path / "run"), str(tmp_path / "victim")]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def holders(start: Start) -> Start:
    """Start a process that holds the lock."""

    def run() -> subprocess.Popen[str]:
        process = start()
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    return run


def test_a_killed_owner_is_replaced_at_once_and_a_live_one_never(tmp_path: Path, holders: Start) -> None:
    first = holders()
    with pytest.raises(SaveRefusedError, match=rf"process {first.pid} on"):
        acquire(tmp_path / "run", here(), quiet)
    first.send_signal(signal.SIGKILL)
    first.wait()
    acquire(tmp_path / "run", here(), pytest.fail).release()
    second = holders()
    second.communicate("\n")  # ends normally
    acquire(tmp_path / "run", here(**ELSEWHERE), pytest.fail).release()


def test_a_stopped_owner_that_was_replaced_writes_nothing_when_it_wakes(tmp_path: Path, holders: Start) -> None:
    victim = tmp_path / "victim"
    victim.write_text("content")
    first = holders()
    first.send_signal(signal.SIGSTOP)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock_module, "DEAD_SECONDS", 0.5)
        held = acquire(tmp_path / "run", here(), said.append)
    assert said[1].startswith(f"took over --save {tmp_path / 'run'}: no sign of life of process {first.pid}")
    first.stdin.write("remove\n")
    first.stdin.flush()
    first.send_signal(signal.SIGCONT)
    answer = first.stdout.readline()
    assert answer.startswith("SaveRefusedError the run of process") and "has taken over" in answer
    assert victim.read_text() == "content"
    held.check()
    held.release()  # also after the new owner has ended
    first.stdin.write("remove\n")
    first.stdin.flush()
    assert first.stdout.readline().startswith("SaveRefusedError") and victim.exists()


def test_a_save_of_an_owner_that_lost_the_lock_changes_nothing(tmp_path: Path) -> None:
    save_one(tmp_path, 1)
    held = acquire(tmp_path, here(), pytest.fail)
    disk = Disk(may_change=held.check)
    save_one(tmp_path, 2, disk=disk)
    states: list[list[str]] = []

    def lose(operation: str, path: Path) -> None:
        if path.name == "manifest.json" and operation == "sync":
            assert take(tmp_path, 2, here())
            states.append(sorted(name for name in os.listdir(tmp_path) if "tmp" not in name))

    with pytest.raises(SaveRefusedError, match="has taken over"):
        save_one(tmp_path, 3, disk=Disk(lose, held.check), keep_last=1)
    assert sorted(name for name in os.listdir(tmp_path) if "tmp" not in name) == states[0]
    with pytest.raises(SaveRefusedError, match="has taken over"):
        save_one(tmp_path, 4, disk=disk)


def test_a_job_whose_folder_is_moved_ends_at_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Saving._report

    def move(self: Saving, *arguments: Any) -> None:
        report(self, *arguments)
        (tmp_path / "run").rename(tmp_path / "moved")

    monkeypatch.setattr(Saving, "_report", move)
    code, said = job(f"--train-iters 4 --save {tmp_path}/run --save-interval 1")
    assert code == 2 and f"--save {tmp_path}/run was moved or removed while" in said
    assert steps_in(tmp_path / "moved") == [1] and not (tmp_path / "run").exists()
    assert "step 3/4" not in said


def test_a_second_job_is_refused_and_writes_nothing(tmp_path: Path, holders: Start) -> None:
    process = holders()
    code, said = job(f"--train-iters 1 --save {tmp_path / 'run'}")
    assert code == 2 and "Traceback" not in said
    assert f"--save {tmp_path / 'run'} is in use by another run: process {process.pid} on" in said
    assert [name for name in os.listdir(tmp_path / "run") if not name.startswith(".")] == ["lock.1.json"]
    process.kill()
    process.wait()
    began = time.monotonic()
    assert job(f"--train-iters 1 --save {tmp_path / 'run'}")[0] == 0 and time.monotonic() - began < DEAD_SECONDS
    assert json.loads(lock_path(tmp_path / "run", 2).read_text())["released"]


@pytest.mark.parametrize("flags", ["", "--async-save"], ids=["waiting", "background"])
def test_a_job_that_lost_the_lock_ends_without_another_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    save = Saving.save

    def lose(saving: Saving, state: TrainingState) -> None:
        if state.step == 2:
            assert take(tmp_path, 2, here())
        save(saving, state)

    monkeypatch.setattr(Saving, "save", lose)
    code, said = job(f"--train-iters 6 --save-interval 1 --save {tmp_path} {flags}")
    assert code == 2 and "has taken over" in said and "Traceback" not in said
    assert steps_in(tmp_path) in ([1], [])  # in background the first save may still have been in flight


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/run cannot be written: Not a directory"):
        acquire(tmp_path / "file" / "run", here(), quiet)
