"""Layers with experts on the fake device: kernels, bytes, collectives and host waits, forward and backward.

One layer of Qwen3-30B-A3B and of DeepSeek-V3 with 4,096 tokens on a rank, in bf16 and without recompute. A compiled
region counts as one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.extras.dry_run.grids import FULL, LLAMA, selective

pytestmark = pytest.mark.timeout(300)
Run = Callable[..., Any]
COMMON = LLAMA | {
    "dtype": "bf16",
    "micro_batch_size": 1,
    "seq_length": 4096,
    "vocab_size": 1024,
    "compile_blocks": "on",
    "attention_dropout": 0.0,
    "qk_layernorm": True,
    "moe_router_topk": 8,
    "moe_router_dtype": "fp32",
}
QWEN = COMMON | {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_query_groups": 4,
    "kv_channels": 128,
    "num_experts": 128,
    "moe_ffn_hidden_size": 768,
    "moe_aux_loss_coeff": (0.001,),
    "expert_model_parallel_size": 8,
    "global_batch_size": 8,
}
DEEPSEEK = COMMON | {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_query_groups": None,
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "num_experts": 256,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (1e-4,),
    "expert_model_parallel_size": 32,
    "global_batch_size": 32,
}


class Work(NamedTuple):
    """The work of one layer. operations: kernels and collectives, without the products of experts."""

    operations: float
    gigabytes: float  # of what is no GEMM or attention
    waits: float
    grouped: float  # kernels


def work_of(run: Run, world_size: int, base: dict[str, Any], held: int) -> Work:
    """Return the work of a layer. held: experts of this rank, each with two weight gradients."""
    seen = run(world_size, 0, {"num_layers": 2}, base)
    assert not seen.error, seen.error
    rows = seen.parts["1"]
    kernels, collectives, waits, num_bytes = (
        sum(row[name] for row in rows.values()) for name in ("kernels", "collectives", "waits", "num_bytes")
    )
    sent = sum(row["num_bytes"] for part, row in rows.items() if part.endswith(" messages"))
    grouped = sum(count for key, count in seen.kernels.items() if key.endswith("_grouped_mm")) / 2
    return Work(kernels - grouped - 2 * held + collectives, (num_bytes - sent) / 1e9, waits, grouped)


def test_a_layer_of_qwen3_30b_keeps_to_its_budget(run: Run) -> None:
    work = work_of(run, 8, QWEN, held=16)
    assert work.operations <= 60 and work.gigabytes <= 4 and work.waits == 1 and work.grouped == 4, work


def test_a_layer_of_deepseek_v3_keeps_to_its_budget(run: Run) -> None:
    work = work_of(run, 32, DEEPSEEK, held=8)
    # 3.8 GB of these reorder the rows that arrive, 2.1 are copies and sums of rows, 3.3 attention's
    assert work.operations <= 100 and work.gigabytes <= 11.8 and work.waits == 1 and work.grouped == 4, work


DROPPING = {"moe_expert_capacity_factor": 1.0}
WAITS: dict[str, tuple[dict[str, Any], int]] = {
    "dropless": ({}, 1),
    "one expert after the other": ({"moe_grouped_gemm": False}, 1),
    "full recompute": (FULL, 1),
    "moe recomputed": (selective("moe"), 1),
    "capacity": (DROPPING, 1),
    "capacity by position": (DROPPING | {"moe_token_drop_policy": "position"}, 1),
    "padded": (DROPPING | {"moe_pad_expert_input_to_capacity": True}, 0),
}


@pytest.mark.parametrize("name", WAITS)
def test_the_host_waits_at_most_once_in_a_forward(name: str, run: Run) -> None:
    changes, waits = WAITS[name]
    small = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 64,
        "num_experts": 16,
        "moe_ffn_hidden_size": 64,
    }
    base = QWEN | small | {"compile_blocks": "off", "num_layers": 2, "kv_channels": 16, "moe_router_topk": 2}
    seen = run(8, 0, changes, base)
    assert not seen.error, seen.error
    assert not seen.pageable_copies and not seen.mixed_devices
    assert {key: count for key, count in seen.host_reads.items() if key.startswith("model/")} == (
        {"model/dispatch.py:to_host": 2 * waits} if waits else {}
    )
