"""Traffic of process groups between nodes: which groups span nodes, and how much they send in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from megapipe.plan.run_plan import RunPlan
from megapipe.plan.traffic import message_bytes, messages_to, step_bytes

SENDING = ("tp", "pp", "replicas", "embedding")  # groups that send much in a step


@dataclass(frozen=True)
class GroupTraffic:
    """One kind of group. ranks: of one such group. crossing: groups that have ranks on several nodes.

    rank_bytes: sent by one rank in a step, the maximum over ranks. network_bytes: sent by a node to others, the maximum
    over nodes, if rings follow the order of a group's ranks: each of its nodes then sends to one other node what a rank
    sends to the next.
    """

    name: str
    ranks: int
    groups: int
    crossing: int
    rank_bytes: float
    network_bytes: float


def group_traffic(plan: RunPlan) -> tuple[GroupTraffic, ...]:
    """Return the traffic of all kinds of groups that have more than one rank and send something."""
    by_pp_rank = [step_bytes(plan, pp_rank) for pp_rank in range(plan.topology.pp)]
    found = []
    for name in SENDING:
        groups = [group for group in plan.topology.groups(name) if len(group) > 1]
        most = max(sent[name] for sent in by_pp_rank)
        if groups and most:
            crossing = [group for group in groups if len(plan.topology.nodes_of(group)) > 1]
            leaving = (
                _messages_leaving(plan)
                if name == "pp"
                else _rings_leaving(plan, crossing, [sent[name] for sent in by_pp_rank])
            )
            found.append(
                GroupTraffic(name, len(groups[0]), len(groups), len(crossing), most, max(leaving.values(), default=0.0))
            )
    return tuple(found)


def _rings_leaving(plan: RunPlan, groups: list[tuple[int, ...]], bytes_of: list[float]) -> Mapping[int, float]:
    """Return the bytes that leave each node. bytes_of: sent by a rank, by pp_rank."""
    leaving: defaultdict[int, float] = defaultdict(float)
    for group in groups:
        sent = bytes_of[plan.topology.coordinates(group[0]).pp_rank]
        for node in plan.topology.nodes_of(group):
            leaving[node] += sent
    return leaving


def _messages_leaving(plan: RunPlan) -> Mapping[int, float]:
    topology, size = plan.topology, message_bytes(plan)
    to = [messages_to(plan, pp_rank) for pp_rank in range(topology.pp)]
    leaving: defaultdict[int, float] = defaultdict(float)
    for rank in range(topology.world_size):
        pp_rank, node = topology.coordinates(rank).pp_rank, topology.node_of(rank)
        for other, count in to[pp_rank].items():
            if topology.node_of(rank + (other - pp_rank) * topology.strides["pp"]) != node:
                leaving[node] += count * size
    return leaving
