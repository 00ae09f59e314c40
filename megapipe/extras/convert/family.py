"""`Family`: one architecture of Hugging Face, with its tables of tensors and settings, and what relatives of Llama and
DeepSeek have in common. `families` lists all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.config.rules.check import check
from megapipe.errors import ConfigError
from megapipe.extras.convert import experts, layer_types
from megapipe.extras.convert.snapshot import INERT, INTERLEAVE
from megapipe.extras.convert.tables import (
    LLAMA,
    OURS,
    Layout,
    Row,
    Rule,
    Settings,
    always,
    check_expressed,
    fixed,
    key,
    latent_keys,
    latent_queries,
    read_fields,
    read_table,
    rows_of,
    same,
    separate_qkv,
    shared,
    write_keys,
)

LONGEST_SEQUENCE = 4096  # default training length of converted models with more positions (--seq-length overrides)


def llama_rows(
    norms: Mapping[str, str],
    of_heads: tuple[str, str] = ("q_norm", "k_norm"),
    qkv: Callable[[ModelConfig], Layout] = separate_qkv,
) -> tuple[Row, ...]:
    """Return the rows of Llama and its relatives. norms: our norms of the hidden states -> theirs. of_heads: theirs of
    queries and of keys. qkv: the layout of their projections.
    """
    attention = f"{OURS}.self_attention"
    return (
        *rows_of("llama"),
        *(Row(f"{OURS}.{ours}", (f"{LLAMA}.{theirs}",)) for ours, theirs in norms.items()),
        Row(f"{attention}.linear_qkv", tuple(f"{LLAMA}.self_attn.{x}_proj" for x in "qkv"), qkv),
        Row(f"{attention}.q_layernorm", (f"{LLAMA}.self_attn.{of_heads[0]}",)),
        Row(f"{attention}.k_layernorm", (f"{LLAMA}.self_attn.{of_heads[1]}",)),
    )


NORMS_BEFORE = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
NORMS_AFTER = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
NORMS_AROUND = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "pre_feedforward_layernorm", **NORMS_AFTER}
UNTIED, TIED_WORDS = "untie_embeddings_and_output_weights", {False: True, True: False}
INIT_STD = key("initializer_range", "init_method_std", 0.02)
VOCABULARY = key("vocab_size", "vocab_size"), key("hidden_size", "hidden_size")
LAYERS = key("num_hidden_layers", "num_layers"), key("num_attention_heads", "num_attention_heads")
ATTENTION_DROPOUT = key("attention_dropout", "attention_dropout", 0.0)
TRAINED = (INIT_STD, always(normalization="RMSNorm", hidden_dropout=0.0))


@dataclass(frozen=True)
class Family:
    """One architecture, with its tables of tensors (rows) and settings (rules)."""

    architecture: str
    model_type: str
    rows: tuple[Row, ...]
    rules: tuple[Rule, ...]
    prefix: str = "model."  # missing from all names if the base model was saved without its head
    # suffixes of tensors that are not learned (masks, frequencies), which are skipped
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)
    # ends of names of tensors [experts, out, in], which files may have as [experts, in, out]
    either_way: tuple[str, ...] = ()
    # the same with rope_interleave false: a rotary pair is not two neighbouring channels, but two half the width apart
    halves: Family | None = None
    # of the text model of a model with images: read with --text-only, never written
    is_tower: bool = False

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
        try:
            theirs |= write_keys(self.rules, model)
        except ConfigError as error:
            raise ConfigError(f"{self.architecture} cannot express it: {error}") from None
        check_expressed(model, self.read(theirs), self.architecture)
        return theirs


HIDDEN_ACT = key("hidden_act", "activation", "silu", {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh"})


def last_of_each(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the last row of each module of ours."""
    return tuple({row.ours: row for row in rows}.values())


def llama_family(
    architecture: str,
    model_type: str,
    max_positions: int,
    *more: Rule,
    norms: Mapping[str, str] = NORMS_BEFORE,
    epsilon: float = 1e-6,
    groups: int | None = None,
    tied: bool = False,
    rope: Rule = layer_types.ROPE,
    activation: Rule = HIDDEN_ACT,
    attention_dropout: Rule = ATTENTION_DROPOUT,
    mlp: tuple[Rule, ...] = (key("intermediate_size", "ffn_hidden_size"),),
    more_rows: tuple[Row, ...] = (),
    of_heads: tuple[str, str] = ("q_norm", "k_norm"),
    qkv: Callable[[ModelConfig], Layout] = separate_qkv,
) -> Family:
    """Return Llama or a relative of it. more: rules besides the common ones. The others are defaults and variants."""

    def query_groups(settings: Settings) -> int:
        if groups is not None and "num_key_value_heads" not in settings:  # null: as many as heads
            return groups
        return int(settings["num_attention_heads"])

    rules = (
        *VOCABULARY,
        *LAYERS,
        key("num_key_value_heads", "num_query_groups", query_groups),
        key("max_position_embeddings", "max_position_embeddings", max_positions),
        key("rms_norm_eps", "norm_epsilon", epsilon),
        key("tie_word_embeddings", UNTIED, tied, TIED_WORDS),
        attention_dropout,
        *TRAINED,
    )
    all_rules = (*rules, activation, rope, *mlp, *more)
    return Family(architecture, model_type, last_of_each((*llama_rows(norms, of_heads, qkv), *more_rows)), all_rules)


