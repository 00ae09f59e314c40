"""Layers that differ: `layer_configs` returns the model section as each layer has it, from the flags that give some
layers other options than the model's; `of_each_kind` makes rules that are checked for each kind of layer; `is_explicit`
and `why_masked` say how attention is computed, and how it keeps packed documents apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, wraps
from typing import Any

from megapipe.config.config import Config, ResolvedModelConfig, convert, fields_by_key
from megapipe.config.fields import nearest, read_value
from megapipe.config.layer_pattern import PARTS, expanded, marked_layers
from megapipe.config.model import ATTENTIONS, MixerKind, ModelConfig
from megapipe.config.options import NONE_WORDS, number_in, read_numbers
from megapipe.errors import ConfigError
from megapipe.formatting import ranges_text

PATTERN = "--layer-pattern"
ROTARY_OPTIONS = (
    *"rotary_base rotary_percent rope_scaling_type rope_scaling_factor rope_low_freq_factor".split(),
    *"rope_high_freq_factor rope_original_max_position_embeddings yarn_beta_fast yarn_beta_slow yarn_mscale".split(),
    *"yarn_mscale_all_dim yarn_correction_range_round_to_int yarn_query_scale".split(),
)
# --rope-scaling-type -> beginnings of the names of the rotary options that are used
ROTARY_USES = {
    "none": ("rotary_", "rope_scaling_type"),
    "linear": ("rotary_", "rope_scaling_"),
    "llama3": ("rotary_", "rope_"),
    "yarn": ("rotary_", "rope_scaling_", "rope_original_", "yarn_"),
}
# part of a layer -> options in which layers may differ; "" for its attention and MLP together
OPTIONS_OF = {
    "attention": (
        *("num_query_groups", "window_size", "position_embedding_type", *ROTARY_OPTIONS),
        *"qk_layernorm qk_layernorm_scope qk_l2_norm attn_logit_softcapping softmax_scale attention_kind".split(),
    ),
    "mlp": ("ffn_hidden_size", "activation"),
    "": ("norm_position",),
}
# field that names layers -> their number in a list of numbers, and what they have in place of the model's option
EXPERT_LAYERS = "moe_layer_freq"  # marks layers from the first on, where the frequencies of MARKS end on theirs
MARKS: dict[str, tuple[int, str, Any]] = {
    "window_attn_skip_freq": (0, "window_size", None),
    "no_rope_freq": (1, "position_embedding_type", "none"),
}
# option -> the field that takes it from layers, and what they have in its place
TAKEN = {name: (field, value) for field, (_, name, value) in MARKS.items()} | {"num_experts": (EXPERT_LAYERS, None)}
LAYER_OPTIONS = tuple(name for names in OPTIONS_OF.values() for name in names)
LARGEST_HEAD, HEAD_MULTIPLE = 256, 8  # channels of a head that torch's variable-length kernel takes
HALF_TYPES = ("bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class LayerConfig(ResolvedModelConfig):
    """The model section as one layer has it."""

    has_attention: bool = True
    has_mlp: bool = True
    mixer: str | None = None  # the kind of token mixer that stands in attention's place

    @cached_property
    def missing_parts(self) -> tuple[str, ...]:
        """The parts that it lacks; a mixer takes the place of attention."""
        is_there = {"attention": self.has_attention or self.mixer is not None, "mlp": self.has_mlp}
        return tuple(part for part in PARTS if not is_there[part])

    @cached_property
    def used_options(self) -> tuple[str, ...]:
        """The options in which layers may differ that have an effect in it."""
        of = OPTIONS_OF | ({"attention": ("attention_kind",)} if self.mixer is not None else {})
        idle = (() if self.rotary else ROTARY_OPTIONS) + (() if self.qk_layernorm else ("qk_layernorm_scope",))
        held = (names for part, names in of.items() if part not in self.missing_parts)
        return tuple(name for names in held for name in names if name not in idle)

    @property
    def mixer_kind(self) -> MixerKind:
        """The row of its token mixer."""
        assert self.mixer is not None
        kind = ATTENTIONS[self.mixer].mixer
        assert kind is not None
        return kind

    @cached_property
    def mixer_options(self) -> dict[str, float]:
        """The options of its token mixer, of those in --attention-options its own. Raises ConfigError."""
        defaults = self.mixer_kind.options
        own = [word for word in self.attention_options if word.partition("=")[0] in defaults]
        return read_numbers("--attention-options", own, defaults, f"--attention-kind {self.mixer}")

    @cached_property
    def rotary(self) -> tuple[Any, ...] | None:
        """The options of its rotary positions; None without them."""
        is_rotary = self.has_attention and self.position_embedding_type == "rope"
        return tuple(getattr(self, name) for name in ROTARY_OPTIONS) if is_rotary else None

    @cached_property
    def position_tables(self) -> tuple[Any, ...] | None:
        """The options of what its queries and keys are multiplied by; None if by nothing."""
        if not self.has_attention or self.position_embedding_type != "none" or not self.nope_query_scale:
            return self.rotary
        return self.nope_query_scale, self.nope_query_scale_length

    @property
    def expert_ffn_size(self) -> int:
        """Width between the linears of one expert."""
        return self.ffn_hidden_size if self.moe_ffn_hidden_size is None else self.moe_ffn_hidden_size

    @property
    def limits(self) -> dict[str, Any]:
        """The limits of the keys that its queries see, beside causality and documents, for `Visibility.of`."""
        return {"window": self.window_size, "has_chunks": ATTENTIONS[self.attention_kind].has_chunks}

    @cached_property
    def window(self) -> int | None:
        """Its sliding window; None without one, and where it reaches over the whole sequence."""
        return None if self.window_size is None or self.window_size >= self.seq_length else self.window_size


@cache
def layer_configs(model: ModelConfig) -> tuple[LayerConfig, ...]:
    """Return every layer's model section, one object for layers that are alike. Raises ConfigError.

    Sizes that `model` lacks stay None until they are derived.
    """
    alike: dict[LayerConfig, LayerConfig] = {}
    layers = (convert(LayerConfig, model, **settings) for settings in layer_settings(model))
    return tuple(alike.setdefault(layer, layer) for layer in layers)


def expert_layers(model: ModelConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with experts; those of multi-token prediction follow those of the model."""
    layers = layer_configs(model)
    every = enumerate((*layers, *layers[-1:] * (model.mtp_num_layers or 0)))
    return tuple(number for number, layer in every if layer.has_mlp and layer.num_experts is not None)


