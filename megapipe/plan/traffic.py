"""What travels between ranks in a training step: bytes that one rank sends. Read by `step_time`, and by what tells a layout to people.

A ring moves (n - 1) / n of a buffer from each of its n ranks in an all-gather or a reduce-scatter, and twice that in an all-reduce, which
is one after the other. Hidden states make up what tensor parallelism sends and what goes along the pipeline; gradients and parameters
what goes between replicas. Left out are sums of a few numbers a token or a step: the loss's, the norm's, those of replicated weights.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megapipe.config.recompute import RecomputeConfig
from megapipe.plan.activations import LocalSizes
from megapipe.plan.memory import local_sizes
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Op
from megapipe.schedule.schedule import Schedule

ALL_REDUCE = 2  # collectives that it counts as
MESSAGES = {Op.SEND_F: 1, Op.SEND_B: -1}  # and how many stages further they go


@dataclass(frozen=True)
class Collectives:
    """All-gathers and reduce-scatters of hidden states over tp for one microbatch, by the part of the computation that they belong to."""

    forward: int
    inputs: int  # input gradients, and what is computed again for them
    weights: int

    def __add__(self, other: Collectives) -> Collectives:
        return Collectives(self.forward + other.forward, self.inputs + other.inputs, self.weights + other.weights)

    def __mul__(self, count: int) -> Collectives:
        return Collectives(self.forward * count, self.inputs * count, self.weights * count)

    @property
    def total(self) -> int:
        return self.forward + self.inputs + self.weights


def layer_collectives(sequence_parallel: bool, recompute: RecomputeConfig) -> Collectives:
    """Of one transformer layer: an all-reduce after attention and MLP, forward and backward; under sequence parallelism an all-gather
    before and a reduce-scatter after, and the gather of two inputs again for the weights' gradients."""
    return Collectives(4, 4 + repeated_collectives(sequence_parallel, recompute), 2 if sequence_parallel else 0)


def repeated_collectives(sequence_parallel: bool, recompute: RecomputeConfig) -> int:
    """Of a layer's forward, the collectives that a backward with recomputation does again."""
    if recompute.recompute_granularity is None:
        return 0
    if recompute.recompute_granularity == "full":
        return 4
    return 1 if sequence_parallel and "mlp" in recompute.recompute_modules else 0


def head_collectives(sequence_parallel: bool) -> Collectives:
    """Of the output layer."""
    return Collectives(1, 1, 1) if sequence_parallel else Collectives(0, ALL_REDUCE, 0)


def embedding_collectives(sequence_parallel: bool) -> Collectives:
    """Of the word embedding, whose rows lie on different ranks."""
    return Collectives(1, 0, 1) if sequence_parallel else Collectives(ALL_REDUCE, 0, 0)


def collective_bytes(sizes: LocalSizes, tp: int) -> float:
    """Of one all-gather or reduce-scatter of hidden states over tp."""
    return ring_bytes(sizes.tokens * sizes.hidden * sizes.element, tp)


def message_bytes(plan: RunPlan) -> int:
    """Of one activation or gradient from a stage to its neighbour."""
    return local_sizes(plan).hidden_states


def reduction_bytes(plan: RunPlan, stage: int) -> float:
    """Of a stage's gradients over its replicas: reduce-scatter with the distributed optimizer, else all-reduce."""
    passes = 1 if plan.config.parallel.use_distributed_optimizer else ALL_REDUCE
    return passes * ring_bytes(_elements(plan, stage) * gradient_bytes(plan), plan.topology.num_replicas)


def gather_bytes(plan: RunPlan, stage: int) -> float:
    """Of a stage's updated parameters over its replicas; 0 without the distributed optimizer."""
    if not plan.config.parallel.use_distributed_optimizer:
        return 0.0
    return ring_bytes(_elements(plan, stage) * local_sizes(plan).element, plan.topology.num_replicas)


def tied_bytes(plan: RunPlan, stage: int) -> float:
    """Of the tied embedding's gradients between the first rank and the last, all-reduced where each has summed its own over replicas."""
    shards = [layout.numel // layout.num_shards for layout in plan.buffers(stage, 0) if layout.kind == "tied"]
    return ALL_REDUCE * ring_bytes(sum(shards) * max(local_sizes(plan).element, 4), 2)


def gradient_bytes(plan: RunPlan) -> int:
    """Of one gradient as it travels between replicas."""
    return 2 if plan.config.parallel.grad_reduce_in_bf16 else max(local_sizes(plan).element, 4)


def ring_bytes(num_bytes: float, ranks: int) -> float:
    """What each of so many ranks sends when a buffer of num_bytes is gathered or reduced and scattered."""
    return num_bytes * (ranks - 1) / ranks


def stage_collectives(plan: RunPlan, stage: int) -> Collectives:
    """Over tp, of a stage and one microbatch."""
    layers, sequence_parallel = plan.partition.stages[stage], plan.config.parallel.sequence_parallel
    found = layer_collectives(sequence_parallel, plan.config.recompute) * layers.num_layers
    if layers.has_embedding:
        found += embedding_collectives(sequence_parallel)
    return found + head_collectives(sequence_parallel) if layers.has_head else found


def step_bytes(plan: RunPlan, pp_rank: int) -> dict[str, float]:
    """What a rank of this pp_rank sends in a step at the full global batch size, by group: 'tp', 'pp', 'replicas', 'embedding'."""
    row = full_schedule(plan).rows[pp_rank]
    held = plan.placement.stages_of(pp_rank)
    collectives = {stage: stage_collectives(plan, stage).total for stage in held}
    reductions = Counter(
        stage for stage, op, _ in row if op is Op.REDUCE_GRAD
    )  # more than one where a step has several updates
    return {
        "tp": sum(collectives[stage] for stage, op, _ in row if op is Op.F)
        * collective_bytes(local_sizes(plan), plan.topology.tp),
        "pp": float(sum(op in MESSAGES for _, op, _ in row) * message_bytes(plan)),
        "replicas": sum(
            reductions[stage] * (reduction_bytes(plan, stage) + gather_bytes(plan, stage)) for stage in held
        ),
        "embedding": sum(tied_bytes(plan, stage) for stage in held),
    }


def messages_to(plan: RunPlan, pp_rank: int) -> Counter[int]:
    """Messages that a rank of this pp_rank sends in a full step, by the pp_rank that they go to."""
    to: Counter[int] = Counter()
    for stage, op, microbatch in full_schedule(plan).rows[pp_rank]:
        if op in MESSAGES:
            assert microbatch is not None
            to[plan.placement.rank_of(stage + MESSAGES[op], microbatch)] += 1
    return to


def full_schedule(plan: RunPlan) -> Schedule:
    """Of a step at the full global batch size."""
    return plan.schedule(plan.batch.full // plan.batch.samples_per_microbatch)


def _elements(plan: RunPlan, stage: int) -> int:
    return sum(layout.numel for layout in plan.buffers(stage, 0))
