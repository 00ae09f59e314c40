"""The proof by gradients: it accepts every family and every schedule that `validate` accepts, and names the action,
stage and microbatch of a planted mistake.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.schedule.action import Action, Op
from megapipe.schedule.families import SCHEDULES, build_lowered
from megapipe.schedule.lower import lower
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.validate import validate
from tests.schedule.gradients import plain_gradients, prove_gradients
from tests.schedule.strategies import family_shapes, random_schedules


def replicas_of(schedule: Schedule) -> list[tuple[int, ...]]:
    """Return the ranks that hold what each rank holds."""
    held = schedule.placement.stages_of
    ranks = range(schedule.num_ranks)
    return [tuple(other for other in ranks if held(other) == held(rank)) for rank in ranks]


def without(schedule: Schedule, rank: int, action: Action) -> Schedule:
    rows = list(schedule.rows)
    rows[rank] = tuple(each for each in rows[rank] if each != action)
    return replace(schedule, rows=tuple(rows))


def shuffled(schedule: Schedule, random: Random) -> Schedule:
    """Return a schedule with an action that was left out, or has another place in its row."""
    rows = [list(row) for row in schedule.rows]
    row = random.choice([row for row in rows if row])
    action = row.pop(random.randrange(len(row)))
    if random.random() < 0.8:
        row.insert(random.randrange(len(row) + 1), action)
    return replace(schedule, rows=tuple(map(tuple, rows)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_family_computes_the_gradients_of_a_plain_loop(name: str) -> None:
    for slices in (1, 3) if SCHEDULES[name].takes_slices else (1,):
        schedule = build_lowered(*family_shapes(name, 4, 2, 9), num_slices=slices)
        prove_gradients(schedule, replicas_of(schedule))


@settings(max_examples=40)
@given(random_schedules(), st.randoms(use_true_random=False))
def test_every_valid_order_computes_the_gradients_of_a_plain_loop(planned: Schedule, random: Random) -> None:
    schedule = lower(planned)
    for changed in (schedule, shuffled(schedule, random)):
        try:
            validate(changed)
        except ScheduleError:  # two ranks of a stage may also reduce in different orders
            assert changed is not schedule or len(schedule.placement.directions) == 2
        else:
            prove_gradients(changed, replicas_of(changed))


def test_the_plain_loop_is_the_derivative_of_the_loss() -> None:
    """One stage of weight w = 3 on 5: the loss is (3 x 5 - 3)^2 / 2, its derivative by w is 12 x 5."""
    assert plain_gradients(1, 1) == {(0, 0): 60}


@pytest.mark.parametrize(
    ("schedule", "replicas", "message"),
    [
        pytest.param(
            build_lowered("dualpipe", 2, 1, 4),
            [(0,), (1,)],
            "rank 0: the gradient of stage 0, summed over pp_ranks 0, counts microbatch 1 0 times, not once",
            id="copies of a stage are not summed",
        ),
        pytest.param(
            build_lowered("1f1b", 2, 1, 4),
            [(0, 1), (0, 1)],
            "rank 0 reduces stage 0 where rank 1, over which it sums, reduces stage 1",
            id="different stages are summed",
        ),
        pytest.param(
            without(build_lowered("zb-h1", 2, 1, 4), 1, Action(1, Op.W, 2)),
            [(0,), (1,)],
            "rank 1: the gradient of stage 1, summed over pp_ranks 1, counts microbatch 2 0 times, not once",
            id="no W",
        ),
        pytest.param(
            without(build_lowered("1f1b", 2, 1, 4), 0, Action(0, Op.SEND_F, 1)),
            [(0,), (1,)],
            r"rank 1, slot \d+: 1B1: the weight gradient of stage 1, microbatch 1 is \d+, but \d+ in a plain loop",
            id="the message of another microbatch",
        ),
        pytest.param(
            without(build_lowered("gpipe", 2, 1, 2), 1, Action(1, Op.SEND_B, 1)),
            [(0,), (1,)],
            "0B1 waits for a message that is not sent",
            id="no message",
        ),
    ],
)
def test_a_wrong_gradient_is_named(schedule: Schedule, replicas: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        prove_gradients(schedule, replicas)
