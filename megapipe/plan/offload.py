"""Offloaded activations (--cpu-offloading-num-layers) in bytes: which groups of layers move, and what is on the
device and the host when.

Tensors are counted one by one, since small ones stay on the device; `tests/model/test_offloaded_bytes.py` compares
with those that move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megapipe.config.config import Config
from megapipe.layers.model import ModelSpec
from megapipe.layers.table import Kept, RankShape, total_bytes
from megapipe.plan.activations import deferred_bytes, group_sizes, layers_of
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.temporaries import backward_peak
from megapipe.schedule.action import Action, Op
from megapipe.schedule.lifetimes import Moment, Moves, StageGroups, Unit, host_pieces, moments_of, plan_moves
from megapipe.schedule.partition import StageLayers

# offloaded groups on the device at the peak of a step: one in use, one being copied
USUAL_UNITS_ON_DEVICE = 2


def stage_groups(plan: RunPlan, stage: int) -> StageGroups:
    """Return the number of groups of a stage of the plan, and how many of them --cpu-offloading-num-layers moves."""
    return groups_of(plan.config, plan.partition.stages[stage])


def groups_of(config: Config, layers: StageLayers) -> StageGroups:
    """Return the same for a stage with these layers."""
    count, sizes = config.offload.cpu_offloading_num_layers, group_sizes(config.recompute, layers.num_layers)
    num_moved = sum(sum(sizes[:group]) < count for group in range(len(sizes)))
    return StageGroups(len(sizes), num_moved, layers.has_head)


def row_moves(plan: RunPlan, num_microbatches: int, pp_rank: int) -> Moves:
    """Return which groups leave the device and come back when, in a step of this many microbatches."""
    stages = {stage: stage_groups(plan, stage) for stage in plan.placement.stages_of(pp_rank)}
    return plan_moves(plan.schedule(num_microbatches).rows[pp_rank], stages)


@dataclass(frozen=True)
class GroupBytes:
    """Bytes that one group of a stage keeps for the backward of a microbatch, and how many of them move if the group
    is offloaded.
    """

    kept: int
    moved: int

    @property
    def host(self) -> int:
        """Bytes of the host's buffer for the group."""
        return sum(host_pieces(self.moved))


def stage_group_bytes(
    groups: Sequence[Sequence[Kept]], num_moved: int, min_elements: int, has_embedding: bool
) -> tuple[GroupBytes, ...]:
    """Return what each group of a stage keeps and moves.

    has_embedding: else the first group's input, its first tensor, is the stage's, which is held on the device for its
    gradient.
    """
    found = []
    for group, kept in enumerate(groups):
        movable = kept if has_embedding or group else kept[1:]
        moved = [tensor for tensor in movable if tensor.elements >= min_elements] if group < num_moved else []
        found.append(GroupBytes(total_bytes(kept), total_bytes(moved)))
    return tuple(found)


@dataclass(frozen=True)
class HostBytes:
    """Offloaded bytes of a row.

    at: the bytes that are on the host only, for each moment. buffer_bytes: of all host buffers together.
    """

    at: Mapping[Moment, int]
    buffer_bytes: int


def host_bytes_of_row(moves: Moves, groups: Mapping[int, Sequence[GroupBytes]]) -> HostBytes:
    """Return the offloaded bytes of a row. groups: those of each stage of the rank."""
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
    return HostBytes(at, sum(count * size for size, count in most.items()))


@dataclass(frozen=True)
class BackwardBytes:
    """Bytes that a stage's backward makes and frees again: in the head, in the last group (top) and in the groups
    before it (lower).

    waits: bytes that each group leaves for W; head_waits: those of the head. For a forward only `head` counts: the
    loss in fp32.
    """

    head: int
    top: int = 0
    lower: int = 0
    waits: tuple[int, ...] = ()
    head_waits: int = 0


@dataclass
class MemoryOverTime:
    """Device memory of a row with offloaded activations, moment by moment.

    groups: those of each stage, in order. kept: bytes of each stage for one microbatch without offloading, head
    included. away: bytes on the host only, at each moment. inside: what each stage's B and I make and free.
    """

    stages: Mapping[int, StageGroups]
    groups: Mapping[int, tuple[GroupBytes, ...]]
    kept: Mapping[int, int]
    away: Mapping[Moment, int]
    inside: Mapping[tuple[int, Op], BackwardBytes]
    now: int = 0  # bytes on the host only at the last moment

    def levels(self, action: Action, inside: int) -> list[tuple[int, int]]:
        """Return two numbers for each moment of an action: the bytes that the device holds less than without
        offloading, with all of this action's stage counted as kept; and the bytes made and freed again. inside: these
        of an action that is not a backward.
        """
        found = []
        for moment in moments_of(action, self.stages):
            self.now = self.away[moment]
            less, made = self._at(moment)
            found.append((self.now + less, inside if made is None else made))
        return found or [(self.now, inside)]

    def _at(self, moment: Moment) -> tuple[int, int | None]:
        stage, op, _, group = moment
        if op is Op.W:
            return 0, None
        groups = self.groups[stage]
        above = sum(each.kept for each in groups[group + 1 :])
        if op is Op.F:
            is_last = group + 1 == len(groups)
            return (0, self.inside[stage, op].head) if is_last else (above, None)
        inside, last = self.inside[stage, op], len(groups) - 1
        if group > last:
            return 0, inside.head
        if group == last:
            return 0, inside.top
        of_head = self.kept[stage] - sum(each.kept for each in groups)
        waiting = sum(inside.waits[group + 1 :]) + inside.head_waits
        return above + of_head - waiting, inside.lower


def backward_bytes(model: ModelSpec, shape: RankShape, stage: StageLayers, sizes: tuple[int, ...]) -> BackwardBytes:
    """Return what a stage's B makes and frees, or its I if the shape splits the backward.

    sizes: layers in each of its groups.
    """
    first, last = stage.first_layer, stage.last_layer_exclusive
    kinds = layers_of(model, stage)
    top = StageLayers(last - (sizes[-1] if sizes else 0), last, False, stage.has_head)
    lower = StageLayers(first, first + (sizes[0] if sizes else 0), False, False)
    in_head, in_top = backward_peak(model, shape, top, kinds)
    in_lower = max(backward_peak(model, shape, lower, kinds)) + shape.hidden_bytes(model.embedding.hidden)
    waits: tuple[int, ...] = ()
    head_waits = 0
    if shape.splits_backward:
        starts = accumulate(sizes, initial=first)
        waits = tuple(
            deferred_bytes(model, shape, StageLayers(start, start + size, False, False))
            for start, size in zip(starts, sizes, strict=False)
        )
        if stage.has_head:
            head_waits = model.head.table(shape).deferred_bytes
    return BackwardBytes(in_head, in_top, in_lower, waits, head_waits)
