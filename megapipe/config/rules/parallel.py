"""Rules of the parallel and recompute sections.

Sequence parallelism without tensor parallelism changes nothing and is accepted. Chunks without pipeline ranks are refused, as in Megatron:
interleaving exists to fill a pipeline's bubble, and one rank has none.
"""

from __future__ import annotations

from megapipe.config.config import Config
from megapipe.config.parallel import ParallelConfig
from megapipe.formatting import one_of

AXES = ("tp", "cp", "dp", "pp")


def context_parallel_is_one(config: Config) -> str | None:
    if config.parallel.context_parallel_size == 1:
        return None
    return (
        f"--context-parallel-size {config.parallel.context_parallel_size}: context parallelism is not there yet; "
        "use 1, and --tensor-model-parallel-size with --sequence-parallel for long sequences"
    )


def rank_order_names_axes(config: Config) -> str | None:
    order = config.parallel.rank_order
    if sorted(order.split("-")) == sorted(AXES):
        return None
    return f"--rank-order {order}: name each of {one_of(AXES)} once, joined by -, such as tp-cp-dp-pp or tp-cp-pp-dp"


def chunks_given_once(config: Config) -> str | None:
    parallel = config.parallel
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    if per_chunk is None:
        return None
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        return (
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank both say how many chunks "
            "there are; give one of the two"
        )
    if parallel.pipeline_model_parallel_layout is not None:
        return "--pipeline-model-parallel-layout says what each chunk holds; leave --num-layers-per-virtual-pipeline-stage out"
    return None


def interleaving_needs_pipeline(config: Config) -> str | None:
    parallel = config.parallel
    if parallel.pipeline_model_parallel_size > 1:
        return None
    chunks, per_chunk = parallel.num_virtual_stages_per_pipeline_rank, parallel.num_layers_per_virtual_pipeline_stage
    if chunks is not None and chunks > 1:
        return f"--num-virtual-stages-per-pipeline-rank {chunks} needs --pipeline-model-parallel-size of at least 2; leave it out or raise pp"
    if per_chunk is not None and per_chunk < config.model.num_layers:
        return (
            f"--num-layers-per-virtual-pipeline-stage {per_chunk} needs --pipeline-model-parallel-size of at least 2; leave "
            "it out or raise pp"
        )
    return None


def layers_placed_once(config: Config) -> str | None:
    parallel = config.parallel
    ends = [
        name
        for name, value in (
            ("--decoder-first-pipeline-num-layers", parallel.decoder_first_pipeline_num_layers),
            ("--decoder-last-pipeline-num-layers", parallel.decoder_last_pipeline_num_layers),
        )
        if value is not None
    ]
    counted = [
        name
        for name, value in (
            ("--account-for-embedding-in-pipeline-split", parallel.account_for_embedding_in_pipeline_split),
            ("--account-for-loss-in-pipeline-split", parallel.account_for_loss_in_pipeline_split),
        )
        if value
    ]
    if parallel.pipeline_model_parallel_layout is not None and ends + counted:
        return f"--pipeline-model-parallel-layout places every layer; leave {one_of(ends + counted)} out"
    if ends and counted:
        return f"{one_of(ends)} and {one_of(counted)} are two ways to relieve the same ranks; give one of them"
    return None


def end_layers_fit(config: Config) -> str | None:
    parallel, layers = config.parallel, config.model.num_layers
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if first is None and last is None:
        return None
    pp = parallel.pipeline_model_parallel_size
    if pp == 1:
        return "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers need --pipeline-model-parallel-size of at least 2"
    placed, others = (first or 0) + (last or 0), pp - (first is not None) - (last is not None)
    if placed > layers or (others == 0 and placed != layers):
        return (
            f"the first and last pipeline rank are given {placed} layers and {others} rank(s) between them have to hold "
            f"the rest of --num-layers {layers}; "
            "change --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
        )
    return None


def parameter_gather_needs_distributed_optimizer(config: Config) -> str | None:
    if not config.parallel.overlap_param_gather or config.parallel.use_distributed_optimizer:
        return None
    return "--overlap-param-gather overlaps the gather of the distributed optimizer; add --use-distributed-optimizer or leave it out"


def collective_chunks_are_used(config: Config) -> str | None:
    parallel = config.parallel
    count, default = parallel.tp_comm_overlap_chunks, ParallelConfig().tp_comm_overlap_chunks
    if count == default or parallel.tp_comm_overlap:
        return None
    return f"--tp-comm-overlap-chunks {count}: collectives are cut with --tp-comm-overlap alone; give it, or leave this out"


