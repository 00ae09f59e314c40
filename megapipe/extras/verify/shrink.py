"""`shrink`: the user's configuration with small sizes, to train on the grid and in one process in seconds.

Everything that the grid's code depends on is kept: axis sizes, rank order, chunks, the layers of every stage, schedule,
number of microbatches, query heads per key/value head, copies of key/value heads over tp, and every switch. Only sizes
shrink.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megapipe.config.config import Config, ResolvedConfig, ResolvedModelConfig
from megapipe.config.files import DataConfig
from megapipe.config.layers import LayerConfig, layer_configs
from megapipe.config.model import PrecisionConfig
from megapipe.config.rules.context import heads_exchanged
from megapipe.config.training import OptimizerConfig, TrainingConfig
from megapipe.errors import ConfigError
from megapipe.extras.verify.fewer_layers import kept_layers, with_layers
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.sharding.buffers import BufferLayout
from megapipe.sharding.state_dtypes import state_dtypes

NUM_STEPS = 3
MAX_LAYERS = 48
MAX_MICROBATCHES = 64
MAX_FFN, MAX_NORMED_FFN = 12, 32  # width of an MLP on a rank; a norm after it divides by sums of so few products
# (learning rate, minimum of Adam's epsilon): where gradients are tiny, Adam divides rounding errors by rounding errors,
# and with an epsilon of 1e-8 the result would be large
RATES = {"fp64": (1e-2, 1e-3), "fp32": (1e-2, 1e-3), "bf16": (3e-2, 3e-2), "fp16": (3e-2, 3e-2)}
INITIAL_LOSS_SCALE = 2.0**12
# fields that are kept; those not named get their defaults
DATA_KEPT = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
TRAINING_KEPT = "seed deterministic_mode label_smoothing z_loss calculate_per_token_loss device".split()
OPTIMIZER_KEPT = (
    "optimizer freeze weight_decay start_weight_decay end_weight_decay weight_decay_incr_style clip_grad "
    "clip_grad_delay delay_error_feedback adam_beta1 adam_beta2 sgd_momentum optimizer_options muon_momentum "
    "muon_nesterov muon_coefficient_type muon_num_ns_steps muon_scale_mode muon_extra_scale_factor "
    "muon_no_split_qkv muon_tp_mode muon_fp32_matmul_prec".split()
)
NARROW = "use_precision_aware_optimizer main_grads_dtype exp_avg_dtype exp_avg_sq_dtype".split()
# fields that get their defaults in every case
FP8 = "fp8_format fp8_recipe fp8_margin first_last_layers_bf16 fp8_amax_history_len fp8_amax_compute_algo".split()


@dataclass(frozen=True)
class Shrunk:
    """The small configuration that is trained instead of the user's."""

    plan: RunPlan
    original: RunPlan
    mode: str  # 'fp64' or 'native'
    num_microbatches: tuple[int, ...]  # of each step, on one dp rank


