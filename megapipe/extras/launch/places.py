"""The nodes on which the ranks of a grid run, as a table of few rows, and the bytes that its groups send between nodes
in a step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megapipe.formatting import text_table
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.traffic import messages_to, step_bytes
from megapipe.topology import AXES, Topology, all_coordinates

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
