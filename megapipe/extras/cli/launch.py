"""`megapipe launch`: torchrun without its tracebacks, with exit codes kept and signals passed on."""

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
  megapipe launch --nnodes 2 --node-rank 0 --master-addr node0 --master-port 29500 --nproc-per-node 8 pretrain_gpt.py ...

What differs: no traceback and no log of the launcher's own; the exit code is that of the first rank that failed; SIGINT, SIGTERM and
SIGUSR1 go on to the ranks, which save and leave (code 0); a second Ctrl-C leaves without saving, a third kills. OMP_NUM_THREADS is cores /
ranks where it is not set. On one node the ranks meet at a free port of the loopback device.

  megapipe launch --dry-run --hosts node[01-16] --nproc-per-node 8 pretrain_gpt.py ...

prints instead the command of each node, the host, GPU and place in the grid of each rank, and which groups reach over nodes with what they
send in a step; it starts nothing and imports no torch. --hosts: names of the nodes, as SLURM writes them; --slurm: as a job of
launch/slurm/pretrain.sbatch. docs/launch.md

--max-restarts N starts all ranks again when one has failed, and not where that would change nothing: exit codes 2 (refused), 3 (restarted
twice without progress) and 130 (interrupted twice), or after a signal.

All flags: megapipe launch --torchrun-help
"""


def main(arguments: Sequence[str]) -> int:
    """Launch; returns the exit code."""
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
    """Run a script on ranks; the exit code of the first rank that failed, or 0. arguments: as for torchrun. Raises ConfigError."""
    try:
        with Forwarder() as forwarder:
            from megapipe.extras.launch.torchrun import parse, ranks_here, run  # torch, which takes seconds

            parsed = parse(arguments)
            if not parsed.module and not parsed.no_python and not Path(parsed.training_script).is_file():
                raise ConfigError(f"megapipe launch: there is no script {parsed.training_script}")
            outcome = run(parsed, threads_of_a_rank(ranks_here(parsed)), forwarder)
    except InterruptedBeforeStart:
        return INTERRUPTED
    if outcome.message:
        print(outcome.message, file=sys.stderr, flush=True)
    return outcome.exit_code


def asks_for_preview(words: Sequence[str]) -> bool:
    """--dry-run stands among the launcher's own words; one of the script's is the script's."""
    return "--dry-run" in words and read_launch(words).dry_run


def threads_of_a_rank(num_ranks: int) -> int:
    """Cores this process may use, shared out among the ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_ranks)
