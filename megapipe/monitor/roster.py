"""`Roster`: the ranks of a run, made once when they have met and equal on all of them.

`Sighting`: a rank as others see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from megapipe.monitor.process import ProcessState
from megapipe.monitor.record import Record, Snapshot, Wait

LEFT = ("ended", "failed")  # phases of ranks that have left the run


@dataclass(frozen=True)
class Member:
    """One rank.

    place: in the grid, "pp 1, dp 0". stages: on this rank. space: of its process id. started: in clock ticks since
    boot.
    """

    rank: int
    host: str
    pid: int
    started: int | None
    space: str
    place: str
    stages: tuple[int, ...]

    def __str__(self) -> str:
        held = f", stage{'s' if len(self.stages) > 1 else ''} {', '.join(map(str, self.stages))}" if self.stages else ""
        return f"rank {self.rank} ({self.place}{held})" if self.place else f"rank {self.rank}"


@dataclass(frozen=True)
class Roster:
    """The ranks of a run.

    members: by global rank. groups: kind of group -> its groups over the world, each a tuple of global ranks.
    """

    members: tuple[Member, ...]
    groups: Mapping[str, tuple[tuple[int, ...], ...]]

    def partners(self, rank: int, group: str) -> tuple[int, ...]:
        """Return all ranks of `rank`'s group of this kind, () if it has none."""
        return self._partners.get(group, {}).get(rank, ())

    @cached_property
    def _partners(self) -> dict[str, dict[int, tuple[int, ...]]]:
        return {name: {rank: ranks for ranks in of_kind for rank in ranks} for name, of_kind in self.groups.items()}

    def place_of(self, group: str) -> int | None:
        """Return the index of this kind of group in a record's counts."""
        names = list(self.groups)
        return names.index(group) if group in self.groups else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "members": [asdict(member) for member in self.members],
            "groups": {k: list(map(list, v)) for k, v in self.groups.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Roster:
        members = tuple(Member(**{**member, "stages": tuple(member["stages"])}) for member in values["members"])
        return cls(members, {name: tuple(map(tuple, groups)) for name, groups in values["groups"].items()})


@dataclass(frozen=True)
class Sighting:
    """One rank as others see it: its record, how long that has not changed, whether it answers.

    snapshot: None if nothing of the rank can be read. age_seconds: since its record last changed. process: None on
    another host. answers: True if its watchdog runs, None if that is unknown.
    """

    member: Member
    snapshot: Snapshot | None
    age_seconds: float = 0.0
    process: ProcessState | None = None
    answers: bool | None = None

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

    def is_stuck(self, limit_seconds: float) -> bool:
        """Return True if its record has not changed for longer than the limit times the patience of its phase."""
        patience = 1 if self.record is None else self.record.patience
        is_known = self.record is not None or self.answers is False
        return is_known and self.age_seconds >= limit_seconds * patience


def is_unreachable(sighting: Sighting) -> bool:
    """Return True for a rank of another host that no longer answers."""
    return sighting.process is None and sighting.answers is False and not sighting.has_left
