"""Bytes that each pipeline rank needs for a training step, item by item. All ranks of one pp_rank need the same.

    weights       flat parameter buffers, padding included; asynchronous schedules have one for each version in use
    gradients     flat main-gradient buffers, fp32 (fp64)
    fp8 weights   two 8-bit copies of each weight of the fp8 linears, from the first forward of a step to the next step
    optimizer     moments of this rank's shard, and masters where the weights are narrower or have several versions;
                  none with --optimizer-cpu-offload, which keeps them in host memory
    rollback      copies of gradients, masters and moments of this rank's shard (--optimizer-post-validation)
    activations   tensors kept from forward to backward, at the step's peak, each (stage, microbatch) with its stage's
                  bytes
    recompute     what one replay in the backward recomputes, at that peak
    temporaries   other tensors that this backward makes and frees: activation gradients, gathered sequences, fp32
                  weight gradients
    graphs        what CUDA graphs hold beyond these three, in pools that nothing else can use (--cuda-graph-impl local)
    messages      hidden states and gradients that were received early or are being sent, at that peak
    reduction     bf16 copies of gradients (--grad-reduce-in-bf16): the part that exceeds the peak after activations
                  are freed
    tables        attention masks and rotary tables that all microbatches share
    microbatches  tokens, labels and what belongs to them, of the whole step

In the host's memory: what --cpu-offloading-num-layers moves there of the activations, counted above only while it is
on the device, and what --optimizer-cpu-offload does of the optimizer.

The estimate assumes CUDA kernels unless the configuration says --device cpu. Not counted: the workspace of the kernel
that runs, the allocator's slack, the CUDA context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from megapipe.layers.linear import COPIES
from megapipe.layers.table import Documents, Kept, total_bytes
from megapipe.plan.activations import (
    deferred_bytes,
    group_keeps,
    group_sizes,
    layer_groups,
    layers_of,
    replay_bytes,
    stage_bytes,
)
from megapipe.plan.offload import (
    BackwardBytes,
    GroupBytes,
    MemoryOverTime,
    backward_bytes,
    groups_of,
    host_bytes_of_row,
    row_moves,
    stage_group_bytes,
    stage_groups,
)
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.temporaries import split, temporary_bytes
from megapipe.schedule.action import Action, Op
from megapipe.schedule.lifetimes import MESSAGES, Held, Item, lifetimes
from megapipe.schedule.partition import StageLayers
from megapipe.schedule.placement import Placement

BUFFER_ALIGNMENT_BYTES = 64  # a flat buffer is allocated this much longer, so that it can start on an aligned address
TOKEN_BYTES = 16  # token and label, int64


@dataclass(frozen=True)
class Peak:
    """The moment of a step with the most activations, messages and temporaries.

    live: stage -> microbatches between F and B or W. action: the action that runs then; inside_bytes: what it makes
    and frees again.
    """

    activation_bytes: int
    message_bytes: int
    live: Mapping[int, int]
    inside_bytes: int = 0
    action: Action | None = None

    @property
    def total(self) -> int:
        return self.activation_bytes + self.message_bytes + self.inside_bytes


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank by item, in the order of the module's table, items of 0 bytes included.

    live: as in `Peak`. host: bytes in host memory.
    """

    pp_rank: int
    items: Mapping[str, int]
    live: Mapping[int, int]
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.items.values())

    @property
    def live_microbatches(self) -> float:
        """Live microbatches at the peak, averaged over the stages of the rank."""
        return sum(self.live.values()) / max(len(self.live), 1)


def rank_memory(plan: RunPlan, pp_rank: int) -> RankMemory:
    """Return every item of one rank, for a step at the full global batch size."""
    model, shape = plan.model, plan.shape
    message_bytes = shape.hidden_bytes(model.embedding.hidden)
    stages = plan.placement.stages_of(pp_rank)
    num_microbatches = plan.batch.full // plan.batch.samples_per_microbatch
    kept = {stage: sum(stage_activation_bytes(plan, stage).values()) for stage in stages}
    waiting = {stage: deferred_bytes(model, shape, plan.partition.stages[stage]) for stage in stages}
    inside = {
        (stage, op): size
        for stage in stages
        for op, size in temporary_bytes(model, shape, plan.partition.stages[stage]).items()
    }
    offloaded, host = _offloaded(plan, pp_rank, num_microbatches, kept)
    row = plan.schedule(num_microbatches).rows[pp_rank]
    peak = peak_of_row(row, pp_rank, plan.placement, kept, waiting, message_bytes, plan.send_depth, inside, offloaded)
    graphs, reusable, beside = 0, peak.total, max(kept.values())
    if plan.config.gpu.cuda_graph_impl != "none":
        slots, last, splits = plan.num_slots(pp_rank), plan.placement.num_stages - 1, plan.splits_backward
        held = graph_bytes(slots, last, kept, waiting, inside, message_bytes, splits)
        graphs, reusable, beside = max(0, held - peak.activation_bytes - peak.inside_bytes), peak.message_bytes, 0
    replay = 0
    if peak.action is not None and peak.action.op in (Op.B, Op.I):
        replay = replay_bytes(layers_of(model, plan.partition.stages[peak.action.stage]), shape)
        replay = min(replay, peak.inside_bytes)
    items = {
        **_state(plan, stages, plan.num_weight_versions(pp_rank)),
        "fp8 weights": _fp8_copies(plan, stages),
        "activations": peak.activation_bytes,
        "recompute": replay,
        "temporaries": peak.inside_bytes - replay,
        "graphs": graphs,
        "messages": peak.message_bytes,
        "reduction": max(0, _reduction(plan, stages, beside) - reusable),
        "tables": len(stages) * _tables(plan),
        "microbatches": num_microbatches * shape.tokens * _token_bytes(shape.documents),
    }
    if plan.config.optimizer.optimizer_cpu_offload:
        host["optimizer"] = _optimizer(plan, stages, plan.num_weight_versions(pp_rank))
    return RankMemory(pp_rank, items, peak.live, host)


