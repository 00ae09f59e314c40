"""Traffic of a layout, by its formulas and by hand, and the share of it that leaves a node."""

from __future__ import annotations

import math

import hypothesis.strategies as st
from hypothesis import given, settings

from megapipe.extras.launch.places import boxes, group_traffic, places_text
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.traffic import messages_to, step_bytes
from megapipe.topology import AXES, Topology
from tests.tiny import plan_for

SHAPE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128 "
    "--micro-batch-size 2 --bf16 --make-vocab-size-divisible-by 1"
).split()
HIDDEN_STATES = 2 * 32 * 64 * 2  # bytes of the hidden states of one microbatch


def planned(world_size: int, ranks_per_node: int | None, **sizes: int | bool) -> RunPlan:
    flags = [
        word
        for name, value in sizes.items()
        for word in ([f"--{name}".replace("_", "-")] + ([] if value is True else [str(value)]))
    ]
    return plan_for([*SHAPE, *flags], world_size, ranks_per_node)


def test_a_pipeline_of_two_sends_one_hidden_state_a_microbatch_each_way() -> None:
    plan = planned(2, 1, pipeline_model_parallel_size=2, global_batch_size=16)
    assert [step_bytes(plan, rank)["pp"] for rank in range(2)] == [8 * HIDDEN_STATES] * 2
    assert [messages_to(plan, rank) for rank in range(2)] == [{1: 8}, {0: 8}]
    (pp, tied) = group_traffic(plan)
    assert (pp.name, pp.crossing, pp.network_bytes) == ("pp", 1, 8 * HIDDEN_STATES)
    assert (tied.name, tied.rank_bytes) == (
        "embedding",
        128 * 64 * 4,
    )  # one table of fp32 gradients: a ring of two ranks sends it once


def test_tensor_parallelism_moves_hidden_states_four_times_a_layer_and_half_step() -> None:
    plan = planned(2, None, tensor_model_parallel_size=2, global_batch_size=2, untie_embeddings_and_output_weights=True)
    expected = (
        (4 * 8 + 2 + 2) * HIDDEN_STATES / 2
    )  # layers; the embedding's all-reduce and that of the head's input gradient
    assert step_bytes(plan, 0) == {"tp": expected, "pp": 0, "replicas": 0, "embedding": 0}


def test_the_distributed_optimizer_sends_gradients_and_weights_once_and_an_all_reduce_gradients_twice() -> None:
    plain = planned(4, 2, global_batch_size=8)
    sharded = planned(4, 2, global_batch_size=8, use_distributed_optimizer=True)
    elements = [sum(layout.numel for layout in plan.buffers(0, 0)) for plan in (plain, sharded)]
    assert step_bytes(plain, 0)["replicas"] == 2 * 4 * elements[0] * 3 / 4
    assert step_bytes(sharded, 0)["replicas"] == (4 + 2) * elements[1] * 3 / 4
    (dp,) = group_traffic(sharded)
    assert (dp.ranks, dp.groups, dp.crossing, dp.network_bytes) == (4, 1, 1, dp.rank_bytes)


def test_traffic_within_a_node_is_not_on_the_network() -> None:
    plan = planned(16, 8, tensor_model_parallel_size=4, pipeline_model_parallel_size=2, global_batch_size=16)
    traffic = {group.name: group for group in group_traffic(plan)}
    assert {name: group.crossing for name, group in traffic.items()} == {
        "tp": 0,
        "pp": 8,
        "replicas": 0,
        "embedding": 8,
    }
    assert traffic["tp"].network_bytes == traffic["replicas"].network_bytes == 0
    assert traffic["pp"].network_bytes == 8 * traffic["pp"].rank_bytes


EXPERTS = {"num_experts": 8, "disable_bias_linear": True, "global_batch_size": 32}


def test_all_to_alls_leave_a_node_by_what_its_ranks_send_to_others() -> None:
    plan = planned(16, 8, expert_model_parallel_size=8, use_distributed_optimizer=True, **EXPERTS)
    traffic = {group.name: group for group in group_traffic(plan)}
    assert traffic.keys() == {"replicas", "ep", "expert_replicas"}
    assert (traffic["ep"].crossing, traffic["ep"].network_bytes) == (0, 0.0)
    copies = traffic["expert_replicas"]
    assert (copies.ranks, copies.groups, copies.crossing) == (2, 8, 8)
    assert copies.network_bytes == 8 * copies.rank_bytes
    wide = planned(16, 4, expert_model_parallel_size=8, **EXPERTS)
    exchange = {group.name: group for group in group_traffic(wide)}["ep"]
    assert exchange.crossing == exchange.groups == 2
    assert exchange.network_bytes == 4 * exchange.rank_bytes * 4 / 7  # of 7 others, 4 are on the other node
    assert exchange.rank_bytes == step_bytes(wide, 0)["ep"]


def test_experts_shared_by_tensor_parallel_ranks_send_over_etp() -> None:
    tp2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    plan = planned(4, None, **tp2, **EXPERTS)
    assert {group.name for group in group_traffic(plan)} == {"tp", "replicas", "etp", "expert_replicas"}


def test_the_places_of_experts_are_reported_in_a_small_world() -> None:
    lines = places_text(Topology(tp=2, dp=2, ep=4, expert_tp=1), ["one"])
    assert [line.split()[-2:] for line in lines] == [["ep", "etp"], ["0", "0"], ["1", "0"], ["2", "0"], ["3", "0"]]


SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    order = "-".join(draw(st.permutations(AXES)))
    sizes = {axis: draw(SIZES) for axis in AXES}
    world = sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["dp"]
    per_node = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    return Topology(**sizes, order=order, ranks_per_node=per_node, allow_tp_across_nodes=True)


@given(topologies())
@settings(max_examples=200)
def test_boxes_hold_every_rank_once_and_exactly_the_places_they_name(topology: Topology) -> None:
    found = boxes(topology)
    assert [rank for box in found for rank in box.ranks] == list(range(topology.world_size))
    for box in found:
        places = [tuple(topology.coordinates(rank)) for rank in box.ranks]
        assert len(set(places)) == math.prod(map(len, box.places)) == len(places)
        assert all(index in named for place in places for index, named in zip(place, box.places, strict=True))
        assert {topology.node_of(rank) for rank in box.ranks} == set(box.nodes)


def test_sixteen_thousand_ranks_are_reported_with_a_line_for_each_pipeline_rank() -> None:
    topology = Topology(tp=8, pp=16, dp=128, ranks_per_node=8)
    lines = places_text(topology, [f"n{node}" for node in range(2048)])
    assert len(lines) == 17
    assert lines[2].split() == ["1024-2047", "n128", "to", "n255", "(128)", "0-7", "1", "0-127", "0-7"]


def test_a_small_world_is_reported_rank_by_rank() -> None:
    lines = places_text(Topology(tp=2, pp=2, ranks_per_node=2), ["left", "right"])
    assert [line.split() for line in lines] == [
        ["rank", "host", "GPU", "pp", "dp", "tp"],
        ["0", "left", "0", "0", "0", "0"],
        ["1", "left", "1", "0", "0", "1"],
        ["2", "right", "0", "1", "0", "0"],
        ["3", "right", "1", "1", "0", "1"],
    ]
