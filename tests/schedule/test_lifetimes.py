"""CUDA-graph slots and the plan of offloading, which fold over the lifetimes of activations.

No two microbatches in flight share a slot, and no stage has more slots than it needs. For every schedule, each
offloaded unit is loaded in time and none too early.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedule.action import COMPUTE_OPS, Op, parse_action
from megapipe.schedule.families import build_lowered
from megapipe.schedule.lifetimes import (
    AHEAD,
    COPYING,
    Moment,
    Moves,
    StageGroups,
    Unit,
    assign_slots,
    host_pieces,
    num_slots,
    plan_moves,
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
