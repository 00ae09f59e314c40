"""`Roster`: who the ranks of a run are. Made once, when they have met; the same on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Member:
    """One rank. place: in the grid, "pp 1, dp 0". stages: those it holds. space: within which its pid means something. started: ticks."""

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
    """members: by global rank. groups: kind of group -> its groups over the world, each the global ranks that meet in it."""

    members: tuple[Member, ...]
    groups: Mapping[str, tuple[tuple[int, ...], ...]]

    def partners(self, rank: int, group: str) -> tuple[int, ...]:
        """All ranks of `rank`'s group of this kind; empty where it has none."""
        return self._partners.get(group, {}).get(rank, ())

    @cached_property
    def _partners(self) -> dict[str, dict[int, tuple[int, ...]]]:
        return {name: {rank: ranks for ranks in of_kind for rank in ranks} for name, of_kind in self.groups.items()}

    def place_of(self, group: str) -> int | None:
        """Where the collectives of this kind of group are counted."""
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
