"""Architectures of Hugging Face that megapipe can express: tables of tensors and settings, read in both directions.

`extend.register_family` adds one from outside.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError
from megapipe.extras.convert import experts, layer_types, mixtures
from megapipe.extras.convert.family import (
    INIT_STD,
    LLAMA_BIASES,
    NO_ATTENTION_BIAS,
    NORMS_AFTER,
    NORMS_AROUND,
    UNTIED,
    UNUSUAL_HEAD_DIM,
    Family,
    deepseek_family,
    llama_relative,
)
from megapipe.extras.convert.snapshot import INTERLEAVE
from megapipe.extras.convert.tables import (
    Rule,
    Settings,
    again,
    always,
    fixed,
    key,
    nullable,
    read_table,
    rows_of,
    shared,
    unwritten,
)
from megapipe.registry import EXTENSIONS, Registry

GPT2_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "squared_relu",
}
ONE_DROPOUT = "here they are one setting, hidden_dropout"
GPT2_RULES = (
    key("vocab_size", "vocab_size"),
    key("n_embd", "hidden_size"),
    key(
        "n_inner",
        "ffn_hidden_size",
        lambda settings: 4 * settings["n_embd"],
        value_of=lambda own: None if own[0].ffn_hidden_size == 4 * own[0].hidden_size else own[0].ffn_hidden_size,
    ),
    key("n_layer", "num_layers"),
    key("n_head", "num_attention_heads"),
    key("n_positions", "max_position_embeddings", 1024),
    key("layer_norm_epsilon", "norm_epsilon", 1e-5),
    key("activation_function", "activation", "gelu_new", GPT2_ACTIVATIONS),
    key("tie_word_embeddings", UNTIED, True, {True: False, False: True}),
    shared(("resid_pdrop", "embd_pdrop"), "hidden_dropout", 0.1, ONE_DROPOUT),
    key("attn_pdrop", "attention_dropout", 0.1),
    INIT_STD,
    fixed("scale_attn_weights", True, "attention logits are scaled by 1 / sqrt(head size) here"),
    fixed("scale_attn_by_inverse_layer_idx", False, "all layers scale attention logits by the same factor here"),
    fixed("add_cross_attention", False, "there is no cross attention here"),
    again("n_ctx", "n_positions"),
    always(position_embedding_type="learned_absolute", normalization="LayerNorm"),
)


# Gemma names one of two keys of the activation; the other one may stand beside it, without effect. gelu: in old files
TANH, TANH_GELU = "gelu_pytorch_tanh", "here the activation of a Gemma is tanh GELU"
GEMMA_1_ACTIVATION = key("hidden_act", "activation", TANH, {TANH: "geglu_tanh", "gelu": "geglu_tanh"})
GEMMA_ACTIVATION = key("hidden_activation", "activation", TANH, {TANH: "geglu_tanh"})
GEMMA = (
    *NO_ATTENTION_BIAS,
    key("head_dim", "kv_channels", 256),
    always(layernorm_zero_centered_gamma=True),
    Rule((), lambda settings: {"embedding_scale": settings["hidden_size"] ** 0.5}, lambda layers: {}),
    unwritten(fixed("use_bidirectional_attention", False, "attention is causal here")),
)

QUERY_SCALAR = "query_pre_attn_scalar"  # attention logits are divided by its root


def read_query_scalar(settings: Settings) -> dict[str, Any]:
    scalar = settings.get(QUERY_SCALAR, 256)
    if not scalar > 0:
        raise ConfigError(f"{QUERY_SCALAR} {scalar} cannot be expressed: attention logits are divided by its root")
    return {"softmax_scale": None if scalar == settings.get("head_dim", 256) else scalar**-0.5}


GEMMA_2_AND_3 = (
    *GEMMA,
    always(norm_position="around"),
    Rule(
        (QUERY_SCALAR,), read_query_scalar, lambda layers: {QUERY_SCALAR: max(1, round(layers[0].softmax_scale ** -2))}
    ),
    unwritten(fixed("hidden_act", TANH, TANH_GELU)),
)
GEMMA_2 = (
    *GEMMA_2_AND_3,
    nullable("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
    nullable("final_logit_softcapping", "final_logit_softcapping", 30.0),
    layer_types.windows(layer_types.every(2)),
    layer_types.WINDOW_AGAIN,
)
GEMMA_3 = (
    *GEMMA_2_AND_3,
    fixed("attn_logit_softcapping", None, "the attention of this architecture has no soft-cap in transformers"),
    nullable("final_logit_softcapping", "final_logit_softcapping", None),
)
PHI_3 = (
    shared(("resid_pdrop", "embd_pdrop"), "hidden_dropout", 0.0, ONE_DROPOUT),
    nullable("sliding_window", "window_size", None),
    unwritten(fixed("attention_bias", False, "linears of this architecture have no biases")),
    Rule((layer_types.LENGTH,), lambda settings: {}, lambda layers: {}),  # of longrope alone
)
SEED_OSS = (
    key("attention_bias", "add_qkv_bias", True),
    *(fixed(name, False, "only q, k and v have biases here") for name in ("attention_out_bias", "mlp_bias")),
    key("residual_dropout", "hidden_dropout", 0.1),
)
OLMO = (*NO_ATTENTION_BIAS, always(norm_position="after"), UNUSUAL_HEAD_DIM)

_BUILT_IN = (
    Family("GPT2LMHeadModel", "gpt2", rows_of("gpt2"), GPT2_RULES, "transformer.", (".attn.bias", ".attn.masked_bias")),
    llama_relative("LlamaForCausalLM", LLAMA_BIASES),
    llama_relative("MistralForCausalLM", layer_types.MISTRAL_WINDOWS),
    llama_relative("MinistralForCausalLM", layer_types.MINISTRAL_WINDOWS),
    llama_relative("Qwen2ForCausalLM", always(add_qkv_bias=True), layer_types.QWEN_WINDOWS),
    llama_relative("Qwen3ForCausalLM", layer_types.QWEN_WINDOWS, *NO_ATTENTION_BIAS),
    llama_relative(
        "GemmaForCausalLM",
        *GEMMA,
        unwritten(fixed("hidden_activation", TANH, TANH_GELU)),
        activation=GEMMA_1_ACTIVATION,
    ),
    llama_relative("Gemma2ForCausalLM", *GEMMA_2, norms=NORMS_AROUND, activation=GEMMA_ACTIVATION),
    llama_relative(
        "Gemma3ForCausalLM",
        *GEMMA_3,
        norms=NORMS_AROUND,
        activation=GEMMA_ACTIVATION,
        rope=layer_types.windows_and_rope(6, 1e6, "rope_local_base_freq", 1e4),
    ),
    llama_relative("Olmo2ForCausalLM", *OLMO, norms=NORMS_AFTER),
    llama_relative("Olmo3ForCausalLM", *OLMO, norms=NORMS_AFTER, rope=layer_types.windows_and_rope(4, 5e5)),
    llama_relative(
        "Phi3ForCausalLM", *PHI_3, rope=layer_types.rope(part=1.0, kinds=("default",)), more_rows=rows_of("phi3")
    ),
    llama_relative("SmolLM3ForCausalLM", LLAMA_BIASES, rope=layer_types.rope_in_some_layers(2e6)),
    llama_relative(
        "SeedOssForCausalLM", *SEED_OSS, attention_dropout=key("attention_dropout", "attention_dropout", 0.1)
    ),
    llama_relative(
        "MixtralForCausalLM",
        nullable("sliding_window", "window_size", None),
        fixed("router_jitter_noise", 0.0, "the router sees its input without noise here"),
        mlp=experts.all_layers(("num_local_experts",), 2),
        more_rows=experts.expert_rows("block_sparse_moe", experts.MIXTRAL_MLP),
    ),
    llama_relative(
        "Qwen2MoeForCausalLM",
        experts.MAYBE_NORMALIZED,
        experts.SPARSE_STEP,
        *experts.SHARED_GATED,
        key("qkv_bias", "add_qkv_bias", True),
        layer_types.QWEN_2_MOE_WINDOWS,
        mlp=experts.some_layers(("num_experts",), 4),
        more_rows=experts.QWEN_2_ROWS,
    ),
    llama_relative(
        "Qwen3MoeForCausalLM",
        experts.MAYBE_NORMALIZED,
        experts.SPARSE_STEP,
        *NO_ATTENTION_BIAS,
        layer_types.QWEN_3_MOE_WINDOWS,
        mlp=experts.some_layers(("num_experts", "num_local_experts"), 8),
        more_rows=experts.ROWS,
    ),
    llama_relative(
        "OlmoeForCausalLM",
        experts.MAYBE_NORMALIZED,
        *NO_ATTENTION_BIAS,
        fixed("clip_qkv", None, "queries, keys and values are not clipped here"),
        mlp=experts.all_layers(("num_experts",), 8),
        more_rows=experts.ROWS,
    ),
    llama_relative(
        "Glm4MoeForCausalLM",
        *experts.SIGMOID_ROUTER,
        experts.dense_layers(1),
        experts.PREDICTION,
        key("attention_bias", "add_qkv_bias", False),
        key("use_qk_norm", "qk_layernorm", False),
        rope=layer_types.rope(1e4, 0.5),
        mlp=experts.some_layers(("n_routed_experts", "num_local_experts"), 8),
        more_rows=(*experts.GLM_ROWS, *experts.PREDICTION_ROWS),
    ),
    llama_relative(
        "SolarOpenForCausalLM",
        *experts.SIGMOID_ROUTER,
        key("attention_bias", "add_qkv_bias", False),
        mlp=(
            *experts.count_and_choice(("n_routed_experts", "num_local_experts"), 8),
            experts.EXPERT_WIDTH,
            key("intermediate_size", "ffn_hidden_size", None),  # of no layer
            unwritten(fixed(experts.FIRST, 0, "all layers of this architecture have experts")),
            unwritten(fixed("use_qk_norm", False, "this architecture has no norms of queries and keys")),
        ),
        more_rows=experts.GLM_ROWS,
    ),
    llama_relative(
        "FlexOlmoForCausalLM",
        *OLMO,
        experts.MAYBE_NORMALIZED,
        norms=NORMS_AFTER,
        mlp=experts.all_layers(("num_experts",), 5),
        more_rows=experts.ROWS,
    ),
    llama_relative(
        "GptOssForCausalLM",
        *experts.GPT_OSS,
        layer_types.windows(layer_types.every(2), default_window=128),
        rope=layer_types.rope(15e4, scaling=experts.GPT_OSS_ROPE),
        activation=fixed("hidden_act", "silu", "experts have a clamped SwiGLU, whatever it says"),
        mlp=experts.all_layers(("num_local_experts", "num_experts"), 4),
        more_rows=rows_of("gpt_oss"),
    ),
    deepseek_family("DeepseekV3ForCausalLM", experts.DEEPSEEK_V3),
    deepseek_family("DeepseekV2ForCausalLM", experts.DEEPSEEK_V2, interleave=None),
)
# model types whose own code equals that of a known architecture
SAME_MODEL_TYPES = {"DeepseekV3ForCausalLM": ("kimi_k2",)}


def of_files() -> tuple[Family, ...]:
    """Return the public families of the files of mixtures/, in the order of their names."""
    names = sorted(module.name for module in iter_modules(mixtures.__path__))
    public = (vars(import_module(f"{mixtures.__name__}.{name}")).items() for name in names)
    return tuple(found for each in public for name, found in each if isinstance(found, Family) and name[0] != "_")


FAMILIES: Registry[Family] = Registry(
    "conversion family",
    "--architecture",
    {family.architecture: family for family in (*_BUILT_IN, *of_files()) if not family.is_tower},
)

# of models with images that are read with --text-only; an export writes a family that computes the same
TEXT_TOWERS = {family.model_type: family for family in of_files() if family.is_tower}


# A row of missing.csv: a key of config.json, or a beginning of keys that ends in *, that states a feature where it has
# a value; a model type with a feature that no key states; or an architecture, with the reason why it is refused.
@cache
def missing_table(stated_by: str) -> dict[str, str]:
    """Return the features that megapipe lacks by what states them: 'key', 'model_type' or 'architecture'."""
    return {row["name"]: row["feature"] for row in read_table("missing.csv") if row["stated_by"] == stated_by}


REFUSED = missing_table("architecture")


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json. Raises ConfigError for an architecture without a table."""
    named = config.get("architectures") or []
    if not named:
        named = [name for name, family in FAMILIES.items() if family.model_type == config.get("model_type")]
    if len(named) == 1 and named[0] in FAMILIES:
        family, kind = FAMILIES[named[0]], config.get("model_type")
        if kind not in (None, family.model_type, *SAME_MODEL_TYPES.get(family.architecture, ())):
            rule = f"transformers goes by the second, and the first has {family.model_type!r}"
            raise ConfigError(f"architectures {named[0]} and model_type {kind!r} contradict each other: {rule}")
        return family.halves if family.halves is not None and config.get(INTERLEAVE) is False else family
    name = ", ".join(named) or str(config.get("model_type"))
    if name in REFUSED:
        raise ConfigError(f"{name} cannot be expressed: {REFUSED[name]}")
    if missing := missing_features(config):
        raise ConfigError(f"{name} cannot be expressed: megapipe lacks {'; '.join(missing)}")
    raise ConfigError(f"unknown architecture {name}; known are {', '.join(FAMILIES)}{EXTENSIONS.hint}")


