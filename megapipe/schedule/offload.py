"""Offloaded activations: where a schedule moves what a stage keeps for a microbatch to host memory, and back.

The copy to the host starts as the forward ends. OFFLOAD waits for it and frees the device memory; it comes one
computation later, under which the copy runs. RELOAD starts the copy back one computation ahead of the backward, or its
RECOMPUTE, which waits for it. A backward that follows its forward too soon for this finds everything on the device:
nothing is placed.

`offload` is a lowering pass. What moves at a time is what one stage keeps; `sharding.split_stages` makes stages
smaller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from megapipe.errors import ScheduleError
from megapipe.schedule.action import COMPUTE_OPS, OFFLOAD_OPS, Action, Op
from megapipe.schedule.schedule import Row, Schedule, gc_paused
from megapipe.schedule.sharding import inserted

COPYING = 1  # computations of the rank (pairs of DualPipe count once) between a forward and its OFFLOAD
AHEAD = 1  # computations between a RELOAD and its RECOMPUTE or backward


@gc_paused()
def offload(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Add OFFLOAD and RELOAD of every microbatch of `stages` to a lowered training schedule, where memory is freed.

    Both follow a computation and the messages that it sends. A schedule whose weights change within it, or that holds
    these actions already, raises ScheduleError.
    """
    if not schedule.is_synchronous or schedule.ops & OFFLOAD_OPS:
        raise ScheduleError(f"schedule {schedule} updates weights or offloads already; use a synchronous one, once")
    rows = []
    for row in schedule.rows:
        computations = list(_computations(row))
        forwards: dict[tuple[int, int | None], int] = {}
        after: dict[int, list[Action]] = {}  # slot of the computation that they follow
        for number, (_, halves) in enumerate(computations):
            for stage, op, microbatch in halves:
                key = stage, microbatch
                if stage in stages and op is Op.F:
                    forwards[key] = number
                elif op in (Op.RECOMPUTE, Op.B, Op.I) and key in forwards:
                    freed, copied = forwards.pop(key) + COPYING, number - AHEAD - 1
                    if freed < copied:  # a slot frees memory before it takes any
                        after.setdefault(computations[freed][0], []).insert(0, Action(stage, Op.OFFLOAD, microbatch))
                        after.setdefault(computations[copied][0], []).append(Action(stage, Op.RELOAD, microbatch))
        rows.append(inserted(row, after))
    return replace(schedule, rows=tuple(rows))


def _computations(row: Row) -> Iterator[tuple[int, tuple[Action, ...]]]:
    """Yield the slot in which each computation ends, and its action, or both of an overlapped pair."""
    slots = iter(enumerate(row))
    for slot, action in slots:
        if action.op is Op.OVERLAP:
            halves = (next(slots), next(slots))
            yield slot + 2, tuple(half for _, half in halves)
        elif action.op in COMPUTE_OPS:
            yield slot, (action,)
