"""The process groups of real ranks match the topology, and each communicates among its members only."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megapipe.comm.collectives import all_reduce, gather_objects
from megapipe.comm.groups import Group, ProcessGroups, build_process_groups
from megapipe.errors import CommunicationError
from megapipe.topology import GROUP_NAMES, Topology
from tests.comm.ranks import groups_of
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
