"""`megapipe profile-layers`: measure embedding, layers and head of a configuration, to balance pipeline stages."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megapipe.config.load import load_config
from megapipe.environment import Environment, read_environment
from megapipe.errors import ConfigError
from megapipe.extras.cli.failure import end_at_once, guarded
from megapipe.extras.cli.pretrain import with_vocabulary
from megapipe.plan.layer_costs import PartCost
from megapipe.plan.measured_layers import LayerTimes, setting_of, to_json
from megapipe.plan.resolve import resolve

HELP = """\
usage: megapipe profile-layers --output FILE.json [--seconds S] [--config FILE.yaml] [flags of pretrain_gpt.py]

  megapipe profile-layers --output times.json --config run.yaml
  megapipe launch --nproc-per-node 2 -m megapipe profile-layers --output times.json --config run.yaml
                                                                            (tp 2: on as many ranks as tp)

Forward, backward and its two halves of the embedding, a layer, and final norm, head and loss, at the run's shapes on
this rank's device; the slowest rank counts. The run then takes the file with --pipeline-layer-times FILE. --seconds:
for each of some ten figures (default 1).
"""


def main(arguments: Sequence[str]) -> int:
    """Measure on this rank and return the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if arguments else 2
    environment = read_environment()
    code = guarded(lambda: _profile(list(arguments), environment), environment.global_rank, environment.world_size)
    if code and environment.is_distributed:
        end_at_once(code)
    return code


def _profile(arguments: list[str], environment: Environment) -> int:
    parser = argparse.ArgumentParser(prog="megapipe profile-layers", add_help=False, allow_abbrev=False)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seconds", type=float, default=1.0)
    own, flags = parser.parse_known_args(arguments)
    if own.output is None or not own.seconds > 0:
        raise ConfigError("megapipe profile-layers needs --output FILE.json, and --seconds must be above 0")
    config = with_vocabulary(load_config(["--plan", *flags], is_job=False).config)

    from megapipe.comm.bootstrap import shutdown
    from megapipe.comm.groups import build_process_groups
    from megapipe.extras.calibrate.layers import one_pipeline_rank, profile_parts
    from megapipe.train.run import join

    plan = resolve(
        one_pipeline_rank(config, environment.world_size), environment.world_size, environment.local_world_size
    )
    world = join(plan, environment)
    groups = build_process_groups(plan.topology, world.global_rank, world.backend, world.timeout_seconds)
    parts = profile_parts(plan, groups, world.device, own.seconds)
    if environment.global_rank == 0:
        _write(
            own.output,
            LayerTimes(setting_of(plan.config), parts[0], (parts[1],), parts[2], _measured(str(world.device))),
        )
        print(_text(parts))
        print(f"written: {own.output}, for --pipeline-layer-times {own.output}")
    if world.world_size > 1:
        shutdown(0)
    return 0


def _measured(device: str) -> dict[str, str]:
    import platform

    import torch

    name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()
    return {
        "device": f"{device}, {name}",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["megapipe", *sys.argv[1:]]),
    }


def _write(path: Path, times: LayerTimes) -> None:
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_text(to_json(times) + "\n", encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error}") from None


def _text(parts: tuple[PartCost, PartCost, PartCost]) -> str:
    lines = ["milliseconds     F      B      I      W  replay"]
    for name, part in zip(("embedding", "layer", "head"), parts, strict=True):
        lines.append(f"{name:<12}" + "".join(f"{1000 * value:7.2f}" for value in dataclasses.astuple(part)))
    layer = parts[1].forward + parts[1].backward
    embedding, head = ((part.forward + part.backward) / layer for part in (parts[0], parts[2]))
    return "\n".join([*lines, f"the head weighs {head:.2f} layers, the embedding {embedding:.2f}"])
