"""`shrink`: the configuration to be trained, made so small that a few steps on the user's grid and in one process take seconds.

Kept is what the grid's code depends on: axis sizes, rank order, chunks, the layers of every stage, schedule, number of microbatches, query
heads per key/value head, copies of key/value heads over tp, and every switch. Shrunk are sizes.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from megapipe.config.config import Config
from megapipe.config.data import DataConfig
from megapipe.config.model import ModelConfig
from megapipe.config.offload import OffloadConfig
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.precision import PrecisionConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.config.training import TrainingConfig
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.partition import Partition, from_counts

NUM_STEPS = 3
MOST_LAYERS = 48
MOST_MICROBATCHES = 64
# (learning rate, least Adam epsilon): Adam divides rounding by rounding where gradients are tiny, and 1e-8 would make weights of it
RATES = {"fp64": (1e-2, 1e-3), "fp32": (1e-2, 1e-3), "bf16": (3e-2, 3e-2), "fp16": (3e-2, 3e-2)}
INITIAL_LOSS_SCALE = 2.0**12


@dataclass(frozen=True)
class Shrunk:
    """What is trained instead. num_microbatches: of each step, on one dp rank. was: the plan that was asked for."""

    plan: RunPlan
    was: RunPlan
    mode: str
    num_microbatches: tuple[int, ...]


def shrink(
    plan: RunPlan, mode: str, world_size: int, ranks_per_node: int | None = None, on_gpus: bool = False
) -> Shrunk:
    """mode: 'fp64', or 'native' for the configuration's own dtype. Raises ConfigError only if `plan` itself could not be resolved."""
    config, partition = plan.config, _partition(plan.partition)
    training, counts = _training(plan)
    precision, parallel = _precision(config.precision, mode), _parallel(plan, partition, mode)
    small = Config(
        model=_model(config, partition.num_layers, plan.topology.tp),
        parallel=parallel,
        recompute=_recompute(config.recompute, mode == "fp64" and on_gpus),
        offload=_offload(config.offload),
        training=training,
        optimizer=_optimizer(config.optimizer, *RATES["bf16" if parallel.grad_reduce_in_bf16 else precision.dtype]),
        precision=precision,
        data=DataConfig(
            reset_position_ids=config.data.reset_position_ids,
            reset_attention_mask=config.data.reset_attention_mask,
            eod_mask_loss=config.data.eod_mask_loss,
        ),
    )
    resolved = resolve(small, world_size, ranks_per_node)
    bucket_size = _bucket_size(plan, resolved)
    if bucket_size is not None:
        small = dataclasses.replace(small, parallel=dataclasses.replace(small.parallel, ddp_bucket_size=bucket_size))
        resolved = resolve(small, world_size, ranks_per_node)
    return Shrunk(resolved, plan, mode, counts)


def _recompute(recompute: RecomputeConfig, lacks_kernel: bool) -> RecomputeConfig:
    """In fp64 GPUs have no fused attention whose results could be kept."""
    return dataclasses.replace(recompute, recompute_keep_attention=False) if lacks_kernel else recompute


def _offload(offload: OffloadConfig) -> OffloadConfig:
    """As many layers, and small ones move too."""
    return dataclasses.replace(offload, min_offloaded_tensor_size=1) if offload.cpu_offloading_num_layers else offload


