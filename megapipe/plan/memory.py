"""Bytes that each pipeline rank needs for a training step, item by item. All ranks of one pp_rank need the same.

    weights       flat parameter buffers, padding included; asynchronous schedules have one for each version in use
    gradients     flat main-gradient buffers, fp32 (fp64) or --main-grads-dtype
    gathered weights, whole gradients
                  what exists at the step's peak besides the shards that the two items above then are
                  (--data-parallel-sharding-strategy optim_grads, optim_grads_params; plan.sharded)
    optimizer     moments of this rank's shard, and masters where the weights are narrower or have several versions;
                  none with --optimizer-cpu-offload, which keeps them in host memory
    fp8 weights   two 8-bit copies of each weight of the fp8 linears, from the first forward of a step to the next step;
                  asynchronous schedules have them for each version
    activations   tensors kept from forward to backward, at the step's peak, each (stage, microbatch) with its stage's
                  bytes; with --pipe-sp-splits each (stage, slice), with the keys and values that the slices of a
                  microbatch share, and their gradients in at least fp32 while it is in the backward
    recompute     what one replay in the backward recomputes, at that peak; or what replays that have run ahead of their
                  backwards hold then (--recompute-in-bubbles)
    temporaries   other tensors that this backward makes and frees: activation gradients, gathered sequences, fp32
                  weight gradients
    graphs        what CUDA graphs hold beyond these three, in pools that nothing else can use (--cuda-graph-impl local)
    messages      hidden states and gradients that were received early or are being sent, at that peak; where stages run
                  in parts, one hidden state for what passes between two of them (plan.part_memory)
    reduction     bf16 copies of gradients (--grad-reduce-in-bf16), or what an update of narrow state widens to fp32 at
                  a time (--use-precision-aware-optimizer): the part that exceeds the peak after activations are freed
    tables        attention masks and rotary tables that all microbatches and stages share
    microbatches  tokens, labels and what belongs to them, of the whole step

In the host's memory: what --cpu-offloading-num-layers moves there of the activations, counted above only while it is
on the device, and what --optimizer-cpu-offload does of the optimizer. Offloaded tensors are counted one by one, since
small ones stay on the device; `tests/assembly/test_offload.py` compares with what a run moves.

Besides these tensors, what NCCL's communicators hold on the device (plan.nccl_memory).

The estimate assumes CUDA kernels unless the configuration says --device cpu. Not counted: the workspace of the kernel
that runs, the allocator's slack, the CUDA context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from operator import or_

from megapipe.dtypes import ELEMENT_BYTES
from megapipe.layers.table import RankShape, total_bytes
from megapipe.plan.activations import (
    all_layers_of,
    deferred_bytes,
    fp8_weight_bytes,
    group_trace,
    layer_groups,
    layers_of,
    recompute_bytes,
    replay_bytes,
    shared_bytes,
    stage_bytes,
    temporary_bytes,
)
from megapipe.plan.muon import muon_work
from megapipe.plan.nccl_memory import nccl_bytes
from megapipe.plan.part_memory import part_sizes
from megapipe.plan.run_plan import RunPlan, offloaded_groups
from megapipe.plan.sharded import NOTHING, Whole, row_bytes
from megapipe.plan.traces import layer_trace, without_recompute
from megapipe.schedule.action import Action, Op
from megapipe.schedule.lifetimes import MESSAGES, Held, Item, host_pieces, lifetimes
from megapipe.schedule.partition import StageLayers
from megapipe.schedule.placement import Placement
from megapipe.sharding.state_dtypes import CHUNK, LAST_CHANGE, MASTER, NORM_CHUNK

BUFFER_ALIGNMENT_BYTES = 64  # a flat buffer is allocated this much longer, so that it can start on an aligned address
TOKEN_BYTES = 16  # token and label, int64
SENT_MESSAGES = frozenset({Held.SENT_OUTPUT, Held.SENT_GRADIENT})
USUAL_UNITS_ON_DEVICE = 2  # offloaded groups on the device at the peak of a step: one in use, one being copied


@dataclass(frozen=True)
class Peak:
    """The moment of a step with the most activations, messages and temporaries."""

    activation_bytes: int
    message_bytes: int
    live: Mapping[int, int]  # stage -> microbatches, or slices of these, between F and B or W
    replayed_bytes: int = 0  # of the activations, those of a RECOMPUTE
    inside_bytes: int = 0  # made and freed again by the action
    action: Action | None = None  # that runs then
    whole: Whole = NOTHING  # of sharded weights and gradients

    @property
    def total(self) -> int:
        return self.activation_bytes + self.message_bytes + self.inside_bytes + sum(self.whole)


@dataclass(frozen=True)
class SliceBytes:
    """Bytes of one slice of a microbatch, or of a whole one, on one rank: by stage what it keeps from F to B or I, and
    from I to W; by stage and op what this makes and frees again.
    """

    kept: Mapping[int, int]
    waiting: Mapping[int, int]
    inside: Mapping[tuple[int, Op], int]
    message_bytes: int
    keys: Mapping[Held, Mapping[int, int]] = field(default_factory=dict)  # by stage, of all slices of a microbatch
    replayed: Mapping[int, int] = field(default_factory=dict)  # from RECOMPUTE to B or I, and `inside` of these then
    inside_replayed: Mapping[tuple[int, Op], int] = field(default_factory=dict)
    moved: Mapping[int, int] = field(default_factory=dict)  # by stage, of what it keeps: offloaded


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank."""

    pp_rank: int
    items: Mapping[str, int]  # in the order of the module's table, items of 0 bytes included
    live: Mapping[int, int]  # as in `Peak`
    host: Mapping[str, int] = field(default_factory=dict)  # bytes in host memory
    num_slices: int = 1  # of a microbatch
    nccl_bytes: int = 0  # of communicators, outside of torch's allocator; a model (plan.nccl_memory)

    @property
    def device_bytes(self) -> int:
        """Bytes of the device: tensors, and what NCCL holds."""
        return self.total + self.nccl_bytes

    @property
    def total(self) -> int:
        return sum(self.items.values())

    @property
    def live_microbatches(self) -> float:
        """Live microbatches at the peak, averaged over the stages of the rank."""
        return sum(self.live.values()) / max(len(self.live), 1) / self.num_slices


