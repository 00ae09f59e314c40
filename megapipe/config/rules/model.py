"""Rules of the model's shape, its division over tensor-parallel and pipeline ranks, and recomputation.

Sequence parallelism without tensor parallelism changes nothing and is accepted. Chunks without pipeline ranks are
refused, as in Megatron: interleaving exists to fill a pipeline's bubble, and a single rank has none.
"""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.config.layers import PATTERN, layer_settings
from megapipe.config.model import ModelConfig
from megapipe.config.rules.proposals import chosen, given, use_divisors, use_multiples
from megapipe.errors import ConfigError
from megapipe.formatting import one_of

AXES = ("tp", "cp", "dp", "pp")
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
LAYERS_PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
LAYOUT = "--pipeline-model-parallel-layout"
PP = "--pipeline-model-parallel-size"


def shape(config: Config) -> Iterator[str]:
    """Check heads, MLP, sequence and vocabulary, and their division over tp."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads, hidden, groups = model.num_attention_heads, model.hidden_size, model.query_groups()
    width, length, padded = model.feed_forward_size(), model.seq_length, model.padded_vocab_size
    tp_does_not_divide = f"--tensor-model-parallel-size {tp} does not divide"
    if model.kv_channels is None and hidden % heads:
        sizes = use_multiples(heads, hidden)
        rule = f"--num-attention-heads {heads} does not divide --hidden-size {hidden}"
        yield f"{rule}; {sizes} as hidden size, or give the width of a head with --kv-channels"
    if heads % groups:
        sizes = use_divisors(heads, wanted=groups)
        yield f"--num-query-groups {groups} does not divide --num-attention-heads {heads}; {sizes}"
    if heads % tp:
        yield f"{tp_does_not_divide} --num-attention-heads {heads}; {use_divisors(heads, wanted=tp)}"
    if width <= 0:
        yield f"--hidden-size {hidden} is too small for a gated MLP of 64 channels or more; give --ffn-hidden-size"
    if width % tp:
        origin = "" if model.ffn_hidden_size is not None else " (derived from --hidden-size)"
        ways = f"{use_multiples(tp, width)} as ffn hidden size, or {use_divisors(heads, width, wanted=tp)} as tp"
        yield f"{tp_does_not_divide} --ffn-hidden-size {width}{origin}; {ways}"
    if config.parallel.sequence_parallel and length % tp:
        ways = f"{use_multiples(tp, length)} as sequence length, or leave --sequence-parallel out"
        yield f"{tp_does_not_divide} --seq-length {length}, which --sequence-parallel needs; {ways}"
    if model.max_position_embeddings is not None and model.max_position_embeddings < length:
        below = f"--max-position-embeddings {model.max_position_embeddings} is below --seq-length {length}"
        yield f"{below}; use at least {length}, or leave it out"
    if padded is not None and padded % tp:
        yield f"{tp_does_not_divide} --padded-vocab-size {padded}; {use_multiples(tp, padded)}, or leave it out"
    elif padded is not None and model.vocab_size is not None and padded < model.vocab_size:
        below = f"--padded-vocab-size {padded} is below --vocab-size {model.vocab_size}"
        yield f"{below}; leave it out or use at least {model.vocab_size}"


def layers_that_differ(config: Config) -> Iterator[str]:
    """Check the layers that have other options than the model, and the norms of q and k."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads, freq = model.num_attention_heads, model.no_rope_freq
    if freq is not None and freq.strip().isdecimal() and model.num_layers % max(1, int(freq)):
        ways = use_divisors(model.num_layers, wanted=int(freq))
        yield f"--no-rope-freq {freq} does not divide --num-layers {model.num_layers}; {ways}, or write a list"
    try:
        layers = layer_settings(model)
    except ConfigError as error:
        yield str(error)
        return
    for groups in dict.fromkeys(layer["num_query_groups"] for layer in layers if "num_query_groups" in layer):
        if heads % groups:
            ways = use_divisors(heads, wanted=groups)
            yield f"{PATTERN} num_query_groups={groups} does not divide --num-attention-heads {heads}; {ways}"
        elif groups % tp and tp % groups:
            rule = (
                f"{PATTERN} num_query_groups={groups} and --tensor-model-parallel-size {tp}: one must divide the other"
            )
            yield f"{rule}, so that each rank holds whole key/value heads or a copy of one; change one of them"
    for width in dict.fromkeys(layer["ffn_hidden_size"] for layer in layers if "ffn_hidden_size" in layer):
        if width % tp:
            ways = f"{use_multiples(tp, width)} as its width, or {use_divisors(heads, width, wanted=tp)} as tp"
            yield f"--tensor-model-parallel-size {tp} does not divide {PATTERN} ffn_hidden_size={width}; {ways}"
    has_projection_norms = "projection" in (model.qk_layernorm_scope, *(x.get("qk_layernorm_scope") for x in layers))
    if has_projection_norms and model.normalization != "RMSNorm":
        yield f"--qk-layernorm-scope projection is an RMSNorm, not a {model.normalization}; add --normalization RMSNorm"


