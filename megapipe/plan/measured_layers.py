"""Measured times of the parts of a model: the file that `megapipe profile-layers` writes and --pipeline-layer-times
reads.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.layers.table import comm_chunks
from megapipe.plan.layer_costs import LayerCosts, PartCost

FORMAT = "megapipe layer times"
VERSION = 1
FLAG = "--pipeline-layer-times"
# model options that change neither the shapes nor the work of a layer, the embedding or the head
WITHOUT_EFFECT = (
    "num_layers",
    "vocab_size",
    "make_vocab_size_divisible_by",
    "init_method_std",
    "untie_embeddings_and_output_weights",
)


@dataclass(frozen=True)
class LayerTimes:
    """Measured seconds on one rank for one microbatch.

    setting: the options they were measured with. layers: one entry if all layers are alike, else one for each layer.
    measured: device, versions, date and command, for people.
    """

    setting: Mapping[str, Any]
    embedding: PartCost
    layers: tuple[PartCost, ...]
    head: PartCost
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def setting_of(config: Config) -> dict[str, Any]:
    """Return the options that layer times depend on. config: resolved."""
    model, parallel, recompute = config.model, config.parallel, config.recompute
    tp = parallel.tensor_model_parallel_size
    setting = {name: value for name, value in dataclasses.asdict(model).items() if name not in WITHOUT_EFFECT}
    granularity = recompute.recompute_granularity
    return setting | {
        "tensor_model_parallel_size": tp,
        "sequence_parallel": parallel.sequence_parallel and tp > 1,
        "comm_chunks": dataclasses.astuple(comm_chunks(parallel)),
        "micro_batch_size": config.training.micro_batch_size,
        "dtype": config.precision.dtype,
        "recompute_granularity": granularity,
        "recompute_keep_attention": recompute.recompute_keep_attention,
        "recompute_modules": list(recompute.recompute_modules) if granularity == "selective" else [],
    }


def measured_costs(path: Path, config: Config) -> LayerCosts:
    """Return the costs of a run's layers from a file.

    config: resolved. Raises ConfigError if it was measured with other options.
    """
    times = read_layer_times(path)
    wanted = json.loads(json.dumps(setting_of(config)))  # as JSON has it: lists for tuples
    other = [
        f"{name} {times.setting.get(name)!r}, the run has {value!r}"
        for name, value in wanted.items()
        if times.setting.get(name) != value
    ]
    if other:
        more = f" (and {len(other) - 4} more)" if len(other) > 4 else ""
        raise ConfigError(
            f"{FLAG} {path} was measured for {'; '.join(other[:4])}{more}: measure again with the run's flags "
            "(megapipe profile-layers), "
            "or leave it out to balance by FLOPs"
        )
    num_layers = config.model.num_layers
    layers = times.layers * num_layers if len(times.layers) == 1 else times.layers
    if len(layers) != num_layers:
        raise ConfigError(
            f"{FLAG} {path} has the times of {len(layers)} layers, --num-layers is {num_layers}; give one entry "
            "without a count, for "
            "layers that are all alike, or counts that add up"
        )
    return LayerCosts(times.embedding, layers, times.head, config.recompute)


def to_json(times: LayerTimes) -> str:
    """Return the text of the file."""
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "measured": dict(times.measured),
            "setting": dict(times.setting),
            "seconds": {
                "embedding": dataclasses.asdict(times.embedding),
                "layers": [dataclasses.asdict(layer) for layer in times.layers],
                "head": dataclasses.asdict(times.head),
            },
        },
        indent=2,
    )


def read_layer_times(path: Path) -> LayerTimes:
    """Read layer times. Raises ConfigError if the file cannot be read, has another format or holds invalid times."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{FLAG} {path} cannot be read: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"{FLAG} {path} is not a file of layer times; megapipe profile-layers writes one")
    if found.get("version") != VERSION:
        raise ConfigError(
            f"{FLAG} {path} has version {found.get('version')!r}, this megapipe reads {VERSION}; measure again"
        )
    try:
        seconds, setting, measured = found["seconds"], dict(found["setting"]), dict(found.get("measured", {}))
        layers = tuple(part for entry in seconds["layers"] for part in _counted(entry))
        times = LayerTimes(setting, _part(seconds["embedding"]), layers, _part(seconds["head"]), measured)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{FLAG} {path} lacks or misstates something: {error!r}; docs/balance.md shows such a file"
        ) from None
    if not layers or not any(part.forward for part in layers):
        raise ConfigError(f"{FLAG} {path} has no time for a layer's forward")
    return times


def _counted(entry: Mapping[str, Any]) -> list[PartCost]:
    values = dict(entry)
    return [_part(values)] * int(values.pop("count", 1))


def _part(values: Mapping[str, Any]) -> PartCost:
    part = PartCost(**{name: float(value) for name, value in values.items() if name != "count"})
    bad = [name for name, value in dataclasses.asdict(part).items() if not (math.isfinite(value) and value >= 0)]
    if bad:
        raise ValueError(f"{bad[0]} is not a valid time")
    return part
