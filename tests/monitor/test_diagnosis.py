"""Diagnosis of hangs of any shape.

It finds the rank that the others wait for, and reports nothing while a run makes progress.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.monitor.diagnosis import Diagnosis, Fault, diagnose, report_text, waits_for
from megapipe.monitor.heartbeat import MOST_GROUPS, Record, Snapshot, Wait
from megapipe.monitor.process import ProcessState
from megapipe.monitor.roster import Member, Roster, Sighting

LIMIT = 10.0


def seen(
    rank: int,
    peer: int | None = None,
    collective: tuple[str, int] | None = None,
    age: float = 20.0,
    joined: int = 0,
    state: str = "S",
    phase: str = "",
    patience: int = 1,
    answers: bool = True,
) -> Sighting:
    """Build the sighting of a rank that works or waits.

    peer: the rank whose message it waits for. collective: (group, number) of the collective it waits in. joined: number
    of collectives of group "g" that it has joined.
    """
    wait, what, number = Wait.NOTHING, "", 0
    if peer is not None:
        wait, what = Wait.RECEIVE, "activation from stage 0 to 1"
    if collective is not None:
        wait, what, number = Wait.COLLECTIVE, f"{collective[0]} all_reduce", collective[1]
    record = Record(7, 0, 3, patience, wait, -1 if peer is None else peer, number, phase, "0F1", what)
    member = Member(rank, "node0", 1000 + rank, 5, "space", f"pp {rank}", (rank,))
    return Sighting(
        member, Snapshot(0, (joined,) + (0,) * (MOST_GROUPS - 1), record), age, ProcessState(state), answers
    )


def roster(size: int, *groups: tuple[int, ...]) -> Roster:
    return Roster(tuple(seen(rank).member for rank in range(size)), {"g": groups})


@given(st.integers(2, 40), st.integers(0, 10**6), st.integers(1, 3))
def test_the_roots_of_any_forest_of_waits_are_missing(size: int, seed: int, num_roots: int) -> None:
    """Each rank except the roots waits, for a message or in a collective, for a rank nearer to a root."""
    choose = random.Random(seed)
    order = list(range(size))
    choose.shuffle(order)
    roots = set(order[: min(num_roots, size - 1)])
    sightings, pairs = {}, []
    for place, rank in enumerate(order):
        if rank in roots:
            sightings[rank] = seen(rank)
            continue
        target = choose.choice(order[:place])
        if choose.random() < 0.5:
            sightings[rank] = seen(rank, peer=target)
        else:  # a group of two in which only this rank has joined the collective
            pairs.append(tuple(sorted((rank, target))))
            sightings[rank] = seen(rank, collective=(f"g{len(pairs)}", 1))
    groups = {f"g{i + 1}": (pair,) for i, pair in enumerate(pairs)}
    known = Roster(tuple(sightings[rank].member for rank in range(size)), dict(list(groups.items())[:MOST_GROUPS]))
    if len(pairs) > MOST_GROUPS:
        return
    found = diagnose([sightings[rank] for rank in range(size)], known, LIMIT)
    assert found is not None
    assert (found.fault, set(found.culprits)) == (Fault.STUCK, roots)
    for rank in range(size):
        chain = found.chain(rank)
        assert chain[0] == rank
        assert chain[-1] in roots


@given(st.integers(2, 30), st.integers(0, 10**6))
def test_ranks_that_wait_in_a_circle_are_a_mismatch(size: int, seed: int) -> None:
    choose = random.Random(seed)
    order = list(range(size))
    choose.shuffle(order)
    length = choose.randint(2, size)
    circle = order[:length]
    peers = {rank: circle[(i + 1) % length] for i, rank in enumerate(circle)}
    for place, rank in enumerate(order[length:], start=length):
        peers[rank] = choose.choice(order[:place])
    found = diagnose([seen(rank, peer=peers[rank]) for rank in range(size)], roster(size), LIMIT)
    assert found is not None
    assert (found.fault, set(found.culprits)) == (Fault.MISMATCH, set(circle))


@given(st.integers(2, 30), st.integers(0, 10**6))
def test_ranks_that_wait_for_a_rank_that_makes_progress_are_not_reported(size: int, seed: int) -> None:
    choose = random.Random(seed)
    slow = choose.randrange(size)
    sightings = [seen(rank, peer=slow) if rank != slow else seen(rank, age=LIMIT / 2) for rank in range(size)]
    assert diagnose(sightings, roster(size), LIMIT) is None


def test_only_members_that_have_not_joined_are_waited_for() -> None:
    sightings = [seen(0, collective=("g", 5), joined=5), seen(1, joined=5), seen(2, joined=4), seen(3, joined=0)]
    assert waits_for(sightings[0], sightings, roster(4, (0, 1, 2))) == (2,)


def test_a_stopped_rank_is_missing_even_where_it_waits_itself() -> None:
    sightings = [seen(0, peer=1), seen(1, peer=0, state="T", answers=False)]
    assert diagnose(sightings, roster(2), LIMIT) == Diagnosis(Fault.STOPPED, (1,), {0: (1,), 1: (0,)})


def test_a_stopped_rank_that_has_joined_is_what_a_collective_waits_for() -> None:
    sightings = [
        seen(0, collective=("g", 1), joined=1),
        seen(1, collective=("g", 1), joined=1, state="T", answers=False),
    ]
    found = diagnose(sightings, roster(2, (0, 1)), LIMIT)
    assert found is not None
    assert (found.fault, found.culprits, found.edges[0]) == (Fault.STOPPED, (1,), (1,))


@pytest.mark.parametrize(
    ("culprit", "fault"),
    [
        (seen(1, state="", age=0.1), Fault.GONE),
        (seen(1, answers=False), Fault.SILENT),
        (seen(1, phase="failed", age=0.1), Fault.LEFT),
        (seen(1), Fault.STUCK),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, Fault) else "",
)
def test_the_fault_of_the_missing_rank_is_found(culprit: Sighting, fault: Fault) -> None:
    found = diagnose([seen(0, peer=1), culprit], roster(2), LIMIT)
    assert found is not None
    assert (found.fault, found.culprits) == (fault, (1,))


def test_a_collective_that_all_have_joined_has_no_culprit_among_the_ranks() -> None:
    sightings = [seen(rank, collective=("g", 3), joined=3) for rank in range(2)]
    found = diagnose(sightings, roster(2, (0, 1)), LIMIT)
    assert found is not None
    assert (found.fault, found.culprits) == (Fault.NO_END, (0, 1))


def test_a_phase_with_patience_may_last_longer() -> None:
    sightings = [seen(0, peer=1), seen(1, age=3 * LIMIT, patience=5, phase="saving")]
    assert diagnose(sightings, roster(2), LIMIT) is None
    assert diagnose([seen(0, peer=1), seen(1, age=6 * LIMIT, patience=5, phase="saving")], roster(2), LIMIT) is not None


def test_the_report_names_the_missing_rank_first_then_those_nearest_to_it() -> None:
    sightings = [seen(0, peer=1, age=12.0), seen(1, peer=2, age=13.0), seen(2, age=14.0)]
    found = diagnose(sightings, roster(3), LIMIT)
    assert found is not None
    lines = report_text(found, sightings, {2: "  File x\n    sleep()"}, LIMIT).splitlines()
    assert lines[0] == "training hangs on rank 2 (pp 2, stage 2) on node0, process 1002: in 0F1 for 14.0 s (step 3)"
    assert lines[1] == "  rank 1 (pp 1, stage 1), in 0F1, waits 13.0 s for the activation from stage 0 to 1 from rank 2"
    assert lines[2].startswith("  rank 0 (pp 0, stage 0), in 0F1, waits 12.0 s")
    assert lines[3:6] == ["  stack of rank 2, innermost last:", "      File x", "        sleep()"]
