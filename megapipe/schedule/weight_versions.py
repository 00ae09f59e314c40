"""The weight version that each microbatch of an asynchronous schedule uses, and the buffer of each version.

Version t of a stage is the result of its t-th update; version 0 is the one that the schedule starts with. The backward
of a microbatch uses the version of its forward. A schedule drains, so all ranks end with the same number of updates and
need only the newest version afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from megapipe.errors import ScheduleError
from megapipe.schedule.action import Op
from megapipe.schedule.lifetimes import Held, lifetimes
from megapipe.schedule.schedule import Schedule

# (microbatch, group size, newest version at its forward) -> version it uses
VersionRule = Callable[[int, int, int], int]


def stashed(microbatch: int, group_size: int, newest: int) -> int:
    """Return the newest version of the rank (PipeDream's weight stashing); in 1F1B max(0, microbatch - (p - 1 -
    rank)).
    """
    return newest


def one_group_stale(microbatch: int, group_size: int, newest: int) -> int:
    """Return the version before the previous group's update, the same on every rank (PipeDream-2BW)."""
    return max(0, microbatch // group_size - 1)


@dataclass(frozen=True)
class WeightVersions:
    """The weight versions of one rank's stage during a run of its row.

    version_of: microbatch -> version of its forward and backward.
    buffer_of: version -> buffer; version 0 is in buffer 0.
    group_sizes: the number of microbatches whose gradients each update takes.
    """

    version_of: tuple[int, ...]
    buffer_of: tuple[int, ...]
    group_sizes: tuple[int, ...]

    @property
    def num_buffers(self) -> int:
        """The most versions needed at once: those of microbatches in flight or still to come, and the newest."""
        return 1 + max(self.buffer_of)

    @property
    def num_updates(self) -> int:
        return len(self.group_sizes)


def weight_versions(schedule: Schedule, pp_rank: int, rule: VersionRule, group_size: int) -> WeightVersions:
    """Assign versions and buffers on a rank that holds one stage.

    An update writes into a buffer whose version is no longer needed.

    Raises ScheduleError if a forward runs before the version that it uses.
    """
    version_of = _versions_used(schedule, pp_rank, rule, group_size)
    users = Counter(version_of)  # version -> microbatches that still need it, those to come included
    buffer_of, group_sizes = [0], []
    pending = 0  # gradients since the last update
    for (stage, op, microbatch), changes in lifetimes(schedule.rows[pp_rank]):
        if (Held.MICROBATCH, stage) in changes.frees:
            users[version_of[microbatch]] -= 1  # type: ignore[index]
            pending += 1
        elif op is Op.UPDATE:
            taken = {buffer for version, buffer in enumerate(buffer_of) if users[version]}
            buffer_of.append(next(buffer for buffer in range(len(taken) + 1) if buffer not in taken))
            group_sizes.append(pending)
            pending = 0
    return WeightVersions(version_of, tuple(buffer_of), tuple(group_sizes))


def _versions_used(schedule: Schedule, pp_rank: int, rule: VersionRule, group_size: int) -> tuple[int, ...]:
    """Return the version of each microbatch."""
    versions, newest = [0] * schedule.num_microbatches, 0
    for stage, op, microbatch in schedule.rows[pp_rank]:
        newest += op is Op.UPDATE
        if op is Op.F:
            version = versions[microbatch] = rule(microbatch, group_size, newest)  # type: ignore[index,arg-type]
            if version > newest:
                raise ScheduleError(
                    f"schedule {schedule}: {stage}F{microbatch} on rank {pp_rank} uses weight version {version}, the "
                    f"newest is {newest}"
                )
    return tuple(versions)
