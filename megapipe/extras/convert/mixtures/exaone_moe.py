"""K-EXAONE (ExaoneMoeForCausalLM): rotary positions in layers with a window alone, experts of DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from megapipe.errors import ConfigError
from megapipe.extras.convert import experts
from megapipe.extras.convert.family import llama_relative
from megapipe.extras.convert.layer_types import (
    DEFAULT_WINDOW,
    FULL,
    PATTERNS,
    SLIDING,
    WINDOW,
    Types,
    every,
    windows_with_rope,
)
from megapipe.extras.convert.tables import Rule, Settings, fixed, unwritten

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


FAMILY = llama_relative(
    "ExaoneMoeForCausalLM",
    unwritten(fixed("attention_bias", False, "linears of this architecture have no biases")),
    Rule(WINDOWS.keys, read_windows, WINDOWS.write),
    *experts.sigmoid_router(experts.shared_experts(1, 1024, "num_shared_experts"), 2.5),
    experts.mlp_types(1),
    mlp=experts.some_layers(("num_experts", "num_local_experts"), 8),
    more_rows=experts.expert_rows(shared="shared_experts", bias=experts.BIAS),
)