def rank_memory(plan: RunPlan, pp_rank: int, measured_nccl_bytes: int | None = None) -> RankMemory:
    """Return every item of one rank, for the step of the run that needs the most (a ramp changes the batch size).

    measured_nccl_bytes: in place of the model of what NCCL holds.
    """
    counts = sorted(plan.decisive_counts.items(), reverse=True)  # the full step first: it is the one of equal ones
    steps = [step_memory(plan, pp_rank, count, alike) for count, alike in counts]
    host = max((step.host for step in steps), key=lambda host: sum(host.values()))
    nccl = nccl_bytes(plan, pp_rank) if measured_nccl_bytes is None else measured_nccl_bytes
    return replace(max(steps, key=lambda step: step.total), host=host, nccl_bytes=nccl)


def step_memory(plan: RunPlan, pp_rank: int, count: int, num_read: int | None = None) -> RankMemory:
    """Return every item of one rank, for a step of `count` microbatches.

    num_read: the number of microbatches whose tokens are counted, if another.
    """
    model, shape = plan.model, plan.shape
    stages = plan.placement.stages_of(pp_rank)
    layers = {stage: plan.partition.stages[stage] for stage in stages}
    slices = [slice_bytes(plan, stages, of_slice) for of_slice in plan.slice_shapes]
    host = {}
    if plan.config.offload.cpu_offloading_num_layers:
        host["activations"] = _host_bytes(plan.schedule(count).rows[pp_rank], slices)
    peak = _step_peak(plan, pp_rank, count, slices)
    state = _state(plan, pp_rank)
    if plan.config.optimizer.optimizer_cpu_offload:
        host["optimizer"], state["optimizer"] = state["optimizer"] + _host_copies(plan, pp_rank), 0
    graphs, reusable, in_backward = 0, peak.total, max(max(of_slice.kept.values()) for of_slice in slices)
    if plan.config.gpu.cuda_graph_impl != "none":
        held = _graph_bytes(plan, pp_rank, slices[0])  # a whole microbatch
        graphs, reusable, in_backward = max(0, held - peak.activation_bytes - peak.inside_bytes), peak.message_bytes, 0
    replay = 0
    if peak.action is not None and peak.action.op in (Op.B, Op.I) and not peak.replayed_bytes:
        of_slice = plan.slice_shapes[(peak.action.microbatch or 0) % len(slices)]
        replay = min(replay_bytes(layers_of(model, layers[peak.action.stage]), of_slice), peak.inside_bytes)
    copies = 0  # of all gradients in bf16, made while the last microbatch's activations exist if reductions overlap
    sent_in_bf16 = plan.config.parallel.grad_reduce_in_bf16 and plan.shape.gradient_dtype != "bf16"
    if sent_in_bf16 and plan.topology.num_replicas > 1 and plan.sharding is None:
        copies = 2 * plan.elements_by_kind(stages).total() + (
            in_backward if plan.config.parallel.overlap_grad_reduce else 0
        )
    items = {
        **state,
        **({} if plan.sharding is None else peak.whole.items()),
        "activations": peak.activation_bytes - peak.replayed_bytes,
        "recompute": replay + peak.replayed_bytes,
        "temporaries": peak.inside_bytes - replay,
        "graphs": graphs,
        "messages": peak.message_bytes,
        "reduction": max(0, max(copies, _update_bytes(plan, pp_rank)) - reusable),
        "tables": reduce(or_, (shared_bytes(model, plan.slice_shapes, layers[stage]) for stage in stages)).total(),
        "microbatches": (num_read or count) * shape.tokens * _token_bytes(plan, stages),
    }
    return RankMemory(pp_rank, items, peak.live, host, plan.num_slices)


