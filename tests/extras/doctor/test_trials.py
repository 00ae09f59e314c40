"""The trials of a layout: every group of every axis, every boundary in both directions, no rank twice in a round."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megapipe.extras.doctor.trials import BACKWARD, COLLECTIVES, FORWARD, HOSTS, Trial, pairs_of, rounds_of, trials_of
from megapipe.schedule.placement import linear, loop, two_directions, v_shape
from megapipe.topology import Topology

SIZES = st.integers(1, 4)


def hosts_of(world_size: int, ranks_per_host: int) -> list[str]:
    return [f"h{rank // ranks_per_host}" for rank in range(world_size)]


@given(SIZES, SIZES, SIZES, SIZES, st.integers(1, 5), st.booleans())
def test_rounds_hold_every_trial_once_and_use_no_rank_twice(
    tp: int, cp: int, pp: int, dp: int, width: int, alone: bool
) -> None:
    topology = Topology(tp=tp, cp=cp, pp=pp, dp=dp)
    trials = trials_of(topology, linear(pp), hosts_of(topology.world_size, width))
    rounds = rounds_of(trials, alone)
    assert sorted((t.kind, t.ranks) for some in rounds for t in some) == sorted((t.kind, t.ranks) for t in trials)
    for some in rounds:
        ranks = [rank for trial in some for rank in trial.ranks]
        assert len(ranks) == len(set(ranks))
        assert len({trial.kind for trial in some}) == 1
        assert not alone or len(some) == 1
    for kind, (name, _) in COLLECTIVES.items():
        wanted = {ranks for ranks in topology.groups(name) if len(ranks) > 1}
        assert {trial.ranks for trial in trials if trial.kind == kind} == wanted


@given(st.integers(2, 6), st.integers(1, 3))
def test_every_boundary_is_measured_each_way_in_every_pipeline(pp: int, dp: int) -> None:
    topology = Topology(pp=pp, dp=dp)
    trials = trials_of(topology, linear(pp), hosts_of(topology.world_size, 100))
    forward = {trial.ranks for trial in trials if trial.kind == FORWARD}
    assert forward == {(ranks[i], ranks[i + 1]) for ranks in topology.groups("pp") for i in range(pp - 1)}
    assert {trial.ranks for trial in trials if trial.kind == BACKWARD} == {(b, a) for a, b in forward}


def test_the_way_back_of_a_loop_is_a_boundary_too_and_a_v_has_none() -> None:
    def forward(placement: object) -> set[tuple[int, ...]]:
        return {
            t.ranks
            for t in trials_of(Topology(pp=4), placement, ["h"] * 4)  # type: ignore[arg-type]
            if t.kind == FORWARD
        }

    assert forward(loop(4, 2)) - forward(linear(4)) == {(3, 0)}
    down = {(0, 1), (1, 2), (2, 3)}
    up = {(b, a) for a, b in down}
    assert forward(v_shape(4)) == forward(two_directions(4)) == down | up


def test_hosts_are_joined_in_a_ring_each_way() -> None:
    found = {t.ranks for t in trials_of(Topology(dp=6), linear(1), hosts_of(6, 2)) if t.kind == HOSTS}
    assert found == {(0, 2), (2, 0), (2, 4), (4, 2), (4, 0), (0, 4)}
    assert [t for t in trials_of(Topology(dp=2), linear(1), ["h", "h"]) if t.kind == HOSTS] == []
    assert len([t for t in trials_of(Topology(dp=2), linear(1), ["a", "b"]) if t.kind == HOSTS]) == 2


def test_sixteen_thousand_ranks_take_few_rounds() -> None:
    topology = Topology(tp=8, pp=16, dp=128)
    rounds = rounds_of(trials_of(topology, loop(16, 4), hosts_of(topology.world_size, 8)), alone=False)
    assert len(rounds) < 20


def test_links_of_a_group_are_its_ring_each_way() -> None:
    links = pairs_of(Trial("tp all_reduce", "tp", "all_reduce", (0, 2, 5)))
    assert {link.ranks for link in links} == {(0, 2), (2, 0), (2, 5), (5, 2), (5, 0), (0, 5)}
    assert [link.ranks for link in pairs_of(Trial("tp all_reduce", "tp", "all_reduce", (3, 4)))] == [(3, 4), (4, 3)]
