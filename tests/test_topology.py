"""Ranks, coordinates and groups, against an independent model: numpy's reshape of arange(world)."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ConfigError
from megapipe.topology import AXES, GROUP_NAMES, Coordinates, Topology, all_coordinates
from tests.tables import options, rows

ORDERS = ["-".join(order) for order in permutations(AXES)]
LARGEST_WORLD = 16384
IMPOSSIBLE = rows(Path(__file__).with_name("impossible_topologies.tsv"))


@st.composite
def topologies(draw: st.DrawFn, largest_world: int = LARGEST_WORLD) -> Topology:
    sizes: dict[str, int] = {}
    ranks_left = largest_world
    for axis in draw(st.permutations(AXES)):
        sizes[axis] = draw(
            st.one_of(
                st.integers(1, min(ranks_left, 6)), st.sampled_from([2**n for n in range(15) if 2**n <= ranks_left])
            )
        )
        ranks_left //= sizes[axis]
    replicas = draw(st.sampled_from([n for n in range(1, sizes["tp"] + 1) if sizes["tp"] % n == 0]))
    mirrored = sizes["pp"] % 2 == 0 and draw(st.booleans())
    copies = sizes["dp"] * sizes["cp"] * (2 if mirrored else 1)
    instances = draw(st.sampled_from([n for n in range(1, min(copies, 64) + 1) if copies % n == 0]))
    order, experts = draw(st.sampled_from(ORDERS)), {}
    if order.replace("-pp", "").replace("pp-", "") == "tp-cp-dp":
        slice_size = sizes["tp"] * sizes["cp"] * sizes["dp"]
        etp = draw(st.sampled_from([n for n in range(1, slice_size + 1) if slice_size % n == 0]))
        ep = draw(st.sampled_from([n for n in range(1, slice_size // etp + 1) if slice_size // etp % n == 0]))
        experts = {"ep": ep, "expert_tp": etp}
    options = {"kv_replicas": replicas, "mirrored_pipeline": mirrored, "num_instances": instances}
    return Topology(**sizes, order=order, **options, **experts)


def expected_groups(topology: Topology, axes: tuple[str, ...]) -> set[tuple[int, ...]]:
    """Compute the groups with numpy: an array with one dimension per axis, the group's axes moved last."""
    slowest_first = topology.order.split("-")[::-1]
    grid = np.arange(topology.world_size).reshape([topology.size(axis) for axis in slowest_first])
    moved = [slowest_first.index(axis) for axis in slowest_first if axis in axes]
    grid = np.moveaxis(grid, moved, range(-len(moved), 0))
    return {
        tuple(sorted(row)) for row in grid.reshape(-1, int(np.prod([topology.size(axis) for axis in axes]))).tolist()
    }