def slice_bytes(plan: RunPlan, stages: Iterable[int], shape: RankShape) -> SliceBytes:
    """Return the bytes of a slice of a microbatch, or of a whole one, on a rank with these stages."""
    model, layers = plan.model, {stage: plan.partition.stages[stage] for stage in stages}
    ops = plan.schedule(plan.batch.num_microbatches).ops
    of_stages = {stage: temporary_bytes(model, shape, held, ops) for stage, held in layers.items()}
    inside = {(stage, op): size for stage, of_ops in of_stages.items() for op, size in of_ops.items()}
    replayed, inside_replayed = dict[int, int](), dict[tuple[int, Op], int]()
    for stage, held in layers.items() if Op.RECOMPUTE in ops else ():
        replayed[stage], inside[stage, Op.RECOMPUTE] = recompute_bytes(model, shape, held)
        after = temporary_bytes(model, shape, held, ops & {Op.B, Op.I}, is_ahead=True)
        inside_replayed |= {(stage, op): size for op, size in after.items()}
    keys: dict[Held, dict[int, int]] = {Held.KEYS: {}, Held.KEY_GRADIENTS: {}}
    for stage, held in layers.items():
        traces = [
            layer_trace(layer, without_recompute(shape), has_levels=False) for layer in all_layers_of(model, held)
        ]
        keys[Held.KEYS][stage] = sum(traced.slice_keys for traced in traces)
        keys[Held.KEY_GRADIENTS][stage] = sum(traced.slice_key_gradients for traced in traces)
    return SliceBytes(
        {stage: sum(stage_bytes(model, shape, held).values()) for stage, held in layers.items()},
        {stage: deferred_bytes(model, shape, held) if Op.W in ops else 0 for stage, held in layers.items()},
        inside,
        shape.hidden_bytes(plan.config.model.hidden_size),
        keys,
        replayed,
        inside_replayed,
        {stage: sum(moved_bytes(plan, layers[stage], shape)) for stage in plan.offloaded & layers.keys()},
    )


def _token_bytes(plan: RunPlan, stages: Iterable[int]) -> int:
    """Return the bytes of each token of a microbatch, with all that belongs to it."""
    documents = plan.shape.documents
    token_bytes = TOKEN_BYTES + 8 * documents.position_ids + 4 * documents.loss_mask
    token_bytes += 8 * plan.shape.cp * documents.attention_mask + 4 * documents.borders  # at most one border a token
    if any(plan.partition.stages[stage].has_head for stage in stages):  # tokens, labels and mask of each prediction
        token_bytes += len(plan.model.predictions) * (TOKEN_BYTES + 4)
    return token_bytes


def _step_peak(plan: RunPlan, pp_rank: int, count: int, slices: Sequence[SliceBytes]) -> Peak:
    """Return the peak of a step; where stages run in parts, `live` and `action` are those of stages."""
    parts, stages = plan.parts, plan.placement.stages_of(pp_rank)
    schedule = plan.schedule(count) if parts is None else plan.part_schedule(count)
    row = stage_row = schedule.rows[pp_rank]
    if parts is not None:
        slices = [SliceBytes(*part_sizes(plan, parts, stages), plan.message_bytes)]
        stage_row = parts.stage_row(row)
    whole = None if plan.sharding is None else row_bytes(plan, pp_rank, stage_row).whole
    peak = peak_of_row(row, pp_rank, schedule.placement, slices, plan.send_depth, whole)
    if parts is None:
        return peak
    live = {stage: peak.live[parts.of_stage[stage][0]] for stage in stages}
    action = None if peak.action is None else peak.action._replace(stage=parts.sites[peak.action.stage].stage)
    return replace(peak, live=live, action=action)