def text_family_of(text: Mapping[str, Any]) -> Family:
    """Return the family of a text_config. Raises ConfigError for a model type without a table."""
    return TEXT_TOWERS.get(str(text.get("model_type"))) or family_of(text)


def choose_family(
    model: ModelConfig, requested: str | None, original: str | None = None
) -> tuple[Family, dict[str, Any]]:
    """Return an architecture that expresses the model, and its config.json.

    It is the requested one; without request the original one if it fits, else the first that does. Raises ConfigError
    with what each cannot express.
    """
    if requested is not None and requested not in FAMILIES:
        raise ConfigError(f"unknown --architecture {requested}; known are {', '.join(FAMILIES)}{EXTENSIONS.hint}")
    names = [requested] if requested is not None else sorted(FAMILIES, key=lambda name: name != original)
    reasons = []
    for name in names:
        try:
            return FAMILIES[name], FAMILIES[name].write(model)
        except ConfigError as error:
            reasons.append(str(error))
    raise ConfigError("no known Hugging Face architecture can express this model:\n  " + "\n  ".join(reasons))


# ----------------------------------------------------------------------- what is missing, for the message of a refusal

LAYER_TYPES = ("full_attention", "sliding_attention", "moe", "mlp")  # the known ones


def missing_features(config: Settings) -> tuple[str, ...]:
    """Return what an architecture without a table has that megapipe lacks; nothing if that is unknown."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    found: list[str] = []
    for part in parts:
        stated = {name for name, value in part.items() if value not in (None, False, 0, [], {})}
        rope = part.get("rope_parameters") or part.get("rope_scaling")
        stated |= rope.keys() if isinstance(rope, Mapping) else set()
        found += [feature for name, feature in missing_table("key").items() if fnmatch.filter(stated, name)]
        for name in ("layer_types", "layers_block_type"):
            kinds = part.get(name)
            unknown = sorted(set(map(str, kinds)) - set(LAYER_TYPES)) if isinstance(kinds, list) else []
            found += [f"layers of the type {', '.join(unknown)}"] if unknown else []
    by_type = missing_table("model_type")
    named = (by_type.get(str(part.get("model_type"))) for part in parts)
    return tuple(dict.fromkeys((*found, *(feature for feature in named if feature is not None))))
