"""Rules of the model's shape, its division over tensor-parallel and pipeline ranks, and recomputation.

Sequence parallelism without tensor parallelism changes nothing and is accepted. Chunks without pipeline ranks are
refused, as in Megatron: interleaving exists to fill a pipeline's bubble, and a single rank has none.
"""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config.config import Config, fields_by_key, given
from megapipe.config.fields import shown
from megapipe.config.layers import OPTIONS_OF, TAKEN, LayerConfig, has_soft_cap, kinds_of, layer_settings, of_each_kind
from megapipe.config.model import ACTIVATIONS, ATTENTIONS, ROPE, ModelConfig
from megapipe.config.options import read_numbers
from megapipe.config.parallel import SHARDED_GRADS, strategy_of
from megapipe.config.problems import chosen, divisors, nearest_values, use_divisors, use_multiples
from megapipe.errors import ConfigError
from megapipe.formatting import one_of

AXES = ("tp", "cp", "dp", "pp")
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
LAYERS_PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
LAYOUT = "--pipeline-model-parallel-layout"
PP = "--pipeline-model-parallel-size"
KEPT_ATTENTION = "--recompute-keep-attention"
ATTENTION_OPTIONS = "--attention-options"
UP_WITHOUT_CORE = "--recompute-modules mla_up_proj without core_attn"


def shape(config: Config) -> Iterator[str]:
    """Check heads, sequence and vocabulary, and their division over tp."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads, hidden = model.num_attention_heads, model.hidden_size
    length, padded = model.seq_length, model.padded_vocab_size
    tp_does_not_divide = f"--tensor-model-parallel-size {tp} does not divide"
    if model.kv_channels is None and hidden % heads and not model.multi_latent_attention:
        sizes = use_multiples(heads, hidden)
        rule = f"--num-attention-heads {heads} does not divide --hidden-size {hidden}"
        yield f"{rule}; {sizes} as hidden size, or give the width of a head with --kv-channels"
    if heads % tp:
        yield f"{tp_does_not_divide} --num-attention-heads {heads}; {use_divisors(heads, wanted=tp)}"
    if config.parallel.sequence_parallel and length % tp and config.parallel.context_parallel_size == 1:
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
    """Check which layers have other options than the model."""
    model, freq = config.model, config.model.no_rope_freq
    try:
        layers = layer_settings(model)
    except ConfigError as error:
        yield str(error)
        return
    for name, (marks, value) in TAKEN.items():
        text, own, field = getattr(model, marks), getattr(model, name), fields_by_key()[f"model.{name}"]
        if text is not None and own != value and all(settings.get(name, own) == value for settings in layers):
            rule = f"leaves no layer with {shown(field, own)}; give {field.main_flag} none, or let some layers keep it"
            yield f"{fields_by_key()[f'model.{marks}'].main_flag} {text} {rule}"
    if freq is not None and freq.strip().isdecimal() and model.num_layers % int(freq):
        ways = one_of(nearest_values(divisors(model.num_layers)[1:], int(freq)))
        yield f"--no-rope-freq {freq} does not divide --num-layers {model.num_layers}; use {ways}, or write a list"


@of_each_kind
def attention(config: Config, layer: LayerConfig) -> Iterator[str]:
    """Check key/value heads and norms of q and k."""
    heads, groups = layer.num_attention_heads, layer.num_query_groups
    if layer.has_attention and heads % groups:
        sizes = use_divisors(heads, wanted=groups)
        yield f"--num-query-groups {groups} does not divide --num-attention-heads {heads}; {sizes}"
    is_projection = layer.qk_layernorm and layer.qk_layernorm_scope == "projection"
    if layer.has_attention and is_projection and layer.normalization != "RMSNorm":
        yield f"--qk-layernorm-scope projection is an RMSNorm, not {layer.normalization}; add --normalization RMSNorm"


def latent_attention(config: Config) -> Iterator[str]:
    """Check latent attention's sizes."""
    model = config.model
    if not model.multi_latent_attention:
        return
    flag, width, values = "--multi-latent-attention", model.head_size(), model.v_head_dim
    if model.position_embedding_type != "rope" or model.rotary_percent != 1.0:
        yield f"{flag} rotates all channels of --qk-pos-emb-head-dim: give {ROPE.flag}, and no --rotary-percent"
    if model.num_query_groups not in (None, model.num_attention_heads):
        rule = f"each of the {model.num_attention_heads} heads has its own keys and values"
        yield f"{flag} with --num-query-groups {model.num_query_groups}: {rule}; leave it out"
    if model.qk_layernorm_after_rope:
        rule = "its norms are those of latents, before there are heads"
        yield f"--qk-layernorm-after-rope with {flag}: {rule}; leave one of the two out"
    if model.yarn_query_scale and model.rope_scaling_type != "yarn":
        rule = "positions are divided by the length that YaRN scales from"
        yield f"--yarn-query-scale {model.yarn_query_scale:g} needs --rope-scaling-type yarn: {rule}"
    if values > width:
        yield f"--v-head-dim {values} is above the {width} channels of query heads; use at most {width}"
    kinds = kinds_of(model)
    names = (name for name in OPTIONS_OF["attention"] if name not in ("window_size", "attn_logit_softcapping"))
    differing = [name for name in names if len({getattr(kind, name) for kind in kinds if kind.has_attention}) > 1]
    if differing:
        yield f"{flag}: layers cannot differ in {one_of(differing)}; give all layers the model's"


