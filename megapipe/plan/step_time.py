"""The time of a training step before it runs, with the schedule simulated and the stages as they are cut.

`expected_bubble` takes stages by FLOPs or measured times, messages free, `predict_step` layers by `layer_time` and
messages over the links they cross. It is a first-order model: tensor-parallel messages delay the computation unless a
GEMM hides them, and so do the all-to-alls of experts unless --overlap-moe-expert-parallel-comm; pipeline messages
overlap with it, reductions run under the backward of the last microbatch, gathers under the forward of the first.
Gathers and reductions within a row (sharded gradients and weights) run one at a time on the network of their rank,
under computation that does not need them.
docs/time_model.md says what is fitted and compares with published runs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from megapipe.config.parallel import RecomputeConfig
from megapipe.dtypes import ELEMENT_BYTES
from megapipe.layers.linear import casts
from megapipe.layers.model import LayerSpec
from megapipe.layers.table import ALL_REDUCE, RankShape
from megapipe.plan.activations import fp8_weights, layers_of, layers_with_recompute
from megapipe.plan.expert_overlap import hidden_seconds
from megapipe.plan.hardware import Hardware
from megapipe.plan.layer_costs import step_flops
from megapipe.plan.layer_time import OpSeconds, context_links, expert_links, head_seconds, layer_seconds, ring_link
from megapipe.plan.memory import moved_bytes
from megapipe.plan.muon import muon_work
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.traces import with_recompute
from megapipe.plan.traffic import KINDS, gather_bytes, instance_bytes, reduction_bytes
from megapipe.schedule.action import COMPUTE_OPS, OFFLOAD_OPS, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.simulate import Bubble, Timeline, simulate
from megapipe.schedule.stream import steady
from megapipe.sharding.state_dtypes import MASTER, StateDtypes

HALVES = {Op.F: ("forward",), Op.B: ("inputs", "weights"), Op.I: ("inputs",), Op.W: ("weights",)}


def expected_bubble(plan: RunPlan, num_microbatches: int) -> Bubble:
    """Return the mean over ranks of the simulated step, in a stream of one in its middle; its seconds have a scale only
    where layers were measured.
    """
    if not plan.is_synchronous:
        return steady(plan.stream(num_microbatches).stretch, plan.stage_costs).bubble
    timeline = simulate(plan.schedule(num_microbatches), plan.stage_costs)
    work = timeline.work_seconds
    mean = sum(work) / len(work)
    return Bubble(timeline.makespan_seconds - mean, mean)


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step.

    parts: the seconds of the rank that computes longest, which add up to `seconds`: 'gemm', 'attention', 'pointwise',
    'tp' (tensor-parallel messages that no GEMM hides), 'cp' (messages of attention that it does not hide), 'ep' (with
    experts: all-to-alls of rows that no computation hides), 'overhead' (of a software stack), 'host' (waits for copies
    of offloaded layers, or for launches), 'bubble' (idle, and waits for messages), 'reduce' and 'gather' (gradients and
    parameters between replicas, what the computation does not hide), 'optimizer' (with fp8 the cast of its new weights,
    too). timeline: of whole stages, whose all-to-alls block the computation.
    """

    seconds: float
    parts: Mapping[str, float]
    tokens: int
    model_flops: float  # of the whole step, all ranks; causal attention counted half
    world_size: int
    peak_flops: float
    timeline: Timeline

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def flops_per_second(self) -> float:
        """Model FLOPs of one rank."""
        return self.model_flops / self.seconds / self.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, causal attention counted half."""
        return self.flops_per_second / self.peak_flops

    @property
    def bubble_share(self) -> float:
        """Share of the step in which the rank that computes longest is idle or waits for messages."""
        return self.parts["bubble"] / self.seconds


def predict_step(plan: RunPlan, hardware: Hardware, stages: tuple[OpSeconds, ...] = (), hides: bool = True) -> StepTime:
    """Predict a training step at the full global batch size.

    stages: their seconds, if not those of the planner. hides: with what --overlap-moe-expert-parallel-comm hides.
    """
    model, sequences = plan.config.model, plan.batch.full
    held = [plan.placement.stages_of(rank) for rank in range(plan.topology.pp)]
    stages = stages or stage_seconds(plan, hardware)
    schedule, costs = plan.schedule(plan.batch.num_microbatches), _schedule_costs(plan, hardware, stages)
    timeline = simulate(schedule, costs)
    work = timeline.work_seconds
    span, reduce = computed_and_reduced(plan, hardware, timeline)
    num_updates = 1
    if not plan.is_synchronous:
        span, reduce, num_updates = _in_stream(plan, hardware, costs)
    parts = _parts(timeline, max(range(len(work)), key=work.__getitem__), stages)
    if plan.offloaded:  # waits for copies
        copies = {(stage, op): 0.0 for stage in plan.offloaded for op in OFFLOAD_OPS}
        free = simulate(schedule, replace(costs, seconds={**costs.seconds, **copies}))
        parts["host"] = parts.get("host", 0.0) + span - computed_and_reduced(plan, hardware, free)[0]
    parts["bubble"] = span - sum(parts.values())
    if plan.parts is not None and hides:
        # at best a step takes as long as its computation alone, or as the all-to-alls of the busiest rank alone
        free = simulate(schedule, _schedule_costs(plan, hardware, tuple(map(without_exchanges, stages))))
        least = max(computed_and_reduced(plan, hardware, free)[0], most_exchanged(timeline, stages))
        hidden = max(0.0, min(hidden_seconds(plan, hardware), span - least))
        shown = min(hidden, parts["ep"])
        parts["ep"] -= shown
        parts["bubble"] -= hidden - shown  # a rank also waits less for others
    if plan.sharding is not None:
        timeline = simulate(schedule, replace(costs, seconds={**costs.seconds, **collective_seconds(plan, hardware)}))
        waits, reduce = _exposed_in_row(plan, timeline, span)
    parts["reduce"] = reduce
    if not hardware.stack.overlapped_instances:
        parts["reduce"] += max(_instance_seconds(plan, hardware, stages_of_rank) for stages_of_rank in held)
    # all ranks wait for the norm, and for the next step's first stage
    is_compiled = plan.config.kernels.optimizer_impl == "compiled"
    updated = max(optimizer_bytes(plan, rank, is_compiled) for rank in range(plan.topology.pp))
    cast = max(_weight_cast_seconds(plan, hardware, rank) for rank in range(plan.topology.pp))
    muon = max(_muon_seconds(plan, hardware, rank) for rank in range(plan.topology.pp))
    parts["optimizer"] = num_updates * (updated / hardware.memory_bytes_per_second + cast + muon)
    if plan.sharding is not None and plan.sharding.gathers:
        parts["gather"] = waits
    else:
        gathered = max(_exposed_gather(plan, hardware, stages_of_rank, stages) for stages_of_rank in held)
        parts["gather"] = num_updates * gathered
    flops, tokens = step_flops(model, sequences, causal=True), sequences * model.seq_length
    peak, world_size = hardware.peak(plan.config.precision.dtype), plan.topology.world_size
    return StepTime(sum(parts.values()), parts, tokens, flops, world_size, peak, timeline)


def without_exchanges(stage: OpSeconds) -> OpSeconds:
    """Return a stage whose all-to-alls of experts take no time."""
    return replace(stage, forward={**stage.forward, "ep": 0.0}, inputs={**stage.inputs, "ep": 0.0})


def most_exchanged(timeline: Timeline, stages: tuple[OpSeconds, ...]) -> float:
    """Return the seconds of the all-to-alls of experts of the rank that has the most of them in a step."""
    return max(_parts(timeline, rank, stages).get("ep", 0.0) for rank in range(timeline.schedule.num_ranks))


def optimizer_bytes(plan: RunPlan, pp_rank: int, is_compiled: bool) -> int:
    """Return the bytes that a rank moves once a step: zeroed gradients, the norm and the update."""
    stages, dtypes, element = plan.placement.stages_of(pp_rank), plan.state_dtypes, plan.shape.element
    of_shard = sum(
        count * update_bytes(dtypes, element, is_compiled, of_matrix)
        for of_matrix, count in plan.shard_elements(stages).items()
    )
    return of_shard + plan.elements_by_kind(stages).total() * dtypes.gradient_bytes


def update_bytes(dtypes: StateDtypes, element: int, is_compiled: bool = False, of_matrix: bool = False) -> int:
    """Return the bytes that norm and update move for each element of a rank's shard.

    element: bytes of a weight. is_compiled: --optimizer-impl compiled. tests/fake_cuda/test_budget.py counts them. The
    fused kernel reads and writes master and moments, and also writes the gradient that it has scaled; another pass
    reads the master and writes the weight. Compiled, one pass does all of it and leaves the gradient. Narrow moments
    are widened before the fused kernel and narrowed after it.
    """
    gradient, wide = dtypes.gradient_bytes, 4
    if dtypes.is_narrow:
        widened = 0 if gradient == wide else gradient + wide  # the gradient: before and after, and for the norm
        cast = ELEMENT_BYTES["bf16"] + wide  # of a narrow moment, to fp32 and back
        kernel = 2 * wide * (1 + len({MASTER, *dtypes.states}))
        of_weight = wide + element if MASTER in dtypes.states else 0
        return 3 * widened + wide + 2 * cast * len(dtypes.narrow) + kernel + of_weight
    # an update reads what it changes: the weight itself only where it is its own master
    read_and_written = dtypes.state_bytes(of_matrix) + (0 if MASTER in dtypes.states else element)
    master = ELEMENT_BYTES[dtypes.states[MASTER]] if MASTER in dtypes.states else 0
    of_weight = master and element + (0 if is_compiled else master)
    return 2 * gradient + (0 if is_compiled else gradient) + 2 * read_and_written + of_weight


def _muon_seconds(plan: RunPlan, hardware: Hardware, pp_rank: int) -> float:
    """Return the seconds of Newton-Schulz and of bringing matrices to their owners and back."""
    work, optimizer = muon_work(plan, pp_rank), plan.config.optimizer
    dtype = plan.config.precision.dtype
    # GPUs multiply fp32 at half the rate of 16 bits (TF32), or without tensor cores
    slowdown = {"bf16": 1, "fp16": 1}.get(dtype, 0) * (16 if optimizer.muon_fp32_matmul_prec == "highest" else 2)
    rate = hardware.peak(dtype) / max(slowdown, 1) * hardware.gemm_share(*3 * (plan.config.model.hidden_size,))
    seconds = work.flops / rate
    for group, elements in work.sent.items():
        link = ring_link(plan.topology, group, hardware.node, hardware.network)
        seconds += elements * plan.shape.gradient / link.bytes_per_second + 2 * link.latency_seconds
    return seconds


def stage_seconds(plan: RunPlan, hardware: Hardware) -> tuple[OpSeconds, ...]:
    """Return the seconds of each stage for one microbatch, of all its slices together."""
    slices = [_slice_seconds(plan, hardware, shape) for shape in plan.slice_shapes]
    return tuple(sum(of_stage[1:], of_stage[0]) for of_stage in zip(*slices, strict=True))


LayerSeconds = Callable[[LayerSpec, RecomputeConfig], OpSeconds]


def _layer_seconds(plan: RunPlan, hardware: Hardware, shape: RankShape) -> LayerSeconds:
    """Return the function that gives the seconds of a layer for one slice of a microbatch, or a whole one."""
    tp_link, experts = ring_link(plan.topology, "tp", hardware.node, hardware.network), expert_links(plan, hardware)
    contexts = context_links(plan.topology, hardware.node, hardware.network)

    @cache
    def of_layer(layer: LayerSpec, recompute: RecomputeConfig) -> OpSeconds:
        seconds = layer_seconds(layer, with_recompute(shape, recompute), hardware, tp_link, contexts, experts)
        if not layer.num_experts:
            return seconds
        held, overlaps = layer.num_experts // shape.ep, plan.parts is not None
        return seconds.launched(hardware.stack.launch_seconds(held, overlaps), overlaps)

    return of_layer


def _slice_seconds(plan: RunPlan, hardware: Hardware, shape: RankShape) -> tuple[OpSeconds, ...]:
    """Return the seconds of each stage for one slice of a microbatch, or a whole one."""
    model, of_layer = plan.model, _layer_seconds(plan, hardware, shape)
    tp_link = ring_link(plan.topology, "tp", hardware.node, hardware.network)
    nothing = layer_seconds(model.layers[0], shape, hardware, tp_link) * 0
    found: dict[frozenset[Any], OpSeconds] = {}  # by the number of layers of each kind and recompute
    stages = []
    for stage_layers in plan.partition.stages:
        counts = Counter(layers_with_recompute(model, shape, stage_layers))
        key = frozenset(counts.items())
        if key not in found:
            terms = [of_layer(*kind) * count for kind, count in counts.items()]
            found[key] = sum(terms[1:], terms[0]) if terms else nothing
        stages.append(found[key])
    stages[-1] += head_seconds(model, shape, hardware, tp_link)
    return tuple(stages)


def _replay_seconds(plan: RunPlan, hardware: Hardware) -> dict[tuple[int, Op], float]:
    """Return the seconds by which a backward is shorter without the replay of the stage's checkpoints, and which a
    RECOMPUTE takes.
    """
    found: dict[tuple[int, Op], float] = defaultdict(float)
    for shape in plan.slice_shapes:
        of_layer = _layer_seconds(plan, hardware, shape)
        for stage, held in enumerate(plan.partition.stages):
            counts = Counter(zip(layers_of(plan.model, held), plan.layer_recompute(stage), strict=True))
            for (layer, recompute), count in counts.items():
                if recompute.recompute_granularity == "full":
                    plain = of_layer(layer, RecomputeConfig())
                    found[stage, Op.RECOMPUTE] += count * (of_layer(layer, recompute).of(Op.I) - plain.of(Op.I))
    return found


def _schedule_costs(plan: RunPlan, hardware: Hardware, stages: tuple[OpSeconds, ...]) -> Costs:
    """Return the costs for `simulate`. Reductions take no time here: see `computed_and_reduced`."""
    link = hardware.network if plan.topology.crosses_nodes("pp") else hardware.node
    smallest = 1e-9  # a stage without layers still takes some time
    message_seconds = plan.message_bytes / link.bytes_per_second
    seconds: dict[tuple[int, Op], float] = {}
    for stage, of_stage in enumerate(stages):
        seconds |= {(stage, op): max(of_stage.of(op), smallest) for op in (Op.F, Op.B, Op.I, Op.W)}
        seconds[stage, Op.SEND_F] = seconds[stage, Op.SEND_B] = message_seconds
    if plan.config.recompute.recompute_in_bubbles:
        seconds |= _replay_seconds(plan, hardware)
    for stage in plan.offloaded:  # both directions of the link at once
        moved = sum(sum(moved_bytes(plan, plan.partition.stages[stage], shape)) for shape in plan.slice_shapes)
        seconds |= {(stage, op): moved / hardware.host_bytes_per_second for op in OFFLOAD_OPS}
    overlap = plan.config.parallel.overlap_p2p_comm
    costs = Costs(seconds, link.latency_seconds, overlap=overlap, rank_speeds=plan.rank_speeds)
    return costs if plan.num_slices == 1 else replace(costs, slice_shares=_slice_shares(plan, hardware))


def _slice_shares(plan: RunPlan, hardware: Hardware) -> dict[tuple[int, Op], tuple[float, ...]]:
    """Return the share of each slice in the seconds of every op of every stage; messages by tokens."""
    slices = [_slice_seconds(plan, hardware, shape) for shape in plan.slice_shapes]
    shares = dict(plan.slice_shares)
    for stage, of_stage in enumerate(zip(*slices, strict=True)):
        for op in (Op.F, Op.B, Op.I, Op.W):
            seconds = [each.of(op) for each in of_stage]
            if sum(seconds):
                shares[stage, op] = tuple(one / sum(seconds) for one in seconds)
    return shares


def computed_and_reduced(plan: RunPlan, hardware: Hardware, timeline: Timeline) -> tuple[float, float]:
    """Return the seconds until the last rank has computed, and the seconds that reductions add.

    Each rank reduces its stages one after the other. With --overlap-grad-reduce a bucket is reduced once the last
    backward of its stage has passed it, so that at least one comes after; without, all come after all backwards of the
    rank.
    """
    computed = reduced = 0.0
    for rank in range(plan.topology.pp):
        last = max(timeline.ends[rank], default=0.0)
        if plan.config.parallel.overlap_grad_reduce:
            free = _reduced_by_buckets(plan, hardware, timeline, rank)
        else:
            free = last + sum(reduction_seconds(plan, hardware, stage) for stage in plan.placement.stages_of(rank))
        computed, reduced = max(computed, last), max(reduced, free)
    return computed, max(0.0, reduced - computed)


def _in_stream(plan: RunPlan, hardware: Hardware, costs: Costs) -> tuple[float, float, int]:
    """Return the seconds that a rank of a stream computes or waits in a step, those that reductions add, and the
    number of its updates.

    A delayed update has half a step for the reduction of its gradients; the other half is for their norm.
    """
    stream = plan.stream(plan.batch.num_microbatches)
    span, num_updates = steady(stream.stretch, costs).seconds, stream.stretch.step_size // stream.update_size
    reduce = max(reduction_seconds(plan, hardware, stage) for stage in range(plan.placement.num_stages))
    return span, max(0.0, reduce - span / 2) if plan.accumulates_apart else num_updates * reduce, num_updates


def collective_seconds(plan: RunPlan, hardware: Hardware) -> dict[tuple[int, Op], float]:
    """Return the seconds of one gather of each stage's weights, and of one reduction of its gradients, in a row with
    sharded gradients.
    """
    found: dict[tuple[int, Op], float] = {}
    for stage in range(plan.placement.num_stages):
        found[stage, Op.REDUCE_GRAD] = reduction_seconds(plan, hardware, stage)
        found[stage, Op.UNSHARD] = sum(
            _replica_seconds(plan, hardware, gather_bytes(plan, stage, (kind,)), kind) for kind in KINDS
        )
    return found


def _exposed_in_row(plan: RunPlan, timeline: Timeline, span: float) -> tuple[float, float]:
    """Return the seconds that gathers add to a step, and that reductions add after its last computation.

    timeline: with the times of both on the network of each rank. span: until the last rank has computed without them.
    Where gathers (or reductions) do not overlap, their ranks wait for them all.
    """
    parallel, rows = plan.config.parallel, timeline.schedule.rows
    computed = reduced = 0.0
    blocking = {Op.UNSHARD: 0.0, Op.REDUCE_GRAD: 0.0}  # of the rank that waits longest
    for row, starts, ends in zip(rows, timeline.starts, timeline.ends, strict=True):
        of_row = dict.fromkeys(blocking, 0.0)
        last = 0.0
        for (_, op, _), start, end in zip(row, starts, ends, strict=True):
            if op in COMPUTE_OPS:
                last = end
            elif op in blocking:
                of_row[op] += end - start
        computed, reduced = max(computed, last), max(reduced, max(ends, default=0.0))
        blocking = {op: max(seconds, of_row[op]) for op, seconds in blocking.items()}
    waits = max(0.0, computed - span) if parallel.overlap_param_gather else blocking[Op.UNSHARD]
    return waits, max(0.0, reduced - computed) if parallel.overlap_grad_reduce else blocking[Op.REDUCE_GRAD]


def _instance_seconds(plan: RunPlan, hardware: Hardware, stages: tuple[int, ...]) -> float:
    """Return the seconds of summing the shards of gradients over the instances of the distributed optimizer."""
    if plan.topology.num_instances == 1:
        return 0.0
    total = 0.0
    for is_expert in KINDS:
        sent = sum(instance_bytes(plan, stage, is_expert) for stage in stages)
        group = "expert_instances" if is_expert else "instances"
        link = ring_link(plan.topology, group, hardware.node, hardware.network)
        total += sent / link.bytes_per_second + ALL_REDUCE * link.latency_seconds if sent else 0.0
    return total


def _reduced_by_buckets(plan: RunPlan, hardware: Hardware, timeline: Timeline, pp_rank: int) -> float:
    """Return the time at which a rank's last bucket is reduced.

    Where two ranks hold a stage (DualPipe), its buckets wait for the whole stage.
    """
    row, num_stages = timeline.schedule.rows[pp_rank], len(plan.placement.stages_of(pp_rank))
    slots: dict[int, int] = {}  # stage -> slot of its last reduction
    found: list[tuple[int, int, Op]] = []  # slot of the reduction, stage, the backward op before it
    for slot in range(len(row) - 1, -1, -1):
        stage, op, _ = row[slot]
        if op is Op.REDUCE_GRAD:
            slots[stage] = slot
        elif op in (Op.B, Op.W) and stage in slots:
            found.append((slots.pop(stage), stage, op))
            if len(found) == num_stages:
                break
    free = 0.0
    for slot, stage, last_op in sorted(found, key=lambda each: each[0]):
        done, seconds = timeline.starts[pp_rank][slot], reduction_seconds(plan, hardware, stage)
        buckets = 1
        if not plan.topology.mirrored_pipeline:
            buckets = max(1, sum(len(layout.buckets) for layout in plan.trained_buffers((stage,))))
        begun = done - timeline.costs.seconds[stage, last_op] / plan.rank_speeds[pp_rank] * (buckets - 1) / buckets
        free = max(max(begun, free) + seconds, done + seconds / buckets)
    return free


def reduction_seconds(plan: RunPlan, hardware: Hardware, stage: int) -> float:
    """Return the seconds of reducing a stage's gradients over its replicas."""
    passes = 1 if plan.config.parallel.use_distributed_optimizer else ALL_REDUCE
    return sum(_replica_seconds(plan, hardware, reduction_bytes(plan, stage, (kind,)), kind, passes) for kind in KINDS)


