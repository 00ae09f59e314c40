"""`megapipe launch --dry-run`: the commands of all nodes, the position of each rank, and the traffic between nodes.

Starts nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from megapipe.config.load import load_config
from megapipe.errors import ConfigError
from megapipe.extras.cli.pretrain import with_vocabulary
from megapipe.extras.launch.flags import Launch, read_launch
from megapipe.extras.launch.node_traffic import GroupTraffic, group_traffic
from megapipe.extras.launch.places import places_text
from megapipe.formatting import bytes_text, text_table
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan

MOST_COMMANDS_SHOWN = 4
PRETRAINING = ("pretrain_gpt.py", "megapipe.extras.cli.pretrain")
NAMES = {"replicas": "dp"}  # the replicas of the parameters are the data-parallel group


def preview(arguments: Sequence[str]) -> str:
    """Return the whole text. Raises ConfigError for everything that could not be launched or trained.

    arguments: the words after `megapipe launch`.
    """
    launch = read_launch(arguments)
    if not Path(launch.script).is_file() and "--module" not in launch.flags and "--no-python" not in launch.flags:
        raise ConfigError(f"megapipe launch: no such script {launch.script}")
    num_ranks = launch.num_nodes * launch.ranks_per_node
    nodes = "1 node" if launch.num_nodes == 1 else f"{launch.num_nodes} nodes"
    lines = [
        (
            f"dry run: {num_ranks} rank{'s' * (num_ranks > 1)} on {nodes}, {launch.ranks_per_node} on each; nothing is "
            "started"
        ),
        "",
    ]
    lines += _slurm_commands(launch) if launch.slurm else _commands(launch)
    if Path(launch.script).name not in PRETRAINING:
        lines += [
            "",
            (
                f"{launch.script} is not pretrain_gpt.py: its grid is unknown; rank r is on node r // "
                f"{launch.ranks_per_node}"
            ),
        ]
        return "\n".join(lines)
    plan = _plan(launch, num_ranks)
    return "\n".join([*lines, "", *_grid(plan, launch), "", *_traffic(plan)])


def _plan(launch: Launch, num_ranks: int) -> RunPlan:
    loaded = load_config(["--plan", *launch.script_arguments])
    return resolve(with_vocabulary(loaded.config), num_ranks, launch.ranks_per_node)


def _commands(launch: Launch) -> Iterator[str]:
    """Yield the command of every node, or of some if they differ only in --node-rank."""
    if launch.num_nodes == 1:
        yield "command"
        yield "  " + shlex.join(launch.on_node(0))
        return
    if launch.is_elastic:
        yield (
            "command, the same on every node; c10d numbers the nodes by their names as text (node10 before node2), "
            "not as below"
        )
        yield "  " + shlex.join(launch.on_node(0))
        return
    yield "commands"
    nodes = range(launch.num_nodes)
    width = max(map(len, launch.names))
    shown = nodes if launch.num_nodes <= MOST_COMMANDS_SHOWN else [0, 1, launch.num_nodes - 1]
    for node in shown:
        if node == launch.num_nodes - 1 > len(shown) - 1:
            yield f"  {'...'.ljust(width)}  the same, --node-rank 2 to {launch.num_nodes - 2}"
        yield f"  {launch.names[node].ljust(width)}  {shlex.join(launch.on_node(node))}"


def _slurm_commands(launch: Launch) -> Iterator[str]:
    script = Path(__file__).resolve().parents[3] / "launch" / "slurm" / "pretrain.sbatch"
    options = [
        f"--nodes={launch.num_nodes}",
        f"--ntasks-per-node={launch.ranks_per_node}",
        f"--gpus-per-node={launch.ranks_per_node}",
    ]
    nodes = [f"--nodelist={','.join(launch.hosts)}"] if launch.hosts else []
    yield "command; the job's log shows the resulting srun"
    yield "  " + shlex.join(["sbatch", *options, *nodes, str(script), *launch.script_arguments])


def _grid(plan: RunPlan, launch: Launch) -> Iterator[str]:
    t = plan.topology
    cp = f" x cp {t.cp}" if t.cp > 1 else ""
    yield f"grid: tp {t.tp} x pp {t.pp} x dp {t.dp}{cp}, rank order {t.order}"
    device = "local rank" if plan.config.training.device == "cpu" else "GPU"
    yield from places_text(t, launch.names, device)


def _traffic(plan: RunPlan) -> Iterator[str]:
    """Yield a line for each kind of group."""
    found, several = group_traffic(plan), plan.topology.num_nodes > 1
    if not found:
        yield "traffic: none, every group has one rank"
        return
    head = ("group", "ranks", "groups", "a rank sends") + (
        ("groups on several nodes", "leaves a node") if several else ()
    )
    yield "traffic of a step, the most of any rank and of any node" + (
        ", where rings follow the order of ranks" if several else ""
    )
    yield from text_table([head, *(_row(group, several) for group in found)])
    if several:
        crossing = [NAMES.get(group.name, group.name) for group in found if group.crossing]
        yield f"  over the network: {', '.join(crossing) or 'nothing but sums of a few numbers'}"
    if "tp" in [group.name for group in found if group.crossing]:
        yield (
            "  tp spans nodes, and every layer has tp collectives: a tp that divides the ranks of a node keeps them "
            "inside the node"
        )


def _row(group: GroupTraffic, several_nodes: bool) -> tuple[str, ...]:
    row = NAMES.get(group.name, group.name), str(group.ranks), str(group.groups), bytes_text(group.rank_bytes)
    if not several_nodes:
        return row
    crossing = "none" if not group.crossing else "all" if group.crossing == group.groups else str(group.crossing)
    return *row, crossing, bytes_text(group.network_bytes) if group.crossing else "-"
