"""Activations that are offloaded, in bytes and seconds: which groups of layers, what stays away when, and what a copy hides behind.

Storages are counted one by one, since small ones stay on the device; `tests/model/test_offloaded_bytes.py` compares with those that travel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megapipe.config.config import Config
from megapipe.layers.table import Kept, total_bytes
from megapipe.plan.activations import group_sizes
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Op
from megapipe.schedule.moves import Moment, Moves, StageGroups, Unit, host_pieces, plan_moves
from megapipe.schedule.partition import StageLayers

USUAL_UNITS_ON_DEVICE = (
    2  # at the peak of a step, of those that are moved: made and being copied, or used and coming back
)


def stage_groups(plan: RunPlan, stage: int) -> StageGroups:
    """How many groups a stage has, and how many of them --cpu-offloading-num-layers moves."""
    return groups_of(plan.config, plan.partition.stages[stage])


def groups_of(config: Config, layers: StageLayers) -> StageGroups:
    """The same, of a stage with these layers."""
    count, sizes = config.offload.cpu_offloading_num_layers, group_sizes(config.recompute, layers.num_layers)
    num_moved = sum(sum(sizes[:group]) < count for group in range(len(sizes)))
    return StageGroups(len(sizes), num_moved, layers.has_head)


def row_moves(plan: RunPlan, num_microbatches: int, pp_rank: int) -> Moves:
    """What leaves and comes back when, in a step of this many microbatches."""
    stages = {stage: stage_groups(plan, stage) for stage in plan.placement.stages_of(pp_rank)}
    return plan_moves(plan.schedule(num_microbatches).rows[pp_rank], stages)


@dataclass(frozen=True)
class GroupBytes:
    """Of one group of a stage: kept for the backward of a microbatch; of that moved, if its unit moves."""

    kept: int
    moved: int

    @property
    def host(self) -> int:
        """Of the host's buffer."""
        return sum(host_pieces(self.moved))


def stage_group_bytes(
    groups: Sequence[Sequence[Kept]], num_moved: int, min_elements: int, has_embedding: bool
) -> tuple[GroupBytes, ...]:
    """Return what each group of a stage keeps and moves. has_embedding: else the first group's input, its first tensor, is the stage's,
    which is held on the device for its gradient."""
    found = []
    for group, kept in enumerate(groups):
        movable = kept if has_embedding or group else kept[1:]
        moved = [tensor for tensor in movable if tensor.elements >= min_elements] if group < num_moved else []
        found.append(GroupBytes(total_bytes(kept), total_bytes(moved)))
    return tuple(found)


@dataclass(frozen=True)
class Away:
    """A row's offloaded bytes. at: moment -> bytes in the host's memory alone while it lasts; host_bytes: of all host buffers together."""

    at: Mapping[Moment, int]
    host_bytes: int


def away_in_row(moves: Moves, groups: Mapping[int, Sequence[GroupBytes]]) -> Away:
    """groups: of each stage of the rank."""
    at: dict[Moment, int] = {}
    away = 0
    in_use: Counter[int] = Counter()
    most: Counter[int] = Counter()

    def of(unit: Unit) -> GroupBytes:
        return groups[unit.stage][unit.group]

    for index, moment in enumerate(moves.moments):
        for unit in moves.released.get(index, ()):
            away += of(unit).moved
        for unit in moves.loaded.get(index, ()):
            away -= of(unit).moved
            in_use[of(unit).host] -= 1
        at[moment] = away
        unit = Unit(moment.stage, moment.microbatch, moment.group)
        if unit in moves.moved and moment.op is Op.F:
            size = of(unit).host
            in_use[size] += 1
            most[size] = max(most[size], in_use[size])
    return Away(at, sum(count * size for size, count in most.items()))
