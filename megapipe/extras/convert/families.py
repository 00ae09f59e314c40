"""The architectures of Hugging Face that have a table here, each read in both directions, and those that have none for a reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.config.rules.check import check
from megapipe.errors import ConfigError
from megapipe.extras.convert.inert_settings import INERT
from megapipe.extras.convert.names import GPT2_ROWS, LLAMA_ROWS, Row
from megapipe.extras.convert.rope import Rope
from megapipe.extras.convert.settings import Alike, Always, Fixed, Key, Part, Settings, Together
from megapipe.extras.convert.snapshot import unpadded
from megapipe.extras.convert.window import Window, WindowByLayer

# Fields that change how a model is trained or stored, not what it computes: config.json need not carry them.
NOT_THE_MODEL = (
    "seq_length",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
    "hidden_dropout",
    "attention_dropout",
    "attention_softmax_in_fp32",
    "init_method_std",
)
LONGEST_SEQUENCE = (
    4096  # training length of a converted model whose positions reach further, until --seq-length says otherwise
)
ROPE_ONLY = ("rotary_base", "rotary_percent", "rope_scaling_type")
OF_SCALING = {
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
    """One architecture. prefix: what the base model alone, saved without its head, leaves out of all names.

    buffers: ends of names of tensors that hold nothing learned (masks, frequencies), passed over.
    """

    architecture: str
    model_type: str
    rows: tuple[Row, ...]
    parts: tuple[Part, ...]
    prefix: str
    buffers: tuple[str, ...] = ()

    def read(self, theirs: Settings, ignored: frozenset[str] = frozenset()) -> ModelConfig:
        """Raises ConfigError naming the key that cannot be expressed, or that no part knows and is not among `ignored`."""
        known = {key for part in self.parts for key in part.keys} | INERT | ignored
        unknown = [key for key in theirs if key not in known]
        if unknown:
            raise ConfigError(
                f"{self.architecture} has no key {', '.join(unknown)} that megapipe knows, so it might change what the model computes; "
                f"give --ignore-key {unknown[0]} if it does not"
            )
        fields: dict[str, Any] = {}
        for part in self.parts:
            fields |= part.read(theirs)
        model = ModelConfig(**fields, seq_length=min(fields["max_position_embeddings"], LONGEST_SEQUENCE))
        check(Config(model=model))
        return model

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """config.json's keys. Raises ConfigError naming the first field that this architecture cannot express."""
        model = meaning(model)
        theirs: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        for part in self.parts:
            theirs |= part.write(model)
        read = meaning(self.read(theirs))
        for name, value in vars(model).items():
            if name not in NOT_THE_MODEL and getattr(read, name) != value:
                raise ConfigError(
                    f"{self.architecture} cannot express model.{name} {value} (it would be {getattr(read, name)})"
                )
        return theirs


def meaning(model: ModelConfig) -> ModelConfig:
    """The model with derived sizes filled in and fields that have no effect beside the others at their defaults, so that equal is alike."""
    defaults = ModelConfig()
    changed: dict[str, Any] = {}
    if model.position_embedding_type != "rope":
        changed |= {name: getattr(defaults, name) for name in ROPE_ONLY}
    scaling = changed.get("rope_scaling_type", model.rope_scaling_type)
    changed |= {name: getattr(defaults, name) for name, kinds in OF_SCALING.items() if scaling not in kinds}
    if model.add_bias_linear:
        changed["add_qkv_bias"] = False
    return unpadded(dataclasses.replace(model, **changed))


def _half_up(theirs: Settings) -> int:
    return int(theirs["hidden_size"]) // int(theirs["num_attention_heads"])


LLAMA_LIKE = {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False, "hidden_dropout": 0.0}
ACTIVATION = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh"}
WIDTH_OF_HEAD = Key("head_dim", "kv_channels", _half_up, derived=ModelConfig.head_size)


def _llama_parts(max_positions: int, *more: Part) -> tuple[Part, ...]:
    """What Llama and its relatives have in common."""
    return (
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
        Key("hidden_act", "activation", "silu", ACTIVATION),
        Key("tie_word_embeddings", "untie_embeddings_and_output_weights", False, {False: True, True: False}),
        Key("attention_dropout", "attention_dropout", 0.0),
        Key("initializer_range", "init_method_std", 0.02),
        Always(LLAMA_LIKE),
        *more,
    )


