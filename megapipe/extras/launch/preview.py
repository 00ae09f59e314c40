"""A preview of `megapipe launch`: the command of each node or of sbatch, the grid, its places and its traffic."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import megapipe
from megapipe.assembly.datasets import planned
from megapipe.config.fields import nearest
from megapipe.config.load import load_config
from megapipe.environment import RANKS_PER_GPU
from megapipe.errors import ConfigError
from megapipe.extras.launch import flags
from megapipe.extras.launch.flags import Launch, read_launch
from megapipe.extras.launch.places import group_traffic, places_text
from megapipe.formatting import bytes_text, count_text, grid_text, text_table
from megapipe.plan.run_plan import RunPlan

MOST_COMMANDS_SHOWN = 4
PRETRAINING = ("pretrain_gpt.py", "megapipe.extras.cli.pretrain", "pretrain")
# subcommands accepted in place of a script
ON_RANKS = ("pretrain", "verify", "evaluate", "generate", "doctor")
# the replicas of the parameters are the data-parallel group
NAMES = {"replicas": "dp", "expert_replicas": "copies of experts"}


def check_script(script: str) -> None:
    """Raise ConfigError unless this is a command of megapipe that runs on ranks, or a file."""
    if script not in ON_RANKS and not Path(script).is_file():
        commands = f"{', '.join(ON_RANKS)}{nearest(script, ON_RANKS)}"
        raise ConfigError(f"no such script {script}; give a file, or one of {commands}")
    if Path(script).suffix in (".yaml", ".yml"):
        raise ConfigError(f"{script} is a configuration, not a script; use pretrain --config {script}")


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
    on_a_gpu = f", {launch.ranks_per_gpu} share each GPU and its memory" if launch.ranks_per_gpu > 1 else ""
    lines = [f"dry run: {where}{on_a_gpu}; nothing is started", ""]
    lines += _commands(launch)
    if Path(launch.script).name not in PRETRAINING:
        unknown = f"{launch.script} is not pretrain_gpt.py: its grid is unknown"
        return "\n".join([*lines, "", f"{unknown}; rank r is on node r // {per_node}"])
    plan = planned(load_config(["--plan", *launch.script_arguments]), num_ranks, per_node)
    t = plan.topology
    device, shared = ("local rank", 1) if plan.config.training.device == "cpu" else ("GPU", launch.ranks_per_gpu)
    experts = f"; experts: {t.experts_text}" if plan.model.has_experts else ""
    lines += ["", f"grid: {grid_text(t.tp, t.pp, t.dp, t.cp)}, rank order {t.order}{experts}"]
    return "\n".join([*lines, *places_text(t, launch.names, device, shared), "", *_traffic(plan)])


def _commands(launch: Launch) -> Iterator[str]:
    """Yield the command of sbatch, of every node, or of some nodes if they differ only in --node-rank."""
    if launch.slurm:
        yield "command; the job's log shows the resulting srun"
        yield "  " + shlex.join(sbatch_command(launch))
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


def sbatch_command(launch: Launch) -> list[str]:
    """Return the command that submits a launch as a job of SLURM, after the variable with the package's folder.

    Raises ConfigError for what the job's script does not start or read.
    """
    if Path(launch.script).name not in PRETRAINING:
        raise ConfigError(f"--slurm submits pretraining, not {launch.script}: use megapipe launch --slurm ... pretrain")
    unread = sorted(launch.flags.keys() - {"--nnodes", "--nproc-per-node"})
    if unread:
        raise ConfigError(f"--slurm: the job's script does not read {', '.join(unread)}; omit them (docs/launch.md)")
    script = Path(flags.__file__).parent / "slurm" / "pretrain.sbatch"
    ranks = launch.ranks_per_node
    gpus = ranks // launch.ranks_per_gpu
    options = [f"--nodes={launch.num_nodes}", f"--ntasks-per-node={ranks}", f"--gpus-per-node={gpus}"]
    options += [f"--export=ALL,{RANKS_PER_GPU}={launch.ranks_per_gpu}"] if gpus < ranks else []
    options += [f"--nodelist={','.join(launch.hosts)}"] if launch.hosts else []
    root = Path(megapipe.__file__).parents[1]
    return [f"MEGAPIPE_ROOT={root}", "sbatch", *options, str(script), *launch.script_arguments]


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
