"""Rules of the model's shape and of its division over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.config.rules.proposals import use_divisors, use_multiples


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


RULES = (attention_heads, feed_forward, sequence, rotary_positions, padded_vocabulary)
