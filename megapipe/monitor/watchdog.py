"""`Watchdog`: a thread of every rank that notices a hang. One rank reports who is missing, then all ranks end.

Each rank looks at its own record. When that has not changed for the limit, the rank writes its stack to a file and
looks at the others. The lowest stuck rank that can report does; a file created exclusively, and a claim between hosts,
keep it to one report.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import methodcaller
from pathlib import Path
from typing import Any, Protocol

from megapipe.monitor.diagnosis import MOST_CULPRITS, Diagnosis, Fault, diagnose, report_text
from megapipe.monitor.heartbeat import Heartbeat, Snapshot, read_snapshot
from megapipe.monitor.process import process_space
from megapipe.monitor.roster import Roster, Sighting, replace_file, sight, speaks, stack_path

MOST_INTERVAL_SECONDS = 0.5
GONE_SECONDS = 3.0  # after which a dead rank is reported; a living launcher ends all ranks sooner and reports it itself
STACK_SECONDS = 1.0  # for a culprit that answers to write its stack
TURN_SECONDS = 3.0  # after which any rank reports, as the one whose turn it is does not
REPORT_SECONDS = 8.0  # after which no rank waits any longer for a report that was begun
JUMP_SECONDS = 2.0  # by which an interval may be late
PULSE_SECONDS = 1.5  # between two looks at a rank of another host; if it answers, its pulse changes in between
PULSE_CHECKS = 3  # own pulses meanwhile


class Exchange(Protocol):
    """The exchange of records and stacks between hosts: comm.store_exchange.StoreExchange."""

    is_reported: bool  # a rank of any host has reported

    def fetch(self, ranks: Sequence[int]) -> dict[int, bytes]: ...
    def stack(self, rank: int) -> str: ...
    def publish_stack(self, text: str) -> None: ...
    def claim(self, what: str = "claim") -> bool: ...
    def set_reported(self) -> None: ...


class Watchdog:
    """A thread that watches from `start` to `stop`.

    limit_seconds: how long a record may stay unchanged. live: folder of this host's records. say: takes the report, on
    the one rank that makes it. end: ends this process. Both are called in the watchdog's thread. exchange: None for one
    host. kills: also end the ranks of this host that cannot end themselves, for runs whose launcher does not.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        roster: Roster,
        rank: int,
        live: Path,
        limit_seconds: float,
        say: Callable[[str], object],
        end: Callable[[], object],
        exchange: Exchange | None = None,
        kills: bool = False,
    ) -> None:
        self._heartbeat, self._roster, self._rank, self._live = heartbeat, roster, rank, live
        self._limit_seconds, self._say, self._end = limit_seconds, say, end
        self._exchange, self._kills = exchange, kills
        self._here = [member for member in roster.members if member.space == process_space()]
        self._watched = threading.get_ident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._stack_beat = -1  # the record at which the stack was last written
        self._suspects_since: float | None = None  # when this rank first found a culprit
        self._gone: dict[int, float] = {}  # rank -> when it was first seen gone
        self._not_before = 0.0  # Unix seconds before which records are not judged

    def start(self) -> None:
        """Begin to watch the calling thread."""
        self._watched = threading.get_ident()
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * MOST_INTERVAL_SECONDS)

    def unreachable(self) -> list[Sighting]:
        """Return sightings of all ranks if any of another host is unreachable, else []. Takes PULSE_SECONDS.

        The records of all ranks are many: after a lost peer one rank of the run looks, the first of those that are the
        lowest living one of their host.
        """
        living = (member.rank for member in self._here if not sight(member, self._live).is_gone)
        is_first = self._rank == next(living, self._rank)
        looks = is_first and bool(self._ask(lambda exchange: exchange.claim("lost peer")))
        sightings = self._sightings() if looks else []
        return sightings if any(sighting.is_unreachable for sighting in sightings) else []

    def _run(self) -> None:
        interval = min(MOST_INTERVAL_SECONDS, self._limit_seconds / 8)
        self._heartbeat.pulse()
        before = time.time()
        while not self._stopped.wait(interval):
            now = time.time()
            if now - before > interval + JUMP_SECONDS:
                # stopped and continued, or the clock was set: all records look old although they are not
                self._not_before = now + self._limit_seconds
            before = now
            self._heartbeat.pulse()
            if self.is_reported:
                self._set_reported()  # for the other ranks of this host, which do not ask the store
                self._leave(())
            elif (now >= self._not_before and self._is_stuck()) or self._has_dead_rank():
                self._look()
                before = time.time()
            else:
                self._suspects_since = None

    def _is_stuck(self) -> bool:
        """Return True if this rank's record has not changed for the limit, and it is its turn to look.

        Its stack is then written, once. One rank a host asks the store, the lowest that answers, and the others only if
        that one has not ended the run after a while.
        """
        record = self._heartbeat.snapshot().record
        stuck_seconds = (time.time_ns() - record.since_ns) / 1e9 - self._limit_seconds * record.patience
        if stuck_seconds < 0:
            return False
        if self._stack_beat != record.beat:
            self._stack_beat = record.beat
            frame = sys._current_frames().get(self._watched)
            text = f"{record.beat}\n" + ("" if frame is None else "".join(traceback.format_stack(frame)))
            with suppress(OSError):
                replace_file(stack_path(self._live, self._rank), text.encode())
            self._ask(lambda exchange: exchange.publish_stack(text))
        looks = self._exchange is None or speaks(self._here, self._rank, self._live)
        return looks or stuck_seconds >= TURN_SECONDS + REPORT_SECONDS

    def _has_dead_rank(self) -> bool:
        """Return True if a rank of this host has been dead for GONE_SECONDS."""
        now = time.monotonic()
        gone = {member.rank for member in self._here if sight(member, self._live).is_gone}
        self._gone = {rank: self._gone.get(rank, now) for rank in gone}
        return any(now - since >= GONE_SECONDS for since in self._gone.values())

    def _look(self) -> None:
        """Diagnose, and report if it is this rank's turn."""
        sightings = self._sightings()
        diagnosis = diagnose(sightings, self._roster, self._limit_seconds)
        if self._stopped.is_set():
            return
        if diagnosis is None or (diagnosis.fault is Fault.GONE and not self._has_dead_rank()):
            self._suspects_since = None
            return
        now = time.monotonic()
        self._suspects_since = now if self._suspects_since is None else self._suspects_since
        # the turn of the lowest rank that is alive and stuck too
        able = [s for s in sightings if not (s.answers is False or s.is_stopped or s.is_gone or s.has_left)]
        is_gone = diagnosis.fault is Fault.GONE
        first = min((s.member.rank for s in able if is_gone or s.is_stuck(self._limit_seconds)), default=self._rank)
        if self._rank != first and now - self._suspects_since < TURN_SECONDS:
            return
        try:  # only the first of all ranks reports
            (self._live / "claimed").touch(mode=0o600, exist_ok=False)
        except OSError:
            return
        if self._ask(lambda exchange: exchange.claim()) is False:
            return
        self._say(report_text(diagnosis, sightings, self._stacks(diagnosis, sightings), self._limit_seconds))
        self._set_reported()
        self._ask(lambda exchange: exchange.set_reported())
        self._leave(sightings)

    def _sightings(self) -> list[Sighting]:
        """Look at all ranks. The clocks of other hosts are not ours: a pulse that changes in between is an answer."""
        has_exchange = self._exchange is not None
        members = [member for member in self._roster.members if member not in self._here] if has_exchange else []
        ranks = [member.rank for member in members]
        before, after = self._snapshots(ranks), {}
        if before:
            for _ in range(PULSE_CHECKS):
                time.sleep(PULSE_SECONDS / PULSE_CHECKS)
                self._heartbeat.pulse()
            after = self._snapshots(ranks)
        found = {}
        for member in members:
            then, now = before.get(member.rank), after.get(member.rank)
            if now is None:  # it had plenty of time to publish one, so the store cannot be reached
                found[member.rank] = Sighting(member, None, self._limit_seconds, None, False)
                continue
            answers = then is None or now.pulse_ns != then.pulse_ns
            age = (now.pulse_ns - now.record.since_ns) / 1e9
            silent = self._limit_seconds * now.record.patience  # a silent host does not say how old its record is
            found[member.rank] = Sighting(member, now, age if answers else max(age, silent), None, answers)
        return [found.get(member.rank) or sight(member, self._live) for member in self._roster.members]

    def _snapshots(self, ranks: Sequence[int]) -> dict[int, Snapshot | None]:
        fetched: dict[int, bytes] = self._ask(lambda exchange: exchange.fetch(ranks)) or {}
        return {rank: read_snapshot(data) for rank, data in fetched.items()}

    def _ask(self, question: Callable[[Exchange], Any]) -> Any:
        """Return what the exchange answers, None without one. This rank keeps up its pulse meanwhile."""
        exchange = self._exchange
        if exchange is None:
            return None
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(question(exchange)), name="watchdog asks", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(MOST_INTERVAL_SECONDS)
            self._heartbeat.pulse()
        return answers[0] if answers else None

    def _stacks(self, diagnosis: Diagnosis, sightings: Sequence[Sighting]) -> dict[int, str]:
        """Return the stacks of culprits that answer; waits STACK_SECONDS for those that have not written theirs yet."""
        seen = [sightings[rank] for rank in diagnosis.culprits[:MOST_CULPRITS]]
        wanted = [s.member.rank for s in seen if s.answers is not False and not s.is_stopped and not s.is_gone]
        stacks: dict[int, str] = {}
        until = time.monotonic() + STACK_SECONDS
        while wanted and time.monotonic() < until:
            for rank in wanted:
                record, path = sightings[rank].record, stack_path(self._live, rank)
                try:
                    written = path.read_text(encoding="utf-8")
                except OSError:
                    written = self._ask(methodcaller("stack", rank)) or ""
                beat, _, text = written.partition("\n")
                if record is not None and beat == str(record.beat):
                    stacks[rank] = text.rstrip()
            wanted = [rank for rank in wanted if rank not in stacks]
            if wanted:
                time.sleep(0.05)
                self._heartbeat.pulse()
        return stacks

    @property
    def is_reported(self) -> bool:
        """True if the report has been made, or the rank that began it did not finish."""
        if (self._live / "told").exists() or (self._exchange is not None and self._exchange.is_reported):
            return True
        try:
            return time.time() - (self._live / "claimed").stat().st_mtime > REPORT_SECONDS
        except OSError:
            return False

    def _set_reported(self) -> None:
        """Let the other ranks of this host know that the report has been made."""
        with suppress(OSError):
            (self._live / "told").touch(mode=0o600)

    def _leave(self, sightings: Sequence[Sighting]) -> None:
        """End this process; with `kills`, first the ranks of this host that cannot leave."""
        self._stopped.set()
        for sighting in sightings:
            cannot_leave = sighting.is_stopped or sighting.answers is False
            is_running = sighting.process is not None and not sighting.process.has_ended
            if self._kills and cannot_leave and is_running and sighting.member.rank != self._rank:
                with suppress(OSError):
                    os.kill(sighting.member.pid, signal.SIGKILL)
        self._end()
