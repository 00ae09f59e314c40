"""Rules of kernels, fp8, CUDA graphs, offload and overlapped tensor-parallel collectives.

What a library has no kernel for is refused, never computed by another one.
"""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.config.model import GATED_ACTIVATIONS
from megapipe.config.rules.proposals import chosen

FP8_MULTIPLE = 16  # the matrix units of Hopper need every size of an fp8 GEMM to be a multiple of this
HALF_TYPES = ("bf16", "fp16")
GRAPHS = "--cuda-graph-impl local"
TRANSFORMER_ENGINE = "--transformer-impl transformer_engine"


def attention_kernel(config: Config) -> Iterator[str]:
    """Yield what the chosen attention kernel cannot compute."""
    impl, model = config.kernels.attention_impl, config.model
    if impl == "sdpa":
        return
    unsupported = chosen(
        ("--attention-dropout above 0 (use --attention-dropout 0)", model.attention_dropout > 0),
        ("--attention-softmax-in-fp32 (its kernels always use fp32: leave it out)", model.attention_softmax_in_fp32),
        ("--reset-attention-mask", config.data.reset_attention_mask),
        ("--attn-logit-softcapping", impl == "te" and model.attn_logit_softcapping is not None),
        (f"--dtype {config.precision.dtype} (use --bf16 or --fp16)", config.precision.dtype not in HALF_TYPES),
    )
    if unsupported:
        yield f"--attention-impl {impl} has no kernel for {', '.join(unsupported)}; or use --attention-impl sdpa"


def optimizer_kernel(config: Config) -> Iterator[str]:
    """Yield what the chosen fused optimizer cannot compute."""
    impl, optimizer = config.kernels.optimizer_impl, config.optimizer
    if impl == "torch":
        return
    if optimizer.optimizer != "adam":
        yield (
            f"--optimizer-impl {impl} is a fused Adam, but --optimizer is {optimizer.optimizer}; "
            "use --optimizer-impl torch"
        )
    elif config.precision.dtype == "fp64":
        yield f"--optimizer-impl {impl} has fp32 master weights, but --dtype is fp64; use --optimizer-impl torch"
    elif optimizer.optimizer_cpu_offload:
        yield (
            f"--optimizer-impl {impl} updates on the GPU, but --optimizer-cpu-offload keeps the state on the host; "
            "leave one of the two out"
        )
    elif impl == "apex" and config.kernels.transformer_impl == "transformer_engine":
        yield (
            f"--optimizer-impl apex also uses apex's norms and weight gradients, {TRANSFORMER_ENGINE} its own; "
            "use --optimizer-impl te or torch with it"
        )


def libraries(config: Config) -> Iterator[str]:
    """Yield what the chosen libraries rule out."""
    kernels, recompute, precision = config.kernels, config.recompute, config.precision
    picked = chosen(
        (f"--transformer-impl {kernels.transformer_impl}", kernels.transformer_impl != "local"),
        (f"--attention-impl {kernels.attention_impl}", kernels.attention_impl != "sdpa"),
        (f"--optimizer-impl {kernels.optimizer_impl}", kernels.optimizer_impl != "torch"),
    )
    if config.training.device == "cpu" and picked:
        yield f"{', '.join(picked)}: these libraries need a GPU, but --device is cpu; leave one of the two out"
    if kernels.transformer_impl != "transformer_engine":
        return
    selected = recompute.recompute_modules if recompute.recompute_granularity == "selective" else ()
    inputs = [module for module in ("layernorm", "activation") if module in selected]
    repeats_linears = recompute.recompute_granularity == "full" or "mlp" in selected
    if precision.dtype == "fp64":
        yield f"{TRANSFORMER_ENGINE} does not compute in fp64; use --transformer-impl local"
    elif inputs:
        yield (
            f"--recompute-modules {' '.join(inputs)}: Transformer Engine's linears keep their inputs anyway, so "
            "recomputing them would save nothing; use core_attn or mlp, --recompute-granularity full, or "
            "--transformer-impl local"
        )
    elif repeats_linears and precision.fp8_format is not None and precision.fp8_recipe == "delayed":
        yield (
            f"{TRANSFORMER_ENGINE} changes the scales of delayed fp8 in every forward, so that a recomputed linear "
            "gives other numbers; use --fp8-recipe tensorwise, or recompute only core_attn"
        )
    if config.parallel.tp_comm_overlap:
        yield (
            f"--tp-comm-overlap: {TRANSFORMER_ENGINE} overlaps in its own way, with user buffers that are not set up "
            "here; use --transformer-impl local, or leave --tp-comm-overlap out"
        )
    if config.offload.cpu_offloading_num_layers:
        yield (
            f"--cpu-offloading-num-layers: the layers of {TRANSFORMER_ENGINE} keep casts of their weights among their "
            "activations, which would be offloaded too; use --transformer-impl local, or --recompute-granularity"
        )


