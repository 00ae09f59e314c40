"""Planned bytes at an imbalance of experts against bytes of a step whose routes are forced to that imbalance."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import Tensor

from megapipe.extras.dry_run.rank import STATE, count_rank, random_reader
from megapipe.model.dispatch import Routes, ends_of, even_parts
from megapipe.plan.expert_load import ExpertLoad
from megapipe.plan.memory import rank_memory
from tests.extras.dry_run.grids import FULL, LLAMA, PP2, SP2, WIDE_EXPERTS, make_plan, selective

BF16 = {"dtype": "bf16"}
CASES: dict[str, tuple[int, float, dict[str, Any]]] = {
    "ep2": (2, 1.5, {}),
    "ep4_sp2_bf16": (8, 1.75, SP2 | BF16 | {"expert_model_parallel_size": 4}),
    "ep2_etp2_sp2": (4, 1.5, SP2 | {"expert_tensor_parallel_size": 2}),
    "full_bf16": (2, 1.5, FULL | BF16),
    "moe_again": (2, 1.25, selective("moe")),
    "activation_again_bf16": (2, 1.5, selective("layernorm", "moe_act") | BF16),
    "pp2_zb_h1_bf16": (4, 1.5, PP2 | BF16 | {"pipeline_schedule": "zb-h1"}),
    "pp2_in_parts_bf16": (
        4,
        1.5,
        PP2 | BF16 | {"overlap_moe_expert_parallel_comm": True, "num_virtual_stages_per_pipeline_rank": 2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_at_an_imbalance_counts_the_bytes_of_the_fullest_rank(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, imbalance, options = CASES[name]
    even = make_plan(ranks, WIDE_EXPERTS | options, LLAMA | {"attention_dropout": 0.0})
    plan = dataclasses.replace(even, expert_load=ExpertLoad(imbalance))
    planned, of_even = (rank_memory(each, 0) for each in (plan, even))  # traced with routes as they are
    planned_routes = Routes.of.__func__  # type: ignore[attr-defined]

    def forced(cls: type[Routes], counts: Tensor, num_rows: int, groups: Any) -> Routes:
        routes: Routes = planned_routes(cls, counts, num_rows, groups)
        arrived = int(imbalance * num_rows)
        rows = even_parts(arrived * groups.etp.size, counts.shape[0] // groups.ep.size)
        received, gathered = even_parts(arrived, groups.ep.size), (arrived,) * groups.etp.size
        return dataclasses.replace(
            routes, received=received, gathered=gathered, expert_rows=rows, ends=ends_of(rows, counts)
        )

    monkeypatch.setattr(Routes, "of", classmethod(forced))
    counted = count_rank(plan, 0, random_reader(plan))
    assert counted.peak == pytest.approx(planned.total, rel=0.015), (counted, dict(planned.items))
    assert of_even.total < 0.99 * planned.total
    assert all(planned.items.get(item, 0) == counted.items[item] for item in STATE)
