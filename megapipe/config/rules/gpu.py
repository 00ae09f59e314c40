"""Rules of kernels, fp8, CUDA graphs, offload and overlapped tensor-parallel collectives.

What a library has no kernel for is refused, never computed by another one.
"""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.config.layers import LayerConfig, kinds_of, of_each_kind
from megapipe.config.model import ACTIVATIONS, NORMALIZATIONS
from megapipe.config.parallel import SHARDED_GRADS
from megapipe.config.rules.proposals import chosen
from megapipe.config.rules.sharding import strategy_of
from megapipe.environment import sees_gpu

FP8_MULTIPLE = 16  # the matrix units of Hopper need every size of an fp8 GEMM to be a multiple of this
HALF_TYPES = ("bf16", "fp16")
GRAPHS = "--cuda-graph-impl local"
TRANSFORMER_ENGINE = "--transformer-impl transformer_engine"
ONE_OF_TWO = "leave one of the two out"


def overlaps_by_default(config: Config) -> bool:
    """Return whether --tp-comm-overlap is on if it is not given: on GPUs from tp 4, where its collectives cost most.

    --device auto means a GPU where this machine has one, so a plan for GPUs made elsewhere needs --device cuda.
    """
    parallel, device, tp = config.parallel, config.training.device, config.parallel.tensor_model_parallel_size
    length = config.model.seq_length // parallel.context_parallel_size // tp
    fits = parallel.sequence_parallel and length >= parallel.tp_comm_overlap_chunks
    is_gpu = device == "cuda" or (device == "auto" and sees_gpu())
    return tp >= 4 and fits and is_gpu and config.kernels.transformer_impl == "local"


def libraries(config: Config) -> Iterator[str]:
    """Yield what the chosen libraries, attention kernel and fused optimizer cannot compute."""
    kernels, model, dtype, optimizer = config.kernels, config.model, config.precision.dtype, config.optimizer
    attention, impl = kernels.attention_impl, kernels.optimizer_impl
    unsupported = chosen(
        ("--attention-dropout above 0 (use --attention-dropout 0)", model.attention_dropout > 0),
        ("--attention-softmax-in-fp32 (its kernels always use fp32: leave it out)", model.attention_softmax_in_fp32),
        (f"--softmax-type {model.softmax_type}", model.softmax_type != "vanilla"),
        (
            "--sft (documents that do not see each other)" if config.data.sft else "--reset-attention-mask",
            config.data.reset_attention_mask and attention == "te",
        ),
        (f"--dtype {dtype} (use --bf16 or --fp16)", dtype not in HALF_TYPES),
    )
    if attention != "sdpa" and unsupported:
        yield f"--attention-impl {attention} has no kernel for {', '.join(unsupported)}; or use --attention-impl sdpa"
    reason = ""
    if optimizer.optimizer != "adam":
        reason = f"is a fused Adam, but --optimizer is {optimizer.optimizer}; use --optimizer-impl torch"
    elif dtype == "fp64":
        reason = "has fp32 master weights, but --dtype is fp64; use --optimizer-impl torch"
    elif optimizer.optimizer_cpu_offload:
        reason = f"updates on the GPU, but --optimizer-cpu-offload keeps the state on the host; {ONE_OF_TWO}"
    elif impl == "apex" and kernels.transformer_impl == "transformer_engine":
        way = "use --optimizer-impl te or torch with it"
        reason = f"also uses apex's norms and weight gradients, {TRANSFORMER_ENGINE} its own; {way}"
    if impl != "torch" and reason:
        yield f"--optimizer-impl {impl} {reason}"
    picked = chosen(
        (f"--transformer-impl {kernels.transformer_impl}", kernels.transformer_impl != "local"),
        (f"--attention-impl {attention}", attention != "sdpa"),
        (f"--optimizer-impl {impl}", impl not in ("torch", "compiled")),
    )
    if config.training.device == "cpu" and picked:
        yield f"{', '.join(picked)}: these libraries need a GPU, but --device is cpu; {ONE_OF_TWO}"


