"""Bytes of the parts in which stages run with --overlap-moe-expert-parallel-comm, as one row of parts keeps and frees
them: `plan.memory` folds over these in place of whole stages.

A part keeps what the operations of its tables keep, and its input. What its backward makes is planned as for a whole
stage, part by part. Between I and W it holds the inputs and gradients of its linears.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from megapipe.layers.model import LayerSpec
from megapipe.layers.moe import MoETable
from megapipe.layers.table import Operation, RankShape, total_bytes
from megapipe.plan.activations import (
    deferred_bytes,
    head_backward,
    split,
    stage_bytes,
    temporary_bytes,
)
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Op
from megapipe.schedule.parts import Part, Parts

# operations of a layer's second branch, with experts, that belong to another part than the MLP
PART_OF = dict.fromkeys(("combine", "residual sum", "post_mlp_layernorm"), Part.COMBINE) | dict.fromkeys(
    ("pre_mlp_layernorm", "residual stream", "router", "dispatch"), Part.ATTENTION
)


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
                kept[site], _, inside[site, Op.B] = _sizes(model.layers[layer], part, shape)
                _, waiting[site], inside[site, Op.I] = _sizes(model.layers[layer], part, split(shape))
            inside[site, Op.W] = in_w
        if layers.has_head:
            head = sites[-1]
            inside[head, Op.F] = model.head.loss_block_bytes(shape)
            inside[head, Op.B], inside[head, Op.I] = (head_backward(model, s, layers)[0] for s in (shape, split(shape)))
        # what belongs to no layer is held by the head, or else from the first part on
        rest = sites[-1] if layers.has_head else sites[0]
        kept[rest] += sum(stage_bytes(model, shape, layers).values()) - sum(kept[site] for site in sites)
        waiting[rest] += deferred_bytes(model, split(shape), layers) - sum(waiting[site] for site in sites)
    return kept, waiting, inside


@cache
def _sizes(layer: LayerSpec, part: Part, shape: RankShape) -> tuple[int, int, int]:
    """Return what a part of a layer keeps, what of it waits for W, and the most that its backward makes."""
    found: list[Operation] = []
    for each in layer.parts:
        table = each.table(shape)
        if not isinstance(each, MoETable):
            found += table.operations if (each is layer.attention) == (part is Part.ATTENTION) else ()
            continue
        # what waits for W since the experts' I belongs to these
        waits = table.left_bytes - shape.hidden_bytes(each.model.hidden_size) if part is Part.ATTENTION else 0
        for operation in (one for one in table.operations if PART_OF.get(one.name, Part.MLP) is part):
            made = operation.backward
            less = None if made is None else replace(made, held=made.held - waits)
            found.append(replace(operation, backward=less))
    return (
        total_bytes(tensor for operation in found for tensor in operation.keeps),
        sum(operation.deferred_bytes for operation in found),
        max((operation.backward.held for operation in found if operation.backward), default=0),
    )
