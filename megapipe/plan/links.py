"""The links that a plan's groups of ranks communicate over."""

from __future__ import annotations

from functools import cache

from megapipe.plan.hardware import Hardware, Link
from megapipe.plan.layer_time import ContextLinks, ExpertLinks
from megapipe.plan.run_plan import RunPlan
from megapipe.topology import Topology


@cache
def ring_link(topology: Topology, kind: str, node: Link, network: Link) -> Link:
    """Return the link of a ring over a kind of group: between nodes each of its members in a node adds another network
    card.
    """
    if not topology.crosses_nodes(kind):
        return node
    group = topology.group_of(kind, 0)
    together = sum(topology.node_of(rank) == topology.node_of(group[0]) for rank in group)
    rate = min(together * network.bytes_per_second, node.bytes_per_second)
    return Link(max(rate, network.bytes_per_second), network.latency_seconds)


@cache
def context_links(topology: Topology, node: Link, network: Link) -> ContextLinks:
    """Return the links of the messages over cp on a grid. A message to another node takes the card of its rank; of an
    exchange only a part goes there.
    """

    def exchange(kind: str) -> Link:
        if not topology.crosses_nodes(kind):
            return node
        ranks = len(topology.group_of(kind, 0))
        share = (ranks - topology.least_on_a_node(kind)) / (ranks - 1)
        return Link(min(network.bytes_per_second / share, node.bytes_per_second), network.latency_seconds)

    ring = "cp" if topology.cp_inner == 1 else "cp_p2p"
    link = network if topology.crosses_nodes(ring) else node
    return ContextLinks(link, exchange("cp"), exchange("cp_a2a"))


def expert_links(plan: RunPlan, hardware: Hardware) -> ExpertLinks | None:
    """Return the links of the messages of experts; None for a model without."""
    return expert_links_of(plan.topology, hardware.node, hardware.network) if plan.model.has_experts else None


@cache
def expert_links_of(topology: Topology, node: Link, network: Link) -> ExpertLinks:
    """Return the links of the messages of experts on a grid."""
    etp = ring_link(topology, "etp", node, network)
    return ExpertLinks(etp, node, network, topology.ep, topology.least_on_a_node("ep"))
