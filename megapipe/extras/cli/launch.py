"""usage: megapipe launch [flags of torchrun] SCRIPT [flags of the script]

Starts SCRIPT on several ranks, as torchrun does and with torchrun's flags. SCRIPT is a Python file, or a command of
megapipe that runs on ranks (pretrain, verify, evaluate, generate, doctor):

  megapipe launch --nproc-per-node 8 pretrain --config configs/quickstart.yaml
  megapipe launch --nnodes 2 --node-rank 0 --master-addr node0 --master-port 29500 --nproc-per-node 8 \\
      pretrain ...

Differences: no traceback or log of the launcher; the exit code is that of the first rank that failed; SIGINT, SIGTERM
and SIGUSR1 are forwarded to the ranks, which save and exit (code 0); a second Ctrl-C exits without saving, a third
kills. OMP_NUM_THREADS is cores / ranks if it is not set. On one node the ranks connect through a free port of the
loopback device.

  megapipe launch --dry-run --hosts node[01-16] --nproc-per-node 8 pretrain ...

prints instead the command of each node, the host, GPU and grid position of each rank, and which groups span nodes with
the bytes that they send in a step; it starts nothing and imports no torch. --hosts: names of the nodes, as SLURM writes
them; --slurm: as a job of launch/slurm/pretrain.sbatch. docs/launch.md

--max-restarts N restarts all ranks when one has failed, unless a restart would not help: exit codes 2 (refused), 3
(restarted twice without progress) and 130 (interrupted twice), or after a signal.

All flags: megapipe launch --torchrun-help
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megapipe.config.load import load_config
from megapipe.errors import ConfigError
from megapipe.extras.cli.frame import guarded
from megapipe.extras.cli.planning import planned
from megapipe.extras.launch.flags import Launch, read_launch
from megapipe.extras.launch.forwarder import Forwarder
from megapipe.extras.launch.places import group_traffic, places_text
from megapipe.formatting import bytes_text, count_text, text_table
from megapipe.monitor.output import outlive_output
from megapipe.monitor.process import available_cores
from megapipe.plan.run_plan import RunPlan

MOST_COMMANDS_SHOWN = 4
PRETRAINING = ("pretrain_gpt.py", "megapipe.extras.cli.pretrain", "pretrain")
ON_RANKS = ("pretrain", "verify", "evaluate", "generate", "doctor")  # subcommands accepted in place of a script
# the replicas of the parameters are the data-parallel group
NAMES = {"replicas": "dp", "expert_replicas": "copies of experts"}


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
        return launch(words)

    return guarded(run)


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


def check_script(script: str) -> None:
    """Raise ConfigError unless this is a command of megapipe that runs on ranks, or a file."""
    if script not in ON_RANKS and not Path(script).is_file():
        raise ConfigError(f"no such script {script}; give a file, or one of {', '.join(ON_RANKS)}")


def threads_of_a_rank(num_ranks: int) -> int:
    """Return the cores that this process may use, divided by the ranks."""
    return max(1, available_cores() // num_ranks)


def preview(arguments: Sequence[str]) -> str:
    """Return the commands of all nodes, the position of each rank, and the traffic between nodes; start nothing.

    arguments: those of `megapipe launch`. Raises ConfigError for everything that could not be launched or trained.
    """
    launch = read_launch(arguments)
    if not {"--module", "--no-python"} & set(launch.flags):
        check_script(launch.script)
    per_node = launch.ranks_per_node
    num_ranks = launch.num_nodes * per_node
    where = f"{count_text(num_ranks, 'rank')} on {count_text(launch.num_nodes, 'node')}, {per_node} on each"
    lines = [f"dry run: {where}; nothing is started", ""]
    lines += _commands(launch)
    if Path(launch.script).name not in PRETRAINING:
        unknown = f"{launch.script} is not pretrain_gpt.py: its grid is unknown"
        return "\n".join([*lines, "", f"{unknown}; rank r is on node r // {per_node}"])
    plan = planned(load_config(["--plan", *launch.script_arguments]), num_ranks, per_node)
    t = plan.topology
    cp = f" x cp {t.cp}" if t.cp > 1 else ""
    device = "local rank" if plan.config.training.device == "cpu" else "GPU"
    experts = f"; experts: etp {t.etp} x ep {t.ep} x {t.edp} copies x pp {t.pp}" if plan.model.has_experts else ""
    lines += ["", f"grid: tp {t.tp} x pp {t.pp} x dp {t.dp}{cp}, rank order {t.order}{experts}"]
    return "\n".join([*lines, *places_text(t, launch.names, device), "", *_traffic(plan)])


def _commands(launch: Launch) -> Iterator[str]:
    """Yield the command of sbatch, of every node, or of some nodes if they differ only in --node-rank."""
    if launch.slurm:
        script = Path(__file__).resolve().parents[3] / "launch" / "slurm" / "pretrain.sbatch"
        ranks = launch.ranks_per_node
        options = [f"--nodes={launch.num_nodes}", f"--ntasks-per-node={ranks}", f"--gpus-per-node={ranks}"]
        nodes = [f"--nodelist={','.join(launch.hosts)}"] if launch.hosts else []
        yield "command; the job's log shows the resulting srun"
        yield "  " + shlex.join(["sbatch", *options, *nodes, str(script), *launch.script_arguments])
        return
    if launch.num_nodes == 1 or launch.is_elastic:
        order = "c10d numbers the nodes by their names as text (node10 before node2), not as below"
        yield "command" if launch.num_nodes == 1 else f"command, the same on every node; {order}"
        yield "  " + shlex.join(launch.on_node(0))
        return
    yield "commands"
    last = launch.num_nodes - 1
    width = max(map(len, launch.names))
    shown = range(last + 1) if last < MOST_COMMANDS_SHOWN else [0, 1, last]
    for node in shown:
        if node == last > len(shown) - 1:
            yield f"  {'...'.ljust(width)}  the same, --node-rank 2 to {last - 1}"
        yield f"  {launch.names[node].ljust(width)}  {shlex.join(launch.on_node(node))}"


def _traffic(plan: RunPlan) -> Iterator[str]:
    """Yield a line for each kind of group."""
    found, has_network = group_traffic(plan), plan.topology.num_nodes > 1
    if not found:
        yield "traffic: none, every group has one rank"
        return
    rings = ", where rings follow the order of ranks" if has_network else ""
    yield f"traffic of a step, the most of any rank and of any node{rings}"
    rows = [("group", "ranks", "groups", "a rank sends", "groups on several nodes", "leaves a node")]
    for group in found:
        crossing = {0: "none", group.groups: "all"}.get(group.crossing, str(group.crossing))
        leaves = bytes_text(group.network_bytes) if group.crossing else "-"
        name, sent = NAMES.get(group.name, group.name), bytes_text(group.rank_bytes)
        rows.append((name, str(group.ranks), str(group.groups), sent, crossing, leaves))
    yield from text_table(rows if has_network else [row[:4] for row in rows])
    crossing_names = [NAMES.get(group.name, group.name) for group in found if group.crossing]
    if has_network:
        yield f"  over the network: {', '.join(crossing_names) or 'nothing but sums of a few numbers'}"
    if "tp" in crossing_names:
        yield "  tp spans nodes, and every layer has tp collectives: use a tp that divides the ranks of a node"