def _state(plan: RunPlan, pp_rank: int) -> dict[str, int]:
    """Return the bytes of weights, gradients, masters and moments of this rank's shard, and 8-bit copies."""
    stages, num_versions = plan.placement.stages_of(pp_rank), plan.num_weight_versions(pp_rank)
    element, dtypes = plan.shape.element, plan.state_dtypes
    elements, shard = plan.elements_by_kind(stages).total(), plan.shard_elements(stages)
    weights = gradients = elements
    gathers = plan.sharding is not None and plan.sharding.gathers
    if plan.sharding is not None:  # of both, or of gradients only shards are kept
        gradients = sum(shard.values())
        weights = gradients if gathers else elements
    layouts = [layout for stage in stages for layout in plan.buffers(stage, 0)]
    frozen = sum(each.numel // (each.num_shards if gathers else 1) for each in layouts if not each.trainable)
    slack = len(layouts) * BUFFER_ALIGNMENT_BYTES
    copies = 0  # Transformer Engine's copies are not known
    if plan.config.precision.fp8_format is not None and plan.shape.transformer_impl == "local":
        held = (plan.partition.stages[stage] for stage in stages)
        copies = sum(fp8_weight_bytes(plan.model, plan.shape, layers) for layers in held)
    return {
        "weights": num_versions * (weights * element + slack) + frozen * element,
        "gradients": (1 + plan.accumulates_apart)
        * (gradients * dtypes.gradient_bytes + BUFFER_ALIGNMENT_BYTES * len(plan.trained_buffers(stages))),
        "optimizer": sum(count * dtypes.state_bytes(kind) for kind, count in shard.items()),
        "fp8 weights": num_versions * copies,
    }


def _host_copies(plan: RunPlan, pp_rank: int) -> int:
    """Return the bytes in host memory besides the optimizer's state: copies of this rank's shard of gradients and
    weights, and master weights where fp32 weights on the device are their own.
    """
    dtypes, element = plan.state_dtypes, plan.shape.element
    num_elements = sum(plan.shard_elements(plan.placement.stages_of(pp_rank)).values())
    return num_elements * (dtypes.gradient_bytes + element + (0 if MASTER in dtypes.states else element))


def _update_bytes(plan: RunPlan, pp_rank: int) -> int:
    """Return the bytes that an update makes on the device: a chunk's, and with --delay-error-feedback all masters."""
    before, dtypes, optimizer = 0, plan.state_dtypes, plan.config.optimizer
    if optimizer.delay_error_feedback and not optimizer.optimizer_cpu_offload:
        elements = sum(plan.shard_elements(plan.placement.stages_of(pp_rank)).values())
        before = elements * ELEMENT_BYTES[dtypes.states[LAST_CHANGE]]
    return before + _chunk_bytes(plan, pp_rank)


def _chunk_bytes(plan: RunPlan, pp_rank: int) -> int:
    """Return the bytes of the largest chunk that an update, or the norm of the gradients, makes on the device."""
    stages, dtypes = plan.placement.stages_of(pp_rank), plan.state_dtypes
    elements = plan.shard_elements(stages)
    of_norm = 4 * min(NORM_CHUNK, sum(elements.values())) if dtypes.gradient_bytes < 4 else 0
    if elements[True]:
        return (elements[True] + muon_work(plan, pp_rank).temporary_elements) * dtypes.gradient_bytes
    if not (dtypes.is_narrow or dtypes.rule_bytes) or plan.config.optimizer.optimizer_cpu_offload:
        return of_norm
    shards = ((bucket, layout) for layout in plan.trained_buffers(stages) for bucket in layout.buckets)
    sizes = (
        min(max(slot.numel for slot in bucket.slots), (bucket.stop - bucket.start) // layout.num_shards)
        for bucket, layout in shards
    )
    largest = max(sizes, default=0)
    return max(of_norm, dtypes.update_bytes * min(CHUNK, largest))


def _graph_bytes(plan: RunPlan, pp_rank: int, size: SliceBytes) -> int:
    """Return what CUDA graphs hold for all stages of a rank (--cuda-graph-impl local): a pool for each slot.

    A pool is as large as one microbatch ever is: what its stage keeps, and what the backward makes and frees on top.
    Besides, a slot has fixed messages: its input is part of what the stage keeps; its output and the gradients that
    come and go are added here.
    """
    total, last_stage = 0, plan.placement.num_stages - 1
    for stage, slots in plan.num_slots(pp_rank).items():
        if plan.splits_backward:  # recorded as I and W
            of_i, of_w = size.inside[stage, Op.I], size.inside[stage, Op.W]
            pool = max(size.kept[stage] + of_i, size.waiting[stage] + of_w)
        else:
            pool = size.kept[stage] + size.inside[stage, Op.B]
        messages = 2 * (stage < last_stage) + (stage > 0)
        total += slots * (pool + messages * plan.message_bytes)
    return total


def all_rank_memory(plan: RunPlan, measured_nccl_bytes: int | None = None) -> tuple[RankMemory, ...]:
    """Return `rank_memory` of every pp_rank."""
    return tuple(rank_memory(plan, pp_rank, measured_nccl_bytes) for pp_rank in range(plan.topology.pp))


def stage_activation_bytes(plan: RunPlan, stage: int) -> dict[str, int]:
    """Return the bytes that a stage keeps from forward to backward of one microbatch, or of its first slice, its input
    included, by name.
    """
    return stage_bytes(plan.model, plan.slice_shapes[0], plan.partition.stages[stage])


def peak_of_row(
    row: Iterable[Action],
    pp_rank: int,
    placement: Placement,
    slices: Sequence[SliceBytes],  # of a microbatch; a whole one alone without slices
    sends_in_flight: int,  # the most of one channel
    whole: Sequence[Whole] | None = None,  # of sharded weights and gradients, at each action
) -> Peak:
    """Return the peak of one row of a lowered training schedule, a fold over what each action creates and frees."""
    largest = max(size.message_bytes for size in slices)

    @cache
    def total(items: tuple[Item, ...], index: int) -> tuple[int, int]:
        """Return the bytes of activations and of messages among some items of a slice."""
        size = slices[index]
        sizes = {Held.ACTIVATIONS: size.kept, Held.REPLAYED: size.replayed, Held.DEFERRED: size.waiting, **size.keys}
        sizes[Held.OFFLOADED] = size.moved
        kept = sum(sizes[kind][stage] for kind, stage in items if kind in sizes)
        messages = [kind for kind, _ in items if kind in MESSAGES]
        num_sent = sum(kind in SENT_MESSAGES for kind in messages)
        # a send frees one of another slice: all count as the largest
        return kept, num_sent * largest + (len(messages) - num_sent) * size.message_bytes

    live = Counter(dict.fromkeys(slices[0].kept, 0))
    kept = messages = replayed = 0
    peak = Peak(0, 0, dict(live))
    for slot, (action, changes) in enumerate(lifetimes(row, placement, pp_rank, sends_in_flight, len(slices))):
        stage, op, number = action
        index = (number or 0) % len(slices)
        created, taken = total(changes.creates, index), total(changes.takes, index)
        kept += created[0] - taken[0]
        messages += created[1] - taken[1]
        live[stage] += op is Op.F
        of_slice, is_replayed = slices[index], (Held.REPLAYED, stage) in changes.frees
        inside = (of_slice.inside_replayed if is_replayed else of_slice.inside).get((stage, op), 0)
        replayed += of_slice.replayed[stage] if op is Op.RECOMPUTE else 0
        unsharded = NOTHING if whole is None else whole[slot]
        if kept + messages + inside + sum(unsharded) > peak.total:
            peak = Peak(kept, messages, dict(live), replayed, inside, action, unsharded)
        left, freed = total(changes.leaves, index), total(changes.frees, index)
        kept += left[0] - freed[0]
        messages += left[1] - freed[1]
        live[stage] -= op in (Op.B, Op.W)
        replayed -= of_slice.replayed[stage] if is_replayed else 0
    return peak


def moved_bytes(plan: RunPlan, layers: StageLayers, shape: RankShape) -> list[int]:
    """Return what each offloaded group of a stage with these layers moves for a microbatch, or a slice of one."""
    num_moved = len(offloaded_groups(plan.config, layers.num_layers))
    groups = layer_groups(layers_of(plan.model, layers), shape)[:num_moved]
    least = plan.config.offload.min_offloaded_tensor_size
    kept = [group_trace(group, shape).kept for group in groups]
    return [total_bytes([tensor for tensor in tensors if tensor.elements >= least]) for tensors in kept]


def _host_bytes(row: Iterable[Action], slices: Sequence[SliceBytes]) -> int:
    """Return the bytes of all host buffers of a row, each in use from a forward to the RELOAD."""
    actions = list(row)
    moved = {(stage, number) for stage, op, number in actions if op is Op.OFFLOAD}
    in_use, most = Counter[int](), Counter[int]()  # buffers, by size
    for stage, op, number in actions:
        if op in (Op.F, Op.RELOAD) and (stage, number) in moved:
            size = slices[(number or 0) % len(slices)].moved[stage]
            in_use[sum(host_pieces(size))] += 1 if op is Op.F else -1
            most |= in_use  # the larger number of each size
    return sum(count * size for size, count in most.items())
