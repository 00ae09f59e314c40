"""`Heartbeat`: the record of what this rank does now. Writing one costs about a microsecond and no system call.

A file of FILE_BYTES, which one process writes and others read without locks, holds a pulse, the number of collectives
that this rank has launched in each kind of group, and two slots. The writer fills the slots in turn; each carries a
checksum, so that a slot that was read while it was written, or left half written by a killed process, is noticed and
the other one is used.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import NamedTuple, Protocol

PATIENCE = 5  # factor on the time limit in phases that may take long: the first step, saving, loading
READING = "reading data"  # a phase whose time is neither computing nor waiting
MAGIC = b"MPBEAT01"
MOST_GROUPS = 28  # kinds of groups that are counted
# Cells of 8 bytes in native order follow the magic: the pulse, the counts, elapsed and computing time of the last step.
CELLS_AT, CELLS = 8, 1 + MOST_GROUPS + 2
ELAPSED_CELL, COMPUTING_CELL = CELLS - 2, CELLS - 1
SLOT_AT, SLOT_BYTES = 256, 192
FILE_BYTES = SLOT_AT + 2 * SLOT_BYTES
_SLOT = struct.Struct("<QQqBBiQ20s20s64s")  # as Record
_CHECKSUM = struct.Struct("<I")
_CELLS = struct.Struct(f"={CELLS}Q")
assert CELLS_AT + _CELLS.size <= SLOT_AT and _SLOT.size + _CHECKSUM.size <= SLOT_BYTES


class Wait(enum.IntEnum):
    """The cause of a wait."""

    NOTHING = 0
    RECEIVE = 1  # a message from `peer`
    SEND = 2  # `peer` to receive a message
    COLLECTIVE = 3  # the `number`-th collective of a group


Cause = tuple[Wait, int | str]  # a peer's global rank, or a kind of group
READ: Cause = (Wait.NOTHING, READING)  # timed like a wait


class Record(NamedTuple):
    """The activity of one rank at one moment."""

    beat: int  # number of records written so far
    since_ns: int  # Unix nanoseconds of this one
    step: int  # -1 before the first
    patience: int  # factor on the limit for how long the record may stay unchanged
    wait: Wait
    peer: int
    number: int
    phase: str  # "forward-backward", "saving", ...
    action: str  # of the pipeline's row, "3B7", else ""
    what: str  # channel ("gradient from stage 2 to 1"), or group and operation ("tp all_reduce")

    @property
    def group(self) -> str:
        """The kind of group of the awaited collective."""
        return self.what.partition(" ")[0]


class Snapshot(NamedTuple):
    """A whole file."""

    pulse_ns: int  # Unix nanoseconds at which the rank's watchdog last ran
    counts: tuple[int, ...]  # launched collectives, by index of the kind of group
    record: Record
    elapsed_ns: int = 0  # of the last whole step, 0 before there is one
    computing_ns: int = 0  # in the rest of that step the rank waited or read data


def pack_slot(*fields: int | bytes) -> bytes:
    """Return the bytes of a slot from the fields of a Record; encoded texts are cut to the size of their fields."""
    body = _SLOT.pack(*fields)
    return _CHECKSUM.pack(zlib.crc32(body)) + body


def read_slot(data: bytes) -> Record | None:
    """Return the record of a slot, None if its checksum does not match: torn, or never written."""
    (checksum,) = _CHECKSUM.unpack_from(data)
    body = data[_CHECKSUM.size : _CHECKSUM.size + _SLOT.size]
    if zlib.crc32(body) != checksum:
        return None
    beat, since_ns, step, patience, wait, peer, number, *texts = _SLOT.unpack(body)
    phase, action, what = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
    return Record(beat, since_ns, step, patience, Wait(wait), peer, number, phase, action, what)


def read_snapshot(data: bytes) -> Snapshot | None:
    """Return the newest whole record of a file, None for a file of another kind or without one."""
    if len(data) < FILE_BYTES or not data.startswith(MAGIC):
        return None
    slots = [read_slot(data[start : start + SLOT_BYTES]) for start in (SLOT_AT, SLOT_AT + SLOT_BYTES)]
    newest = max((record for record in slots if record is not None), key=lambda record: record.beat, default=None)
    pulse_ns, *counts, elapsed_ns, computing_ns = _CELLS.unpack_from(data, CELLS_AT)
    return None if newest is None else Snapshot(pulse_ns, tuple(counts), newest, elapsed_ns, computing_ns)


class StepTimes(NamedTuple):
    """The times of one step of one rank, in nanoseconds of its clock. waits: by cause. reading: data, without waits."""

    elapsed: int
    waits: Mapping[Cause, int]
    reading: int

    @property
    def waiting(self) -> int:
        return sum(self.waits.values())

    @property
    def computing(self) -> int:
        return max(0, self.elapsed - self.waiting - self.reading)


@dataclass(frozen=True)
class RankPace:
    """One rank's step, medians over some steps, in seconds."""

    rank: int
    step: float
    computing: float
    reading: float
    waits: Mapping[str, float]  # by kind of group, "messages" for those of the pipeline
    work: float  # its computation by the plan, on any scale
    peers: tuple[int, ...] = ()  # the other ranks with exactly the same work
    link: int = -1  # the neighbour up the pipeline to which messages there and back take longest; -1 if unknown
    link_seconds: float = 0.0

    @property
    def waiting(self) -> float:
        return sum(self.waits.values())


class WaitObserver(Protocol):
    """An observer of every wait and every reading of data, for times on another clock than the host's."""

    def begin(self, cause: Cause) -> None: ...
    def end(self) -> None: ...