def collective_chunks_fit_sequence(config: Config) -> str | None:
    parallel, length, tp = config.parallel, config.model.seq_length, config.parallel.tensor_model_parallel_size
    count = parallel.tp_comm_overlap_chunks
    positions = length // tp if parallel.sequence_parallel else length
    if not parallel.tp_comm_overlap or tp == 1 or count <= positions:
        return None
    owned = (
        f"a rank's slice of --seq-length {length}, {positions} positions,"
        if parallel.sequence_parallel
        else f"--seq-length {length}"
    )
    return f"--tp-comm-overlap-chunks {count} is more than {owned} can be cut into; use at most {positions}, or leave --tp-comm-overlap out"


def backend_fits_device(config: Config) -> str | None:
    if config.parallel.distributed_backend == "nccl" and config.training.device == "cpu":
        return "--distributed-backend nccl talks between GPUs, but --device is cpu; use gloo or auto"
    return None


def bf16_reduction_keeps_fp64(config: Config) -> str | None:
    if config.parallel.grad_reduce_in_bf16 and config.precision.dtype == "fp64":
        return "--grad-reduce-in-bf16 would round the gradients of --dtype fp64 to bf16; leave it out"
    return None


def recompute_is_whole(config: Config) -> str | None:
    recompute = config.recompute
    granularity, method, layers = (
        recompute.recompute_granularity,
        recompute.recompute_method,
        recompute.recompute_num_layers,
    )
    if granularity == "full":
        if method is None or layers is None:
            missing = [
                flag
                for flag, value in (
                    ("--recompute-method uniform or block", method),
                    ("--recompute-num-layers N", layers),
                )
                if value is None
            ]
            return f"--recompute-granularity full also needs {' and '.join(missing)}"
        return None
    extra = [
        flag
        for flag, value in (("--recompute-method", method), ("--recompute-num-layers", layers))
        if value is not None
    ]
    if extra:
        return f"{' and '.join(extra)} belong to --recompute-granularity full, which is {granularity or 'not given'}; add it or leave them out"
    return None


def recompute_modules_fit(config: Config) -> str | None:
    recompute = config.recompute
    modules = recompute.recompute_modules
    if recompute.recompute_granularity != "selective" and modules != ("core_attn",):
        return f"--recompute-modules {' '.join(modules)} belongs to --recompute-granularity selective; add it or leave the modules out"
    if len(set(modules)) != len(modules):
        return f"--recompute-modules {' '.join(modules)} names a module twice"
    if recompute.recompute_granularity == "selective" and not modules:
        return "--recompute-granularity selective needs at least one of --recompute-modules"
    if {"mlp", "activation"} <= set(modules):
        return "--recompute-modules mlp already recomputes the activation inside it; leave activation out"
    return None


def kept_attention_has_a_kernel(config: Config) -> str | None:
    recompute, model = config.recompute, config.model
    if not recompute.recompute_keep_attention:
        return None
    if recompute.recompute_granularity != "full":
        return (
            "--recompute-keep-attention belongs to --recompute-granularity full, which is "
            f"{recompute.recompute_granularity or 'not given'}; add it or leave it out (selective recompute without "
            "core_attn keeps attention anyway)"
        )
    impl = config.kernels.attention_impl
    if impl == "te":
        return "--recompute-keep-attention: torch does not see the kernels of --attention-impl te; use sdpa or flash, or leave it out"
    written_out = (
        ("--attention-dropout above 0", model.attention_dropout > 0),
        ("--attn-logit-softcapping", impl == "sdpa" and model.attn_logit_softcapping is not None),
        ("--attention-softmax-in-fp32", model.attention_softmax_in_fp32),
    )
    asked = [wish for wish, is_asked in written_out if is_asked]
    if not asked:
        return None
    return (
        f"--recompute-keep-attention keeps what a fused kernel returns, but attention is written out for {' and '.join(asked)}; "
        "leave the one or the other out"
    )


PARALLEL_RULES = (
    context_parallel_is_one,
    rank_order_names_axes,
    chunks_given_once,
    interleaving_needs_pipeline,
    layers_placed_once,
    end_layers_fit,
    parameter_gather_needs_distributed_optimizer,
    collective_chunks_are_used,
    collective_chunks_fit_sequence,
    backend_fits_device,
    bf16_reduction_keeps_fp64,
    recompute_is_whole,
    recompute_modules_fit,
    kept_attention_has_a_kernel,
)
