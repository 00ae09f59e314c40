"""Bounds do not exceed the predictions of their plans, and a short step can replace a long one in a prediction."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megapipe.config.config import Config
from megapipe.config.parallel import SHARDED_GRADS, RecomputeConfig
from megapipe.errors import ConfigError
from megapipe.extras.search.bounds import Bounds
from megapipe.extras.search.layout import CUTS, RECOMPUTES, Layout, takes_any_chunks
from megapipe.extras.search.search import ShortSteps, predict
from megapipe.plan.hardware import hardware_named
from megapipe.plan.memory import all_rank_memory
from megapipe.plan.resolve import resolve
from megapipe.plan.step_time import predict_step
from megapipe.schedule.families import SCHEDULES
from tests.tiny import small_config

A100 = dataclasses.replace(hardware_named("a100-80"), ranks_per_node=4)
H100 = dataclasses.replace(hardware_named("h100"), ranks_per_node=4)


def config_of(
    num_layers: int,
    heads: int,
    vocab_size: int,
    batch: int,
    dropout: float,
    tied: bool,
    fp8: str | None = None,
    compiles: bool = False,
    in_chunks: bool = False,
    loss_chunk: int | None = None,
) -> Config:
    return small_config(
        num_layers=num_layers,
        hidden_size=64 * heads,
        num_attention_heads=heads,
        seq_length=128,
        vocab_size=vocab_size,
        global_batch_size=batch,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        untie_embeddings_and_output_weights=not tied,
        tp_comm_overlap=in_chunks,
        dtype="bf16",
        fp8_format=None if fp8 is None else "hybrid",
        first_last_layers_bf16=fp8 == "ends",
        compile_pointwise=compiles,
        cross_entropy_chunk_size=loss_chunk,
    )


words = st.sampled_from(
    (
        "2 window_size=16",
        "1 attention=none",
        "1 mlp=none",
        "1 ffn_hidden_size=64",
        "2 ffn_hidden_size=4096 activation=swiglu",
        "1 num_query_groups=1 norm_position=around",
        "1 attn_logit_softcapping=20 position_embedding_type=none",
    )
)
configs = st.builds(
    config_of,
    st.integers(1, 13),
    st.sampled_from((2, 4, 8)),
    st.sampled_from((100, 5000, 60000)),
    st.sampled_from((8, 16, 24, 48)),
    st.sampled_from((0.0, 0.1)),
    st.booleans(),
    st.sampled_from((None, "all", "ends")),
    st.booleans(),
    st.booleans(),
    st.sampled_from((None, 32)),
)
patterns = st.just(()) | st.lists(words, min_size=2, max_size=4).map(lambda runs: (*runs, "..."))
families = st.sampled_from([family for family in SCHEDULES.values() if family.is_candidate]).flatmap(
    lambda family: st.tuples(
        st.just(family.name),
        st.integers(2, 4) if takes_any_chunks(family.name) else st.just(family.num_chunks(1)),
    )
)
chosen = st.builds(
    lambda tp, pp, family, size, recompute, sliced, sharded, cut: Layout(
        tp, pp, family[1], family[0], size, recompute, sliced and tp > 1, sharded, cut
    ),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 3, 4)),
    families,
    st.sampled_from((1, 2, 4)),
    st.sampled_from(RECOMPUTES[:7]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(CUTS),
)
sharded = st.builds(
    lambda layout, strategy, units, all_first: dataclasses.replace(
        layout,
        sharding=strategy,
        units=units,
        distributed_optimizer=True,
        schedule="breadth-first" if all_first and layout.schedule == "interleaved" else layout.schedule,
    ),
    chosen,
    st.sampled_from(SHARDED_GRADS),
    st.integers(1, 3),
    st.booleans(),
)


@given(configs, patterns, chosen | sharded, st.sampled_from((1, 2)))
@settings(max_examples=50, deadline=None)
def test_no_bound_is_above_its_prediction(config: Config, pattern: tuple[str, ...], layout: Layout, dp: int) -> None:
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, layer_pattern=pattern))
    world_size = layout.tp * layout.pp * dp
    hardware = A100 if config.precision.fp8_format is None else H100
    try:
        found = predict(config, layout, world_size, hardware)
    except ConfigError:
        assume(False)
    bounds = Bounds(config, world_size, hardware)
    bound, of_group = bounds.of(layout), bounds.of_group(dataclasses.replace(layout, distributed_optimizer=True))
    assert of_group is not None and of_group.seconds <= found.time.seconds * (1 + 1e-9)
    assert of_group.least_bytes <= found.peak_bytes
    if bound is None:
        assert layout.cut != "cost"  # and the cut by cost equals the default one
        return
    assert bound.seconds <= found.time.seconds * (1 + 1e-9)
    assert bound.least_bytes <= found.peak_bytes


@given(
    chosen,
    st.sampled_from((2, 3, 4, 8)),
    st.sampled_from((128, 4096, 32768)),
    st.sampled_from(("average", "uniform_comp")),
    st.sampled_from(((), ("2 window_size=16", "1 ffn_hidden_size=64", "..."))),
    st.sampled_from((4, 16, 36)),
    st.sampled_from((1, 2)),
)
@settings(max_examples=60, deadline=None)
def test_no_bound_is_above_its_prediction_with_slices(
    layout: Layout, slices: int, seq: int, strategy: str, pattern: tuple[str, ...], batch: int, dp: int
) -> None:
    config = sliced_config(seq, batch, pipe_sp_strategy=strategy, layer_pattern=pattern)
    layout, world_size = dataclasses.replace(layout, slices=slices), layout.tp * layout.pp * dp
    try:
        found = predict(config, layout, world_size, A100)
    except ConfigError:
        assume(False)
    bound = Bounds(config, world_size, A100).of(layout)
    if bound is None:
        assert layout.cut != "cost"
        return
    assert bound.seconds <= found.time.seconds * (1 + 1e-9)
    assert bound.least_bytes <= found.peak_bytes
    assert bound.seconds > 0.3 * found.time.seconds or seq == 128  # not an empty claim


def sliced_config(seq: int, batch: int, **changes: Any) -> Config:
    sizes = {"num_layers": 9, "hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 4, "vocab_size": 5000}
    options = {"seq_length": seq, "global_batch_size": batch, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return small_config(**{**sizes, **options, "dtype": "bf16", **changes})


@given(
    st.sampled_from((1, 2)),
    st.sampled_from((2, 4)),
    st.sampled_from((("1f1b", 1), ("interleaved", 2), ("dualpipe", 1), ("dualpipe-v", 2))),
    st.sampled_from((1, 2)),
    st.sampled_from((2, 4, 8)),
    st.sampled_from((None, "[0]*2+[1]*6")),
    st.sampled_from(("alltoall", "flex")),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_no_bound_is_above_its_prediction_where_all_to_alls_overlap(
    tp: int, pp: int, family: tuple[str, int], size: int, ep: int, freq: str | None, kind: str, on: bool, sharded: bool
) -> None:
    config = small_config(**EXPERTS, num_layers=8, moe_layer_freq=freq, moe_router_topk=4)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, seq_length=1024))
    schedule, chunks = family
    layout = Layout(tp, pp, chunks, schedule, size, RecomputeConfig(), tp > 1, sharded, ep=ep, etp=1)
    layout, steps = dataclasses.replace(layout, overlap=on, flex=kind == "flex"), ShortSteps(config, 8 * pp, H100)
    try:
        found, whole = predict(config, layout, 8 * pp, H100), steps.in_full(layout)
        short = steps.of(layout)[0]
    except ConfigError:
        assume(False)
    bound = Bounds(config, 8 * pp, H100).of(layout)
    assert bound is not None
    assert bound.seconds <= found.time.seconds * (1 + 1e-9)
    assert bound.least_bytes <= found.peak_bytes
    assert Bounds(config, 8 * pp, H100).of_group(layout).seconds <= bound.seconds  # type: ignore[union-attr]
    if on:
        assert 0.5 * short < steps.least_of_overlap(layout) <= short * (1 + 1e-9)
    assert short == pytest.approx(found.time.seconds, rel=0.02)
    assert whole.time.seconds == pytest.approx(short, rel=1e-9 if on else 0.02) == sum(whole.time.parts.values())
    assert whole.peak_bytes == found.peak_bytes and whole.time.tokens == found.time.tokens
    assert whole.plan.batch == found.plan.batch
    assert min(found.time.parts[part] for part in ("gemm", "ep")) >= 0.0


EXPERTS = {
    "num_experts": 8,
    "add_bias_linear": False,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "seq_length": 128,
    "global_batch_size": 48,
    "dtype": "bf16",
}


@given(
    chosen,
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((None, "2", "[0]*2+[1]*4")),
    st.sampled_from((None, 96)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((2, 4, 8)),
)
@settings(max_examples=60, deadline=None)
def test_no_bound_is_above_its_prediction_with_experts(
    layout: Layout, ep: int, etp: int, layers: str | None, shared: int | None, dp: int, per_node: int
) -> None:
    config = small_config(**EXPERTS, num_layers=6, moe_layer_freq=layers, moe_shared_expert_intermediate_size=shared)
    etp = math.gcd(etp, layout.tp)  # sizes that divide the ranks
    ep = math.gcd(ep, layout.tp * dp // etp)
    layout = dataclasses.replace(layout, ep=ep, etp=etp, sequence_parallel=layout.tp > 1)
    world_size, hardware = layout.tp * layout.pp * dp, dataclasses.replace(H100, ranks_per_node=per_node)
    try:
        found = predict(config, layout, world_size, hardware)
    except ConfigError:
        assume(False)
    bounds = Bounds(config, world_size, hardware)
    bound, of_group = bounds.of(layout), bounds.of_group(layout)
    assert of_group is not None and of_group.seconds <= found.time.seconds * (1 + 1e-9)
    if bound is None:
        assert layout.cut != "cost"
        return
    assert bound.seconds <= found.time.seconds * (1 + 1e-9)
    assert bound.least_bytes <= found.peak_bytes
    assert bound.seconds > 0.3 * found.time.seconds or layout.pp > 1 or dp > 1  # not an empty claim


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("v-half", 2), ("v-min", 2)]
)
def test_a_short_step_predicts_the_time_and_memory_of_a_long_one(schedule: str, chunks: int) -> None:
    config = config_of(num_layers=9, heads=4, vocab_size=5000, batch=61, dropout=0.1, tied=False)
    layout = Layout(1, 3, chunks, schedule, 1, RECOMPUTES[0])
    whole = predict(config, layout, 3, A100)
    seconds, need = ShortSteps(config, 3, A100).of(layout)
    # with slow messages, as here, some schedules become periodic only after several times pp microbatches
    assert seconds == pytest.approx(whole.time.seconds, rel=0.012)
    assert need == whole.peak_bytes


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)])
@pytest.mark.parametrize("slices", [2, 4])
def test_a_short_step_with_slices_predicts_the_time_and_memory_of_a_long_one(
    schedule: str, chunks: int, slices: int
) -> None:
    config = sliced_config(16384, 61)
    layout = Layout(1, 3, chunks, schedule, 1, RECOMPUTES[0], slices=slices)
    whole = predict(config, layout, 3, A100)
    seconds, need = ShortSteps(config, 3, A100).of(layout)
    assert seconds == pytest.approx(whole.time.seconds, rel=0.003)
    assert need == whole.peak_bytes


@given(configs, chosen)
@settings(max_examples=15, deadline=None)
def test_overlaps_never_slow_a_step_nor_fill_memory(config: Config, layout: Layout) -> None:
    """The search therefore enables all overlaps."""
    world_size, overlapped = layout.tp * layout.pp * 2, layout.applied_to(config)
    off = dataclasses.replace(
        overlapped.parallel, overlap_grad_reduce=False, overlap_param_gather=False, overlap_p2p_comm=False
    )
    try:
        plans = [resolve(each, world_size, 4) for each in (overlapped, dataclasses.replace(overlapped, parallel=off))]
    except ConfigError:
        assume(False)
    times = [predict_step(plan, H100).seconds for plan in plans]
    assert times[0] <= times[1] * (1 + 1e-9)
    assert [rank.total for rank in all_rank_memory(plans[0])] <= [rank.total for rank in all_rank_memory(plans[1])]


def test_logits_in_chunks_are_computed_once_more() -> None:
    layout, whole = Layout(1, 2, 1, "1f1b", 1, RECOMPUTES[0]), config_of(8, 4, 60000, 8, 0.0, tied=False)
    seconds = [
        predict(config, layout, 2, A100).time.seconds
        for config in (whole, config_of(8, 4, 60000, 8, 0.0, False, loss_chunk=32))
    ]
    assert seconds[0] < seconds[1]
