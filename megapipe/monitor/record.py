"""The record of what a rank does now: bytes of a fixed size that one process writes and others read, without locks.

A file of FILE_BYTES holds a pulse, the number of collectives that this rank has launched in each kind of group, and two
slots. The writer fills the slots in turn; each carries a checksum, so that a slot that was read while it was written,
or left half written by a killed process, is noticed and the other one is used.
"""

from __future__ import annotations

import enum
import struct
import zlib
from typing import NamedTuple

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


class Record(NamedTuple):
    """The activity of one rank at one moment.

    beat: number of records written so far. since_ns: Unix nanoseconds of this one. step: -1 before the first. patience:
    factor on the limit for how long the record may stay unchanged. what: channel ("gradient from stage 2 to 1"), or
    group and operation ("tp all_reduce"). phase: "forward-backward", "saving", ... action: of the pipeline's row,
    "3B7", else "".
    """

    beat: int
    since_ns: int
    step: int
    patience: int
    wait: Wait
    peer: int
    number: int
    phase: str
    action: str
    what: str

    @property
    def group(self) -> str:
        """The kind of group of the awaited collective."""
        return self.what.partition(" ")[0]


class Snapshot(NamedTuple):
    """A whole file. pulse_ns: Unix nanoseconds at which the rank's watchdog last ran. counts: by index of the kind of
    group.

    elapsed_ns, computing_ns: of the last whole step, 0 before there is one; in the rest of it the rank waited or read
    data.
    """

    pulse_ns: int
    counts: tuple[int, ...]
    record: Record
    elapsed_ns: int = 0
    computing_ns: int = 0


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
