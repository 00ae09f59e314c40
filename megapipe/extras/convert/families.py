"""Architectures of Hugging Face that megapipe can express: tables of tensors and settings, read in both directions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.config.rules.check import check
from megapipe.errors import ConfigError
from megapipe.extras.convert.snapshot import INERT
from megapipe.extras.convert.tables import (
    LAYER,
    Row,
    Rule,
    Settings,
    always,
    check_expressed,
    fixed,
    fused_qkv,
    gate_and_up,
    key,
    meaning,
    read_fields,
    separate_qkv,
    shared,
    transposed,
    write_keys,
)

LONGEST_SEQUENCE = 4096  # default training length of converted models with more positions (--seq-length overrides)
OURS, LLAMA, GPT2 = f"decoder.layers.{LAYER}", f"model.layers.{LAYER}", f"transformer.h.{LAYER}"

LLAMA_ROWS = (
    Row("embedding.word_embeddings", ("model.embed_tokens",)),
    Row(f"{OURS}.input_layernorm", (f"{LLAMA}.input_layernorm",)),
    Row(f"{OURS}.self_attention.linear_qkv", tuple(f"{LLAMA}.self_attn.{x}_proj" for x in "qkv"), separate_qkv),
    Row(f"{OURS}.self_attention.q_layernorm", (f"{LLAMA}.self_attn.q_norm",)),
    Row(f"{OURS}.self_attention.k_layernorm", (f"{LLAMA}.self_attn.k_norm",)),
    Row(f"{OURS}.self_attention.linear_proj", (f"{LLAMA}.self_attn.o_proj",)),
    Row(f"{OURS}.pre_mlp_layernorm", (f"{LLAMA}.post_attention_layernorm",)),
    Row(f"{OURS}.mlp.linear_fc1", (f"{LLAMA}.mlp.gate_proj", f"{LLAMA}.mlp.up_proj"), gate_and_up),
    Row(f"{OURS}.mlp.linear_fc2", (f"{LLAMA}.mlp.down_proj",)),
    Row("decoder.final_layernorm", ("model.norm",)),
    Row("output_layer", ("lm_head",)),
)
GPT2_ROWS = (
    Row("embedding.word_embeddings", ("transformer.wte",)),
    Row("embedding.position_embeddings", ("transformer.wpe",)),
    Row(f"{OURS}.input_layernorm", (f"{GPT2}.ln_1",)),
    Row(f"{OURS}.self_attention.linear_qkv", (f"{GPT2}.attn.c_attn",), fused_qkv),
    Row(f"{OURS}.self_attention.linear_proj", (f"{GPT2}.attn.c_proj",), transposed),
    Row(f"{OURS}.pre_mlp_layernorm", (f"{GPT2}.ln_2",)),
    Row(f"{OURS}.mlp.linear_fc1", (f"{GPT2}.mlp.c_fc",), transposed),
    Row(f"{OURS}.mlp.linear_fc2", (f"{GPT2}.mlp.c_proj",), transposed),
    Row("decoder.final_layernorm", ("transformer.ln_f",)),
    Row("output_layer", ("lm_head",)),
)

THETA, SCALING, PARAMETERS, PARTIAL = "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"
LENGTH = "original_max_position_embeddings"
FACTOR = {"factor": ("rope_scaling_factor", None)}
ORIGINAL_LENGTH = {LENGTH: ("rope_original_max_position_embeddings", None)}
# their rope_type, which is ours but for default, our none -> their key -> (our field, default or None: required)
ROPE_TYPES: dict[str, dict[str, tuple[str, float | None]]] = {
    "default": {},
    "linear": {**FACTOR},
    "llama3": {
        **FACTOR,
        "low_freq_factor": ("rope_low_freq_factor", None),
        "high_freq_factor": ("rope_high_freq_factor", None),
        **ORIGINAL_LENGTH,
    },
    "yarn": {
        **FACTOR,
        "beta_fast": ("yarn_beta_fast", 32.0),
        "beta_slow": ("yarn_beta_slow", 1.0),
        "mscale": ("yarn_mscale", 1.0),
        "mscale_all_dim": ("yarn_mscale_all_dim", 0.0),
        **ORIGINAL_LENGTH,
    },
}


def read_rope(settings: Settings) -> dict[str, Any]:
    """Read rotary positions: `rope_theta` and `rope_scaling` (transformers 4), or `rope_parameters` (5)."""
    scaling = dict(settings.get(PARAMETERS) or settings.get(SCALING) or {})
    base = scaling.pop(THETA, None) or settings.get(THETA) or 10000.0
    partial = scaling.pop(PARTIAL, None) or settings.get(PARTIAL) or 1.0
    if partial != 1.0:
        raise ConfigError(f"{PARTIAL} {partial} cannot be expressed: this architecture rotates whole heads")
    kind = scaling.pop("rope_type", None) or scaling.get("type") or "default"
    scaling.pop("type", None)
    if kind not in ROPE_TYPES:
        raise ConfigError(f"rope_type {kind!r} cannot be expressed; it can be {', '.join(ROPE_TYPES)}")
    ours = "none" if kind == "default" else kind
    fields = {"position_embedding_type": "rope", "rotary_base": float(base), "rope_scaling_type": ours}
    if kind == "yarn":  # keys that state what is always so here
        scaling.setdefault(LENGTH, settings.get("max_position_embeddings"))
        if scaling.pop("truncate", True) is not True:
            why = "here the ramp starts and ends at whole pairs of channels"
            raise ConfigError(f"rope_type yarn: truncate false cannot be expressed: {why}")
        given = scaling.pop("attention_factor", None)
        if given is not None:
            here = 0.1 * math.log(scaling["factor"]) + 1.0
            if scaling.get("mscale") or scaling.get("mscale_all_dim") or not math.isclose(given, here, rel_tol=1e-9):
                rule = f"it is 0.1 ln(factor) + 1 = {here}"
                raise ConfigError(f"rope_type yarn: attention_factor {given} cannot be expressed: {rule}")
    for name, (field, default) in ROPE_TYPES[kind].items():
        value = scaling.pop(name, None)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"rope_type {kind}: the key {name} is missing")
        fields[field] = int(value) if name == LENGTH else float(value)
    if scaling:
        raise ConfigError(f"rope_type {kind}: the key {next(iter(scaling))} cannot be expressed")
    return fields


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """Return keys as in transformers 4, which both versions read."""
    kind = "default" if model.rope_scaling_type == "none" else model.rope_scaling_type
    scaling = {name: getattr(model, field) for name, (field, _) in ROPE_TYPES[kind].items()}
    if kind == "yarn" and not model.yarn_mscale_all_dim:  # transformers takes both or neither
        del scaling["mscale"], scaling["mscale_all_dim"]
    return {THETA: model.rotary_base, SCALING: {"rope_type": kind, **scaling} if kind != "default" else None}


WINDOW, USE, FIRST, TYPES = "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"
FULL, SLIDING = "full_attention", "sliding_attention"


def read_window_by_layer(settings: Settings) -> dict[str, Any]:
    """Read Qwen's sliding window: with use_sliding_window from layer max_window_layers on, or as layer_types says."""
    window = settings.get(WINDOW, 4096) if settings.get(USE, False) else None
    types = settings.get(TYPES)
    if types is None:
        first, layers = settings.get(FIRST, 28), settings["num_hidden_layers"]
        types = [SLIDING if window is not None and layer >= first else FULL for layer in range(layers)]
    unknown = set(types) - {FULL, SLIDING}
    if unknown:
        raise ConfigError(f"{TYPES} {unknown.pop()!r} cannot be expressed; it can be {FULL}, {SLIDING}")
    if len(set(types)) > 1:
        raise ConfigError(
            f"{types.count(SLIDING)} of {len(types)} layers have a sliding window ({FIRST} or {TYPES}), which "
            "cannot be expressed: here all layers have one or none has"
        )
    return {"window_size": window if types and types[0] == SLIDING else None}


