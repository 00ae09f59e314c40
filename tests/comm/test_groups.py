"""The process groups of real ranks match the topology, and each communicates among its members only.

gloo sends GPU tensors through copies in host memory; the tests take the same path with CPU tensors.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.comm import channels, collectives
from megapipe.comm.channels import Channels, MessageSpec
from megapipe.comm.collectives import all_reduce, barrier, gather_objects
from megapipe.comm.groups import Group, ProcessGroups, build_process_groups, new_handle
from megapipe.errors import CommunicationError
from megapipe.schedule.placement import linear
from megapipe.topology import GROUP_NAMES, Topology
from tests.comm.ranks import groups_of
from tests.comm.test_collectives import every_collective, in_place
from tests.harness import RankFailure, RankPool, run_ranks


def sums_by_group(
    rank: int, world_size: int, topology: Topology
) -> dict[str, tuple[tuple[int, ...], int, float, list[int]] | None]:
    """Return name -> (ranks, index, sum of 2**global_rank over the group, gathered ranks) on this rank."""
    groups = groups_of(rank, topology)
    seen: dict[str, tuple[tuple[int, ...], int, float, list[int]] | None] = {}
    for name in GROUP_NAMES:
        group = getattr(groups, name)
        if group is None:
            seen[name] = None
            continue
        total = torch.tensor([2.0**rank])
        all_reduce(total, group)
        seen[name] = (group.ranks, group.rank, total.item(), gather_objects(rank, group))
    return seen


def descriptions(rank: int, world_size: int) -> list[str]:
    groups = groups_of(rank, Topology(tp=2, pp=2))
    return [
        dist.distributed_c10d.get_process_group_ranks(groups.tp.handle),
        groups.tp.handle.group_desc,
        str(groups.tp),
    ]


def wrong_world(rank: int, world_size: int) -> None:
    build_process_groups(Topology(tp=4), rank, "gloo", 5.0)


TOPOLOGIES = [
    pytest.param(Topology(tp=2, pp=2), id="tp2 pp2"),
    pytest.param(Topology(pp=4), id="pp4: inner ranks have no embedding group"),
    pytest.param(Topology(pp=2, dp=2, order="tp-cp-pp-dp"), id="pp2 dp2, pp fastest"),
    pytest.param(Topology(cp=2, dp=2), id="cp2 dp2: dp_cp is its own group"),
    pytest.param(Topology(pp=4, mirrored_pipeline=True), id="pp4 mirrored: opposite ranks are replicas"),
    pytest.param(Topology(pp=2, dp=2, mirrored_pipeline=True), id="pp2 dp2 mirrored: all are replicas"),
    pytest.param(Topology(tp=4, kv_replicas=2), id="tp4, two replicas of each kv head"),
    pytest.param(Topology(dp=4, ep=4, ranks_per_node=2, divides_ep=True), id="ep4 over two nodes"),
]


def test_every_group_of_every_topology_sums_over_its_members_alone() -> None:
    with RankPool(4) as pool:
        for parameter in TOPOLOGIES:
            topology = parameter.values[0]
            assert isinstance(topology, Topology)
            for rank, seen in enumerate(pool.run(sums_by_group, topology)):
                for name in GROUP_NAMES:
                    ranks = topology.group_of(name, rank)
                    expected = (
                        (ranks, ranks.index(rank), float(sum(2**r for r in ranks)), list(ranks)) if ranks else None
                    )
                    assert seen[name] == expected, (parameter.id, rank, name)


def test_groups_carry_their_name() -> None:
    assert run_ranks(descriptions, 4)[3] == [[2, 3], "tp", "tp (ranks 2 3)"]


def test_world_of_another_size_is_refused() -> None:
    with pytest.raises(
        RankFailure,
        match=(
            r"CommunicationError: the topology is for rank \d of 4, but torch.distributed was initialized as "
            r"rank \d of 2"
        ),
    ):
        run_ranks(wrong_world, 2)


def test_world_of_one_needs_no_torch_distributed() -> None:
    groups = build_process_groups(Topology(), 0, "gloo", 5.0)
    assert isinstance(groups, ProcessGroups)
    assert all((getattr(groups, name).size, getattr(groups, name).handle) == (1, None) for name in GROUP_NAMES)
    assert Group.alone("tp", 3).global_rank == 3


def test_groups_without_a_started_world_are_refused() -> None:
    with pytest.raises(CommunicationError, match=r"call comm\.bootstrap\.start"):
        build_process_groups(Topology(dp=2), 0, "gloo", 5.0)


def through_host(rank: int, world_size: int, job: str) -> object:
    """Run the job with every tensor copied to the host first, as for a device that gloo cannot send from."""
    kept = collectives.needs_host_copies, channels.needs_host_copies
    collectives.needs_host_copies = channels.needs_host_copies = lambda handle, tensor: True
    try:
        return directly(rank, world_size, job)
    finally:
        collectives.needs_host_copies, channels.needs_host_copies = kept


def directly(rank: int, world_size: int, job: str) -> object:
    if job == "in place":
        return in_place(rank, world_size)
    if job == "messages":
        return messages(rank, world_size)
    return every_collective(rank, world_size, job == "asynchronous")


def messages(rank: int, world_size: int) -> list[Tensor]:
    """Send three messages each way over one boundary and return the received tensors."""
    pp = groups_of(rank, Topology(pp=world_size)).pp
    built = Channels.build(linear(world_size), pp)
    spec = (MessageSpec((4, 2), torch.float32), MessageSpec((3,), torch.int64))
    there, back = built[0, "activation", 0], built[0, "gradient", 0]
    outgoing, incoming = (there, back) if rank == 0 else (back, there)
    sent = [(torch.full((4, 2), 10.0 * rank + n), torch.arange(3) + n) for n in range(3)]
    pending = [incoming.post_receive(spec) for _ in range(3)]
    for message in sent:
        outgoing.send(message)
    received = [tensor for one in pending for tensor in one.wait()]
    built.drain()
    return received


def test_host_copies_give_the_results_of_tensors_sent_directly() -> None:
    with RankPool(2) as pool:
        for job in ("blocking", "asynchronous", "in place", "messages"):
            for there, here in zip(pool.run(through_host, job), pool.run(directly, job), strict=True):
                assert flat(there) and all(map(torch.equal, flat(there), flat(here))), job


def flat(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    assert isinstance(parts, (list, tuple)) or isinstance(value, dict)
    return [tensor for part in parts for tensor in flat(part)]


def test_host_copies_of_messages_arrive_in_order() -> None:
    first, second = run_ranks(through_host, 2, "messages")
    assert isinstance(first, list) and isinstance(second, list)
    assert [float(tensor[0, 0]) for tensor in first[::2]] == [10.0, 11.0, 12.0]
    assert [float(tensor[0, 0]) for tensor in second[::2]] == [0.0, 1.0, 2.0]


def connect_to_a_dead_peer(rank: int, world_size: int) -> str:
    barrier(groups_of(rank, Topology(dp=world_size)).dp)
    if rank == 1:
        os._exit(1)
    with pytest.raises(CommunicationError) as caught:
        new_handle((0, 1), "tp", "gloo", 1.0)
    return str(caught.value)


def test_a_group_that_a_dead_rank_belongs_to_gives_an_error_that_names_it() -> None:
    message = run_ranks(connect_to_a_dead_peer, 2, timeout=20, may_die=(1,))[0]
    assert message.startswith("the connection of group tp (ranks 0 1) failed on global rank 0")
