"""Process groups: named lists of ranks with the backend's handle, built once from a topology.

Those of the dry run are fake: operations move nothing, return at once, and are counted in a `Traffic`. Results have the
right shapes and undefined values.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import perf_counter_ns
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megapipe.comm.trace import Tracer
from megapipe.errors import CommunicationError
from megapipe.monitor.heartbeat import Heartbeat
from megapipe.topology import GROUP_NAMES, Topology

# patterns in a backend's error by which it is classified
LOST = "closed by peer|connection reset|broken pipe|connection refused|connection was (likely )?closed|remote process"
TIMED_OUT = "timed out|timeout|time out"

NcclOptions = Callable[[str, timedelta | None], Any]  # (kind of group, timeout) -> torch's options for a communicator
OperationKey = tuple[str, str]  # (kind of group, operation): ("tp", "all_gather"), ("pp", "send")


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks that take part in one kind of operation, as seen from one of them.

    name: one of topology.GROUP_NAMES. ranks: global ranks, ascending. rank: this rank's index in `ranks`.
    handle: torch's process group; None for a group of one, in which every operation is a no-op.
    timeout_seconds: after which an operation raises CommunicationError (gloo) or ends the process (NCCL's watchdog).
    siblings: all groups of this kind in the world, this one included. heartbeat: notified of every operation and wait.
    nccl: options of further communicators of these ranks.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    handle: Any = field(default=None, repr=False)
    tracer: Tracer | None = field(default=None, repr=False)
    timeout_seconds: float | None = None
    siblings: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    heartbeat: Heartbeat | None = field(default=None, repr=False)
    nccl: NcclOptions | None = field(default=None, repr=False)

    @classmethod
    def alone(
        cls, name: str, global_rank: int = 0, tracer: Tracer | None = None, heartbeat: Heartbeat | None = None
    ) -> Group:
        """Return a group of one rank, which does not need torch.distributed."""
        return cls(name, (global_rank,), 0, None, tracer, None, ((global_rank,),), heartbeat)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank]

    def __str__(self) -> str:
        shown = [str(rank) for rank in self.ranks]
        return f"{self.name} (ranks {' '.join(shown if len(shown) <= 8 else [*shown[:4], '...', *shown[-2:]])})"


@dataclass(frozen=True, eq=False)
class ProcessGroups:
    """All groups of one rank.

    embedding: first and last rank of a pipeline; None on the ranks between. kv: tp neighbours with the same KV heads.
    replicas: holders of this rank's parameters, which is dp_cp, joined with that of the opposite pp_rank in a mirrored
    pipeline. shards: the replicas that divide the optimizer state; with one instance the group `replicas` itself.
    instances: those that hold the same part of it. etp, ep and expert_replicas: the grid of the experts; these replicas
    and ep have two levels, too (topology.GROUP_AXES).
    """

    world: Group
    tp: Group
    cp: Group
    cp_a2a: Group
    cp_p2p: Group
    pp: Group
    dp: Group
    dp_cp: Group
    replicas: Group
    shards: Group
    instances: Group
    model: Group
    embedding: Group | None
    kv: Group
    etp: Group
    ep: Group
    ep_places: Group
    ep_nodes: Group
    expert_replicas: Group
    expert_shards: Group
    expert_instances: Group

    @property
    def context(self) -> ContextGroups:
        """The groups of context parallelism."""
        return ContextGroups(self.cp, self.cp_a2a, self.cp_p2p)

    def cut_of(self, is_expert: bool) -> tuple[int, int]:
        """Return this rank's place among the ranks that cut dense parameters (tp) or experts (ep x etp), and how many
        there are.
        """
        if is_expert:
            return self.ep.rank * self.etp.size + self.etp.rank, self.ep.size * self.etp.size
        return self.tp.rank, self.tp.size

    @classmethod
    def alone(
        cls, global_rank: int = 0, tracer: Tracer | None = None, heartbeat: Heartbeat | None = None
    ) -> ProcessGroups:
        """Return the groups of a world of one rank."""
        return cls(**{name: Group.alone(name, global_rank, tracer, heartbeat) for name in GROUP_NAMES})


@dataclass(frozen=True)
class ContextGroups:
    """The ranks that share every sequence, and the two levels of --cp-comm-type a2a+p2p (topology.GROUP_AXES)."""

    cp: Group = field(default_factory=lambda: Group.alone("cp"))
    a2a: Group = field(default_factory=lambda: Group.alone("cp_a2a"))
    p2p: Group = field(default_factory=lambda: Group.alone("cp_p2p"))


@dataclass(frozen=True)
class ExpertGroups:
    """The ranks among which experts are divided, those that share every expert, and those with other microbatches or
    other parts of the sequences.

    places, nodes: the two levels of ep (topology.GROUP_AXES). counts: those of the group over which tokens leave a
    rank, with another communicator, for the numbers of rows, where rows of others are in flight there. deep_ep: the
    adapter of DeepEP (model.deep_ep), if it sends the tokens. imbalance: where there are no values, the rows that reach
    this rank's experts, over the mean.
    """

    ep: Group = field(default_factory=lambda: Group.alone("ep"))
    etp: Group = field(default_factory=lambda: Group.alone("etp"))
    dp: Group = field(default_factory=lambda: Group.alone("dp"))
    cp: Group = field(default_factory=lambda: Group.alone("cp"))
    places: Group = field(default_factory=lambda: Group.alone("ep_places"))
    nodes: Group = field(default_factory=lambda: Group.alone("ep_nodes"))
    counts: Group | None = None
    deep_ep: Any = None
    imbalance: float = 1.0

    @property
    def has_levels(self) -> bool:
        """True if a token is sent once to a node: ep has several nodes, with several ranks on each."""
        return self.places.size > 1 and self.nodes.size > 1


def build_process_groups(
    topology: Topology,
    global_rank: int,
    backend: str,
    timeout_seconds: float,
    tracer: Tracer | None = None,
    heartbeat: Heartbeat | None = None,
    nccl: NcclOptions | None = None,
) -> ProcessGroups:
    """Create every group of the topology; called by all ranks, after `bootstrap.start` unless the world has one rank.

    Every rank creates every group in the same order, member or not, because torch names a group by a counter that must
    agree among its members. (torch's use_local_synchronization counts the groups that a rank already has, which differs
    within a group when only the ends of a pipeline have an embedding group. A group of other ranks costs 0.05 ms, so
    ten thousand of them cost half a second.)
    Raises CommunicationError if torch.distributed was initialized with another world.
    """
    if topology.world_size == 1:
        return ProcessGroups.alone(global_rank, tracer, heartbeat)
    if not dist.is_initialized():
        what = f"a topology of {topology.world_size} ranks needs torch.distributed"
        raise CommunicationError(f"{what}: call comm.bootstrap.start before building groups")
    if (dist.get_world_size(), dist.get_rank()) != (topology.world_size, global_rank):
        raise CommunicationError(
            f"the topology is for rank {global_rank} of {topology.world_size}, "
            f"but torch.distributed was initialized as rank {dist.get_rank()} of {dist.get_world_size()}"
        )

    def build(name: str) -> Group | None:
        if name == "world":
            return world_group(topology.world_size, global_rank, timeout_seconds, tracer, heartbeat, nccl)
        siblings = topology.groups(name)
        mine = None
        for ranks in siblings:
            handle = new_handle(ranks, name, backend, timeout_seconds, name, nccl) if len(ranks) > 1 else None
            if global_rank in ranks:
                index = ranks.index(global_rank)
                mine = Group(name, ranks, index, handle, tracer, timeout_seconds, siblings, heartbeat, nccl)
        return mine

    # kinds that always have the same members share one communicator
    same_ranks = {"dp_cp": "dp"} if topology.cp == 1 else {}
    if topology.cp_inner in (1, topology.cp):
        same_ranks["cp_p2p" if topology.cp_inner == 1 else "cp_a2a"] = "cp"
    if topology.ep_inner in (1, topology.ep):
        same_ranks["ep_nodes" if topology.ep_inner == 1 else "ep_places"] = "ep"
    if not topology.mirrored_pipeline:
        same_ranks["replicas"] = "dp_cp"
    if (topology.ep, topology.etp) == (1, topology.tp):
        same_ranks |= {"etp": "tp", "expert_replicas": "replicas"}
    whole = _undivided(topology)
    groups: dict[str, Any] = {}
    for name in GROUP_NAMES:
        other = same_ranks.get(name)
        if name in whole:
            groups[name] = groups[whole[name]]
        else:
            groups[name] = build(name) if other is None else dataclasses.replace(groups[other], name=name)
    return ProcessGroups(**groups)


def world_group(
    world_size: int,
    global_rank: int,
    timeout_seconds: float | None,
    tracer: Tracer | None = None,
    heartbeat: Heartbeat | None = None,
    nccl: NcclOptions | None = None,
) -> Group:
    """Return the group of all ranks. It exists since bootstrap.start: no rank waits for another here."""
    if world_size == 1:
        return Group.alone("world", global_rank, tracer, heartbeat)
    ranks = tuple(range(world_size))
    handle = dist.group.WORLD
    return Group("world", ranks, global_rank, handle, tracer, timeout_seconds, (ranks,), heartbeat, nccl)


def fake_process_groups(topology: Topology, global_rank: int, traffic: Traffic) -> ProcessGroups:
    """Return this rank's groups over the fake backend, which records operations in `traffic` and moves nothing."""
    if topology.world_size == 1:
        return ProcessGroups.alone(global_rank)
    groups: dict[str, Any] = {}
    for name in GROUP_NAMES:
        ranks = topology.group_of(name, global_rank)
        handle = traffic.handle(name) if len(ranks) > 1 else None
        groups[name] = Group(name, ranks, ranks.index(global_rank), handle) if ranks else None
    groups |= {name: groups[replicas] for name, replicas in _undivided(topology).items()}
    return ProcessGroups(**groups)


