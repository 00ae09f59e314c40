import random
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.extras.report.schedule_csv import from_csv
from megapipe.schedule.action import COMPUTE_OPS, Op
from megapipe.schedule.dependencies import ChannelPath, ValueKind
from megapipe.schedule.families import build_lowered, build_schedule
from megapipe.schedule.lower import lower
from megapipe.schedule.placement import linear, loop
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.validate import validate
from tests.schedule.naive import runs
from tests.schedule.strategies import named_schedules, random_schedules
from tests.tables import rows

FAULTS = rows(Path(__file__).with_name("faults.tsv"))
seeds = st.integers(0, 10**6)
any_schedule = st.one_of(
    named_schedules().filter(lambda s: s.num_microbatches * s.num_stages <= 60), random_schedules()
)


def with_rows(schedule, rows):
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, tuple(map(tuple, rows)))


def is_accepted(schedule):
    """Return True if the schedule is valid; check that a rejection shows the grid."""
    try:
        validate(schedule)
    except ScheduleError as error:
        message = str(error)
    else:
        return True
    assert "rank 0:" in message or "ranks)" in message
    return False


@given(any_schedule, st.integers(0, 3), seeds)
@settings(max_examples=120)
def test_swapped_actions_are_valid_exactly_if_naive_executor_finishes(schedule, depth, seed):
    rng = random.Random(seed)
    rows = [list(row) for row in lower(schedule, depth).rows]
    row = rng.choice(rows)
    i = rng.randrange(len(row))
    j = min(len(row) - 1, i + rng.choice([1, 1, 2, 3, len(row)]))
    row[i], row[j] = row[j], row[i]
    mutated = with_rows(schedule, rows)
    assume(len(schedule.placement.directions) == 1)  # the naive executor ignores the order of collectives
    assert is_accepted(mutated) == runs(mutated)


@given(any_schedule, st.booleans(), seeds)
@settings(max_examples=60)
def test_a_dropped_doubled_or_moved_action_is_rejected(schedule, is_lowered, seed):
    rng = random.Random(seed)
    rows = [list(row) for row in (lower(schedule).rows if is_lowered else schedule.rows)]
    rank = rng.choice([rank for rank, row in enumerate(rows) if row])
    slot = rng.randrange(len(rows[rank]))
    dropped = [row[:slot] + row[slot + 1 :] if r == rank else row for r, row in enumerate(rows)]
    doubled = [[*row[:slot], row[slot], *row[slot:]] if r == rank else row for r, row in enumerate(rows)]
    rest = with_rows(schedule, dropped)
    if (
        rest.has_backward and rest.is_lowered == is_lowered
    ):  # otherwise it is a complete forward-only or compute-only schedule
        assert not is_accepted(rest)
    assert not is_accepted(with_rows(schedule, doubled))
    for other in set(range(len(rows))) - {rank}:
        moved = [[*row, rows[rank][slot]] if r == other else row for r, row in enumerate(dropped)]
        assert not is_accepted(with_rows(schedule, moved))


@given(any_schedule, st.integers(0, 3))
@settings(max_examples=60)
def test_reported_send_depth_is_the_least_that_finishes(schedule, receive_depth):
    lowered = lower(schedule, receive_depth)
    least = validate(lowered).send_depth
    assert runs(lowered, least)
    validate(lowered, send_depth=least)
    if least:
        assert not runs(lowered, least - 1)
        with pytest.raises(ScheduleError, match="deadlock"):
            validate(lowered, send_depth=least - 1)


@pytest.mark.parametrize(
    ("name", "v", "m"), [pytest.param("1f1b", 1, 8, id="1f1b"), pytest.param("interleaved", 2, 8, id="interleaved")]
)
def test_blocking_sends_and_receives_deadlock(name, v, m):
    lowered = build_lowered(name, 4, v, m, receive_depth=0)
    assert validate(lowered).send_depth == 1
    with pytest.raises(ScheduleError, match=r"deadlock: rank .*send depth 0") as caught:
        validate(lowered, send_depth=0)
    assert ">" in str(caught.value).split("\n", 1)[1]


def test_receives_posted_ahead_make_1f1b_safe_with_blocking_sends():
    assert validate(build_lowered("1f1b", 4, 1, 8, receive_depth=1)).send_depth == 0


def test_the_report_names_every_channel_by_boundary_and_kind():
    report = validate(build_lowered("interleaved", 2, 2, 4))
    assert set(report.least_send_depth) == {
        ChannelPath(kind, boundary) for kind in (ValueKind.ACT, ValueKind.GRAD) for boundary in range(3)
    }
    assert "6 channels" in str(report)
    assert "activations of stage 0 -> 1" in map(str, report.least_send_depth)


@pytest.mark.parametrize(("layout", "text", "complaint"), [pytest.param(*row[1:], id=row[0]) for row in FAULTS])
def test_faults_are_named_with_their_place(layout, text, complaint):
    with pytest.raises(ScheduleError, match=complaint):
        validate(from_csv("\n".join(text.split()), placement=loop(*map(int, layout.split(" x ")))))


def test_a_channel_that_receives_in_another_order_is_rejected():
    rows = [list(row) for row in build_lowered("gpipe", 2, 1, 2).rows]
    first, second = (slot for slot, a in enumerate(rows[1]) if a.op is Op.RECV_F)
    rows[1][first], rows[1][second] = rows[1][second], rows[1][first]
    with pytest.raises(ScheduleError, match=r"pp_rank 0 to 1 .*0SEND_F0 .*1RECV_F1") as caught:
        validate(Schedule("fifo", linear(2), 2, tuple(map(tuple, rows))))
    assert ">0SEND_F0<" in str(caught.value)
    assert ">1RECV_F1<" in str(caught.value)


@pytest.mark.parametrize("rank", range(4))
def test_reductions_in_different_orders_on_two_ranks_are_rejected(rank: int) -> None:
    """A DualPipe rank may delay a reduction to the end of its row only if the other holder does so too."""
    schedule = build_lowered("dualpipe", 4, 1, 8)
    validate(schedule)
    rows = [list(row) for row in schedule.rows]
    first = next(slot for slot, a in enumerate(rows[rank]) if a.op is Op.REDUCE_GRAD)
    rows[rank].append(rows[rank].pop(first))
    with pytest.raises(ScheduleError, match="issued in this order here and in another order on another rank"):
        validate(Schedule("crossed", schedule.placement, 8, tuple(map(tuple, rows))))


def test_error_grid_of_large_schedule_is_short_and_marks_the_fault():
    rows = [list(row) for row in build_schedule("1f1b", 64, 1, 256).rows]
    slot = next(slot for slot, a in enumerate(rows[40]) if a.op is Op.B)
    rows[40].insert(0, rows[40].pop(slot))
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule("broken", linear(64), 256, tuple(map(tuple, rows))))
    lines = str(caught.value).splitlines()
    assert "rank 40, slot 0: 40B0 needs" in lines[0]
    assert any(line.startswith("rank 40: >40B0<") for line in lines)
    assert len(lines) < 25
    assert max(map(len, lines)) < 160


@given(any_schedule)
@settings(max_examples=30)
def test_compute_only_schedules_validate(schedule):
    report = validate(schedule)
    assert not report.schedule.is_lowered
    assert report.num_actions == sum(a.op in COMPUTE_OPS for row in schedule.rows for a in row)
    assert report.send_depth == 0
