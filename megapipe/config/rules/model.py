"""Rules of the model's shape and of its division over tensor-parallel ranks."""

from __future__ import annotations

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.config.rules.wording import use_divisors, use_multiples


def heads_divide_hidden(config: Config) -> str | None:
    model = config.model
    if model.kv_channels is not None or model.hidden_size % model.num_attention_heads == 0:
        return None
    return (
        f"--num-attention-heads {model.num_attention_heads} does not divide --hidden-size {model.hidden_size}; "
        f"{use_multiples(model.num_attention_heads, model.hidden_size)} as hidden size, or give the width of a head with --kv-channels"
    )


def groups_divide_heads(config: Config) -> str | None:
    groups, heads = config.model.query_groups(), config.model.num_attention_heads
    if heads % groups == 0:
        return None
    return f"--num-query-groups {groups} does not divide --num-attention-heads {heads}; {use_divisors(heads, wanted=groups)}"


def tp_divides_heads(config: Config) -> str | None:
    tp, heads = config.parallel.tensor_model_parallel_size, config.model.num_attention_heads
    if heads % tp == 0:
        return None
    return f"--tensor-model-parallel-size {tp} does not divide --num-attention-heads {heads}; {use_divisors(heads, wanted=tp)}"


def feed_forward_positive(config: Config) -> str | None:
    if config.model.feed_forward_size() > 0:
        return None
    return f"--hidden-size {config.model.hidden_size} leaves a gated MLP no width (a multiple of 64 by default); give --ffn-hidden-size"


def tp_divides_feed_forward(config: Config) -> str | None:
    tp, width = config.parallel.tensor_model_parallel_size, config.model.feed_forward_size()
    if width % tp == 0:
        return None
    origin = "" if config.model.ffn_hidden_size is not None else " (derived from --hidden-size)"
    return (
        f"--tensor-model-parallel-size {tp} does not divide --ffn-hidden-size {width}{origin}; "
        f"{use_multiples(tp, width)} as ffn hidden size, or {use_divisors(config.model.num_attention_heads, width, wanted=tp)} as tp"
    )


def tp_divides_sequence(config: Config) -> str | None:
    tp, length = config.parallel.tensor_model_parallel_size, config.model.seq_length
    if not config.parallel.sequence_parallel or length % tp == 0:
        return None
    return (
        f"--tensor-model-parallel-size {tp} does not divide --seq-length {length}, which --sequence-parallel needs; "
        f"{use_multiples(tp, length)} as sequence length, or leave --sequence-parallel out"
    )


def positions_cover_sequence(config: Config) -> str | None:
    model = config.model
    if model.max_position_embeddings is None or model.max_position_embeddings >= model.seq_length:
        return None
    return (
        f"--max-position-embeddings {model.max_position_embeddings} is below --seq-length {model.seq_length}; "
        f"use at least {model.seq_length}, or leave it out"
    )


def rotary_width_even(config: Config) -> str | None:
    model = config.model
    if model.position_embedding_type != "rope" or model.head_size() < 1:
        return None
    width = int(model.head_size() * model.rotary_percent)
    if width % 2 == 0 and width > 0:
        return None
    return (
        f"rotary positions turn channels in pairs, but --rotary-percent {model.rotary_percent:g} of a head of "
        f"{model.head_size()} channels is {width}; "
        "choose --kv-channels or --rotary-percent so that it is even and above 0"
    )


def rope_scaling_needs_rope(config: Config) -> str | None:
    model = config.model
    if model.rope_scaling_type == "none" or model.position_embedding_type == "rope":
        return None
    return (
        f"--rope-scaling-type {model.rope_scaling_type} stretches rotary positions, but --position-embedding-type is "
        f"{model.position_embedding_type}; use rope"
    )


def rope_bands_ordered(config: Config) -> str | None:
    model = config.model
    if model.rope_scaling_type == "llama3" and model.rope_high_freq_factor <= model.rope_low_freq_factor:
        return (
            f"--rope-high-freq-factor {model.rope_high_freq_factor:g} has to lie above --rope-low-freq-factor "
            f"{model.rope_low_freq_factor:g}; Llama 3 uses 4 and 1"
        )
    if model.rope_scaling_type == "yarn" and model.yarn_beta_fast <= model.yarn_beta_slow:
        return f"--yarn-beta-fast {model.yarn_beta_fast:g} has to lie above --yarn-beta-slow {model.yarn_beta_slow:g}; the paper uses 32 and 1"
    return None


def yarn_temperature_is_whole(config: Config) -> str | None:
    model = config.model
    if model.rope_scaling_type != "yarn" or model.yarn_mscale == ModelConfig().yarn_mscale or model.yarn_mscale_all_dim:
        return None
    return f"--yarn-mscale {model.yarn_mscale:g} acts only together with --yarn-mscale-all-dim, its denominator; give both, or leave it out"


def padded_vocabulary_fits(config: Config) -> str | None:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    if model.padded_vocab_size is None:
        return None
    if model.padded_vocab_size % tp != 0:
        return (
            f"--tensor-model-parallel-size {tp} does not divide --padded-vocab-size {model.padded_vocab_size}; "
            f"{use_multiples(tp, model.padded_vocab_size)}, or leave it out"
        )
    if model.vocab_size is not None and model.padded_vocab_size < model.vocab_size:
        return (
            f"--padded-vocab-size {model.padded_vocab_size} is below --vocab-size {model.vocab_size}; leave it out or use "
            f"at least {model.vocab_size}"
        )
    return None


MODEL_RULES = (
    heads_divide_hidden,
    groups_divide_heads,
    tp_divides_heads,
    feed_forward_positive,
    tp_divides_feed_forward,
    tp_divides_sequence,
    positions_cover_sequence,
    rotary_width_even,
    rope_scaling_needs_rope,
    rope_bands_ordered,
    yarn_temperature_is_whole,
    padded_vocabulary_fits,
)
