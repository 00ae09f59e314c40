"""`megapipe calibrate`: measure this machine and write a hardware file for `megapipe plan`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megapipe.config.training import DEVICES
from megapipe.dtypes import TENSOR_DTYPES
from megapipe.environment import Environment
from megapipe.errors import ConfigError
from megapipe.extras.cli.failure import INTERRUPTED
from megapipe.extras.cli.saved_model import parse, run_on_all_ranks

HELP = """\
usage: megapipe calibrate [--output FILE.yaml] [--seconds S] [--dtype D] [--name NAME] [--force] [--json]

  megapipe calibrate --output here.yaml
  megapipe launch --nproc-per-node 2 -m megapipe calibrate --output here.yaml       (links between ranks, too)
  megapipe plan --gpus 2 --hardware here.yaml --config run.yaml

GEMMs in every precision and by size, fused attention, memory; on several ranks all-reduce and messages inside a node,
and between nodes where there are several. Ranks measure at the same time, and the slowest counts. The file says what
was not measured. Measure on a machine that does nothing else.

  --output FILE.yaml      default hardware.yaml; never overwritten without --force
  --seconds S             that it may take, about (default 30); with fewer, smaller sizes are measured
  --dtype D               in which GEMMs by size, attention and memory are measured (default bf16 on GPUs, fp32 on CPUs)
  --name NAME             of the hardware in the file (default: the device's)
  --device D              auto, cpu or cuda
  --timeout-seconds S     after which a message that does not come is an error (default 60)
  --json                  the figures as one JSON object instead of the table

On CPUs a rank has OMP_NUM_THREADS threads, as in training, and one where that is not set.
"""


def main(arguments: Sequence[str]) -> int:
    """Measure on this rank and return the exit code."""
    if any(word in ("-h", "--help") for word in arguments):
        print(HELP, end="")
        return 0
    return run_on_all_ranks("megapipe calibrate", lambda environment: calibrate(arguments, environment))


def calibrate(arguments: Sequence[str], environment: Environment) -> int:
    """Measure with the other ranks and write the file on rank 0. Raises ConfigError, CommunicationError."""
    own = _own_flags(arguments)
    is_first = environment.global_rank == 0

    from megapipe.extras.calibrate.hardware_file import (
        as_data,
        as_text,
        hardware_measured,
        machine_of,
        refuse_taken,
        to_yaml,
        write,
    )
    from megapipe.extras.calibrate.measure import measure

    try:
        if is_first:
            refuse_taken(own.output, own.force)
        found = measure(environment, own.device, own.dtype, own.seconds, own.timeout_seconds)
        if is_first:
            machine = machine_of(found, environment)
            hardware = write(
                own.output,
                to_yaml(hardware_measured(own.name, machine, found.rates, found.links), machine, found.links),
                own.force,
            )
            print(
                json.dumps(as_data(hardware, machine, found)) if own.json else as_text(hardware, machine, found.links)
            )
            if not own.json:
                print(f"written: {own.output}, for megapipe plan --hardware {own.output}")
    except KeyboardInterrupt:
        if is_first:
            print("interrupted; no file was written", file=sys.stderr, flush=True)
        return INTERRUPTED
    return 0


def _own_flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megapipe calibrate", add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--output", type=Path, default=Path("hardware.yaml"))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--dtype", choices=TENSOR_DTYPES)
    parser.add_argument("--name")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--timeout-seconds", type=float, default=60.0)
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--json", action="store_true")
    own = parse(parser, arguments)
    for flag, value in (("--seconds", own.seconds), ("--timeout-seconds", own.timeout_seconds)):
        if not value > 0:
            raise ConfigError(f"{flag} {value:g} must be above 0")
    return own
