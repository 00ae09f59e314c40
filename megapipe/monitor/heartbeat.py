"""`Heartbeat`: this rank says what it does now. A record costs about a microsecond and no system call."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from megapipe.monitor.record import (
    CELLS,
    CELLS_AT,
    COMPUTING_CELL,
    ELAPSED_CELL,
    FILE_BYTES,
    MAGIC,
    SLOT_AT,
    SLOT_BYTES,
    Snapshot,
    Wait,
    pack_slot,
    read_snapshot,
)
from megapipe.monitor.wait_clock import READING, Cause, StepTimes, WaitClock

PATIENCE = 5  # of phases in which a rank may rightly stand still for long: the first step, saving, loading


class WaitObserver(Protocol):
    """Told of every wait and of every reading of data as they begin and end: for times that are not the host's."""

    def wait(self, cause: Cause) -> None: ...
    def go_on(self) -> None: ...
    def read(self) -> None: ...
    def has_read(self) -> None: ...


class Heartbeat:
    """The record of one rank, in this process's memory until `share` puts it where others see it.

    groups: the kinds of groups whose collectives are counted. Written by the rank's own threads; two that write at one moment cost one of
    their records, not its integrity.
    """

    def __init__(self, groups: Sequence[str] = ()) -> None:
        self._place = {name: index for index, name in enumerate(groups)}
        self._words: dict[tuple[str, str], bytes] = {}
        self._memory: bytearray | mmap.mmap = bytearray(FILE_BYTES)
        self._beat = 0
        self._step = -1
        self._patience = 1
        self._phase = self._action = b""
        self._clock = WaitClock(time.time_ns())
        self.last_step: StepTimes | None = None  # from the beginning of the step before to that of this one
        self.observer: WaitObserver | None = None
        self._map()
        self._write(0, -1, 0, b"")

    def share(self, path: Path) -> None:
        """From here on in this file, which is made anew. Raises OSError where it cannot be."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(
                descriptor, 0, FILE_BYTES
            )  # a write to a page that a full disk refuses would kill the process
            shared = mmap.mmap(descriptor, FILE_BYTES)
        finally:
            os.close(descriptor)
        shared[:] = bytes(self._memory)
        self._memory = shared
        self._map()

    def step(self, step: int) -> None:
        """Step number `step` begins."""
        is_first, self._step = self._step < 0, step
        times = self._clock.turn(self._write(0, -1, 0, b""))
        if not is_first:
            self.last_step = times
            self._cells[ELAPSED_CELL], self._cells[COMPUTING_CELL] = max(0, times.elapsed), times.computing

    def act(self, action: bytes) -> None:
        """An action of the pipeline's row begins; b"" after the last."""
        self._action = action
        self._write(0, -1, 0, b"")

    def wait_for_peer(self, wait: Wait, channel: bytes, peer: int) -> None:
        """This rank stands still until global rank `peer` has sent or taken a message of a channel."""
        self._wait((wait, peer), self._write(wait, peer, 0, channel))

    def joins(self, group: str) -> int:
        """A collective of this kind of group is launched; its number, from 1, the same on all members."""
        place = 1 + self._place[group]
        self._cells[place] += 1
        return self._cells[place]

    def wait_for_all(self, group: str, operation: str, number: int) -> None:
        """This rank stands still until a collective is done."""
        word = self._words.get((group, operation))
        if word is None:
            word = self._words[group, operation] = f"{group} {operation}".encode()
        self._wait((Wait.COLLECTIVE, group), self._write(Wait.COLLECTIVE, -1, number, word))

    def goes_on(self) -> None:
        """A wait is over."""
        self._clock.go_on(self._write(0, -1, 0, b""))
        if self.observer is not None:
            self.observer.go_on()

    @contextmanager
    def phase(self, name: str, patience: int = 1) -> Iterator[None]:
        """Inside the block the rank is in this phase. Phases nest; the longest patience holds."""
        before = self._phase, self._patience
        self._phase, self._patience = name.encode(), max(patience, self._patience)
        began = self._write(0, -1, 0, b"")
        if name == READING:
            self._clock.read(began)
            if self.observer is not None:
                self.observer.read()
        try:
            yield
        finally:
            self._phase, self._patience = before
            ended = self._write(0, -1, 0, b"")
            if name == READING:
                self._clock.has_read(ended)
                if self.observer is not None:
                    self.observer.has_read()

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Inside the block every phase has PATIENCE."""
        before, self._patience = self._patience, PATIENCE
        try:
            yield
        finally:
            self._patience = before

    def leave(self, phase: str) -> None:
        """The last word of this rank: "ended" or "failed"."""
        self._phase, self._action, self._patience = phase.encode(), b"", PATIENCE
        self._write(0, -1, 0, b"")

    def pulse(self) -> None:
        """The rank's watchdog runs."""
        self._cells[0] = time.time_ns()

    def snapshot(self) -> Snapshot:
        """What others would read."""
        found = read_snapshot(self.as_bytes())
        assert found is not None, (
            "every Heartbeat has written one record, and the other slot is whole while one is written"
        )
        return found

    def as_bytes(self) -> bytes:
        """The whole record, as `record.read_snapshot` takes it."""
        return bytes(self._memory)

    def _wait(self, cause: Cause, now: int) -> None:
        self._clock.wait(cause, now)
        if self.observer is not None:
            self.observer.wait(cause)

    def _map(self) -> None:
        self._memory[: len(MAGIC)] = MAGIC
        self._cells = memoryview(self._memory)[CELLS_AT : CELLS_AT + 8 * CELLS].cast("Q")

    def _write(self, wait: int, peer: int, number: int, what: bytes) -> int:
        """Returns when it was, in Unix nanoseconds."""
        self._beat = beat = self._beat + 1
        now = time.time_ns()
        slot = pack_slot(beat, now, self._step, self._patience, wait, peer, number, self._phase, self._action, what)
        start = SLOT_AT + SLOT_BYTES * (beat & 1)
        self._memory[start : start + len(slot)] = slot
        return now
