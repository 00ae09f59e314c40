import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.schedule.action import SHARDING_OPS, Action, Op, parse_action
from megapipe.schedule.dependencies import MAKES, NEEDS, ValueKind

actions = st.builds(
    lambda stage, op, mb: Action(stage, op, None if op in SHARDING_OPS or (op is Op.REDUCE_GRAD and mb > 9) else mb),
    st.integers(0, 5000),
    st.sampled_from(Op),
    st.integers(0, 5000),
)


@given(actions)
def test_parsing_the_text_of_an_action_gives_the_action(action):
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    ("action", "text"),
    [
        pytest.param(Action(2, Op.F, 0), "2F0", id="forward"),
        pytest.param(Action(12, Op.SEND_F, 3), "12SEND_F3", id="send"),
        pytest.param(Action(2, Op.REDUCE_GRAD, None), "2REDUCE_GRAD", id="reduce"),
        pytest.param(Action(2, Op.REDUCE_GRAD, 5), "2REDUCE_GRAD5", id="reduce a microbatch"),
        pytest.param(Action(2, Op.UNSHARD, None), "2UNSHARD", id="unshard"),
        pytest.param(Action(2, Op.RESHARD, None), "2RESHARD", id="reshard"),
        pytest.param(Action(2, Op.OFFLOAD, 0), "2OFFLOAD0", id="offload"),
        pytest.param(Action(12, Op.RELOAD, 3), "12RELOAD3", id="reload"),
    ],
)
def test_text_form(action, text):
    assert str(action) == text
    assert parse_action(f" {text} ") == action


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "2f0", "2F0 3", "-1F0", "2F-1", "2UNSHARD0", "2RESHARD3", "2UPDATE", "٣F0"]
)
def test_invalid_action_text_is_an_error(text):
    with pytest.raises(ScheduleError, match="is not an action"):
        parse_action(text)


def test_every_op_states_what_it_needs_and_makes():
    assert set(NEEDS) == set(MAKES) == set(Op)


def test_a_split_backward_makes_what_a_full_one_makes():
    full, halves = set(MAKES[Op.B]), {*MAKES[Op.I], *MAKES[Op.W]}
    assert halves - full == set(NEEDS[Op.W]) == {(ValueKind.LEFT, 0)}
    assert full <= halves
    assert NEEDS[Op.B] == NEEDS[Op.I]