def write_window_by_layer(model: ModelConfig) -> dict[str, Any]:
    if model.window_size is None:
        return {USE: False}
    return {WINDOW: model.window_size, USE: True, FIRST: 0, TYPES: [SLIDING] * model.num_layers}


WINDOW_BY_LAYER = Rule((WINDOW, USE, FIRST, TYPES), read_window_by_layer, write_window_by_layer)
# Mistral's: null for none
WINDOW_IN_ALL_LAYERS = Rule(
    (WINDOW,),
    lambda settings: {"window_size": settings.get(WINDOW, 4096)},
    lambda model: {WINDOW: model.window_size},
)
GPT2_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "squared_relu",
}
GPT2_RULES = (
    key("vocab_size", "vocab_size"),
    key("n_embd", "hidden_size"),
    replace(
        key("n_inner", "ffn_hidden_size", lambda settings: 4 * settings["n_embd"]),
        write=lambda model: {
            "n_inner": None if model.ffn_hidden_size == 4 * model.hidden_size else model.ffn_hidden_size
        },
    ),
    key("n_layer", "num_layers"),
    key("n_head", "num_attention_heads"),
    key("n_positions", "max_position_embeddings", 1024),
    key("layer_norm_epsilon", "norm_epsilon", 1e-5),
    key("activation_function", "activation", "gelu_new", GPT2_ACTIVATIONS),
    key("tie_word_embeddings", "untie_embeddings_and_output_weights", True, {True: False, False: True}),
    shared(("resid_pdrop", "embd_pdrop"), "hidden_dropout", 0.1, "here they are one setting, hidden_dropout"),
    key("attn_pdrop", "attention_dropout", 0.1),
    key("initializer_range", "init_method_std", 0.02),
    fixed("scale_attn_weights", True, "attention logits are scaled by 1 / sqrt(head size) here"),
    fixed("scale_attn_by_inverse_layer_idx", False, "all layers scale attention logits by the same factor here"),
    fixed("add_cross_attention", False, "there is no cross attention here"),
    always(position_embedding_type="learned_absolute", normalization="LayerNorm"),
)