def graph_bytes(
    num_slots: Mapping[int, int],
    last_stage: int,
    kept: Mapping[int, int],  # of a stage from F to B or I
    waiting: Mapping[int, int],  # from I to W
    inside: Mapping[tuple[int, Op], int],  # what an op of a stage makes and frees again
    message_bytes: int,
    splits: bool,  # backwards are recorded as I and W
) -> int:
    """Return what CUDA graphs hold for all stages of a rank (--cuda-graph-impl local): a pool for each slot, for the
    whole run.

    A pool is as large as one microbatch ever is: what its stage keeps, and what the backward makes and frees on top.
    Besides, a slot has fixed messages: its input is counted with what the stage keeps; its output and the gradients
    that come and go are added here.
    """
    total = 0
    for stage, slots in num_slots.items():
        halves = kept[stage] + inside[stage, Op.I], waiting[stage] + inside[stage, Op.W]
        pool = max(halves) if splits else kept[stage] + inside[stage, Op.B]
        messages = 2 * (stage < last_stage) + (stage > 0)
        total += slots * (pool + messages * message_bytes)
    return total


def all_rank_memory(plan: RunPlan) -> tuple[RankMemory, ...]:
    """Return `rank_memory` of every pp_rank."""
    return tuple(rank_memory(plan, pp_rank) for pp_rank in range(plan.topology.pp))


def stage_activation_bytes(plan: RunPlan, stage: int) -> dict[str, int]:
    """Return the bytes that a stage keeps from the forward to the backward of one microbatch, its input included, by
    name.
    """
    layers = plan.partition.stages[stage]
    found = stage_bytes(plan.model, plan.shape, layers)
    copies = [layer.attention.output_copy(plan.shape) for layer in layers_of(plan.model, layers)]
    copied = total_bytes(copy for copy in copies if copy is not None)
    return found | {"attention output copied": copied} if copied else found


def peak_of_row(
    row: Iterable[Action],
    pp_rank: int,
    placement: Placement,
    activation_bytes: Mapping[int, int],  # of a (stage, microbatch) from F to B or I, for each stage of the rank
    waiting_bytes: Mapping[int, int],  # between I and W
    message_bytes: int,
    sends_in_flight: int,  # the most of one channel
    inside_bytes: Mapping[tuple[int, Op], int] | None = None,  # what an op of a stage makes and frees again
    offloaded: MemoryOverTime | None = None,  # what is offloaded meanwhile
) -> Peak:
    """Return the peak of one row of a lowered training schedule, from what `lifetimes` says each action creates and
    frees.
    """
    sizes: dict[Held, Mapping[int, int]] = {Held.ACTIVATIONS: activation_bytes, Held.DEFERRED: waiting_bytes}

    @cache
    def total(items: tuple[Item, ...]) -> tuple[int, int]:
        """Return the bytes of activations and of messages among some items."""
        kept = sum(sizes[kind][stage] for kind, stage in items if kind in sizes)
        return kept, sum(kind in MESSAGES for kind, _ in items) * message_bytes

    live = Counter(dict.fromkeys(activation_bytes, 0))
    kept = messages = 0
    peak = Peak(0, 0, dict(live))
    for action, changes in lifetimes(row, placement, pp_rank, sends_in_flight):
        stage, op, _ = action
        created, taken = total(changes.creates), total(changes.takes)
        kept += created[0] - taken[0]
        messages += created[1] - taken[1]
        live[stage] += op is Op.F
        inside = 0 if inside_bytes is None else inside_bytes.get((stage, op), 0)
        levels = ((0, inside),) if offloaded is None else offloaded.levels(action, inside)
        for less, made in levels:
            if kept - less + messages + made > peak.total:
                peak = Peak(kept - less, messages, dict(live), made, action)
        left, freed = total(changes.leaves), total(changes.frees)
        kept += left[0] - freed[0]
        messages += left[1] - freed[1]
        live[stage] -= op in (Op.B, Op.W)
    return peak


