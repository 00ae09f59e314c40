from itertools import combinations, combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ConfigError
from megapipe.schedule.partition import (
    Partition,
    StageLayers,
    cut_by_cost,
    cut_by_stage_cost,
    cut_evenly,
    from_counts,
    layout_stages,
    parse_layout,
)
from megapipe.schedule.placement import loop, v_shape

costs = st.integers(0, 40).map(float)


def stage_costs(partition, layer_costs, head_cost):
    return tuple(
        sum(layer_costs[s.first_layer : s.last_layer_exclusive], 0.0) + head_cost * s.has_head for s in partition.stages
    )


def brute_force(layer_costs, head, num_stages):
    """Return (minimum of the maximum cost, minimum of the sum of squared counts) over all contiguous cuts."""
    n = len(layer_costs)
    cuts = (
        combinations(range(1, n), num_stages - 1)
        if n >= num_stages
        else combinations_with_replacement(range(n + 1), num_stages - 1)
    )
    best = []
    for cut in cuts:
        edges = [0, *cut, n]
        sums = [sum(layer_costs[a:b]) for a, b in pairwise(edges)]
        sums[-1] += head
        best.append((max(sums), sum((b - a) ** 2 for a, b in pairwise(edges))))
    return min(best)


@given(st.lists(costs, max_size=9), costs, st.integers(1, 5))
@settings(max_examples=150)
def test_cut_by_cost_is_optimal_and_covers_every_layer_once(layer_costs, head, num_stages):
    partition = cut_by_cost(layer_costs, head, num_stages)
    assert [k for s in partition.stages for k in range(s.first_layer, s.last_layer_exclusive)] == list(
        range(len(layer_costs))
    )
    squares = sum(n * n for n in partition.layer_counts)
    assert (max(stage_costs(partition, layer_costs, head)), squares) == brute_force(layer_costs, head, num_stages)
    if len(layer_costs) >= num_stages:
        assert min(partition.layer_counts) >= 1


def test_contiguous_cuts_of_the_textbook_example_reach_40_not_30():
    times = [10.0] * 4 + [20.0] * 4
    assert max(stage_costs(cut_by_cost(times, 0, 4), times, 0)) == 40


def test_a_heavy_head_moves_layers_to_the_first_stage():
    assert cut_by_cost([1.0] * 4, 2.3, 2).layer_counts == (3, 1)


def test_equal_layers_are_cut_equally():
    assert cut_by_cost([1.0] * 12, 0, 4).layer_counts == (3, 3, 3, 3)
    assert sorted(cut_by_cost([0.1] * 10, 0, 4).layer_counts) == [2, 2, 3, 3]


def test_infinite_costs_limit_the_memory_of_stages():
    def cost_within(limit_bytes):
        def cost(stage, first, end):
            num_layers = end - first
            return num_layers if num_layers * (3 if stage == 0 else 1) <= limit_bytes else float("inf")

        return cost

    assert cut_by_stage_cost(cost_within(6), 6, 2).layer_counts == (2, 4)
    assert cut_by_stage_cost(cost_within(3), 6, 2) is None


def ranks(num_ranks, num_chunks=1):
    return loop(num_ranks, num_chunks).rank_of_stage


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 5), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_equal_counts_count_embedding_and_loss_as_layers(p, v, each, embedding, head):
    layers = p * v * each - embedding - head
    if layers < 0 or (each == 1 and p * v == 1 and embedding and head):
        return
    counts = cut_evenly(layers, ranks(p, v), count_embedding=embedding, count_head=head).layer_counts
    expected = [each] * (p * v)
    expected[0] -= embedding
    expected[-1] -= head
    assert list(counts) == expected