def _exposed_gather(plan: RunPlan, hardware: Hardware, held: tuple[int, ...], stages: tuple[OpSeconds, ...]) -> float:
    """Return the time of gathering updated parameters of the stages `held` that the first forwards of the rank, and of
    the stages it waits for, do not hide.
    """
    if not plan.config.parallel.use_distributed_optimizer:
        return 0.0
    total = sum(
        _replica_seconds(plan, hardware, gather_bytes(plan, stage, (kind,)), kind) for stage in held for kind in KINDS
    )
    if not plan.config.parallel.overlap_param_gather:
        return total
    hidden = sum(stages[stage].of(Op.F) for stage in held)
    buckets = sum(len(layout.buckets) for layout in plan.trained_buffers(held))
    waits = sum(stages[stage].of(Op.F) for stage in range(held[0]))
    return max(total - hidden, total / max(buckets, 1), waits) - waits


def _replica_seconds(plan: RunPlan, hardware: Hardware, num_bytes: float, is_expert: bool, passes: int = 1) -> float:
    """Return the seconds of a ring over the ranks that hold the same parameters, dense ones or experts."""
    t = plan.topology
    if t.sharing(is_expert)[0] == 1 or (is_expert and not num_bytes):
        return 0.0
    link = ring_link(t, t.shard_group(is_expert), hardware.node, hardware.network)
    return num_bytes / link.bytes_per_second + passes * link.latency_seconds


