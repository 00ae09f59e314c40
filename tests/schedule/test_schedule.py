import pytest
from hypothesis import given, settings

from megapipe.errors import ScheduleError
from megapipe.extras.report.schedule_csv import from_csv
from megapipe.schedule.families import build_lowered, build_schedule
from megapipe.schedule.lower import lower
from megapipe.schedule.placement import loop, two_directions
from megapipe.schedule.schedule import Schedule, to_csv
from megapipe.schedule.validate import validate
from tests.schedule.strategies import named_schedules

# rows as written by torch.distributed.pipelining: an empty cell is a bubble
TORCH_1F1B = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"


@given(named_schedules())
@settings(max_examples=25)
def test_csv_there_and_back_is_the_identity(schedule):
    for each in (schedule, lower(schedule)):
        assert from_csv(to_csv(each), each.name) == each


def test_two_directions_survive_csv_when_the_placement_is_given():
    schedule = Schedule("d", two_directions(1), 1, build_schedule("1f1b", 1, 1, 1).rows)
    assert from_csv(to_csv(schedule), "d", schedule.placement) == schedule


def test_the_csv_of_torch_loads_without_its_bubbles():
    schedule = from_csv(TORCH_1F1B)
    validate(schedule)
    assert schedule.rows == build_schedule("1f1b", 2, 1, 2).rows


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param("0F0,0Q1\n", "line 1, cell 2.*0Q1", id="not an action"),
        pytest.param("0F0\n0F0\n", "0F0 is on rank 1", id="stage on two ranks"),
        pytest.param("0F0\n2F0\n", "forward of stage 1", id="gap"),
        pytest.param("", "forward of stage 0", id="empty"),
        pytest.param("0F0,0F4000000000\n", "0F4000000000 among 2 actions", id="absurd microbatch"),
    ],
)
def test_unreadable_csv_names_the_place(text, complaint):
    with pytest.raises(ScheduleError, match=complaint):
        from_csv(text)


def test_a_schedule_has_a_row_a_rank():
    with pytest.raises(ScheduleError, match="1 rows for 2"):
        Schedule("short", loop(2, 1), 1, ((),))


def test_compute_only_undoes_lowering():
    assert build_lowered("interleaved", 3, 2, 5).compute_only() == build_schedule("interleaved", 3, 2, 5)