def test_first_and_last_rank_may_hold_other_counts():
    assert cut_evenly(16, ranks(4), first_rank_layers=3, last_rank_layers=1).layer_counts == (3, 6, 6, 1)
    assert cut_evenly(22, ranks(4, 2), first_rank_layers=4).layer_counts == (2, 3, 3, 3, 2, 3, 3, 3)
    assert cut_evenly(22, v_shape(4).rank_of_stage, first_rank_layers=4).layer_counts == (2, 3, 3, 3, 3, 3, 3, 2)
    assert cut_evenly(5, ranks(1), last_rank_layers=5).layer_counts == (5,)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        pytest.param({"num_layers": 5, "rank_of_stage": ranks(2)}, "5 layers .* do not divide over 2 ranks", id="odd"),
        pytest.param({"num_layers": 6, "rank_of_stage": ranks(2, 2)}, "2 ranks x 2 chunks", id="chunks"),
        pytest.param(
            {"num_layers": 8, "rank_of_stage": ranks(2, 2), "first_rank_layers": 3},
            "do not divide",
            id="first rank chunks",
        ),
        pytest.param(
            {"num_layers": 4, "rank_of_stage": ranks(2), "first_rank_layers": 3, "last_rank_layers": 3},
            "6 together",
            id="too many",
        ),
        pytest.param(
            {"num_layers": 8, "rank_of_stage": ranks(2), "first_rank_layers": 3, "last_rank_layers": 3},
            "6 together",
            id="too few",
        ),
        pytest.param({"num_layers": 0, "rank_of_stage": ranks(1), "count_head": True}, "", id="no layers"),
    ],
)
def test_counts_that_do_not_divide_are_refused(arguments, complaint):
    if arguments["num_layers"] == 0:
        assert cut_evenly(**arguments | {"count_head": False}).layer_counts == (0,)
        return
    with pytest.raises(ConfigError, match=complaint):
        cut_evenly(**arguments)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_a_layout_string_there_and_back_is_the_identity(counts):
    partition = from_counts(counts, sum(counts))
    assert parse_layout(partition.layout(), sum(counts), len(counts)) == partition


def test_llama_3_405b_is_128_slots_less_one_at_each_end():
    partition = parse_layout("E,t*7|(t*8|)*14,t*7,L", 126, 16)
    assert partition.layer_counts == (7, *[8] * 14, 7)
    assert partition == cut_evenly(126, ranks(16), count_embedding=True, count_head=True)
    interleaved = parse_layout("E|(t|)*126,L", 126, 128)
    assert interleaved.layer_counts == (0, *[1] * 126, 0)
    assert interleaved == cut_evenly(126, ranks(16, 8), count_embedding=True, count_head=True)


def test_modules_of_multi_token_prediction_are_at_the_end_or_not_written():
    for text in ("Et|ttmmL", "Et|ttL", "Et|t*2,m*2,L"):
        assert parse_layout(text, 3, 2, num_predictions=2).layer_counts == (1, 2)
    for text, complaint in (("Et|ttmL", "'ttmmL'"), ("Etm|ttmL", "all 2 modules"), ("Et|tmmtL", "all 2 modules")):
        with pytest.raises(ConfigError, match=complaint):
            parse_layout(text, 3, 2, num_predictions=2)


def test_a_layout_may_repeat_groups_within_groups():
    assert parse_layout("Et*3|(tt|)*29,L", 61, 31).layer_counts == (3, *[2] * 29, 0)
    assert parse_layout("E((t)*2|)*3 t L", 7, 4).layer_counts == (2, 2, 2, 1)
    assert layout_stages("Et*3|(tt|)*29,L") == 31
    assert parse_layout("Et||tL", 2, 3).layer_counts == (1, 0, 1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param("Et|tt", "stage 1 is 'tt', expected 'ttL'", id="no loss"),
        pytest.param("tE|ttL", "stage 0 is 'tE', expected 'Et'", id="embedding late"),
        pytest.param("Et|EttL", "stage 1 is 'EttL'", id="embedding twice"),
        pytest.param("EtttL", "has 1 stages", id="stages"),
        pytest.param("Et|tL", "holds 2 layers", id="layers"),
        pytest.param("Et|(ttL", r"'\(ttL' opens", id="open group"),
        pytest.param("Et|tt)L", r"'\)' without", id="close group"),
        pytest.param("Et*|ttL", r"'t\*' lacks", id="no count"),
        pytest.param("Et|xtL", "'xtL' starts with none", id="letter"),
        pytest.param("Et|ttmL", "--mtp-num-layers", id="mtp"),
    ],
)
def test_layout_error_quotes_the_invalid_part(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_layout(text, 3, 2)


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param((StageLayers(0, 2, True, False), StageLayers(3, 4, False, True)), id="gap"),
        pytest.param((StageLayers(0, 2, True, False), StageLayers(1, 4, False, True)), id="overlap"),
        pytest.param((StageLayers(0, 2, True, True), StageLayers(2, 4, False, True)), id="two heads"),
        pytest.param((), id="nothing"),
    ],
)
def test_incomplete_partition_is_an_error(stages):
    with pytest.raises(ConfigError):
        Partition(stages)


def test_the_text_of_a_partition_shows_layers_embedding_and_head():
    assert str(from_counts([2, 1, 0], 3)) == "embedding+0..1 | 2 | head"
