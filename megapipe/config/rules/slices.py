"""Rules of --pipe-sp-splits: how many slices a sequence can have, and what they cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.config.model import ATTENTIONS
from megapipe.config.rules.proposals import chosen
from megapipe.formatting import one_of

FLAG = "--pipe-sp-splits"


def length(config: Config) -> Iterator[str]:
    """Check that every slice can have a token, with sequence parallelism one for each tp rank."""
    parallel, seq = config.parallel, config.model.seq_length
    slices, tp = parallel.pipe_sp_splits, parallel.tensor_model_parallel_size
    unit = tp if parallel.sequence_parallel else 1
    most = seq // unit
    if slices > 1 and slices > most >= 1:
        rule = f" of a multiple of --tensor-model-parallel-size {tp}, with --sequence-parallel" if unit > 1 else ""
        yield f"{FLAG} {slices}: --seq-length {seq} has at most {most} slices{rule}; use {most} or fewer"


def combinations(config: Config) -> Iterator[str]:
    """Yield what slices cannot be combined with."""
    parallel, model, kernels, recompute = config.parallel, config.model, config.kernels, config.recompute
    if parallel.pipe_sp_splits == 1:
        return
    if model.hidden_dropout or model.attention_dropout:
        yield (
            f"{FLAG} {parallel.pipe_sp_splits} with --hidden-dropout {model.hidden_dropout:g} and --attention-dropout "
            f"{model.attention_dropout:g}: masks would depend on the number of slices; use 0 for both"
        )
    refused = chosen(
        ("--context-parallel-size", parallel.context_parallel_size > 1),
        ("--num-experts", model.num_experts is not None),
        ("--multi-latent-attention", model.multi_latent_attention),
        ("--mtp-num-layers", bool(model.mtp_num_layers)),
        (f"--softmax-type {model.softmax_type}", model.softmax_type != "vanilla"),
        (f"--attention-kind {model.attention_kind}", ATTENTIONS[model.attention_kind].function is not None),
        (f"--attention-impl {kernels.attention_impl}", kernels.attention_impl != "sdpa"),
        (f"--transformer-impl {kernels.transformer_impl}", kernels.transformer_impl != "local"),
        ("--fp8-format", config.precision.fp8_format is not None),
        ("--pipeline-message-dtype", parallel.pipeline_message_dtype is not None),
        ("--compile-pointwise", kernels.compile_pointwise),
        ("--cuda-graph-impl", config.gpu.cuda_graph_impl != "none"),
        ("--cpu-offloading-num-layers", config.offload.cpu_offloading_num_layers > 0),
        ("--recompute-keep-attention", recompute.recompute_keep_attention),
        ("--pipeline-rank-memory", parallel.pipeline_rank_memory is not None),
        ("--optimizer-post-validation", config.optimizer.optimizer_post_validation),
    )
    if refused:
        yield f"{FLAG} {parallel.pipe_sp_splits} does not work with {one_of(refused)} yet; leave one of the two out"


RULES = (length, combinations)
