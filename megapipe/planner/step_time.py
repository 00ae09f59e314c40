"""The time of a training step before it runs: GEMMs by their shapes, attention, what moves memory, messages over the links they cross, and
the schedule simulated with the stages as they are cut.

A model of first order: kernels run at a share of a peak that depends on the smallest size of a GEMM alone, memory at its full rate, links
at theirs; tensor-parallel messages stand in the computation's way, pipeline messages and reductions run beside it. docs/planner.md says
what is estimated, and compares with a published run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megapipe.config.model import GATED_ACTIVATIONS, ModelConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.planner.activations import LocalSizes, is_explicit, layer_activation_bytes
from megapipe.planner.flops import mean_keys, step_flops
from megapipe.planner.hardware import Hardware, Link
from megapipe.planner.memory import local_sizes
from megapipe.planner.run_plan import RunPlan
from megapipe.planner.traffic import (
    ALL_REDUCE,
    collective_bytes,
    gather_bytes,
    head_collectives,
    layer_collectives,
    message_bytes,
    reduction_bytes,
)
from megapipe.schedule.action import Op
from megapipe.schedule.simulate import Costs, Timeline, simulate

OPTIMIZER_BYTES = 30  # an element of the shard: gradient read; master and two moments read and written; bf16 weight written
NORM_BYTES = 4  # an element of the shard: gradient read for the global norm
POINTWISE_PASSES = 2.0  # each byte a layer keeps is written once and read once in the forward; a backward moves twice as much


@dataclass(frozen=True)
class OpSeconds:
    """Seconds of F, I and W of one layer, head or stage on one rank, by what takes them: 'gemm', 'attention', 'pointwise', 'tp'."""

    forward: Mapping[str, float]
    inputs: Mapping[str, float]
    weights: Mapping[str, float]

    def of(self, op: Op) -> float:
        parts = {Op.F: self.forward, Op.I: self.inputs, Op.W: self.weights}
        return sum(parts[op].values()) if op is not Op.B else self.of(Op.I) + self.of(Op.W)


@dataclass(frozen=True)
class StepTime:
    """A step's prediction. seconds: of the whole step. parts: where they go on the rank that computes longest, adding up to `seconds`:
    'gemm', 'attention', 'pointwise', 'tp' (tensor-parallel messages), 'bubble' (idle, waits for messages and for reductions that nothing
    hides), 'gather' (parameters, what the forwards do not hide), 'optimizer'.
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
        """The model's own, of one rank."""
        return self.model_flops / self.seconds / self.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, causal attention counted half."""
        return self.flops_per_second / self.peak_flops


def predict_step(plan: RunPlan, hardware: Hardware) -> StepTime:
    """A training step at the full global batch size."""
    model, training, dtype = plan.config.model, plan.config.training, plan.config.precision.dtype
    assert training.global_batch_size is not None
    count = plan.batch.full // plan.batch.samples_per_microbatch
    stages = stage_seconds(plan, hardware)
    timeline = simulate(plan.schedule(count), schedule_costs(plan, hardware, stages))
    work = timeline.work_seconds
    busiest = max(range(len(work)), key=work.__getitem__)
    span = timeline.makespan_seconds
    if plan.config.optimizer.optimizer_post_validation:
        span = max(idle + busy for idle, busy in zip(timeline.chained_idle_seconds, work, strict=True))
    parts = _parts(plan, busiest, stages, count)
    parts["bubble"] = span - sum(parts.values())
    parts["gather"] = _exposed_gather(plan, hardware, busiest, stages)
    parts["optimizer"] = _shard_elements(plan, busiest) * (OPTIMIZER_BYTES + NORM_BYTES) / hardware.memory_bytes_per_second
    seconds = span + parts["gather"] + parts["optimizer"]
    sequences = training.global_batch_size
    flops = step_flops(model, sequences, causal=True)
    return StepTime(seconds, parts, sequences * model.seq_length, flops, plan.topology.world_size, hardware.peak(dtype), timeline)


def stage_seconds(plan: RunPlan, hardware: Hardware) -> tuple[OpSeconds, ...]:
    """Of each stage, for one microbatch."""
    config, sizes = plan.config, local_sizes(plan)
    tp_link = hardware.network if plan.crosses_nodes("tp") else hardware.node
    tp = Tensors(config.model, sizes, plan.topology.tp, config.parallel.sequence_parallel, config.precision.dtype)
    layer, head = layer_seconds(tp, config.recompute, hardware, tp_link), head_seconds(tp, hardware, tp_link)
    return tuple(_sum([(layer, stage.num_layers), (head, int(stage.has_head))]) for stage in plan.partition.stages)


@dataclass(frozen=True)
class Tensors:
    """One microbatch on one rank. model: resolved."""

    model: ModelConfig
    sizes: LocalSizes
    tp: int
    sequence_parallel: bool
    dtype: str

    def gemms(self) -> list[tuple[int, int, int]]:
        """(tokens, inputs, outputs) of the linears of a layer."""
        s = self.sizes
        gates = 2 if self.model.activation in GATED_ACTIVATIONS else 1
        queries = s.heads * s.channels
        return [
            (s.tokens, s.hidden, queries + 2 * s.groups * s.channels),
            (s.tokens, queries, s.hidden),
            (s.tokens, s.hidden, gates * s.ffn),
            (s.tokens, s.ffn, s.hidden),
        ]


def layer_seconds(tensors: Tensors, recompute: RecomputeConfig, hardware: Hardware, tp_link: Link) -> OpSeconds:
    """One transformer layer. Recomputation is part of I."""
    gemm = sum(_gemm_seconds(hardware, tensors.dtype, *sizes) for sizes in tensors.gemms())
    attention = _attention_seconds(tensors, hardware)
    kept = sum(layer_activation_bytes(tensors.model, tensors.sizes).values())
    pointwise = POINTWISE_PASSES * kept / hardware.memory_bytes_per_second
    collective, count = _collective_seconds(tensors, tp_link), layer_collectives(tensors.sequence_parallel, recompute)
    forward = {"gemm": gemm, "attention": attention, "pointwise": pointwise, "tp": count.forward * collective}
    inputs = {"gemm": gemm, "attention": 2.5 * attention, "pointwise": 2.0 * pointwise, "tp": count.inputs * collective}
    weights = {"gemm": gemm, "tp": count.weights * collective}
    again = _recomputed(tensors, recompute, hardware, forward)
    return OpSeconds(forward, {part: inputs[part] + again.get(part, 0.0) for part in inputs}, weights)


def head_seconds(tensors: Tensors, hardware: Hardware, tp_link: Link) -> OpSeconds:
    """Final norm, output layer and loss."""
    sizes = tensors.sizes
    gemm = _gemm_seconds(hardware, tensors.dtype, sizes.tokens, sizes.hidden, sizes.vocab)
    logits = sizes.tokens * sizes.vocab * sizes.wide
    collective, count = _collective_seconds(tensors, tp_link), head_collectives(tensors.sequence_parallel)
    return OpSeconds(
        {"gemm": gemm, "pointwise": 3 * logits / hardware.memory_bytes_per_second, "tp": count.forward * collective},
        {"gemm": gemm, "pointwise": 2 * logits / hardware.memory_bytes_per_second, "tp": count.inputs * collective},
        {"gemm": gemm, "tp": count.weights * collective},
    )


def schedule_costs(plan: RunPlan, hardware: Hardware, stages: tuple[OpSeconds, ...]) -> Costs:
    """The clock for `simulate`: computation, messages and reductions."""
    link = hardware.network if plan.crosses_nodes("pp") else hardware.node
    smallest = 1e-9  # a stage without layers still takes its turn
    seconds: dict[tuple[int, Op], float] = {}
    for stage, of_stage in enumerate(stages):
        for op in (Op.F, Op.B, Op.I, Op.W):
            seconds[stage, op] = max(of_stage.of(op), smallest)
        seconds[stage, Op.SEND_F] = seconds[stage, Op.SEND_B] = message_bytes(plan) / link.bytes_per_second
        seconds[stage, Op.REDUCE_GRAD] = reduction_seconds(plan, hardware, stage)
    return Costs(seconds, link.latency_seconds)


def reduction_seconds(plan: RunPlan, hardware: Hardware, stage: int) -> float:
    """Of a stage's gradients over its replicas: reduce-scatter with the distributed optimizer, else all-reduce."""
    passes = 1 if plan.config.parallel.use_distributed_optimizer else ALL_REDUCE
    return _replica_seconds(plan, hardware, reduction_bytes(plan, stage), passes)


