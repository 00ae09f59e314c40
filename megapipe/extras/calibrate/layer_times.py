"""Measurement of embedding, layers and head of a configuration, to balance stages (`megapipe profile-layers`)."""

from __future__ import annotations

import platform
import shlex
import sys
import time
from dataclasses import astuple

import torch

from megapipe.comm.bootstrap import join
from megapipe.comm.groups import build_process_groups
from megapipe.comm.meeting import Facts
from megapipe.config.config import Config
from megapipe.config.layers import layer_kinds
from megapipe.environment import Environment
from megapipe.errors import ConfigError
from megapipe.extras.calibrate.rates import one_pipeline_rank, profile_parts
from megapipe.formatting import ranges_text
from megapipe.plan.layer_costs import LayerTimes, setting_of
from megapipe.plan.resolve import resolve
from megapipe.train.facts import facts_of


def measure_layers(config: Config, environment: Environment, options: Facts, seconds: float) -> LayerTimes | None:
    """Return the times of the slowest rank, on rank 0; None on the others. Raises ConfigError.

    options: facts of the command, which ranks compare as those of the configuration. seconds: for each figure.
    """
    if config.model.mtp_num_layers is not None:
        rule = "multi-token prediction is balanced by its FLOPs, as its times cannot be measured apart yet"
        raise ConfigError(f"megapipe profile-layers with --mtp-num-layers: {rule}; leave --pipeline-layer-times out")
    world_size, local = environment.world_size, environment.local_world_size
    plan = resolve(one_pipeline_rank(config, world_size), world_size, local)
    world = join(plan.config, environment, lambda notes: {**options, **facts_of(plan, environment, notes)})
    groups = build_process_groups(plan.topology, world.global_rank, world.backend, world.timeout_seconds)
    kinds = layer_kinds(config.model)
    alike = (resolve(one_pipeline_rank(config, world_size, layer), world_size, local) for layer in kinds)
    # embedding, one layer, and head, with layers of each kind
    costs = [profile_parts(each, groups, world.device, seconds) for each in alike]
    if environment.global_rank != 0:
        return None
    name = torch.cuda.get_device_name() if world.device.type == "cuda" else platform.machine()
    measured = {
        "device": f"{world.device}, {name}",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["megapipe", *sys.argv[1:]]),
    }
    of_layer = {number: cost[1] for numbers, cost in zip(kinds.values(), costs, strict=True) for number in numbers}
    layers = tuple(of_layer[number] for number in range(len(of_layer) if len(kinds) > 1 else 1))
    embedding, _, head = costs[0]
    return LayerTimes(setting_of(plan.config), embedding, layers, head, measured)


def times_text(config: Config, times: LayerTimes) -> str:
    """Return the table: embedding, a layer of each kind, and head."""
    kinds = layer_kinds(config.model).values()
    layers = {"layer": times.layers[0]}
    if len(kinds) > 1:
        layers = {f"layers {ranges_text(numbers)}": times.layers[numbers[0]] for numbers in kinds}
    embedding, head = times.embedding, times.head
    width = max(12, *(len(name) + 1 for name in layers))
    lines = ["milliseconds".ljust(width) + "     F      B      I      W  replay"]
    for name, part in {"embedding": embedding, **layers, "head": head}.items():
        lines.append(f"{name:<{width}}" + "".join(f"{1000 * value:7.2f}" for value in astuple(part)))
    layer = sum(part.forward + part.backward for part in layers.values()) / len(layers)
    ends = ((part.forward + part.backward) / layer for part in (head, embedding))
    return "\n".join([*lines, "the head weighs {:.2f} layers, the embedding {:.2f}".format(*ends)])