@cache
def layer_kinds(model: ModelConfig) -> dict[LayerConfig, list[int]]:
    """Return the layers that differ from each other, with their numbers. Raises ConfigError."""
    sized = replace(
        model,
        ffn_hidden_size=model.feed_forward_size(),
        num_query_groups=model.query_groups(),
        kv_channels=model.head_size(),
    )
    kinds: dict[LayerConfig, list[int]] = {}
    for number, layer in enumerate(layer_configs(sized)):
        kinds.setdefault(layer, []).append(number)
    return kinds


def layer_settings(model: ModelConfig) -> list[dict[str, Any]]:
    """Return what each layer has in place of the model's options, by name. Raises ConfigError.

    Besides options of the model the names are has_attention, has_mlp and mixer.
    """
    layers: list[dict[str, Any]] = [{} for _ in range(model.num_layers)]
    flags = {}  # option -> the flag that sets it in some layers
    for field, (mark, name, value) in MARKS.items():
        text, flag = getattr(model, field), fields_by_key()[f"model.{field}"].main_flag
        if text is not None:
            flags[name] = flag
            for layer in marked_layers(flag, text, model.num_layers, mark):
                layers[layer][name] = value
    if model.moe_layer_freq is not None:
        text, flag = model.moe_layer_freq, fields_by_key()[f"model.{EXPERT_LAYERS}"].main_flag
        dense = marked_layers(flag, text, model.num_layers, 0)
        if text.strip().isdecimal():
            dense = [layer for layer in range(model.num_layers) if layer % int(text)]
        for layer in dense:
            layers[layer]["num_experts"] = None
    for settings, given in zip(layers, expanded(PATTERN, model.layer_pattern, model.num_layers), strict=False):
        both = [name for name in given if name in flags]
        if both:
            raise ConfigError(f"{PATTERN} and {flags[both[0]]} both set {both[0]}; give one of them")
        for name, text in given.items():
            settings |= _setting(model, name, text)
        _check_effects(vars(model) | settings, given)
    for settings in layers:
        kind = settings.get("attention_kind", model.attention_kind)
        if _is_mixer(kind) and settings.get("has_attention", True):
            settings |= {"has_attention": False, "mixer": kind}
    return layers


def _is_mixer(kind: str) -> bool:
    """Return True for a token mixer. A checkpoint may name a kind of an extension that is not loaded."""
    return kind in ATTENTIONS and ATTENTIONS[kind].mixer is not None


