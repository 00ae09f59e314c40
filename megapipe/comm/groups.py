"""Process groups: named lists of ranks with the backend's handle, built once from a topology and passed as arguments."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megapipe.comm.fake_backend import FakeHandle, Ledger
from megapipe.comm.nccl import NcclSettings
from megapipe.comm.trace import Tracer
from megapipe.errors import CommunicationError
from megapipe.monitor.heartbeat import Heartbeat
from megapipe.topology import GROUP_NAMES, Topology


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks that take part in one kind of operation, and this rank's place among them.

    name: of topology.GROUP_NAMES. ranks: global, ascending. rank: this rank's index in `ranks`. handle: torch's process group; None for a
    group of one, where every operation is a no-op. siblings: all groups of this kind in the world, this one included. timeout_seconds:
    after which an operation raises CommunicationError (gloo) or ends the process (NCCL's watchdog). heartbeat: told of
    every operation and wait. nccl: how communicators made later for these ranks are set.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    handle: Any = field(default=None, repr=False)
    tracer: Tracer | None = field(default=None, repr=False)
    timeout_seconds: float | None = None
    siblings: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    heartbeat: Heartbeat | None = field(default=None, repr=False)
    nccl: NcclSettings | None = field(default=None, repr=False)

    @classmethod
    def alone(
        cls, name: str, global_rank: int = 0, tracer: Tracer | None = None, heartbeat: Heartbeat | None = None
    ) -> Group:
        """A group of one: needs no torch.distributed."""
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
    """All groups of one rank. `embedding` is None on ranks inside a pipeline; kv holds the tp neighbours with the same KV heads; replicas
    the holders of this rank's parameters: dp_cp, with the opposite pp_rank's in a mirrored pipeline."""

    world: Group
    tp: Group
    cp: Group
    pp: Group
    dp: Group
    dp_cp: Group
    replicas: Group
    model: Group
    embedding: Group | None
    kv: Group

    @classmethod
    def alone(
        cls, global_rank: int = 0, tracer: Tracer | None = None, heartbeat: Heartbeat | None = None
    ) -> ProcessGroups:
        """The groups of a world of one."""
        return cls(**{name: Group.alone(name, global_rank, tracer, heartbeat) for name in GROUP_NAMES})


def build_process_groups(
    topology: Topology,
    global_rank: int,
    backend: str,
    timeout_seconds: float,
    tracer: Tracer | None = None,
    heartbeat: Heartbeat | None = None,
    nccl: NcclSettings | None = None,
) -> ProcessGroups:
    """Make every group of the topology; called once by all ranks, after `bootstrap.start`. A world of one needs no start.

    All ranks make all groups in one order, members or not: torch names a group by a counter that must agree on its members. (Its local
    synchronisation names by the number of groups that the rank already has, which differs within a group when only the ends of a pipeline
    hold an embedding group; and a foreign group costs 0.05 ms, so ten thousand cost half a second.)
    Raises CommunicationError if torch.distributed was started with another world.
    """
    if topology.world_size == 1:
        return ProcessGroups.alone(global_rank, tracer, heartbeat)
    _check_world(topology, global_rank)
    made: dict[str, Group | None] = {}
    for name in GROUP_NAMES:
        other = _same_ranks(name, topology)
        if other is None:
            made[name] = _build(name, topology, global_rank, backend, timeout_seconds, tracer, heartbeat, nccl)
        else:
            made[name] = _renamed(made[other], name)
    return ProcessGroups(**made)  # type: ignore[arg-type]


def fake_process_groups(topology: Topology, global_rank: int, ledger: Ledger) -> ProcessGroups:
    """This rank's groups over the fake backend, which records operations in `ledger` and moves nothing."""
    if topology.world_size == 1:
        return ProcessGroups.alone(global_rank)

    def group(name: str) -> Group | None:
        ranks = topology.group_of(name, global_rank)
        handle = FakeHandle(name, ledger) if len(ranks) > 1 else None
        return Group(name, ranks, ranks.index(global_rank), handle) if ranks else None

    return ProcessGroups(**{name: group(name) for name in GROUP_NAMES})  # type: ignore[arg-type]


def backend_of(group: Group) -> str | None:
    """'nccl', 'gloo' or 'fake'; None for a group of one, which needs none."""
    if group.handle is None or isinstance(group.handle, FakeHandle):
        return None if group.handle is None else FakeHandle.backend
    return str(dist.get_backend(group.handle))


def _same_ranks(name: str, topology: Topology) -> str | None:
    """An earlier kind of group that always has the same members, so that one communicator serves both."""
    if name == "dp_cp" and topology.cp == 1:
        return "dp"
    return "dp_cp" if name == "replicas" and not topology.mirrored_pipeline else None


def new_handle(
    ranks: tuple[int, ...],
    description: str,
    backend: str | None,
    timeout_seconds: float | None,
    kind: str = "",
    nccl: NcclSettings | None = None,
) -> Any:
    """torch's process group of these ranks; to be called by every rank of the world in one order. Meaningless on ranks outside it.

    kind: of topology.GROUP_NAMES, by which `nccl` sets NCCL's options."""
    timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    options = nccl.options(kind, timeout) if nccl is not None and backend == "nccl" else None
    return dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=options, group_desc=description)


def second_communicator(group: Group) -> Group:
    """The same ranks over a communicator of their own, so that what is sent over one does not wait for the other's. A group of one, or
    of the fake backend, is returned as it is. Called by all ranks of the world at one time; `group` is of one kind on all of them."""
    if group.handle is None or isinstance(group.handle, FakeHandle):
        return group
    backend, mine = dist.get_backend(group.handle), group
    for ranks in group.siblings:
        handle = new_handle(ranks, f"{group.name} 2", backend, group.timeout_seconds, group.name, group.nccl)
        if ranks == group.ranks:
            mine = dataclasses.replace(group, handle=handle)
    return mine


def _build(
    name: str,
    topology: Topology,
    global_rank: int,
    backend: str,
    timeout_seconds: float,
    tracer: Tracer | None,
    heartbeat: Heartbeat | None,
    nccl: NcclSettings | None,
) -> Group | None:
    siblings = topology.groups(name)
    mine: Group | None = None
    for ranks in siblings:
        if name == "world":
            handle = dist.group.WORLD  # there since bootstrap.start
        else:
            handle = new_handle(ranks, name, backend, timeout_seconds, name, nccl) if len(ranks) > 1 else None
        if global_rank in ranks:
            mine = Group(
                name, ranks, ranks.index(global_rank), handle, tracer, timeout_seconds, siblings, heartbeat, nccl
            )
    return mine


def _renamed(group: Group | None, name: str) -> Group:
    assert group is not None
    return dataclasses.replace(group, name=name)


def _check_world(topology: Topology, global_rank: int) -> None:
    if not dist.is_initialized():
        raise CommunicationError(
            f"a topology of {topology.world_size} ranks needs a world: call comm.bootstrap.start before building groups"
        )
    if (dist.get_world_size(), dist.get_rank()) != (topology.world_size, global_rank):
        raise CommunicationError(
            f"the topology says rank {global_rank} of {topology.world_size}, torch.distributed was started as rank {dist.get_rank()} of "
            f"{dist.get_world_size()}"
        )
