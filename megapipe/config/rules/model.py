"""Rules of the model's shape, its division over tensor-parallel and pipeline ranks, and recomputation.

Sequence parallelism without tensor parallelism changes nothing and is accepted. Chunks without pipeline ranks are
refused, as in Megatron: interleaving exists to fill a pipeline's bubble, and a single rank has none.
"""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.config.rules.proposals import chosen, use_divisors, use_multiples
from megapipe.formatting import one_of

AXES = ("tp", "cp", "dp", "pp")
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
LAYERS_PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
LAYOUT = "--pipeline-model-parallel-layout"


def attention_heads(config: Config) -> Iterator[str]:
    """Check the numbers of heads, their width, and their division over tp."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads, hidden, groups = model.num_attention_heads, model.hidden_size, model.query_groups()
    if model.kv_channels is None and hidden % heads:
        yield (
            f"--num-attention-heads {heads} does not divide --hidden-size {hidden}; "
            f"{use_multiples(heads, hidden)} as hidden size, or give the width of a head with --kv-channels"
        )
    if heads % groups:
        yield (
            f"--num-query-groups {groups} does not divide --num-attention-heads {heads}; "
            f"{use_divisors(heads, wanted=groups)}"
        )
    if heads % tp:
        yield (
            f"--tensor-model-parallel-size {tp} does not divide --num-attention-heads {heads}; "
            f"{use_divisors(heads, wanted=tp)}"
        )


def feed_forward(config: Config) -> Iterator[str]:
    """Check the width of the MLP."""
    model, tp, width = config.model, config.parallel.tensor_model_parallel_size, config.model.feed_forward_size()
    if width <= 0:
        yield (
            f"--hidden-size {model.hidden_size} leaves a gated MLP no width (by default a multiple of 64); "
            "give --ffn-hidden-size"
        )
    if width % tp:
        origin = "" if model.ffn_hidden_size is not None else " (derived from --hidden-size)"
        yield (
            f"--tensor-model-parallel-size {tp} does not divide --ffn-hidden-size {width}{origin}; "
            f"{use_multiples(tp, width)} as ffn hidden size, or "
            f"{use_divisors(model.num_attention_heads, width, wanted=tp)} as tp"
        )


def sequence(config: Config) -> Iterator[str]:
    """Check the sequence length."""
    model, tp, length = config.model, config.parallel.tensor_model_parallel_size, config.model.seq_length
    if config.parallel.sequence_parallel and length % tp:
        yield (
            f"--tensor-model-parallel-size {tp} does not divide --seq-length {length}, which --sequence-parallel "
            f"needs; {use_multiples(tp, length)} as sequence length, or leave --sequence-parallel out"
        )
    if model.max_position_embeddings is not None and model.max_position_embeddings < length:
        yield (
            f"--max-position-embeddings {model.max_position_embeddings} is below --seq-length {length}; "
            f"use at least {length}, or leave it out"
        )


def rotary_positions(config: Config) -> Iterator[str]:
    """Check rotary positions and their scaling."""
    model = config.model
    scaling, is_rope = model.rope_scaling_type, model.position_embedding_type == "rope"
    width = int(model.head_size() * model.rotary_percent)
    if is_rope and model.head_size() >= 1 and (width % 2 or width <= 0):
        yield (
            f"rotary positions rotate pairs of channels, but --rotary-percent {model.rotary_percent:g} of a head of "
            f"{model.head_size()} channels is {width}; choose --kv-channels or --rotary-percent so that it is even and "
            "above 0"
        )
    if scaling != "none" and not is_rope:
        yield (
            f"--rope-scaling-type {scaling} scales rotary positions, but --position-embedding-type is "
            f"{model.position_embedding_type}; use rope"
        )
    if scaling == "llama3" and model.rope_high_freq_factor <= model.rope_low_freq_factor:
        yield (
            f"--rope-high-freq-factor {model.rope_high_freq_factor:g} must be above --rope-low-freq-factor "
            f"{model.rope_low_freq_factor:g}; Llama 3 uses 4 and 1"
        )
    if scaling == "yarn" and model.yarn_beta_fast <= model.yarn_beta_slow:
        yield (
            f"--yarn-beta-fast {model.yarn_beta_fast:g} must be above --yarn-beta-slow {model.yarn_beta_slow:g}; "
            "the paper uses 32 and 1"
        )
    if scaling == "yarn" and model.yarn_mscale != ModelConfig().yarn_mscale and not model.yarn_mscale_all_dim:
        yield (
            f"--yarn-mscale {model.yarn_mscale:g} has an effect only together with --yarn-mscale-all-dim, its "
            "denominator; give both, or leave it out"
        )


def padded_vocabulary(config: Config) -> Iterator[str]:
    """Check an explicit size of the padded vocabulary."""
    model, tp, padded = config.model, config.parallel.tensor_model_parallel_size, config.model.padded_vocab_size
    if padded is None:
        return
    if padded % tp:
        yield (
            f"--tensor-model-parallel-size {tp} does not divide --padded-vocab-size {padded}; "
            f"{use_multiples(tp, padded)}, or leave it out"
        )
    elif model.vocab_size is not None and padded < model.vocab_size:
        yield (
            f"--padded-vocab-size {padded} is below --vocab-size {model.vocab_size}; leave it out or use at least "
            f"{model.vocab_size}"
        )


def axes(config: Config) -> Iterator[str]:
    """Check the axes, their order, and the communication backend."""
    parallel = config.parallel
    if parallel.context_parallel_size != 1:
        yield (
            f"--context-parallel-size {parallel.context_parallel_size}: context parallelism is not supported yet; "
            "use 1, and --tensor-model-parallel-size with --sequence-parallel for long sequences"
        )
    if sorted(parallel.rank_order.split("-")) != sorted(AXES):
        yield (
            f"--rank-order {parallel.rank_order}: name each of {one_of(AXES)} once, joined by -, such as tp-cp-dp-pp "
            "or tp-cp-pp-dp"
        )
    if parallel.distributed_backend == "nccl" and config.training.device == "cpu":
        yield "--distributed-backend nccl connects GPUs, but --device is cpu; use gloo or auto"
    if parallel.grad_reduce_in_bf16 and config.precision.dtype == "fp64":
        yield "--grad-reduce-in-bf16 would round the gradients of --dtype fp64 to bf16; leave it out"


def chunks(config: Config) -> Iterator[str]:
    """Check the number of model chunks on a pipeline rank."""
    parallel = config.parallel
    count, per_chunk = parallel.num_virtual_stages_per_pipeline_rank, parallel.num_layers_per_virtual_pipeline_stage
    if per_chunk is not None and count is not None:
        yield f"{LAYERS_PER_CHUNK} and {CHUNKS} both give the number of chunks; give one of the two"
    elif per_chunk is not None and parallel.pipeline_model_parallel_layout is not None:
        yield f"{LAYOUT} gives the layers of each chunk; leave {LAYERS_PER_CHUNK} out"
    if parallel.pipeline_model_parallel_size > 1:
        return
    needs_pipeline = "needs --pipeline-model-parallel-size of at least 2; leave it out or raise pp"
    if count is not None and count > 1:
        yield f"{CHUNKS} {count} {needs_pipeline}"
    elif per_chunk is not None and per_chunk < config.model.num_layers:
        yield f"{LAYERS_PER_CHUNK} {per_chunk} {needs_pipeline}"


def layers_of_stages(config: Config) -> Iterator[str]:
    """Check layers that are assigned to pipeline ranks by hand."""
    parallel, layers, pp = config.parallel, config.model.num_layers, config.parallel.pipeline_model_parallel_size
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    ends = chosen(
        ("--decoder-first-pipeline-num-layers", first is not None),
        ("--decoder-last-pipeline-num-layers", last is not None),
    )
    counted = chosen(
        ("--account-for-embedding-in-pipeline-split", parallel.account_for_embedding_in_pipeline_split),
        ("--account-for-loss-in-pipeline-split", parallel.account_for_loss_in_pipeline_split),
    )
    if parallel.pipeline_model_parallel_layout is not None and ends + counted:
        yield f"{LAYOUT} places every layer; leave {one_of(ends + counted)} out"
    elif ends and counted:
        yield f"{one_of(ends)} and {one_of(counted)} both relieve the first and last rank; give one of them"
    if not ends:
        return
    placed, others = (first or 0) + (last or 0), pp - len(ends)
    if pp == 1:
        yield f"{one_of(ends)} needs --pipeline-model-parallel-size of at least 2"
    elif placed > layers or (others == 0 and placed != layers):
        yield (
            f"the first and last pipeline rank are given {placed} layers, and {others} rank(s) between them must hold "
            f"the rest of --num-layers {layers}; change --decoder-first-pipeline-num-layers or "
            "--decoder-last-pipeline-num-layers"
        )


def recompute(config: Config) -> Iterator[str]:
    """Check the recompute section."""
    asked = config.recompute
    modules = asked.recompute_modules
    if asked.recompute_granularity == "full":
        missing = chosen(
            ("--recompute-method uniform or block", asked.recompute_method is None),
            ("--recompute-num-layers N", asked.recompute_num_layers is None),
        )
        if missing:
            yield f"--recompute-granularity full also needs {' and '.join(missing)}"
    elif asked.recompute_granularity == "selective":
        if len(set(modules)) != len(modules):
            yield f"--recompute-modules {' '.join(modules)} names a module twice"
        elif not modules:
            yield "--recompute-granularity selective needs at least one of --recompute-modules"
        elif {"mlp", "activation"} <= set(modules):
            yield "--recompute-modules mlp already recomputes the activation inside it; leave activation out"


def kept_attention(config: Config) -> Iterator[str]:
    """Yield what stops a fused attention kernel's results from being kept under full recompute."""
    impl, model = config.kernels.attention_impl, config.model
    if not config.recompute.recompute_keep_attention or config.recompute.recompute_granularity != "full":
        return
    unfused = chosen(
        ("--attention-dropout above 0", model.attention_dropout > 0),
        ("--attn-logit-softcapping", impl == "sdpa" and model.attn_logit_softcapping is not None),
        ("--attention-softmax-in-fp32", model.attention_softmax_in_fp32),
    )
    if impl == "te":
        yield (
            "--recompute-keep-attention: torch does not see the kernels of --attention-impl te; use sdpa or flash, or "
            "leave it out"
        )
    elif unfused:
        yield (
            "--recompute-keep-attention keeps the results of a fused kernel, but attention is not fused with "
            f"{' and '.join(unfused)}; leave one of the two out"
        )


RULES = (
    attention_heads,
    feed_forward,
    sequence,
    rotary_positions,
    padded_vocabulary,
    axes,
    chunks,
    layers_of_stages,
    recompute,
    kept_attention,
)
