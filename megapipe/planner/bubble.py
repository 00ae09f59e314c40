"""The bubble a schedule is expected to have, from FLOPs: uneven stages, embedding and head included; messages take no time."""

from __future__ import annotations

from megapipe.planner.run_plan import RunPlan
from megapipe.schedule.simulate import Bubble, simulate


def expected_bubble(plan: RunPlan, num_microbatches: int) -> Bubble:
    """Mean over ranks of the simulated step on FLOP costs: its shares are ratios, its seconds have no scale.

    With the barrier of the norm a step lasts from the first action of any rank to the last of any; with --optimizer-post-validation as
    long as the rank that takes longest from its own first action to its last.
    """
    timeline = simulate(plan.schedule(num_microbatches), plan.stage_costs)
    if not plan.config.optimizer.optimizer_post_validation:
        return timeline.barrier_bubble
    work = timeline.work_seconds
    period = max(idle + busy for idle, busy in zip(timeline.chained_idle_seconds, work, strict=True))
    mean = sum(work) / len(work)
    return Bubble(period - mean, mean)
