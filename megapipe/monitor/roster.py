"""`Roster`: the ranks of a run, equal on all of them; `Sighting`: a rank as others see it; and the files of both.

/dev/shm/megapipe-USER-TOKEN/   live: rank_00000 and so on, rank_00000.stack of a stuck rank, roster.json
RUN/heartbeats/roster.json      the ranks, their hosts and processes, the folder of the live records
RUN/heartbeats/host_NAME.bin    a copy of the records of one host, a second or so old while the run lives
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megapipe.monitor.heartbeat import FILE_BYTES, Record, Snapshot, Wait, read_snapshot
from megapipe.monitor.process import ProcessState, host, process_space, process_state

NAME, ROSTER = "heartbeats", "roster.json"
SHARED_MEMORY = Path("/dev/shm")
SILENCE_SECONDS = 2.0  # without a pulse, several intervals of a watchdog: the rank does not answer
LEFT = ("ended", "failed")  # phases of ranks that have left the run


@dataclass(frozen=True)
class Member:
    """One rank."""

    rank: int
    host: str
    pid: int
    started: int | None  # in clock ticks since boot
    space: str  # of its process id
    place: str  # in the grid, "pp 1, dp 0"
    stages: tuple[int, ...]

    def __str__(self) -> str:
        noun = "stages" if len(self.stages) > 1 else "stage"
        held = f", {noun} {', '.join(map(str, self.stages))}" if self.stages else ""
        return f"rank {self.rank} ({self.place}{held})" if self.place else f"rank {self.rank}"


@dataclass(frozen=True)
class Roster:
    """The ranks of a run."""

    members: tuple[Member, ...]  # by global rank
    groups: Mapping[str, tuple[tuple[int, ...], ...]]  # kind -> its groups over the world, each of global ranks

    @cached_property
    def partners(self) -> dict[str, dict[int, tuple[int, ...]]]:
        """The members of each rank's group, by kind of group and rank."""
        return {name: {rank: ranks for ranks in of_kind for rank in ranks} for name, of_kind in self.groups.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Roster:
        """Restore what `asdict` returned, from JSON."""
        members = tuple(Member(**{**member, "stages": tuple(member["stages"])}) for member in values["members"])
        return cls(members, {name: tuple(map(tuple, groups)) for name, groups in values["groups"].items()})


@dataclass(frozen=True)
class Sighting:
    """One rank as others see it: its record, how long that has not changed, whether it answers."""

    member: Member
    snapshot: Snapshot | None  # None if nothing of the rank can be read
    age_seconds: float = 0.0  # since its record last changed
    process: ProcessState | None = None  # None on another host
    answers: bool | None = None  # True if its watchdog runs, None if that is unknown

    @property
    def record(self) -> Record | None:
        return None if self.snapshot is None else self.snapshot.record

    @property
    def waits(self) -> bool:
        return self.record is not None and self.record.wait is not Wait.NOTHING

    @property
    def has_left(self) -> bool:
        """True if it has written that it leaves."""
        return self.record is not None and self.record.phase in LEFT

    @property
    def is_gone(self) -> bool:
        """True if its process has died without an error message."""
        return self.process is not None and self.process.has_ended and not self.has_left

    @property
    def is_stopped(self) -> bool:
        return self.process is not None and self.process.is_stopped

    @property
    def is_unreachable(self) -> bool:
        """True for a rank of another host that no longer answers."""
        return self.process is None and self.answers is False and not self.has_left

    def is_stuck(self, limit_seconds: float) -> bool:
        """Return True if its record has not changed for longer than the limit times the patience of its phase."""
        patience = 1 if self.record is None else self.record.patience
        is_known = self.record is not None or self.answers is False
        return is_known and self.age_seconds >= limit_seconds * patience


def base_folder() -> Path:
    """Return the parent of live folders."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def live_path(token: str) -> Path:
    """Return the folder of a run's live records on this host. token: the same on all ranks, unique to the run."""
    return base_folder() / f"megapipe-{os.getuid()}-{token}"


def live_folder(token: str) -> Path:
    """Create and return `live_path`, private to this user. Raises OSError."""
    folder = live_path(token)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():  # not where a link of another user points
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def sweep() -> None:
    """Remove the live folders of this user's crashed runs on this host."""
    for folder in base_folder().glob(f"megapipe-{os.getuid()}-*"):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            roster = Roster.from_dict(json.loads((folder / ROSTER).read_text(encoding="utf-8")))
            here = [member for member in roster.members if member.host == host()]
            if not any(m.space != process_space() or not process_state(m.pid, m.started).has_ended for m in here):
                shutil.rmtree(folder, ignore_errors=True)


def record_path(live: Path, rank: int) -> Path:
    return live / f"rank_{rank:05d}"


def stack_path(live: Path, rank: int) -> Path:
    """Return the file to which a stuck rank writes the stack of its main thread."""
    return live / f"rank_{rank:05d}.stack"


def sight(member: Member, live: Path) -> Sighting:
    """Look at a rank of this host."""
    # again if the writer overtook the reader, as then both slots can be torn
    snapshots = (read_snapshot(read_bytes(record_path(live, member.rank))) for _ in range(3))
    snapshot = next((found for found in snapshots if found is not None), None)
    is_here = member.space == process_space()
    process = process_state(member.pid, member.started) if is_here else None
    if snapshot is None:
        return Sighting(member, None, process=process)
    now_ns = time.time_ns()
    answers = now_ns - snapshot.pulse_ns < SILENCE_SECONDS * 1e9
    return Sighting(member, snapshot, (now_ns - snapshot.record.since_ns) / 1e9, process, answers)


def write_roster(folder: Path, roster: Roster, live: Path, run: Path | None = None) -> None:
    """Write roster.json to a folder, and remove the copies of an earlier start. Raises OSError.

    run: the run's folder, None if it has none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("host_*.bin"):
        path.unlink(missing_ok=True)
    named = {"live": str(live), "run": None if run is None else str(run.resolve())}
    replace_file(folder / ROSTER, json.dumps(named | asdict(roster)).encode())


def speaks(members: Sequence[Member], rank: int, live: Path) -> bool:
    """Return True if a rank publishes for its host: no lower one of the host is left and answers.

    members: those of the host. A rank whose process is stopped, or that native code keeps from answering, is replaced.
    """
    others = (sight(member, live) for member in members if member.rank < rank)
    return not any(other.answers and not other.has_left and not other.is_gone for other in others)


def records_of(members: Sequence[Member], live: Path) -> bytes:
    """Return the live records of ranks of this host, of FILE_BYTES each, zeros for a rank that has none."""
    records = (read_bytes(record_path(live, member.rank)) for member in members)
    return b"".join(record[:FILE_BYTES].ljust(FILE_BYTES, b"\0") for record in records)


def write_copies(folder: Path, roster: Roster, live: Path) -> None:
    """Copy the live records of this host. Raises OSError."""
    space = process_space()
    records = [(m.rank, read_bytes(record_path(live, m.rank))) for m in roster.members if m.space == space]
    data = b"".join(rank.to_bytes(8, "little") + data for rank, data in records if len(data) == FILE_BYTES)
    replace_file(folder / f"host_{host()}.bin", data)


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file, none if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def replace_file(path: Path, data: bytes) -> None:
    """Write a file under a temporary name and rename it, so that a reader sees all of it or nothing. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)
