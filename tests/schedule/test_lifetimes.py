"""CUDA-graph slots, which fold over the lifetimes of activations, and the sizes of host buffers.

No two microbatches in flight share a slot, and no stage has more slots than it needs.
"""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedule.action import COMPUTE_OPS, Op
from megapipe.schedule.lifetimes import (
    assign_slots,
    host_pieces,
    num_slots,
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


@given(st.integers(0, 1 << 40))
def test_host_buffers_are_made_of_powers_of_two_with_little_waste(num_bytes: int) -> None:
    pieces = host_pieces(num_bytes)
    assert all(piece & (piece - 1) == 0 for piece in pieces)
    assert num_bytes <= sum(pieces) <= num_bytes * 33 / 32
    assert len(pieces) <= 7