def _setting(model: ModelConfig, name: str, text: str) -> dict[str, Any]:
    """Return one setting of a layer. Raises ConfigError."""
    given, number = f"{PATTERN} {name}={text}", number_in(text) or 0.0
    if name in PARTS and text.lower() in NONE_WORDS:
        return {f"has_{name}": False}
    if name in PARTS:
        raise ConfigError(f"{given}: expected none, for a layer without {name}")
    if name == "n_heads_in_group":  # this and the next as Llama-Nemotron writes them
        if number < 1 or model.num_attention_heads % number:
            raise ConfigError(f"{given} does not divide --num-attention-heads {model.num_attention_heads}")
        return {"num_query_groups": int(model.num_attention_heads / number)}
    if name == "ffn_mult":
        if not 0 < number < math.inf:
            raise ConfigError(f"{given}: expected a number above 0")
        return {"ffn_hidden_size": -(-int(2 * number * model.hidden_size / 3) // 256) * 256}
    if name not in LAYER_OPTIONS:
        every = f"; layers may differ in {', '.join((*PARTS, *LAYER_OPTIONS))}"
        if f"model.{name}" in fields_by_key():
            raise ConfigError(f"{given}: all layers share this option{every}")
        raise ConfigError(f"{given}: unknown option{nearest(name, LAYER_OPTIONS) or every}")
    field = fields_by_key()[f"model.{name}"]
    value = read_value(field, text, f"{PATTERN} {name}")
    if value is None and field.option.derived:
        raise ConfigError(f"{given}: expected a number, or leave it out for the model's")
    if value == "learned_absolute":
        raise ConfigError(f"{given}: learned positions enter with the embedding; use rope or none in a layer")
    return {name: value}


def _check_effects(layer: dict[str, Any], given: Collection[str]) -> None:
    """Raise ConfigError if a layer does nothing, or is given options that have no effect in it."""
    missing = [part for part in PARTS if not layer.get(f"has_{part}", True)]
    if len(missing) == len(PARTS):
        raise ConfigError(f"{PATTERN}: a layer without {' and '.join(PARTS)} does nothing; lower --num-layers")
    lost = {name: part for part in missing for name in OPTIONS_OF[part]}
    if _is_mixer(layer["attention_kind"]):
        lost = {name: "attention" for name in OPTIONS_OF["attention"] if name != "attention_kind"} | lost
    if layer["position_embedding_type"] != "rope":
        lost = dict.fromkeys(ROTARY_OPTIONS, "rotary positions") | lost
    if not layer["qk_layernorm"]:
        lost = {"qk_layernorm_scope": "qk_layernorm"} | lost
    for name in given:
        option = {"n_heads_in_group": "num_query_groups", "ffn_mult": "ffn_hidden_size"}.get(name, name)
        if option in lost:
            raise ConfigError(f"{PATTERN} sets {name} in a layer without {lost[option]}; leave one of the two out")


def idle_options(layer: ModelConfig) -> set[str]:
    """Return the options of attention that have no effect in a layer beside its others."""
    uses = ROTARY_USES[layer.rope_scaling_type] if layer.position_embedding_type == "rope" else ()
    idle = {name for name in ROTARY_OPTIONS if not name.startswith(uses)}
    if layer.position_embedding_type != "none" or not layer.nope_query_scale:
        idle |= {"nope_query_scale", "nope_query_scale_length"}
    if not layer.qk_layernorm:
        idle |= {"qk_layernorm_scope", "qk_layernorm_after_rope", "latent_norm_epsilon"}
    return idle | {"add_qkv_bias"} if layer.add_bias_linear else idle  # all linear layers have biases then


# rules, checked for each kind of layer


def kinds_of(model: ModelConfig) -> dict[LayerConfig, list[int]]:
    """Return the kinds of layers with the layers' numbers; one kind if the pattern is refused, by another rule."""
    try:
        return layer_kinds(model)
    except ConfigError:
        return layer_kinds(
            replace(model, layer_pattern=(), window_attn_skip_freq=None, no_rope_freq=None, moe_layer_freq=None)
        )


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


# attention


def has_narrow_values(model: ModelConfig) -> bool:
    """Return True if fused attention takes values of fewer channels than keys, which runs as one block."""
    is_narrow = model.multi_latent_attention and model.v_head_dim < model.head_size()
    return is_narrow and not is_explicit(model)


def is_explicit(model: ModelConfig, has_dropout: bool = True) -> bool:
    """Return True if attention is written out: fused kernels have no soft-cap, keyed dropout or softmax dtype, nor the
    score function of an extension. has_dropout: False where a model is evaluated.
    """
    if ATTENTIONS[model.attention_kind].function is not None or (has_dropout and model.attention_dropout > 0.0):
        return True
    return model.attn_logit_softcapping is not None or model.attention_softmax_in_fp32


def why_masked(config: Config, is_cuda: bool) -> str | None:
    """Return why documents need a mask; None if attention takes their borders, or there are none."""
    model, dtype = config.model, config.precision.dtype
    if not config.data.reset_attention_mask or config.kernels.attention_impl == "flash":
        return None  # flash-attn has soft-caps too; the rules refuse what it lacks
    layers = [layer for layer in layer_configs(model) if layer.has_attention]
    head = model.head_size()
    reasons = {
        "only GPUs have variable-length kernels": not is_cuda,
        "values of latent attention have other sizes than keys": model.multi_latent_attention,
        "attention is not fused": any(is_explicit(layer) for layer in layers),
        "attention sinks need its log-sum-exp": any(layer.softmax_type != "vanilla" for layer in layers),
        "variable-length kernels have no chunks": any(layer.limits["has_chunks"] for layer in layers),
        f"variable-length kernels take bf16 and fp16, not {dtype}": dtype not in HALF_TYPES,
        f"they take heads of a multiple of {HEAD_MULTIPLE} channels up to {LARGEST_HEAD}, not {head}": (
            head % HEAD_MULTIPLE != 0 or head > LARGEST_HEAD
        ),
        "context parallelism cuts sequences": config.parallel.context_parallel_size > 1,
        "slices of a sequence read the keys of others": config.parallel.pipe_sp_splits > 1,
        "CUDA graphs need tensors of fixed sizes": config.gpu.cuda_graph_impl != "none",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
