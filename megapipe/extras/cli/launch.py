"""`megapipe launch`: torchrun without its tracebacks, that keeps exit codes and forwards signals."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megapipe.errors import ConfigError, MegapipeError
from megapipe.extras.cli.failure import INTERRUPTED
from megapipe.extras.cli.launch_preview import preview
from megapipe.extras.launch.flags import read_launch
from megapipe.extras.launch.forwarder import Forwarder, InterruptedBeforeStart

HELP = """\
usage: megapipe launch [flags of torchrun] SCRIPT [flags of the script]

Starts SCRIPT on several ranks, as torchrun does and with torchrun's flags:

  megapipe launch --nproc-per-node 8 pretrain_gpt.py --config configs/quickstart.yaml
  megapipe launch --nnodes 2 --node-rank 0 --master-addr node0 --master-port 29500 --nproc-per-node 8 \\
      pretrain_gpt.py ...

Differences: no traceback or log of the launcher; the exit code is that of the first rank that failed; SIGINT, SIGTERM
and SIGUSR1 are forwarded to the ranks, which save and exit (code 0); a second Ctrl-C exits without saving, a third
kills. OMP_NUM_THREADS is cores / ranks if it is not set. On one node the ranks connect through a free port of the
loopback device.

  megapipe launch --dry-run --hosts node[01-16] --nproc-per-node 8 pretrain_gpt.py ...

prints instead the command of each node, the host, GPU and grid position of each rank, and which groups span nodes with
the bytes that they send in a step; it starts nothing and imports no torch. --hosts: names of the nodes, as SLURM writes
them; --slurm: as a job of launch/slurm/pretrain.sbatch. docs/launch.md

--max-restarts N restarts all ranks when one has failed, unless a restart would not help: exit codes 2 (refused), 3
(restarted twice without progress) and 130 (interrupted twice), or after a signal.

All flags: megapipe launch --torchrun-help
"""


def main(arguments: Sequence[str]) -> int:
    """Launch the script and return the exit code."""
    words = list(arguments)
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if words else 2
    if words[0] == "--torchrun-help":
        words = ["--help"]
    try:
        if asks_for_preview(words):
            print(preview(words))
            return 0
        return launch(words)
    except MegapipeError as error:
        print(f"{error}", file=sys.stderr)
        return error.exit_code


def launch(arguments: Sequence[str]) -> int:
    """Run a script on several ranks and return the exit code of the first that failed, or 0. Raises ConfigError.

    arguments: as for torchrun.
    """
    try:
        with Forwarder() as forwarder:
            from megapipe.extras.launch.torchrun import parse, ranks_here, run  # torch, which takes seconds

            parsed = parse(arguments)
            if not parsed.module and not parsed.no_python and not Path(parsed.training_script).is_file():
                raise ConfigError(f"megapipe launch: no such script {parsed.training_script}")
            outcome = run(parsed, threads_of_a_rank(ranks_here(parsed)), forwarder)
    except InterruptedBeforeStart:
        return INTERRUPTED
    if outcome.message:
        print(outcome.message, file=sys.stderr, flush=True)
    return outcome.exit_code


def asks_for_preview(words: Sequence[str]) -> bool:
    """Return True if --dry-run is among the launcher's flags; after the script it belongs to the script."""
    return "--dry-run" in words and read_launch(words).dry_run


def threads_of_a_rank(num_ranks: int) -> int:
    """Return the cores that this process may use, divided by the ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_ranks)
