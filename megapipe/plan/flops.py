"""Floating-point operations of a GPT model: per layer, head and step; multiply and add count as two.

A backward costs twice its forward. Attention is counted in full (every query with every key) or causal (half of it): the
conventions are named wherever a figure is printed. For the GPT-2 shape, full, the step equals
72 B s l h^2 (1 + s/(6h) + V/(12 l h)) of Narayanan et al. 2021 (arXiv:2104.04473, section 5.1).
"""

from __future__ import annotations

from megapipe.config.model import GATED_ACTIVATIONS, ModelConfig
from megapipe.config.recompute import RecomputeConfig


def layer_weights(model: ModelConfig) -> int:
    """Elements of the weight matrices of one transformer layer."""
    assert model.num_query_groups and model.kv_channels and model.ffn_hidden_size
    qkv = model.hidden_size * (model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels
    projection = model.num_attention_heads * model.kv_channels * model.hidden_size
    gates = 2 if model.activation in GATED_ACTIVATIONS else 1
    return qkv + projection + (gates + 1) * model.hidden_size * model.ffn_hidden_size


def layer_forward_flops(model: ModelConfig, causal: bool) -> float:
    """One layer's forward, per token. A sliding window limits the keys of a query in the causal count."""
    assert model.kv_channels
    keys = float(model.seq_length)
    if causal:
        keys = mean_keys(model.seq_length, model.window_size)
    return 2.0 * layer_weights(model) + 4.0 * keys * model.num_attention_heads * model.kv_channels


def head_forward_flops(model: ModelConfig) -> float:
    """The output layer's forward, per token, vocabulary padding included."""
    assert model.padded_vocab_size
    return 2.0 * model.hidden_size * model.padded_vocab_size


def step_flops(model: ModelConfig, sequences: int, causal: bool) -> float:
    """Forward and backward of one step over `sequences` sequences: the model's own operations, recomputation not counted (for MFU)."""
    per_token = model.num_layers * layer_forward_flops(model, causal) + head_forward_flops(model)
    return 3.0 * per_token * sequences * model.seq_length


def replayed_flops(model: ModelConfig, recompute: RecomputeConfig, causal: bool) -> float:
    """What full recompute computes again of one layer, per token: its forward, but for attention where its results are kept."""
    return 2.0 * layer_weights(model) if recompute.recompute_keep_attention else layer_forward_flops(model, causal)


def recomputed_flops(model: ModelConfig, recompute: RecomputeConfig, sequences: int, causal: bool) -> float:
    """What a step computes again, for hardware FLOPs (HFU): with full recompute every layer's replay (--recompute-method block: as if N
    were all), with selective core attention or the first half of the MLP."""
    assert model.kv_channels and model.ffn_hidden_size
    whole = layer_forward_flops(model, causal)
    if recompute.recompute_granularity is None:
        again = 0.0
    elif recompute.recompute_granularity == "full":
        again = replayed_flops(model, recompute, causal)
    else:
        gates = 2 if model.activation in GATED_ACTIVATIONS else 1
        of_module = {
            "core_attn": whole - 2.0 * layer_weights(model),
            "mlp": 2.0 * gates * model.hidden_size * model.ffn_hidden_size,
        }
        again = sum(of_module.get(module, 0.0) for module in recompute.recompute_modules)
    return again * model.num_layers * sequences * model.seq_length


def mean_keys(seq_length: int, window_size: int | None) -> float:
    """Keys a causal query sees, on average; half the sequence, the diagonal not counted apart, as the field does."""
    if window_size is None or window_size >= seq_length:
        return seq_length / 2
    full_rows = seq_length - window_size
    return (window_size * window_size / 2 + full_rows * window_size) / seq_length