def _parts(timeline: Timeline, pp_rank: int, stages: tuple[OpSeconds, ...]) -> dict[str, float]:
    """Return the seconds that one rank computes in a step, by kind."""
    parts, speed = dict.fromkeys(("gemm", "attention", "pointwise", "tp"), 0.0), timeline.costs.rank_speeds[pp_rank]
    ran = Counter((stage, op) for stage, op, _ in timeline.schedule.rows[pp_rank])
    slices = timeline.schedule.num_slices  # all of a microbatch's together take the seconds of `stages`
    for (stage, op), times in ran.items():
        for half in HALVES.get(op, ()):
            for part, seconds in getattr(stages[stage], half).items():
                parts[part] = parts.get(part, 0.0) + times * seconds / speed / slices
        parts["tp"] -= times * stages[stage].hidden * (op is Op.B) / speed / slices
    return parts


def _weight_cast_seconds(plan: RunPlan, hardware: Hardware, pp_rank: int) -> float:
    """Return the seconds of casting the linears' weights to fp8, once a step."""
    held = [plan.partition.stages[stage] for stage in plan.placement.stages_of(pp_rank)]
    elements = sum(fp8_weights(plan.model, plan.shape, stage) for stage in held)
    return casts(plan.shape).weight_once * elements / hardware.pointwise_bytes_per_second
