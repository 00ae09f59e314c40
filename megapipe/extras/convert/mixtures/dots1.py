"""dots.llm1 (Dots1ForCausalLM): attention of Qwen3, experts of DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from megapipe.extras.convert import experts
from megapipe.extras.convert.family import NO_ATTENTION_BIAS, UNUSUAL_HEAD_DIM, llama_family
from megapipe.extras.convert.layer_types import (
    DEFAULT_WINDOW,
    FIRST,
    FULL,
    SLIDING,
    TYPES,
    USE,
    WINDOW,
    read_types,
    types_of,
    with_window,
    write_types,
)
from megapipe.extras.convert.tables import Layers, Rule, Settings, always, fixed, unwritten


def read_windows(settings: Settings) -> dict[str, Any]:
    """Read windows from layer max_window_layers on; null or use_sliding_window false, of old files, is none."""
    window = settings.get(WINDOW, DEFAULT_WINDOW) if settings.get(USE, True) else None
    first = settings.get(FIRST, 62)

    def default(num_layers: int) -> list[str]:
        return [SLIDING if window is not None and layer >= first else FULL for layer in range(num_layers)]

    return with_window(read_types(settings, default, window), window)


def write_windows(layers: Layers) -> dict[str, Any]:
    types = types_of(layers)
    return {WINDOW: None} | write_types(layers) | ({FIRST: types.index(SLIDING)} if SLIDING in types else {})


FAMILY = llama_family(
    "Dots1ForCausalLM",
    "dots1",
    2048,
    UNUSUAL_HEAD_DIM,
    experts.SIGMOID,
    experts.normalized(False),
    experts.scaling(),
    experts.groups(1, 1),
    experts.shared_experts(2),
    experts.dense_layers(0),
    *NO_ATTENTION_BIAS,
    always(qk_layernorm=True),
    Rule((WINDOW, FIRST, TYPES, USE), read_windows, write_windows),
    unwritten(fixed("moe_layer_freq", 1, "all layers after the dense ones have experts")),
    unwritten(fixed("topk_method", "noaux_tc", "experts of this architecture are chosen with a bias")),
    unwritten(fixed("scoring_func", "noaux_tc", "scores of this architecture are sigmoids")),  # so its files name them
    mlp=experts.some_layers(experts.COUNT, 6),
    more_rows=experts.GLM_ROWS,
)