def without_effect(config: Config) -> list[str]:
    """Return a remark for a width of heads that latent attention does not read, as in Megatron."""
    model = config.model
    width, channels = model.head_size(), model.kv_channels
    if not model.multi_latent_attention or channels in (None, width, model.v_head_dim, model.qk_head_dim):
        return []
    rule = f"heads have {width} channels, --qk-head-dim and --qk-pos-emb-head-dim together"
    return [f"--kv-channels {channels} has no effect with --multi-latent-attention: {rule}"]


@of_each_kind
def attention_kind(config: Config, layer: LayerConfig) -> Iterator[str]:
    """Yield chunks without a size, and the options of softmax attention that an extension's kind does not have."""
    kind = layer.attention_kind
    has_size = layer.window_size is not None or config.model.window_size is not None  # layers may be without the window
    if layer.has_attention and ATTENTIONS[kind].has_chunks and not has_size:
        yield f"--attention-kind {kind} needs --window-size, the tokens of a chunk"
    if not layer.has_attention or ATTENTIONS[kind].function is None:
        return
    unused = chosen(
        ("--attn-logit-softcapping", layer.attn_logit_softcapping is not None),
        ("--attention-dropout above 0 (use --attention-dropout 0)", layer.attention_dropout > 0),
        ("--attention-softmax-in-fp32", layer.attention_softmax_in_fp32),
        (f"--softmax-type {layer.softmax_type}", layer.softmax_type != "vanilla"),
        (f"--attention-impl {config.kernels.attention_impl} (use sdpa)", config.kernels.attention_impl != "sdpa"),
        (KEPT_ATTENTION, config.recompute.recompute_keep_attention),
        (UP_WITHOUT_CORE, redoes_up_without_core(config)),
    )
    if unused:
        rule = f"belong{'s' if len(unused) == 1 else ''} to softmax attention"
        yield f"{one_of(unused)} {rule}, not to --attention-kind {kind}; leave one of the two out"


@of_each_kind
def mixers(config: Config, layer: LayerConfig) -> Iterator[str]:
    """Yield what a token mixer of an extension does not work with, how tp cannot cut it, and what its own check says.

    It passes a state from token to token, so that a rank needs the whole sequence, with one document, in one run.
    """
    if layer.mixer is None:
        return
    parallel, kind = config.parallel, f"--attention-kind {layer.mixer}"
    cp, slices, tp = parallel.context_parallel_size, parallel.pipe_sp_splits, parallel.tensor_model_parallel_size
    refused = {
        f"--context-parallel-size {cp} (use 1)": cp > 1,
        f"--pipe-sp-splits {slices} (use 1)": slices > 1,
        "--reset-attention-mask": config.data.reset_attention_mask,
        "--sample-prompts, which continues a text token by token,": config.logging.sample_prompts is not None,
    }
    found = chosen(*refused.items())
    if found:
        yield f"{kind} does not work with {one_of(found)}: its state passes through whole sequences; leave one out"
    if config.kernels.transformer_impl != "local":
        yield f"{kind} does not work with --transformer-impl {config.kernels.transformer_impl} yet; use local"
    try:
        yield from layer.mixer_kind.check(config, layer, layer.mixer_options)
        for parameter in layer.mixer_kind.module.declare(layer).parameters:
            rows = parameter.shape[parameter.slicing.dim or 0] // getattr(parameter.slicing, "parts", 1)
            if parameter.slicing.dim is not None and rows % tp:
                cut = f"--tensor-model-parallel-size {tp} does not divide the {rows} channels of {parameter.name}"
                yield f"{cut} of {kind}; {use_divisors(rows, wanted=tp)}"
                return
    except ConfigError as error:
        yield str(error)


