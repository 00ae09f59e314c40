"""Which version of its weights each microbatch of an asynchronous schedule uses, and in which of a rank's buffers the versions lie.

Version t of a stage is there after its t-th update; version 0 is what the schedule starts with. The backward of a microbatch uses the
version of its forward. A schedule drains, so all ranks end with the same number of updates and nothing but the newest version is needed
afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from megapipe.errors import ScheduleError
from megapipe.schedule.action import Op
from megapipe.schedule.lifetimes import Held, lifetimes
from megapipe.schedule.schedule import Schedule

VersionRule = Callable[
    [int, int, int], int
]  # (microbatch, group size, newest version at its forward) -> version it uses


def stashed(microbatch: int, group_size: int, newest: int) -> int:
    """PipeDream's weight stashing: the newest version that its rank has; in 1F1B max(0, microbatch - (p - 1 - rank))."""
    return newest


def one_group_stale(microbatch: int, group_size: int, newest: int) -> int:
    """PipeDream-2BW: the same version on every rank, that of the group before."""
    return max(0, microbatch // group_size - 1)


@dataclass(frozen=True)
class WeightVersions:
    """Of one rank's stage, over one run of its row.

    version_of: microbatch -> version of its forward and backward. buffer_of: version -> buffer; version 0 lies in buffer 0.
    group_sizes: microbatches whose gradients each update takes.
    """

    version_of: tuple[int, ...]
    buffer_of: tuple[int, ...]
    group_sizes: tuple[int, ...]

    @property
    def num_buffers(self) -> int:
        """The most versions that are needed at once: those of microbatches under way or to come, and the newest."""
        return 1 + max(self.buffer_of)

    @property
    def num_updates(self) -> int:
        return len(self.group_sizes)


def weight_versions(schedule: Schedule, pp_rank: int, rule: VersionRule, group_size: int) -> WeightVersions:
    """Walk over the row of a rank that holds one stage. An update writes into a buffer whose version no microbatch needs any more.

    Raises ScheduleError if a forward comes before the version it uses.
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
    """By microbatch."""
    versions, newest = [0] * schedule.num_microbatches, 0
    for stage, op, microbatch in schedule.rows[pp_rank]:
        newest += op is Op.UPDATE
        if op is Op.F:
            version = versions[microbatch] = rule(microbatch, group_size, newest)  # type: ignore[index,arg-type]
            if version > newest:
                raise ScheduleError(
                    f"schedule {schedule}: {stage}F{microbatch} on rank {pp_rank} uses weight version {version}, the newest is {newest}"
                )
    return tuple(versions)