def _exposed_gather(plan: RunPlan, hardware: Hardware, pp_rank: int, stages: tuple[OpSeconds, ...]) -> float:
    """Of the updated parameters: what the first forwards of the rank's stages do not hide."""
    if not plan.config.parallel.use_distributed_optimizer:
        return 0.0
    held = plan.placement.stages_of(pp_rank)
    times = [_replica_seconds(plan, hardware, gather_bytes(plan, stage)) for stage in held]
    if not plan.config.parallel.overlap_param_gather:
        return sum(times)
    hidden = sum(stages[stage].of(Op.F) for stage in held)
    buckets = sum(len(layout.buckets) for stage in held for layout in plan.buffers(stage, 0))
    return max(sum(times) - hidden, sum(times) / max(buckets, 1))


def _replica_seconds(plan: RunPlan, hardware: Hardware, num_bytes: float, passes: int = 1) -> float:
    link = hardware.network if plan.crosses_nodes("replicas") else hardware.node
    return num_bytes / link.bytes_per_second + passes * (plan.topology.num_replicas > 1) * link.latency_seconds


def _parts(plan: RunPlan, pp_rank: int, stages: tuple[OpSeconds, ...], num_microbatches: int) -> dict[str, float]:
    """What one rank computes in a step, by kind."""
    held = plan.placement.stages_of(pp_rank)
    share = num_microbatches / len(plan.placement.directions)
    parts = dict.fromkeys(("gemm", "attention", "pointwise", "tp"), 0.0)
    for stage in held:
        for of_op in (stages[stage].forward, stages[stage].inputs, stages[stage].weights):
            for part, seconds in of_op.items():
                parts[part] += share * seconds
    return parts


