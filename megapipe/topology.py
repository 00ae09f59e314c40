"""The grid of ranks: global rank <-> (tp, cp, dp, pp), every process group as a list of ranks, and nodes.

No other module computes a rank. World = tp x cp x pp x dp; `order` names the axes from the fastest-varying to the
slowest, so with "tp-cp-dp-pp" (Megatron's order) tp peers are neighbours and pipeline peers are far apart:

    Topology(tp=2, cp=1, dp=2, pp=2)     tp groups (0 1) (2 3) (4 5) (6 7)     dp groups (0 2) (1 3) (4 6) (5 7)
                                         pp groups (0 4) (1 5) (2 6) (3 7)     model  (0 1 4 5) (2 3 6 7)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.errors import ConfigError
from megapipe.formatting import one_of

AXES = ("tp", "cp", "dp", "pp")
DEFAULT_ORDER = "tp-cp-dp-pp"

# axes along which the members of a group differ; 'embedding', 'kv', 'cp_a2a' and 'cp_p2p' use a part of an axis, and so
# do the 'replicas' of a mirrored pipeline
GROUP_AXES: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    # cp as two levels: consecutive ranks exchange heads for positions, the ranks at the same place in each form a ring
    "cp_a2a": ("cp",),
    "cp_p2p": ("cp",),
    "pp": ("pp",),
    "dp": ("dp",),
    "dp_cp": ("dp", "cp"),  # shards of a global batch
    # ranks that hold the same parameters: gradients are summed and the optimizer is sharded over this group
    "replicas": ("dp", "cp"),
    # replicas as two levels: consecutive ones hold a shard each, those at the same place in each instance the same one
    "shards": ("dp", "cp"),
    "instances": ("dp", "cp"),
    "model": ("tp", "pp"),  # one whole copy of the model, two in a mirrored pipeline
    "embedding": ("pp",),  # first and last pp_rank of a pipeline: tied input and output embeddings are summed over it
    "kv": ("tp",),  # tp neighbours that hold the same KV heads
    # the ranks of a pp_rank as a second grid, for experts: etp varies fastest, then ep, then the experts' replicas
    "etp": ("tp", "cp", "dp"),  # ranks that share every expert
    "ep": ("tp", "cp", "dp"),  # ranks among which the experts of a layer are divided
    # ep as two levels: the ranks of one node, and those at the same place in every node
    "ep_places": ("tp", "cp", "dp"),
    "ep_nodes": ("tp", "cp", "dp"),
    "expert_replicas": ("tp", "cp", "dp"),  # ranks that hold the same experts, doubled in a mirrored pipeline
    "expert_shards": ("tp", "cp", "dp"),  # those as two levels, like 'shards' and 'instances'
    "expert_instances": ("tp", "cp", "dp"),
    "world": AXES,
}
GROUP_NAMES = tuple(GROUP_AXES)
EXPERT_GROUPS = ("etp", "ep", "expert_replicas")
# levels of a group: the group that is divided, and whether members are consecutive in it
LEVELS = {
    "shards": ("replicas", True),
    "instances": ("replicas", False),
    "expert_shards": ("expert_replicas", True),
    "expert_instances": ("expert_replicas", False),
    "ep_places": ("ep", True),
    "ep_nodes": ("ep", False),
}


class Coordinates(NamedTuple):
    """A rank's index on each axis."""

    tp_rank: int
    cp_rank: int
    dp_rank: int
    pp_rank: int