def rotary_positions(config: Config) -> Iterator[str]:
    """Check rotary positions and their scaling."""
    model = config.model
    scaling, kind, head = model.rope_scaling_type, model.position_embedding_type, model.head_size()
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    width = int(head * model.rotary_percent)
    if kind == "rope" and head >= 1 and (width % 2 or width <= 0):
        rotated = f"--rotary-percent {model.rotary_percent:g} of a head of {head} channels is {width}"
        way = "choose --kv-channels or --rotary-percent so that it is even and above 0"
        yield f"{rotated}, but rotary positions rotate pairs of channels; {way}"
    if scaling != "none" and kind != "rope":
        yield f"--rope-scaling-type {scaling} scales rotary positions, not --position-embedding-type {kind}; use rope"
    if scaling == "llama3" and high <= low:
        yield f"--rope-high-freq-factor {high:g} must be above --rope-low-freq-factor {low:g}; Llama 3 uses 4 and 1"
    fast, slow, numerator = model.yarn_beta_fast, model.yarn_beta_slow, model.yarn_mscale
    if scaling == "yarn" and fast <= slow:
        yield f"--yarn-beta-fast {fast:g} must be above --yarn-beta-slow {slow:g}; the paper uses 32 and 1"
    if scaling == "yarn" and numerator != ModelConfig().yarn_mscale and not model.yarn_mscale_all_dim:
        yield f"--yarn-mscale {numerator:g} acts only together with --yarn-mscale-all-dim; give both, or leave it out"


def axes(config: Config) -> Iterator[str]:
    """Check the axes, their order, and the communication backend."""
    parallel = config.parallel
    if parallel.context_parallel_size != 1:
        way = "use 1, and --tensor-model-parallel-size with --sequence-parallel for long sequences"
        rule = "context parallelism is not supported yet"
        yield f"--context-parallel-size {parallel.context_parallel_size}: {rule}; {way}"
    if sorted(parallel.rank_order.split("-")) != sorted(AXES):
        yield f"--rank-order {parallel.rank_order}: name each of {one_of(AXES)} once, joined by -, such as tp-cp-dp-pp"
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
    if count is not None and count > 1:
        yield f"{CHUNKS} {count} needs {PP} of at least 2; leave it out or raise pp"
    elif per_chunk is not None and per_chunk < config.model.num_layers:
        yield f"{LAYERS_PER_CHUNK} {per_chunk} needs {PP} of at least 2; leave it out or raise pp"


def layers_of_stages(config: Config) -> Iterator[str]:
    """Check layers that are assigned to pipeline ranks by hand."""
    parallel, layers, pp = config.parallel, config.model.num_layers, config.parallel.pipeline_model_parallel_size
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    names = ("parallel.decoder_first_pipeline_num_layers", "parallel.decoder_last_pipeline_num_layers")
    counts = ("parallel.account_for_embedding_in_pipeline_split", "parallel.account_for_loss_in_pipeline_split")
    ends, counted = given(config, *names), given(config, *counts)
    if parallel.pipeline_model_parallel_layout is not None and ends + counted:
        yield f"{LAYOUT} places every layer; leave {one_of(ends + counted)} out"
    elif ends and counted:
        yield f"{one_of(ends)} and {one_of(counted)} both relieve the first and last rank; give one of them"
    placed, others = (first or 0) + (last or 0), pp - len(ends)
    if ends and pp == 1:
        yield f"{one_of(ends)} needs {PP} of at least 2"
    elif ends and (placed > layers or (others == 0 and placed != layers)):
        rule = f"{' and '.join(ends)}: the first and last pipeline rank are given {placed} layers"
        yield f"{rule}, and {others} rank(s) between them must hold the rest of --num-layers {layers}; change them"


def recompute(config: Config) -> Iterator[str]:
    """Check the recompute section."""
    asked, model, impl = config.recompute, config.model, config.kernels.attention_impl
    modules, is_full = asked.recompute_modules, asked.recompute_granularity == "full"
    missing = chosen(
        ("--recompute-method uniform or block", asked.recompute_method is None),
        ("--recompute-num-layers N", asked.recompute_num_layers is None),
    )
    if is_full and missing:
        yield f"--recompute-granularity full also needs {' and '.join(missing)}"
    elif asked.recompute_granularity == "selective":
        if len(set(modules)) != len(modules):
            yield f"--recompute-modules {' '.join(modules)} names a module twice"
        elif not modules:
            yield "--recompute-granularity selective needs at least one of --recompute-modules"
        elif {"mlp", "activation"} <= set(modules):
            yield "--recompute-modules mlp already recomputes the activation inside it; leave activation out"
    unfused = chosen(
        ("--attention-dropout above 0", model.attention_dropout > 0),
        ("--attn-logit-softcapping", impl == "sdpa" and model.attn_logit_softcapping is not None),
        ("--attention-softmax-in-fp32", model.attention_softmax_in_fp32),
    )
    if is_full and asked.recompute_keep_attention and impl == "te":
        rule = "torch does not see the kernels of --attention-impl te"
        yield f"--recompute-keep-attention: {rule}; use sdpa or flash, or leave it out"
    elif is_full and asked.recompute_keep_attention and unfused:
        rule = f"keeps the results of a fused kernel, but attention is not fused with {' and '.join(unfused)}"
        yield f"--recompute-keep-attention {rule}; leave one of the two out"


RULES = (shape, layers_that_differ, rotary_positions, axes, chunks, layers_of_stages, recompute)
