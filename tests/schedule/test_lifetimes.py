"""CUDA-graph slots, weight versions and the plan of offloading, which fold over the lifetimes of activations.

No two microbatches in flight share a slot, and no stage has more slots than it needs. Weight versions follow the
published formulas, and no buffer is overwritten while a microbatch still needs it. For every schedule, each offloaded
unit is loaded in time and none too early.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.schedule.action import COMPUTE_OPS, Op, parse_action
from megapipe.schedule.families import SCHEDULES, build_lowered, build_schedule
from megapipe.schedule.lifetimes import (
    AHEAD,
    COPYING,
    Moment,
    Moves,
    StageGroups,
    Unit,
    WeightVersions,
    assign_slots,
    host_pieces,
    num_slots,
    one_group_stale,
    plan_moves,
    stashed,
    weight_versions,
)
from megapipe.schedule.lower import lower
from megapipe.schedule.schedule import Schedule
from tests.schedule.strategies import family_schedules, random_schedules


@settings(max_examples=80)
@given(st.one_of(family_schedules(), random_schedules()))
def test_a_stage_has_as_many_slots_as_microbatches_in_flight(schedule: Schedule) -> None:
    for row in schedule.rows:
        slots = assign_slots(row)
        live: defaultdict[int, set[int]] = defaultdict(set)
        peak: defaultdict[int, int] = defaultdict(int)
        for stage, op, microbatch in row:
            if op is Op.F:
                assert microbatch is not None
                assert slots[stage, microbatch] not in {slots[stage, other] for other in live[stage]}
                live[stage].add(microbatch)
                peak[stage] = max(peak[stage], len(live[stage]))
            elif op in (Op.B, Op.W):
                assert microbatch is not None
                live[stage].remove(microbatch)
        assert slots.keys() == {(stage, mb) for stage, op, mb in row if op is Op.F}
        assert num_slots(slots) == peak


@settings(max_examples=40)
@given(st.one_of(family_schedules(), random_schedules()))
def test_slot_is_reused_only_after_gradient_of_its_sent_output_arrived(schedule: Schedule) -> None:
    """The message of the forward has already arrived, because the gradient comes from the rank that received it."""
    lowered = lower(schedule)
    for row in lowered.rows:
        slots = assign_slots(row)
        holder: dict[tuple[int, int], int] = {}
        sent, answered = set(), set()
        for stage, op, microbatch in row:
            if op not in COMPUTE_OPS and op not in (Op.SEND_F, Op.RECV_B):
                continue
            assert microbatch is not None
            if op is Op.SEND_F:
                sent.add((stage, microbatch))
            elif op is Op.RECV_B:
                answered.add((stage, microbatch))
            elif op is Op.F:
                before = holder.get((stage, slots[stage, microbatch]))
                assert (stage, before) not in sent or (stage, before) in answered
                holder[stage, slots[stage, microbatch]] = microbatch


RANKS = st.integers(1, 8)
COUNTS = st.integers(1, 40)


def num_buffers(versions: WeightVersions) -> int:
    return 1 + max(versions.buffer_of)


def versions_of(schedule: Schedule, group: int) -> list[WeightVersions]:
    rule = SCHEDULES[schedule.name].versions
    assert rule is not None
    return [weight_versions(schedule, rank, rule, group) for rank in range(schedule.num_ranks)]


@settings(max_examples=40)
@given(RANKS, COUNTS)
def test_pipedream_is_p_minus_1_minus_r_updates_late_and_stashes_p_minus_r_versions(p: int, m: int) -> None:
    for r, versions in enumerate(versions_of(build_schedule("pipedream", p, 1, m), p)):
        assert versions.version_of == tuple(max(0, k - (p - 1 - r)) for k in range(m))
        assert num_buffers(versions) <= p - r
        assert num_buffers(versions) == p - r or m < 2 * (p - 1 - r), "a long stretch fills them all"
        assert versions.group_sizes == (1,) * m


@settings(max_examples=40)
@given(RANKS, COUNTS, st.integers(0, 5))
def test_2bw_is_one_group_late_and_needs_two_versions(p: int, m: int, more: int) -> None:
    group = p + more
    for versions in versions_of(build_schedule("pipedream-2bw", p, 1, m, group), group):
        assert versions.version_of == tuple(max(0, k // group - 1) for k in range(m))
        assert num_buffers(versions) <= 2
        assert sum(versions.group_sizes) == m
        assert set(versions.group_sizes[:-1]) <= {group}
    assert (
        p == 1 or m <= group or num_buffers(versions_of(build_schedule("pipedream-2bw", p, 1, m, group), group)[0]) == 2
    )


@settings(max_examples=60)
@given(st.sampled_from(["pipedream", "pipedream-2bw"]), RANKS, COUNTS)
def test_backward_uses_weight_buffer_of_its_forward(name: str, p: int, m: int) -> None:
    schedule = build_lowered(name, p, 1, m)
    for row, versions in zip(schedule.rows, versions_of(schedule, p), strict=True):
        content, updates, found = {0: 0}, 0, {}
        for _, op, k in row:
            if op is Op.F:
                found[k] = content[versions.buffer_of[versions.version_of[k]]]
                assert found[k] == versions.version_of[k]
            elif op is Op.B:
                assert content[versions.buffer_of[versions.version_of[k]]] == found[k]
            elif op is Op.UPDATE:
                updates += 1
                content[versions.buffer_of[updates]] = updates
        assert updates == len(versions.group_sizes)


def test_group_smaller_than_pipeline_is_an_error() -> None:
    schedule = build_schedule("pipedream-2bw", 4, 1, 12)
    with pytest.raises(ScheduleError, match=r"0F4 on rank 0 .*version 1, .*0"):
        weight_versions(schedule, 0, one_group_stale, group_size=2)


def test_synchronous_families_have_no_rule() -> None:
    assert {name for name, family in SCHEDULES.items() if family.versions is not None} == {"pipedream", "pipedream-2bw"}
    assert SCHEDULES["pipedream"].versions is stashed


CASES = [
    ("1f1b", 4, 1, 8),
    ("gpipe", 2, 1, 4),
    ("interleaved", 2, 3, 6),
    ("zb-h1", 4, 1, 6),
    ("zb-v", 3, 2, 7),
    ("dualpipe", 2, 1, 4),
]


def planned(name: str, pp: int, chunks: int, count: int, rank: int, moved: int) -> tuple[Moves, dict[int, StageGroups]]:
    schedule = build_lowered(name, pp, chunks, count)
    last = schedule.placement.num_stages - 1
    stages = {stage: StageGroups(3, moved, has_head=stage == last) for stage in schedule.placement.stages_of(rank)}
    return plan_moves(schedule.rows[rank], stages), stages


@pytest.mark.parametrize(("name", "pp", "chunks", "count"), CASES, ids=[each[0] for each in CASES])
def test_offloaded_units_leave_after_forward_and_return_before_backward(
    name: str, pp: int, chunks: int, count: int
) -> None:
    for rank in range(pp):
        for moved in (1, 3):
            moves, stages = planned(name, pp, chunks, count, rank, moved)
            at = {moment: index for index, moment in enumerate(moves.moments)}
            left = {unit: index for index, units in moves.released.items() for unit in units}
            back = {unit: index for index, units in moves.loaded.items() for unit in units}
            assert left.keys() == back.keys() == moves.moved
            for moment, index in at.items():
                if moment.op is not Op.F or moment.group >= moved:
                    continue
                unit = Unit(moment.stage, moment.microbatch, moment.group)
                used = min(at[moment._replace(op=op)] for op in (Op.B, Op.I) if moment._replace(op=op) in at)
                if unit in moves.moved:
                    assert index + COPYING == left[unit] < back[unit] == used - AHEAD
                else:
                    assert used - AHEAD <= index + COPYING, "it stays although leaving would free memory"
            assert all(unit.group < stages[unit.stage].num_moved for unit in moves.moved)


def test_full_offload_keeps_at_most_four_units_on_device() -> None:
    for name, pp, chunks, count in CASES:
        for rank in range(pp):
            moves, _ = planned(name, pp, chunks, count, rank, 3)
            here = 0
            for index, moment in enumerate(moves.moments):
                here += len(moves.loaded.get(index, ())) - len(moves.released.get(index, ()))
                unit = Unit(moment.stage, moment.microbatch, moment.group)
                here += moment.op is Op.F and unit in moves.moved
                # one being computed, one being offloaded, one in use, one being loaded
                assert here <= 4, (name, rank, moment)
                here -= moment.op in (Op.B, Op.I) and unit in moves.moved


@given(st.integers(0, 1 << 40))
def test_host_buffers_are_made_of_powers_of_two_with_little_waste(num_bytes: int) -> None:
    pieces = host_pieces(num_bytes)
    assert all(piece & (piece - 1) == 0 for piece in pieces)
    assert num_bytes <= sum(pieces) <= num_bytes * 33 / 32
    assert len(pieces) <= 7


def test_last_layer_stays_on_device_if_its_backward_follows() -> None:
    """Five layers on one rank: only the head's backward separates the last layer's forward and backward."""
    moves = plan_moves([parse_action("0F0"), parse_action("0B0")], {0: StageGroups(5, 5, has_head=True)})
    assert {unit.group for unit in moves.moved} == {0, 1, 2, 3}
    assert [str(moment.op.value) + str(moment.group) for moment in moves.moments] == [
        *(f"F{group}" for group in range(5)),
        *(f"B{group}" for group in (5, 4, 3, 2, 1, 0)),
    ]
    assert moves.loaded == {6: (Unit(0, 0, 3),), 7: (Unit(0, 0, 2),), 8: (Unit(0, 0, 1),), 9: (Unit(0, 0, 0),)}


def test_first_unit_of_a_backward_is_loaded_during_previous_action() -> None:
    row = [parse_action(word) for word in ["0F0", "0F1", "0F2", "0SEND_F2", "0B0", "0B1", "0B2"]]
    moves = plan_moves(row, {0: StageGroups(2, 2, has_head=False)})
    (at,) = (index for index, units in moves.loaded.items() if Unit(0, 1, 1) in units)
    assert moves.moments[at] == Moment(0, Op.B, 0, 0)