def fp8(config: Config) -> Iterator[str]:
    """Yield what fp8 GEMMs rule out."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    if config.precision.fp8_format is None:
        return
    if config.precision.dtype == "fp64":
        yield "--fp8-format with --dtype fp64: fp64 is for verification, and fp8 would limit its precision; use --bf16"
    elif config.optimizer.optimizer_post_validation:
        yield (
            "--fp8-format casts the weights once a step, but --optimizer-post-validation may roll them back within the "
            "step; leave one of the two out"
        )
    head, groups, ffn = model.head_size(), max(1, model.query_groups() // tp), model.feed_forward_size()
    sizes = (
        ("--micro-batch-size x --seq-length", config.training.micro_batch_size * model.seq_length),
        ("--hidden-size", model.hidden_size),
        ("attention width / tp", model.num_attention_heads * head // tp),
        ("query-key-value rows / tp", (model.num_attention_heads // tp + 2 * groups) * head),
        ("--ffn-hidden-size / tp", ffn // tp),
        ("rows of the MLP's first linear / tp", (2 if model.activation in GATED_ACTIVATIONS else 1) * ffn // tp),
    )
    odd = [f"{name} = {size}" for name, size in sizes if size % FP8_MULTIPLE]
    if odd:
        yield (
            f"--fp8-format needs GEMMs whose sizes are multiples of {FP8_MULTIPLE}, but {', '.join(odd)}; "
            "choose other sizes, a smaller --tensor-model-parallel-size, or no fp8"
        )


def cuda_graphs(config: Config) -> Iterator[str]:
    """Yield what CUDA graphs rule out: a replay launches what was recorded, so the host cannot decide anything."""
    if config.gpu.cuda_graph_impl == "none":
        return
    if config.training.device == "cpu":
        yield f"{GRAPHS}: CUDA graphs need a GPU, but --device is cpu; leave one of the two out"
    reasons = list(_varies_between_replays(config))
    if reasons:
        yield f"{GRAPHS} repeats in every step what was recorded in one: " + "; ".join(reasons)


def _varies_between_replays(config: Config) -> Iterator[str]:
    """Yield what would have to change between replays or cannot be recorded, each with its way out."""
    model, parallel, precision, kernels = config.model, config.parallel, config.precision, config.kernels
    dropout = chosen(
        (f"--hidden-dropout {model.hidden_dropout:g}", model.hidden_dropout > 0),
        (f"--attention-dropout {model.attention_dropout:g}", model.attention_dropout > 0),
    )
    engine = chosen(
        (TRANSFORMER_ENGINE, kernels.transformer_impl == "transformer_engine"),
        ("--attention-impl te", kernels.attention_impl == "te"),
    )
    if dropout:
        yield (
            f"{' and '.join(dropout)} would drop the same elements in every step; give --hidden-dropout 0 "
            "--attention-dropout 0"
        )
    if precision.dtype == "fp16" and precision.loss_scale is None:
        yield "--fp16 adapts its loss scale during training; use --bf16, or a fixed --loss-scale"
    delayed = precision.fp8_format is not None and precision.fp8_recipe == "delayed"
    if delayed and config.gpu.cuda_graph_warmup_steps < 2:
        yield "delayed scales of --fp8-format exist from the second step on; give --cuda-graph-warmup-steps 2 or more"
    if engine:
        yield (
            f"{' and '.join(engine)}: Transformer Engine keeps state in Python; use --transformer-impl local with sdpa "
            "or flash"
        )
    if config.offload.cpu_offloading_num_layers:
        yield (
            f"--cpu-offloading-num-layers {config.offload.cpu_offloading_num_layers} moves activations when autograd "
            "asks for them, which a replay does not; leave it out, or use --recompute-granularity"
        )
    if config.optimizer.optimizer_post_validation:
        yield (
            "--optimizer-post-validation may run forwards twice while their first messages are in flight; leave it out"
        )
    if parallel.distributed_backend == "gloo" and parallel.tensor_model_parallel_size > 1:
        yield (
            "--distributed-backend gloo computes tensor-parallel sums on the host; use nccl, or "
            "--tensor-model-parallel-size 1"
        )


def offload(config: Config) -> Iterator[str]:
    """Check the number of offloaded layers."""
    count, size = config.offload.cpu_offloading_num_layers, config.recompute.recompute_num_layers
    if config.recompute.recompute_method == "uniform" and size is not None and count % size:
        yield (
            f"--cpu-offloading-num-layers {count} splits a group of --recompute-num-layers {size}, which keeps one "
            f"input for all its layers; use a multiple of {size}"
        )


def overlap_chunks(config: Config) -> Iterator[str]:
    """Yield if the overlapped collectives cannot be cut into that many chunks."""
    parallel, length, tp = config.parallel, config.model.seq_length, config.parallel.tensor_model_parallel_size
    count, positions = parallel.tp_comm_overlap_chunks, length // tp if parallel.sequence_parallel else length
    if not parallel.tp_comm_overlap or tp == 1 or count <= positions:
        return
    cut = f"--seq-length {length}"
    if parallel.sequence_parallel:
        cut = f"a rank's slice of --seq-length {length}, {positions} positions,"
    yield (
        f"--tp-comm-overlap-chunks {count} is more than {cut} can be cut into; use at most {positions}, or leave "
        "--tp-comm-overlap out"
    )


RULES = (attention_kernel, optimizer_kernel, libraries, fp8, cuda_graphs, offload, overlap_chunks)
