"""The numbers of rows of experts on a device without values, where nothing can be read from the router."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from megapipe.comm.groups import ExpertGroups
from megapipe.model import dispatch
from megapipe.model.dispatch import Routes, even_parts
from megapipe.model.node_dispatch import NodeRoutes


@contextmanager
def rows_of_experts() -> Iterator[None]:
    """Let `dispatch.to_host` return even numbers inside, the same from every rank.

    The tensor is read, too, so that whoever watches the device sees the host wait for it.
    """
    routes, to_nodes, read = Routes.of, NodeRoutes.of_slots, dispatch.to_host
    expected: list[int] = []  # what the device would say next

    def routes_of(counts: Tensor, num_rows: int, groups: ExpertGroups) -> Routes:
        own, held = even_parts(num_rows, counts.shape[0]), counts.shape[0] // groups.ep.size
        here = own[groups.ep.rank * held :][:held]
        expected[:] = own + here * (groups.ep.size * groups.etp.size)
        return routes(counts, num_rows, groups)

    def routes_to_nodes(counts: Tensor, slots: Tensor, groups: ExpertGroups, adds_in_node: bool) -> NodeRoutes:
        own, tokens, nodes = even_parts(slots.numel(), counts.shape[0]), slots.shape[0], groups.nodes.size
        of_node, held = counts.shape[0] // nodes, counts.shape[0] // groups.ep.size
        pairs = tuple(min(tokens, sum(own[node * of_node :][:of_node])) for node in range(nodes))
        here = (*own[groups.nodes.rank * of_node :][:of_node], pairs[groups.nodes.rank])
        of_rank = own[groups.ep.rank * held :][:held]
        expected[:] = own + pairs + here * nodes + of_rank * (groups.ep.size * groups.etp.size)
        return to_nodes(counts, slots, groups, adds_in_node)

    def to_host(numbers: Tensor) -> list[int]:
        found = read(numbers)
        if len(found) != len(expected):
            raise ValueError(f"the host reads {len(found)} numbers of rows; {len(expected)} are known")
        return list(expected)

    with (
        patch.object(Routes, "of", routes_of),
        patch.object(NodeRoutes, "of_slots", routes_to_nodes),
        patch.object(dispatch, "to_host", to_host),
    ):
        yield
