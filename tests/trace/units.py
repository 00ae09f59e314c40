"""The layers and ends of the plans of the ledger, as units that can be traced, beside what the tables say of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megapipe.config.load import load_config
from megapipe.layers.model import LayerSpec
from megapipe.layers.table import RankShape, total_bytes
from megapipe.plan.activations import (
    LayerGroup,
    bytes_by_name,
    deferred_bytes,
    end_tables,
    group_keeps,
    group_waits,
    layer_groups,
    layers_of,
    prediction_groups,
    split,
)
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.world_rules import rules_of_world
from megapipe.schedule.partition import StageLayers
from megapipe.trace.layers import trace_embedding, trace_head, trace_layers
from megapipe.trace.traced import Traced
from megapipe.trace.unit import TracedLayer
from tests.ledger import SIZES, Combination


class Bytes(NamedTuple):
    """What is kept from F to B or I, and from I to W."""

    kept: int
    waiting: int


class Compared(NamedTuple):
    """One unit: what a trace counts and what the tables say."""

    name: str
    traced: Bytes
    tables: Bytes


def planned(features: tuple[str, ...], device: str) -> RunPlan:
    """Return the plan of a combination of the ledger; raises ConfigError for a refused one."""
    combination = Combination(features)
    flags = ["--plan", "--world-size", str(combination.world_size), *combination.arguments(SIZES)]
    config = load_config(flags, is_job=False, more=rules_of_world).config
    return resolve(replace(config, training=replace(config.training, device=device)), combination.world_size)


def traced_layer(layer: LayerSpec) -> TracedLayer:
    comm_type = "p2p" if layer.attention is None else layer.attention.cp_comm_type
    imbalance = 1.0 if layer.experts is None else layer.experts.imbalance
    return TracedLayer(layer.parts[0].model, layer.is_fp8, comm_type, imbalance, layer.frozen)


def shapes_of(plan: RunPlan) -> list[RankShape]:
    return [split(shape) if plan.splits_backward else shape for shape in plan.slice_shapes]


def compared(plan: RunPlan) -> Iterator[Compared]:
    """Yield the units of a plan's stages, each once."""
    for shape in shapes_of(plan):
        groups: dict[LayerGroup, None] = {}
        ends: dict[bool, StageLayers] = {}
        for stage in plan.partition.stages:
            groups |= dict.fromkeys(layer_groups(layers_of(plan.model, stage), shape))
            ends |= {False: stage} if stage.has_embedding else {}
            ends |= {True: stage} if stage.has_head else {}
        for group in groups:
            found = trace_layers(tuple(map(traced_layer, group.layers)), group.shape(shape))
            kept = total_bytes(group_keeps(group, shape))
            waits = group_waits(group, shape) if shape.splits_backward else 0
            yield Compared("layers", bytes_of(found), Bytes(kept, waits))
        for is_head, stage in ends.items():
            yield Compared("head" if is_head else "embedding", *of_end(plan, shape, is_head, stage))


def of_end(plan: RunPlan, shape: RankShape, is_head: bool, stage: StageLayers) -> tuple[Bytes, Bytes]:
    model, end = plan.model, stage.last_layer_exclusive if is_head else stage.first_layer
    last = traced_layer(model.predictions[0][1] if model.predictions else model.layers[-1])
    traced = trace_embedding(plan.config.model, shape, model.embedding.frozen)
    if is_head:
        traced = trace_head(plan.config.model, shape, model.head.frozen, last.is_fp8, last.comm_type)
    alone = StageLayers(end, end, not is_head, is_head)
    kept = sum(total for table in end_tables(model, shape, alone) for total in bytes_by_name(table.keeps).values())
    kept += sum(total_bytes(group_keeps(group, shape)) for group in prediction_groups(model, shape, alone))
    waits = deferred_bytes(model, shape, alone) if shape.splits_backward else 0
    return bytes_of(traced), Bytes(kept, waits)


def bytes_of(traced: Traced) -> Bytes:
    return Bytes(traced.kept_bytes, traced.waiting)
