"""Placement of ranks as text: rank -> host, device and grid position, rank by rank or as boxes of equal structure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megapipe.formatting import text_table
from megapipe.topology import AXES, Topology, all_coordinates

SHOWN_AXES = ("pp", "dp", "cp", "tp")
MOST_RANKS_SHOWN = 32
Range = tuple[int, int]  # first and last


@dataclass(frozen=True)
class Box:
    """Consecutive ranks on one or more similar nodes that fill a box of the grid.

    nodes, ranks, places (in the order of AXES): ranges.
    """

    nodes: Range
    ranks: Range
    places: tuple[Range, ...]

    @property
    def num_nodes(self) -> int:
        return self.nodes[1] - self.nodes[0] + 1


def places_text(topology: Topology, hosts: Sequence[str], device: str = "GPU") -> list[str]:
    """Return the table of all ranks, or of boxes of ranks in a large world.

    hosts: names of the nodes. device: title of the column of local ranks.
    """
    axes = [axis for axis in SHOWN_AXES if topology.size(axis) > 1 or axis in ("pp", "dp", "tp")]
    if topology.world_size <= MOST_RANKS_SHOWN:
        rows = [("rank", "host", device, *axes), *_rank_rows(topology, hosts, axes)]
    else:
        rows = [("ranks", "hosts", f"{device}s", *axes), *_box_rows(topology, hosts, axes)]
    return list(text_table(rows))


def boxes(topology: Topology) -> list[Box]:
    """Return all ranks in order as few boxes.

    Neighbours are joined within a node along any axis, then similar nodes along one.
    """
    found: list[Box] = []
    for node in range(topology.num_nodes):
        of_node = _of_node(topology, node)
        if len(of_node) == 1 and found and _continues(found[-1], of_node[0]):
            found[-1] = _join(found[-1], of_node[0])
        else:
            found += of_node
    return found


def _rank_rows(topology: Topology, hosts: Sequence[str], axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for rank, place in all_coordinates(topology):
        local = rank % (topology.ranks_per_node or topology.world_size)
        yield (str(rank), hosts[topology.node_of(rank)], str(local), *(str(place[AXES.index(axis)]) for axis in axes))


def _box_rows(topology: Topology, hosts: Sequence[str], axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    per_node = topology.ranks_per_node or topology.world_size
    for box in boxes(topology):
        first, last = hosts[box.nodes[0]], hosts[box.nodes[1]]
        names = first if box.num_nodes == 1 else f"{first} to {last} ({box.num_nodes})"
        width = _width(box.ranks) // box.num_nodes
        local = box.ranks[0] % per_node
        places = (_range_text(box.places[AXES.index(axis)]) for axis in axes)
        yield (_range_text(box.ranks), names, _range_text((local, local + width - 1)), *places)


def _of_node(topology: Topology, node: int) -> list[Box]:
    """Return the boxes of one node: single ranks, joined while any two neighbours can be."""
    per_node = topology.ranks_per_node or topology.world_size
    ranks = range(node * per_node, min((node + 1) * per_node, topology.world_size))
    found = [
        Box((node, node), (rank, rank), tuple((place, place) for place in topology.coordinates(rank))) for rank in ranks
    ]
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


def _continues(box: Box, node: Box) -> bool:
    """Return True if a whole node continues `box`: each node has an equal share of one axis."""
    axis = _next_along(box, node)
    if axis is None or _width(box.ranks) != box.num_nodes * _width(node.ranks):
        return False
    return _width(box.places[axis]) == box.num_nodes * _width(node.places[axis])


def _next_along(box: Box, other: Box) -> int | None:
    """Return the only axis on which `other` follows `box`, all others being equal; None if it does not."""
    differing = [axis for axis, (one, two) in enumerate(zip(box.places, other.places, strict=True)) if one != two]
    if (
        len(differing) != 1
        or box.ranks[1] + 1 != other.ranks[0]
        or box.places[differing[0]][1] + 1 != other.places[differing[0]][0]
    ):
        return None
    return differing[0]


def _join(box: Box, other: Box) -> Box:
    places = tuple((one[0], two[1]) for one, two in zip(box.places, other.places, strict=True))
    return Box((box.nodes[0], other.nodes[1]), (box.ranks[0], other.ranks[1]), places)


def _width(span: Range) -> int:
    return span[1] - span[0] + 1


def _range_text(span: Range) -> str:
    return str(span[0]) if span[0] == span[1] else f"{span[0]}-{span[1]}"
