"""What each action of each stage costs, estimated from FLOPs: the clock of predicted bubbles and of the automatic scheduler."""

from __future__ import annotations

from megapipe.config.model import ModelConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.planner.flops import head_forward_flops, layer_forward_flops
from megapipe.schedule.action import Op
from megapipe.schedule.partition import Partition
from megapipe.schedule.simulate import Costs


def stage_costs(model: ModelConfig, recompute: RecomputeConfig, partition: Partition) -> Costs:
    """Relative seconds of every op of every stage: forward FLOPs (full attention), the head counted; messages take no time.

    A backward is twice the forward, half of it W; thrice with full recompute, whose replay is part of I. model: resolved.
    """
    layer = layer_forward_flops(model, causal=False)
    forward = partition.stage_costs([layer] * model.num_layers, 0.0, head_forward_flops(model))
    backward = 3.0 if recompute.recompute_granularity == "full" else 2.0
    smallest = max(forward) * 1e-6  # a stage without layers still takes its turn
    seconds = {}
    for stage, flops in enumerate(forward):
        seconds[stage, Op.F] = max(flops, smallest)
        seconds[stage, Op.B] = backward * max(flops, smallest)
        seconds[stage, Op.I] = (backward - 1.0) * max(flops, smallest)
        seconds[stage, Op.W] = max(flops, smallest)
    return Costs(seconds)