def transformer_engine(config: Config) -> Iterator[str]:
    """Yield what Transformer Engine rules out."""
    recompute, precision = config.recompute, config.precision
    if config.kernels.transformer_impl != "transformer_engine":
        return
    selected = recompute.recompute_modules if recompute.recompute_granularity == "selective" else ()
    inputs = [module for module in ("layernorm", "activation") if module in selected]
    has_budget = recompute.recompute_memory_budget is not None
    repeats_linears = recompute.recompute_granularity == "full" or "mlp" in selected or has_budget
    if precision.dtype == "fp64":
        yield f"{TRANSFORMER_ENGINE} does not compute in fp64; use --transformer-impl local"
    elif inputs:
        way = "use core_attn or mlp, --recompute-granularity full, or --transformer-impl local"
        yield f"--recompute-modules {' '.join(inputs)} saves nothing: Transformer Engine keeps the inputs anyway; {way}"
    elif repeats_linears and precision.fp8_format is not None and precision.fp8_recipe == "delayed":
        rule = "changes the scales of delayed fp8 in every forward, so that a recomputed linear gives other numbers"
        yield f"{TRANSFORMER_ENGINE} {rule}; use --fp8-recipe tensorwise, or recompute only core_attn"
    if config.parallel.tp_comm_overlap:
        way = "use --transformer-impl local, or leave --tp-comm-overlap out"
        yield f"{TRANSFORMER_ENGINE} overlaps in its own way, with user buffers that are not set up here; {way}"
    if config.offload.cpu_offloading_num_layers:
        rule = "keeps casts of its weights among the activations, which --cpu-offloading-num-layers would offload too"
        yield f"{TRANSFORMER_ENGINE} {rule}; use --transformer-impl local, or --recompute-granularity"


def fp8(config: Config) -> Iterator[str]:
    """Yield what fp8 GEMMs rule out."""
    if config.precision.fp8_format is None:
        return
    if config.precision.dtype == "fp64":
        yield "--fp8-format with --dtype fp64: fp64 is for verification, and fp8 would limit its precision; use --bf16"
    elif config.optimizer.optimizer_post_validation:
        rule = "but --optimizer-post-validation may roll them back within the step"
        yield f"--fp8-format casts the weights once a step, {rule}; {ONE_OF_TWO}"