@given(topologies())
@settings(max_examples=40)
def test_rank_and_coordinates_are_a_bijection(topology: Topology) -> None:
    seen = set()
    for rank in {*range(0, topology.world_size, max(1, topology.world_size // 300)), topology.world_size - 1}:
        coordinates = topology.coordinates(rank)
        assert topology.global_rank(coordinates) == rank
        seen.add(coordinates)
    assert all(
        0 <= place < topology.size(axis) for coordinates in seen for axis, place in zip(AXES, coordinates, strict=True)
    )


@given(topologies(), st.sampled_from(GROUP_NAMES))
@settings(max_examples=60)
def test_each_rank_is_in_exactly_one_group_of_a_kind(topology: Topology, name: str) -> None:
    groups = topology.groups(name)
    members = [rank for group in groups for rank in group]
    assert len(members) == len(set(members))
    if name == "embedding":
        assert set(members) == {rank for rank, at in all_coordinates(topology) if at.pp_rank in (0, topology.pp - 1)}
    else:
        assert sorted(members) == list(range(topology.world_size))
    assert len({len(group) for group in groups}) == 1
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    assert all(list(group) == sorted(group) for group in groups)


@given(topologies(largest_world=2048), st.sampled_from(["tp", "cp", "dp", "pp", "dp_cp", "model", "world"]))
@settings(max_examples=60)
def test_groups_equal_those_of_a_reshaped_array(topology: Topology, name: str) -> None:
    axes = {"dp_cp": ("dp", "cp"), "model": ("tp", "pp"), "world": AXES}.get(name, (name,))
    assert set(topology.groups(name)) == expected_groups(topology, axes)


@given(topologies(), st.sampled_from(GROUP_NAMES), st.data())
@settings(max_examples=60)
def test_group_of_is_the_group_that_lists_the_rank(topology: Topology, name: str, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, topology.world_size - 1))
    listed = [group for group in topology.groups(name) if rank in group]
    assert topology.group_of(name, rank) == (listed[0] if listed else ())


@given(topologies(largest_world=4096), st.sampled_from(["tp", "cp", "dp", "pp"]))
@settings(max_examples=30)
def test_place_in_an_axis_group_is_the_rank_on_that_axis(topology: Topology, axis: str) -> None:
    for group in topology.groups(axis):
        assert [topology.coordinates(rank)[AXES.index(axis)] for rank in group] == list(range(topology.size(axis)))


@given(topologies(largest_world=1024))
@settings(max_examples=30)
def test_kv_groups_are_tp_neighbours(topology: Topology) -> None:
    for group in topology.groups("kv"):
        places = [topology.coordinates(rank) for rank in group]
        first = places[0].tp_rank
        assert first % topology.kv_replicas == 0
        assert [place.tp_rank for place in places] == list(range(first, first + topology.kv_replicas))
        assert len({place[1:] for place in places}) == 1


@given(topologies(largest_world=2048))
@settings(max_examples=60)
def test_replicas_are_the_dp_and_cp_ranks_of_one_pp_rank_or_of_two_opposite_ones(topology: Topology) -> None:
    def parameters_of(rank: int) -> tuple[int, ...]:
        tp_rank, _, _, pp_rank = topology.coordinates(rank)
        stages = {pp_rank, topology.pp - 1 - pp_rank} if topology.mirrored_pipeline else {pp_rank}
        return (tp_rank, *sorted(stages))

    holders: dict[tuple[int, ...], list[int]] = {}
    for rank in range(topology.world_size):
        holders.setdefault(parameters_of(rank), []).append(rank)
    assert set(topology.groups("replicas")) == {tuple(ranks) for ranks in holders.values()}
    assert {len(ranks) for ranks in holders.values()} == {topology.num_replicas}


@given(topologies(largest_world=1024))
@settings(max_examples=60)
def test_instances_are_consecutive_replicas_and_their_shards_lie_at_equal_places(topology: Topology) -> None:
    for is_expert, prefix in ((False, ""), (True, "expert_")):
        size, count = topology.sharing(is_expert)
        for replicas in topology.groups(f"{prefix}replicas"):
            instances = [replicas[at : at + size] for at in range(0, len(replicas), size)]
            assert len(instances) == count
            for instance in instances:
                assert topology.group_of(f"{prefix}shards", instance[0]) == instance
            for place, holders in enumerate(zip(*instances, strict=True)):
                assert topology.group_of(f"{prefix}instances", instances[0][place]) == holders


def test_replicas_of_experts_have_as_many_instances_as_their_number_allows() -> None:
    counts = {ep: Topology(dp=8, ep=ep, num_instances=4).sharing(is_expert=True) for ep in (1, 2, 4, 8)}
    assert counts == {1: (2, 4), 2: (1, 4), 4: (1, 2), 8: (1, 1)}


def test_instances_that_do_not_divide_the_replicas_are_refused() -> None:
    message = "instances 3 does not divide the 4 ranks that hold the same parameters; use 1, 2 or 4"
    with pytest.raises(ConfigError, match=message):
        Topology(tp=2, dp=4, num_instances=3)


@given(topologies(largest_world=1024))
@settings(max_examples=60)
def test_ranks_of_the_same_place_in_the_expert_grid_are_the_experts_replicas(topology: Topology) -> None:
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank in range(topology.world_size):
        pp_rank = topology.coordinates(rank).pp_rank
        stages = {pp_rank, topology.pp - 1 - pp_rank} if topology.mirrored_pipeline else {pp_rank}
        holders.setdefault((topology.expert_rank(rank), *sorted(stages)), []).append(rank)
    assert set(topology.groups("expert_replicas")) == {tuple(ranks) for ranks in holders.values()}
    assert {len(ranks) for ranks in holders.values()} == {topology.num_expert_replicas}
    for name, size in (("etp", topology.etp), ("ep", topology.ep)):
        for group in topology.groups(name):
            places = [divmod(topology.expert_rank(rank), topology.etp) for rank in group]
            assert [place[name == "etp"] for place in places] == list(range(size))
            assert len({place[name == "ep"] for place in places}) == 1


def test_experts_may_span_tp_and_dp() -> None:
    topology = Topology(tp=2, dp=4, pp=2, ep=4, expert_tp=1)
    assert topology.groups("ep")[:2] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert topology.groups("expert_replicas")[:2] == ((0, 4), (1, 5))
    assert topology.groups("tp")[:2] == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        pytest.param({"ep": 3}, "3 x expert tensor parallel 2 does not divide the 4 ranks", id="division"),
        pytest.param({"ep": 2, "order": "dp-tp-cp-pp"}, "folded over tp, then cp, then dp", id="order"),
    ],
)
def test_expert_grids_that_do_not_fit_are_refused(experts: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology(tp=2, dp=2, **experts)


@st.composite
def topologies_of_nodes(draw: st.DrawFn) -> Topology:
    """Draw a topology whose ep groups are divided into equal parts of the nodes."""
    topology = draw(topologies(largest_world=256))
    sizes = [n for n in range(1, topology.world_size + 1) if topology.world_size % n == 0]
    return replace(topology, ranks_per_node=draw(st.sampled_from(sizes)), allow_tp_across_nodes=True)


@given(topologies_of_nodes())
@settings(max_examples=60)
def test_ep_is_divided_into_its_nodes_and_the_places_in_each(topology: Topology) -> None:
    on_nodes = {
        len([r for r in group if topology.node_of(r) == node])
        for group in topology.groups("ep")
        for node in topology.nodes_of(group)
    }
    assert topology.ep_inner == 1
    if len(on_nodes) > 1:
        with pytest.raises(ConfigError, match="needs equally many, since a token goes to the same place"):
            replace(topology, divides_ep=True)
        return
    divided = replace(topology, divides_ep=True)
    assert {divided.ep_inner} == on_nodes
    for group in topology.groups("ep"):
        nodes = [[rank for rank in group if topology.node_of(rank) == node] for node in topology.nodes_of(group)]
        for at, rank in enumerate(group):
            assert divided.group_of("ep_places", rank) == tuple(nodes[at // divided.ep_inner])
            assert divided.group_of("ep_nodes", rank) == tuple(ranks[at % divided.ep_inner] for ranks in nodes)
    for name in ("ep_places", "ep_nodes"):
        assert set(divided.groups(name)) == {divided.group_of(name, rank) for rank in range(topology.world_size)}


@given(topologies(largest_world=1024))
@settings(max_examples=30)
def test_embedding_groups_join_the_ends_of_each_pipeline(topology: Topology) -> None:
    expected = {tuple(dict.fromkeys((pipeline[0], pipeline[-1]))) for pipeline in topology.groups("pp")}
    assert set(topology.groups("embedding")) == expected


def test_the_example_of_the_docstring() -> None:
    topology = Topology(tp=2, cp=1, dp=2, pp=2)
    assert topology.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert topology.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert topology.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert topology.groups("model") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert topology.coordinates(5) == Coordinates(tp_rank=1, cp_rank=0, dp_rank=0, pp_rank=1)


def test_order_makes_pipeline_peers_neighbours() -> None:
    topology = Topology(tp=2, dp=2, pp=2, order="tp-pp-dp-cp")
    assert topology.groups("pp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert topology.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_all_groups_of_16384_ranks_take_under_two_seconds() -> None:
    began = time.process_time()
    topology = Topology(tp=8, cp=2, pp=16, dp=64, ranks_per_node=8, kv_replicas=2)
    assert [len(topology.groups(name)) for name in GROUP_NAMES] == [
        2048,
        8192,
        16384,
        8192,
        1024,
        256,
        128,
        128,
        128,
        16384,
        128,
        1024,
        8192,
        2048,
        16384,
        16384,
        16384,
        128,
        128,
        16384,
        1,
    ]
    for rank in range(0, topology.world_size, 16):
        for name in ("tp", "pp", "dp_cp", "embedding"):
            topology.group_of(name, rank)
    assert time.process_time() - began < 2


def test_llama3_405b_keeps_tp_inside_a_node_of_eight() -> None:
    topology = Topology.of_world(16384, tp=8, pp=16, ranks_per_node=8)
    assert (topology.dp, topology.num_nodes) == (128, 2048)
    assert not topology.crosses_nodes("tp")
    assert topology.crosses_nodes("pp")
    assert topology.nodes_of(topology.group_of("pp", 0)) == tuple(range(0, 2048, 128))


@pytest.mark.parametrize(("words", "message"), [row[1:] for row in IMPOSSIBLE], ids=[row[0] for row in IMPOSSIBLE])
def test_impossible_topology_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Topology(**options(words, {}))
    assert message in str(caught.value)


def test_tp_across_nodes_only_when_asked_for() -> None:
    topology = Topology(tp=4, dp=2, ranks_per_node=2, allow_tp_across_nodes=True)
    assert topology.crosses_nodes("tp")


def test_world_that_does_not_divide_is_refused_and_never_rounded() -> None:
    with pytest.raises(
        ConfigError, match=r"a world of 6 ranks cannot hold tensor 2 x context 1 x pipeline 2.*multiple of 4"
    ):
        Topology.of_world(6, tp=2, pp=2)


def test_unknown_group_and_foreign_ranks_are_refused() -> None:
    topology = Topology(tp=2, pp=2)
    with pytest.raises(KeyError, match="unknown process group 'sp'"):
        topology.groups("sp")
    with pytest.raises(IndexError, match="global rank 4 is outside a world of 4"):
        topology.coordinates(4)
    with pytest.raises(IndexError, match="pp_rank 2 is outside"):
        topology.global_rank(Coordinates(0, 0, 0, 2))
