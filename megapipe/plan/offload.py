"""Offloaded activations (--cpu-offloading-num-layers) in bytes: which groups of layers move, and what is on the
device and the host when.

Tensors are counted one by one, since small ones stay on the device; `tests/model/test_offloaded_bytes.py` compares
with those that move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from megapipe.layers.table import RankShape, total_bytes
from megapipe.plan.activations import (
    backward_peak,
    deferred_bytes,
    group_keeps,
    group_sizes,
    layer_groups,
    layers_of,
    split,
)
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Action, Op
from megapipe.schedule.lifetimes import Moment, Moves, StageGroups, Unit, host_pieces, moments_of, plan_moves
from megapipe.schedule.partition import StageLayers

# offloaded groups on the device at the peak of a step: one in use, one being copied
USUAL_UNITS_ON_DEVICE = 2


def stage_groups(plan: RunPlan, stage: int, layers: StageLayers | None = None) -> StageGroups:
    """Return the number of groups of a stage, and how many of them --cpu-offloading-num-layers moves.

    layers: in place of the plan's.
    """
    layers = layers or plan.partition.stages[stage]
    count = plan.config.offload.cpu_offloading_num_layers
    sizes = group_sizes(plan.config.recompute, layers.num_layers)
    num_moved = sum(start < count for start in list(accumulate(sizes, initial=0))[:-1])
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


def offloaded_groups(plan: RunPlan, stage: int, layers: StageLayers | None = None) -> tuple[GroupBytes, ...]:
    """Return what each group of a stage's layers keeps and moves for one microbatch. layers: in place of the plan's."""
    layers = layers or plan.partition.stages[stage]
    num_moved = stage_groups(plan, stage, layers).num_moved
    found = []
    for index, group in enumerate(layer_groups(layers_of(plan.model, layers), plan.config.recompute)):
        copy = group.layers[0].attention.output_copy(plan.shape)
        kept = group_keeps(group, plan.shape) + (() if copy is None else (copy,))
        # the first tensor of the first group is the stage's input, which is held on the device for its gradient
        movable = kept if layers.has_embedding or index else kept[1:]
        least = plan.config.offload.min_offloaded_tensor_size
        moved = [tensor for tensor in movable if tensor.elements >= least] if index < num_moved else []
        found.append(GroupBytes(total_bytes(kept), total_bytes(moved)))
    return tuple(found)


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


def offloaded_memory(
    plan: RunPlan, pp_rank: int, num_microbatches: int, kept: Mapping[int, int]
) -> tuple[MemoryOverTime, int]:
    """Return the device memory of a row over time, and the bytes of all its host buffers together.

    kept: bytes of each stage for one microbatch without offloading.
    """
    held = plan.placement.stages_of(pp_rank)
    groups = {stage: offloaded_groups(plan, stage) for stage in held}
    moves = row_moves(plan, num_microbatches, pp_rank)
    away: dict[Moment, int] = {}
    now = 0
    in_use: Counter[int] = Counter()  # host buffers, by size
    most: Counter[int] = Counter()
    for index, moment in enumerate(moves.moments):
        for unit in moves.released.get(index, ()):
            now += groups[unit.stage][unit.group].moved
        for unit in moves.loaded.get(index, ()):
            now -= groups[unit.stage][unit.group].moved
            in_use[groups[unit.stage][unit.group].host] -= 1
        away[moment] = now
        unit = Unit(moment.stage, moment.microbatch, moment.group)
        if unit in moves.moved and moment.op is Op.F:
            size = groups[unit.stage][unit.group].host
            in_use[size] += 1
            most[size] = max(most[size], in_use[size])
    inside = {}
    for stage in held:
        has_head = plan.partition.stages[stage].has_head
        inside[stage, Op.F] = BackwardBytes(plan.model.head.loss_block_bytes(plan.shape) if has_head else 0)
        for op, shape in ((Op.B, plan.shape), (Op.I, split(plan.shape))):
            inside[stage, op] = backward_bytes(plan, stage, shape)
    stages = {stage: stage_groups(plan, stage) for stage in held}
    return MemoryOverTime(stages, groups, kept, away, inside), sum(count * size for size, count in most.items())


def backward_bytes(plan: RunPlan, stage: int, shape: RankShape) -> BackwardBytes:
    """Return what a stage's B makes and frees, or its I if the shape splits the backward."""
    model, layers = plan.model, plan.partition.stages[stage]
    first, last, _, has_head = layers
    sizes, kinds = group_sizes(plan.config.recompute, layers.num_layers), layers_of(model, layers)
    top = StageLayers(last - (sizes[-1] if sizes else 0), last, False, has_head)
    lower = StageLayers(first, first + (sizes[0] if sizes else 0), False, False)
    in_head, in_top = backward_peak(model, shape, top, kinds)
    in_lower = max(backward_peak(model, shape, lower, kinds)) + shape.hidden_bytes(model.embedding.hidden)
    if not shape.splits_backward:
        return BackwardBytes(in_head, in_top, in_lower)
    groups = pairwise(accumulate(sizes, initial=first))
    waits = tuple(deferred_bytes(model, shape, StageLayers(start, end, False, False)) for start, end in groups)
    head_waits = model.head.table(shape).deferred_bytes if has_head else 0
    return BackwardBytes(in_head, in_top, in_lower, waits, head_waits)
