"""Cuts for ranks that hold several stages.

They minimize the time of the busiest rank within its memory, and are never worse than balancing single stages.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedule.action import Op
from megapipe.schedule.balance import CutQuestion, balanced_cuts, rank_loads
from megapipe.schedule.costs import Costs
from megapipe.schedule.families import SCHEDULES, build_schedule
from megapipe.schedule.partition import Partition, cut_by_stage_cost, from_counts
from megapipe.schedule.placement import Placement, linear, loop, two_directions, v_shape
from megapipe.schedule.simulate import simulate
from tests.schedule.strategies import every_cut

PLACEMENTS = [
    linear(3),
    linear(4),
    loop(2, 2),
    loop(2, 3),
    loop(3, 2),
    v_shape(2),
    v_shape(3),
    two_directions(2),
    two_directions(4),
]
whole = st.integers(1, 30).map(float)


def question_of(
    placement: Placement, layers: list[float], embedding: float, head: float, speeds: tuple[float, ...], **rest
) -> CutQuestion:
    last = placement.num_stages - 1

    def cost(stage: int, first: int, end: int) -> float:
        return sum(layers[first:end]) + embedding * (stage == 0) + head * (stage == last)

    return CutQuestion(placement, len(layers), cost, speeds, layers_alike=len(set(layers)) < 2, **rest)


def busiest(question: CutQuestion, cut: Partition) -> float:
    return max(rank_loads(question, cut))


@st.composite
def questions(draw: st.DrawFn, alike: bool = True, limited: bool = False) -> CutQuestion:
    placement = draw(st.sampled_from(PLACEMENTS))
    count = draw(st.integers(placement.num_stages, placement.num_stages + 6))
    layers = [draw(whole)] * count if alike else draw(st.lists(whole, min_size=count, max_size=count))
    speeds = tuple(draw(st.sampled_from([1.0, 1.0, 0.75, 0.5])) for _ in range(placement.num_ranks))
    rest = {}
    if limited:
        bytes_of = draw(st.lists(st.integers(1, 4), min_size=placement.num_stages, max_size=placement.num_stages))
        sizes = [1] * count if alike else draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
        limit = draw(st.integers(4, 24))
        rest["fits"] = lambda rank, held: (
            sum(bytes_of[s] * sum(sizes[slice(*at)]) for s, at in zip(placement.stages_of(rank), held, strict=True))
            <= limit
        )
    return question_of(
        placement, layers, draw(st.sampled_from([0.0, 3.0])), draw(st.sampled_from([0.0, 5.0, 60.0])), speeds, **rest
    )


@settings(max_examples=120, deadline=None)
@given(questions())
def test_largest_rank_load_is_minimal_over_all_cuts(question: CutQuestion) -> None:
    cuts = balanced_cuts(question)
    least = min(busiest(question, cut) for cut in every_cut(question.num_layers, question.placement.num_stages))
    assert min(busiest(question, cut) for cut in cuts) == pytest.approx(least)
    assert len(set(cuts)) == len(cuts)
    assert all(min(cut.layer_counts) >= 1 and cut.num_layers == question.num_layers for cut in cuts)


@settings(max_examples=100, deadline=None)
@given(questions(alike=False))
def test_the_busiest_rank_of_unlike_layers_is_least_busy_over_all_cuts(question: CutQuestion) -> None:
    cuts = balanced_cuts(question)
    least = min(busiest(question, cut) for cut in every_cut(question.num_layers, question.placement.num_stages))
    assert min(busiest(question, cut) for cut in cuts) == pytest.approx(least)


def all_fit(question: CutQuestion, cut: Partition) -> bool:
    ends = [stage.last_layer_exclusive for stage in cut.stages]
    return all(question.rank_fits(rank, ends) for rank in range(question.placement.num_ranks))


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "unlike"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_every_proposed_cut_fits_and_one_is_optimal(alike: bool, data: st.DataObject) -> None:
    question = data.draw(questions(alike, limited=True))
    cuts = balanced_cuts(question)
    fitting = [cut for cut in every_cut(question.num_layers, question.placement.num_stages) if all_fit(question, cut)]
    assert all(all_fit(question, cut) for cut in cuts)
    assert bool(cuts) == bool(fitting)
    if fitting:
        least = min(busiest(question, cut) for cut in fitting)
        assert min(busiest(question, cut) for cut in cuts) == pytest.approx(least)


def simulated(name: str, question: CutQuestion, cut: Partition, num_microbatches: int) -> float:
    placement, seconds = question.placement, {}
    for index, stage in enumerate(cut.stages):
        one = question.cost(index, stage.first_layer, stage.last_layer_exclusive)
        seconds |= {(index, Op.F): one, (index, Op.I): one, (index, Op.W): one, (index, Op.B): 2 * one}
    schedule = build_schedule(
        name,
        placement.num_ranks,
        SCHEDULES[name].chunks or placement.num_stages // placement.num_ranks,
        num_microbatches,
    )
    return simulate(schedule, Costs(seconds, rank_speeds=question.rank_speeds)).makespan_seconds


@settings(max_examples=40, deadline=None)
@given(questions(), st.sampled_from([8, 12]))
def test_the_best_simulated_cut_is_never_slower_than_balancing_stages_alone(
    question: CutQuestion, num_microbatches: int
) -> None:
    placement = question.placement
    names = [
        n
        for n in ("1f1b", "interleaved", "zb-v", "dualpipe")
        if SCHEDULES[n].place(placement.num_ranks, placement.num_chunks) == placement
    ]
    alone = cut_by_stage_cost(question.cost, question.num_layers, placement.num_stages)
    assert alone is not None
    for name in names:
        best = min(simulated(name, question, cut, num_microbatches) for cut in balanced_cuts(question))
        assert best <= simulated(name, question, alone, num_microbatches)


def test_rank_sums_beat_single_stages_with_a_heavy_head() -> None:
    """A V on two ranks with nine layers and a head as heavy as five.

    Balancing single stages gives the rank with both ends 2 + 1 layers and the head.
    """
    question = question_of(v_shape(2), [1.0] * 9, 0.0, 5.0, (1.0, 1.0))
    cuts = balanced_cuts(question)
    assert busiest(question, cuts[0]) == 8.0
    assert min(busiest(question, cut) for cut in cuts) == 7.0


def test_slow_rank_holds_fewer_layers() -> None:
    question = question_of(linear(2), [1.0] * 12, 0.0, 0.0, (1.0, 0.5))
    cut = balanced_cuts(question)[0]
    assert cut.layer_counts == (8, 4)
    # F + B of a microbatch takes 24 on both ranks: eight microbatches plus the fill of the pipeline
    assert simulated("1f1b", question, cut, 8) == pytest.approx((8 + 1) * 24.0)
    even = from_counts([6, 6], 12)
    assert simulated("1f1b", question, even, 8) == pytest.approx(8 * 36.0 + 18.0)
