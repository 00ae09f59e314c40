"""usage: megapipe launch [flags of torchrun] SCRIPT [flags of the script]

Starts SCRIPT on several ranks, as torchrun does and with torchrun's flags. SCRIPT is a Python file, or a command of
megapipe that runs on ranks (pretrain, verify, evaluate, serve, generate, doctor):

  megapipe launch --nproc-per-node 8 pretrain --config configs/quickstart.yaml
  megapipe launch --nnodes 2 --node-rank 0 --master-addr node0 --master-port 29500 --nproc-per-node 8 \\
      pretrain ...

Differences: no traceback or log of the launcher; the exit code is that of the first rank that failed; SIGINT, SIGTERM,
SIGHUP and SIGUSR1 are forwarded to the ranks, which save and exit (code 0); a second Ctrl-C exits without saving, a
third kills. OMP_NUM_THREADS is cores / ranks if it is not set. On one node the ranks connect through a free port of the
loopback device.

  megapipe launch --dry-run --hosts node[01-16] --nproc-per-node 8 pretrain ...

prints instead the command of each node, the host, GPU and grid position of each rank, and which groups span nodes with
the bytes that they send in a step; it starts nothing and imports no torch. --hosts: names of the nodes, as SLURM writes
them; --slurm: as a job of launch/slurm/pretrain.sbatch. docs/launch.md

--ranks-per-gpu N lets N ranks share each GPU, to check a grid on one card; it is slow. docs/one_gpu.md

--max-restarts N restarts all ranks when one has failed, unless a restart would not help: exit codes 2 (refused), 3
(restarted twice without progress) and 130 (interrupted twice), or after a signal.

All flags: megapipe launch --torchrun-help
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megapipe.assembly.datasets import planned
from megapipe.config.fields import nearest
from megapipe.config.load import load_config
from megapipe.environment import RANKS_PER_GPU
from megapipe.errors import ConfigError
from megapipe.extras.cli.frame import guarded
from megapipe.extras.launch.flags import Launch, read_launch
from megapipe.extras.launch.forwarder import Forwarder
from megapipe.formatting import bytes_text, count_text, text_table
from megapipe.monitor.process import available_cores
from megapipe.monitor.signals import outlive_output
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.traffic import messages_to, step_bytes
from megapipe.topology import AXES, Topology, all_coordinates

MOST_COMMANDS_SHOWN = 4
PRETRAINING = ("pretrain_gpt.py", "megapipe.extras.cli.pretrain", "pretrain")
# subcommands accepted in place of a script
ON_RANKS = ("pretrain", "verify", "evaluate", "serve", "generate", "doctor")
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
        commands = f"{', '.join(ON_RANKS)}{nearest(script, ON_RANKS)}"
        raise ConfigError(f"no such script {script}; give a file, or one of {commands}")
    if Path(script).suffix in (".yaml", ".yml"):
        raise ConfigError(f"{script} is a configuration, not a script; use pretrain --config {script}")


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
    on_a_gpu = f", {launch.ranks_per_gpu} share each GPU and its memory" if launch.ranks_per_gpu > 1 else ""
    lines = [f"dry run: {where}{on_a_gpu}; nothing is started", ""]
    lines += _commands(launch)
    if Path(launch.script).name not in PRETRAINING:
        unknown = f"{launch.script} is not pretrain_gpt.py: its grid is unknown"
        return "\n".join([*lines, "", f"{unknown}; rank r is on node r // {per_node}"])
    plan = planned(load_config(["--plan", *launch.script_arguments]), num_ranks, per_node)
    t = plan.topology
    cp = f" x cp {t.cp}" if t.cp > 1 else ""
    device, shared = ("local rank", 1) if plan.config.training.device == "cpu" else ("GPU", launch.ranks_per_gpu)
    experts = f"; experts: etp {t.etp} x ep {t.ep} x {t.edp} copies x pp {t.pp}" if plan.model.has_experts else ""
    lines += ["", f"grid: tp {t.tp} x pp {t.pp} x dp {t.dp}{cp}, rank order {t.order}{experts}"]
    return "\n".join([*lines, *places_text(t, launch.names, device, shared), "", *_traffic(plan)])


def _commands(launch: Launch) -> Iterator[str]:
    """Yield the command of sbatch, of every node, or of some nodes if they differ only in --node-rank."""
    if launch.slurm:
        script = Path(__file__).resolve().parents[3] / "launch" / "slurm" / "pretrain.sbatch"
        ranks = launch.ranks_per_node
        gpus = ranks // launch.ranks_per_gpu
        options = [f"--nodes={launch.num_nodes}", f"--ntasks-per-node={ranks}", f"--gpus-per-node={gpus}"]
        options += [f"--export=ALL,{RANKS_PER_GPU}={launch.ranks_per_gpu}"] if gpus < ranks else []
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


# ----------------------------------------------------------------------------------------------------- where ranks run

SHOWN_AXES = ("pp", "dp", "cp", "tp")
MOST_RANKS_SHOWN = 32
EXCHANGES = ("ep", "ep_nodes")  # groups with all-to-alls
# groups that send much in a step
SENDING = (
    "tp cp cp_a2a cp_p2p pp replicas shards instances embedding ep ep_nodes ep_places etp "
    "expert_replicas expert_shards expert_instances"
).split()


@dataclass(frozen=True)
class Box:
    """Consecutive ranks on one or more similar nodes that fill a box of the grid. places: in the order of AXES."""

    nodes: range
    ranks: range
    places: tuple[range, ...]


def places_text(topology: Topology, hosts: Sequence[str], device: str = "GPU", ranks_per_device: int = 1) -> list[str]:
    """Return the table of all ranks, or of boxes of ranks in a large world. hosts: by node. device: column title."""
    axes = [axis for axis in SHOWN_AXES if topology.size(axis) > 1 or axis in ("pp", "dp", "tp")]
    per_node = topology.ranks_per_node or topology.world_size
    if topology.world_size <= MOST_RANKS_SHOWN:
        of_experts = ("ep", "etp") if topology.ep > 1 or topology.etp != topology.tp else ()
        rows = [("rank", "host", device, *axes, *of_experts)]
        for rank, place in all_coordinates(topology):
            of_axes = [place[AXES.index(axis)] for axis in axes]
            if of_experts:
                of_axes += divmod(topology.expert_rank(rank), topology.etp)
            rows.append(
                (str(rank), hosts[topology.node_of(rank)], str(rank % per_node // ranks_per_device), *map(str, of_axes))
            )
    else:
        rows = [("ranks", "hosts", f"{device}s", *axes)]
        for box in boxes(topology):
            first, last, num_nodes = hosts[box.nodes[0]], hosts[box.nodes[-1]], len(box.nodes)
            names = first if num_nodes == 1 else f"{first} to {last} ({num_nodes})"
            local = box.ranks[0] % per_node
            last_local = local + len(box.ranks) // num_nodes - 1
            devices = range(local // ranks_per_device, last_local // ranks_per_device + 1)
            shown = (_range_text(box.places[AXES.index(axis)]) for axis in axes)
            rows.append((_range_text(box.ranks), names, _range_text(devices), *shown))
    return list(text_table(rows))


def boxes(topology: Topology) -> list[Box]:
    """Return all ranks in order as few boxes.

    Neighbours are joined within a node along any axis, then similar nodes along one.
    """
    found = []
    for rank, place in all_coordinates(topology):
        node, places = topology.node_of(rank), tuple(range(at, at + 1) for at in place)
        found.append(Box(range(node, node + 1), range(rank, rank + 1), places))
    while len(joined := _join(found, lambda before, box: before.nodes == box.nodes)) < len(found):
        found = joined
    of_node = Counter(box.nodes for box in found)

    def continues(before: Box, box: Box) -> bool:  # with a whole node, if each node has an equal share of one axis
        return of_node[box.nodes] == 1 and len(before.ranks) == len(before.nodes) * len(box.ranks)

    return _join(found, continues)


def _join(found: Iterable[Box], may_join: Callable[[Box, Box], bool]) -> list[Box]:
    """Return the boxes with each joined to the one before it where that is one box and may be."""
    joined: list[Box] = []
    for box in found:
        both = _joined(joined[-1], box) if joined and may_join(joined[-1], box) else None
        if both is None:
            joined.append(box)
        else:
            joined[-1] = both
    return joined


def _joined(box: Box, other: Box) -> Box | None:
    """Return both as one box if `other` follows `box` on a single axis, all others being equal; None if it does not."""
    differing = [(one, two) for one, two in zip(box.places, other.places, strict=True) if one != two]
    is_next = len(differing) == 1 and differing[0][0].stop == differing[0][1].start
    if not is_next or box.ranks.stop != other.ranks.start:
        return None
    nodes, ranks = range(box.nodes.start, other.nodes.stop), range(box.ranks.start, other.ranks.stop)
    places = tuple(range(one.start, two.stop) for one, two in zip(box.places, other.places, strict=True))
    return Box(nodes, ranks, places)


def _range_text(span: range) -> str:
    return str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}"


@dataclass(frozen=True)
class GroupTraffic:
    """The traffic of one kind of group in a step."""

    name: str
    ranks: int  # of one such group
    groups: int
    crossing: int  # groups that have ranks on several nodes
    rank_bytes: float  # sent by one rank, the maximum over ranks
    # sent by a node to others, the maximum over nodes, if rings follow the order of a group's ranks: each of its nodes
    # then sends to one other node what a rank sends to the next; ep has all-to-alls
    network_bytes: float


def group_traffic(plan: RunPlan) -> tuple[GroupTraffic, ...]:
    """Return the traffic of all kinds of groups that have more than one rank and send something."""
    topology = plan.topology
    by_pp_rank = [step_bytes(plan, pp_rank) for pp_rank in range(topology.pp)]
    found = []
    for name in SENDING:
        groups = [group for group in topology.groups(name) if len(group) > 1]
        most = max(sent.get(name, 0.0) for sent in by_pp_rank)
        if not groups or not most:
            continue
        crossing = [group for group in groups if len(topology.nodes_of(group)) > 1]
        leaving: defaultdict[int, float] = defaultdict(float)  # bytes by node
        if name == "pp":
            to = [messages_to(plan, pp_rank) for pp_rank in range(topology.pp)]
            for rank in range(topology.world_size):
                pp_rank, node = topology.coordinates(rank).pp_rank, topology.node_of(rank)
                for other, count in to[pp_rank].items():
                    if topology.node_of(rank + (other - pp_rank) * topology.strides["pp"]) != node:
                        leaving[node] += count * plan.message_bytes / plan.num_slices
        else:
            for group in crossing:
                sent_by_one = by_pp_rank[topology.coordinates(group[0]).pp_rank].get(name, 0.0)
                for node, here in Counter(map(topology.node_of, group)).items():
                    # every rank of an all-to-all sends to every other one, one rank of a ring to another node
                    away = len(group) - here
                    leaving[node] += here * sent_by_one * away / (len(group) - 1) if name in EXCHANGES else sent_by_one
        network_bytes = max(leaving.values(), default=0.0)
        found.append(GroupTraffic(name, len(groups[0]), len(groups), len(crossing), most, network_bytes))
    return tuple(found)
