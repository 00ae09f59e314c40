"""`model_parameters`, `model_states` and `layer_parameters`: the parameters of a model, as its modules declare them.

A layer of each kind, an end of the model and a module of multi-token prediction are built once, without values. Names
are Megatron-Core's (`decoder.layers.3.self_attention.linear_qkv.weight`), linear weights are [out, in]. torch is
imported only for modules that are not in the user's cache.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from megapipe.config.config import ResolvedModelConfig
from megapipe.config.layers import LayerConfig, layer_configs
from megapipe.errors import ConfigError
from megapipe.sharding.spec import (
    ExpertRows,
    Fused,
    HeadChannels,
    Init,
    Owner,
    ParamSpec,
    QueryGroups,
    Replicated,
    Slicing,
)
from megapipe.trace.store import user_store

NEAR_NAMES = 3  # names of parameters that a message gives
SLICINGS = {kind.__name__: kind for kind in (Replicated, Fused, QueryGroups, HeadChannels, ExpertRows)}


@cache
def model_parameters(
    model: ResolvedModelConfig, sequence_parallel: bool, etp: int = 1, freeze: tuple[str, ...] = ()
) -> tuple[ParamSpec, ...]:
    """Return all parameters of a resolved model, in model order. etp: ranks that share every expert. freeze: patterns
    of the names of those that are not trained; raises ConfigError if one matches no name, or if all are frozen.

    sequence_parallel: norms, row-parallel biases and position embeddings then see only a slice of the sequence, so
    that their gradients are partial over tp (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
    """

    def placed(kind: str, config: ResolvedModelConfig, prefix: str, owner: Owner) -> Iterator[ParamSpec]:
        for spec in _declared(kind, config, sequence_parallel)[0]:
            yield replace(spec, name=prefix + spec.name, owner=owner, slicing=_on_grid(spec.slicing, etp))

    layers = layer_configs(model)
    found = list(placed("embedding", model, "", "embedding"))
    for number, layer in enumerate(layers):
        found += placed("layer", layer, f"decoder.layers.{number}.", number)
    found += placed("head", model, "", "head")
    for number in range(model.mtp_num_layers or 0):
        found += placed("prediction", layers[-1], f"mtp.layers.{number}.", "head")
    frozen = frozen_names([spec.name for spec in found], freeze)
    return tuple(replace(spec, trainable=False) if spec.name in frozen else spec for spec in found)


@cache
def model_states(model: ResolvedModelConfig) -> tuple[ParamSpec, ...]:
    """Return the fp32 tensors of a model that are saved with its parameters and have no gradient: biases of routers.
    Every rank holds them whole.
    """
    layers = layer_configs(model)
    placed = [("layer", layer, f"decoder.layers.{number}.", number) for number, layer in enumerate(layers)]
    for number in range(model.mtp_num_layers or 0):
        placed.append(("prediction", layers[-1], f"mtp.layers.{number}.", model.num_layers + number))
    return tuple(
        replace(state, name=prefix + state.name, owner=owner)
        for kind, config, prefix, owner in placed
        for state in _declared(kind, config, False)[1]
    )


def layer_parameters(layer: LayerConfig) -> tuple[ParamSpec, ...]:
    """Return the parameters of one layer, with names within it."""
    return _declared("layer", layer, False)[0]


def frozen_names(names: Sequence[str], patterns: Iterable[str]) -> frozenset[str]:
    """Return the names that a pattern of --freeze matches, such as `decoder.layers.0.*`. Raises ConfigError for a
    pattern without a match, and if nothing is left to train.
    """
    frozen = set[str]()
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            near = difflib.get_close_matches(pattern, names, NEAR_NAMES, 0.0)
            raise ConfigError(
                f"--freeze {pattern} matches no parameter of the model; give a name, such as {', '.join(near)}, or a "
                "pattern of names"
            )
        frozen.update(matching)
    if len(frozen) == len(names):
        raise ConfigError(
            f"--freeze {' '.join(patterns)} matches every parameter, so that nothing is trained; leave some out, or, "
            "to evaluate only, give --skip-train without --freeze"
        )
    return frozenset(frozen)


@cache
def _declared(
    kind: str, config: ResolvedModelConfig, sequence_parallel: bool
) -> tuple[tuple[ParamSpec, ...], tuple[ParamSpec, ...]]:
    """Return the parameters and the states of a module, with names within it. kind: one of `trace.modules`."""

    def run() -> list[list[dict[str, Any]]]:
        from megapipe.trace.modules import declarations_of

        return [[_as_data(spec) for spec in specs] for specs in declarations_of(kind, config, sequence_parallel)]

    parameters, states = user_store().data(("parameters", kind, config, sequence_parallel), run)
    return tuple(map(_of_data, parameters)), tuple(map(_of_data, states))


def _on_grid(slicing: Slicing, etp: int) -> Slicing:
    """Return how a parameter is cut where so many ranks share every expert; a module that is built alone has one."""
    return replace(slicing, etp=etp) if isinstance(slicing, ExpertRows) else slicing


def _as_data(spec: ParamSpec) -> dict[str, Any]:
    """Return a spec as JSON has it."""
    return asdict(spec) | {"slicing": [type(spec.slicing).__name__, asdict(spec.slicing)]}


def _of_data(data: Mapping[str, Any]) -> ParamSpec:
    """Return the spec that `_as_data` has given."""
    kind, cut = data["slicing"]
    made = {"shape": tuple(data["shape"]), "slicing": SLICINGS[kind](**cut), "init": Init(**data["init"])}
    return ParamSpec(**{**data, **made})
