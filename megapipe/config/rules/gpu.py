"""Rules of kernels, fp8, CUDA graphs, offload and overlapped tensor-parallel collectives.

Options of attention and updates that a library has no kernel for are refused. Where it lacks the modules or kernels for
parts of sequences, sinks and the like, megapipe's own compute the same function, and a remark says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megapipe.config.config import Config
from megapipe.config.gpu import OTHER_GRAPHS
from megapipe.config.layers import HALF_TYPES, LayerConfig, of_each_kind
from megapipe.config.model import ACTIVATIONS, NORMALIZATIONS
from megapipe.config.problems import chosen
from megapipe.config.rules.context import FP8_MULTIPLE
from megapipe.config.rules.pairs import words_of
from megapipe.dtypes import MICRO_BLOCK
from megapipe.environment import missing_for_triton, sees_gpu
from megapipe.input_files import read_table

GRAPHS = "--cuda-graph-impl local"
TRANSFORMER_ENGINE = "--transformer-impl transformer_engine"
# option of kernels -> its value for megapipe's own, and what these compute
OWN_KERNELS = {
    "kernels.transformer_impl": ("local", "megapipe's own linears and norms compute"),
    "kernels.attention_impl": ("sdpa", "torch's kernels compute attention"),
}
# option of kernels -> options that its libraries do not have -> reason
LACKING = {
    key: {name: reason for of, name, reason in read_table(Path(__file__).with_name("lacking.csv")) if of == key}
    for key in OWN_KERNELS
}
ONE_OF_TWO = "leave one of the two out"
ANY_UPDATE = ("auto", "torch")  # values of --optimizer-impl with which any optimizer works


def overlaps_by_default(config: Config) -> bool:
    """Return whether --tp-comm-overlap is on if it is not given: on GPUs from tp 4, where its collectives cost most."""
    parallel, tp = config.parallel, config.parallel.tensor_model_parallel_size
    length = config.model.seq_length // parallel.context_parallel_size // tp
    fits = parallel.sequence_parallel and length >= parallel.tp_comm_overlap_chunks
    return tp >= 4 and fits and uses_gpu(config) and config.kernels.transformer_impl == "local"


def uses_gpu(config: Config) -> bool:
    """Return whether the run is on a GPU.

    --device auto means a GPU where this machine has one, so a plan for GPUs made elsewhere needs --device cuda.
    """
    return config.training.device == "cuda" or (config.training.device == "auto" and sees_gpu())


def why_not_compiled(config: Config) -> str | None:
    """Return why the loss and AdamW are not compiled by default; None if they are.

    A machine without a GPU plans for others, which are taken to have what compiling needs. The ranks of a run compare
    what each has chosen.
    """
    return "no GPU" if not uses_gpu(config) else missing_for_triton() if sees_gpu() else None


def with_compiled(config: Config) -> Config:
    """Return the configuration with what it leaves open about compiling the loss and the optimizer."""
    kernels, compiles = config.kernels, why_not_compiled(config) is None
    if kernels.compile_loss is None:
        kernels = dataclasses.replace(kernels, compile_loss=kernels.compile_pointwise or compiles)
    if kernels.optimizer_impl == "auto":
        fits = compiles and not why_not_fused(config) and not config.optimizer.use_precision_aware_optimizer
        kernels = dataclasses.replace(kernels, optimizer_impl="compiled" if fits else "torch")
    return dataclasses.replace(config, kernels=kernels)


def libraries(config: Config) -> Iterator[str]:
    """Yield what the chosen libraries, attention kernel and fused optimizer cannot compute."""
    kernels, model, dtype = config.kernels, config.model, config.precision.dtype
    attention, impl = kernels.attention_impl, kernels.optimizer_impl
    unsupported = chosen(
        ("--attention-dropout above 0 (use --attention-dropout 0)", model.attention_dropout > 0),
        ("--attention-softmax-in-fp32 (its kernels always use fp32: leave it out)", model.attention_softmax_in_fp32),
        (
            "--sft (documents that do not see each other)" if config.data.sft else "--reset-attention-mask",
            config.data.reset_attention_mask and attention == "te",
        ),
        (f"--dtype {dtype} (use --bf16 or --fp16)", dtype not in HALF_TYPES),
    )
    if attention != "sdpa" and unsupported:
        yield f"--attention-impl {attention} has no kernel for {', '.join(unsupported)}; or use --attention-impl sdpa"
    reason = why_not_fused(config)
    if not reason and impl == "apex" and kernels.transformer_impl == "transformer_engine":
        way = "use --optimizer-impl te or torch with it"
        reason = f"also uses apex's norms and weight gradients, {TRANSFORMER_ENGINE} its own; {way}"
    if impl not in ANY_UPDATE and reason:
        yield f"--optimizer-impl {impl} {reason}"
    if impl == "apex" and NORMALIZATIONS[model.normalization].function is not None:
        way = "use --optimizer-impl torch"
        yield f"--optimizer-impl apex has norms of its own, not --normalization {model.normalization}; {way}"
    picked = chosen(
        (f"--transformer-impl {kernels.transformer_impl}", kernels.transformer_impl != "local"),
        (f"--attention-impl {attention}", attention != "sdpa"),
        (f"--optimizer-impl {impl}", impl not in (*ANY_UPDATE, "compiled")),
    )
    if config.training.device == "cpu" and picked:
        yield f"{', '.join(picked)}: these libraries need a GPU, but --device is cpu; {ONE_OF_TWO}"


def why_not_fused(config: Config) -> str:
    """Return why no fused Adam can update, and a way out; '' if one can."""
    optimizer = config.optimizer
    if optimizer.optimizer != "adam":
        return f"is a fused Adam, but --optimizer is {optimizer.optimizer}; use --optimizer-impl torch"
    if config.precision.dtype == "fp64":
        return "has fp32 master weights, but --dtype is fp64; use --optimizer-impl torch"
    if optimizer.optimizer_cpu_offload:
        return f"updates on the GPU, but --optimizer-cpu-offload keeps the state on the host; {ONE_OF_TWO}"
    return ""


def with_own_kernels(config: Config) -> Config:
    """Return the configuration with megapipe's own kernels where those of a library lack what it chooses.

    --transformer-impl and --attention-impl say which kernels compute, not which function; `own_kernels` names what is
    lacking.
    """
    for key, own, _ in _lacking(config):
        section, _, option = key.partition(".")
        changed: Any = dataclasses.replace(getattr(config, section), **{option: own})
        config = dataclasses.replace(config, **{section: changed})
    return config


def own_kernels(config: Config) -> list[str]:
    """Return a remark for each choice that the chosen libraries cannot do."""
    return [remark for _, _, remark in _lacking(config)]


def _lacking(config: Config) -> list[tuple[str, str, str]]:
    """Return options of kernels, with megapipe's own value and a remark, for what their libraries cannot do."""
    found = []
    for key, (own, instead) in OWN_KERNELS.items():
        option = key.partition(".")[2]
        library = getattr(config.kernels, option)
        flag = f"--{option.replace('_', '-')} {library}"
        reasons = [(words_of(config, name), reason) for name, reason in LACKING[key].items() if library != own]
        found += [(key, own, f"{flag} with {words}: {reason}, so {instead}") for words, reason in reasons if words]
    if config.gpu.cuda_graph_impl in OTHER_GRAPHS:
        way = f"kernels are launched one by one; {GRAPHS} records whole stages"
        found.append(("gpu.cuda_graph_impl", "none", f"--cuda-graph-impl {config.gpu.cuda_graph_impl}: {way}"))
    return found


