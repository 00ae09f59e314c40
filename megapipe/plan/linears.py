"""The linears of a transformer layer on one rank: linear_qkv, linear_proj, linear_fc1, linear_fc2."""

from __future__ import annotations

from megapipe.config.model import GATED_ACTIVATIONS, ModelConfig
from megapipe.plan.activations import LocalSizes


def linear_shapes(model: ModelConfig, sizes: LocalSizes) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of each, in their order. model: resolved."""
    gates = 2 if model.activation in GATED_ACTIVATIONS else 1
    queries = sizes.heads * sizes.channels
    return (
        (sizes.hidden, queries + 2 * sizes.groups * sizes.channels),
        (queries, sizes.hidden),
        (sizes.hidden, gates * sizes.ffn),
        (sizes.ffn, sizes.hidden),
    )


def linear_elements(model: ModelConfig, sizes: LocalSizes) -> int:
    """Of their weights."""
    return sum(inputs * outputs for inputs, outputs in linear_shapes(model, sizes))
