"""Sliding windows in config.json: here all layers have one, or none has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError
from megapipe.extras.convert.settings import Settings

WINDOW, USE, FIRST, TYPES = "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Window:
    """Mistral: sliding_window, null for none. default: where the key is missing."""

    default: int | None

    @property
    def keys(self) -> tuple[str, ...]:
        return (WINDOW,)

    def read(self, theirs: Settings) -> dict[str, Any]:
        return {"window_size": theirs.get(WINDOW, self.default)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {WINDOW: model.window_size}


@dataclass(frozen=True)
class WindowByLayer:
    """Qwen: use_sliding_window, from layer max_window_layers on, or by layer_types."""

    default: int = 4096
    default_first: int = 28

    @property
    def keys(self) -> tuple[str, ...]:
        return (WINDOW, USE, FIRST, TYPES)

    def read(self, theirs: Settings) -> dict[str, Any]:
        window = theirs.get(WINDOW, self.default) if theirs.get(USE, False) else None
        types = theirs.get(TYPES)
        if types is None:
            first, layers = theirs.get(FIRST, self.default_first), theirs["num_hidden_layers"]
            types = [SLIDING if window is not None and layer >= first else FULL for layer in range(layers)]
        unknown = set(types) - {FULL, SLIDING}
        if unknown:
            raise ConfigError(f"{TYPES} {unknown.pop()!r} cannot be expressed; it can be {FULL}, {SLIDING}")
        if len(set(types)) > 1:
            raise ConfigError(
                f"{types.count(SLIDING)} of {len(types)} layers have a sliding window ({FIRST} or {TYPES}), which cannot be "
                "expressed: here all layers have it or none"
            )
        return {"window_size": window if types and types[0] == SLIDING else None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        if model.window_size is None:
            return {USE: False}
        return {WINDOW: model.window_size, USE: True, FIRST: 0, TYPES: [SLIDING] * model.num_layers}