def _shard_elements(plan: RunPlan, pp_rank: int) -> float:
    layouts = [layout for stage in plan.placement.stages_of(pp_rank) for layout in plan.buffers(stage, 0)]
    return sum(layout.numel / layout.num_shards for layout in layouts)


def _gemm_seconds(hardware: Hardware, dtype: str, rows: int, inputs: int, outputs: int) -> float:
    flops = 2.0 * rows * inputs * outputs
    compute = flops / (hardware.peak(dtype) * hardware.gemm_share(min(rows, inputs, outputs)))
    moved = 2.0 * (rows * inputs + inputs * outputs + rows * outputs)
    return max(compute, moved / hardware.memory_bytes_per_second)


def _attention_seconds(tensors: Tensors, hardware: Hardware) -> float:
    """softmax(q k^T) v: fused kernels skip what a causal mask hides; written out, probabilities are moved, too."""
    model, sizes = tensors.model, tensors.sizes
    explicit = is_explicit(model)
    keys = float(sizes.seq) if explicit else mean_keys(sizes.seq, model.window_size)
    flops = 4.0 * sizes.tokens * keys * sizes.heads * sizes.channels
    seconds = flops / (hardware.peak(tensors.dtype) * hardware.attention_share)
    if explicit:
        moved = 6.0 * sizes.batch * sizes.heads * sizes.seq * sizes.seq * sizes.element
        seconds += moved / hardware.memory_bytes_per_second
    return seconds


def _collective_seconds(tensors: Tensors, link: Link) -> float:
    if tensors.tp == 1:
        return 0.0
    return collective_bytes(tensors.sizes, tensors.tp) / link.bytes_per_second + link.latency_seconds


def _recomputed(tensors: Tensors, recompute: RecomputeConfig, hardware: Hardware, forward: Mapping[str, float]) -> dict[str, float]:
    """What a backward computes again; its tensor-parallel messages are counted in `traffic`."""
    if recompute.recompute_granularity is None:
        return {}
    if recompute.recompute_granularity == "full":
        return {part: seconds for part, seconds in forward.items() if part != "tp"}
    modules, again = frozenset(recompute.recompute_modules), dict.fromkeys(forward, 0.0)
    if "core_attn" in modules:
        again["attention"] += forward["attention"]
    if "mlp" in modules:
        again["gemm"] += _gemm_seconds(hardware, tensors.dtype, *tensors.gemms()[2])
    kept = layer_activation_bytes(tensors.model, tensors.sizes)
    saved = sum(kept.values()) - sum(layer_activation_bytes(tensors.model, tensors.sizes, modules - {"core_attn"}).values())
    again["pointwise"] += POINTWISE_PASSES * saved / hardware.memory_bytes_per_second
    return again


def _sum(counted: list[tuple[OpSeconds, int]]) -> OpSeconds:
    def add(parts: list[tuple[Mapping[str, float], int]]) -> dict[str, float]:
        total: dict[str, float] = {}
        for of_op, count in parts:
            for part, seconds in of_op.items():
                total[part] = total.get(part, 0.0) + count * seconds
        return total

    return OpSeconds(
        add([(each.forward, n) for each, n in counted]),
        add([(each.inputs, n) for each, n in counted]),
        add([(each.weights, n) for each, n in counted]),
    )