def _offloaded(
    plan: RunPlan, pp_rank: int, num_microbatches: int, kept: Mapping[int, int]
) -> tuple[MemoryOverTime | None, dict[str, int]]:
    """Return the device memory over time and the bytes in host memory; None and nothing where no activations are
    offloaded.
    """
    if not plan.config.offload.cpu_offloading_num_layers:
        return None, {}
    held = plan.placement.stages_of(pp_rank)
    stages, groups = (
        {stage: stage_groups(plan, stage) for stage in held},
        {stage: offloaded_groups(plan, stage) for stage in held},
    )
    on_host = host_bytes_of_row(row_moves(plan, num_microbatches, pp_rank), groups)
    inside = {}
    for stage in held:
        layers = plan.partition.stages[stage]
        sizes = group_sizes(plan.config.recompute, layers.num_layers)
        inside[stage, Op.F] = BackwardBytes(plan.model.head.loss_block_bytes(plan.shape) if layers.has_head else 0)
        for op, shape in ((Op.B, plan.shape), (Op.I, split(plan.shape))):
            inside[stage, op] = backward_bytes(plan.model, shape, layers, sizes)
    return MemoryOverTime(stages, groups, kept, on_host.at, inside), {"activations": on_host.buffer_bytes}


def offloaded_groups(plan: RunPlan, stage: int, layers: StageLayers | None = None) -> tuple[GroupBytes, ...]:
    """Return what each group of a stage's layers keeps and moves for one microbatch. layers: in place of the plan's."""
    layers = layers or plan.partition.stages[stage]
    kept: list[tuple[Kept, ...]] = []
    for group in layer_groups(layers_of(plan.model, layers), plan.config.recompute):
        copy = group.layers[0].attention.output_copy(plan.shape)
        kept.append(group_keeps(group, plan.shape) + (() if copy is None else (copy,)))
    offload = plan.config.offload
    num_moved = groups_of(plan.config, layers).num_moved
    return stage_group_bytes(kept, num_moved, offload.min_offloaded_tensor_size, layers.has_embedding)


def _fp8_copies(plan: RunPlan, stages: Iterable[int]) -> int:
    """Return the bytes of the 8-bit copies of the linears' weights; Transformer Engine's are not known."""
    if plan.shape.transformer_impl != "local":
        return 0
    layers = [layer for stage in stages for layer in layers_of(plan.model, plan.partition.stages[stage])]
    return sum(COPIES * gemm.num_weights for layer in layers if layer.is_fp8 for gemm in layer.gemms(plan.topology.tp))


def _optimizer(plan: RunPlan, stages: Iterable[int], num_versions: int) -> int:
    """Return the bytes of masters and moments of this rank's shard, on the device or the host."""
    optimizer, element, wide = plan.config.optimizer, plan.shape.element, plan.shape.wide
    moments = {"adam": 2, "sgd": int(optimizer.sgd_momentum > 0)}[optimizer.optimizer]
    has_own_master = element != wide or num_versions > 1
    return _shard(plan, stages) * (moments + has_own_master) * wide


def _shard(plan: RunPlan, stages: Iterable[int]) -> int:
    """Return the elements of this rank's shard of its stages' parameters."""
    return sum(layout.numel // layout.num_shards for stage in stages for layout in plan.buffers(stage, 0))


def _state(plan: RunPlan, stages: Iterable[int], num_versions: int) -> dict[str, int]:
    """Return the bytes of weights, gradients, optimizer and rollback copies."""
    element, wide = plan.shape.element, plan.shape.wide
    optimizer = plan.config.optimizer
    moments = {"adam": 2, "sgd": int(optimizer.sgd_momentum > 0)}[optimizer.optimizer]
    layouts = [layout for stage in stages for layout in plan.buffers(stage, 0)]
    elements = sum(layout.numel for layout in layouts)
    slack = len(layouts) * BUFFER_ALIGNMENT_BYTES
    kept = 2 + moments if optimizer.optimizer_post_validation else 0
    return {
        "weights": num_versions * (elements * element + slack),
        "gradients": elements * wide + slack,
        "optimizer": 0 if optimizer.optimizer_cpu_offload else _optimizer(plan, stages, num_versions),
        "rollback": _shard(plan, stages) * kept * wide,
    }


def _reduction(plan: RunPlan, stages: Iterable[int], beside: int) -> int:
    """Return the bytes of bf16 copies of all gradients, plus `beside`, the last microbatch's activations of a stage,
    where reductions overlap with the backward.
    """
    if not plan.config.parallel.grad_reduce_in_bf16 or plan.topology.num_replicas == 1:
        return 0
    copies = 2 * sum(layout.numel for stage in stages for layout in plan.buffers(stage, 0))
    return copies + (beside if plan.config.parallel.overlap_grad_reduce else 0)


def _tables(plan: RunPlan) -> int:
    """Return the bytes of the mask and the rotary tables that all microbatches of one stage share."""
    attention, shape = plan.model.layers[0].attention, plan.shape
    rotary = 0 if shape.documents.position_ids else attention.rotary_table_bytes(shape)
    return attention.shared_mask_bytes(shape) + rotary


def _token_bytes(documents: Documents) -> int:
    return TOKEN_BYTES + 8 * documents.position_ids + 8 * documents.attention_mask + 4 * documents.loss_mask
