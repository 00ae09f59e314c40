"""Seconds and bytes of the messages of experts, by hand; what a step gains if they overlap with computation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.extras.report.step_time import measure_overlap, step_text
from megapipe.plan.expert_overlap import expert_model, hidden_seconds
from megapipe.plan.hardware import HARDWARE, Link
from megapipe.plan.layer_time import ExpertLinks, expert_links, layer_seconds
from megapipe.plan.report import plan_text
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import predict_step, reduction_seconds, stage_seconds
from megapipe.plan.traces import layer_trace, sent_bytes
from megapipe.plan.traffic import KINDS, layer_bytes, reduction_bytes
from megapipe.schedule.action import Op
from megapipe.schedule.families import SCHEDULES
from megapipe.schedule.simulate import simulate
from megapipe.topology import Topology
from tests.tiny import small_config

H100 = HARDWARE["h100"]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def plan_of(world_size: int, ranks_per_node: int | None = None, **options: Any) -> RunPlan:
    config = small_config(
        dtype="bf16",
        add_bias_linear=False,
        **{"num_experts": 8, "global_batch_size": 32, "hidden_size": 256, "seq_length": 128, **options},
    )
    return resolve(config, world_size, ranks_per_node)


def test_an_all_to_all_takes_as_long_as_the_slower_of_node_and_network() -> None:
    links = ExpertLinks(Link(1e9, 0.0), Link(400e9, 1e-5), Link(50e9, 2e-5), ep=16, inside=8)
    assert links.shares() == (7 / 16, 8 / 16)
    assert links.exchange(1e9) == max(7 / 16 * 1e9 / 400e9 + 1e-5, 8 / 16 * 1e9 / 50e9 + 2e-5)
    within = dataclasses.replace(links, ep=8)
    assert within.exchange(1e9) == 7 / 8 * 1e9 / 400e9 + 1e-5
    assert dataclasses.replace(links, ep=1, inside=1).exchange(1e9) == 0.0


@given(
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2)),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from(("", "full", "moe")),
)
@settings(max_examples=40, deadline=None)
def test_messages_within_a_node_take_their_bytes_over_its_links(ep: int, etp: int, dp: int, replay: str) -> None:
    tp = 2
    if tp * dp % (ep * etp):
        return
    again = {"recompute_granularity": "selective", "recompute_modules": ("moe",)}
    recompute: dict[str, Any] = {"": {}, "full": FULL, "moe": again}[replay]
    plan = plan_of(tp * dp, tp=tp, sp=True, ep=ep, etp=etp, **recompute)
    (stage,) = stage_seconds(plan, dataclasses.replace(H100, node=Link(1e9, 0.0)))
    layer = plan.model.layers[0]
    sent = sum(layer_bytes(plan, layer).values())
    assert stage.forward["ep"] + stage.inputs["ep"] == pytest.approx(plan.config.model.num_layers * sent / 1e9)
    assert "ep" not in stage.weights


@pytest.mark.parametrize("etp", [1, 2])
def test_messages_of_two_levels_take_their_bytes_over_both_links(etp: int) -> None:
    options = {"moe_token_dispatcher_type": "flex", "moe_router_topk": 4, "ep": 4, "etp": etp}
    plan = plan_of(4 * etp, 2 * etp, **options)
    links = {"node": Link(4e9, 0.0), "network": Link(1e9, 0.0)}
    (stage,) = stage_seconds(plan, dataclasses.replace(H100, **links))
    sent = layer_bytes(plan, plan.model.layers[0])
    seconds = sent["ep_nodes"] / 1e9 + (sent["ep_places"] + sent.get("etp", 0.0)) / 4e9
    assert stage.forward["ep"] + stage.inputs["ep"] == pytest.approx(plan.config.model.num_layers * seconds)
    plain = layer_bytes(
        plan_of(4 * etp, 2 * etp, **options | {"moe_token_dispatcher_type": "alltoall"}), plan.model.layers[0]
    )
    assert sent["ep_nodes"] < plain["ep"]


def test_pipelined_levels_take_as_long_as_the_slower() -> None:
    plan = plan_of(4, 2, moe_token_dispatcher_type="flex", moe_router_topk=4, ep=4)
    stack = dataclasses.replace(H100.stack, pipelined_exchanges=True)
    (stage,) = stage_seconds(plan, dataclasses.replace(H100, node=Link(4e9, 0.0), network=Link(1e9, 0.0), stack=stack))
    sent = layer_bytes(plan, plan.model.layers[0])
    numbers = dict.fromkeys(sent, 0.0)  # of rows, which are known before they travel
    for message in layer_trace(plan.model.layers[0], plan.shape).messages:
        if message.name == "router" and message.group in numbers:
            numbers[message.group] += sent_bytes(message, plan.shape)
    first = numbers["ep_nodes"] / 1e9 + numbers["ep_places"] / 4e9
    rows = max((sent["ep_nodes"] - numbers["ep_nodes"]) / 1e9, (sent["ep_places"] - numbers["ep_places"]) / 4e9)
    seconds = first + rows
    assert stage.forward["ep"] + stage.inputs["ep"] == pytest.approx(plan.config.model.num_layers * seconds)


def test_every_message_has_the_latency_of_its_link() -> None:
    plan = plan_of(4, ep=4)
    (stage,) = stage_seconds(plan, dataclasses.replace(H100, node=Link(1e30, 1.0)))
    assert stage.forward["ep"] == pytest.approx(4 * 8)  # numbers of rows, rows, weights, results, of 8 layers
    assert stage.inputs["ep"] == pytest.approx(3 * 8)


def test_messages_between_nodes_are_slower_than_within_one() -> None:
    inside, across = (plan_of(16, 8, ep=ep, num_experts=16) for ep in (8, 16))
    for plan, shares in ((inside, (7 / 8, 0.0)), (across, (7 / 16, 8 / 16))):
        links = expert_links(plan, H100)
        assert links is not None and links.shares() == shares
    times = [predict_step(plan, H100).parts["ep"] for plan in (inside, across)]
    assert times[1] > times[0] > 0


def test_a_group_that_nodes_cut_unevenly_counts_by_its_fewest_ranks() -> None:
    assert Topology(dp=12, ep=4, ranks_per_node=6).least_on_a_node("ep") == 2
    assert Topology(dp=12, ep=6, ranks_per_node=4).least_on_a_node("ep") == 2
    assert Topology(dp=12, ep=6).least_on_a_node("ep") == 6


def test_a_dense_model_has_no_part_for_experts() -> None:
    plan = resolve(small_config(dtype="bf16", global_batch_size=16), 2)
    assert "ep" not in predict_step(plan, H100).parts
    assert expert_links(plan, H100) is None


def test_parts_of_a_step_add_up() -> None:
    time = predict_step(plan_of(8, 4, ep=8, pp=1, zero=True), H100)
    assert sum(time.parts.values()) == pytest.approx(time.seconds)


def test_every_expert_multiplies_its_own_rows() -> None:
    plan = plan_of(2, ep=2, moe_router_topk=2, moe_ffn_hidden_size=64)
    layer, shape = plan.model.layers[0], plan.shape
    found = layer_seconds(layer, shape, H100, H100.node).forward["gemm"]
    dense = dataclasses.replace(H100, memory_bytes_per_second=1e30)
    tokens, hidden = shape.tokens, 256
    rows = 2 * tokens // 4  # 4 of 8 experts on this rank

    def seconds(inputs: int, outputs: int, count: int) -> float:
        share = dense.gemm_share(count, outputs, inputs)
        return 2.0 * count * inputs * outputs / (dense.peak("bf16") * share)

    routed = 4 * (seconds(hidden, 64, rows) + seconds(64, hidden, rows))
    model, weights = layer.config, {"qkv": 0, "proj": hidden}
    weights["qkv"] = (model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels
    others = sum(seconds(hidden, outputs, tokens) for outputs in (*weights.values(), 8))
    assert layer_seconds(layer, shape, dense, H100.node).forward["gemm"] == pytest.approx(routed + others)
    assert found >= routed + others


def test_experts_and_dense_parameters_are_reduced_over_their_own_replicas() -> None:
    plan = plan_of(16, 8, ep=8, zero=True)  # two copies of every expert, on two nodes; 16 of the rest
    dense, experts = (reduction_bytes(plan, 0, (kind,)) for kind in KINDS)
    hardware = dataclasses.replace(H100, network=Link(1e9, 0.0), node=Link(1e12, 0.0))
    # eight network cards carry the ring of all 16, one that of each expert's two copies
    assert reduction_seconds(plan, hardware, 0) == pytest.approx(dense / 8e9 + experts / 1e9)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "dualpipe"])
@pytest.mark.parametrize("recompute", [{}, FULL], ids=["", "full"])
def test_parts_add_up_to_the_stages(schedule: str, recompute: dict[str, Any]) -> None:
    plan = plan_of(8, 4, ep=4, pp=2, pipeline_schedule=schedule, moe_layer_freq="2", **recompute)
    model = expert_model(plan, H100)
    parts = model.part_costs(model.parts(plan.placement.num_stages), overlap=False)
    stages = stage_seconds(plan, H100)
    for op in (Op.F, Op.B) if not plan.splits_backward else (Op.F, Op.I, Op.W):
        found = sum(seconds for (_, each), seconds in parts.seconds.items() if each is op)
        if op is Op.I:  # the all-to-alls of parts have F and B
            found = sum(
                parts.seconds[site, Op.B if site in model.parts(2).network else Op.I]
                for site in range(len(model.parts(2).sites))
            )
        if op is Op.W:
            found = sum(parts.seconds[site, Op.W] for site in range(len(model.parts(2).sites)))
        assert found == pytest.approx(sum(stage.of(op) for stage in stages), rel=1e-6), op


@pytest.mark.parametrize("schedule", [name for name, each in SCHEDULES.items() if each.is_synchronous])
def test_overlap_never_takes_longer_than_blocking_for_all_to_alls(schedule: str) -> None:
    options: dict[str, Any] = {"chunks": 2} if SCHEDULES[schedule].num_chunks(2) == 2 else {}
    plan = plan_of(4, 2, ep=2, pp=2, pipeline_schedule=schedule, **options)
    measures = measure_overlap(plan, H100)
    if SCHEDULES[schedule].is_automatic:
        assert measures is None
        return
    assert measures is not None
    assert measures.step_seconds <= measures.serial_seconds * (1 + 1e-9)
    assert 0.0 < measures.hidden_share <= 1.0


@pytest.mark.parametrize("microbatches", [8, 40])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "dualpipe"])
@pytest.mark.parametrize("delays", [False, True], ids=["", "delay_wgrad"])
def test_the_overlap_flag_takes_the_hidden_all_to_alls_off_the_step(
    schedule: str, delays: bool, microbatches: int
) -> None:
    """The hidden time is the difference of two simulations of all microbatches, extrapolated where there are many."""
    chunks = {"chunks": 2} if schedule == "interleaved" else {}
    options: dict[str, Any] = {"pp": 2, "ep": 2, "pipeline_schedule": schedule, **chunks}
    options["global_batch_size"] = 4 * microbatches
    without = predict_step(plan_of(4, 2, **options), H100)
    plan = plan_of(4, 2, **options, overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=delays)
    time = predict_step(plan, H100)
    gained = hidden_seconds(plan, H100)
    assert plan.batch.num_microbatches == microbatches and plan.parts is not None
    rows, model = plan.part_schedule(microbatches), expert_model(plan, H100)
    sends = plan.config.parallel.overlap_p2p_comm
    both = (dataclasses.replace(model.part_costs(plan.parts, overlap), overlap=sends) for overlap in (False, True))
    blocking, free = (simulate(rows, costs) for costs in both)
    assert gained == pytest.approx(blocking.makespan_seconds - free.makespan_seconds, rel=1e-6)
    assert gained > 0 and 0 <= time.parts["ep"] < without.parts["ep"]
    assert sum(time.parts.values()) == pytest.approx(time.seconds)
    assert f"takes {gained:.3g} s off the step" in step_text(plan, H100)


def test_the_plan_states_messages_within_and_across_nodes_and_their_time() -> None:
    plan = plan_of(16, 8, ep=16, num_experts=16)
    sent = layer_bytes(plan, plan.model.layers[0])["ep"]
    text = plan_text(plan)
    assert "groups that cross nodes: dp, ep" in text
    assert f"{plan.active_parameters:,} parameters" in text
    assert "within its node" in text and "to other nodes" in text
    assert sent > 0
    step = step_text(plan, H100)
    assert "ms a layer and microbatch to experts and back" in step
    assert "rows of parts would hide" in step
    assert "  ep " not in step_text(plan_of(2), H100)
