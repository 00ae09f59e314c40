"""The watchdog across hosts: heartbeats from the exchange, which rank reports, and what does not count as a hang."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megapipe.monitor import watchdog as watchdog_module
from megapipe.monitor.heartbeat import Heartbeat, Wait
from megapipe.monitor.process import process_space, start_ticks
from megapipe.monitor.roster import Member, Roster, record_path
from megapipe.monitor.watchdog import Watchdog

LIMIT_SECONDS = 0.4


class OtherHost:
    """An exchange with another host, where rank 1 is alive or has stopped."""

    def __init__(self, heartbeat: Heartbeat, answers: bool, is_taken: bool = False) -> None:
        self.heartbeat, self.answers, self.is_taken = heartbeat, answers, is_taken
        self.is_reported = False
        self.num_fetches = 0
        heartbeat.pulse()

    def fetch(self, ranks: Sequence[int]) -> dict[int, bytes]:
        self.num_fetches += 1
        if self.answers:
            self.heartbeat.pulse()
        return {1: self.heartbeat.as_bytes()} if 1 in ranks else {}

    def stack(self, rank: int) -> str:
        return f"{self.heartbeat.snapshot().record.beat}\n  File data.py\n    read()"

    def publish_stack(self, text: str) -> None:
        self.published = text

    def claim(self, what: str = "claim") -> bool:
        return not self.is_taken

    def set_reported(self) -> None:
        self.is_reported = True


def watched(
    live: Path, exchange: OtherHost, limit_seconds: float = LIMIT_SECONDS
) -> tuple[Heartbeat, list[str], threading.Event, Watchdog]:
    heartbeat = Heartbeat(("world",))
    heartbeat.share(record_path(live, 0))
    pid = os.getpid()
    here = Member(0, "a", pid, start_ticks(pid), process_space(), "pp 0", (0,))
    roster = Roster((here, Member(1, "b", 77, 5, "elsewhere", "pp 1", (1,))), {"world": ((0, 1),)})
    reports: list[str] = []
    ended = threading.Event()
    return (
        heartbeat,
        reports,
        ended,
        Watchdog(heartbeat, roster, 0, live, limit_seconds, reports.append, ended.set, exchange),
    )


def hang(heartbeat: Heartbeat) -> None:
    heartbeat.wait_for_peer(Wait.RECEIVE, b"gradient from stage 1 to 0", 1)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (True, ("training hangs on rank 1 (pp 1, stage 1) on b, process 77: in 1F2", "stack of rank 1", "read()")),
        (False, ("hangs: host b (rank 1) no longer answers a: it is down or cut off",)),
    ],
    ids=["stuck", "cut off"],
)
def test_a_missing_rank_of_another_host_is_reported(tmp_path: Path, answers: bool, words: tuple[str, ...]) -> None:
    far = Heartbeat(("world",))
    far.act(b"1F2")
    exchange = OtherHost(far, answers)
    heartbeat, reports, ended, watchdog = watched(tmp_path, exchange)
    hang(heartbeat)
    watchdog.start()
    assert ended.wait(10)
    (report,) = reports
    assert all(word in report for word in words), report
    assert "rank 0 (pp 0, stage 0) waits" in report
    assert exchange.is_reported
    assert "test_watchdog.py" in exchange.published, "the stack of the thread that waits"


@pytest.mark.parametrize("is_taken", [False, True], ids=["first", "later"])
def test_one_rank_of_the_run_looks_for_a_lost_peer(tmp_path: Path, is_taken: bool) -> None:
    exchange = OtherHost(Heartbeat(("world",)), False, is_taken)
    *_, watchdog = watched(tmp_path, exchange)
    assert [sighting.is_unreachable for sighting in watchdog.unreachable()] == ([] if is_taken else [False, True])
    assert exchange.num_fetches == (0 if is_taken else 2)


def test_one_rank_of_a_host_asks_for_that(tmp_path: Path) -> None:
    """Rank 2 leaves it to rank 0, which lives, but not to a rank whose process has ended."""
    exchange, pid = OtherHost(Heartbeat(("world",)), False), os.getpid()
    for first_pid, asks in ((pid, False), (2**22 + 1, True)):
        first = Member(0, "a", first_pid, start_ticks(pid), process_space(), "pp 0", (0,))
        own = Member(2, "a", pid, start_ticks(pid), process_space(), "pp 2", (2,))
        roster = Roster((first, Member(1, "b", 77, 5, "elsewhere", "pp 1", (1,)), own), {"world": ((0, 1, 2),)})
        heartbeats = [Heartbeat(("world",)) for _ in (0, 2)]
        for rank, heartbeat in zip((0, 2), heartbeats, strict=True):
            heartbeat.share(record_path(tmp_path, rank))
            heartbeat.pulse()
        watchdog = Watchdog(heartbeats[1], roster, 2, tmp_path, LIMIT_SECONDS, print, print, exchange)
        assert bool(watchdog.unreachable()) == asks


def test_a_rank_leaves_without_a_report_when_another_host_has_reported(tmp_path: Path) -> None:
    exchange = OtherHost(Heartbeat(("world",)), True, is_taken=True)
    heartbeat, reports, ended, watchdog = watched(tmp_path, exchange)
    hang(heartbeat)
    watchdog.start()
    assert not ended.wait(3 * LIMIT_SECONDS + 2)
    exchange.is_reported = True
    assert ended.wait(5)
    assert reports == []


def test_a_dead_rank_is_reported_although_the_watchdog_runs_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine every interval is late, so that the age of records says nothing. A process that is gone is."""
    monkeypatch.setattr(watchdog_module, "JUMP_SECONDS", -1.0)
    monkeypatch.setattr(watchdog_module, "GONE_SECONDS", 0.2)
    heartbeat, pid, ended = Heartbeat(("world",)), os.getpid(), threading.Event()
    heartbeat.share(record_path(tmp_path, 0))
    own = Member(0, "a", pid, start_ticks(pid), process_space(), "pp 0", (0,))
    dead = Member(1, "a", 2**22 + 1, 5, process_space(), "pp 1", (1,))
    reports: list[str] = []
    roster = Roster((own, dead), {"world": ((0, 1),)})
    Watchdog(heartbeat, roster, 0, tmp_path, 1000.0, reports.append, ended.set).start()
    assert ended.wait(10)
    assert "rank 1 (pp 1, stage 1)" in reports[0]


def test_after_a_pause_of_the_whole_process_the_limit_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records look old on every rank, as after SIGSTOP and SIGCONT of the whole job."""
    exchange = OtherHost(Heartbeat(("world",)), True)
    heartbeat, _, ended, watchdog = watched(tmp_path, exchange, 2.0)  # a busy machine may hold up this thread
    hang(heartbeat)
    paused, looks = threading.Event(), []
    real, jump = time.time, 100.0

    def jumped() -> float:
        if paused.is_set():
            looks.append(real())
        return real() + (jump if paused.is_set() else 0.0)

    monkeypatch.setattr("megapipe.monitor.watchdog.time.time", jumped)
    watchdog.start()
    paused.set()
    while len(looks) < 6:
        heartbeat.end_wait()
        time.sleep(0.02)
    assert not ended.is_set()
    watchdog.stop()
