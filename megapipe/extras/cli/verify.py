"""`megapipe verify`: the grid against one process; with --streams races between CUDA streams, without a GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megapipe.config.load import load_config
from megapipe.errors import ConfigError
from megapipe.extras.cli.frame import command, switch
from megapipe.extras.streams import device
from megapipe.plan.world_rules import rules_of_world


def main(arguments: Sequence[str]) -> int:
    """Run one of the two checks and return the exit code."""
    if {"-h", "--help", "--streams"}.intersection(arguments):
        return streams(arguments)
    from megapipe.extras.cli.pretrain import main as pretrain

    return pretrain(["--verify-grid", *arguments])


@command("megapipe verify", (switch("--streams", "look for races between CUDA streams instead"),), takes_config=True)
def streams(own: argparse.Namespace) -> int:
    """Check that a grid computes what one process does, or that CUDA streams have no race.

      megapipe launch --nproc-per-node 4 verify --config FILE.yaml [flags]

    draws small weights and data, trains the grid and one process in fp64, and compares the loss, every gradient and
    every weight; no data is read. --verify-grid native compares in the configured dtype. pretrain --verify-grid is the
    same.
    Exit code: 0 if all are the same, 1 if not. docs/verify.md

      megapipe verify --streams --world-size 64 --ranks-per-node 8 --config FILE.yaml [flags]

    runs two steps of every rank of a pipeline with your flags and extensions on a fake device, whose tensors have no
    values, and records which bytes each stream reads and writes. Two accesses that neither streams, events nor messages
    order are a race, printed with both places; the exit code is then 1. Layers and microbatches are cut to the smallest
    step that has all kinds of actions. Needs g++, with which the device is compiled at the first use; no data is read.
    docs/without_gpu.md says what is checked and what is not.
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
