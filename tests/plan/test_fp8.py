"""fp8 in the plan: faster GEMMs in the linears only, bytes moved by casts, weight copies, and layers left in bf16."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.model import PrecisionConfig
from megapipe.errors import ConfigError
from megapipe.layers.linear import Casts, casts, fp8_layers
from megapipe.plan import layer_time
from megapipe.plan.hardware import HARDWARE, hardware_named
from megapipe.plan.memory import rank_memory
from megapipe.plan.report import plan_text
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import predict_step, stage_seconds
from tests.tiny import small_config

H100 = hardware_named("h100")
FREE_CASTS = Casts(*7 * [0.0])


def plan_of(world_size: int = 1, **changes: Any) -> RunPlan:
    sizes = {"num_layers": 8, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 4096, "vocab_size": 32000}
    batch = {
        "micro_batch_size": 1,
        "global_batch_size": 4 * world_size,
        "dtype": "bf16",
        "untie_embeddings_and_output_weights": True,
    }
    return resolve(small_config(**{**sizes, **batch, **changes}), world_size)


def test_every_gpu_with_fp8_multiplies_twice_as_fast_in_it() -> None:
    rates = {
        name: hardware.flops["fp8"] / hardware.flops["bf16"]
        for name, hardware in HARDWARE.items()
        if "fp8" in hardware.flops
    }
    servers = {"h100", "h800", "h200", "b200", "b300", "gb200", "gb300", "mi300x"}
    assert rates.keys() == servers | {"rtx-4090", "rtx-5090", "rtx-6000-ada", "l4", "l40s"}
    assert all(rate == pytest.approx(2.0, rel=2e-2) for rate in rates.values())


def test_a_gpu_without_fp8_is_refused_with_a_remedy() -> None:
    predict_step(plan_of(), hardware_named("a100-80"))
    with pytest.raises(
        ConfigError,
        match=r"a100-80 .*bf16, fp16.*--fp8-format",
    ):
        predict_step(plan_of(fp8_format="hybrid"), hardware_named("a100-80"))


def test_only_the_gemms_of_the_layers_linears_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """With GEMMs always at peak rate and free casts, fp8 halves the time of the linears and of nothing else."""
    hardware = dataclasses.replace(H100, gemm_shares=((1, 1.0), (2, 1.0)), memory_bytes_per_second=1e18)
    hardware = dataclasses.replace(hardware, flops=dict(hardware.flops) | {"fp8": 2 * hardware.flops["bf16"]})
    pp2: dict[str, Any] = {"world_size": 2, "pipeline_model_parallel_size": 2}
    plain = stage_seconds(plan_of(**pp2), hardware)
    monkeypatch.setattr(layer_time, "casts", lambda shape: FREE_CASTS)
    found = stage_seconds(plan_of(**pp2, fp8_format="e4m3"), hardware)
    assert found[0].forward["gemm"] == pytest.approx(plain[0].forward["gemm"] / 2)
    assert found[0].weights["gemm"] == pytest.approx(plain[0].weights["gemm"] / 2)
    assert found[1].forward["gemm"] > plain[1].forward["gemm"] / 2, "the head's is not"
    for stage in (0, 1):
        for part in ("attention", "pointwise"):
            assert (
                found[stage].forward[part] == plain[stage].forward[part]
                and found[stage].inputs[part] == plain[stage].inputs[part]
            )


@pytest.mark.parametrize(
    ("changes", "moved"),
    [({"device": "cpu"}, 2 + 27), ({"device": "cpu", "compile_pointwise": True}, 2 + 3), ({"device": "cuda"}, 2 + 3)],
    ids=["as_written", "compiled", "cuda"],
)
def test_a_cast_moves_what_its_kernels_read_and_write(changes: dict[str, Any], moved: float) -> None:
    """A cast takes one pass for the maximum, then one per operation or, always on CUDA, one fused kernel."""
    cast = casts(plan_of(fp8_format="e4m3", **changes).shape)
    transposed = moved if moved == 5 else moved + 2
    beside = moved + 1 if moved == 5 else moved + 2  # of a cast and its transpose
    assert (cast.inputs, cast.inputs_again, cast.gradients, cast.gradients_again) == (moved, transposed, beside, 0)
    found, plain = (stage_seconds(plan_of(**each), H100)[0] for each in ({"fp8_format": "e4m3"} | changes, changes))
    tokens, h = 4096, 4096
    read, written = tokens * (h + h + h + 4 * h), tokens * (3 * h + h + 4 * h + h)
    bandwidth = H100.pointwise_bytes_per_second
    assert found.forward["pointwise"] - plain.forward["pointwise"] == pytest.approx(8 * moved * read / bandwidth)
    assert found.inputs["pointwise"] - plain.inputs["pointwise"] == pytest.approx(8 * beside * written / bandwidth)
    weights = 12 * h * h
    assert found.weights["pointwise"] == pytest.approx(8 * (transposed * read + 12 * weights) / bandwidth)


def test_a_split_backward_casts_the_gradient_for_each_half() -> None:
    shape = dataclasses.replace(plan_of(fp8_format="e4m3", device="cuda").shape, splits_backward=True)
    assert (casts(shape).gradients, casts(shape).gradients_again) == (5, 5)


def test_casts_as_one_kernel_make_fp8_faster_than_bf16_and_as_written_they_eat_it_up() -> None:
    bf16, written, compiled = (
        predict_step(plan_of(**changes), H100).seconds
        for changes in ({}, {"fp8_format": "hybrid", "device": "cpu"}, {"fp8_format": "hybrid", "device": "cuda"})
    )
    assert compiled < 0.9 * bf16 and compiled < written


@given(st.integers(1, 20), st.booleans(), st.integers(0, 6), st.integers(0, 6))
def test_layers_at_the_ends_stay_in_bf16_where_that_is_asked_for(
    num_layers: int, ends: bool, first: int, last: int
) -> None:
    precision = PrecisionConfig(
        fp8_format="e4m3",
        first_last_layers_bf16=ends,
        num_layers_at_start_in_bf16=first,
        num_layers_at_end_in_bf16=last,
    )
    chosen = [first <= layer < num_layers - last or not ends for layer in range(num_layers)]
    assert [layer in fp8_layers(precision, num_layers) for layer in range(num_layers)] == chosen


SCALES = 500  # bytes: one fp32 number for each weight


@pytest.mark.parametrize("tp", [1, 2])
def test_two_copies_of_each_linears_weight_are_planned_and_named(tp: int) -> None:
    grid = {
        "world_size": 2 * tp,
        "pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": tp,
        "fp8_format": "hybrid",
    }
    whole = plan_of(**grid)
    ends = plan_of(**grid, first_last_layers_bf16=True, num_layers_at_start_in_bf16=2)
    layer = 2 * 12 * 4096 * 4096 // tp
    for plan, skipped in ((whole, (0, 0)), (ends, (2, 1))):
        counts = plan.partition.layer_counts
        found = [rank_memory(plan, rank).items["fp8 weights"] for rank in (0, 1)]
        of_weights = [layer * (count - skip) for count, skip in zip(counts, skipped, strict=True)]
        assert found == [pytest.approx(size, abs=SCALES) for size in of_weights]
    assert "fp8 weights" in plan_text(whole) and "fp8 weights" not in plan_text(plan_of())


EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 1024, "moe_shared_expert_intermediate_size": 512}
LATENT = {"multi_latent_attention": True, "position_embedding_type": "rope", "q_lora_rank": 768}


def test_copies_of_experts_latents_and_predictions_are_planned() -> None:
    grid = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 2}
    grid |= {"sequence_parallel": True, "world_size": 2, "mtp_num_layers": 1}
    common = EXPERTS | LATENT | grid | {"add_bias_linear": False, "fp8_format": "hybrid"}
    plan, ends = plan_of(**common), plan_of(**common, first_last_layers_bf16=True)
    h, model = 4096, plan.config.model
    experts = 4 * 2 * 1024 * h
    shared = 2 * 512 * h // 2
    up = 768 * 32 * model.kv_channels + model.kv_lora_rank * 32 * (model.qk_head_dim + model.v_head_dim)
    latents = h * 768 + h * (model.kv_lora_rank + model.qk_pos_emb_head_dim)  # whole on every rank
    attention = latents + (up + 32 * model.v_head_dim * h) // 2
    layer = experts + shared + attention
    every, inner = (rank_memory(each, 0).items["fp8 weights"] for each in (plan, ends))
    assert every == pytest.approx(2 * (9 * layer + 2 * h * h), abs=SCALES)
    assert inner == pytest.approx(2 * 6 * layer, abs=SCALES)  # the module is as the last layer


def test_experts_latents_and_predictions_multiply_at_the_rate_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """All GEMMs but those of router and head, each of which is half as long."""
    hardware = dataclasses.replace(H100, gemm_shares=((1, 1.0), (2, 1.0)), memory_bytes_per_second=1e18)
    hardware = dataclasses.replace(hardware, flops=dict(hardware.flops) | {"fp8": 2 * hardware.flops["bf16"]})
    common = EXPERTS | LATENT | {"add_bias_linear": False, "mtp_num_layers": 1}
    with monkeypatch.context() as patch:
        patch.setattr(layer_time, "casts", lambda shape: FREE_CASTS)
        found, plain = (stage_seconds(plan_of(**common | each), hardware)[0] for each in ({"fp8_format": "e4m3"}, {}))
    router, head = 9 * 2.0 * 4096 * 4096 * 8, 2 * 2.0 * 4096 * 4096 * 32000
    whole = (router + head) / hardware.flops["bf16"]
    assert found.forward["gemm"] - whole == pytest.approx((plain.forward["gemm"] - whole) / 2)
    cast = stage_seconds(plan_of(**common, fp8_format="e4m3"), hardware)[0]
    assert all(getattr(cast, half)["pointwise"] > getattr(found, half)["pointwise"] for half in ("forward", "inputs"))
    assert cast.weights["pointwise"] > 0


def test_layers_in_bf16_take_the_time_of_bf16() -> None:
    plain, whole, ends = (
        stage_seconds(plan_of(**changes), H100)[0]
        for changes in (
            {},
            {"fp8_format": "hybrid"},
            {
                "fp8_format": "hybrid",
                "first_last_layers_bf16": True,
                "num_layers_at_start_in_bf16": 1,
                "num_layers_at_end_in_bf16": 3,
            },
        )
    )
    for op, seconds in ends.seconds.items():
        assert seconds == pytest.approx((plain.of(op) + whole.of(op)) / 2)