LLAMA_BIASES = Together(
    ("attention_bias", "mlp_bias"), "add_bias_linear", "here all linear layers have biases, or none"
)
NO_BIAS = Fixed("attention_bias", False, "Qwen's output projection has no bias here")

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family(
            "GPT2LMHeadModel",
            "gpt2",
            GPT2_ROWS,
            (
                Key("vocab_size", "vocab_size"),
                Key("n_embd", "hidden_size"),
                Key("n_inner", "ffn_hidden_size", lambda theirs: 4 * theirs["n_embd"], null_for=lambda model: 4 * model.hidden_size),
                Key("n_layer", "num_layers"),
                Key("n_head", "num_attention_heads"),
                Key("n_positions", "max_position_embeddings", 1024),
                Key("layer_norm_epsilon", "norm_epsilon", 1e-5),
                Key(
                    "activation_function",
                    "activation",
                    "gelu_new",
                    {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu", "relu2": "squared_relu"},
                ),
                Key("tie_word_embeddings", "untie_embeddings_and_output_weights", True, {True: False, False: True}),
                Alike(("resid_pdrop", "embd_pdrop"), "hidden_dropout", 0.1),
                Key("attn_pdrop", "attention_dropout", 0.1),
                Key("initializer_range", "init_method_std", 0.02),
                Fixed("scale_attn_weights", True, "attention logits are scaled by 1 / sqrt(head size) here"),
                Fixed("scale_attn_by_inverse_layer_idx", False, "attention logits are scaled alike in all layers here"),
                Fixed("add_cross_attention", False, "there is no cross attention here"),
                Always({"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"}),
            ),
            "transformer.",
            (".attn.bias", ".attn.masked_bias"),
        ),
        Family(
            "LlamaForCausalLM",
            "llama",
            LLAMA_ROWS,
            _llama_parts(2048, Rope(), WIDTH_OF_HEAD, LLAMA_BIASES),
            "model.",
            ("rotary_emb.inv_freq",),
        ),
        Family(
            "MistralForCausalLM",
            "mistral",
            LLAMA_ROWS,
            _llama_parts(131072, Rope(), WIDTH_OF_HEAD, Window(4096), Always({"add_bias_linear": False})),
            "model.",
            ("rotary_emb.inv_freq",),
        ),
        Family(
            "Qwen2ForCausalLM",
            "qwen2",
            LLAMA_ROWS,
            _llama_parts(32768, Rope(), WindowByLayer(), Always({"add_bias_linear": False, "add_qkv_bias": True})),
            "model.",
            ("rotary_emb.inv_freq",),
        ),
        Family(
            "Qwen3ForCausalLM",
            "qwen3",
            LLAMA_ROWS,
            _llama_parts(
                32768, Rope(), Key("head_dim", "kv_channels", 128, derived=ModelConfig.head_size), WindowByLayer(), NO_BIAS,
                Always({"add_bias_linear": False, "qk_layernorm": True}),
            ),
            "model.",
            ("rotary_emb.inv_freq",),
        ),
    )
}  # fmt: skip
BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES.values()}

_SCALED = "it multiplies embeddings by sqrt(hidden_size) and uses them unscaled in its tied output layer"
_SANDWICH = "it also normalizes what attention and MLP give back (post_attention_layernorm, post_feedforward_layernorm)"
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
    "Olmo2ForCausalLM": "it normalizes what attention and MLP give back, and queries and keys over all heads",
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises ConfigError for an architecture without a table."""
    named = config.get("architectures") or []
    if len(named) == 1 and named[0] in FAMILIES:
        return FAMILIES[named[0]]
    if not named and config.get("model_type") in BY_MODEL_TYPE:
        return BY_MODEL_TYPE[config["model_type"]]
    name = ", ".join(named) or str(config.get("model_type"))
    if name in REFUSED:
        raise ConfigError(f"{name} cannot be expressed: {REFUSED[name]}")
    raise ConfigError(f"the architecture {name} is not known; known are {', '.join(FAMILIES)}")


def choose_family(model: ModelConfig, asked: str | None, before: str | None = None) -> tuple[Family, dict[str, Any]]:
    """An architecture that expresses the model, and its config.json: the one asked for, else the one it came from, else the first.

    Raises ConfigError with what each lacks.
    """
    if asked is not None and asked not in FAMILIES:
        raise ConfigError(f"--architecture {asked} is not known; known are {', '.join(FAMILIES)}")
    names = [asked] if asked is not None else sorted(FAMILIES, key=lambda name: name != before)
    reasons = []
    for name in names:
        try:
            return FAMILIES[name], FAMILIES[name].write(model)
        except ConfigError as error:
            reasons.append(str(error))
    raise ConfigError("no architecture of Hugging Face with a table here is this model:\n  " + "\n  ".join(reasons))
