"""Checkpoints of mixtures with a predicting module: any (ep, etp, tp, pp, dp) loads bit by bit what any other saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.test_any_grid import (
    PP,
    TP,
    ZERO,
    Layout,
    Pools,
    assert_all_load,
    assert_the_way_back_changes_nothing,
    simulated,
)

EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 8,
    "moe_layer_freq": "2",
    "moe_shared_expert_intermediate_size": 8,
    "add_bias_linear": False,
    "sequence_parallel": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
    "mtp_num_layers": 1,
    "position_embedding_type": "rope",
}
LAYOUTS: dict[str, Layout] = {
    "one": (1, EXPERTS),
    "ep2_zero": (2, EXPERTS | {EP: 2} | ZERO),
    "ep2_of_dp8_two_instances": (8, EXPERTS | {EP: 2, "num_distributed_optimizer_instances": 2} | ZERO),
    "ep4_of_tp2_dp2": (4, EXPERTS | {TP: 2, EP: 4, ETP: 1}),
    "ep2_etp2_pp2_zero": (8, EXPERTS | {TP: 2, EP: 2, PP: 2} | ZERO),
    "etp4_of_tp2_dp2": (4, EXPERTS | {TP: 2, ETP: 4} | ZERO),
}


def test_every_expert_layout_loads_what_every_other_saved(tmp_path: Path) -> None:
    runtimes = {name: simulated(*layout) for name, layout in LAYOUTS.items()}
    for writer in LAYOUTS:
        assert_all_load(runtimes, writer, tmp_path / writer)


@pytest.mark.parametrize(("first", "second"), [("ep2_zero", "ep4_of_tp2_dp2"), ("etp4_of_tp2_dp2", "one")])
def test_experts_move_to_another_layout_and_back_without_a_changed_bit(
    rank_pools: Pools, tmp_path: Path, first: str, second: str
) -> None:
    assert_the_way_back_changes_nothing(rank_pools, tmp_path, LAYOUTS[first], LAYOUTS[second])