def mixer_options(config: Config) -> Iterator[str]:
    """Yield options that no token mixer has, and options of attention where no layer has attention."""
    model, kinds = config.model, kinds_of(config.model)
    named = {layer.mixer: layer for layer in kinds if layer.mixer is not None}
    known = {name: value for layer in named.values() for name, value in layer.mixer_kind.options.items()}
    try:
        owner = f"--attention-kind {' or '.join(named) or model.attention_kind}"
        unknown = [word for word in model.attention_options if word.partition("=")[0] not in known]
        read_numbers(ATTENTION_OPTIONS, unknown, known, owner)
    except ConfigError as error:
        yield str(error)
    if not named or any(layer.has_attention for layer in kinds):
        return
    unused = chosen(
        ("--window-size", model.window_size is not None),
        ("--attn-logit-softcapping", model.attn_logit_softcapping is not None),
        (f"--softmax-type {model.softmax_type}", model.softmax_type != "vanilla"),
        ("--position-embedding-type rope (use none)", model.position_embedding_type == "rope"),
        ("--qk-layernorm", model.qk_layernorm),
        ("--qk-l2-norm", model.qk_l2_norm),
        ("--attention-output-gate", model.attention_output_gate),
        ("--multi-latent-attention", model.multi_latent_attention),
        (KEPT_ATTENTION, config.recompute.recompute_keep_attention),
    )
    if unused:
        rule = f"no effect with --attention-kind {' and '.join(named)}: no layer has attention"
        yield f"{one_of(unused)} has {rule}; leave it out, or give some layers attention"


@of_each_kind
def mlp(config: Config, layer: LayerConfig) -> Iterator[str]:
    """Check the width of the MLP, and its division over tp."""
    model, width, tp = config.model, layer.ffn_hidden_size, config.parallel.tensor_model_parallel_size
    if not layer.has_mlp:
        return
    if width <= 0:
        hidden = model.hidden_size
        yield f"--hidden-size {hidden} is too small for a gated MLP of 64 channels or more; give --ffn-hidden-size"
    if width % tp:
        is_derived = model.ffn_hidden_size is None and width == model.feed_forward_size()
        origin = " (derived from --hidden-size)" if is_derived else ""
        heads = model.num_attention_heads
        ways = f"{use_multiples(tp, width)} as ffn hidden size, or {use_divisors(heads, width, wanted=tp)} as tp"
        yield f"--tensor-model-parallel-size {tp} does not divide --ffn-hidden-size {width}{origin}; {ways}"


@of_each_kind
def gates(config: Config, layer: LayerConfig) -> Iterator[str]:
    """Yield the options of gated activations that a layer without them does not have."""
    kind = ACTIVATIONS[layer.activation]
    if not layer.has_mlp or (kind.is_gated and kind.function is None):
        return
    unused = chosen(
        ("--activation-func-clamp-value", layer.activation_func_clamp_value is not None),
        ("--glu-linear-offset", layer.glu_linear_offset != 0),
    )
    if unused:
        names = one_of([name for name, kind in ACTIVATIONS.items() if kind.is_gated and kind.function is None])
        yield f"{one_of(unused)} has no effect on --activation {layer.activation}; use {names}, or leave it out"


@of_each_kind
def rotary_positions(config: Config, layer: LayerConfig) -> Iterator[str]:
    """Check rotary positions and their scaling."""
    scaling, head = layer.rope_scaling_type, layer.kv_channels
    low, high = layer.rope_low_freq_factor, layer.rope_high_freq_factor
    width = layer.rotary_channels()
    if layer.rotary is None:
        return
    if layer.multi_latent_attention and width % 2:
        yield f"--qk-pos-emb-head-dim {width} is odd, but rotary positions rotate pairs of channels; use {width + 1}"
    elif head >= 1 and (width % 2 or width <= 0):
        rotated = f"--rotary-percent {layer.rotary_percent:g} of a head of {head} channels is {width}"
        way = "choose --kv-channels or --rotary-percent so that it is even and above 0"
        yield f"{rotated}, but rotary positions rotate pairs of channels; {way}"
    if scaling == "llama3" and high <= low:
        yield f"--rope-high-freq-factor {high:g} must be above --rope-low-freq-factor {low:g}; Llama 3 uses 4 and 1"
    fast, slow, numerator = layer.yarn_beta_fast, layer.yarn_beta_slow, layer.yarn_mscale
    if scaling == "yarn" and fast <= slow:
        yield f"--yarn-beta-fast {fast:g} must be above --yarn-beta-slow {slow:g}; the paper uses 32 and 1"
    if scaling == "yarn" and numerator != ModelConfig().yarn_mscale and not layer.yarn_mscale_all_dim:
        yield f"--yarn-mscale {numerator:g} acts only together with --yarn-mscale-all-dim; give both, or leave it out"