class Heartbeat:
    """The record of one rank, in this process's memory until `share` puts it where others can read it.

    groups: the kinds of groups whose collectives are counted. Written by the rank's own threads; if two write at the
    same moment, one of the two records is lost, but the file stays valid.
    """

    def __init__(self, groups: Sequence[str] = ()) -> None:
        self._place = {name: index for index, name in enumerate(groups)}
        self._words: dict[tuple[str, str], bytes] = {}
        self._memory: bytearray | mmap.mmap = bytearray(FILE_BYTES)
        self._beat, self._step, self._patience = 0, -1, 1
        self._phase = self._action = b""
        self._waits: dict[Cause, int] = {}  # nanoseconds of this step by cause; waits do not nest
        self._cause: Cause | None = None  # of the wait that began at _wait_began
        self._step_began = self._wait_began = time.time_ns()
        self.last_step: StepTimes | None = None  # of the step before the current one
        self.observer: WaitObserver | None = None
        self._ignored: tuple[int, ...] = ()  # threads
        self._map()
        self._write()

    def share(self, path: Path) -> None:
        """Write to this file from here on, which is created or emptied. Raises OSError."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # without this, writing to a page that a full disk has no room for would kill the process
            os.posix_fallocate(descriptor, 0, FILE_BYTES)
            shared = mmap.mmap(descriptor, FILE_BYTES)
        finally:
            os.close(descriptor)
        shared[:] = bytes(self._memory)
        self._memory = shared
        self._map()

    def step(self, step: int) -> None:
        """Note that step number `step` begins."""
        is_first, self._step = self._step < 0, step
        now, reading = self._write(), self._waits.pop(READ, 0)
        times = StepTimes(now - self._step_began, self._waits, reading)
        self._step_began, self._waits = now, {}
        if not is_first:
            self.last_step = times
            self._cells[ELAPSED_CELL], self._cells[COMPUTING_CELL] = max(0, times.elapsed), times.computing

    def act(self, action: bytes) -> None:
        """Note that an action of the pipeline's row begins; b"" after the last one."""
        self._action = action
        self._write()

    def ignore_thread(self) -> None:
        """Leave out the waits of the calling thread, during which the rank computes."""
        self._ignored += (get_ident(),)

    def wait_for_peer(self, wait: Wait, channel: bytes, peer: int) -> None:
        """Begin to wait until global rank `peer` has sent or received a message of a channel."""
        if self._ignored and get_ident() in self._ignored:
            return
        self._begin((wait, peer), self._write(wait, peer, 0, channel))

    def count_launch(self, group: str) -> int:
        """Count the launch of a collective of a kind of group; returns its number, from 1, equal on all members."""
        place = 1 + self._place[group]
        self._cells[place] += 1
        return self._cells[place]

    def wait_for_all(self, group: str, operation: str, number: int) -> None:
        """Begin to wait for the end of a collective."""
        if self._ignored and get_ident() in self._ignored:
            return
        word = self._words.get((group, operation))
        if word is None:
            word = self._words[group, operation] = f"{group} {operation}".encode()
        self._begin((Wait.COLLECTIVE, group), self._write(Wait.COLLECTIVE, -1, number, word))

    def end_wait(self) -> None:
        """End a wait, if there is one."""
        if self._ignored and get_ident() in self._ignored:
            return
        now = self._write()
        cause, self._cause = self._cause, None
        if cause is not None:
            self._waits[cause] = self._waits.get(cause, 0) + now - self._wait_began
        if self.observer is not None:
            self.observer.end()

    @contextmanager
    def phase(self, name: str, patience: int = 1) -> Iterator[None]:
        """Put the rank in a phase inside the block. Phases nest; the largest patience holds."""
        before = self._phase, self._patience
        self._phase, self._patience = name.encode(), max(patience, self._patience)
        began = self._write()
        if name == READING:
            self._begin(READ, began)
        try:
            yield
        finally:
            self._phase, self._patience = before
            if name == READING:
                self.end_wait()
            else:
                self._write()

    def leave(self, phase: str) -> None:
        """Write the last record of this rank. phase: "ended" or "failed"."""
        self._phase, self._action, self._patience = phase.encode(), b"", PATIENCE
        self._write()

    def pulse(self) -> None:
        """Note that the rank's watchdog is alive."""
        self._cells[0] = time.time_ns()

    def snapshot(self) -> Snapshot:
        """Return what other processes read."""
        found = read_snapshot(self.as_bytes())
        assert found is not None  # one record is always written, and at most one of the two slots is being written
        return found

    def as_bytes(self) -> bytes:
        """Return the whole file, for `read_snapshot`."""
        return bytes(self._memory)

    def _begin(self, cause: Cause, now: int) -> None:
        self._cause, self._wait_began = cause, now
        if self.observer is not None:
            self.observer.begin(cause)

    def _map(self) -> None:
        self._memory[: len(MAGIC)] = MAGIC
        self._cells = memoryview(self._memory)[CELLS_AT : CELLS_AT + 8 * CELLS].cast("Q")

    def _write(self, wait: int = Wait.NOTHING, peer: int = -1, number: int = 0, what: bytes = b"") -> int:
        """Write a record and return its time in Unix nanoseconds."""
        self._beat = beat = self._beat + 1
        now = time.time_ns()
        slot = pack_slot(beat, now, self._step, self._patience, wait, peer, number, self._phase, self._action, what)
        start = SLOT_AT + SLOT_BYTES * (beat & 1)
        self._memory[start : start + len(slot)] = slot
        return now
