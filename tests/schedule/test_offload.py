"""The pass that places OFFLOAD and RELOAD, its proof, and the times of its copies, for every synchronous schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.schedule.action import OFFLOAD_OPS, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.families import build_lowered, build_schedule
from megapipe.schedule.lifetimes import Held, peak_held
from megapipe.schedule.lower import lower
from megapipe.schedule.offload import offload
from megapipe.schedule.schedule import Row, Schedule
from megapipe.schedule.sharding import split_stages
from megapipe.schedule.simulate import simulate
from megapipe.schedule.validate import validate
from tests.schedule.strategies import random_schedules
from tests.schedule.test_sharding import synchronous_schedules

ON_DEVICE = {Held.ACTIVATIONS: 1, Held.OFFLOADED: 1}


def words(row: Row) -> list[str]:
    return [str(action) for action in row if action.op in OFFLOAD_OPS or action.op in (Op.F, Op.B, Op.I)]


def one_stage(num_groups: int, num_microbatches: int = 1) -> Schedule:
    """Return 1F1B of one rank in groups of layers, of which all but the last are offloaded."""
    split = split_stages(build_schedule("1f1b", 1, 1, num_microbatches), [num_groups])
    return offload(lower(split), range(num_groups - 1))


@given(st.one_of(synchronous_schedules(), random_schedules()), st.randoms(use_true_random=False))
def test_every_offloaded_schedule_is_valid_computes_the_same_and_needs_no_more_memory(
    schedule: Schedule, random: Any
) -> None:
    lowered, moved = lower(schedule), {stage for stage in range(schedule.num_stages) if random.random() < 0.7}
    offloaded = offload(lowered, moved)
    validate(offloaded)
    assert offloaded.compute_only() == schedule
    assert {action.stage for row in offloaded.rows for action in row if action.op in OFFLOAD_OPS} <= moved
    for before, after in zip(lowered.rows, offloaded.rows, strict=True):
        assert peak_held(after, ON_DEVICE) <= peak_held(before, ON_DEVICE)


@given(synchronous_schedules(), st.randoms(use_true_random=False))
def test_a_row_without_one_of_its_copies_or_with_two_exchanged_is_rejected(schedule: Schedule, random: Any) -> None:
    offloaded = offload(lower(schedule), range(schedule.num_stages))
    rank = random.randrange(schedule.num_ranks)
    row = list(offloaded.rows[rank])
    slots = [slot for slot, action in enumerate(row) if action.op in OFFLOAD_OPS]
    if not slots:
        return
    slot = random.choice(slots)
    other = row.index(row[slot]._replace(op=Op.RELOAD if row[slot].op is Op.OFFLOAD else Op.OFFLOAD))
    exchanged = list(row)
    exchanged[slot], exchanged[other] = row[other], row[slot]
    for wrong in (row[:slot] + row[slot + 1 :], exchanged):
        rows = (*offloaded.rows[:rank], tuple(wrong), *offloaded.rows[rank + 1 :])
        with pytest.raises(ScheduleError, match=r"RELOAD|OFFLOAD"):
            validate(replace(offloaded, rows=rows))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_rank_keeps_at_most_four_groups_of_layers_whatever_their_number(name: str) -> None:
    """One is computed and one leaves; one is used and one comes back."""
    for num_groups in (6, 12):
        split = split_stages(build_schedule(name, 2, 1, 8), [num_groups] * 2)
        for row in offload(lower(split), range(2 * num_groups)).rows:
            assert peak_held(row, ON_DEVICE) <= 4 < peak_held(row, {Held.ACTIVATIONS: 1})


def test_a_group_whose_backward_follows_too_soon_stays() -> None:
    assert words(one_stage(4).rows[0]) == [
        *("0F0", "1F0", "0OFFLOAD0", "2F0", "1OFFLOAD0", "3F0", "3B0", "1RELOAD0", "2B0", "0RELOAD0", "1B0", "0B0")
    ]
    assert words(one_stage(2).rows[0]) == ["0F0", "1F0", "1B0", "0B0"]


@given(synchronous_schedules())
def test_copies_that_take_no_time_do_not_change_the_timeline(schedule: Schedule) -> None:
    lowered, costs = lower(schedule), Costs.equal(schedule.num_stages, latency_seconds=0.25)
    offloaded = offload(lowered, range(schedule.num_stages))
    assert simulate(offloaded, costs).makespan_seconds == simulate(lowered, costs).makespan_seconds


@pytest.mark.parametrize(
    ("seconds", "waits"),
    [
        pytest.param(1.0, 0.0, id="as long as a forward"),
        # 0OFFLOAD0 waits 1 after 1F0, 1OFFLOAD0 as long; 1RELOAD0 ends with 2B0, during which 0RELOAD0 waits for it
        pytest.param(2.0, 2.0, id="as long as a backward"),
        pytest.param(3.0, 4.0 + 2.0, id="longer"),
    ],
)
def test_copies_wait_for_one_another_and_computation_for_them(seconds: float, waits: float) -> None:
    schedule = one_stage(4)
    costs = Costs.equal(schedule.num_stages, 1.0, 1.0, 1.0)
    copies = {(stage, op): seconds for stage in range(schedule.num_stages) for op in OFFLOAD_OPS}
    timed = simulate(schedule, replace(costs, seconds={**costs.seconds, **copies}))
    assert timed.makespan_seconds == 4 * (1.0 + 2.0) + waits


def test_a_schedule_is_offloaded_once_and_not_while_weights_change() -> None:
    with pytest.raises(ScheduleError, match="offloads already"):
        offload(one_stage(6), range(6))
    with pytest.raises(ScheduleError, match="updates weights"):
        offload(build_lowered("pipedream-2bw", 2, 1, 4), range(2))


def test_a_forward_alone_offloads_nothing() -> None:
    rows = (tuple(action for action in one_stage(6).rows[0] if action.op in (Op.F, Op.OFFLOAD)),)
    with pytest.raises(ScheduleError, match="0OFFLOAD0 has no backward"):
        validate(replace(one_stage(6), rows=rows))