def scaled_positions(config: Config) -> Iterator[str]:
    """Check that there are rotary positions to be scaled, and layers without positions whose queries are scaled."""
    model, kinds = config.model, kinds_of(config.model)
    scaling, kind = model.rope_scaling_type, model.position_embedding_type
    if scaling != "none" and kind != "rope" and all(layer.rotary is None for layer in kinds):
        yield f"--rope-scaling-type {scaling} scales rotary positions, not --position-embedding-type {kind}; use rope"
    if model.nope_query_scale and all(layer.position_tables in (None, layer.rotary) for layer in kinds):
        rule = "scales queries of layers without positions, which no layer is"
        yield f"--nope-query-scale {model.nope_query_scale:g} {rule}; give --no-rope-freq, or leave it out"


def axes(config: Config) -> Iterator[str]:
    """Check the axes, their order, and the communication backend."""
    parallel = config.parallel
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
    if parallel.pipeline_model_parallel_size > 1 or strategy_of(parallel) in SHARDED_GRADS:
        return  # on one rank chunks are gathered and reduced one by one
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
    if asked.recompute_in_bubbles and config.parallel.pipeline_model_parallel_size == 1:
        way = "leave it out, or raise --pipeline-model-parallel-size"
        yield f"--recompute-in-bubbles: a pipeline of one rank waits for no gradient; {way}"
    if asked.recompute_memory_budget is not None:
        return
    missing = chosen(
        ("--recompute-method uniform or block", asked.recompute_method is None),
        ("--recompute-num-layers N", asked.recompute_num_layers is None),
    )
    if is_full and missing:
        yield f"--recompute-granularity full also needs {' and '.join(missing)}"
    elif asked.recompute_granularity == "selective":
        if asked.recompute_num_layers is not None:
            layers = f"--recompute-num-layers {asked.recompute_num_layers}"
            yield f"{layers} belongs to --recompute-granularity full, not selective; leave it out"
        if len(set(modules)) != len(modules):
            yield f"--recompute-modules {' '.join(modules)} names a module twice"
        elif not modules:
            yield "--recompute-granularity selective needs at least one of --recompute-modules"
        elif {"mlp", "activation"} <= set(modules):
            yield "--recompute-modules mlp already recomputes the activation inside it; leave activation out"
    unfused = chosen(
        ("--attention-dropout above 0", model.attention_dropout > 0),
        ("--attn-logit-softcapping", impl == "sdpa" and has_soft_cap(model)),
        ("--attention-softmax-in-fp32", model.attention_softmax_in_fp32),
    )
    kept = chosen(
        (KEPT_ATTENTION, is_full and asked.recompute_keep_attention), (UP_WITHOUT_CORE, redoes_up_without_core(config))
    )
    for flag in kept:
        way_out = "leave it out" if is_full else "add core_attn"
        if impl == "te":
            rule = "torch does not see the kernels of --attention-impl te"
            yield f"{flag}: {rule}; use sdpa or flash, or {way_out}"
        elif unfused:
            rule = f"keeps the results of a fused kernel, but attention is not fused with {' and '.join(unfused)}"
            yield f"{flag} {rule}; {'leave one of the two out' if is_full else way_out}"


def redoes_up_without_core(config: Config) -> bool:
    """Return True if projections up from latents run again without core attention, whose results are kept."""
    asked = config.recompute
    modules = asked.recompute_modules if asked.recompute_granularity == "selective" else ()
    return "mla_up_proj" in modules and "core_attn" not in modules


def prediction(config: Config) -> Iterator[str]:
    """Check what multi-token prediction needs."""
    model, count = config.model, config.model.mtp_num_layers
    if count is None:
        return
    flag = f"--mtp-num-layers {count}"
    if count >= model.seq_length:
        rule = f"no token is that far ahead within --seq-length {model.seq_length}"
        yield f"{flag}: {rule}; use less than {model.seq_length}"
    if model.position_embedding_type == "learned_absolute":
        rule = "learned positions enter with the embedding, which the modules take of other tokens"
        yield f"{flag} with --position-embedding-type learned_absolute: {rule}; use rope or none"


RULES = (
    shape,
    layers_that_differ,
    attention,
    latent_attention,
    attention_kind,
    mixers,
    mixer_options,
    mlp,
    gates,
    rotary_positions,
    scaled_positions,
    axes,
    chunks,
    layers_of_stages,
    recompute,
    prediction,
)