def _undivided(topology: Topology) -> dict[str, str]:
    """Return the groups of shards that are all replicas, because there is one instance."""
    names = {"shards": False, "expert_shards": True}
    return {
        name: topology.shard_group(is_expert)
        for name, is_expert in names.items()
        if topology.sharing(is_expert)[1] == 1
    }


def backend_of(group: Group) -> str | None:
    """Return 'nccl', 'gloo' or 'fake'; None for a group of one, which needs no backend."""
    if group.handle is None:
        return None
    if isinstance(group.handle, FakeHandle):
        return "fake"
    return str(dist.get_backend(group.handle))


def new_handle(
    ranks: tuple[int, ...],
    description: str,
    backend: str | None,
    timeout_seconds: float | None,
    kind: str = "",
    nccl: NcclOptions | None = None,
) -> Any:
    """Create torch's process group of these ranks; called by every rank of the world in the same order.

    kind: one of topology.GROUP_NAMES, for which `nccl` returns options. Raises CommunicationError if a rank has ended.
    """
    timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    options = nccl(kind, timeout) if nccl is not None and backend == "nccl" else None
    start_ns = perf_counter_ns()
    try:
        return dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=options, group_desc=description)
    except RuntimeError as error:  # a rank ended while others connect to it
        world = world_group(dist.get_world_size(), dist.get_rank(), timeout_seconds)
        made = Group(description, ranks, 0, None)
        raise communication_error(world, f"the connection of group {made}", error, start_ns) from error


