"""Bytes of the parts in which stages run with --overlap-moe-expert-parallel-comm, as one row of parts keeps and frees
them: `plan.memory` folds over these in place of whole stages.

Parts are traced one after the other (`plan.traces.part_traces`). Between I and W a part holds the inputs and gradients
of its linears.
"""

from __future__ import annotations

from collections.abc import Iterable

from megapipe.plan.activations import deferred_bytes, head_backward, stage_bytes, temporary_bytes
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.traces import head_trace, part_traces, split
from megapipe.schedule.action import Op
from megapipe.schedule.parts import Part, Parts


def part_sizes(
    plan: RunPlan, parts: Parts, stages: Iterable[int]
) -> tuple[dict[int, int], dict[int, int], dict[tuple[int, Op], int]]:
    """Return by part what it keeps from F to B or I and from I to W; by part and op what this makes and frees again."""
    kept: dict[int, int] = {}
    waiting: dict[int, int] = {}
    inside: dict[tuple[int, Op], int] = {}
    model, shape = plan.model, plan.shape
    for stage in stages:
        layers, sites = plan.partition.stages[stage], parts.of_stage[stage]
        in_w = temporary_bytes(model, shape, layers)[Op.W]
        for site in sites:
            _, layer, part = parts.sites[site]
            if part is Part.HEAD:
                kept[site] = waiting[site] = inside[site, Op.B] = inside[site, Op.I] = 0
            else:
                whole, halves = (part_traces(model.layers[layer], s)[part] for s in (shape, split(shape)))
                kept[site], inside[site, Op.B] = whole.kept_bytes, whole.peaks[1]
                waiting[site], inside[site, Op.I] = halves.waiting, halves.peaks[1]
            inside[site, Op.W] = in_w
        if layers.has_head:
            head = sites[-1]
            inside[head, Op.F] = head_trace(model, shape).peaks[0]
            inside[head, Op.B], inside[head, Op.I] = (head_backward(model, s, layers)[0] for s in (shape, split(shape)))
        # what belongs to no layer is held by the head, or else from the first part on
        rest = sites[-1] if layers.has_head else sites[0]
        kept[rest] += sum(stage_bytes(model, shape, layers).values()) - sum(kept[site] for site in sites)
        waiting[rest] += deferred_bytes(model, split(shape), layers) - sum(waiting[site] for site in sites)
    return kept, waiting, inside
