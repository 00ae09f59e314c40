"""The expected bubble of a schedule with its uneven stages, embedding, head and rank speeds; messages take no time."""

from __future__ import annotations

from megapipe.plan.layer_costs import LayerCosts, stage_costs
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.partition import Partition
from megapipe.schedule.simulate import Bubble, Timeline, simulate


def expected_bubble(plan: RunPlan, num_microbatches: int) -> Bubble:
    """Return the mean over ranks of the simulated step. Shares are ratios; seconds have a scale only where layers
    were measured.

    With the barrier of the norm a step lasts from the first action of any rank to the last of any; with
    --optimizer-post-validation as long as the rank that takes longest from its own first action to its last.
    """
    timeline = simulate(plan.schedule(num_microbatches), plan.stage_costs)
    work = timeline.work_seconds
    mean = sum(work) / len(work)
    return Bubble(_period(plan, timeline) - mean, mean)


def step_of_costs(plan: RunPlan, costs: LayerCosts, cut: Partition) -> float:
    """Return the seconds, in the unit of the costs, of a full step with another cut.

    At most about three pipeline fills are simulated: beyond them the steady middle grows by the work of the busiest
    rank.
    """
    full, pp = plan.batch.full // plan.batch.samples_per_microbatch, plan.topology.pp
    few = full if full <= 4 * pp else 3 * pp + full % pp
    timeline = simulate(plan.schedule(few), stage_costs(costs, cut, plan.rank_speeds))
    return _period(plan, timeline) + (full - few) * max(timeline.work_seconds) / few


def _period(plan: RunPlan, timeline: Timeline) -> float:
    """Return the time from one step to the next."""
    if not plan.config.optimizer.optimizer_post_validation:
        return timeline.makespan_seconds
    return max(idle + busy for idle, busy in zip(timeline.chained_idle_seconds, timeline.work_seconds, strict=True))