def fp8(config: Config) -> Iterator[str]:
    """Yield what fp8 GEMMs rule out."""
    precision = config.precision
    if precision.fp8_format is not None and precision.dtype == "fp64":
        yield "--fp8-format with --dtype fp64: fp64 is for verification, and fp8 would limit its precision; use --bf16"
    is_delayed = precision.fp8_format is not None and precision.fp8_recipe == "delayed"
    if is_delayed and with_own_kernels(config).kernels.transformer_impl == "local":
        lacking = "".join(f" ({remark})" for key, _, remark in _lacking(config) if key == "kernels.transformer_impl")
        rule = f"needs {TRANSFORMER_ENGINE}: megapipe's own linears keep no history of scales{lacking}"
        yield f"--fp8-recipe delayed {rule}; use --fp8-recipe tensorwise, or blockwise or mxfp8 on GPUs that have it"


def unused_history(config: Config) -> list[str]:
    """Return a remark if settings of delayed scales have no effect, as in Megatron."""
    precision = config.precision
    if precision.fp8_format is None or precision.fp8_recipe == "delayed":
        return []
    flags = chosen(
        ("--fp8-amax-history-len", precision.fp8_amax_history_len != 1),
        ("--fp8-amax-compute-algo", precision.fp8_amax_compute_algo != "most_recent"),
    )
    rule = "without --fp8-recipe delayed: scales come from the tensors of the same step"
    return [f"{' and '.join(flags)} {rule}"] if flags else []


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
    elif layer.mixer is not None:
        sizes |= layer.mixer_kind.module.declare(layer).widths(tp)
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
    flag, multiple = "--fp8-format", FP8_MULTIPLE
    if config.precision.fp8_recipe == "mxfp8" and config.kernels.transformer_impl == "transformer_engine":
        flag, multiple = "--fp8-recipe mxfp8 with --transformer-impl transformer_engine", MICRO_BLOCK
    odd = [f"{name} = {size}" for name, size in sizes.items() if size % multiple]
    if odd:
        way = "choose other sizes, a smaller --tensor-model-parallel-size, or no fp8"
        yield f"{flag} needs GEMMs whose sizes are multiples of {multiple}, but {', '.join(odd)}; {way}"


