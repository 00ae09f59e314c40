"""Tables of configuration keys: rules that map keys of another format's configuration to fields of our model section.

A rule reads its keys into our fields and writes our fields as its keys. Writing may lose what the other side has no key
for: the writer reads the result again and compares (`families.check_expressed`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError

Settings = Mapping[str, Any]  # config.json, or Megatron's args

# keys of config.json without effect on the model: copied, not read
INERT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures attn_implementation auto_map
    bad_words_ids bos_token_id chunk_size_feed_forward cls_token_id decoder_start_token_id do_sample dtype
    early_stopping eos_token_id finetuning_task gradient_checkpointing id2label is_decoder is_encoder_decoder
    label2id length_penalty max_length min_length model_type n_ctx num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type
    reorder_and_upcast_attn repetition_penalty return_dict return_dict_in_generate sep_token_id
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params temperature tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    unk_token_id unsloth_fixed unsloth_version use_cache
    """.split()
)


class Rule(Protocol):
    """One row of a table. keys: those of the other format that the rule handles."""

    @property
    def keys(self) -> tuple[str, ...]: ...

    def read(self, theirs: Settings) -> dict[str, Any]:
        """Return our fields. Raises ConfigError naming the key that cannot be expressed."""
        ...

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return their keys."""
        ...


REQUIRED = object()  # in place of a default


@dataclass(frozen=True)
class Key:
    """One key that corresponds to one field.

    default: their value if the key is missing or null, or a function of the whole configuration.
    words: maps their values to ours if the two differ; no other values can be expressed.
    derived: our value for a field that is not set. null_for: the value that they write as null.
    """

    theirs: str
    ours: str
    default: Any = REQUIRED
    words: Mapping[Any, Any] = field(default_factory=dict)
    derived: Callable[[ModelConfig], Any] | None = None
    null_for: Callable[[ModelConfig], Any] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, theirs: Settings) -> dict[str, Any]:
        value = theirs.get(self.theirs)
        if value is None:
            if self.default is REQUIRED:
                raise ConfigError(f"the key {self.theirs} is missing")
            value = self.default(theirs) if callable(self.default) else self.default
        if self.words:
            if value not in self.words:
                known = ", ".join(str(word) for word in self.words)
                raise ConfigError(f"{self.theirs} {value!r} cannot be expressed; it can be {known}")
            value = self.words[value]
        return {self.ours: value}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        value = getattr(model, self.ours)
        if value is None and self.derived is not None:
            value = self.derived(model)
        if self.null_for is not None and value == self.null_for(model):
            return {self.theirs: None}
        if self.words:  # if they have no word for the value, the comparison after writing finds it
            value = next((theirs for theirs, ours in self.words.items() if ours == value), next(iter(self.words)))
        return {self.theirs: value}


@dataclass(frozen=True)
class Fixed:
    """A key that must have one value, which is also its default. why: the reason that others cannot be expressed."""

    theirs: str
    value: Any
    why: str

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, theirs: Settings) -> dict[str, Any]:
        value = theirs.get(self.theirs, self.value)
        if value != self.value and value is not None:
            raise ConfigError(f"{self.theirs} {value!r} cannot be expressed: {self.why}")
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.theirs: self.value}


@dataclass(frozen=True)
class Shared:
    """Several keys that must have the same value, which is one field of ours."""

    keys: tuple[str, ...]
    ours: str
    default: Any
    why: str

    def read(self, theirs: Settings) -> dict[str, Any]:
        values = {key: self.default if theirs.get(key) is None else theirs[key] for key in self.keys}
        if len(set(values.values())) > 1:
            text = ", ".join(f"{key} {value}" for key, value in values.items())
            raise ConfigError(f"{text} cannot be expressed: {self.why}")
        return {self.ours: values[self.keys[0]]}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {key: getattr(model, self.ours) for key in self.keys}


@dataclass(frozen=True)
class Always:
    """Fields of ours that have one value in every model of the architecture, without a key."""

    fields: Mapping[str, Any]
    keys: tuple[str, ...] = ()

    def read(self, theirs: Settings) -> dict[str, Any]:
        return dict(self.fields)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {}


THETA, SCALING, PARAMETERS, PARTIAL = "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"
LENGTH = "original_max_position_embeddings"
# their key -> (our field, default or None: required)
ScalingKeys = Mapping[str, tuple[str, float | None]]
# their rope_type -> (ours, keys)
ROPE_TYPES: dict[str, tuple[str, ScalingKeys]] = {
    "default": ("none", {}),
    "linear": ("linear", {"factor": ("rope_scaling_factor", None)}),
    "llama3": (
        "llama3",
        {
            "factor": ("rope_scaling_factor", None),
            "low_freq_factor": ("rope_low_freq_factor", None),
            "high_freq_factor": ("rope_high_freq_factor", None),
            LENGTH: ("rope_original_max_position_embeddings", None),
        },
    ),
    "yarn": (
        "yarn",
        {
            "factor": ("rope_scaling_factor", None),
            "beta_fast": ("yarn_beta_fast", 32.0),
            "beta_slow": ("yarn_beta_slow", 1.0),
            "mscale": ("yarn_mscale", 1.0),
            "mscale_all_dim": ("yarn_mscale_all_dim", 0.0),
            LENGTH: ("rope_original_max_position_embeddings", None),
        },
    ),
}


@dataclass(frozen=True)
class Rope:
    """Rotary positions: `rope_theta` and `rope_scaling` (transformers 4), or `rope_parameters` (5).

    theta: the architecture's default base.
    """

    theta: float = 10000.0
    keys: tuple[str, ...] = (THETA, SCALING, PARAMETERS, PARTIAL)

    def read(self, theirs: Settings) -> dict[str, Any]:
        scaling = dict(theirs.get(PARAMETERS) or theirs.get(SCALING) or {})
        base = scaling.pop(THETA, None) or theirs.get(THETA) or self.theta
        partial = scaling.pop(PARTIAL, None) or theirs.get(PARTIAL) or 1.0
        if partial != 1.0:
            raise ConfigError(f"{PARTIAL} {partial} cannot be expressed: this architecture rotates whole heads")
        kind = scaling.pop("rope_type", None) or scaling.get("type") or "default"
        scaling.pop("type", None)
        if kind not in ROPE_TYPES:
            raise ConfigError(f"rope_type {kind!r} cannot be expressed; it can be {', '.join(ROPE_TYPES)}")
        ours, keys = ROPE_TYPES[kind]
        fields: dict[str, Any] = {
            "position_embedding_type": "rope",
            "rotary_base": float(base),
            "rope_scaling_type": ours,
        }
        if kind == "yarn":
            _drop_redundant_yarn_keys(scaling, theirs)
        for key, (name, default) in keys.items():
            value = scaling.pop(key, None)
            value = default if value is None else value
            if value is None:
                raise ConfigError(f"rope_type {kind}: the key {key} is missing")
            fields[name] = int(value) if key == LENGTH else float(value)
        if scaling:
            raise ConfigError(f"rope_type {kind}: the key {next(iter(scaling))} cannot be expressed")
        return fields

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Return keys as in transformers 4, which both versions read."""
        kind = next(theirs for theirs, (ours, _) in ROPE_TYPES.items() if ours == model.rope_scaling_type)
        scaling = {key: getattr(model, name) for key, (name, _) in ROPE_TYPES[kind][1].items()}
        if kind == "yarn" and not model.yarn_mscale_all_dim:  # transformers takes both or neither
            del scaling["mscale"], scaling["mscale_all_dim"]
        return {THETA: model.rotary_base, SCALING: {"rope_type": kind, **scaling} if kind != "default" else None}


