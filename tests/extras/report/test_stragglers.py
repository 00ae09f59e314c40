"""Detection of stragglers from the times of all ranks: the slow rank is named and no other, despite noise."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megapipe.extras.report.stragglers import find_stragglers
from megapipe.monitor.heartbeat import RankPace
from megapipe.train.stragglers import extremes_text

STEP = 1.0
NAMES = [f"rank {rank} (pp ?) on host" for rank in range(16)]
TP_GROUPS = {"tp": [(0, 1), (2, 3), (4, 5), (6, 7)]}


def paces(computing: list[float], **changes: dict[int, object]) -> list[RankPace]:
    """Build ranks with equal work that wait for the rest of the step.

    changes: field -> {rank: value}.
    """
    found = []
    for rank, seconds in enumerate(computing):
        peers = tuple(other for other in range(len(computing)) if other != rank)
        values: dict[str, object] = {"reading": 0.0, "waits": {"tp": STEP - seconds}, "work": 1.0, "peers": peers}
        values |= {field: held[rank] for field, held in changes.items() if rank in held}
        found.append(RankPace(rank, STEP, seconds, **values))  # type: ignore[arg-type]
    return found


noise = st.lists(st.floats(0.40, 0.49), min_size=2, max_size=12)


@given(noise)
def test_no_rank_is_named_where_all_are_about_as_fast(computing: list[float]) -> None:
    assert find_stragglers(paces(computing), {}, NAMES) == []


@given(noise, st.integers(0, 11), st.floats(0.7, 0.95))
def test_the_slow_rank_among_equals_is_named_and_no_other(computing: list[float], which: int, seconds: float) -> None:
    which %= len(computing)
    computing[which] = seconds
    (found,) = find_stragglers(paces(computing), {}, NAMES)
    assert found.startswith(f"rank {which} (pp ?) on host is slow: it computes {1000 * seconds:.1f} ms a step, ")
    assert "ranks with the same work" in found
    assert extremes_text(paces(computing), 1).startswith(f"longest rank {which} ")


@given(st.floats(0.2, 4.0), st.integers(0, 3))
def test_without_ranks_of_the_same_work_the_plan_says_which_rank_is_slow(share: float, which: int) -> None:
    work = [1.0, share, 1.0, 1.0]
    alone = dict.fromkeys(range(4), ())
    computing = [0.05 * part for part in work]
    assert find_stragglers(paces(computing, work=dict(enumerate(work)), peers=alone), {}, NAMES) == []
    computing[which] *= 2.5
    computing[which] += 0.15
    (found,) = find_stragglers(paces(computing, work=dict(enumerate(work)), peers=alone), {}, NAMES)
    assert found.startswith(f"rank {which} (pp ?) on host is slow: it computes ")
    assert "of the others, for the work that the plan gives it" in found


def test_a_rank_that_reads_for_long_does_not_compute_for_long() -> None:
    found = find_stragglers(paces([0.4, 0.4, 0.4], reading={1: 0.3}), {}, NAMES)
    assert found == [
        "rank 1 (pp ?) on host is slow: it reads data 300.0 ms a step, ranks with the same work: 0 us; it waits "
        "600.0 ms"
    ]


def test_a_slow_link_is_compared_with_the_others_and_alone_with_a_step() -> None:
    others = {0: 1, 1: 2, 2: 3}
    seconds = {0: 0.001, 1: 0.2, 2: 0.002}
    assert find_stragglers(paces([0.3] * 4, link=others, link_seconds=seconds), {}, NAMES) == [
        "the link between rank 1 (pp ?) on host and rank 2 (pp ?) on host is slow: a message there and one back take "
        "200.0 ms, 20% of a step; the others 1.5 ms"
    ]
    assert find_stragglers(paces([0.3] * 2, link={0: 1}, link_seconds={0: 0.2}), {}, NAMES) == [
        "the link between rank 0 (pp ?) on host and rank 1 (pp ?) on host is slow: a message there and one back take "
        "200.0 ms, 20% of a step; there is no other link to compare with"
    ]
    assert find_stragglers(paces([0.3] * 2, link={0: 1}, link_seconds={0: 0.02}), {}, NAMES) == []


def test_a_group_in_which_even_the_last_one_waits_is_slow_and_one_that_waits_for_a_rank_is_not() -> None:
    waits = {rank: {"tp": 0.5 if rank in (4, 5) else 0.02} for rank in range(8)}
    assert find_stragglers(paces([0.4] * 8, waits=waits), TP_GROUPS, NAMES) == [
        "collectives of the tp group of ranks 4 5 are slow: 500.0 ms a step even for the rank that joins last, 20.0 ms "
        "in the other tp groups"
    ]
    computing = [0.4] * 5 + [0.8] + [0.4] * 2
    waits = {rank: {"tp": 0.5 if rank == 4 else 0.02} for rank in range(8)}
    (found,) = find_stragglers(paces(computing, waits=waits), TP_GROUPS, NAMES)
    assert found.startswith("rank 5 (pp ?) on host is slow")
