"""Software stacks, and the terms of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megapipe.errors import ConfigError
from megapipe.extras.report.step_time import TERMS, terms_text
from megapipe.plan.expert_load import ExpertLoad
from megapipe.plan.hardware import HARDWARE, WITHOUT_MATRIX_UNITS, Hardware
from megapipe.plan.layer_time import KERNELS, OpSeconds
from megapipe.plan.resolve import resolve
from megapipe.plan.stacks import OVERLAP_LAUNCHES, STACKS, stack_named
from megapipe.plan.step_time import StepTime, predict_step, stage_seconds
from megapipe.schedule.action import Op
from megapipe.trace.traced import CORE_ATTENTION, AttentionWork
from tests.tiny import small_config

H100 = HARDWARE["h100"]
PLANS: dict[str, tuple[dict[str, Any], int]] = {
    "tp": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 4),
    "cp": ({"context_parallel_size": 2}, 2),
    "experts": ({"num_experts": 4, "expert_model_parallel_size": 2, "add_bias_linear": False}, 4),
    "offload": ({"cpu_offloading_num_layers": 8, "min_offloaded_tensor_size": 1}, 1),
    "hsdp": ({"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}, 16),
}


def step(name: str, hardware: Hardware) -> StepTime:
    options, world = PLANS[name]
    config = small_config(dtype="bf16", attention_dropout=0.0, global_batch_size=32, **options)
    return predict_step(resolve(config, world, 8), hardware)


@pytest.mark.parametrize("name", PLANS)
def test_every_part_of_a_step_is_explained(name: str) -> None:
    options, world = PLANS[name]
    hardware = replace(H100, stack=STACKS["pytorch"])
    config = small_config(dtype="bf16", attention_dropout=0.0, global_batch_size=32, **options)
    plan = resolve(config, world, 8)
    parts = predict_step(plan, hardware).parts
    assert set(parts) <= set(TERMS) and "overhead" in parts
    lines = terms_text(plan, hardware).splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(parts)
    assert sum(float(line.split()[1]) for line in lines[1:]) == pytest.approx(sum(parts.values()), rel=1e-3)


@pytest.mark.parametrize("name", PLANS)
def test_an_overhead_is_a_share_of_the_kernels(name: str) -> None:
    plain, slow = (step(name, replace(H100, stack=STACKS[stack])).parts for stack in ("megapipe", "pytorch"))
    share = STACKS["pytorch"].overhead
    assert slow["overhead"] == pytest.approx(share * sum(plain[part] for part in KERNELS))
    assert "overhead" not in plain and all(slow[part] == pytest.approx(plain[part]) for part in KERNELS)


def test_messages_over_tp_take_the_stacks_times_of_the_links() -> None:
    slow = STACKS["megatron-deepspeed"]
    plain, found = (step("tp", each) for each in (H100, replace(H100, stack=slow)))
    # a backward hides no more of them than before
    assert found.parts["tp"] >= slow.message_times * plain.parts["tp"] > 0


def test_sums_over_instances_are_hidden_where_a_stack_overlaps_them() -> None:
    shown, hidden = (
        step("hsdp", replace(H100, stack=STACKS[name])).parts["reduce"] for name in ("megapipe", "pytorch")
    )
    assert shown > hidden


def test_a_host_that_launches_longer_than_the_device_computes_is_waited_for() -> None:
    options, world = PLANS["experts"]  # two experts a rank
    plan = resolve(small_config(dtype="bf16", attention_dropout=0.0, global_batch_size=32, **options), world, 8)
    slow = replace(H100.stack, launches=(1.0, 0.25))
    (plain,), (found,) = (stage_seconds(plan, replace(H100, stack=each)) for each in (H100.stack, slow))
    per_layer = (found.forward["host"] + found.inputs["host"]) / plan.config.model.num_layers
    device = sum(sum(parts.values()) for parts in (plain.forward, plain.inputs, plain.weights))
    assert per_layer == pytest.approx(1.5, rel=0.01) and 0 < device < 0.1
    fast = replace(H100.stack, launches=(1e-9, 0.0))
    assert stage_seconds(plan, replace(H100, stack=fast)) == (plain,)


def test_all_to_alls_under_other_kernels_make_launches_longer() -> None:
    seconds = OpSeconds({"gemm": 1.0, "ep": 2.0}, {"gemm": 1.0, "ep": 2.0}, {"gemm": 1.0})
    assert sum(seconds.launched(8.0, False).forward.values()) == pytest.approx(3.0 + 1 / 3)
    assert sum(seconds.launched(8.0, True).forward.values()) == pytest.approx(3.0 + 5 / 3)
    stack = replace(H100.stack, launches=(1.0, 0.25))
    assert stack.launch_seconds(4, True) == OVERLAP_LAUNCHES * stack.launch_seconds(4, False) == OVERLAP_LAUNCHES * 2.0


@pytest.mark.parametrize("imbalance", [1.0, 1.5])
def test_biases_of_experts_move_the_stacks_bytes(imbalance: float) -> None:
    options = {"num_experts": 4, "expert_model_parallel_size": 2, "moe_router_topk": 2}
    found = []
    for has_bias in (True, False):
        config = small_config(dtype="bf16", attention_dropout=0.0, add_bias_linear=has_bias, **options)
        plan = replace(resolve(config, 2, 8), expert_load=ExpertLoad(imbalance))
        seconds = [
            sum(each.forward["pointwise"] + each.inputs["pointwise"] for each in stage_seconds(plan, hardware))
            for hardware in (H100, replace(H100, stack=replace(H100.stack, bias_bytes=300.0)))
        ]
        found.append(seconds[1] - seconds[0])
    model = plan.config.model
    elements = imbalance * model.num_layers * 2 * plan.shape.own_tokens * model.hidden_size
    assert found == pytest.approx([300.0 * elements / H100.pointwise_bytes_per_second, 0.0])


def test_a_fused_softmax_moves_its_share_of_the_bytes() -> None:
    config = small_config(dtype="bf16", attention_dropout=0.1)
    plan = resolve(config, 1, 8)
    stacks = (replace(H100.stack, softmax_shares=(share, 1.0)) for share in (1.0, 0.5, 0.0))
    stages = (stage_seconds(plan, replace(H100, stack=stack)) for stack in stacks)
    whole, half, none = (stage.forward["attention"] for (stage,) in stages)
    assert whole - half == pytest.approx(half - none) and half > none


@pytest.mark.parametrize("channels", [60, 62])
def test_heads_of_odd_sizes_do_not_use_the_matrix_units(channels: int) -> None:
    work = AttentionWork(CORE_ATTENTION, Op.F, False, "", 1024, channels, 1, 1)
    aligned = work._replace(head_size=64)
    assert H100.attention_share_of(work, False) == 1 / WITHOUT_MATRIX_UNITS < H100.attention_share_of(aligned, False)
    # of the four products of a backward only one has the depth of a head
    assert H100.attention_share_of(aligned, False) < H100.attention_share_of(aligned, True)


def test_an_unknown_stack_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(ConfigError, match=r"--stack nemo .*megapipe, megatron-core"):
        stack_named("nemo")
