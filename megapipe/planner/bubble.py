"""The bubble a schedule is expected to have, from FLOPs: uneven stages, embedding and head included; messages take no time."""

from __future__ import annotations

from megapipe.planner.flops import head_forward_flops, layer_forward_flops
from megapipe.planner.run_plan import RunPlan
from megapipe.schedule.action import Op
from megapipe.schedule.simulate import Costs, Timeline, simulate


def stage_costs(plan: RunPlan) -> Costs:
    """Relative seconds of every op of every stage: forward FLOPs (full attention); backward twice that, thrice with full recompute."""
    model = plan.config.model
    layer = layer_forward_flops(model, causal=False)
    forward = plan.partition.stage_costs([layer] * model.num_layers, 0.0, head_forward_flops(model))
    backward = 3.0 if plan.config.recompute.recompute_granularity == "full" else 2.0
    smallest = max(forward) * 1e-6  # a stage without layers still takes its turn
    seconds = {}
    for stage, flops in enumerate(forward):
        seconds[stage, Op.F] = max(flops, smallest)
        seconds[stage, Op.B] = backward * max(flops, smallest)
        seconds[stage, Op.I] = (backward - 1.0) * max(flops, smallest)
        seconds[stage, Op.W] = max(flops, smallest)
    return Costs(seconds)


def predicted_timeline(plan: RunPlan, num_microbatches: int) -> Timeline:
    """The simulated step on FLOP costs; its bubble shares are ratios, its seconds have no scale."""
    return simulate(plan.schedule(num_microbatches), stage_costs(plan))
