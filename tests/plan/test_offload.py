"""Offloaded activations in the plan: bytes on the device and in host memory, time of the copies, and the report."""

from __future__ import annotations

import dataclasses

import pytest

from megapipe.formatting import bytes_text
from megapipe.plan.activations import layer_groups
from megapipe.plan.hardware import HARDWARE
from megapipe.plan.memory import offloaded_groups, rank_memory, stage_activation_bytes
from megapipe.plan.report import plan_text
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import predict_step
from tests.plan.test_report import interleaved
from tests.tiny import small_config

H100 = HARDWARE["h100"]
ALL = {"cpu_offloading_num_layers": 8, "min_offloaded_tensor_size": 1}


def one_rank(**changes: object) -> RunPlan:
    sizes: dict[str, object] = {
        "num_layers": 8,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "seq_length": 4096,
        "dtype": "bf16",
    }
    return resolve(small_config(**(sizes | {"global_batch_size": 4, "attention_dropout": 0.0} | changes)), 1)


def test_a_rank_keeps_two_layers_and_what_is_not_offloaded() -> None:
    bare, plan = one_rank(), one_rank(**ALL)
    groups = offloaded_groups(plan, 0)
    assert sum(group.kept for group in groups) < sum(stage_activation_bytes(plan, 0).values())
    assert [group.moved for group in groups] == [groups[0].kept] * 8
    of_head = sum(stage_activation_bytes(plan, 0).values()) - 8 * groups[0].kept
    without, now = rank_memory(bare, 0).items["activations"], rank_memory(plan, 0).items["activations"]
    assert now <= 3 * groups[0].kept + of_head
    assert without == 8 * groups[0].kept + of_head
    assert rank_memory(plan, 0).host == {
        "activations": 7 * groups[0].host
    }  # all but the last layer, whose backward directly follows its forward


@pytest.mark.parametrize("count", [1, 4, 8])
def test_offloading_fewer_layers_saves_less(count: int) -> None:
    plan = one_rank(**ALL | {"cpu_offloading_num_layers": count})
    more = one_rank(**ALL | {"cpu_offloading_num_layers": count - 1} if count > 1 else {})
    assert rank_memory(plan, 0).items["activations"] <= rank_memory(more, 0).items["activations"]
    assert sum(group.moved > 0 for group in offloaded_groups(plan, 0)) == count


def test_small_tensors_stay_on_the_device() -> None:
    whole, large = one_rank(**ALL), one_rank(**ALL | {"min_offloaded_tensor_size": 1 << 20})
    moved = [sum(group.moved for group in offloaded_groups(plan, 0)) for plan in (whole, large)]
    assert 0.99 * moved[0] < moved[1] < moved[0]


def test_a_stage_that_receives_its_input_keeps_it_on_the_device() -> None:
    plan = interleaved(**ALL)
    first, second = (offloaded_groups(plan, stage)[0] for stage in (0, 1))
    micro, seq, hidden = (
        plan.config.training.micro_batch_size,
        plan.config.model.seq_length,
        plan.config.model.hidden_size,
    )
    assert first.moved - second.moved == micro * seq * hidden * 4 // (
        2 if plan.config.parallel.sequence_parallel else 1
    )


def test_copies_that_no_layer_hides_take_time() -> None:
    plan = one_rank(**ALL)
    slow = dataclasses.replace(H100, host_bytes_per_second=1e9)
    bare, hidden, exposed = predict_step(one_rank(), H100), predict_step(plan, H100), predict_step(plan, slow)
    assert "host" not in bare.parts
    assert exposed.parts["host"] > hidden.parts["host"] >= 0
    count = plan.batch.num_microbatches
    both_ways = 2 * count * sum(group.moved for group in offloaded_groups(plan, 0)) / slow.host_bytes_per_second
    assert exposed.seconds == pytest.approx(bare.seconds + exposed.parts["host"])
    assert 0.9 * both_ways < exposed.parts["host"] < both_ways


def test_layers_that_a_block_does_not_recompute_are_not_timed_as_recomputed() -> None:
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    plan = one_rank(**ALL | block)
    first, second, *_ = layer_groups(plan.model.layers, plan.shape)
    granularities = [group.shape(plan.shape).recompute.recompute_granularity for group in (first, second)]
    assert granularities == ["full", None]


def test_the_report_names_host_memory_and_what_travels() -> None:
    plan = one_rank(**ALL, optimizer_cpu_offload=True)
    text, memory = plan_text(plan), rank_memory(plan, 0)
    moved = sum(
        offloaded_groups(plan, unit.stage)[unit.group].moved
        for unit in plan.row_moves(plan.batch.num_microbatches, 0).moved
    )
    assert f"host     {bytes_text(sum(memory.host.values()))} of the host's memory" in text
    assert (
        f"activations {bytes_text(memory.host['activations'])}, optimizer {bytes_text(memory.host['optimizer'])}"
        in text
    )
    assert f"{bytes_text(moved)} travel each way in a step" in text
    assert "PCIe 5" in text
    assert "  host " not in plan_text(one_rank())
    assert "host     nothing of it" in plan_text(
        one_rank(cpu_offloading_num_layers=8, min_offloaded_tensor_size=1 << 40)
    )


@pytest.mark.parametrize(("dtype", "copies"), [("bf16", 4 + 2), ("fp32", 4 + 4 + 4)])
def test_offloaded_optimizer_state_has_copies_of_gradients_and_weights_on_the_host(dtype: str, copies: int) -> None:
    plan, here = (one_rank(optimizer_cpu_offload=offloaded, dtype=dtype) for offloaded in (True, False))
    there = rank_memory(plan, 0)
    assert there.host["optimizer"] == rank_memory(here, 0).items["optimizer"] + copies * plan.num_elements([0])
    assert there.items["optimizer"] == 0
