"""The plan of activation offloading: when each layer's activations leave the device and return, derived from a rank's
row.

A unit is what one group of layers (one layer; with full recompute the layers of one checkpoint) keeps for the backward
of one microbatch. A moment is the start of the computation of one group: forwards run a stage's groups in order,
backwards run the head and then the groups in reverse. A unit is copied to the host after its forward, and its device
memory is free one whole moment later; the copy back starts one moment before its backward. A unit whose backward
follows too soon to free anything stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megapipe.schedule.action import COMPUTE_OPS, Action, Op

AHEAD = 1  # moments before its use that the copy back of a unit starts
COPYING = 2  # moments from the forward of a unit until its device memory is free


class Unit(NamedTuple):
    """The activations that one group of a stage's layers keeps for one microbatch."""

    stage: int
    microbatch: int
    group: int


class Moment(NamedTuple):
    """The start of the computation of one group.

    The head is the group after the last one; a W is one moment, of group 0.
    """

    stage: int
    op: Op
    microbatch: int
    group: int


@dataclass(frozen=True)
class StageGroups:
    """The groups of a stage's layers: num_groups, of which the first num_moved are offloaded."""

    num_groups: int
    num_moved: int
    has_head: bool


@dataclass(frozen=True)
class Moves:
    """The plan of one row.

    moments: in order. moved: units that leave the device. released, loaded: index of a moment -> units whose device
    memory is freed, and units whose copy back starts.
    """

    moments: tuple[Moment, ...]
    moved: frozenset[Unit]
    released: Mapping[int, tuple[Unit, ...]]
    loaded: Mapping[int, tuple[Unit, ...]]


def host_pieces(num_bytes: int) -> tuple[int, ...]:
    """Return the sizes of the allocations that make up a unit's host buffer.

    Pinned memory is allocated in powers of two; the sum is at most one 32nd more than num_bytes.
    """
    unit = max(1, (1 << max(num_bytes.bit_length() - 1, 0)) // 32)
    rest = -(-num_bytes // unit) * unit
    return tuple(1 << bit for bit in range(rest.bit_length() - 1, -1, -1) if rest >> bit & 1)


def plan_moves(row: Iterable[Action], stages: Mapping[int, StageGroups]) -> Moves:
    """Plan the offloading of one rank's row, lowered or not. stages: those of the rank."""
    moments = tuple(moment for action in row for moment in moments_of(action, stages))
    made: dict[Unit, int] = {}
    moved: list[Unit] = []
    released: dict[int, list[Unit]] = {}
    loaded: dict[int, list[Unit]] = {}
    for index, (stage, op, microbatch, group) in enumerate(moments):
        if op is Op.W or group >= stages[stage].num_moved:
            continue
        unit = Unit(stage, microbatch, group)
        if op is Op.F:
            made[unit] = index
        elif index - AHEAD > made[unit] + COPYING:
            moved.append(unit)
            released.setdefault(made[unit] + COPYING, []).append(unit)
            loaded.setdefault(index - AHEAD, []).append(unit)
    return Moves(moments, frozenset(moved), _frozen(released), _frozen(loaded))


def moments_of(action: Action, stages: Mapping[int, StageGroups]) -> Iterator[Moment]:
    """Yield the moments of an action in order; none if it computes nothing or its stage has no layers."""
    stage, op, microbatch = action
    if op not in COMPUTE_OPS:
        return
    assert microbatch is not None
    groups, order = stages[stage], range(1)
    if op is not Op.W:
        order = range(groups.num_groups)
        if op is not Op.F:
            order = range(groups.num_groups - 1 + groups.has_head, -1, -1)
    for group in order:
        yield Moment(stage, op, microbatch, group)


def _frozen(units: Mapping[int, list[Unit]]) -> dict[int, tuple[Unit, ...]]:
    return {index: tuple(each) for index, each in units.items()}
