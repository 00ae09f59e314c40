"""Architectures of Hugging Face: tables, read in both directions, of those that megapipe can express."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.config.rules.check import check
from megapipe.errors import ConfigError
from megapipe.extras.convert.settings import (
    INERT,
    Always,
    Fixed,
    Key,
    Rope,
    Rule,
    Settings,
    Shared,
    Window,
    WindowByLayer,
)
from megapipe.extras.convert.snapshot import unpadded
from megapipe.extras.convert.tensor_map import GPT2_ROWS, LLAMA_ROWS, Row

# fields that change how a model is trained or stored, not what it computes: a foreign configuration may lack them
NOT_THE_MODEL = (
    "seq_length",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
    "hidden_dropout",
    "attention_dropout",
    "attention_softmax_in_fp32",
    "init_method_std",
)
LONGEST_SEQUENCE = 4096  # default training length of converted models with more positions (--seq-length overrides)
ROPE_ONLY = ("rotary_base", "rotary_percent", "rope_scaling_type")
SCALING_FIELDS = {  # fields that have an effect only with these rope_scaling_types
    "rope_scaling_factor": ("linear", "llama3", "yarn"),
    "rope_low_freq_factor": ("llama3",),
    "rope_high_freq_factor": ("llama3",),
    "rope_original_max_position_embeddings": ("llama3", "yarn"),
    "yarn_beta_fast": ("yarn",),
    "yarn_beta_slow": ("yarn",),
    "yarn_mscale": ("yarn",),
    "yarn_mscale_all_dim": ("yarn",),
}


@dataclass(frozen=True)
class Family:
    """One architecture.

    rows, rules: its tables of tensors and settings. prefix: missing from all names if the base model was saved
    without its head. buffers: suffixes of tensors that are not learned (masks, frequencies), which are skipped.
    """

    architecture: str
    model_type: str
    rows: tuple[Row, ...]
    rules: tuple[Rule, ...]
    prefix: str
    buffers: tuple[str, ...] = ()

    def read(self, theirs: Settings, ignored: frozenset[str] = frozenset()) -> ModelConfig:
        """Return our model section. Raises ConfigError naming a key that cannot be expressed, or is neither known nor
        in `ignored`.
        """
        known = {key for rule in self.rules for key in rule.keys} | INERT | ignored
        unknown = [key for key in theirs if key not in known]
        if unknown:
            raise ConfigError(
                f"unknown keys of {self.architecture}: {', '.join(unknown)}. They might change what the model "
                f"computes; if {unknown[0]} does not, give --ignore-key {unknown[0]}"
            )
        fields: dict[str, Any] = {}
        for rule in self.rules:
            fields |= rule.read(theirs)
        model = ModelConfig(**fields, seq_length=min(fields["max_position_embeddings"], LONGEST_SEQUENCE))
        check(Config(model=model))
        return model

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of config.json. Raises ConfigError naming the first field that cannot be expressed."""
        model = meaning(model)
        theirs: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        for rule in self.rules:
            theirs |= rule.write(model)
        check_expressed(model, self.read(theirs), self.architecture)
        return theirs


def check_expressed(model: ModelConfig, read: ModelConfig, name: str) -> None:
    """Raise ConfigError if a model that was written and read again computes something else. name: of the other side."""
    model, read = meaning(model), meaning(read)
    for field, value in vars(model).items():
        if field not in NOT_THE_MODEL and getattr(read, field) != value:
            raise ConfigError(f"{name} cannot express model.{field} {value} (it would be {getattr(read, field)})")


def meaning(model: ModelConfig) -> ModelConfig:
    """Return the model in a normal form for comparison: derived sizes filled in, fields without effect at defaults."""
    defaults = ModelConfig()
    changed: dict[str, Any] = {}
    if model.position_embedding_type != "rope":
        changed |= {name: getattr(defaults, name) for name in ROPE_ONLY}
    scaling = changed.get("rope_scaling_type", model.rope_scaling_type)
    changed |= {name: getattr(defaults, name) for name, kinds in SCALING_FIELDS.items() if scaling not in kinds}
    if model.add_bias_linear:
        changed["add_qkv_bias"] = False
    return unpadded(dataclasses.replace(model, **changed))