def cuda_graphs(config: Config) -> Iterator[str]:
    """Yield what CUDA graphs rule out: a replay launches what was recorded, so the host cannot decide anything."""
    model, parallel, precision = config.model, config.parallel, config.precision
    if config.gpu.cuda_graph_impl != "local":
        return
    if config.training.device == "cpu":
        yield f"{GRAPHS}: CUDA graphs need a GPU, but --device is cpu; {ONE_OF_TWO}"
    reasons = []  # what would have to change between replays or cannot be recorded, each with its way out
    dropout = chosen(
        (f"--hidden-dropout {model.hidden_dropout:g}", model.hidden_dropout > 0),
        (f"--attention-dropout {model.attention_dropout:g}", model.attention_dropout > 0),
    )
    if dropout:
        way = "give --hidden-dropout 0 --attention-dropout 0"
        reasons.append(f"{' and '.join(dropout)} would drop the same elements in every step; {way}")
    if precision.dtype == "fp16" and precision.loss_scale is None:
        reasons.append("--fp16 adapts its loss scale during training; use --bf16, or a fixed --loss-scale")
    if config.gpu.cuda_graph_warmup_steps == 0:
        reasons.append("kernels are set up in steps before it; give --cuda-graph-warmup-steps 1 or more")
    if parallel.distributed_backend == "gloo" and parallel.tensor_model_parallel_size > 1:
        way = "use nccl, or --tensor-model-parallel-size 1"
        reasons.append(f"--distributed-backend gloo computes tensor-parallel sums on the host; {way}")
    if reasons:
        yield f"{GRAPHS} repeats in every step what was recorded in one: " + "; ".join(reasons)


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


RULES = (libraries, fp8, fp8_sizes, cuda_graphs, offload_and_overlap)
