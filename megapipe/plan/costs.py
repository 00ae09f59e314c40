"""What each action of each stage costs: the clock of predicted bubbles, of the cut and of the automatic scheduler."""

from __future__ import annotations

from megapipe.plan.layer_costs import LayerCosts
from megapipe.schedule.action import Op
from megapipe.schedule.partition import Partition
from megapipe.schedule.simulate import Costs


def stage_costs(layers: LayerCosts, partition: Partition, rank_speeds: tuple[float, ...]) -> Costs:
    """Seconds of every op of every stage, relative where they come from FLOPs; messages take no time."""
    stages = [layers.of_stage(stage) for stage in partition.stages]
    smallest = max(stage.forward for stage in stages) * 1e-6  # a stage without layers still takes its turn
    seconds = {
        (index, op): max(stage.of(op), smallest)
        for index, stage in enumerate(stages)
        for op in (Op.F, Op.B, Op.I, Op.W)
    }
    return Costs(seconds, rank_speeds=rank_speeds)
