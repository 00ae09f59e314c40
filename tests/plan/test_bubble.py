"""The expected bubble of a run, with and without the barrier of the gradient norm."""

from __future__ import annotations

import pytest

from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import expected_bubble
from megapipe.schedule.action import Op
from tests.tiny import small_config


def plan_of(schedule: str, is_ahead: bool) -> RunPlan:
    changes = {
        "pipeline_model_parallel_size": 4,
        "pipeline_balance": "even",
        "untie_embeddings_and_output_weights": True,
    }
    return resolve(
        small_config(pipeline_schedule=schedule, optimizer_post_validation=is_ahead, global_batch_size=32, **changes), 4
    )


@pytest.mark.parametrize(("schedule", "gains"), [("zb-h2", True), ("zb-v", True), ("1f1b", False)])
def test_without_the_barrier_zero_bubble_schedules_idle_for_uneven_stages_alone(schedule: str, gains: bool) -> None:
    with_barrier, without = (expected_bubble(plan_of(schedule, is_ahead), 16) for is_ahead in (False, True))
    assert without.work_seconds == pytest.approx(with_barrier.work_seconds)
    if gains:
        plan = plan_of(schedule, True)
        seconds = plan.stage_costs.seconds
        split = (Op.F, Op.I, Op.W)
        busiest = max(
            sum(seconds[stage, op] for stage in plan.placement.stages_of(rank) for op in split) for rank in range(4)
        )
        assert without.idle_seconds + without.work_seconds == pytest.approx(16 * busiest)
    else:
        assert without.idle_seconds == pytest.approx(with_barrier.idle_seconds)
