"""Placement of ranks as text (rank -> host, device, grid position), and the traffic of groups between nodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megapipe.formatting import text_table
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.traffic import messages_to, step_bytes
from megapipe.topology import AXES, Topology, all_coordinates

SHOWN_AXES = ("pp", "dp", "cp", "tp")
MOST_RANKS_SHOWN = 32
# groups that send much in a step
SENDING = (
    "tp",
    "cp",
    "cp_a2a",
    "cp_p2p",
    "pp",
    "replicas",
    "shards",
    "instances",
    "embedding",
    "ep",
    "etp",
    "expert_replicas",
    "expert_shards",
    "expert_instances",
)


@dataclass(frozen=True)
class Box:
    """Consecutive ranks on one or more similar nodes that fill a box of the grid. places: in the order of AXES."""

    nodes: range
    ranks: range
    places: tuple[range, ...]


def places_text(topology: Topology, hosts: Sequence[str], device: str = "GPU") -> list[str]:
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
            rows.append((str(rank), hosts[topology.node_of(rank)], str(rank % per_node), *map(str, of_axes)))
    else:
        rows = [("ranks", "hosts", f"{device}s", *axes)]
        for box in boxes(topology):
            first, last, num_nodes = hosts[box.nodes[0]], hosts[box.nodes[-1]], len(box.nodes)
            names = first if num_nodes == 1 else f"{first} to {last} ({num_nodes})"
            local = box.ranks[0] % per_node
            local_ranks = range(local, local + len(box.ranks) // num_nodes)
            shown = (_range_text(box.places[AXES.index(axis)]) for axis in axes)
            rows.append((_range_text(box.ranks), names, _range_text(local_ranks), *shown))
    return list(text_table(rows))


def boxes(topology: Topology) -> list[Box]:
    """Return all ranks in order as few boxes.

    Neighbours are joined within a node along any axis, then similar nodes along one.
    """
    found: list[Box] = []
    for node in range(topology.num_nodes):
        of_node = _node_boxes(topology, node)
        if len(of_node) == 1 and found:
            before, box = found[-1], of_node[0]
            axis, num_nodes = _next_along(before, box), len(before.nodes)
            is_whole = len(before.ranks) == num_nodes * len(box.ranks)
            # a whole node continues the box if each node has an equal share of one axis
            if axis is not None and is_whole and len(before.places[axis]) == num_nodes * len(box.places[axis]):
                found[-1] = _join(before, box)
                continue
        found += of_node
    return found


def _node_boxes(topology: Topology, node: int) -> list[Box]:
    """Return the boxes of one node: single ranks, joined while any two neighbours can be."""
    per_node = topology.ranks_per_node or topology.world_size
    found = []
    for rank in range(node * per_node, min((node + 1) * per_node, topology.world_size)):
        places = tuple(range(place, place + 1) for place in topology.coordinates(rank))
        found.append(Box(range(node, node + 1), range(rank, rank + 1), places))
    while True:
        joined: list[Box] = []
        for box in found:
            if joined and _next_along(joined[-1], box) is not None:
                joined[-1] = _join(joined[-1], box)
            else:
                joined.append(box)
        if len(joined) == len(found):
            return found
        found = joined


def _next_along(box: Box, other: Box) -> int | None:
    """Return the only axis on which `other` follows `box`, all others being equal; None if it does not."""
    differing = [axis for axis, (one, two) in enumerate(zip(box.places, other.places, strict=True)) if one != two]
    if len(differing) != 1 or box.ranks.stop != other.ranks.start:
        return None
    (axis,) = differing
    return axis if box.places[axis].stop == other.places[axis].start else None


def _join(box: Box, other: Box) -> Box:
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
                        leaving[node] += count * plan.sent_bytes / plan.num_slices
        elif name == "ep":  # no ring: every rank sends to every other one
            for group in crossing:
                sent_by_one = by_pp_rank[topology.coordinates(group[0]).pp_rank][name]
                for node, here in Counter(map(topology.node_of, group)).items():
                    leaving[node] += here * sent_by_one * (len(group) - here) / (len(group) - 1)
        else:
            for group in crossing:
                for node in topology.nodes_of(group):
                    leaving[node] += by_pp_rank[topology.coordinates(group[0]).pp_rank].get(name, 0.0)
        network_bytes = max(leaving.values(), default=0.0)
        found.append(GroupTraffic(name, len(groups[0]), len(groups), len(crossing), most, network_bytes))
    return tuple(found)
