"""Offloaded activations in the plan: bytes on the device and in host memory, time of the copies, and the report."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megapipe.formatting import bytes_text
from megapipe.plan.activations import layer_groups
from megapipe.plan.hardware import HARDWARE
from megapipe.plan.memory import moved_bytes, rank_memory, stage_activation_bytes
from megapipe.plan.report import plan_text
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import predict_step
from megapipe.schedule.action import Op
from megapipe.schedule.lifetimes import host_pieces
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


def moved(plan: RunPlan) -> list[int]:
    """Return what each offloaded unit moves for a microbatch."""
    return [sum(moved_bytes(plan, plan.partition.stages[unit], plan.shape)) for unit in sorted(plan.offloaded)]


def test_a_rank_keeps_two_layers_and_what_is_not_offloaded() -> None:
    bare, plan = one_rank(), one_rank(**ALL)
    kept = [sum(stage_activation_bytes(plan, unit).values()) for unit in range(8)]
    assert moved(plan)[1:] == kept[1:]  # the first unit has the embedding, too
    of_head = sum(stage_activation_bytes(bare, 0).values()) - 8 * kept[1]
    without, now = rank_memory(bare, 0).items["activations"], rank_memory(plan, 0).items["activations"]
    assert now <= 3 * kept[1] + of_head
    assert without == 8 * kept[1] + of_head
    assert rank_memory(plan, 0).host == {
        "activations": 7 * sum(host_pieces(kept[1]))
    }  # all but the last layer, whose backward directly follows its forward


@pytest.mark.parametrize("count", [1, 4, 8])
def test_offloading_fewer_layers_saves_less(count: int) -> None:
    plan = one_rank(**ALL | {"cpu_offloading_num_layers": count})
    more = one_rank(**ALL | {"cpu_offloading_num_layers": count - 1} if count > 1 else {})
    assert rank_memory(plan, 0).items["activations"] <= rank_memory(more, 0).items["activations"]
    assert len(plan.offloaded) == count


def test_small_tensors_stay_on_the_device() -> None:
    whole, large = one_rank(**ALL), one_rank(**ALL | {"min_offloaded_tensor_size": 1 << 20})
    assert 0.99 * sum(moved(whole)) < sum(moved(large)) < sum(moved(whole))


def test_the_input_that_a_stage_receives_moves_too() -> None:
    first, second, *_ = moved(interleaved(**ALL))
    assert first == second


def test_units_of_a_stage_are_its_offloaded_layers_one_by_one_and_the_rest() -> None:
    def units(**changes: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        plan = one_rank(**ALL | changes)
        return plan.num_units, plan.partition.layer_counts

    assert units() == ((9,), (1,) * 8 + (0,))
    assert units(cpu_offloading_num_layers=2) == ((3,), (1, 1, 6))
    checkpoints = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3}
    assert units(**checkpoints, cpu_offloading_num_layers=6) == ((3,), (3, 3, 2))
    sharded = {"data_parallel_sharding_strategy": "optim_grads_params", "data_parallel_sharding_units": 2}
    assert units(**sharded, cpu_offloading_num_layers=1) == ((4,), (1, 3, 1, 3))
    assert one_rank(**ALL).whole_stages() == one_rank(**ALL).whole_stages().in_units().whole_stages()


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
        {"recompute_memory_budget": 0.4},
    ],
    ids=["block", "budget"],
)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_what_a_layer_recomputes_does_not_depend_on_what_is_offloaded(recompute: dict[str, Any], count: int) -> None:
    whole, plan = one_rank(**recompute), one_rank(**ALL | recompute | {"cpu_offloading_num_layers": count})
    own = [each for unit in range(plan.placement.num_stages) for each in plan.layer_recompute(unit)]
    assert own == list(whole.layer_recompute(0))
    kept = sum(sum(stage_activation_bytes(plan, unit).values()) for unit in range(plan.placement.num_stages))
    assert kept == sum(stage_activation_bytes(whole, 0).values())
    of_units = [plan.stage_costs.seconds[unit, Op.B] for unit in range(plan.placement.num_stages)]
    assert sum(of_units) == pytest.approx(whole.stage_costs.seconds[0, Op.B])


def test_copies_that_no_layer_hides_take_time() -> None:
    plan = one_rank(**ALL)
    slow = dataclasses.replace(H100, host_bytes_per_second=1e9)
    bare, hidden, exposed = predict_step(one_rank(), H100), predict_step(plan, H100), predict_step(plan, slow)
    assert "host" not in bare.parts
    assert exposed.parts["host"] > hidden.parts["host"] >= 0
    count = plan.batch.num_microbatches
    both_ways = 2 * count * sum(moved(plan)[:-1]) / slow.host_bytes_per_second  # the last layer stays
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
    copied = sum(moved(plan)[:-1]) * plan.batch.num_microbatches  # the last layer stays
    assert f"host     {bytes_text(sum(memory.host.values()))} of the host's memory" in text
    assert (
        f"activations {bytes_text(memory.host['activations'])}, optimizer {bytes_text(memory.host['optimizer'])}"
        in text
    )
    assert f"{bytes_text(copied)} travel each way in a step" in text
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
