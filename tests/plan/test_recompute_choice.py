"""The recompute that a memory budget chooses: monotone, near the optimum, and full or none at its ends."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.parallel import RecomputeConfig
from megapipe.errors import ConfigError
from megapipe.layers.model import LayerSpec
from megapipe.layers.table import RankShape
from megapipe.plan.activations import group_trace, layer_groups
from megapipe.plan.hardware import hardware_named
from megapipe.plan.recompute_choice import Choice, _choice, _recomputes, choices, layer_recompute
from megapipe.plan.report import plan_text
from megapipe.plan.resolve import resolve
from megapipe.plan.step_time import predict_step
from tests.plan.test_layer_costs import gpt, spec_of
from tests.tiny import tiny_config

PATTERNS: dict[str, tuple[str, ...]] = {
    "alike": (),
    "unlike": (
        "1 window_size=64",
        "1 ffn_hidden_size=304",
        "1 attention=none",
        "1 mlp=none norm_position=after",
        "...",
    ),
    "soft caps": ("1 attn_logit_softcapping=30", "1", "..."),
}
SHAPES = st.builds(
    RankShape,
    st.sampled_from([1, 2]),
    st.just(192),
    st.sampled_from(["bf16", "fp32", "fp64"]),
    tp=st.sampled_from([1, 2]),
    sequence_parallel=st.just(False),
    attention_impl=st.sampled_from(["sdpa", "te"]),
    transformer_impl=st.sampled_from(["local", "transformer_engine"]),
    is_cuda=st.booleans(),
)


def layers_of(pattern: str, num_layers: int) -> tuple[LayerSpec, ...]:
    sizes: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "seq_length": 192, "vocab_size": 1000}
    more = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return spec_of(gpt(num_layers=num_layers, **sizes, **more, layer_pattern=PATTERNS[pattern])).layers


def taken(layers: tuple[LayerSpec, ...], shape: RankShape, budget: float) -> tuple[int, float]:
    """Return the bytes and the FLOPs that a budget leads to."""
    shape = replace(shape, recompute=RecomputeConfig(recompute_memory_budget=budget))
    hulls = [{choice.recompute: choice for choice in choices(layer, shape)} for layer in layers]
    found = [hull[each] for hull, each in zip(hulls, layer_recompute(layers, shape), strict=True)]
    kept = sum(group_trace(group, shape).kept_bytes for group in layer_groups(layers, shape))
    assert kept == sum(choice.kept_bytes for choice in found)
    return kept, sum(choice.flops for choice in found)


@settings(max_examples=15)
@given(st.sampled_from(sorted(PATTERNS)), st.integers(4, 9), SHAPES, st.lists(st.floats(0, 1), min_size=2))
def test_bytes_and_flops_are_monotone_in_the_budget(
    pattern: str, num_layers: int, shape: RankShape, budgets: list[float]
) -> None:
    layers = layers_of(pattern, num_layers)
    points = [taken(layers, shape, budget) for budget in [0.0, *sorted(budgets), 1.0]]
    for (fewer, more_flops), (more, fewer_flops) in pairwise(points):
        assert fewer <= more
        assert more_flops >= fewer_flops
    for budget, (kept, _) in zip([0.0, *sorted(budgets), 1.0], points, strict=True):
        assert kept <= points[0][0] + budget * (points[-1][0] - points[0][0])


@settings(max_examples=15)
@given(st.sampled_from(sorted(PATTERNS)), SHAPES, st.floats(0, 1))
def test_no_choice_that_fits_recomputes_less_by_as_much_as_one_step(
    pattern: str, shape: RankShape, budget: float
) -> None:
    layers = layers_of(pattern, 4)[:3]
    every = [[_choice(layer, shape, each) for each in _recomputes(layer, shape)] for layer in layers]
    most = sum(max(choice.kept_bytes for choice in of_layer) for of_layer in every)
    least = sum(min(choice.kept_bytes for choice in of_layer) for of_layer in every)
    fitting = (
        sum(choice.flops for choice in each)
        for each in product(*every)
        if sum(choice.kept_bytes for choice in each) <= least + budget * (most - least)
    )
    steps = (after.flops - before.flops for layer in layers for before, after in pairwise(choices(layer, shape)))
    assert 0 <= taken(layers, shape, budget)[1] - min(fitting) < max(steps)


@settings(max_examples=15)
@given(st.sampled_from(sorted(PATTERNS)), SHAPES)
def test_a_budget_of_1_keeps_everything_and_of_0_what_full_recompute_keeps(pattern: str, shape: RankShape) -> None:
    layers, full = layers_of(pattern, 4), replace(shape, recompute=RecomputeConfig("full", "uniform", 1))

    def kept(shape: RankShape) -> int:
        return sum(group_trace(group, shape).kept_bytes for group in layer_groups(layers, shape))

    assert taken(layers, shape, 1.0) == (kept(shape), 0.0)
    assert taken(layers, shape, 0.0)[0] == kept(full)


def test_the_choices_of_a_layer_save_ever_fewer_bytes_per_flop() -> None:
    (layer, *_), shape = layers_of("alike", 4), RankShape(1, 192, "bf16")
    found = choices(layer, shape)
    rates = [(a.kept_bytes - b.kept_bytes) / (b.flops - a.flops) for a, b in pairwise(found)]
    assert rates == sorted(rates, reverse=True)
    assert found[0] == Choice(RecomputeConfig(), found[0].kept_bytes, 0.0)
    assert found[-1].recompute.recompute_granularity == "full"


def test_attention_that_cannot_be_kept_is_not_kept() -> None:
    for pattern, changes, is_kept in (
        ("alike", {}, True),
        ("alike", {"attention_impl": "te"}, False),
        ("alike", {"dtype": "fp64"}, False),
        ("soft caps", {}, False),
    ):
        shape = replace(RankShape(1, 192, "bf16"), **changes)
        layer = layers_of(pattern, 4)[0]
        assert is_kept == any(each.recompute_keep_attention for each in _recomputes(layer, shape))


def test_less_memory_takes_more_time_in_the_plan() -> None:
    hardware, seconds, costs = hardware_named("h100"), [], []
    sizes = {"num_layers": 8, "pipeline_model_parallel_size": 2, "global_batch_size": 4, "dtype": "bf16"}
    for budget in (1.0, 0.7, 0.4, 0.1, 0.0):
        config = tiny_config(**sizes, recompute_memory_budget=budget)
        plan = resolve(config, 2)
        seconds.append(predict_step(plan, hardware).seconds)
        costs.append(plan.layer_costs.of_stage(plan.partition.stages[0]).replay)
    assert seconds == sorted(seconds)
    assert costs == sorted(costs)
    assert costs[0] == 0.0
    full = resolve(
        tiny_config(
            **sizes,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
        ),
        2,
    )
    assert seconds[-1] == predict_step(full, hardware).seconds
    assert costs[-1] == full.layer_costs.of_stage(full.partition.stages[0]).replay


def test_the_plan_says_what_was_chosen() -> None:
    text = plan_text(resolve(tiny_config(num_layers=4, recompute_memory_budget=0.4), 1))
    assert "  recompute memory budget 0.4: layers " in text


def test_a_budget_and_a_granularity_are_refused_in_one_message() -> None:
    config = tiny_config(recompute_memory_budget=0.5, recompute_granularity="selective", recompute_modules=("mlp",))
    with pytest.raises(ConfigError) as error:
        resolve(config, 1)
    assert str(error.value) == (
        "--recompute-memory-budget 0.5 does not work with --recompute-granularity and --recompute-modules: the budget "
        "chooses what each layer recomputes; leave one of the two out"
    )
