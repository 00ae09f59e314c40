"""dots.llm1 (Dots1ForCausalLM): attention of Qwen3, experts of DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from megapipe.extras.convert import experts
from megapipe.extras.convert.family import NO_ATTENTION_BIAS, llama_relative
from megapipe.extras.convert.layer_types import FIRST, SLIDING, WINDOW, qwen_windows, types_of, write_types
from megapipe.extras.convert.tables import Layers, fixed, unwritten


def write_windows(layers: Layers) -> dict[str, Any]:
    types = types_of(layers)
    return {WINDOW: None} | write_types(layers) | ({FIRST: types.index(SLIDING)} if SLIDING in types else {})


FAMILY = llama_relative(
    "Dots1ForCausalLM",
    *experts.sigmoid_router(experts.shared_experts(2), is_normalized=False),
    experts.dense_layers(0),
    *NO_ATTENTION_BIAS,
    # null, or use_sliding_window false, of old files, is none
    qwen_windows(lambda layer, first: layer >= first, write_windows, uses=True, default_bound=62),
    unwritten(fixed("moe_layer_freq", 1, "all layers after the dense ones have experts")),
    unwritten(fixed("topk_method", "noaux_tc", "experts of this architecture are chosen with a bias")),
    unwritten(fixed("scoring_func", "noaux_tc", "scores of this architecture are sigmoids")),  # so its files name them
    mlp=experts.some_layers(experts.COUNT, 6),
    more_rows=experts.GLM_ROWS,
)
