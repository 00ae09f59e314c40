"""What traces say beside each other: of more sequences, groups, branches, parts, the fullest rank, libraries.

What they say of real stages is in `tests/model/test_planned_bytes.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megapipe.errors import ConfigError
from megapipe.layers.model import LayerSpec
from megapipe.layers.table import RankShape
from megapipe.plan.expert_load import ExpertLoad
from megapipe.plan.memory import all_rank_memory
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.traces import embedding_trace, head_trace, layer_trace, part_traces, split, traced_layer
from megapipe.schedule.partition import StageLayers
from megapipe.schedule.parts import Part
from megapipe.trace.layers import trace_layers, trace_parts
from megapipe.trace.traced import ROWS, SIZES
from megapipe.trace.unit import Unit
from tests.tiny import small_config
from tests.trace import units

ONE_LAYER = StageLayers(0, 1, False, False)
SMALL = 64  # bytes: the seed and the offset of dropout


def planned(*features: str) -> RunPlan:
    """Return the plan of a combination of the ledger, with the kernels of CUDA."""
    return units.planned(features, "cuda")


def only(plan: RunPlan) -> tuple[LayerSpec, RankShape]:
    """Return the last kind of layer, and the shape of a plan without slices."""
    (shape,) = plan.slice_shapes
    return plan.model.kinds[-1], split(shape) if plan.splits_backward else shape


@pytest.mark.parametrize("feature", ["tp2+sp", "moe ep2", "mla", "recompute sel", "window", "zb-h1"])
def test_more_sequences_are_known_from_two_numbers_of_them(feature: str) -> None:
    layer, one = only(planned(feature))
    own = traced_layer(layer)
    for batch in (4, 7):
        shape = replace(one, batch=batch)
        assert trace_layers((own,), shape) == Unit(own.config, ONE_LAYER, (own,), shape).traced()


@pytest.mark.parametrize("features", [("moe ep2",), ("moe ep2", "zb-h1"), ("moe ep2", "tp2+sp", "fp8 local")])
def test_the_fullest_rank_keeps_more_of_its_experts_rows_alone(features: tuple[str, ...]) -> None:
    even = planned(*features)
    full = replace(even, expert_load=ExpertLoad(1.75))
    (layer, shape), (fuller, _) = only(even), only(full)
    mean, most = layer_trace(layer, shape), layer_trace(fuller, shape)
    assert most.kept_bytes > mean.kept_bytes
    of_experts = {"router", "dispatch", "rows", "expert_fc1", "expert_activation", "expert_fc2", "results", "combine"}
    changed = {one.name for one, two in zip(mean.kept, most.kept, strict=True) if one.num_bytes != two.num_bytes}
    assert changed and changed <= of_experts
    assert most.waiting >= mean.waiting
    assert head_trace(even.model, shape) == head_trace(full.model, shape)
    assert embedding_trace(even.model, shape) == embedding_trace(full.model, shape)


def test_layers_that_differ_are_one_group() -> None:
    plan = planned("recompute full", "layer pattern")
    (shape,) = plan.slice_shapes
    kinds = [traced_layer(kind) for kind in plan.model.kinds]
    each = [trace_layers((kind,), shape) for kind in kinds]
    grouped = replace(shape, recompute=replace(shape.recompute, recompute_num_layers=len(kinds)))
    both = trace_layers(tuple(kinds), grouped)
    assert len(kinds) > 1
    assert both.kept_bytes == max(one.kept_bytes for one in each)  # the input of the first
    assert both.peaks[1] > max(one.peaks[1] for one in each)


@pytest.mark.parametrize("features", [("moe overlap",), ("moe overlap", "mla"), ("moe overlap", "fp8 local")])
def test_the_parts_of_a_layer_keep_what_the_layer_does_and_their_inputs(features: tuple[str, ...]) -> None:
    layer, shape = only(planned(*features))
    parts = trace_parts(traced_layer(layer), shape)
    assert list(parts) == [Part.ATTENTION, Part.DISPATCH, Part.MLP, Part.COMBINE]
    whole = layer_trace(layer, replace(shape, in_parts=False))
    rows = 3 * max(tensor.num_bytes for tensor in whole.kept)  # what passes between two of the four
    assert whole.kept_bytes <= sum(part.kept_bytes for part in parts.values()) <= whole.kept_bytes + rows


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(
    "features",
    [
        ("tp2+sp", "window"),
        ("cp2 a2a", "zb-h1"),
        ("mla", "moe ep2", "recompute sel"),
        ("moe ep2", "fp8 local"),
        ("moe ep2", "tp2+sp", "recompute full"),
        ("slices2", "recompute full"),
    ],
    ids=" ".join,
)
def test_the_branches_of_a_layer_keep_make_multiply_and_send_what_it_does(
    features: tuple[str, ...], device: str
) -> None:
    for layer, shape in units.layers_of(units.planned(features, device)):
        is_joined = shape.recompute.recompute_granularity != "full" and not shape.splits_backward
        joined, whole = layer_trace(layer, shape, has_levels=is_joined), trace_layers((traced_layer(layer),), shape)
        assert len(layer.branches) == 2 and Counter(joined.kept) == Counter(whole.kept)
        assert [getattr(joined, name) for name in SIZES] == [getattr(whole, name) for name in SIZES]
        assert [Counter(getattr(joined, name)) for name in ROWS] == [Counter(getattr(whole, name)) for name in ROWS]
        if is_joined:
            assert (joined.peaks[1], joined.replay) == (whole.peaks[1], whole.replay)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("features", [("moe overlap", "fp8 local"), ("moe overlap", "layer pattern")], ids=" ".join)
def test_the_parts_of_the_branches_of_a_layer_are_its_parts(features: tuple[str, ...], device: str) -> None:
    for layer, shape in units.layers_of(units.planned(features, device)):
        joined, whole = part_traces(layer, shape), trace_parts(traced_layer(layer), shape)
        assert list(joined) == list(whole)
        for part, traced in joined.items():
            assert Counter(traced.kept) == Counter(whole[part].kept)
            assert (traced.waiting, traced.peaks[1]) == (whole[part].waiting, whole[part].peaks[1])
        of_branches = sum(layer_trace(branch, shape).kept_bytes for branch in layer.branches)
        assert of_branches == sum(traced.kept_bytes for traced in joined.values())


@pytest.mark.parametrize("features", [("moe overlap",), ("moe overlap", "fp8 local"), ("moe ep2", "tp2+sp")])
def test_many_experts_on_a_rank_are_known_from_two_and_four(features: tuple[str, ...]) -> None:
    layer, one = only(planned(*features))
    config = replace(layer.config, num_experts=48, moe_router_topk=6)
    own = traced_layer(layer)._replace(config=config)
    for shape in (replace(one, in_parts=False, ep=ep, batch=batch) for ep in (2, 3) for batch in (1, 5)):
        found = trace_layers((own,), shape, has_levels=not own.is_fp8)
        direct = Unit(config, ONE_LAYER, (own,), shape).traced()
        assert found == (replace(direct, forward=(), backward=(), weights=(), replayed=()) if own.is_fp8 else direct)
        in_parts = trace_parts(own, replace(shape, in_parts=True), has_levels=not own.is_fp8)
        for part, direct in Unit(config, ONE_LAYER, (own,), replace(shape, in_parts=True)).traced_parts().items():
            assert in_parts[part] == (replace(direct, backward=()) if own.is_fp8 else direct)


@pytest.mark.parametrize("name", ["flash", "te"])
def test_a_library_keeps_what_torchs_flash_attention_keeps(name: str) -> None:
    """All keep q, k, v, the output and the log-sum-exp. The order of flash-attn's output is copied."""
    layer, shape = only(planned())
    found, torchs = (layer_trace(layer, replace(shape, attention_impl=impl)) for impl in (name, "sdpa"))
    copied = shape.tokens * layer.config.hidden_size * shape.element if name == "flash" else 0
    assert abs(found.kept_bytes - torchs.kept_bytes - copied) <= SMALL


def test_norms_of_heads_keep_the_same_with_and_without_weights() -> None:
    layer, shape = only(planned())
    own = traced_layer(layer)
    kept = [
        trace_layers((own._replace(config=replace(own.config, **{norm: True})),), shape).kept_bytes
        for norm in ("qk_layernorm", "qk_l2_norm")
    ]
    plain = trace_layers((own,), shape).kept_bytes
    assert kept[0] == kept[1] > plain


@pytest.mark.parametrize("size", [{"hidden_size": 10**13}, {"seq_length": 10**13}, {"ffn_hidden_size": 2**62}])
def test_sizes_that_no_tensor_has_are_errors_of_the_configuration(size: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(size)).replace('_', '-')}"):
        all_rank_memory(resolve(small_config(**size), 1))