def second_communicator(group: Group) -> Group:
    """Return the same ranks with another communicator, so that operations on one do not wait for those on the other.

    Called by all ranks of the world together, on a group of the same kind.
    """
    if group.handle is None:
        return group
    if isinstance(group.handle, FakeHandle):
        return dataclasses.replace(group, handle=group.handle.another(f"{group.name} 2"))
    backend, mine = dist.get_backend(group.handle), group
    for ranks in group.siblings:
        handle = new_handle(ranks, f"{group.name} 2", backend, group.timeout_seconds, group.name, group.nccl)
        if ranks == group.ranks:
            mine = dataclasses.replace(group, handle=handle)
    return mine


def communication_error(
    group: Group, operation: str, error: BaseException, start_ns: int, peer: str = ""
) -> CommunicationError:
    """Return the error to raise from a backend's error, with what it most likely means.

    operation: with its tensor. start_ns: when it began, by perf_counter_ns. peer: " from global rank 3" for a message.
    """
    text = str(error).strip()
    if re.search(LOST, text.lower()):
        meaning = "a peer process has exited; see its own error message"
    elif re.search(TIMED_OUT, text.lower()):
        limit = "" if group.timeout_seconds is None else f" of {group.timeout_seconds:g} s"
        meaning = (
            f"no answer within the timeout{limit}: a peer has died, hangs, or runs its operations in another order "
            "(--distributed-timeout-minutes sets the limit)"
        )
    else:
        meaning = "the backend reported an error"
    seconds = (perf_counter_ns() - start_ns) / 1e9
    first_line = text.splitlines()[0] if text else type(error).__name__
    return CommunicationError(
        f"{operation} failed on global rank {group.global_rank}{peer} in group {group} "
        f"after {seconds:.1f} s: {meaning}. The backend's message: {first_line}"
    )


