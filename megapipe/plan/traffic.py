"""Bytes that one rank sends to others in a training step: hidden states over tp and along the pipeline, keys and values
over cp, gradients and parameters between replicas, tokens on their way to experts and back.

Left out are sums of a few numbers a token or a step: the loss's, those of norms over the heads of all ranks
(--qk-layernorm-scope projection), the gradient norm's, those of replicated weights, and the tokens of each expert,
which tp and cp ranks add for the load balancing loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from megapipe.config.parallel import RecomputeConfig
from megapipe.layers.model import LayerSpec
from megapipe.layers.moe import INDEX_BYTES
from megapipe.layers.table import ALL_REDUCE, ring_bytes
from megapipe.plan.activations import all_layers_of, layers_with_recompute, stage_traces
from megapipe.plan.muon import muon_work
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.sharded import replica_bytes
from megapipe.plan.traces import (
    CONTEXT_GROUPS,
    EXPERT_GROUPS,
    layer_trace,
    messages_over_tp,
    sent_bytes,
    split,
    with_recompute,
)
from megapipe.schedule.action import Op

KINDS = (False, True)  # of parameters: dense, experts
MESSAGES = {Op.SEND_F: 1, Op.SEND_B: -1}  # and how many stages further they go


def reduction_bytes(plan: RunPlan, stage: int, kinds: tuple[bool, ...] = KINDS) -> float:
    """Return the bytes of reducing a stage's gradients: reduce-scatter (distributed optimizer), else all-reduce. With
    several instances those of one of them.

    kinds: False for dense parameters, True for experts.
    """
    parallel = plan.config.parallel
    passes = 1 if parallel.use_distributed_optimizer else ALL_REDUCE
    return passes * _replica_bytes(plan, stage, 2 if parallel.grad_reduce_in_bf16 else plan.shape.gradient, kinds)


def gather_bytes(plan: RunPlan, stage: int, kinds: tuple[bool, ...] = KINDS) -> float:
    """Return the bytes of gathering a stage's updated parameters; 0 without the distributed optimizer."""
    if not plan.config.parallel.use_distributed_optimizer:
        return 0.0
    return _replica_bytes(plan, stage, plan.shape.element, kinds)


