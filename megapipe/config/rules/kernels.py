"""Rules of the kernels section and of fp8: what a library has no kernel for is refused, never computed by another one."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.config.model import GATED_ACTIVATIONS
from megapipe.config.parallel import ASYNCHRONOUS_SCHEDULES
from megapipe.config.precision import PrecisionConfig

FP8_MULTIPLE = 16  # of every size of a GEMM: what the matrix units of Hopper take
HALF_TYPES = ("bf16", "fp16")


def attention_has_a_kernel(config: Config) -> str | None:
    impl, model = config.kernels.attention_impl, config.model
    if impl == "sdpa":
        return None
    wishes = (
        ("--attention-dropout above 0 (use --attention-dropout 0)", model.attention_dropout > 0),
        ("--attention-softmax-in-fp32 (its kernels always have it: leave it out)", model.attention_softmax_in_fp32),
        ("--reset-attention-mask", config.data.reset_attention_mask),
        ("--attn-logit-softcapping", impl == "te" and model.attn_logit_softcapping is not None),
        (f"--dtype {config.precision.dtype} (use --bf16 or --fp16)", config.precision.dtype not in HALF_TYPES),
    )
    asked = [wish for wish, is_asked in wishes if is_asked]
    return (
        f"--attention-impl {impl} has no kernel for {', '.join(asked)}; or use --attention-impl sdpa" if asked else None
    )


def optimizer_has_a_kernel(config: Config) -> str | None:
    impl, optimizer = config.kernels.optimizer_impl, config.optimizer
    if impl == "torch":
        return None
    if optimizer.optimizer != "adam":
        return f"--optimizer-impl {impl} is a fused Adam, but --optimizer is {optimizer.optimizer}; use --optimizer-impl torch"
    if config.precision.dtype == "fp64":
        return f"--optimizer-impl {impl} has fp32 master weights, but --dtype is fp64; use --optimizer-impl torch"
    if optimizer.optimizer_cpu_offload:
        return f"--optimizer-impl {impl} updates on the GPU, but --optimizer-cpu-offload has the state on the host; leave one of the two out"
    if impl == "apex" and config.kernels.transformer_impl == "transformer_engine":
        return (
            "--optimizer-impl apex brings apex's norms and weight gradients, --transformer-impl transformer_engine its own; "
            "use --optimizer-impl te or torch with it"
        )
    return None


def libraries_compute_on_gpus(config: Config) -> str | None:
    kernels = config.kernels
    chosen = [
        f"{flag} {value}"
        for flag, value, own in (
            ("--transformer-impl", kernels.transformer_impl, "local"),
            ("--attention-impl", kernels.attention_impl, "sdpa"),
            ("--optimizer-impl", kernels.optimizer_impl, "torch"),
        )
        if value != own
    ]
    if config.training.device != "cpu" or not chosen:
        return None
    return f"{', '.join(chosen)}: these libraries compute on GPUs, but --device is cpu; leave the one or the other out"


def transformer_engine_keeps_its_inputs(config: Config) -> str | None:
    if config.kernels.transformer_impl != "transformer_engine":
        return None
    if config.precision.dtype == "fp64":
        return "--transformer-impl transformer_engine does not compute in fp64; use --transformer-impl local"
    recompute = config.recompute
    selected = recompute.recompute_modules if recompute.recompute_granularity == "selective" else ()
    inputs = [module for module in ("layernorm", "activation") if module in selected]
    if inputs:
        return (
            f"--recompute-modules {' '.join(inputs)}: Transformer Engine's linears keep their own inputs, so making them again would "
            "save nothing; use core_attn or mlp, --recompute-granularity full, or --transformer-impl local"
        )
    replays = recompute.recompute_granularity == "full" or "mlp" in selected
    if replays and config.precision.fp8_format is not None and config.precision.fp8_recipe == "delayed":
        return (
            "--transformer-impl transformer_engine changes the scales of delayed fp8 with every forward, so that a linear computed again "
            "gives other numbers; use --fp8-recipe tensorwise, or recompute core_attn alone"
        )
    return None


def fp8_settings_need_fp8(config: Config) -> str | None:
    precision, default = config.precision, PrecisionConfig()
    if precision.fp8_format is not None:
        return None
    names = ("fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "first_last_layers_bf16")
    changed = ["--" + name.replace("_", "-") for name in names if getattr(precision, name) != getattr(default, name)]
    return (
        f"{', '.join(changed)}: there is no fp8 without --fp8-format e4m3 or hybrid; give it, or leave this out"
        if changed
        else None
    )


def fp8_has_one_set_of_weights_a_step(config: Config) -> str | None:
    if config.precision.fp8_format is None:
        return None
    if config.precision.dtype == "fp64":
        return "--fp8-format with --dtype fp64: fp64 is for verification, and fp8 would be its precision; use --bf16"
    schedule = config.parallel.pipeline_schedule
    if schedule in ASYNCHRONOUS_SCHEDULES:
        return f"--fp8-format casts the weights once a step, but --pipeline-schedule {schedule} updates them inside it; use 1f1b"
    if config.optimizer.optimizer_post_validation:
        return "--fp8-format casts the weights once a step, but --optimizer-post-validation can take them back inside it; leave one out"
    return None


def fp8_sizes_are_multiples(config: Config) -> str | None:
    if config.precision.fp8_format is None:
        return None
    odd = [f"{what} = {size}" for what, size in _gemm_sizes(config) if size % FP8_MULTIPLE]
    if not odd:
        return None
    return (
        f"--fp8-format needs GEMMs whose sizes are multiples of {FP8_MULTIPLE}, but {', '.join(odd)}; "
        "choose other sizes, a smaller --tensor-model-parallel-size, or no fp8"
    )


def _gemm_sizes(config: Config) -> Iterator[tuple[str, int]]:
    """What a rank's linears multiply, in words and as a number."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    head, groups = model.head_size(), max(1, model.query_groups() // tp)
    gates = 2 if model.activation in GATED_ACTIVATIONS else 1
    yield "--micro-batch-size x --seq-length", config.training.micro_batch_size * model.seq_length
    yield "--hidden-size", model.hidden_size
    yield "attention width / tp", model.num_attention_heads * head // tp
    yield "query-key-value rows / tp", (model.num_attention_heads // tp + 2 * groups) * head
    yield "--ffn-hidden-size / tp", model.feed_forward_size() // tp
    yield "rows of the MLP's first linear / tp", gates * model.feed_forward_size() // tp


def overlap_has_its_own_gemms(config: Config) -> str | None:
    if not config.parallel.tp_comm_overlap or config.kernels.transformer_impl != "transformer_engine":
        return None
    return (
        "--tp-comm-overlap: --transformer-impl transformer_engine has its own communication, whose user buffers are not set up here; "
        "use --transformer-impl local, or leave --tp-comm-overlap out"
    )


KERNEL_RULES = (
    attention_has_a_kernel,
    optimizer_has_a_kernel,
    libraries_compute_on_gpus,
    transformer_engine_keeps_its_inputs,
    fp8_settings_need_fp8,
    fp8_has_one_set_of_weights_a_step,
    fp8_sizes_are_multiples,
    overlap_has_its_own_gemms,
)
