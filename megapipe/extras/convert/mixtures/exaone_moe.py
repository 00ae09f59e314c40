"""EXAONE-4 (Exaone4ForCausalLM), with norms after attention and MLP, and K-EXAONE (ExaoneMoeForCausalLM), with experts
of DeepSeek-V3: rotary positions in layers with a window alone.
"""

from __future__ import annotations

from typing import Any

from megapipe.errors import ConfigError
from megapipe.extras.convert import experts
from megapipe.extras.convert.family import NORMS_AFTER, llama_relative
from megapipe.extras.convert.layer_types import (
    DEFAULT_WINDOW,
    FULL,
    PATTERNS,
    SLIDING,
    WINDOW,
    Types,
    every,
    read_types,
    types_of,
    windows_with_rope,
)
from megapipe.extras.convert.tables import Layers, Rule, Settings, always, fixed, unwritten

PATTERN = PATTERNS[0]  # every how many layers one has full attention, or letters L and G, after which the last is G


def types_of_pattern(settings: Settings, num_layers: int) -> Types:
    """Return the types that sliding_window_pattern gives to layers."""
    pattern = settings.get(PATTERN, 4)
    if isinstance(pattern, int) and pattern > 0:
        return every(pattern)(num_layers)
    if not isinstance(pattern, str) or set(pattern) - set("LG") or not pattern:
        raise ConfigError(f"{PATTERN} {pattern!r} cannot be expressed; it can be a number above 0, or letters L, G")
    letters = [pattern[layer % len(pattern)] for layer in range(num_layers - 1)]
    return [*(SLIDING if letter == "L" else FULL for letter in letters), FULL]


WINDOWS = windows_with_rope(types_of_pattern, DEFAULT_WINDOW, PATTERN)


def read_windows(settings: Settings) -> dict[str, Any]:
    if settings.get(WINDOW, DEFAULT_WINDOW) is None:
        raise ConfigError(f"{WINDOW} null cannot be expressed: it gives rotary positions to layers without a window")
    return WINDOWS.read(settings)


def read_windows_or_none(settings: Settings) -> dict[str, Any]:
    """Read windows and positions of EXAONE-4, where a null window gives rotary positions to all layers."""
    if settings.get(WINDOW, DEFAULT_WINDOW) is not None:
        return WINDOWS.read(settings)
    read_types(settings, every(1), None)
    return {"window_size": None}


def write_windows_or_none(layers: Layers) -> dict[str, Any]:
    no_window = SLIDING not in types_of(layers) and layers[0].position_embedding_type == "rope"
    return WINDOWS.write(layers) | ({WINDOW: None} if no_window else {})


NO_BIASES = unwritten(fixed("attention_bias", False, "linears of this architecture have no biases"))
DENSE = llama_relative(
    "Exaone4ForCausalLM",
    NO_BIASES,
    Rule(WINDOWS.keys, read_windows_or_none, write_windows_or_none),
    always(norm_position="after"),
    norms=NORMS_AFTER,
)
FAMILY = llama_relative(
    "ExaoneMoeForCausalLM",
    NO_BIASES,
    Rule(WINDOWS.keys, read_windows, WINDOWS.write),
    *experts.sigmoid_router(experts.shared_experts(1, 1024, "num_shared_experts"), 2.5),
    experts.mlp_types(1),
    mlp=experts.some_layers(("num_experts", "num_local_experts"), 8),
    more_rows=experts.expert_rows(shared="shared_experts", bias=experts.BIAS),
)