def _model(config: Config, num_layers: int, tp: int) -> ModelConfig:
    model = config.model
    groups, heads, ffn = model.query_groups(), model.num_attention_heads, model.feed_forward_size()
    if groups % tp == 0:  # whole groups on every rank: at most two stay; shared ones all do
        kept = tp * min(groups // tp, 2)
        heads, groups = heads // groups * kept, kept
    kv_channels = _head_size(model)
    seq = _sequence(model.seq_length, tp if config.parallel.sequence_parallel else 1)
    positions = model.max_position_embeddings or model.seq_length
    is_derived_scale = model.softmax_scale is not None and math.isclose(model.softmax_scale, model.head_size() ** -0.5)
    vocab, padded = _vocabulary(model, tp)
    return dataclasses.replace(
        model,
        num_layers=num_layers,
        hidden_size=min(model.hidden_size, 32),
        ffn_hidden_size=tp * min(ffn // tp, 12),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=kv_channels,
        seq_length=seq,
        max_position_embeddings=seq + min(positions - model.seq_length, 3),
        vocab_size=vocab,
        padded_vocab_size=padded,
        window_size=_window(model, seq),
        softmax_scale=None if is_derived_scale else model.softmax_scale,
    )


def _head_size(model: ModelConfig) -> int:
    """The smallest head of 8 channels or more in which --rotary-percent still turns whole pairs."""
    size = model.head_size()
    if model.position_embedding_type != "rope":
        return min(size, 8)
    pairs = (c for c in range(8, size) if int(c * model.rotary_percent) % 2 == 0 and int(c * model.rotary_percent) > 0)
    return next(pairs, size)


def _sequence(length: int, divisor: int) -> int:
    """About 16 tokens, and two for each rank that cuts the sequence."""
    return min(length, max(16, 2 * divisor) // divisor * divisor)


def _window(model: ModelConfig, seq: int) -> int | None:
    """A window that hides keys goes on hiding some."""
    if model.window_size is None:
        return None
    return seq if model.window_size >= model.seq_length else max(1, min(model.window_size, seq // 3))


def _vocabulary(model: ModelConfig, tp: int) -> tuple[int, int]:
    """(true, padded); padded rows stay where there are any."""
    vocab, padded = model.vocab_size, model.padded_vocab_size
    assert vocab is not None and padded is not None
    rows = min(padded, tp * max(8, 48 // tp))
    return (vocab, padded) if vocab <= rows - tp else (rows - min(padded - vocab, 3), rows)


def _partition(partition: Partition) -> Partition:
    """The same stages; those of a deep model lose the same number of layers each, down to two in the largest."""
    if partition.num_layers <= MOST_LAYERS:
        return partition
    counts = partition.layer_counts
    fewer = max(max(counts) - 2, 0)
    small = [max(count - fewer, min(count, 1)) for count in counts]
    return from_counts(small, sum(small))


def _parallel(plan: RunPlan, partition: Partition, mode: str) -> ParallelConfig:
    """The cut is pinned by a layout: small sizes would weigh head and layers differently."""
    return dataclasses.replace(
        plan.config.parallel,
        pipeline_model_parallel_layout=partition.layout(),
        num_layers_per_virtual_pipeline_stage=None,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        pipeline_schedule=plan.schedule_name,
        grad_reduce_in_bf16=plan.config.parallel.grad_reduce_in_bf16 and mode == "native",
    )


def _training(plan: RunPlan) -> tuple[TrainingConfig, tuple[int, ...]]:
    """Batches of one or two sequences a microbatch; with a ramp-up the smallest batch comes first."""
    training, batch = plan.config.training, plan.batch
    group = plan.config.parallel.microbatch_group_size_per_virtual_pipeline_stage or plan.topology.pp
    # asynchronous: three groups meet every staleness, and with each update more rounding of a native dtype would come together
    most = max(MOST_MICROBATCHES, 4 * group) if plan.is_synchronous else 3 * group
    counts = [_fewer(size // batch.samples_per_microbatch, group, most) for size in (batch.sizes[0], batch.full)]
    micro = min(training.micro_batch_size, 2)
    first, full = (count * micro * plan.topology.dp for count in counts)
    steps = (counts[0], *[counts[1]] * (NUM_STEPS - 1))
    small = TrainingConfig(
        micro_batch_size=micro,
        global_batch_size=full,
        rampup_batch_size=(first, full - first, first) if first < full else None,
        train_samples=first + (NUM_STEPS - 1) * full,
        seed=training.seed,
        deterministic_mode=training.deterministic_mode,
        label_smoothing=training.label_smoothing,
        z_loss=training.z_loss,
        cross_entropy_chunk_size=None
        if training.cross_entropy_chunk_size is None
        else 3,  # several chunks, the last one shorter
        calculate_per_token_loss=training.calculate_per_token_loss,
        device=training.device,
    )
    return small, steps


def _fewer(num_microbatches: int, group: int, most: int) -> int:
    """Above a limit fewer, with the same remainder over the groups of interleaving."""
    if num_microbatches <= most:
        return num_microbatches
    return most // group * group + num_microbatches % group


def _optimizer(optimizer: OptimizerConfig, lr: float, adam_eps: float) -> OptimizerConfig:
    """The same rule; a constant rate at which weights move."""
    has_other_rate = optimizer.decoupled_lr is not None and optimizer.decoupled_lr != optimizer.lr
    return OptimizerConfig(
        optimizer=optimizer.optimizer,
        lr=lr,
        lr_decay_style="constant",
        decoupled_lr=lr / 2 if has_other_rate else None,
        weight_decay=optimizer.weight_decay,
        start_weight_decay=optimizer.start_weight_decay,
        end_weight_decay=optimizer.end_weight_decay,
        weight_decay_incr_style=optimizer.weight_decay_incr_style,
        clip_grad=optimizer.clip_grad,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=max(optimizer.adam_eps, adam_eps),
        sgd_momentum=optimizer.sgd_momentum,
    )


def _precision(precision: PrecisionConfig, mode: str) -> PrecisionConfig:
    if mode == "fp64":
        return PrecisionConfig(dtype="fp64")
    default = (
        PrecisionConfig()
    )  # what is proven is the grid: kernels are torch's, and their operands of the configured dtype
    fp8 = {
        name: getattr(default, name) for name in ("fp8_format", "fp8_recipe", "fp8_margin", "first_last_layers_bf16")
    }
    history = {name: getattr(default, name) for name in ("fp8_amax_history_len", "fp8_amax_compute_algo")}
    precision = dataclasses.replace(precision, **fp8, **history)
    if precision.dtype != "fp16" or precision.loss_scale is not None:
        return precision
    scale = max(min(precision.initial_loss_scale, INITIAL_LOSS_SCALE), precision.min_loss_scale)
    return dataclasses.replace(precision, initial_loss_scale=scale)


def _bucket_size(was: RunPlan, small: RunPlan) -> int | None:
    """Parameters a bucket that leave the largest stage as many buckets as it had; None where one holds everything."""

    def buckets(plan: RunPlan) -> int:
        layouts = [layout for stage in range(plan.placement.num_stages) for layout in plan.buffers(stage, 0)]
        return max(len(layout.buckets) for layout in layouts)

    def largest(plan: RunPlan) -> int:
        return max(layout.numel for stage in range(plan.placement.num_stages) for layout in plan.buffers(stage, 0))

    wanted = buckets(was)
    return None if wanted == 1 else max(1, largest(small) // wanted)
