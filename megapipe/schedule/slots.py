"""Slots: places for the microbatches that a stage has in flight, where each needs buffers of its own (CUDA graphs)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from heapq import heappop, heappush

from megapipe.schedule.action import Action, Op

Slots = dict[tuple[int, int], int]  # (stage, microbatch) -> slot


def assign_slots(row: Iterable[Action]) -> Slots:
    """The slot of every (stage, microbatch) of one rank's training row: its own from F to B, or to W where the backward is split.

    The lowest free one is taken, so that a stage has no more slots than microbatches are in flight at the most, and a row with fewer
    microbatches uses no others.
    """
    free: defaultdict[int, list[int]] = defaultdict(list)
    opened: Counter[int] = Counter()
    slots: Slots = {}
    for stage, op, microbatch in row:
        if microbatch is None:
            continue
        if op is Op.F:
            if not free[stage]:
                heappush(free[stage], opened[stage])
                opened[stage] += 1
            slots[stage, microbatch] = heappop(free[stage])
        elif op in (Op.B, Op.W):
            heappush(free[stage], slots[stage, microbatch])
    return slots


def num_slots(slots: Slots) -> Counter[int]:
    """How many each stage has."""
    counts: Counter[int] = Counter()
    for (stage, _), slot in slots.items():
        counts[stage] = max(counts[stage], slot + 1)
    return counts