# --------------------------------------------------------------------------------------------------- families


@dataclass(frozen=True)
class Family:
    """One architecture, with its tables of tensors (rows) and settings (rules)."""

    architecture: str
    model_type: str
    rows: tuple[Row, ...]
    rules: tuple[Rule, ...]
    prefix: str  # missing from all names if the base model was saved without its head
    buffers: tuple[str, ...]  # suffixes of tensors that are not learned (masks, frequencies), which are skipped

    def read(self, theirs: Settings, ignored: frozenset[str] = frozenset()) -> ModelConfig:
        """Return our model section. Raises ConfigError naming a key that is unknown or cannot be expressed."""
        known = {name for rule in self.rules for name in rule.keys} | INERT | ignored
        unknown = [name for name in theirs if name not in known]
        if unknown:
            raise ConfigError(
                f"unknown keys of {self.architecture}: {', '.join(unknown)}. They might change what the model "
                f"computes; if {unknown[0]} does not, give --ignore-key {unknown[0]}"
            )
        fields = read_fields(self.rules, theirs)
        model = ModelConfig(**fields, seq_length=min(fields["max_position_embeddings"], LONGEST_SEQUENCE))
        check(Config(model=model))
        return model

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of config.json. Raises ConfigError naming the first field that cannot be expressed."""
        theirs: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        theirs |= write_keys(self.rules, meaning(model))
        check_expressed(model, self.read(theirs), self.architecture)
        return theirs


def _llama_family(architecture: str, model_type: str, max_positions: int, *more: Rule) -> Family:
    """Return Llama or a relative of it. more: rules besides the common ones."""
    rules = (
        key("vocab_size", "vocab_size"),
        key("hidden_size", "hidden_size"),
        key("intermediate_size", "ffn_hidden_size"),
        key("num_hidden_layers", "num_layers"),
        key("num_attention_heads", "num_attention_heads"),
        key("num_key_value_heads", "num_query_groups", lambda settings: settings["num_attention_heads"]),
        key("max_position_embeddings", "max_position_embeddings", max_positions),
        key("rms_norm_eps", "norm_epsilon", 1e-6),
        key("hidden_act", "activation", "silu", {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh"}),
        key("tie_word_embeddings", "untie_embeddings_and_output_weights", False, {False: True, True: False}),
        key("attention_dropout", "attention_dropout", 0.0),
        key("initializer_range", "init_method_std", 0.02),
        Rule((THETA, SCALING, PARAMETERS, PARTIAL), read_rope, write_rope),
        always(normalization="RMSNorm", layernorm_zero_centered_gamma=False, hidden_dropout=0.0),
    )
    return Family(architecture, model_type, LLAMA_ROWS, (*rules, *more), "model.", ("rotary_emb.inv_freq",))


HEAD_DIM = key(
    "head_dim",
    "kv_channels",
    lambda settings: int(settings["hidden_size"]) // int(settings["num_attention_heads"]),
)
LLAMA_BIASES = shared(
    ("attention_bias", "mlp_bias"), "add_bias_linear", False, "here all linear layers have biases or none has"
)
NO_BIAS = always(add_bias_linear=False)

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family("GPT2LMHeadModel", "gpt2", GPT2_ROWS, GPT2_RULES, "transformer.", (".attn.bias", ".attn.masked_bias")),
        _llama_family("LlamaForCausalLM", "llama", 2048, HEAD_DIM, LLAMA_BIASES),
        _llama_family("MistralForCausalLM", "mistral", 131072, HEAD_DIM, NO_BIAS, WINDOW_IN_ALL_LAYERS),
        _llama_family("Qwen2ForCausalLM", "qwen2", 32768, NO_BIAS, always(add_qkv_bias=True), WINDOW_BY_LAYER),
        _llama_family(
            "Qwen3ForCausalLM",
            "qwen3",
            32768,
            key("head_dim", "kv_channels", 128),
            WINDOW_BY_LAYER,
            fixed("attention_bias", False, "Qwen's output projection has no bias here"),
            NO_BIAS,
            always(qk_layernorm=True),
        ),
    )
}

_SCALED = "it multiplies embeddings by sqrt(hidden_size) and uses them unscaled in its tied output layer"
_SANDWICH = "it also normalizes the outputs of attention and MLP (post_attention_layernorm, post_feedforward_layernorm)"
_EXPERTS = "it is a mixture of experts"
REFUSED: dict[str, str] = {
    "GemmaForCausalLM": _SCALED,
    "Gemma2ForCausalLM": f"{_SCALED}, and {_SANDWICH}",
    "Gemma3ForCausalLM": f"{_SCALED}, and {_SANDWICH}",
    "MixtralForCausalLM": _EXPERTS,
    "Qwen2MoeForCausalLM": _EXPERTS,
    "Qwen3MoeForCausalLM": _EXPERTS,
    "DeepseekV2ForCausalLM": f"{_EXPERTS} with latent attention",
    "DeepseekV3ForCausalLM": f"{_EXPERTS} with latent attention",
    "GPTJForCausalLM": "attention and MLP are parallel branches, and rotary positions are interleaved",
    "FalconForCausalLM": "attention and MLP are parallel branches",
    "CohereForCausalLM": "attention and MLP are parallel branches",
    "BloomForCausalLM": "it has ALiBi positions and a norm after the embedding",
    "Olmo2ForCausalLM": "it normalizes the outputs of attention and MLP, and queries and keys over all heads",
}


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json. Raises ConfigError for an architecture without a table."""
    named = config.get("architectures") or []
    if not named:
        named = [name for name, family in FAMILIES.items() if family.model_type == config.get("model_type")]
    if len(named) == 1 and named[0] in FAMILIES:
        return FAMILIES[named[0]]
    name = ", ".join(named) or str(config.get("model_type"))
    if name in REFUSED:
        raise ConfigError(f"{name} cannot be expressed: {REFUSED[name]}")
    raise ConfigError(f"unknown architecture {name}; known are {', '.join(FAMILIES)}")


def choose_family(
    model: ModelConfig, requested: str | None, original: str | None = None
) -> tuple[Family, dict[str, Any]]:
    """Return an architecture that expresses the model, and its config.json.

    It is the requested one; without request the original one if it fits, else the first that does. Raises ConfigError
    with what each cannot express.
    """
    if requested is not None and requested not in FAMILIES:
        raise ConfigError(f"unknown --architecture {requested}; known are {', '.join(FAMILIES)}")
    names = [requested] if requested is not None else sorted(FAMILIES, key=lambda name: name != original)
    reasons = []
    for name in names:
        try:
            return FAMILIES[name], FAMILIES[name].write(model)
        except ConfigError as error:
            reasons.append(str(error))
    raise ConfigError("no known Hugging Face architecture can express this model:\n  " + "\n  ".join(reasons))
