import pytest

from megapipe.errors import ConfigError
from megapipe.schedule.placement import Placement, linear, loop, two_directions, v_shape


@pytest.mark.parametrize(
    ("placement", "ranks", "held"),
    [
        pytest.param(linear(4), (0, 1, 2, 3), [(0,), (1,), (2,), (3,)], id="linear"),
        pytest.param(loop(2, 3), (0, 1, 0, 1, 0, 1), [(0, 2, 4), (1, 3, 5)], id="loop"),
        pytest.param(v_shape(3), (0, 1, 2, 2, 1, 0), [(0, 5), (1, 4), (2, 3)], id="v"),
        pytest.param(two_directions(4), (0, 1, 2, 3), [(0, 3), (1, 2), (1, 2), (0, 3)], id="two directions"),
    ],
)
def test_placements_match_the_documented_order(placement, ranks, held):
    assert placement.rank_of_stage == ranks
    assert [placement.stages_of(rank) for rank in range(placement.num_ranks)] == held


def test_odd_microbatches_take_the_second_direction():
    placement = two_directions(4)
    assert [placement.rank_of(0, m) for m in range(4)] == [0, 3, 0, 3]
    assert placement.ranks_of(1) == (1, 2)


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [
        pytest.param(3, (0, 1), id="idle rank"),
        pytest.param(2, (0, 1, 2), id="no such rank"),
        pytest.param(0, (), id="none"),
    ],
)
def test_invalid_placements_are_errors(ranks, stages):
    with pytest.raises(ConfigError):
        Placement(ranks, stages)


def test_a_second_direction_that_is_not_the_mirror_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(1, 0, 3, 2\) .*use \(3, 2, 1, 0\)"):
        Placement(4, (0, 1, 2, 3), (1, 0, 3, 2))
    assert Placement(4, (1, 0, 3, 2), (2, 3, 0, 1)).is_mirrored