def needs_host_copies(handle: Any, tensor: Tensor) -> bool:
    """Return True for gloo with GPU tensors, which it cannot send. This lets ranks share a GPU, which NCCL refuses."""
    return tensor.is_cuda and not isinstance(handle, FakeHandle) and dist.get_backend(handle) == "gloo"


class HostCopies:
    """An operation in flight on host copies of its tensors; used like torch's handle. Slow, but exact.

    writes: how many of the tensors, from the first, it writes. launch: starts it on such tensors; returns its handle.
    """

    def __init__(self, tensors: Sequence[Tensor], writes: int, launch: Callable[..., Any]) -> None:
        copies = [tensor.cpu() if tensor.is_cuda else tensor.clone() for tensor in tensors]
        self._written = list(zip(tensors, copies, strict=True))[:writes]
        self._copies = copies  # gloo needs them until the operation is complete
        self._handle = launch(*copies)

    def is_completed(self) -> bool:
        return bool(self._handle.is_completed())

    def wait(self) -> None:
        """Return when the operation is complete; the current stream then copies its results to the GPU."""
        self._handle.wait()
        for tensor, copy in self._written:
            tensor.copy_(copy)
        self._copies = []


@dataclass
class Traffic:
    """Counts and bytes of the operations that one rank would have run.

    The bytes of a collective are those of its whole tensor (the output of an all-gather, the input of a
    reduce-scatter). observe: called with every tensor that is sent or received between pipeline ranks.
    """

    counts: Counter[OperationKey] = field(default_factory=Counter)
    bytes: Counter[OperationKey] = field(default_factory=Counter)
    observe: Callable[[Tensor], None] | None = None

    def handle(self, kind: str) -> FakeHandle:
        """Return the fake backend of a group of this kind, which records here."""
        return FakeHandle(kind, self)

    def record(self, kind: str, operation: str, num_bytes: int) -> None:
        self.counts[kind, operation] += 1
        self.bytes[kind, operation] += num_bytes

    def copy(self) -> Traffic:
        return Traffic(Counter(self.counts), Counter(self.bytes))

    def since(self, earlier: Traffic) -> Traffic:
        """Return what was recorded after `earlier` was copied from this."""
        return Traffic(self.counts - earlier.counts, self.bytes - earlier.bytes)

    def add(self, other: Traffic, times: int, kinds: Collection[str]) -> None:
        """Add the operations of `other` on these kinds of groups, `times` times."""
        for key in other.counts:
            if key[0] in kinds:
                self.counts[key] += times * other.counts[key]
                self.bytes[key] += times * other.bytes[key]


class FakeWork:
    """An operation of the fake backend, complete at once."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        return False  # as with gloo before `wait`, so that a channel keeps its tensors in flight as in a real run


class FakeHandle:
    """A replacement for torch's process group that records the operations of one kind of group in a Traffic."""

    def __init__(self, kind: str, traffic: Traffic) -> None:
        self._kind = kind
        self._traffic = traffic

    def another(self, name: str) -> FakeHandle:
        """Return a further communicator of the same ranks; here this one, since none waits for another."""
        return self

    def start(self, operation: str, tensors: Sequence[Tensor]) -> FakeWork:
        """Record one collective. tensors: its inputs and outputs, the whole tensor among them."""
        self._traffic.record(self._kind, operation, max((tensor.nbytes for tensor in tensors), default=0))
        return FakeWork()

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> FakeWork:
        return self._message("send", tensors)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> FakeWork:
        return self._message("receive", tensors)

    def _message(self, operation: str, tensors: Sequence[Tensor]) -> FakeWork:
        for tensor in tensors:
            self._traffic.record(self._kind, operation, tensor.nbytes)
            if self._traffic.observe is not None:
                self._traffic.observe(tensor)
        return FakeWork()
