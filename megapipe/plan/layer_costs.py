"""Costs of embedding, layers, head and stages for one microbatch on one rank: relative, from FLOPs, or measured
(`measured_layers`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from megapipe.config.parallel import RecomputeConfig
from megapipe.layers.model import LayerSpec, ModelSpec
from megapipe.plan.flops import head_flops, layer_flops, replayed_flops
from megapipe.schedule.action import Op
from megapipe.schedule.partition import Partition, StageLayers
from megapipe.schedule.simulate import Costs


@dataclass(frozen=True)
class PartCost:
    """The cost of one part in F, B, I and W.

    backward is the whole backward, inputs and weights are its halves. replay is the forward that B or I repeats under
    full recompute.
    """

    forward: float = 0.0
    backward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0
    replay: float = 0.0

    def __add__(self, other: PartCost) -> PartCost:
        return PartCost(
            self.forward + other.forward,
            self.backward + other.backward,
            self.inputs + other.inputs,
            self.weights + other.weights,
            self.replay + other.replay,
        )

    def __mul__(self, count: int) -> PartCost:
        return PartCost(
            self.forward * count, self.backward * count, self.inputs * count, self.weights * count, self.replay * count
        )

    def of(self, op: Op) -> float:
        """Return the cost of one op, replays included."""
        costs = {
            Op.F: self.forward,
            Op.B: self.backward + self.replay,
            Op.I: self.inputs + self.replay,
            Op.W: self.weights,
        }
        return costs[op]

    def step(self, splits_backward: bool) -> float:
        """Return the cost of all ops of one microbatch."""
        return self.of(Op.F) + (self.of(Op.I) + self.of(Op.W) if splits_backward else self.of(Op.B))


@dataclass(frozen=True)
class LayerCosts:
    """Costs of the parts of a model.

    layers: one entry for each layer. recompute: the run's, which decides what layers are replayed.
    """

    embedding: PartCost
    layers: tuple[PartCost, ...]
    head: PartCost
    recompute: RecomputeConfig

    @cached_property
    def layers_alike(self) -> bool:
        return len(set(self.layers)) < 2

    def of_stage(self, stage: StageLayers) -> PartCost:
        """Return the cost of a stage."""
        total = self._alike(stage) if self.layers_alike else self._summed(stage)
        if stage.has_embedding:
            total += self.embedding
        return total + self.head if stage.has_head else total

    def _alike(self, stage: StageLayers) -> PartCost:
        if not stage.num_layers:
            return PartCost()
        total = self.layers[0] * stage.num_layers
        return replace(total, replay=self.layers[0].replay * self._num_recomputed(stage.num_layers))

    def _summed(self, stage: StageLayers) -> PartCost:
        first, end = stage.first_layer, stage.last_layer_exclusive
        replayed = first + self._num_recomputed(stage.num_layers)
        with_replays, without = self._sums
        return with_replays[replayed] + with_replays[first] * -1 + without[end] + without[replayed] * -1

    def _num_recomputed(self, num_layers: int) -> int:
        if self.recompute.recompute_granularity != "full":
            return 0
        if self.recompute.recompute_method == "block":
            return min(self.recompute.recompute_num_layers or 1, num_layers)
        return num_layers

    @cached_property
    def _sums(self) -> tuple[list[PartCost], list[PartCost]]:
        """Costs of the first n layers together, with replays and without."""
        plain = [replace(layer, replay=0.0) for layer in self.layers]
        return list(accumulate(self.layers, initial=PartCost())), list(accumulate(plain, initial=PartCost()))


def flop_costs(model: ModelSpec, seq_length: int, recompute: RecomputeConfig) -> LayerCosts:
    """Return relative costs: forward FLOPs with full attention, a backward twice as much, half of it W; the embedding
    costs nothing.
    """

    def part(flops: float, replay: float = 0.0) -> PartCost:
        return PartCost(flops, 2.0 * flops, flops, flops, replay)

    def layer_cost(layer: LayerSpec) -> PartCost:
        is_full = recompute.recompute_granularity == "full"
        again = replayed_flops(layer, recompute, seq_length, causal=False) if is_full else 0.0
        return part(layer_flops(layer, seq_length, causal=False), again)

    of_kind = {kind: layer_cost(kind) for kind in model.kinds}
    return LayerCosts(PartCost(), tuple(of_kind[layer] for layer in model.layers), part(head_flops(model)), recompute)


def stage_costs(layers: LayerCosts, partition: Partition, rank_speeds: tuple[float, ...]) -> Costs:
    """Return the seconds of every op of every stage, relative where they come from FLOPs; messages take no time."""
    stages = [layers.of_stage(stage) for stage in partition.stages]
    smallest = max(stage.forward for stage in stages) * 1e-6  # a stage without layers still takes some time
    seconds = {
        (index, op): max(stage.of(op), smallest)
        for index, stage in enumerate(stages)
        for op in (Op.F, Op.B, Op.I, Op.W)
    }
    return Costs(seconds, rank_speeds=rank_speeds)