def instance_bytes(plan: RunPlan, stage: int, is_expert: bool) -> float:
    """Return the bytes of summing a stage's shards of gradients over the instances of the distributed optimizer."""
    num_shards, num_instances = plan.topology.sharing(is_expert)
    layouts = [layout for layout in plan.trained_buffers((stage,)) if layout.is_expert == is_expert]
    elements = sum(layout.numel // layout.num_shards for layout in layouts)
    in_bf16 = plan.config.parallel.grad_reduce_in_bf16 and num_shards == 1  # as a reduction
    return ALL_REDUCE * ring_bytes(elements * (2 if in_bf16 else plan.shape.gradient), num_instances)


def _replica_bytes(plan: RunPlan, stage: int, element: int, kinds: tuple[bool, ...]) -> float:
    held = plan.elements_by_kind((stage,))
    return sum(ring_bytes(held[kind] * element, plan.topology.sharing(kind)[0]) for kind in kinds)


def exchanged_bytes(plan: RunPlan, stage: int) -> Counter[str]:
    """Return the bytes that the layers of a stage exchange for one microbatch, by group: experts over ep and over etp,
    and attention over cp; replays included.
    """
    total: Counter[str] = Counter()
    layers = Counter(layers_with_recompute(plan.model, plan.shape, plan.partition.stages[stage]))
    for (layer, recompute), count in layers.items():
        of_layer = layer_bytes(plan, layer, (*EXPERT_GROUPS, *CONTEXT_GROUPS), recompute)
        total.update({name: count * num_bytes for name, num_bytes in of_layer.items()})  # type: ignore[misc]
    return total


def layer_bytes(
    plan: RunPlan, layer: LayerSpec, groups: Collection[str] = EXPERT_GROUPS, recompute: RecomputeConfig | None = None
) -> dict[str, float]:
    """Return the bytes that one layer sends for one microbatch, forward and backward, over each of these groups that it
    uses. recompute: of the layer; None: the plan's.
    """
    found: dict[str, float] = {}
    for whole in plan.slice_shapes:
        shape = with_recompute(whole, recompute or whole.recompute)
        traced = layer_trace(layer, split(shape) if plan.splits_backward else shape, has_levels=False)
        for each in traced.messages:
            if each.group in groups:
                found[each.group] = found.get(each.group, 0.0) + sent_bytes(each, shape)
    return found


def bytes_over_tp(plan: RunPlan, stage: int, op: Op) -> float:
    """Return the bytes of hidden states that a stage sends over tp for one microbatch, recomputed ones included.

    op: B, or I where the backward is split into I and W, as --delay-wgrad-compute always does.
    """
    if plan.topology.tp == 1:
        return 0.0
    splits_backward = op is Op.I or plan.config.parallel.delay_wgrad_compute
    total = 0.0
    for shape in map(split, plan.slice_shapes) if splits_backward else plan.slice_shapes:
        for traced in stage_traces(plan.model, shape, plan.partition.stages[stage]):
            total += sum(sent_bytes(message, shape) for message in messages_over_tp(traced, shape))
    return total


def step_bytes(plan: RunPlan, pp_rank: int) -> dict[str, float]:
    """Return the bytes that such a rank sends in a full step, by group: 'tp', 'pp', 'replicas', 'embedding'.

    For a model with experts also 'expert_replicas', 'ep' and 'etp'; with context parallelism 'cp', or 'cp_a2a' and
    'cp_p2p'; with several instances of the distributed optimizer 'shards' and 'instances' instead of most of
    'replicas', and 'expert_shards' and 'expert_instances' likewise. Of matrices that Muon exchanges the mean over the
    ranks.
    """
    row = plan.schedule(plan.batch.num_microbatches).rows[pp_rank]
    held = plan.placement.stages_of(pp_rank)
    ran = Counter((stage, op) for stage, op, _ in row)  # several reductions where a step has several updates
    slices = plan.num_slices  # all of a microbatch's together send what a whole one does
    ways = [(stage, op) for stage in held for op in (Op.B, Op.I) if ran[stage, op]]
    over_tp = sum(ran[way] * bytes_over_tp(plan, *way) for way in ways) / slices
    # the all-reduce of the tied embedding's gradients between the first rank and the last, after the replicas' sums
    tied = [layout for layout in plan.trained_buffers(held) if layout.kind == "tied"]
    tied_elements = sum(layout.numel // layout.num_shards for layout in tied)

    muon = {group: count * plan.shape.gradient for group, count in muon_work(plan, pp_rank).sent.items()}
    of_replicas = Counter({group: sent for group, sent in muon.items() if group not in ("tp", "etp")})
    of_replicas.update(replica_bytes(plan, pp_rank, row) if plan.sharding is not None else _of_updates(plan, held, ran))
    loads = 0.0  # of all experts, summed once a step for their biases
    if plan.config.model.moe_router_enable_expert_bias:
        layers = [layer for stage in held for layer in all_layers_of(plan.model, plan.partition.stages[stage])]
        states = sum(layer.num_experts for layer in layers)
        loads = ALL_REDUCE * ring_bytes(states * INDEX_BYTES, plan.topology.num_replicas)
    exchanged: Counter[str] = Counter()
    if plan.model.has_experts:
        exchanged.update({"expert_replicas": of_replicas["expert_replicas"], "etp": muon.get("etp", 0.0)})
    for stage in held:
        by_group = exchanged_bytes(plan, stage)
        exchanged.update({name: ran[stage, Op.F] / slices * sent for name, sent in by_group.items()})
    return {
        "tp": over_tp + muon.get("tp", 0.0),
        "pp": sum(count for (_, op), count in ran.items() if op in MESSAGES) * plan.message_bytes / slices,
        **{group: sent for group, sent in of_replicas.items() if sent},
        "replicas": of_replicas["replicas"] + loads,
        "embedding": ALL_REDUCE * ring_bytes(tied_elements * plan.shape.gradient, 2),
        **exchanged,
    }


def _of_updates(plan: RunPlan, held: Iterable[int], ran: Mapping[tuple[int, Op], int]) -> dict[str, float]:
    """Return the bytes that are sent over replicas, by group, where whole gradients are reduced once an update."""
    found: Counter[str] = Counter()
    for stage, is_expert in ((stage, is_expert) for stage in held for is_expert in KINDS):
        within = reduction_bytes(plan, stage, (is_expert,)) + gather_bytes(plan, stage, (is_expert,))
        between = instance_bytes(plan, stage, is_expert)
        names = plan.topology.shard_group(is_expert), "expert_instances" if is_expert else "instances"
        for name, sent in zip(names, (within, between), strict=True):
            found.update({name: ran[stage, Op.REDUCE_GRAD] * sent})
    return dict(found)


def messages_to(plan: RunPlan, pp_rank: int) -> Counter[int]:
    """Return the number of messages that a rank of this pp_rank sends in a full step, by destination pp_rank; with
    slices of microbatches, those of all slices.
    """
    to: Counter[int] = Counter()
    for stage, op, microbatch in plan.schedule(plan.batch.num_microbatches).rows[pp_rank]:
        if op in MESSAGES:
            assert microbatch is not None
            to[plan.placement.rank_of(stage + MESSAGES[op], microbatch)] += 1
    return to