def _llama_family(architecture: str, model_type: str, max_positions: int, *more: Rule) -> Family:
    """Return Llama or a relative of it. more: rules besides the common ones."""
    rules = (
        Key("vocab_size", "vocab_size"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size", derived=ModelConfig.feed_forward_size),
        Key("num_hidden_layers", "num_layers"),
        Key("num_attention_heads", "num_attention_heads"),
        Key(
            "num_key_value_heads",
            "num_query_groups",
            lambda theirs: theirs["num_attention_heads"],
            derived=ModelConfig.query_groups,
        ),
        Key("max_position_embeddings", "max_position_embeddings", max_positions),
        Key("rms_norm_eps", "norm_epsilon", 1e-6),
        Key("hidden_act", "activation", "silu", {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh"}),
        Key("tie_word_embeddings", "untie_embeddings_and_output_weights", False, {False: True, True: False}),
        Key("attention_dropout", "attention_dropout", 0.0),
        Key("initializer_range", "init_method_std", 0.02),
        Rope(),
        Always({"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False, "hidden_dropout": 0.0}),
    )
    return Family(architecture, model_type, LLAMA_ROWS, (*rules, *more), "model.", ("rotary_emb.inv_freq",))


GPT2_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "squared_relu",
}
GPT2_RULES: tuple[Rule, ...] = (
    Key("vocab_size", "vocab_size"),
    Key("n_embd", "hidden_size"),
    Key(
        "n_inner",
        "ffn_hidden_size",
        lambda theirs: 4 * theirs["n_embd"],
        null_for=lambda model: 4 * model.hidden_size,
    ),
    Key("n_layer", "num_layers"),
    Key("n_head", "num_attention_heads"),
    Key("n_positions", "max_position_embeddings", 1024),
    Key("layer_norm_epsilon", "norm_epsilon", 1e-5),
    Key("activation_function", "activation", "gelu_new", GPT2_ACTIVATIONS),
    Key("tie_word_embeddings", "untie_embeddings_and_output_weights", True, {True: False, False: True}),
    Shared(("resid_pdrop", "embd_pdrop"), "hidden_dropout", 0.1, "here they are one setting, hidden_dropout"),
    Key("attn_pdrop", "attention_dropout", 0.1),
    Key("initializer_range", "init_method_std", 0.02),
    Fixed("scale_attn_weights", True, "attention logits are scaled by 1 / sqrt(head size) here"),
    Fixed("scale_attn_by_inverse_layer_idx", False, "all layers scale attention logits by the same factor here"),
    Fixed("add_cross_attention", False, "there is no cross attention here"),
    Always({"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"}),
)
HEAD_DIM = Key(
    "head_dim",
    "kv_channels",
    lambda theirs: int(theirs["hidden_size"]) // int(theirs["num_attention_heads"]),
    derived=ModelConfig.head_size,
)
LLAMA_BIASES = Shared(
    ("attention_bias", "mlp_bias"), "add_bias_linear", False, "here all linear layers have biases or none has"
)
NO_BIAS = Always({"add_bias_linear": False})

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family("GPT2LMHeadModel", "gpt2", GPT2_ROWS, GPT2_RULES, "transformer.", (".attn.bias", ".attn.masked_bias")),
        _llama_family("LlamaForCausalLM", "llama", 2048, HEAD_DIM, LLAMA_BIASES),
        _llama_family("MistralForCausalLM", "mistral", 131072, HEAD_DIM, NO_BIAS, Window(4096)),
        _llama_family("Qwen2ForCausalLM", "qwen2", 32768, NO_BIAS, Always({"add_qkv_bias": True}), WindowByLayer()),
        _llama_family(
            "Qwen3ForCausalLM",
            "qwen3",
            32768,
            Key("head_dim", "kv_channels", 128, derived=ModelConfig.head_size),
            WindowByLayer(),
            Fixed("attention_bias", False, "Qwen's output projection has no bias here"),
            NO_BIAS,
            Always({"qk_layernorm": True}),
        ),
    )
}
BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES.values()}

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
    if len(named) == 1 and named[0] in FAMILIES:
        return FAMILIES[named[0]]
    if not named and config.get("model_type") in BY_MODEL_TYPE:
        return BY_MODEL_TYPE[config["model_type"]]
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