def shrink(
    plan: RunPlan, mode: str, world_size: int, ranks_per_node: int | None = None, on_gpus: bool = False
) -> Shrunk:
    """Return the plan with small sizes. mode: 'fp64', or 'native' for the configuration's own dtype."""
    config, counts = plan.config, plan.whole_stages().partition.layer_counts
    if mode == "native" and plan.model.has_experts:
        raise ConfigError(
            f"--verify-grid native compares with fp64, in which tokens may choose other experts than in "
            f"{config.precision.dtype}; use --verify-grid for a model with experts"
        )
    if sum(counts) > MAX_LAYERS:  # all stages lose the same number of layers, so that the largest keeps two
        fewer = max(max(counts) - 2, 0)
        counts = tuple(max(count - fewer, min(count, 1)) for count in counts)
    layers = [layer_configs(config.model)[number] for number in kept_layers(plan, counts)]
    values, sizes = _model_sizes(config, layers, plan.topology.tp)
    cut = with_layers(config, plan, counts, sizes)
    training, num_microbatches = _training(plan)
    precision = _precision(config.precision, mode, plan.is_synchronous)
    recompute, offload = config.recompute, config.offload
    parallel = dataclasses.replace(
        cut.parallel, grad_reduce_in_bf16=config.parallel.grad_reduce_in_bf16 and mode == "native"
    )
    if mode == "fp64" and on_gpus:  # in fp64 GPUs have no fused attention whose results could be kept
        recompute = dataclasses.replace(recompute, recompute_keep_attention=False)
    if offload.cpu_offloading_num_layers:  # the tensors are small now and still have to move
        offload = dataclasses.replace(offload, min_offloaded_tensor_size=1)
    optimizer, rounds_to_bf16 = cut.optimizer, parallel.grad_reduce_in_bf16
    if mode == "native":
        rounds_to_bf16 = rounds_to_bf16 or state_dtypes(optimizer, precision).is_narrow
    else:
        optimizer = dataclasses.replace(optimizer, **_values(OptimizerConfig(), NARROW))
    small = Config(
        model=dataclasses.replace(cut.model, **values),
        parallel=parallel,
        recompute=recompute,
        offload=offload,
        training=training,
        optimizer=_optimizer(optimizer, *RATES["bf16" if rounds_to_bf16 else precision.dtype]),
        precision=precision,
        data=DataConfig(**_values(config.data, DATA_KEPT)),
    )
    resolved = resolve(small, world_size, ranks_per_node)
    wanted = max(len(layout.buckets) for layout in _layouts(plan))
    if wanted > 1:  # give the largest stage as many buckets as it had
        bucket_size = max(1, max(layout.numel for layout in _layouts(resolved)) // wanted)
        small = dataclasses.replace(small, parallel=dataclasses.replace(small.parallel, ddp_bucket_size=bucket_size))
        resolved = resolve(small, world_size, ranks_per_node)
    return Shrunk(resolved, plan, mode, num_microbatches)


def _layouts(plan: RunPlan) -> list[BufferLayout]:
    return [layout for stage in range(plan.placement.num_stages) for layout in plan.buffers(stage, 0)]


def _values(section: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(section, name) for name in names}


def _model_sizes(
    config: ResolvedConfig, layers: Sequence[LayerConfig], tp: int
) -> tuple[dict[str, Any], Callable[[LayerConfig], dict[str, Any]]]:
    """Return the small sizes of a model of these layers, and a function that returns those of a layer. What layers have
    in other sizes keeps its proportions.
    """
    kinds = (model := config.model, *dict.fromkeys(layers))
    heads, whole, held = model.num_attention_heads, 1, 1
    if all(kind.num_query_groups % tp == 0 for kind in kinds):
        # each rank has whole groups: keep two of them, or one for each rank of a2a; groups shared by ranks are all kept
        whole = math.gcd(*(kind.num_query_groups // tp for kind in kinds))
    held = min(whole, max(2, heads_exchanged(config)))
    rotated = [kind.rotary_percent for kind in kinds if kind.position_embedding_type == "rope"]
    # 8 channels, or the smallest size above for which each --rotary-percent rotates whole pairs
    channels = {size: [int(size * share) for share in rotated] for size in range(8, model.kv_channels)}
    sizes = (size for size, counts in channels.items() if all(count > 0 and count % 2 == 0 for count in counts))
    # about 16 tokens, at least two for each rank that holds some of them, three for each slice in the pipeline
    divisor = tp if config.parallel.sequence_parallel else 1
    if config.parallel.context_parallel_size > 1:
        divisor = math.lcm(2, divisor) * config.parallel.context_parallel_size
    least = divisor * (3 * slices if (slices := config.parallel.pipe_sp_splits) > 1 else 2)
    seq = min(model.seq_length, max(16, least) // divisor * divisor)
    widest = max(kind.ffn_hidden_size for kind in kinds) // tp
    narrow = MAX_FFN if all(kind.norm_position == "before" for kind in kinds) else MAX_NORMED_FFN
    windows = [kind.window_size for kind in kinds if kind.window_size is not None]
    longest = max((size for size in windows if size < model.seq_length), default=1)

    def small(kind: ResolvedModelConfig) -> dict[str, Any]:
        window = kind.window_size
        if window is not None:  # it hides keys if the original one does
            window = seq if window >= model.seq_length else _scaled(window, longest, max(1, seq // 3))
        return {
            "num_query_groups": kind.num_query_groups // whole * held,
            "ffn_hidden_size": tp * _scaled(kind.ffn_hidden_size // tp, widest, narrow),
            "window_size": window,
        }

    vocab, padded = model.vocab_size, model.padded_vocab_size
    rows = min(padded, tp * max(8, 48 // tp))
    if vocab > rows - tp:  # with padded rows if the original has any
        vocab, padded = rows - min(padded - vocab, 3), rows
    is_derived_scale = math.isclose(
        model.softmax_scale,
        dataclasses.replace(model, softmax_scale=None).attention_scale(),  # type: ignore[arg-type]
    )
    values = dict(
        hidden_size=min(model.hidden_size, 32),
        num_attention_heads=heads // whole * held,
        kv_channels=None if model.multi_latent_attention else next(sizes, model.kv_channels),
        seq_length=seq,
        max_position_embeddings=seq + min(model.max_position_embeddings - model.seq_length, 3),
        vocab_size=vocab,
        padded_vocab_size=padded,
        softmax_scale=None if is_derived_scale else model.softmax_scale,
        **_experts(config, tp),
        **_latents(model),
        **small(model),
    )
    return values, small


def _latents(model: ResolvedModelConfig) -> dict[str, Any]:
    """Return small sizes of latent attention."""
    if not model.multi_latent_attention:
        return {}
    smallest = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 6}
    values = _values(model, smallest)
    return {name: None if value is None else min(value, smallest[name]) for name, value in values.items()}


def _experts(config: ResolvedConfig, tp: int) -> dict[str, Any]:
    """Return the options of experts with small widths."""
    model, etp = config.model, config.parallel.expert_tensor_parallel_size or tp
    if model.num_experts is None:
        return {}
    widths = {"moe_ffn_hidden_size": etp, "moe_shared_expert_intermediate_size": tp}
    given = {name: (width, widths[name]) for name, width in _values(model, widths).items() if width is not None}
    return {
        "moe_router_force_load_balancing": False,  # the reference chooses experts by their scores
        **{name: ranks * min(width // ranks, MAX_NORMED_FFN) for name, (width, ranks) in given.items()},
    }


def _scaled(size: int, largest: int, limit: int) -> int:
    """Return a size in its proportion to the largest one, which becomes `limit` if it is above; at least a quarter."""
    return size if largest <= limit else min(size, max(1, limit // 4, limit * size // largest))


def _training(plan: RunPlan) -> tuple[TrainingConfig, tuple[int, ...]]:
    """Return the training section and the microbatches of each step; a ramp-up starts at its first batch size."""
    training, batch = plan.config.training, plan.batch
    group = plan.config.parallel.microbatch_group_size_per_virtual_pipeline_stage or plan.topology.pp
    # asynchronous schedules: three steps reach every staleness; more updates would only accumulate more rounding of a
    # native dtype
    most = max(MAX_MICROBATCHES, 4 * group) if plan.is_synchronous else 2 * group

    def fewer(num_microbatches: int) -> int:
        """Limit the microbatches to `most`, with the same remainder over the groups of interleaving."""
        return num_microbatches if num_microbatches <= most else most // group * group + num_microbatches % group

    counts = [fewer(size // batch.samples_per_microbatch) for size in (batch.sizes[0], batch.full)]
    micro = min(training.micro_batch_size, 2)
    first, full = (count * micro * plan.topology.dp for count in counts)
    chunk = None if training.cross_entropy_chunk_size is None else 3  # several chunks, the last one shorter
    small = TrainingConfig(
        micro_batch_size=micro,
        global_batch_size=full,
        rampup_batch_size=(first, full - first, first) if first < full else None,
        train_samples=first + (NUM_STEPS - 1) * full,
        cross_entropy_chunk_size=chunk,
        **_values(training, TRAINING_KEPT),
    )
    return small, (counts[0], *[counts[1]] * (NUM_STEPS - 1))


def _optimizer(optimizer: OptimizerConfig, lr: float, adam_eps: float) -> OptimizerConfig:
    """Return the same update rule with a constant learning rate that is large enough to move the weights."""
    has_other_rate = optimizer.decoupled_lr is not None and optimizer.decoupled_lr != optimizer.lr
    return OptimizerConfig(
        lr=lr,
        lr_decay_style="constant",
        decoupled_lr=lr / 2 if has_other_rate else None,
        adam_eps=max(optimizer.adam_eps, adam_eps),
        **_values(optimizer, [*OPTIMIZER_KEPT, *NARROW]),
    )


def _precision(precision: PrecisionConfig, mode: str, may_repeat: bool) -> PrecisionConfig:
    """Return fp64, or the dtype without fp8: the verification is about the grid, with torch's own kernels."""
    if mode == "fp64":
        return PrecisionConfig(dtype="fp64")
    precision = dataclasses.replace(precision, **_values(PrecisionConfig(), FP8))
    if precision.dtype != "fp16" or precision.loss_scale is not None:
        return precision
    scale = max(min(precision.initial_loss_scale, INITIAL_LOSS_SCALE), precision.min_loss_scale)
    if not may_repeat:  # a step of a stream whose gradients overflow
        return dataclasses.replace(precision, loss_scale=scale)
    return dataclasses.replace(precision, initial_loss_scale=scale)
