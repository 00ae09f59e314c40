"""The trials of a layout, and the verdicts from their times.

Every group of every axis and every boundary in both directions is measured, with no rank twice in a round; planted slow
links are named, noise below the threshold factor is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.extras.doctor.examination import (
    BACKWARD,
    COLLECTIVES,
    FORWARD,
    HOSTS,
    PAIR,
    SEND,
    Rules,
    Sample,
    Trial,
    common_cause,
    judge,
    ring_pairs,
    rounds_of,
    slow,
    trials_of,
)
from megapipe.plan.hardware import Link, hardware_named
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


def test_a_loop_has_a_boundary_from_last_to_first_rank_and_a_v_has_none() -> None:
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
    assert set(ring_pairs((0, 2, 5))) == {(0, 2), (2, 0), (2, 5), (5, 2), (5, 0), (0, 5)}
    assert list(ring_pairs((3, 4))) == [(3, 4), (4, 3)]


NAMES = ("a", "a", "b", "b", "c", "c", "d", "d")
BYTES = (8, 1 << 18, 1 << 22)
RULES = Rules(NAMES, factor=2.0, noise_seconds=1e-6)


def sampled(
    trial: Trial, rate: float = 1e9, latency: float = 1e-4, sizes: Sequence[int] = BYTES, spread: float = 1.0
) -> Sample:
    return Sample(
        trial,
        {size: [latency + trial.sent_bytes(size) / rate * (1 if n else spread) for n in range(3)] for size in sizes},
    )


def link(source: int, target: int) -> Trial:
    return Trial(PAIR, "world", SEND, (source, target))


TRIALS = trials_of(Topology(tp=2, dp=4), linear(1), NAMES)


@given(st.sampled_from(TRIALS), st.floats(2.5, 1000.0))
def test_one_slow_trial_among_its_peers_is_the_only_one_named(chosen: Trial, times: float) -> None:
    found = slow(judge([sampled(trial, 1e9 / times if trial == chosen else 1e9, 1e-7) for trial in TRIALS], RULES))
    assert [one.trial for one in found] == [chosen]
    assert found[0].times_slower == pytest.approx(times, rel=0.05)


@given(st.lists(st.floats(1.0, 1.9), min_size=len(TRIALS), max_size=len(TRIALS)))
def test_differences_below_the_factor_are_not_reported(factors: list[float]) -> None:
    assert (
        slow(judge([sampled(trial, 1e9 / factor) for trial, factor in zip(TRIALS, factors, strict=True)], RULES)) == []
    )


def test_links_inside_a_host_are_not_compared_with_links_between_hosts() -> None:
    samples = [sampled(link(0, 1), 50e9), sampled(link(1, 0), 50e9), sampled(link(0, 2)), sampled(link(2, 0))]
    assert slow(judge(samples, RULES)) == []


def test_of_two_directions_the_slower_one_is_named() -> None:
    (one,) = slow(judge([sampled(link(0, 2), 1e8), sampled(link(2, 0))], RULES))
    assert one.trial.ranks == (0, 2)
    assert one.against == "its peers"


def test_a_trial_that_was_too_slow_for_the_largest_size_is_compared_at_the_largest_that_all_have() -> None:
    (one,) = slow(judge([sampled(link(0, 2), 1e6, sizes=BYTES[:2]), sampled(link(2, 0))], RULES))
    assert one.num_bytes == BYTES[1]


def test_without_peers_only_the_table_counts() -> None:
    lonely = [sampled(Trial("tp all_reduce", "tp", "all_reduce", (0, 1)), 1e9)]
    assert slow(judge(lonely, RULES)) == []
    expects = hardware_named("h100")
    (one,) = slow(judge(lonely, Rules(NAMES, 2.0, 1e-6, hardware=expects)))
    assert one.against == "what the hardware table expects"
    table = 2 * expects.node.latency_seconds + BYTES[2] / expects.node.bytes_per_second
    assert one.times_slower == pytest.approx((1e-4 + BYTES[2] / 1e9) / table)


@pytest.mark.parametrize(
    ("operation", "share"), [("all_reduce", 1.5), ("reduce_scatter", 0.75), ("all_gather", 0.75), (SEND, 1.0)]
)
def test_rates_count_what_one_rank_sends(operation: str, share: float) -> None:
    ranks = (0, 2) if operation == SEND else (0, 2, 4, 6)
    assert Trial("k", "dp", operation, ranks).sent_bytes(1000) == pytest.approx(1000 * share)


def test_where_cores_are_shared_the_best_repeat_counts_and_latency_does_not() -> None:
    noisy = Rules(NAMES, 2.0, 1e-6, is_noisy=True)
    stumbled = [sampled(link(0, 2), spread=100.0), sampled(link(2, 0), latency=5e-2, sizes=(8,)), sampled(link(4, 6))]
    assert slow(judge([stumbled[0], stumbled[2]], noisy)) == []
    late = Sample(link(2, 0), {8: [5e-2], 1 << 18: [1e-4 + (1 << 18) / 1e9]})
    assert slow(judge([late, sampled(link(0, 2), sizes=BYTES[:2])], noisy)) == []
    assert [one.trial.ranks for one in slow(judge([late, sampled(link(0, 2), sizes=BYTES[:2])], RULES))] == [(2, 0)]


def test_times_within_the_clock_s_noise_are_not_reported() -> None:
    samples = [sampled(link(0, 2), latency=1e-5), sampled(link(2, 0), latency=9e-5)]
    assert slow(judge(samples, Rules(NAMES, 2.0, noise_seconds=1e-4))) == []
    assert slow(judge(samples, RULES)) != []


def test_the_expected_time_of_a_message_includes_the_receipt() -> None:
    network = Link(1e9, 1e-3)
    rules = Rules(NAMES, 2.0, 1e-6, hardware=dataclasses.replace(hardware_named("h100"), network=network))
    assert rules.expected_seconds(link(0, 2), 1 << 20) == pytest.approx(2e-3 + (1 << 20) / 1e9)


RING = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b"), ("c", "a"), ("a", "c")]


@pytest.mark.parametrize(
    ("slow_links", "causes"),
    [
        pytest.param([("a", "b")], [("a", "b")], id="one direction"),
        pytest.param([("b", "a"), ("b", "c")], [("b", None)], id="all that leaves"),
        pytest.param([("a", "b"), ("c", "b")], [(None, "b")], id="all that comes"),
        pytest.param([("b", "a"), ("b", "c"), ("a", "c")], [("b", None), ("a", "c")], id="one end and one more"),
        pytest.param(
            [("b", "a"), ("b", "c"), ("a", "b"), ("c", "b")], [("b", None), (None, "b")], id="both ways of one host"
        ),
        pytest.param([], [], id="none"),
    ],
)
def test_slow_directions_are_reduced_to_the_fewest_causes(
    slow_links: list[tuple[str, str]], causes: list[tuple[str | None, str | None]]
) -> None:
    assert common_cause(slow_links, RING) == causes


@given(st.sets(st.sampled_from(RING)))
def test_causes_account_for_every_slow_direction_and_for_no_other(slow_links: set[tuple[str, str]]) -> None:
    explained = set()
    for source, target in common_cause(sorted(slow_links), RING):
        explained |= {pair for pair in RING if source in (pair[0], None) and target in (pair[1], None)}
    assert explained == slow_links
