"""A trace counts what the tables of the layers say, on both devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megapipe.config.features import FEATURES, RECIPES
from megapipe.errors import ConfigError
from megapipe.plan.expert_load import ExpertLoad
from megapipe.schedule.partition import StageLayers
from megapipe.schedule.parts import Part
from megapipe.trace.layers import trace_layers, trace_parts
from megapipe.trace.unit import Unit
from tests.ledger import NUM_SETS, SEED, drawn
from tests.trace.units import compared, planned, shapes_of, traced_layer

DEVICES = ("cuda", "cpu")
ONE_LAYER = StageLayers(0, 1, False, False)
CASES = {
    **{each.name: (each.name,) for each in FEATURES},
    **{each.name: (*each.features, each.name) for each in RECIPES},
    **{f"set {number}": drawn(SEED, number).features for number in range(NUM_SETS)},
}
# features whose tables count otherwise, and the share of what is kept by which a trace may differ
OTHERS = {
    "moe overlap": 0.5,  # layers run in parts
}
SMALL = 2400  # bytes: seeds and offsets of dropout, positions of documents, a norm's weight plus one


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_a_trace_keeps_what_the_tables_say(name: str, device: str) -> None:
    try:
        plan = planned(CASES[name], device)
    except ConfigError:
        return  # a refused combination
    share = max(OTHERS.get(feature, 0.0) for feature in CASES[name])
    for unit in compared(plan):
        for found, said in zip(unit.traced, unit.tables, strict=True):
            assert abs(found - said) <= max(SMALL, share * said), unit


@pytest.mark.parametrize("name", ["tp2+sp", "moe ep2", "mla", "recompute sel", "window"])
def test_more_sequences_are_known_from_two_numbers_of_them(name: str) -> None:
    plan = planned((name,), "cuda")
    layers = (traced_layer(plan.model.layers[0]),)
    for batch in (4, 7):
        shape = replace(shapes_of(plan)[0], batch=batch)
        assert trace_layers(layers, shape) == Unit(layers[0].config, ONE_LAYER, layers, shape).traced()


@pytest.mark.parametrize("features", [("moe ep2",), ("moe ep2", "zb-h1"), ("moe ep2", "tp2+sp", "fp8 local")])
def test_the_fullest_rank_keeps_what_the_tables_say(features: tuple[str, ...]) -> None:
    even = planned(features, "cuda")
    plan = replace(even, expert_load=ExpertLoad(1.75))
    for full, mean in zip(compared(plan), compared(even), strict=True):
        assert full.traced.kept == pytest.approx(full.tables.kept, abs=SMALL)
        assert full.traced.waiting == pytest.approx(full.tables.waiting, abs=SMALL)
        assert (full.traced.kept > mean.traced.kept) == (full.name == "layers")


def test_layers_that_differ_are_one_group() -> None:
    plan = planned(("recompute full", "layer pattern"), "cuda")
    (shape,) = shapes_of(plan)
    kinds = [traced_layer(kind) for kind in plan.model.kinds]
    each = [trace_layers((kind,), shape) for kind in kinds]
    both = trace_layers(
        tuple(kinds), replace(shape, recompute=replace(shape.recompute, recompute_num_layers=len(kinds)))
    )
    assert len(kinds) > 1
    assert both.kept_bytes == max(one.kept_bytes for one in each)  # the input of the first
    assert both.peaks[1] > max(one.peaks[1] for one in each)


@pytest.mark.parametrize("features", [("moe overlap",), ("moe overlap", "mla"), ("moe overlap", "fp8 local")])
def test_the_parts_of_a_layer_keep_what_its_tables_say_together(features: tuple[str, ...]) -> None:
    plan = planned(features, "cuda")
    (shape,) = shapes_of(plan)
    kind = plan.model.kinds[-1]
    parts = trace_parts(traced_layer(kind), shape)
    assert list(parts) == [Part.ATTENTION, Part.DISPATCH, Part.MLP, Part.COMBINE]
    (compared_layer,) = [unit for unit in compared(plan) if unit.name == "layers"][-1:]
    assert sum(part.kept_bytes for part in parts.values()) == pytest.approx(compared_layer.tables.kept, abs=SMALL)
    assert sum(part.waiting for part in parts.values()) == pytest.approx(compared_layer.tables.waiting, abs=SMALL)
