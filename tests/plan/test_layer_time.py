"""Seconds of layers that differ: a stage takes the time that its layers take in models of their kind alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megapipe.plan.hardware import HARDWARE, Link
from megapipe.plan.layer_time import ring_link
from megapipe.plan.resolve import resolve
from megapipe.plan.step_time import predict_step, stage_seconds
from megapipe.schedule.action import Op
from megapipe.topology import Topology
from tests.tiny import small_config

KINDS = ("window_size=8 norm_position=around", "ffn_hidden_size=512", "attention=none", "mlp=none qk_layernorm=true")
# copies to the host take longer than the computation, which hides a part of them
# GEMMs without waves: small ones of other sizes take other times
SLOW = dataclasses.replace(HARDWARE["h100"], gemm_shares=((1, 0.001), (8192, 0.5)))
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ("mlp", "core_attn", "layernorm")},
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("name", CASES)
def test_a_stage_of_unlike_layers_takes_the_seconds_of_each(name: str) -> None:
    def seconds(pattern: tuple[str, ...], op: Op) -> float:
        options = {"attention_dropout": 0.0, "dtype": "bf16", "layer_pattern": pattern, **CASES[name]}
        (stage,) = stage_seconds(resolve(small_config(**options), options.get("tensor_model_parallel_size", 1)), SLOW)
        return stage.of(op)

    for op in (Op.F, Op.B, Op.I, Op.W):
        each = [seconds((f"8 {kind}",), op) for kind in KINDS]
        assert seconds(tuple(f"2 {kind}" for kind in KINDS), op) == pytest.approx(sum(each) / len(each), rel=1e-9)
        assert len(set(each)) == len(KINDS)


def test_frozen_weights_have_no_products_in_w_and_all_others() -> None:
    def seconds(freeze: tuple[str, ...]) -> dict[Op, float]:
        (stage,) = stage_seconds(resolve(small_config(dtype="bf16", freeze=freeze), 1), SLOW)
        return {op: stage.of(op) for op in (Op.F, Op.I, Op.W)}

    whole, none = seconds(()), seconds(("decoder.layers.*.linear_*.weight",))
    half = seconds(tuple(f"decoder.layers.{number}.*" for number in range(4)))
    assert all(each[op] == pytest.approx(whole[op]) for each in (half, none) for op in (Op.F, Op.I))
    assert none[Op.W] < half[Op.W] < whole[Op.W]
    assert half[Op.W] == pytest.approx((whole[Op.W] + none[Op.W]) / 2)  # the rest is that of the head


@pytest.mark.parametrize(
    ("dtype", "changes", "num_bytes"),
    [
        # norm; gradient read and written, master and moments read and written; master read and weight written
        ("bf16", {}, 4 + 2 * 4 + 2 * 12 + 4 + 2),
        ("fp32", {}, 4 + 2 * 4 + 2 * 12),  # the weight is its own master
        ("bf16", {"optimizer_impl": "compiled"}, 4 + 4 + 2 * 12 + 2),
        (
            "bf16",
            dict.fromkeys(("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), "bf16")
            | {
                "use_precision_aware_optimizer": True,
            },
            # norm of a widened gradient; gradient and moments widened, updated, narrowed; as bf16 from the master on
            (6 + 4) + 3 * 6 + 2 * 16 + 3 * 6 + 4 + 2,
        ),
    ],
    ids=["bf16", "fp32", "compiled", "narrow"],
)
def test_an_update_moves_the_bytes_of_its_dtypes(dtype: str, changes: dict[str, Any], num_bytes: int) -> None:
    config = small_config(dtype=dtype, use_distributed_optimizer=True, **changes)
    hardware = dataclasses.replace(HARDWARE["h100"], flops={"bf16": 1e15, "fp32": 1e14})
    plan = resolve(config, 2)
    moved = predict_step(plan, hardware).parts["optimizer"] * hardware.memory_bytes_per_second
    zeros = plan.num_elements([0]) * (2 if "main_grads_dtype" in changes else 4)  # of all gradients
    assert moved == pytest.approx(sum(plan.shard_elements([0]).values()) * num_bytes + zeros)


@pytest.mark.parametrize(("tp", "cards"), [(8, None), (16, 8), (32, 8)], ids=["in_a_node", "two_nodes", "four_nodes"])
def test_a_ring_between_nodes_uses_the_network_card_of_each_of_its_ranks(tp: int, cards: int | None) -> None:
    topology = Topology(tp=tp, ranks_per_node=8, allow_tp_across_nodes=True)
    node, network = Link(300e9, 1e-5), Link(20e9, 3e-5)
    link = ring_link(topology, "tp", node, network)
    between = tp // 8 - 1  # hops between nodes of one pass
    assert link.bytes_per_second == (300e9 if cards is None else cards * 20e9)
    assert link.latency_seconds == pytest.approx(between * 3e-5 + (tp - 1 - between) * 1e-5)
    assert ring_link(topology, "tp", node, Link(90e9, 3e-5)).bytes_per_second == 300e9