def _drop_redundant_yarn_keys(scaling: dict[str, Any], theirs: Settings) -> None:
    """Remove YaRN keys that state what is always so here. Raises ConfigError if they state something else."""
    scaling.setdefault(LENGTH, theirs.get("max_position_embeddings"))
    if scaling.pop("truncate", True) is not True:
        raise ConfigError(
            "rope_type yarn: truncate false cannot be expressed: the ramp starts and ends at whole pairs of channels "
            "here"
        )
    given = scaling.pop("attention_factor", None)
    if given is not None:
        plain = 0.1 * math.log(scaling["factor"]) + 1.0
        if scaling.get("mscale") or scaling.get("mscale_all_dim") or not math.isclose(given, plain, rel_tol=1e-9):
            raise ConfigError(
                f"rope_type yarn: attention_factor {given} cannot be expressed: here it is 0.1 ln(factor) + 1 = {plain}"
            )


WINDOW, USE, FIRST, TYPES = "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class WindowByLayer:
    """Qwen's sliding window: use_sliding_window from layer max_window_layers on, or layer_types.

    All layers must have the same window.
    """

    default: int = 4096
    default_first: int = 28
    keys: tuple[str, ...] = (WINDOW, USE, FIRST, TYPES)

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
                f"{types.count(SLIDING)} of {len(types)} layers have a sliding window ({FIRST} or {TYPES}), which "
                "cannot be expressed: here all layers have one or none has"
            )
        return {"window_size": window if types and types[0] == SLIDING else None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        if model.window_size is None:
            return {USE: False}
        return {WINDOW: model.window_size, USE: True, FIRST: 0, TYPES: [SLIDING] * model.num_layers}


@dataclass(frozen=True)
class Window:
    """Mistral's sliding_window, null for none. default: its value if the key is missing."""

    default: int | None
    keys: tuple[str, ...] = (WINDOW,)

    def read(self, theirs: Settings) -> dict[str, Any]:
        return {"window_size": theirs.get(WINDOW, self.default)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {WINDOW: model.window_size}
