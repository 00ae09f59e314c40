"""The model of what NCCL's communicators hold: sizes of buffers, kinds of groups, nodes, and where it counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megapipe.plan.hardware import GIB, hardware_named
from megapipe.plan.memory import rank_memory
from megapipe.plan.nccl_memory import MIB, PEER_CHANNELS, RECEIVER, SENDER, nccl_bytes
from megapipe.plan.report import plan_text
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from tests.tiny import small_config

RING = 24 * 12 * MIB  # in a node
PAIR = 4 * 12 * MIB  # neighbours of the pipeline in a node: activations one way, gradients the other


def plan_of(world_size: int, ranks_per_node: int | None = None, **changes: Any) -> RunPlan:
    return resolve(small_config(**{"global_batch_size": 16} | changes), world_size, ranks_per_node)


def test_a_channel_has_the_buffers_of_all_protocols_on_the_receiver() -> None:
    """NCCL_BUFFSIZE, 8 steps of 640 threads with 120 elements of LL128, 8 steps of 512 threads with 8 lines of LL."""
    protocols = (4 << 20) + 8 * 640 * 120 * 8 + 8 * 512 * 8 * 16
    assert -(-protocols // (2 * MIB)) * 2 * MIB == RECEIVER and SENDER == 2 * MIB
    # two sizes of allocations that NCCL logs for an all-to-all (github.com/NVIDIA/nccl/issues/1685)
    assert (RECEIVER, SENDER) == (10485760, 2097152)


def test_an_all_to_all_of_eight_gpus_takes_what_was_measured_less_a_fifth() -> None:
    experts = plan_of(8, num_experts=8, expert_model_parallel_size=8)
    exchange = nccl_bytes(experts, 0) - 2 * RING  # sums over the world and over replicas
    assert exchange == 7 * PEER_CHANNELS * (SENDER + RECEIVER)
    assert 0.8 < exchange / 3.28e9 < 1.0


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"distributed_backend": "gloo"}], ids=["cpu", "gloo"])
def test_without_nccl_nothing_is_held(changes: dict[str, str]) -> None:
    assert nccl_bytes(plan_of(4, tensor_model_parallel_size=4, **changes), 0) == 0
    assert nccl_bytes(plan_of(1), 0) == 0


def test_every_pair_of_neighbours_has_its_communicators() -> None:
    plain = plan_of(4, pipeline_model_parallel_size=4, untie_embeddings_and_output_weights=True)
    assert [nccl_bytes(plain, rank) - RING for rank in range(4)] == [PAIR, 2 * PAIR, 2 * PAIR, PAIR]
    chunks = plan_of(
        4,
        pipeline_model_parallel_size=4,
        num_layers=32,
        num_layers_per_virtual_pipeline_stage=1,
        pipeline_schedule="interleaved",
        untie_embeddings_and_output_weights=True,
    )
    assert [nccl_bytes(chunks, rank) - RING for rank in range(4)] == [2 * PAIR] * 4  # of 8 chunks, a ring
    both_ways = plan_of(4, pipeline_model_parallel_size=4, pipeline_schedule="zb-v", num_layers=16)
    one_way = plan_of(4, pipeline_model_parallel_size=4, pipeline_schedule="zb-h1", num_layers=16)
    assert nccl_bytes(both_ways, 1) - RING == 2 * (nccl_bytes(one_way, 1) - RING) == 4 * PAIR


def test_sharded_weights_have_a_second_communicator() -> None:
    flags = {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "optim_grads"}
    once = nccl_bytes(plan_of(4, **flags), 0)
    twice = nccl_bytes(plan_of(4, **flags | {"data_parallel_sharding_strategy": "optim_grads_params"}), 0)
    assert (once, twice) == (2 * RING, 3 * RING)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("p2p", 32 * 12 * MIB), ("a2a", 3 * 32 * 12 * MIB), ("all_gather", RING)],
    ids=["ring", "all-to-all", "gather"],
)
def test_context_parallelism_holds_what_its_kind_exchanges(kind: str, expected: int) -> None:
    assert nccl_bytes(plan_of(4, context_parallel_size=4, cp_comm_type=(kind,)), 0) - 2 * RING == expected


def test_messages_over_the_network_share_their_buffers() -> None:
    two_nodes = plan_of(16, 8, global_batch_size=32, num_experts=16, expert_model_parallel_size=16)
    over_network = 2 * (2 * 16 * 10 * MIB)  # rings of the world and of replicas
    assert nccl_bytes(two_nodes, 0) - over_network == 7 * 2 * 12 * MIB + 2 * 32 * MIB


def test_the_item_is_shown_and_a_measured_value_takes_its_place() -> None:
    plan = plan_of(4, pipeline_model_parallel_size=4, device="cuda")
    memory = rank_memory(plan, 0)
    assert memory.device_bytes == memory.total + nccl_bytes(plan, 0) > memory.total
    assert "624 MiB on pp_rank 0" in plan_text(plan)
    assert "NCCL" not in plan_text(plan_of(4, pipeline_model_parallel_size=4, device="cpu"))
    measured = dataclasses.replace(hardware_named("h100"), nccl_bytes=GIB).nccl_bytes
    assert rank_memory(plan, 0, measured).device_bytes == memory.total + GIB
