"""Layers that differ: `layer_configs` returns the model section as each layer has it, from the flags that give some
layers other options than the model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from megapipe.config.config import ResolvedModelConfig, convert, fields_by_key
from megapipe.config.fields import number_in, read_value
from megapipe.config.layer_pattern import ABSENT, PARTS, expanded, marked_layers
from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError

PATTERN = "--layer-pattern"
ROTARY_OPTIONS = (
    "rotary_base",
    "rotary_percent",
    "rope_scaling_type",
    "rope_scaling_factor",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_mscale",
    "yarn_mscale_all_dim",
)
# part of a layer -> options in which layers may differ; "" for its attention and MLP together
OPTIONS_OF = {
    "attention": (
        "num_query_groups",
        "window_size",
        "position_embedding_type",
        *ROTARY_OPTIONS,
        "qk_layernorm",
        "qk_layernorm_scope",
        "attn_logit_softcapping",
        "softmax_scale",
    ),
    "mlp": ("ffn_hidden_size", "activation"),
    "": ("norm_position",),
}
LAYER_OPTIONS = tuple(name for names in OPTIONS_OF.values() for name in names)


@dataclass(frozen=True, kw_only=True)
class LayerConfig(ResolvedModelConfig):
    """The model section as one layer has it."""

    has_attention: bool = True
    has_mlp: bool = True

    @cached_property
    def rotary(self) -> tuple[Any, ...] | None:
        """The options of its rotary positions; None without them."""
        is_rotary = self.has_attention and self.position_embedding_type == "rope"
        return tuple(getattr(self, name) for name in ROTARY_OPTIONS) if is_rotary else None

    @cached_property
    def window(self) -> int | None:
        """Its sliding window; None without one, and where it reaches over the whole sequence."""
        return None if self.window_size is None or self.window_size >= self.seq_length else self.window_size


@cache
def layer_configs(model: ResolvedModelConfig) -> tuple[LayerConfig, ...]:
    """Return every layer's model section, one object for layers that are alike. Raises ConfigError."""
    alike: dict[LayerConfig, LayerConfig] = {}
    layers = (convert(LayerConfig, model, **settings) for settings in layer_settings(model))
    return tuple(alike.setdefault(layer, layer) for layer in layers)


def layer_settings(model: ModelConfig) -> list[dict[str, Any]]:
    """Return what each layer has in place of the model's options, by name. Raises ConfigError.

    Besides options of the model the names are has_attention and has_mlp.
    """
    layers: list[dict[str, Any]] = [{} for _ in range(model.num_layers)]
    taken = {}
    for flag, text, every, mark, name, value in (
        ("--window-attn-skip-freq", model.window_attn_skip_freq, (1, 0), 0, "window_size", None),
        ("--no-rope-freq", model.no_rope_freq, (0, 1), 1, "position_embedding_type", "none"),
    ):
        if text is not None:
            taken[name] = flag
            for layer, found in zip(layers, marked_layers(flag, text, model.num_layers, every), strict=True):
                layer |= {name: value} if found == mark else {}
    for layer, given in zip(layers, expanded(PATTERN, model.layer_pattern, model.num_layers), strict=False):
        both = [name for name in given if name in taken]
        if both:
            raise ConfigError(f"{PATTERN} and {taken[both[0]]} both set {both[0]}; give one of them")
        missing = [part for part in PARTS if given.get(part) == ABSENT]
        if len(missing) == len(PARTS):
            raise ConfigError(f"{PATTERN}: a layer without {' and '.join(PARTS)} does nothing; lower --num-layers")
        lost = [name for part in missing for name in OPTIONS_OF[part] if name in given]
        if lost:
            raise ConfigError(f"{PATTERN} sets {lost[0]} in a layer without {missing[0]}; leave one of the two out")
        for name, text in given.items():
            layer |= _setting(model, name, text)
    return layers


def _setting(model: ModelConfig, name: str, text: str) -> dict[str, Any]:
    """Return one setting of a layer. Raises ConfigError."""
    given, number = f"{PATTERN} {name}={text}", number_in(text) or 0.0
    if name in PARTS and text == ABSENT:
        return {f"has_{name}": False}
    if name in PARTS:
        raise ConfigError(f"{given}: expected {ABSENT}, for a layer without {name}")
    if name == "n_heads_in_group":  # this and the next as Llama-Nemotron writes them
        if number < 1 or model.num_attention_heads % number:
            raise ConfigError(f"{given} does not divide --num-attention-heads {model.num_attention_heads}")
        return {"num_query_groups": int(model.num_attention_heads / number)}
    if name == "ffn_mult":
        if number <= 0:
            raise ConfigError(f"{given}: expected a number above 0")
        return {"ffn_hidden_size": -(-int(2 * number * model.hidden_size / 3) // 256) * 256}
    if name not in LAYER_OPTIONS:
        raise ConfigError(f"{given}: all layers share this option; they may differ in {', '.join(LAYER_OPTIONS)}")
    value = read_value(fields_by_key()[f"model.{name}"], text, f"{PATTERN} {name}")
    if name == "position_embedding_type" and value == "learned_absolute":
        raise ConfigError(f"{given}: learned positions enter with the embedding; use rope or none in a layer")
    return {name: value}
