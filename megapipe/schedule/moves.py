"""When the activations of a rank's layers leave the device and come back: planned from its row, before anything runs.

A unit is what one group of layers (one layer; with full recompute those of one checkpoint) keeps for the backward of one microbatch. A
moment is when a computation of one group begins: forwards run a stage's groups in their order, backwards in the opposite one, after the
head's. A unit is copied to the host after its own forward and its device memory is free a whole moment later; its way back begins one
moment before its own backward. A unit whose backward comes too soon for that to free anything stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megapipe.schedule.action import COMPUTE_OPS, Action, Op

AHEAD = 1  # moments before its use that a unit comes back
COPYING = 2  # moments after the one that makes it that a unit's device memory is free


class Unit(NamedTuple):
    """What one group of a stage's layers keeps for one microbatch."""

    stage: int
    microbatch: int
    group: int


class Moment(NamedTuple):
    """A computation of one group begins. The head's is that of the group after the last one; a W is one moment, of group 0."""

    stage: int
    op: Op
    microbatch: int
    group: int


@dataclass(frozen=True)
class StageGroups:
    """How a stage's layers run: num_groups, of which the first num_moved are offloaded."""

    num_groups: int
    num_moved: int
    has_head: bool


@dataclass(frozen=True)
class Moves:
    """Of one row. moments: in their order; moved: units that leave the device; released, loaded: at a moment the units whose device memory
    is given back, and those whose way back begins."""

    moments: tuple[Moment, ...]
    moved: frozenset[Unit]
    released: Mapping[int, tuple[Unit, ...]]
    loaded: Mapping[int, tuple[Unit, ...]]


def host_pieces(num_bytes: int) -> tuple[int, ...]:
    """Sizes of the allocations that a unit's host buffer is made of: powers of two, for pinned memory is handed out in no others. At most
    one 32nd more than is needed."""
    unit = max(1, (1 << max(num_bytes.bit_length() - 1, 0)) // 32)
    rest = -(-num_bytes // unit) * unit
    return tuple(1 << bit for bit in range(rest.bit_length() - 1, -1, -1) if rest >> bit & 1)


def plan_moves(row: Iterable[Action], stages: Mapping[int, StageGroups]) -> Moves:
    """row: of one rank, messages and reductions may be in it. stages: those of the rank."""
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
    """In the order in which they come; none for actions that compute nothing, and for stages without layers."""
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