HEAD_DIM = key("head_dim", "kv_channels", lambda own: int(own["hidden_size"]) // int(own["num_attention_heads"]))
LLAMA_BIASES = shared(
    ("attention_bias", "mlp_bias"), "add_bias_linear", False, "here all linear layers have biases or none has"
)
NO_BIAS = always(add_bias_linear=False)
NO_ATTENTION_BIAS = (
    fixed("attention_bias", False, "its MLP has no biases, and here all linears have or none has"),
    NO_BIAS,
)

UNUSUAL_HEAD_DIM = replace(  # a key that a configuration does not name, but its attention reads
    HEAD_DIM,
    write=lambda layers: (
        {}
        if layers[0].kv_channels * layers[0].num_attention_heads == layers[0].hidden_size
        else {"head_dim": layers[0].kv_channels}
    ),
)
# the model type of each architecture, and what holds where its config.json lacks a key: positions, rope_theta, the
# epsilon of norms, key/value heads (as many as heads if empty), tied embeddings, head_dim; attention_bias: a key that
# must be false; qk_layernorm: the scope of norms of queries and keys, which no key states
DEFAULTS = {row["architecture"]: row for row in read_table("defaults.csv")}
HEAD_DIMS = {"": (), "derived": (HEAD_DIM,), "unusual": (UNUSUAL_HEAD_DIM,)}


def llama_relative(architecture: str, *more: Rule, **variants: Any) -> Family:
    """Return the `llama_family` of an architecture of DEFAULTS. more, variants: its further arguments."""
    row = DEFAULTS[architecture]
    size, scope = row["head_dim"], row["qk_layernorm"]
    heads = (key("head_dim", "kv_channels", int(size)),) if size.isdecimal() else HEAD_DIMS[size]
    biases = NO_ATTENTION_BIAS if row["attention_bias"] else (NO_BIAS,)
    norms = (always(qk_layernorm=True, qk_layernorm_scope=scope),) if scope else ()
    defaults = {
        "epsilon": float(row["epsilon"] or 1e-6),
        "groups": int(row["groups"]) if row["groups"] else None,
        "tied": row["tied"] == "yes",
        "rope": layer_types.rope(float(row["base"] or 1e4)),
    }
    rules = (*heads, *biases, *norms, *more)
    return llama_family(architecture, row["model_type"], int(row["positions"]), *rules, **defaults | variants)


_WITHOUT_LATENTS = {f"{OURS}.self_attention.{name}" for name in ("linear_qkv", "q_layernorm", "k_layernorm")}


def deepseek_family(
    architecture: str,
    rules: tuple[Rule, ...],
    interleave: str | None = INTERLEAVE,
    rope: Rule = layer_types.ROPE,
    expert_rows: tuple[Row, ...] = experts.GLM_ROWS,
) -> Family:
    """Return DeepSeek or a relative of it, an architecture of DEFAULTS. rules: of latent attention and experts.
    interleave: the key that says how rotary pairs are stored; None: they are neighbouring channels.
    """
    model_type, positions = DEFAULTS[architecture]["model_type"], int(DEFAULTS[architecture]["positions"])
    of_llama = (row for row in llama_rows(NORMS_BEFORE) if row.ours not in _WITHOUT_LATENTS)
    rows = last_of_each((*of_llama, *rows_of("latent"), *experts.PREDICTION_ROWS, *expert_rows))
    common = (
        *VOCABULARY,
        key("intermediate_size", "ffn_hidden_size"),
        *LAYERS,
        key("max_position_embeddings", "max_position_embeddings", positions),
        key("tie_word_embeddings", UNTIED, False, TIED_WORDS),
        ATTENTION_DROPOUT,
        *TRAINED,
        HIDDEN_ACT,
        rope,
        *rules,
    )
    if interleave is None:
        return Family(architecture, model_type, rows, common)
    in_halves = tuple(replace(row, layout=same) if row.layout in PAIRS else row for row in rows)
    why = "it says how the rotary channels of weights are stored"
    halves = Family(architecture, model_type, in_halves, (*common, fixed(interleave, False, why)))
    return Family(architecture, model_type, rows, (*common, fixed(interleave, True, why)), halves=halves)


PAIRS = (latent_queries, latent_keys)
