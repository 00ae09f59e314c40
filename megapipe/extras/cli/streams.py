"""`megapipe verify --streams`: races between the CUDA streams of a configuration, on a machine without a GPU."""

from __future__ import annotations

import argparse
import sys

from megapipe.config.load import load_config
from megapipe.errors import ConfigError
from megapipe.extras.cli.frame import command
from megapipe.extras.streams import device
from megapipe.plan.world_rules import rules_of_world


@command("megapipe verify --streams", (), takes_config=True)
def verify_streams(own: argparse.Namespace) -> int:
    """Look for races between the CUDA streams of a training step, on a machine without a GPU.

      megapipe verify --streams --world-size 64 --ranks-per-node 8 --config FILE.yaml [flags]

    runs two steps of every rank of a pipeline with your flags and extensions on a fake device, whose tensors have no
    values, and records which bytes each stream reads and writes. Two accesses that neither streams, events nor messages
    order are a race, printed with both places; the exit code is then 1. Layers and microbatches are cut to the smallest
    step that has all kinds of actions. Needs g++, with which the device is compiled at the first use; no data is read.
    docs/gpu_streams.md says what is checked and what is not.
    """
    if any(word.startswith("--verify-grid") for word in own.flags):
        raise ConfigError("--streams and --verify-grid are two checks; ask for one at a time")
    reason = device.missing()
    if reason is not None:
        raise ConfigError(f"--streams compiles a fake CUDA device: {reason}")
    library = device.build()
    if "torch" not in sys.modules:  # an extension may import it
        device.load(library)
    loaded = load_config(["--plan", *own.flags], is_job=False, more=rules_of_world)
    if loaded.config.training.device == "cpu":
        raise ConfigError("--device cpu: --streams checks the streams of a GPU; leave it out")
    if loaded.requests.world_size is None:
        raise ConfigError("megapipe verify --streams needs --world-size N, the number of ranks of the run")
    from megapipe.extras.streams.ranks import prepare
    from megapipe.extras.streams.report import check_and_report

    prepare(str(library))
    return 1 if check_and_report(loaded) else 0
