"""Memory of each rank.

Peaks are compared with those of the schedules, buffers and optimizer states with real ones, and activations with
published formulas.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.config import resolve_model
from megapipe.config.model import PrecisionConfig
from megapipe.config.parallel import RecomputeConfig
from megapipe.layers.model import ModelSpec, model_spec
from megapipe.layers.table import RankShape
from megapipe.plan.activations import LayerGroup, backward_peak, group_backward, replay_bytes
from megapipe.plan.memory import SliceBytes, all_rank_memory, peak_of_row, rank_memory, stage_activation_bytes
from megapipe.plan.resolve import resolve
from megapipe.plan.traces import layer_trace
from megapipe.plan.traffic import reduction_bytes
from megapipe.schedule.action import Action, parse_action
from megapipe.schedule.families import SCHEDULES, build_lowered
from megapipe.schedule.lifetimes import peak_live_chunks
from megapipe.schedule.partition import StageLayers
from megapipe.schedule.placement import Placement, linear, loop, v_shape
from tests.schedule.strategies import family_shapes
from tests.tiny import small_config

GRID = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


def row(text: str) -> list[Action]:
    return [parse_action(word) for word in text.split()]


@settings(max_examples=40)
@given(
    st.sampled_from(list(SCHEDULES)),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 9),
)
def test_equal_stages_peak_where_the_schedule_says(
    name: str, num_ranks: int, num_chunks: int, num_microbatches: int
) -> None:
    schedule = build_lowered(*family_shapes(name, num_ranks, num_chunks, num_microbatches))
    for pp_rank, peak in enumerate(peak_live_chunks(schedule)):
        sizes = dict.fromkeys(schedule.placement.stages_of(pp_rank), 7)
        found = peak_of_row(schedule.rows[pp_rank], pp_rank, schedule.placement, [SliceBytes(sizes, sizes, {}, 0)], 2)
        assert found.activation_bytes == 7 * peak
        assert sum(found.live.values()) == peak
        assert found.message_bytes == 0


@pytest.mark.parametrize(
    ("text", "sizes", "peak", "live"),
    [
        (
            "0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1",
            {0: 10, 2: 1},
            21,
            {0: 2, 2: 1},
        ),  # uneven chunks: each counts with its own bytes
        ("0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1", {0: 1, 2: 10}, 12, {0: 2, 2: 1}),
        (
            "0F0 2F0 2I0 2F1 2W0 2B1 0F1 0B0 0B1",
            {0: 1, 2: 10},
            15,
            {0: 1, 2: 2},
        ),  # 4 bytes of the split backward are kept until W
        ("0F0 2F0 2I0 2W0 2F1 2B1 0F1 0B0 0B1", {0: 1, 2: 10}, 11, {0: 1, 2: 1}),
    ],
    ids=["large_first", "large_last", "split", "split_in_time"],
)
def test_uneven_chunks_peak_by_their_own_bytes(
    text: str, sizes: dict[int, int], peak: int, live: dict[int, int]
) -> None:
    found = peak_of_row(row(text), 0, loop(2, 2), [SliceBytes(sizes, {0: 4, 2: 4}, {}, 0)], 2)
    assert (found.activation_bytes, found.live) == (peak, live)


@pytest.mark.parametrize(
    ("text", "pp_rank", "placement", "messages"),
    [
        ("1RECV_F0 1RECV_F1 1RECV_F2 1F0 1F1 1F2", 1, linear(2), 3),  # received, but not used yet
        (
            "1RECV_F0 1F0 1B0",
            1,
            linear(2),
            1,
        ),  # becomes the stage's input; the last stage's output gradient is no message
        (
            "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2",
            0,
            linear(2),
            2,
        ),  # sent messages are held until they are known to have arrived
        ("0F0 0SEND_F0 0RECV_B0 0B0", 0, linear(2), 2),  # the output gradient is alive during its backward
        ("0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1", 0, loop(1, 2), 2),  # two stages on one rank pass tensors directly
        ("0F0 0SEND_F0 2RECV_F0 2F0 3F0 3B0 2B0", 0, v_shape(2), 2),
    ],
    ids=["received", "used", "sent", "gradient", "local", "turn_of_a_v"],
)
def test_messages_count_from_post_to_use(text: str, pp_rank: int, placement: Placement, messages: int) -> None:
    sizes = {action.stage: 0 for action in row(text)}
    peak = peak_of_row(row(text), pp_rank, placement, [SliceBytes(sizes, sizes, {}, 5)], 2)
    assert peak.message_bytes == 5 * messages


@pytest.mark.parametrize(
    ("changes", "weight", "gradient", "optimizer"),
    [
        ({"dtype": "bf16"}, 2, 4, 12),
        ({"dtype": "bf16", "use_distributed_optimizer": True}, 2, 4, 12 / 4),
        ({"dtype": "fp32"}, 4, 4, 8),
        ({"dtype": "fp64", "optimizer": "sgd"}, 8, 8, 8),
        ({"dtype": "fp16", "optimizer": "sgd", "sgd_momentum": 0.0}, 2, 4, 4),
    ],
    ids=["bf16", "bf16_zero1", "fp32", "fp64_momentum", "fp16_sgd"],
)
def test_bytes_of_a_parameter(changes: dict[str, object], weight: float, gradient: float, optimizer: float) -> None:
    plan = resolve(small_config(**changes), 4)
    items = rank_memory(plan, 0).items
    elements = sum(layout.numel for layout in plan.buffers(0, 0))
    slack = 64 * len(plan.buffers(0, 0))
    assert items["weights"] == weight * elements + slack
    assert items["gradients"] == gradient * elements + slack
    assert items["optimizer"] == optimizer * elements


@pytest.mark.parametrize("level", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_frozen_parameters_take_the_bytes_of_their_weights_alone(level: str) -> None:
    changes = {"dtype": "bf16", "data_parallel_sharding_strategy": level}
    of_all = rank_memory(resolve(small_config(**changes), 4), 0).items
    plan = resolve(small_config(**changes, freeze=("decoder.layers.[0-5].*",)), 4)
    items, (trained, frozen) = rank_memory(plan, 0).items, plan.buffers(0, 0)
    assert (trained.trainable, frozen.trainable) == (True, False)
    gradient_shards, state_shards = (1 if level in whole else 4 for whole in (("no_shard", "optim"), ("no_shard",)))
    assert items["gradients"] == 4 * trained.numel // gradient_shards + 64
    assert items["optimizer"] == 12 * trained.numel // state_shards
    assert items["weights"] == pytest.approx(of_all["weights"], rel=0.01)  # besides padding
    assert items["activations"] < of_all["activations"]


def test_a_1f1b_rank_keeps_one_microbatch_for_each_rank_behind_it() -> None:
    plan = resolve(small_config(pipeline_model_parallel_size=4, global_batch_size=16), 4)
    for rank in all_rank_memory(plan):
        assert rank.live == {rank.pp_rank: 4 - rank.pp_rank}
        assert rank.items["activations"] == (4 - rank.pp_rank) * sum(
            stage_activation_bytes(plan, rank.pp_rank).values()
        )
        assert rank.total == sum(rank.items.values())


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "expected"), [(1, False, 34), (4, False, 10 + 24 / 4), (4, True, 34 / 4)]
)
def test_a_gpt_block_keeps_what_korthikanti_2022_says(tp: int, sequence_parallel: bool, expected: float) -> None:
    """Compare with Table 2 of the paper, without core attention.

    The paper, too, counts q, k, v (6) and the output of GELU (8); it leaves out the statistics of norms.
    """
    model = resolve_model(small_config(num_layers=1, hidden_size=256, attention_dropout=0.0).model, tp)
    shape = RankShape(2, model.seq_length, "bf16", tp, sequence_parallel)
    kept = [tensor.num_bytes for tensor in layer_trace(model_spec(model, PrecisionConfig()).layers[0], shape).kept]
    small = [size for size in kept if size <= shape.tokens * model.hidden_size // 8]  # a few numbers per token
    assert sum(kept) - sum(small) == expected * 2 * model.seq_length * model.hidden_size
    assert 0 < sum(small) < 0.02 * sum(kept)


def test_layers_are_recomputed_one_at_a_time_and_uniform_groups_at_once() -> None:
    model = resolve_model(small_config(hidden_dropout=0.0, attention_dropout=0.0).model, 1)
    layers, shape = model_spec(model, PrecisionConfig()).layers, RankShape(1, model.seq_length, "bf16")
    assert len(layers) == 8
    layer = layer_trace(layers[0], shape).kept_bytes

    def replayed(num_layers: int, *recompute: Any) -> int:
        return replay_bytes(layers[:num_layers], dataclasses.replace(shape, recompute=RecomputeConfig(*recompute)))

    for method, size, count in (("uniform", 1, 1), ("uniform", 3, 3), ("uniform", 9, 8), ("block", 3, 1)):
        assert replayed(8, "full", method, size) == count * layer  # its output in place of its input
    assert replayed(8) == 0
    assert replayed(0, "full", "uniform", 1) == 0


PATTERNS = st.lists(
    st.sampled_from(
        ["1 norm_position=after", "3 norm_position=around", "1 attention=none", "2 mlp=none", "2 ffn_hidden_size=8"]
    ),
    min_size=1,
    max_size=3,
)
RECOMPUTES = st.one_of(
    st.just(RecomputeConfig()),
    st.sampled_from(["layernorm", "mlp", "core_attn"]).map(
        lambda module: RecomputeConfig("selective", recompute_modules=(module,))
    ),
    st.builds(RecomputeConfig, st.just("full"), st.sampled_from(["uniform", "block"]), st.integers(1, 3)),
)


@settings(max_examples=60)
@given(PATTERNS, RECOMPUTES, st.booleans(), st.booleans(), st.booleans())
def test_runs_of_alike_layers_have_the_peak_of_their_layers_one_by_one(
    pattern: list[str], recompute: RecomputeConfig, has_head: bool, splits: bool, only_last: bool
) -> None:
    config = small_config(num_layers=9, layer_pattern=(*pattern, "...")).model
    model = model_spec(resolve_model(config, 1), PrecisionConfig())
    shape = RankShape(2, 32, "bf16", recompute=recompute, splits_backward=splits)
    one_by_one = dataclasses.replace(model, layers=tuple(map(dataclasses.replace, model.layers)))
    assert len(set(one_by_one.layers)) == 9 > len(model.kinds)
    stage = StageLayers(6 if only_last else 0, 9, False, has_head)
    assert backward_peak(one_by_one, shape, stage) == backward_peak(model, shape, stage)


@pytest.mark.parametrize("width", [512, 8192])
def test_a_wide_layer_peaks_over_what_the_layers_behind_it_have_left(width: int) -> None:
    shape, stage = RankShape(2, 32, "bf16"), StageLayers(0, 8, False, False)

    def spec(*pattern: str) -> ModelSpec:
        model = resolve_model(small_config(layer_pattern=pattern).model, 1)
        return model_spec(model, PrecisionConfig())

    last, first = spec("7", f"1 ffn_hidden_size={width}"), spec(f"1 ffn_hidden_size={width}", "7")
    plain, wide = (group_backward(LayerGroup((kind,), False), shape)[0] for kind in last.kinds)
    left = -7 * layer_trace(last.kinds[0], shape).kept_bytes
    assert backward_peak(last, shape, stage) == (0, wide)
    assert backward_peak(first, shape, stage) == (0, max(plain, wide + left))
    assert (wide + left > plain) is (width == 8192)


def test_bf16_reduction_copies_the_gradients_only_where_they_travel() -> None:
    changes = {"dtype": "bf16", "grad_reduce_in_bf16": True}
    alone, replicated = (rank_memory(resolve(small_config(**changes), world), 0).items for world in (1, 2))
    assert alone["reduction"] == 0
    copies = (replicated["gradients"] - 64 * len(resolve(small_config(**changes), 2).buffers(0, 0))) // 2
    goes = sum(replicated[item] for item in ("activations", "recompute", "temporaries", "messages"))
    # without overlap, copies are made when these are already freed
    assert replicated["reduction"] == max(0, copies - goes)
    few = rank_memory(
        resolve(small_config(**changes, num_layers=64, seq_length=8, global_batch_size=4, vocab_size=100), 2), 0
    ).items
    assert few["reduction"] > 0


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_graphs_hold_one_microbatch_per_slot_for_the_entire_run(schedule: str) -> None:
    grid = GRID | {"pipeline_schedule": schedule, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    without, with_graphs = (
        all_rank_memory(resolve(small_config(**grid, cuda_graph_impl=impl, micro_batch_size=1, global_batch_size=8), 4))
        for impl in ("none", "local")
    )
    plan = resolve(small_config(**grid, cuda_graph_impl="local", micro_batch_size=1, global_batch_size=8), 4)
    hidden = plan.shape.hidden_bytes(plan.config.model.hidden_size)
    for pp_rank, (before, after) in enumerate(zip(without, with_graphs, strict=True)):
        (slots,) = plan.num_slots(pp_rank).values()
        kept = sum(stage_activation_bytes(plan, pp_rank).values())
        held = sum(after.items[item] for item in ("activations", "recompute", "temporaries", "graphs"))
        messages = (
            slots * hidden * (2 if pp_rank == 0 else 1)
        )  # output and gradient of the first stage, input gradient of the last
        assert held >= slots * kept + messages
        assert held - messages <= slots * (kept + max(1, before.items["temporaries"] + before.items["recompute"]) * 3)
        assert before.items["graphs"] == 0 and before.items["messages"] == after.items["messages"]
    assert plan.num_slots(0)[0] > plan.num_slots(1)[1] == 1 or schedule == "zb-h1"


def narrow(**dtypes: str) -> dict[str, Any]:
    return {"use_precision_aware_optimizer": True} | dtypes


@pytest.mark.parametrize(
    ("dtype", "changes", "gradient", "state"),
    [
        ("bf16", {}, 4, 12),
        ("bf16", narrow(), 4, 12),
        ("bf16", narrow(main_grads_dtype="bf16"), 2, 12),
        ("bf16", narrow(main_grads_dtype="bf16", exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"), 2, 8),
        ("fp16", narrow(exp_avg_dtype="bf16"), 4, 10),
        ("fp32", narrow(main_grads_dtype="bf16", exp_avg_sq_dtype="bf16"), 2, 6),
        ("bf16", {"optimizer": "sgd"}, 4, 8),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_training_state_has_the_bytes_of_its_dtypes(
    dtype: str, changes: dict[str, Any], gradient: int, state: int
) -> None:
    sharded = {"dtype": dtype, "use_distributed_optimizer": True} | changes
    plan = resolve(small_config(**sharded), 2)
    elements, slack = plan.num_elements([0]), 64 * len(plan.buffers(0, 0))
    dtypes = plan.state_dtypes
    items = rank_memory(plan, 0).items
    assert items["gradients"] == elements * gradient + slack
    assert items["optimizer"] == elements // 2 * state
    assert reduction_bytes(plan, 0) == elements * gradient / 2
    host = rank_memory(resolve(small_config(**sharded, optimizer_cpu_offload=True), 2), 0)
    weight = {"fp32": 4, "bf16": 2, "fp16": 2}[dtype]
    copies = elements // 2 * (gradient + weight + (0 if "master" in dtypes.states else weight))
    assert (host.items["optimizer"], host.host["optimizer"]) == (0, items["optimizer"] + copies)


def test_chunks_of_an_update_count_where_a_step_has_a_lower_peak() -> None:
    shape = {"hidden_size": 512, "seq_length": 8, "micro_batch_size": 1, "num_layers": 1, "global_batch_size": 1}
    large = narrow(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    small = large | {"optimizer_cpu_offload": True}
    items = rank_memory(resolve(small_config(dtype="bf16", **shape, **large), 1), 0).items
    step = sum(items[item] for item in ("activations", "recompute", "temporaries", "messages"))
    assert items["reduction"] == 2 * 4 * 4 * 512 * 512 - step > 0
    assert rank_memory(resolve(small_config(dtype="bf16", **shape, **small), 1), 0).items["reduction"] == 0
    assert rank_memory(resolve(small_config(dtype="bf16", **shape), 1), 0).items["reduction"] == 0
