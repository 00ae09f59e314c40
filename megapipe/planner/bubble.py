"""The bubble a schedule is expected to have, from FLOPs: uneven stages, embedding and head included; messages take no time."""

from __future__ import annotations

from megapipe.planner.run_plan import RunPlan
from megapipe.schedule.simulate import Timeline, simulate


def predicted_timeline(plan: RunPlan, num_microbatches: int) -> Timeline:
    """The simulated step on FLOP costs; its bubble shares are ratios, its seconds have no scale."""
    return simulate(plan.schedule(num_microbatches), plan.stage_costs)
