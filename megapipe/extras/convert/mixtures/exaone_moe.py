"""K-EXAONE (ExaoneMoeForCausalLM): rotary positions in layers with a window alone, experts of DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from megapipe.errors import ConfigError
from megapipe.extras.convert import experts
from megapipe.extras.convert.family import NO_BIAS, UNUSUAL_HEAD_DIM, llama_family
from megapipe.extras.convert.layer_types import (
    DEFAULT_WINDOW,
    FULL,
    PATTERNS,
    SLIDING,
    TYPES,
    WINDOW,
    every,
    frequency,
    read_types,
    regular_period,
    runs_text,
    types_of,
    write_types,
)
from megapipe.extras.convert.tables import LLAMA, OURS, Layers, Row, Rule, Settings, always, fixed, unwritten

PATTERN = PATTERNS[0]  # every how many layers one has full attention, or letters L and G, after which the last is G


def read_windows(settings: Settings) -> dict[str, Any]:
    """Read windows by layer type. Layers without one have no positions."""
    window, pattern = settings.get(WINDOW, DEFAULT_WINDOW), settings.get(PATTERN, 4)

    def default(num_layers: int) -> list[str]:
        if isinstance(pattern, int) and pattern > 0:
            return list(every(pattern)(num_layers))
        if not isinstance(pattern, str) or set(pattern) - set("LG") or not pattern:
            raise ConfigError(f"{PATTERN} {pattern!r} cannot be expressed; it can be a number above 0, or letters L, G")
        letters = [pattern[layer % len(pattern)] for layer in range(num_layers - 1)]
        return [*(SLIDING if letter == "L" else FULL for letter in letters), FULL]

    full = [kind == FULL for kind in read_types(settings, default, window)]
    if all(full) or not any(full):
        raise ConfigError(
            f"{WINDOW} {window} with layers of one type cannot be expressed: some have windows, some none"
        )
    marks = {"window_attn_skip_freq": frequency(full), "no_rope_freq": runs_text([int(mark) for mark in full])}
    return {"window_size": window, **marks}


def write_windows(layers: Layers) -> dict[str, Any]:
    full = [kind == FULL for kind in types_of(layers)]
    if all(full):
        raise ConfigError("no layer has a window, and layers without one have no positions in this architecture")
    period = regular_period(full)
    return write_types(layers) | ({} if period is None else {PATTERN: period})


FAMILY = llama_family(
    "ExaoneMoeForCausalLM",
    "exaone_moe",
    2048,
    UNUSUAL_HEAD_DIM,
    NO_BIAS,
    unwritten(fixed("attention_bias", False, "linears of this architecture have no biases")),
    always(qk_layernorm=True),
    Rule((WINDOW, PATTERN, TYPES), read_windows, write_windows),
    experts.SIGMOID,
    experts.normalized(True),
    experts.scaling(2.5),
    experts.groups(1, 1),
    experts.shared_experts(1, 1024, "num_shared_experts"),
    experts.mlp_types(1),
    epsilon=1e-5,
    groups=32,
    mlp=experts.some_layers(("num_experts", "num_local_experts"), 8),
    more_rows=(
        *experts.ROWS,
        *experts.shared_rows("mlp.shared_experts"),
        Row(f"{OURS}.mlp.router.expert_bias", (f"{LLAMA}.mlp.e_score_correction_bias",)),
    ),
)