@dataclass(frozen=True)
class Topology:
    """The grid of ranks.

    Raises ConfigError for sizes below 1, an order that is not a permutation, nodes that are not full, a tp group across
    nodes (unless allow_tp_across_nodes), an odd number of ranks in a mirrored pipeline, a grid of experts that does not
    divide the ranks of a pp_rank, a level of cp that does not divide it, and instances that do not divide the replicas.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    order: str = DEFAULT_ORDER
    ranks_per_node: int | None = None  # consecutive global ranks share a node; None: one node
    allow_tp_across_nodes: bool = False
    kv_replicas: int = 1  # tp neighbours that hold the same KV heads (tp / number of query groups if tp is larger)
    mirrored_pipeline: bool = False  # pp_ranks r and pp - 1 - r hold the same stages (DualPipe) and are `replicas`
    ep: int = 1  # ranks among which the experts of a layer are divided
    expert_tp: int | None = None  # ranks that share every expert; None: tp
    cp_inner: int = 1  # consecutive cp ranks of a 'cp_a2a' group
    num_instances: int = 1  # of the sharded optimizer, into which the replicas are divided (HSDP)
    divides_ep: bool = False  # into nodes and the places in each: the dispatcher that sends a token once to a node

    @property
    def experts_text(self) -> str:
        """The grid of the experts in words: 'etp 1 x ep 4 x 2 copies x pp 1'."""
        return f"etp {self.etp} x ep {self.ep} x {self.edp} copies x pp {self.pp}"

    @classmethod
    def of_world(cls, world_size: int, *, tp: int = 1, cp: int = 1, pp: int = 1, **options: Any) -> Topology:
        """Return the topology with dp = world_size / (tp x cp x pp). Raises ConfigError if that is not an integer."""
        replica = tp * cp * pp
        if replica < 1 or world_size < 1 or world_size % replica:
            fitting = max(1, round(world_size / max(replica, 1))) * max(replica, 1)
            raise ConfigError(
                f"a world of {world_size} ranks cannot hold tensor {tp} x context {cp} x pipeline {pp}: the world size "
                f"must be a multiple of {replica}; start {fitting} ranks or change --tensor-model-parallel-size, "
                "--context-parallel-size or --pipeline-model-parallel-size"
            )
        return cls(tp, cp, pp, world_size // replica, **options)

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.size(axis) < 1:
                raise ConfigError(f"the size of axis {axis} is {self.size(axis)}; every axis has at least one rank")
        if sorted(self.order.split("-")) != sorted(AXES):
            rule = f"must name each of tp, cp, dp and pp once, fastest first, such as {DEFAULT_ORDER!r}"
            raise ConfigError(f"--rank-order {self.order!r} {rule}")
        if self.kv_replicas < 1 or self.tp % self.kv_replicas:
            raise ConfigError(f"{self.kv_replicas} replicas of a KV head do not divide the {self.tp} ranks of tp")
        if self.cp_inner < 1 or self.cp % self.cp_inner:
            raise ConfigError(f"groups of {self.cp_inner} ranks do not divide the {self.cp} ranks of cp")
        if self.mirrored_pipeline and self.pp % 2:
            ways = f"{self.pp - 1} or {self.pp + 1}" if self.pp > 1 else "2"
            raise ConfigError(
                f"--pipeline-model-parallel-size {self.pp} is odd: a pipeline in two directions (--pipeline-schedule "
                f"dualpipe or chimera) pairs each rank with the opposite one; use {ways}"
            )
        if self.num_instances < 1 or self.num_replicas % self.num_instances:
            divisors = [n for n in range(1, self.num_replicas + 1) if self.num_replicas % n == 0]
            nearest = sorted(sorted(divisors, key=lambda n: abs(n - self.num_instances))[:3])
            raise ConfigError(
                f"--num-distributed-optimizer-instances {self.num_instances} does not divide the {self.num_replicas} "
                f"ranks that hold the same parameters; use {one_of(nearest)}"
            )
        self._check_experts()
        if self.ranks_per_node is None:
            return
        if self.ranks_per_node < 1:
            raise ConfigError(f"{self.ranks_per_node} ranks per node: a node has at least one rank")
        if self.world_size > self.ranks_per_node and self.world_size % self.ranks_per_node:
            rule = f"does not fill nodes of {self.ranks_per_node} ranks; start the same number of ranks on each node"
            raise ConfigError(f"a world of {self.world_size} ranks {rule}")
        fewest, most, _ = _ranks_on_a_node(self, "ep") if self.divides_ep else (1, 1, 1)
        if fewest < most:
            raise ConfigError(
                f"--moe-token-dispatcher-type flex with --expert-model-parallel-size {self.ep}: an ep group has "
                f"{fewest} ranks on one node of {self.ranks_per_node} and {most} on another, but needs equally many, "
                "since a token goes to the same place in every node; change it or use alltoall"
            )
        if not self.allow_tp_across_nodes and self.crosses_nodes("tp"):
            group = next(group for group in self.groups("tp") if len(self.nodes_of(group)) > 1)
            raise ConfigError(
                f"tensor parallel group {_shown(group)} spans nodes {_shown(self.nodes_of(group))}, "
                f"{self.ranks_per_node} ranks each (order {self.order!r}): its all-reduces run in every layer and must "
                "stay inside a node. Use a --tensor-model-parallel-size that divides the ranks of a node and put tp "
                "first in --rank-order, or give --allow-tp-across-nodes"
            )

    def size(self, axis: str) -> int:
        """Return the number of ranks along one axis: 'tp', 'cp', 'dp' or 'pp'."""
        return {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}[axis]

    @property
    def etp(self) -> int:
        """Ranks that share every expert: tp unless another number was given."""
        return self.tp if self.expert_tp is None else self.expert_tp

    @property
    def edp(self) -> int:
        """Copies of every expert on the ranks of one pp_rank."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def num_replicas(self) -> int:
        """Number of ranks that hold the same parameters: dp x cp, twice that in a mirrored pipeline."""
        return self.dp * self.cp * (2 if self.mirrored_pipeline else 1)

    @property
    def num_shards(self) -> int:
        """Number of ranks among which an instance of the distributed optimizer divides its state."""
        return self.num_replicas // self.num_instances

    @property
    def num_expert_replicas(self) -> int:
        """Number of ranks that hold the same experts: edp, twice that in a mirrored pipeline."""
        return self.edp * (2 if self.mirrored_pipeline else 1)

    def sharing(self, is_expert: bool) -> tuple[int, int]:
        """Return how many ranks divide the optimizer state of dense parameters or experts, and how often it is held.

        Replicas of experts are divided among as many instances as their number allows.
        """
        replicas = self.num_expert_replicas if is_expert else self.num_replicas
        instances = math.gcd(self.num_instances, replicas)
        return replicas // instances, instances

    @cached_property
    def ep_inner(self) -> int:
        """Ranks of an ep group on each node, if ep is divided into nodes, else 1."""
        return self.least_on_a_node("ep") if self.divides_ep else 1

    def _inner(self, divided: str) -> int:
        """Return the number of consecutive ranks in a level of a group."""
        if divided == "ep":
            return self.ep_inner
        return self.sharing(divided == "expert_replicas")[0]

    def shard_group(self, is_expert: bool) -> str:
        """Return the name of the groups that divide it; with one instance they are all replicas."""
        if self.sharing(is_expert)[1] == 1:
            return "expert_replicas" if is_expert else "replicas"
        return "expert_shards" if is_expert else "shards"

    def expert_rank(self, global_rank: int) -> int:
        """Return ep_rank x etp + etp_rank: the place of a rank among the ep x etp ranks that cut the experts."""
        place = self.coordinates(global_rank)
        return (place.tp_rank + self.tp * (place.cp_rank + self.cp * place.dp_rank)) % (self.ep * self.etp)

    @cached_property
    def strides(self) -> dict[str, int]:
        """Distance in global rank between two neighbours along each axis."""
        strides: dict[str, int] = {}
        stride = 1
        for axis in self.order.split("-"):
            strides[axis] = stride
            stride *= self.size(axis)
        return strides

    def coordinates(self, global_rank: int) -> Coordinates:
        """Return the coordinates of a rank. Raises IndexError for a rank outside the world."""
        self._check_rank(global_rank)
        return Coordinates(*(global_rank // self.strides[axis] % self.size(axis) for axis in AXES))

    def global_rank(self, coordinates: Coordinates) -> int:
        """Return the rank at these coordinates. Raises IndexError for coordinates outside the grid."""
        for axis, place in zip(AXES, coordinates, strict=True):
            if not 0 <= place < self.size(axis):
                raise IndexError(f"{axis}_rank {place} is outside 0..{self.size(axis) - 1}")
        return sum(place * self.strides[axis] for axis, place in zip(AXES, coordinates, strict=True))

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups of one kind, ordered by their first rank; ranks ascend within each, as along the axis.

        Every rank is in exactly one group of each kind, but only the ends of a pipeline are in one of 'embedding'.
        """
        return tuple(map(tuple, _members(self, name).tolist()))

    def group_of(self, name: str, global_rank: int) -> tuple[int, ...]:
        """Return this rank's group of one kind; () if it has none ('embedding')."""
        self._check_rank(global_rank)
        members = _members(self, name)
        at = np.flatnonzero(members == global_rank)
        return tuple(members[at[0] // members.shape[1]].tolist()) if len(at) else ()

    def node_of(self, global_rank: int) -> int:
        """Return the node of a rank; torchrun and SLURM number ranks node by node."""
        self._check_rank(global_rank)
        return global_rank // self.ranks_per_node if self.ranks_per_node else 0

    def nodes_of(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the distinct nodes of these ranks, ascending."""
        return tuple(sorted({self.node_of(rank) for rank in ranks}))

    def crosses_nodes(self, name: str) -> bool:
        """Return True if a group of this kind has ranks on two nodes, so that its traffic uses the network."""
        fewest, _, size = _ranks_on_a_node(self, name)
        return fewest < size

    def least_on_a_node(self, name: str) -> int:
        """Return the fewest ranks that a group of this kind has on a node where it has any."""
        return _ranks_on_a_node(self, name)[0]

    @property
    def num_nodes(self) -> int:
        return math.ceil(self.world_size / self.ranks_per_node) if self.ranks_per_node else 1

    @cached_property
    def _grid(self) -> npt.NDArray[np.int64]:
        """Global ranks by [tp_rank, cp_rank, dp_rank, pp_rank]."""
        slowest_first = self.order.split("-")[::-1]
        ranks = np.arange(self.world_size).reshape([self.size(axis) for axis in slowest_first])
        return ranks.transpose([slowest_first.index(axis) for axis in AXES])

    def _check_experts(self) -> None:
        """Raise ConfigError if ep x etp does not divide the ranks of a pp_rank, or if their order would not be kept."""
        ranks = self.tp * self.cp * self.dp
        if self.ep < 1 or self.etp < 1 or ranks % (self.ep * self.etp):
            raise ConfigError(
                f"--expert-model-parallel-size {self.ep} x expert tensor parallel {self.etp} does not divide the "
                f"{ranks} ranks of a pipeline rank (tensor {self.tp} x context {self.cp} x data {self.dp}); change it, "
                "or --expert-tensor-parallel-size (--tensor-model-parallel-size unless given)"
            )
        within = [axis for axis in self.order.split("-") if axis != "pp"]
        if (self.ep, self.etp) != (1, self.tp) and within != ["tp", "cp", "dp"]:
            raise ConfigError(
                f"--rank-order {self.order} with experts over {self.ep} x {self.etp} ranks: their grid is folded over "
                f"tp, then cp, then dp; use {DEFAULT_ORDER}, or pp at another place in it"
            )

    def _check_rank(self, global_rank: int) -> None:
        if not 0 <= global_rank < self.world_size:
            raise IndexError(f"global rank {global_rank} is outside a world of {self.world_size}")


def all_coordinates(topology: Topology) -> Iterator[tuple[int, Coordinates]]:
    """Yield (global_rank, coordinates) of every rank, in order of rank."""
    for rank in range(topology.world_size):
        yield rank, topology.coordinates(rank)


@lru_cache(maxsize=256)
def _members(topology: Topology, name: str) -> npt.NDArray[np.int64]:
    """Return the groups of one kind as [groups, size of a group]."""
    if name in LEVELS:
        divided, is_consecutive = LEVELS[name]
        whole = _members(topology, divided)
        cube = whole.reshape(len(whole), -1, topology._inner(divided))
        cube = cube if is_consecutive else cube.swapaxes(1, 2)
        members = cube.reshape(-1, cube.shape[-1])
        return members[members[:, 0].argsort()]
    if name not in GROUP_AXES:
        raise KeyError(f"unknown process group {name!r}; use one of {', '.join(GROUP_NAMES)}")
    tp, cp, pp = topology.tp, topology.cp, topology.pp
    grid, axes = topology._grid, [AXES.index(axis) for axis in GROUP_AXES[name]]
    if name in EXPERT_GROUPS:  # [etp_rank, ep_rank, copy of the experts, pp_rank]
        grid = grid.reshape((topology.etp, topology.ep, topology.edp, pp), order="F")
        axes = [EXPERT_GROUPS.index(name)]
    elif name == "embedding":
        grid = grid[..., sorted({0, pp - 1})]
    elif name in ("cp_a2a", "cp_p2p"):  # cp is cut into two axes, of which the faster one is cp_a2a
        outer = (cp // topology.cp_inner, topology.cp_inner)
        grid, axes = grid.reshape(tp, *outer, *grid.shape[2:]), [2 if name == "cp_a2a" else 1]
    elif name == "kv":  # tp is cut into two axes, of which the faster one is the group
        grid, axes = grid.reshape(tp // topology.kv_replicas, topology.kv_replicas, *grid.shape[1:]), [1]
    if name in ("replicas", "expert_replicas") and topology.mirrored_pipeline:
        # the opposite ranks of each pipeline become a new first axis
        grid = np.stack([grid[..., : pp // 2], grid[..., ::-1][..., : pp // 2]])
        axes = [0, *(axis + 1 for axis in axes)]
    size = math.prod(grid.shape[axis] for axis in axes)
    groups = np.sort(np.moveaxis(grid, axes, range(-len(axes), 0)).reshape(-1, size))
    return groups[groups[:, 0].argsort()]


@lru_cache(maxsize=1024)
def _ranks_on_a_node(topology: Topology, name: str) -> tuple[int, int, int]:
    """Return the fewest and the most ranks that a group of this kind has on a node where it has any, and its size."""
    members = _members(topology, name)
    nodes = members // (topology.ranks_per_node or topology.world_size)
    of_group = nodes + topology.num_nodes * np.arange(len(nodes))[:, None]
    counts = np.unique(of_group, return_counts=True)[1]
    return int(counts.min()), int(counts.max()), members.shape[1]


def _shown(numbers: tuple[int, ...]) -> str:
    shown = [str(number) for number in numbers]
    return "(" + " ".join(shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-2:]]) + ")"
