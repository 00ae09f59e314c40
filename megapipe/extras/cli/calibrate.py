"""Measure this machine and write a hardware file for `megapipe plan`.

  megapipe calibrate --output here.yaml
  megapipe launch --nproc-per-node 2 -m megapipe calibrate --output here.yaml       (links between ranks, too)
  megapipe plan --gpus 2 --hardware here.yaml --config run.yaml

GEMMs in every precision and by size, fused attention, memory; on several ranks all-reduce and messages inside a node,
and between nodes where there are several. Ranks measure at the same time, and the slowest counts. The file says what
was not measured. Measure on a machine that does nothing else. On CPUs a rank has OMP_NUM_THREADS threads, as in
training, and one where that is not set.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megapipe.config.training import DEVICES
from megapipe.dtypes import TENSOR_DTYPES
from megapipe.environment import Environment
from megapipe.extras.cli.frame import Command, option

OPTIONS = (
    option(
        "--output",
        type=Path,
        default=Path("hardware.yaml"),
        metavar="FILE.yaml",
        help="default hardware.yaml; never overwritten without --force",
    ),
    option("--force", action="store_true", help="overwrite the file"),
    option(
        "--seconds",
        type=float,
        default=30.0,
        above=0,
        metavar="S",
        help="that it may take, about (default 30); with fewer, smaller sizes are measured",
    ),
    option(
        "--dtype",
        choices=TENSOR_DTYPES,
        help="in which GEMMs by size, attention and memory are measured (default: bf16 on GPUs, fp32 on CPUs)",
    ),
    option("--name", help="of the hardware in the file (default: the device's)"),
    option("--device", choices=DEVICES, default="auto", help="default: cuda if there is a GPU"),
    option(
        "--timeout-seconds",
        type=float,
        default=60.0,
        above=0,
        metavar="S",
        help="after which a message that does not come is an error (default 60)",
    ),
    option("--json", action="store_true", help="the figures as one JSON object instead of the table"),
)


def _calibrate(own: argparse.Namespace, environment: Environment) -> None:
    """Measure with the other ranks and write the file on rank 0. Raises ConfigError, CommunicationError."""
    from megapipe.extras.calibrate import hardware_file
    from megapipe.extras.calibrate.rates import measure

    is_first = environment.global_rank == 0
    if is_first:
        hardware_file.refuse_taken(own.output, own.force)
    found = measure(environment, own.device, own.dtype, own.seconds, own.timeout_seconds)
    if is_first:
        machine = hardware_file.machine_of(found, environment)
        measured = hardware_file.hardware_measured(own.name, machine, found.rates, found.links)
        hardware = hardware_file.write(own.output, hardware_file.to_yaml(measured, machine, found.links), own.force)
        if own.json:
            print(json.dumps(hardware_file.as_data(hardware, machine, found)))
        else:
            print(hardware_file.as_text(hardware, machine, found.links))
            print(f"written: {own.output}, for megapipe plan --hardware {own.output}")


main = Command(
    "megapipe calibrate",
    __doc__,
    OPTIONS,
    _calibrate,
    on_ranks=True,
    needs_words=False,
    interrupted="interrupted; no file was written",
)
