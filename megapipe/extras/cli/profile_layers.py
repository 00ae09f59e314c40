"""Measure embedding, layers and head of a configuration, to balance pipeline stages.

  megapipe profile-layers --output times.json --config run.yaml
  megapipe launch --nproc-per-node 2 -m megapipe profile-layers --output times.json --config run.yaml
                                                                            (tp 2: on as many ranks as tp)

Forward, backward and its two halves of the embedding, a layer, and final norm, head and loss, at the run's shapes on
this rank's device; the slowest rank counts. The run then takes the file with --pipeline-layer-times FILE.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import shlex
import sys
import time
from pathlib import Path

from megapipe.config.load import load_config
from megapipe.environment import Environment
from megapipe.extras.cli.frame import Command, option, write_file
from megapipe.extras.cli.planning import with_vocabulary
from megapipe.plan.layer_costs import LayerTimes, PartCost, setting_of, to_json
from megapipe.plan.resolve import resolve

OPTIONS = (
    option("--output", type=Path, required=True, metavar="FILE.json", help="the file to write"),
    option("--seconds", type=float, default=1.0, above=0, help="for each of some ten figures (default: 1)"),
)


def _profile(own: argparse.Namespace, environment: Environment) -> None:
    config = with_vocabulary(load_config(["--plan", *own.flags], is_job=False).config)

    import torch

    from megapipe.comm.groups import build_process_groups
    from megapipe.extras.calibrate.layers import one_pipeline_rank, profile_parts
    from megapipe.train.run import join

    world_size = environment.world_size
    plan = resolve(one_pipeline_rank(config, world_size), world_size, environment.local_world_size)
    world = join(plan, environment)
    groups = build_process_groups(plan.topology, world.global_rank, world.backend, world.timeout_seconds)
    parts = profile_parts(plan, groups, world.device, own.seconds)
    if environment.global_rank == 0:
        name = torch.cuda.get_device_name() if world.device.type == "cuda" else platform.machine()
        measured = {
            "device": f"{world.device}, {name}",
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": shlex.join(["megapipe", *sys.argv[1:]]),
        }
        times = LayerTimes(setting_of(plan.config), parts[0], (parts[1],), parts[2], measured)
        write_file(own.output, to_json(times) + "\n", "--output")
        print(_text(parts))
        print(f"written: {own.output}, for --pipeline-layer-times {own.output}")


def _text(parts: tuple[PartCost, PartCost, PartCost]) -> str:
    lines = ["milliseconds     F      B      I      W  replay"]
    for name, part in zip(("embedding", "layer", "head"), parts, strict=True):
        lines.append(f"{name:<12}" + "".join(f"{1000 * value:7.2f}" for value in dataclasses.astuple(part)))
    layer = parts[1].forward + parts[1].backward
    embedding, head = ((part.forward + part.backward) / layer for part in (parts[0], parts[2]))
    return "\n".join([*lines, f"the head weighs {head:.2f} layers, the embedding {embedding:.2f}"])


main = Command("megapipe profile-layers", __doc__, OPTIONS, _profile, on_ranks=True, takes_config=True)
