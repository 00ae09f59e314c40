"""Bytes that one rank sends to others in a training step.

A ring moves (n - 1) / n of a buffer from each of its n ranks in an all-gather or a reduce-scatter, and twice that in
an all-reduce, which is one after the other. Hidden states make up what tensor parallelism sends and what goes along
the pipeline; gradients and parameters what goes between replicas. Left out are sums of a few numbers a token or a
step: the loss's, the norm's, those of replicated weights.
"""

from __future__ import annotations

from collections import Counter

from megapipe.layers.model import LayerSpec, layer_table
from megapipe.layers.table import ALL_REDUCE, Collectives, RankShape
from megapipe.plan.activations import layers_of
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Op
from megapipe.schedule.schedule import Schedule

MESSAGES = {Op.SEND_F: 1, Op.SEND_B: -1}  # and how many stages further they go


def collective_bytes(shape: RankShape, hidden_size: int) -> float:
    """Return the bytes of one all-gather or reduce-scatter of hidden states over tp."""
    return ring_bytes(shape.tokens * hidden_size * shape.element, shape.tp)


def message_bytes(plan: RunPlan) -> int:
    """Return the bytes of one activation or gradient from a stage to its neighbour."""
    return plan.shape.hidden_bytes(plan.config.model.hidden_size)


def reduction_bytes(plan: RunPlan, stage: int) -> float:
    """Return the bytes of a stage's gradient reduction over its replicas: reduce-scatter with the distributed
    optimizer, else all-reduce.
    """
    passes = 1 if plan.config.parallel.use_distributed_optimizer else ALL_REDUCE
    return passes * ring_bytes(_elements(plan, stage) * gradient_bytes(plan), plan.topology.num_replicas)


def gather_bytes(plan: RunPlan, stage: int) -> float:
    """Return the bytes of gathering a stage's updated parameters over its replicas; 0 without the distributed
    optimizer.
    """
    if not plan.config.parallel.use_distributed_optimizer:
        return 0.0
    return ring_bytes(_elements(plan, stage) * plan.shape.element, plan.topology.num_replicas)


def tied_bytes(plan: RunPlan, stage: int) -> float:
    """Return the bytes of the all-reduce of the tied embedding's gradients between the first rank and the last, after
    the replicas' sums.
    """
    shards = [layout.numel // layout.num_shards for layout in plan.buffers(stage, 0) if layout.kind == "tied"]
    return ALL_REDUCE * ring_bytes(sum(shards) * max(plan.shape.element, 4), 2)


def gradient_bytes(plan: RunPlan) -> int:
    """Return the bytes of one gradient element as it is sent between replicas."""
    return 2 if plan.config.parallel.grad_reduce_in_bf16 else max(plan.shape.element, 4)


def ring_bytes(num_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends when a buffer of num_bytes is gathered, or reduced and scattered."""
    return num_bytes * (ranks - 1) / ranks


def stage_collectives(plan: RunPlan, stage: int) -> Collectives:
    """Return the collectives over tp of a stage for one microbatch, recomputed ones included."""
    model, shape, layers = plan.model, plan.shape, plan.partition.stages[stage]
    found = Collectives()
    for layer, count in Counter(layers_of(model, layers)).items():
        found += (layer_table(layer, shape).collectives + _recomputed_collectives(layer, shape)) * count
    ends = [model.embedding.table(shape)] * layers.has_embedding + [model.head.table(shape)] * layers.has_head
    return sum((operation.collectives for table in ends for operation in table.operations), found)


def _recomputed_collectives(layer: LayerSpec, shape: RankShape) -> Collectives:
    """Return the collectives of a layer's forward that a backward with recomputation does again."""
    table = layer_table(layer, shape)
    if shape.recompute.recompute_granularity == "full":
        return Collectives(inputs=table.collectives.forward)
    again = [
        operation.collectives.forward
        for part in table.parts
        for operation in part.operations
        if operation.recompute_module is not None and shape.recomputes(operation.recompute_module)
    ]
    return Collectives(inputs=sum(again))


def step_bytes(plan: RunPlan, pp_rank: int) -> dict[str, float]:
    """Return the bytes that a rank of this pp_rank sends in a full step, by group: 'tp', 'pp', 'replicas',
    'embedding'.
    """
    row = full_schedule(plan).rows[pp_rank]
    held = plan.placement.stages_of(pp_rank)
    collectives = {stage: stage_collectives(plan, stage).total for stage in held}
    reductions = Counter(
        stage for stage, op, _ in row if op is Op.REDUCE_GRAD
    )  # more than one where a step has several updates
    return {
        "tp": sum(collectives[stage] for stage, op, _ in row if op is Op.F)
        * collective_bytes(plan.shape, plan.config.model.hidden_size),
        "pp": float(sum(op in MESSAGES for _, op, _ in row) * message_bytes(plan)),
        "replicas": sum(
            reductions[stage] * (reduction_bytes(plan, stage) + gather_bytes(plan, stage)) for stage in held
        ),
        "embedding": sum(tied_bytes(plan, stage) for stage in held),
    }


def messages_to(plan: RunPlan, pp_rank: int) -> Counter[int]:
    """Return the number of messages that a rank of this pp_rank sends in a full step, by destination pp_rank."""
    to: Counter[int] = Counter()
    for stage, op, microbatch in full_schedule(plan).rows[pp_rank]:
        if op in MESSAGES:
            assert microbatch is not None
            to[plan.placement.rank_of(stage + MESSAGES[op], microbatch)] += 1
    return to


def full_schedule(plan: RunPlan) -> Schedule:
    """Return the training schedule of a step at the full global batch size."""
    return plan.schedule(plan.batch.full // plan.batch.samples_per_microbatch)


def _elements(plan: RunPlan, stage: int) -> int:
    return sum(layout.numel for layout in plan.buffers(stage, 0))
