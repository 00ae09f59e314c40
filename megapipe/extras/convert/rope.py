"""Rotary positions in config.json, in both spellings: `rope_theta` with `rope_scaling` (transformers 4), `rope_parameters` (5)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError
from megapipe.extras.convert.settings import Settings

THETA, SCALING, PARAMETERS, PARTIAL = "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"
LENGTH = "original_max_position_embeddings"
# their rope_type -> (ours, their key -> our field, (default, or None: required))
Keys = Mapping[str, tuple[str, float | None]]
TYPES: dict[str, tuple[str, Keys]] = {
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
BACK = {ours: theirs for theirs, (ours, _) in TYPES.items()}


@dataclass(frozen=True)
class Rope:
    """theta: what the architecture takes where no base is given."""

    theta: float = 10000.0

    @property
    def keys(self) -> tuple[str, ...]:
        return (THETA, SCALING, PARAMETERS, PARTIAL)

    def read(self, theirs: Settings) -> dict[str, Any]:
        scaling = dict(theirs.get(PARAMETERS) or theirs.get(SCALING) or {})
        base = scaling.pop(THETA, None) or theirs.get(THETA) or self.theta
        partial = scaling.pop(PARTIAL, None) or theirs.get(PARTIAL) or 1.0
        if partial != 1.0:
            raise ConfigError(f"{PARTIAL} {partial} cannot be expressed: this architecture rotates whole heads")
        kind = scaling.pop("rope_type", None) or scaling.get("type") or "default"
        scaling.pop("type", None)
        if kind not in TYPES:
            raise ConfigError(f"rope_type {kind!r} cannot be expressed; it can be {', '.join(TYPES)}")
        ours, keys = TYPES[kind]
        fields: dict[str, Any] = {
            "position_embedding_type": "rope",
            "rotary_base": float(base),
            "rope_scaling_type": ours,
        }
        if kind == "yarn":
            scaling = _plain_yarn(scaling, theirs)
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
        """In transformers 4's spelling, which both versions read."""
        kind = BACK[model.rope_scaling_type]
        scaling = {key: getattr(model, name) for key, (name, _) in TYPES[kind][1].items()}
        if kind == "yarn" and not model.yarn_mscale_all_dim:  # without a denominator there is no numerator either
            del scaling["mscale"], scaling["mscale_all_dim"]
        return {THETA: model.rotary_base, SCALING: {"rope_type": kind, **scaling} if kind != "default" else None}


def _plain_yarn(scaling: dict[str, Any], theirs: Settings) -> dict[str, Any]:
    """YaRN's keys without those that say what is so anyway. Raises ConfigError if they say something else."""
    scaling.setdefault(LENGTH, theirs.get("max_position_embeddings"))
    if scaling.pop("truncate", True) is not True:
        raise ConfigError(
            "rope_type yarn: truncate false cannot be expressed: the ramp starts and ends at whole pairs of channels here"
        )
    given = scaling.pop("attention_factor", None)
    if given is not None:
        plain = 0.1 * math.log(scaling["factor"]) + 1.0
        if scaling.get("mscale") or scaling.get("mscale_all_dim") or not math.isclose(given, plain, rel_tol=1e-9):
            raise ConfigError(
                f"rope_type yarn: attention_factor {given} cannot be expressed: here it is 0.1 ln(factor) + 1 = {plain}"
            )
    return scaling
