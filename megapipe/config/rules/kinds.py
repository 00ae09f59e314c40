"""Rules of single layers, which are checked for each kind of layer of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps

from megapipe.config.config import Config
from megapipe.config.layers import LayerConfig, layer_kinds
from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError
from megapipe.formatting import ranges_text


def kinds_of(model: ModelConfig) -> dict[LayerConfig, list[int]]:
    """Return the kinds of layers with the layers' numbers; one kind if a rule of its own refuses the pattern."""
    try:
        return layer_kinds(model)
    except ConfigError:
        return layer_kinds(replace(model, layer_pattern=(), window_attn_skip_freq=None, no_rope_freq=None))


def has_soft_cap(model: ModelConfig) -> bool:
    """Return True if a layer caps its attention logits."""
    return any(layer.has_attention and layer.attn_logit_softcapping is not None for layer in kinds_of(model))


def of_each_kind(rule: Callable[[Config, LayerConfig], Iterator[str]]) -> Callable[[Config], Iterator[str]]:
    """Return a rule that yields each message once, with the numbers of the layers unless it holds for all layers."""

    @wraps(rule)
    def checked(config: Config) -> Iterator[str]:
        broken: dict[str, list[int]] = {}
        for layer, numbers in kinds_of(config.model).items():
            for message in rule(config, layer):
                broken.setdefault(message, []).extend(numbers)
        for message, numbers in broken.items():
            yield message if len(numbers) == config.model.num_layers else f"{layers_text(numbers)}: {message}"

    return checked


def layers_text(numbers: list[int]) -> str:
    """Return 'layer 3' or 'layers 0 to 4, 6'."""
    return ("layer " if len(numbers) == 1 else "layers ") + ranges_text(sorted(numbers))
