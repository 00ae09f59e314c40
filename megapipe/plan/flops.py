"""Floating-point operations of a GPT model: per layer, head and step; multiply and add count as two.

A backward costs twice its forward. Attention is counted in full (every query with every key) or causal (half of it):
the conventions are named wherever a figure is printed. For the GPT-2 shape, full, the step equals 72 B s l h^2 (1 +
s/(6h) + V/(12 l h)) of Narayanan et al. 2021 (arXiv:2104.04473, section 5.1).
"""

from __future__ import annotations

from collections import Counter

from megapipe.config.config import ResolvedModelConfig
from megapipe.config.model import PrecisionConfig
from megapipe.config.parallel import RecomputeConfig
from megapipe.layers.attention import mean_keys
from megapipe.layers.model import LayerSpec, ModelSpec, model_spec


def gemm_flops(layer: LayerSpec) -> float:
    """Return the forward FLOPs of a layer's linears, per token."""
    return 2.0 * sum(gemm.num_weights for gemm in layer.gemms(tp=1))


def attention_flops(layer: LayerSpec, seq_length: int, causal: bool) -> float:
    """Return the forward FLOPs of a layer's core attention, per token.

    A sliding window limits the keys of a query in the causal count.
    """
    keys = mean_keys(seq_length, layer.attention.window_size) if causal else float(seq_length)
    return layer.attention.flops_per_token(keys)


def layer_flops(layer: LayerSpec, seq_length: int, causal: bool) -> float:
    """Return the forward FLOPs of one layer, per token."""
    return gemm_flops(layer) + attention_flops(layer, seq_length, causal)


def head_flops(model: ModelSpec) -> float:
    """Return the forward FLOPs of the output layer, per token, vocabulary padding included."""
    return 2.0 * model.head.gemm(tp=1).num_weights


def step_flops(model: ResolvedModelConfig, sequences: int, causal: bool) -> float:
    """Return the FLOPs of forward and backward of one step over `sequences` sequences.

    These are the model's own operations: recomputation is not counted (for MFU).
    """
    spec = model_spec(model, PrecisionConfig())
    layers = sum(count * layer_flops(layer, model.seq_length, causal) for layer, count in Counter(spec.layers).items())
    return 3.0 * (layers + head_flops(spec)) * sequences * model.seq_length


def replayed_flops(layer: LayerSpec, recompute: RecomputeConfig, seq_length: int, causal: bool) -> float:
    """Return what full recompute computes again of one layer, per token: its forward, without attention where its
    results are kept.
    """
    return gemm_flops(layer) if recompute.recompute_keep_attention else layer_flops(layer, seq_length, causal)


def recomputed_flops(model: ResolvedModelConfig, recompute: RecomputeConfig, sequences: int, causal: bool) -> float:
    """Return what a step computes again, for hardware FLOPs (HFU).

    With full recompute that is every layer's replay (--recompute-method block is counted with all layers), with
    selective core attention or the first linear of the MLP.
    """
    again = 0.0
    for layer, count in Counter(model_spec(model, PrecisionConfig()).layers).items():
        again += count * _recomputed_of_layer(layer, recompute, model.seq_length, causal)
    return again * sequences * model.seq_length


def _recomputed_of_layer(layer: LayerSpec, recompute: RecomputeConfig, seq_length: int, causal: bool) -> float:
    if recompute.recompute_granularity is None:
        return 0.0
    if recompute.recompute_granularity == "full":
        return replayed_flops(layer, recompute, seq_length, causal)
    of_module = {
        "core_attn": attention_flops(layer, seq_length, causal),
        "mlp": 2.0 * layer.parts[-1].gemms(tp=1)[0].num_weights,
    }
    return sum(of_module.get(module, 0.0) for module in recompute.recompute_modules)
