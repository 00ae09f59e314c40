"""Software stacks, and the terms of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megapipe.errors import ConfigError
from megapipe.extras.cli.command import main
from megapipe.plan.hardware import HARDWARE, Hardware
from megapipe.plan.layer_time import KERNELS
from megapipe.plan.report import TERMS, terms_text
from megapipe.plan.resolve import resolve
from megapipe.plan.stacks import STACKS, stack_named
from megapipe.plan.step_time import StepTime, predict_step
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
    shown, hidden = (step("hsdp", replace(H100, stack=STACKS[name])).parts["reduce"] for name in ("megapipe", "pytorch"))
    assert shown > hidden


def test_an_unknown_stack_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(ConfigError, match="--stack nemo is not in the table: there are megapipe, megatron-core"):
        stack_named("nemo")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world-size", "8", "--stack", "pytorch"], "--stack pytorch predicts seconds: add --gpu NAME"),
        (["--world-size", "8", "--gpu", "h100", "--stack", "nemo"], "--stack nemo is not in the table"),
        (["--world-size", "8", "--explain"], "--explain is for --world-size N ranks with one of --gpu"),
        (["--gpus", "8", "--gpu", "h100", "--explain"], "--explain is for --world-size N ranks with one of --gpu"),
    ],
    ids=["no hardware", "unknown", "explain without hardware", "explain a search"],
)
def test_a_wrong_stack_is_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "configs/llama3_8b.yaml", *words]) != 0
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("error") == 1
