"""usage: megapipe launch [flags of torchrun] SCRIPT [flags of the script]

Starts SCRIPT on several ranks, as torchrun does and with torchrun's flags. SCRIPT is a Python file, or a command of
megapipe that runs on ranks (pretrain, verify, evaluate, generate, doctor):

  megapipe launch --nproc-per-node 8 pretrain --config configs/quickstart.yaml
  megapipe launch --nnodes 2 --node-rank 0 --master-addr node0 --master-port 29500 --nproc-per-node 8 \\
      pretrain ...

Differences: no traceback or log of the launcher; the exit code is that of the first rank that failed; SIGINT, SIGTERM,
SIGHUP and SIGUSR1 are forwarded to the ranks, which save and exit (code 0); a second Ctrl-C exits without saving, a
third kills. OMP_NUM_THREADS is cores / ranks if it is not set. On one node the ranks connect through a free port of the
loopback device.

  megapipe launch --dry-run --hosts node[01-16] --nproc-per-node 8 pretrain ...

prints instead the command of each node, the host, GPU and grid position of each rank, and which groups span nodes with
the bytes that they send in a step; it starts nothing. --hosts: names of the nodes, as SLURM writes them. docs/launch.md

  megapipe launch --slurm --nnodes 16 --nproc-per-node 8 pretrain ...

submits a job of SLURM that requeues itself, from any folder; with --dry-run it prints the command of sbatch, to add
options to, with the path of its script. docs/launch.md

--ranks-per-gpu N lets N ranks share each GPU, to check a grid on one card; it is slow. docs/gpu.md

--max-restarts N restarts all ranks when one has failed, unless a restart would not help: exit codes 2 (refused), 3
(restarted twice without progress) and 130 (interrupted twice), or after a signal.

All flags: megapipe launch --torchrun-help
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence

from megapipe.errors import ConfigError
from megapipe.extras.cli.frame import guarded
from megapipe.extras.launch.flags import read_launch
from megapipe.extras.launch.forwarder import Forwarder
from megapipe.extras.launch.preview import ON_RANKS, check_script, preview, sbatch_command
from megapipe.monitor.process import available_cores
from megapipe.monitor.signals import outlive_output


def main(arguments: Sequence[str]) -> int:
    """Launch the script and return the exit code."""
    words = list(arguments)
    if not words or words[0] in ("-h", "--help"):
        print(__doc__, end="")
        return 0 if words else 2
    if words[0] == "--torchrun-help":
        words = ["--help"]

    def run() -> int:
        # among the launcher's flags; after the script, --dry-run belongs to the script
        if "--dry-run" in words and read_launch(words).dry_run:
            print(preview(words))
            return 0
        if "--slurm" in words and read_launch(words).slurm:
            return submit(words)
        return launch(words)

    return guarded(run)


def submit(arguments: Sequence[str]) -> int:
    """Submit a job of SLURM if its configuration can run, and return sbatch's exit code. Raises ConfigError."""
    preview(arguments)
    command = sbatch_command(read_launch(arguments))
    if shutil.which("sbatch") is None:
        raise ConfigError("--slurm: there is no sbatch here; submit on a node of the cluster, or print with --dry-run")
    return subprocess.run(["env", *command]).returncode


def launch(arguments: Sequence[str]) -> int:
    """Run a script as torchrun does; return the exit code of the first rank that failed, or 0. Raises ConfigError."""
    outlive_output()
    with Forwarder() as forwarder:
        from megapipe.extras.launch.torchrun import parse, ranks_here, run  # torch, which takes seconds

        parsed = parse(arguments)
        if not parsed.module and not parsed.no_python:
            check_script(parsed.training_script)
            if parsed.training_script in ON_RANKS:
                words = [parsed.training_script, *parsed.training_script_args]
                parsed.module, parsed.training_script, parsed.training_script_args = True, "megapipe", words
        outcome = run(parsed, threads_of_a_rank(ranks_here(parsed)), forwarder)
    if outcome.message:
        print(outcome.message, file=sys.stderr, flush=True)
    return outcome.exit_code


def threads_of_a_rank(num_ranks: int) -> int:
    """Return the cores that this process may use, divided by the ranks."""
    return max(1, available_cores() // num_ranks)