@of_each_kind
def fp8_sizes(config: Config, layer: LayerConfig) -> Iterator[str]:
    """Yield the sizes of GEMMs that fp8 cannot multiply."""
    if config.precision.fp8_format is None:
        return
    parallel, tokens = config.parallel, config.training.micro_batch_size * layer.seq_length
    tp, head, heads = parallel.tensor_model_parallel_size, layer.kv_channels, layer.num_attention_heads
    tokens //= parallel.context_parallel_size
    gates = 2 if ACTIVATIONS[layer.activation].is_gated else 1
    sizes = {"--micro-batch-size x --seq-length / cp": tokens, "--hidden-size": layer.hidden_size}
    is_latent = layer.has_attention and layer.multi_latent_attention
    if is_latent:
        latents = {"--q-lora-rank": layer.q_lora_rank or 0, "--kv-lora-rank": layer.kv_lora_rank}
        sizes |= latents | {"--kv-lora-rank + --qk-pos-emb-head-dim": layer.kv_lora_rank + layer.qk_pos_emb_head_dim}
        sizes["attention width / tp"] = heads // tp * head
        sizes["key-value rows / tp"] = heads // tp * (layer.qk_head_dim + layer.v_head_dim)
        sizes["value width / tp"] = heads // tp * layer.v_head_dim
    elif layer.has_attention:
        sizes["attention width / tp"] = heads * head // tp
        sizes["query-key-value rows / tp"] = (heads // tp + 2 * max(1, layer.num_query_groups // tp)) * head
    if parallel.sequence_parallel and (is_latent or layer.mtp_num_layers):  # linears that all tp ranks hold whole
        sizes["--micro-batch-size x --seq-length / cp / tp"] = tokens // tp
    if layer.has_mlp and layer.num_experts is None:
        width = layer.ffn_hidden_size // tp
        sizes["--ffn-hidden-size / tp"] = width
        sizes["rows of the MLP's first linear / tp"] = gates * width
    elif layer.has_mlp:
        width = layer.expert_ffn_size // (parallel.expert_tensor_parallel_size or tp)
        name = "--ffn-hidden-size" if layer.moe_ffn_hidden_size is None else "--moe-ffn-hidden-size"
        sizes |= {f"{name} / etp": width, "rows of an expert's first linear / etp": gates * width}
        shared = (layer.moe_shared_expert_intermediate_size or 0) // tp
        sizes["--moe-shared-expert-intermediate-size / tp"] = shared
        sizes["rows of the shared experts' first linear / tp"] = gates * shared
    odd = [f"{name} = {size}" for name, size in sizes.items() if size % FP8_MULTIPLE]
    if odd:
        way = "choose other sizes, a smaller --tensor-model-parallel-size, or no fp8"
        yield f"--fp8-format needs GEMMs whose sizes are multiples of {FP8_MULTIPLE}, but {', '.join(odd)}; {way}"


def cuda_graphs(config: Config) -> Iterator[str]:
    """Yield what CUDA graphs rule out: a replay launches what was recorded, so the host cannot decide anything."""
    model, parallel, precision, kernels = config.model, config.parallel, config.precision, config.kernels
    if config.gpu.cuda_graph_impl == "none":
        return
    if config.training.device == "cpu":
        yield f"{GRAPHS}: CUDA graphs need a GPU, but --device is cpu; {ONE_OF_TWO}"
    reasons = []  # what would have to change between replays or cannot be recorded, each with its way out
    dropout = chosen(
        (f"--hidden-dropout {model.hidden_dropout:g}", model.hidden_dropout > 0),
        (f"--attention-dropout {model.attention_dropout:g}", model.attention_dropout > 0),
    )
    engine = chosen(
        (TRANSFORMER_ENGINE, kernels.transformer_impl == "transformer_engine"),
        ("--attention-impl te", kernels.attention_impl == "te"),
    )
    if dropout:
        way = "give --hidden-dropout 0 --attention-dropout 0"
        reasons.append(f"{' and '.join(dropout)} would drop the same elements in every step; {way}")
    if precision.dtype == "fp16" and precision.loss_scale is None:
        reasons.append("--fp16 adapts its loss scale during training; use --bf16, or a fixed --loss-scale")
    delayed = precision.fp8_format is not None and precision.fp8_recipe == "delayed"
    if delayed and config.gpu.cuda_graph_warmup_steps < 2:
        reasons.append("delayed fp8 scales exist from the second step on; give --cuda-graph-warmup-steps 2 or more")
    if engine:
        way = "use --transformer-impl local with sdpa or flash"
        reasons.append(f"{' and '.join(engine)}: Transformer Engine keeps state in Python; {way}")
    if config.offload.cpu_offloading_num_layers:
        rule = "moves activations when autograd asks for them, which a replay does not"
        count = config.offload.cpu_offloading_num_layers
        reasons.append(f"--cpu-offloading-num-layers {count} {rule}; leave it out, or use --recompute-granularity")
    if config.data.reset_attention_mask and kernels.attention_impl == "flash":
        rule = "takes documents of other numbers and lengths in every microbatch"
        reasons.append(f"--attention-impl flash {rule}; use --attention-impl sdpa, which then has a mask")
    if config.optimizer.optimizer_post_validation:
        rule = "may run forwards twice while their first messages are in flight"
        reasons.append(f"--optimizer-post-validation {rule}; leave it out")
    if parallel.distributed_backend == "gloo" and parallel.tensor_model_parallel_size > 1:
        way = "use nccl, or --tensor-model-parallel-size 1"
        reasons.append(f"--distributed-backend gloo computes tensor-parallel sums on the host; {way}")
    if reasons:
        yield f"{GRAPHS} repeats in every step what was recorded in one: " + "; ".join(reasons)


def why_not_compiled(config: Config) -> str | None:
    """Return why --compile-blocks cannot compile the blocks of this configuration; None if it can."""
    kernels, optimizer = config.kernels, config.kernels.optimizer_impl
    norm, kinds = NORMALIZATIONS[config.model.normalization], kinds_of(config.model)
    reasons = chosen(
        (f"{TRANSFORMER_ENGINE} has its own fused kernels", kernels.transformer_impl != "local"),
        (f"--optimizer-impl {optimizer} brings its own norms", optimizer == "apex"),
        ("--cuda-graph-impl records the kernels of eager blocks", config.gpu.cuda_graph_impl != "none"),
        (
            "--fp8-format casts between the linears and their GEMMs, and the casts are compiled separately",
            config.precision.fp8_format is not None,
        ),
        (
            "--cpu-offloading-num-layers plans with the activations that eager blocks save",
            config.offload.cpu_offloading_num_layers > 0,
        ),
        ("experts are not compiled", config.model.num_experts is not None),
        ("latent attention is not compiled", config.model.multi_latent_attention),
        ("attention over several cp ranks is not compiled", config.parallel.context_parallel_size > 1),
        ("slices of a sequence (--pipe-sp-splits) are not compiled", config.parallel.pipe_sp_splits > 1),
        (f"--softmax-type {config.model.softmax_type} is not compiled", config.model.softmax_type != "vanilla"),
        ("--activation-func-clamp-value and --glu-linear-offset are not compiled", config.model.bends_gates),
        (
            "--data-parallel-sharding-strategy frees weights and gradients, whose addresses compiled blocks keep",
            strategy_of(config.parallel) in SHARDED_GRADS,
        ),
        ("the norm of an extension is not compiled", norm.function is not None),
        (
            "the activation of an extension is not compiled",
            any(ACTIVATIONS[layer.activation].function is not None for layer in kinds),
        ),
    )
    return "; ".join(reasons) or None


def compiled_blocks(config: Config) -> Iterator[str]:
    """Yield why --compile-blocks on is impossible; auto then leaves the blocks as they are, and says so."""
    reason = why_not_compiled(config)
    if config.kernels.compile_blocks == "on" and reason is not None:
        yield f"--compile-blocks on: {reason}; {ONE_OF_TWO}, or use --compile-blocks auto"


def offload_and_overlap(config: Config) -> Iterator[str]:
    """Check the number of offloaded layers, and the number of chunks of the overlapped collectives."""
    count, group = config.offload.cpu_offloading_num_layers, config.recompute.recompute_num_layers
    if config.recompute.recompute_method == "uniform" and group is not None and count % group:
        rule = f"splits a group of --recompute-num-layers {group}, which keeps one input for all its layers"
        yield f"--cpu-offloading-num-layers {count} {rule}; use a multiple of {group}"
    parallel, tp = config.parallel, config.parallel.tensor_model_parallel_size
    length = config.model.seq_length // parallel.context_parallel_size
    positions = length // tp if parallel.sequence_parallel else length
    if parallel.tp_comm_overlap and tp > 1 and parallel.tp_comm_overlap_chunks > positions:
        rule = f"is more than the {positions} positions of --seq-length {length} that a rank holds"
        way = f"use at most {positions}, or leave --tp-comm-overlap out"
        yield f"--tp-comm-overlap-chunks {parallel.tp_comm_overlap_chunks} {rule}; {way}"


RULES = (libraries, transformer_engine, fp8, fp8_sizes, cuda_graphs, compiled_blocks, offload_and_overlap)
