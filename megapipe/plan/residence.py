"""What of a row's activations is on the device, moment by moment, where layers are offloaded. Used by `memory`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from megapipe.layers.model import ModelSpec
from megapipe.layers.shape import RankShape
from megapipe.plan.activations import deferred_bytes, layers_of
from megapipe.plan.offload import GroupBytes
from megapipe.plan.temporaries import backward_peak
from megapipe.schedule.action import Action, Op
from megapipe.schedule.moves import Moment, StageGroups, moments_of
from megapipe.schedule.partition import StageLayers


@dataclass(frozen=True)
class Inside:
    """What a moment of a backward makes and frees again: in the head, in the last group, in those before it. waits: what each group leaves
    for W; head_waits: the head. Of a forward only the head counts: the loss in fp32."""

    head: int
    top: int = 0
    lower: int = 0
    waits: tuple[int, ...] = ()
    head_waits: int = 0


@dataclass
class Residence:
    """Walks over one row. groups: of each stage, in their order. kept: of each stage for one microbatch, head included, as if nothing were
    offloaded. away: at each moment. inside: of each stage's B and I."""

    stages: Mapping[int, StageGroups]
    groups: Mapping[int, tuple[GroupBytes, ...]]
    kept: Mapping[int, int]
    away: Mapping[Moment, int]
    inside: Mapping[tuple[int, Op], Inside]
    now: int = 0  # away at the last moment

    def levels(self, action: Action, inside: int) -> list[tuple[int, int]]:
        """(bytes less than if all that the row keeps, this action's stage included, were on the device; bytes made and freed again) at each
        moment of an action. inside: of an action without moments, or that is no backward."""
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


def inside_of_backward(model: ModelSpec, shape: RankShape, stage: StageLayers, sizes: tuple[int, ...]) -> Inside:
    """Return what a stage's B makes and frees, or its I if the shape splits the backward. sizes: layers in each of its groups."""
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
    return Inside(in_head, in_top, in_lower, waits, head_waits)
