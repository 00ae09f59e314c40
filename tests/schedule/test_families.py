"""The families beyond 1F1B.

They are compared with closed forms and memory peaks in the domain of each form, with lower bounds, and with torch's own
lists.
"""

import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ConfigError, ScheduleError
from megapipe.extras.report.schedule_csv import from_csv
from megapipe.schedule.action import COMPUTE_OPS, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.families import SCHEDULES, build_schedule
from megapipe.schedule.lifetimes import peak_live_chunks
from megapipe.schedule.lower import lower
from megapipe.schedule.schedule import Schedule, to_csv
from megapipe.schedule.simulate import simulate
from megapipe.schedule.validate import validate
from tests.schedule.naive import runs
from tests.schedule.strategies import family_schedules, peak_live_microbatches, uneven_costs

FIXTURES = (
    Path(__file__).parent.parent / "fixtures" / "schedules"
)  # written by torch 2.13.0 with make_with_torch.py there
TORCH_LISTS = sorted(FIXTURES.glob("*.csv"))
UNITS = [
    pytest.param(*costs, id="F{}-I{}-W{}".format(*costs))
    for costs in ((1, 1, 1), (1, 1, 0.5), (1, 2, 1), (2, 1, 1), (1, 1, 1.5))
]
ranks, microbatches, chunks = st.integers(1, 8), st.integers(1, 24), st.integers(1, 4)


def timeline_of(schedule, F=1.0, I=1.0, W=1.0, FB=None):  # noqa: E741
    """Simulate a schedule.

    F, I, W: times of all layers of a rank with one copy of each parameter. FB: time of a pair of stages.
    """
    share = schedule.num_ranks / schedule.num_stages
    return simulate(schedule, Costs.equal(schedule.num_stages, F * share, I * share, W * share, pair_seconds=FB))


def chained(timeline):
    return max(timeline.chained_idle_seconds)


def barrier(timeline):
    return max(timeline.barrier_idle_seconds)


@pytest.mark.parametrize("path", TORCH_LISTS, ids=lambda path: path.stem)
def test_rows_equal_torchs_own_list(path):
    name, p, m = re.fullmatch(r"(.+)_p(\d+)_m(\d+)", path.stem).groups()
    text = path.read_text()
    read = from_csv(text, name)
    validate(read)
    v = SCHEDULES[name].chunks or (2 if SCHEDULES[name].takes_chunks else 1)
    made = build_schedule(name, int(p), v, int(m))
    assert made == read
    assert to_csv(made) == text


@given(microbatches, ranks)
@settings(max_examples=15)
def test_naive_idle_and_peak(m, p):
    timeline = timeline_of(build_schedule("naive", p, 1, m))
    assert timeline.makespan_seconds == m * p * 3
    assert barrier(timeline) == m * (p - 1) * 3
    assert chained(timeline_of(build_schedule("naive", p, 1, 1))) == (p - 1) * 3
    assert set(timeline.peak_live_chunks) == {1}


@given(ranks, chunks, st.integers(0, 16))
@settings(max_examples=20)
def test_breadth_first_idle_and_peak(p, v, extra):
    m = p + extra
    schedule = build_schedule("breadth-first", p, v, m)
    timeline = simulate(schedule, Costs.equal(schedule.num_stages, 1.0, 1.0, 1.0))
    assert chained(timeline) == barrier(timeline) == (p - 1) * 3
    assert set(timeline.peak_live_chunks) == {v * m}


@given(st.integers(2, 8), st.integers(2, 4), microbatches)
@settings(max_examples=20)
def test_breadth_first_needs_m_over_p_sends_in_flight_at_receive_depth_0(p, v, m):
    assert validate(lower(build_schedule("breadth-first", p, v, m), receive_depth=0)).send_depth == m // p


@given(st.integers(2, 8), st.integers(2, 4), st.integers(0, 16), st.data())
@settings(max_examples=20)
def test_group_size_between_p_and_m_keeps_bubble_and_raises_memory(p, v, extra, data):
    m = p + extra
    g = data.draw(st.integers(p, m))
    schedule = build_schedule("interleaved", p, v, m, g)
    timeline = simulate(schedule, Costs.equal(schedule.num_stages, 1.0, 1.0, 1.0))
    assert chained(timeline) == barrier(timeline) == (p - 1) * 3
    if m % g == 0:
        assert max(timeline.peak_live_chunks) == min(2 * (p - 1) + (v - 1) * g + 1, v * m)


@given(ranks, st.integers(1, 4), st.integers(1, 4), st.sampled_from([1.0, 1.5, 2.0]))
@settings(max_examples=30)
def test_hanayo_idle_and_peak(p, waves, groups, B):
    timeline = timeline_of(build_schedule("hanayo", p, 2 * waves, groups * p), I=B, W=0.0)
    idle = (p - 1) * (B + (groups - 1) * (B - 1)) / waves
    assert barrier(timeline) == pytest.approx(idle)
    if B == 1:  # that of interleaved 1F1B, which keeps more
        assert idle == (p - 1) * 2 / (2 * waves)
    assert max(peak_live_microbatches(timeline)) <= p


@given(st.sampled_from([2, 4, 6, 8]), st.integers(1, 4), st.sampled_from([1.0, 1.5, 2.0]))
@settings(max_examples=30)
def test_chimera_idle_and_peak(p, groups, B):
    schedule = build_schedule("chimera", p, 1, groups * p)
    timeline = simulate(schedule, Costs.equal(p, 1.0, B, 0.0))
    assert barrier(timeline) == pytest.approx((p - 2) * (B + (groups - 1) * (B - 1)))
    if B == 1:
        assert timeline.makespan_seconds == 2 * groups * p + p - 2
    # chunks of a p-th of the model
    assert timeline.peak_live_chunks == tuple(p // 2 + 1 + min(rank, p - 1 - rank) for rank in range(p))


@given(st.sampled_from([2, 4, 8]), st.integers(1, 12))
@settings(max_examples=20)
def test_groups_of_both_directions_that_are_not_full_take_no_longer_than_full_ones(p, half):
    of = {
        m: timeline_of(build_schedule("chimera", p, 1, m)).makespan_seconds for m in (2 * half, -(-2 * half // p) * p)
    }
    assert of[2 * half] <= of[-(-2 * half // p) * p]


@pytest.mark.parametrize(("F", "I", "W"), UNITS)
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_zb_h1_idle_and_peak(p, F, I, W):  # noqa: E741
    for m in (p, p + 1, 3 * p):
        schedule = build_schedule("zb-h1", p, 1, m)
        timeline = timeline_of(schedule, F, I, W)
        assert chained(timeline) == pytest.approx((p - 1) * (F + I - min(F, W)))
        if W <= F:
            assert barrier(timeline) == pytest.approx(chained(timeline))
        assert set(timeline.peak_live_chunks) == {p}
        assert peak_live_chunks(schedule, until_input_gradient=True) == tuple(p - r for r in range(p))


@pytest.mark.parametrize(("F", "I", "W"), UNITS)
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_zb_h2_idle_and_peak(p, F, I, W):  # noqa: E741
    for m in (2 * p - 1, 2 * p, 4 * p):
        timeline = timeline_of(build_schedule("zb-h2", p, 1, m), F, I, W)
        assert chained(timeline) == pytest.approx((p - 1) * max(0, F + I - 2 * min(F, W)))
        assert barrier(timeline) >= (p - 1) * F - 1e-9
        assert set(timeline.peak_live_chunks) == {2 * p - 1}


@given(ranks, st.integers(0, 16))
@settings(max_examples=30)
def test_zb_v_idle_and_peak(p, extra):
    timeline = timeline_of(build_schedule("zb-v", p, 2, 2 * p + extra))
    assert chained(timeline) == 0
    assert barrier(timeline) == (p - 1) / 2
    assert max(peak_live_microbatches(timeline)) == p


@given(ranks, microbatches)
@settings(max_examples=30)
def test_v_half_and_v_min_keep_their_peaks_for_any_number_of_microbatches(p, m):
    for name, most in (("v-half", (p + 2) // 2), ("v-min", (p + 4) // 3)):
        assert max(peak_live_microbatches(timeline_of(build_schedule(name, p, 2, m)))) <= most


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 8, 12, 16])
@pytest.mark.parametrize("rounds", [2, 3])
def test_v_half_and_v_min_reach_half_and_two_thirds_of_1f1bs_bubble(p, rounds):
    m, of_1f1b = rounds * p, 3 * (p - 1)
    half, least = timeline_of(build_schedule("v-half", p, 2, m)), timeline_of(build_schedule("v-min", p, 2, m))
    assert chained(half) == barrier(half) == max(0.5, 1.5 * p - (2.0 if p % 2 else 3.5)) <= of_1f1b / 2
    assert chained(least) == barrier(least) == max(0.5, 2 * p - (3.5, 2.5, 4.5)[p % 3]) <= of_1f1b * 2 / 3
    assert max(peak_live_microbatches(half)) == (p + 2) // 2
    assert max(peak_live_microbatches(least)) == (p + 4) // 3


def test_v_mins_bubble_grows_with_m_where_the_costs_differ():
    grown = [chained(timeline_of(build_schedule("v-min", 8, 2, m), 1.0, 1.0, 0.5)) for m in (16, 32, 64)]
    assert grown == sorted(set(grown))
    assert grown[-1] > chained(timeline_of(build_schedule("1f1b", 8, 1, 64), 1.0, 1.0, 0.5))
    assert len({chained(timeline_of(build_schedule("v-half", 8, 2, m), 1.0, 1.0, 0.5)) for m in (16, 32, 64)}) == 1


DUAL_COSTS = [
    pytest.param(*costs, id="F=I={},W={},FB={}".format(*costs))
    for costs in ((1, 1, 3), (1, 1, 2), (1, 0.5, 2.5), (1, 0.5, 2), (2, 1, 5))
]


@pytest.mark.parametrize(("F", "W", "FB"), DUAL_COSTS)
@pytest.mark.parametrize(
    ("name", "p"), [("dualpipe", 2), ("dualpipe", 4), ("dualpipe", 8), ("dualpipe-v", 1), ("dualpipe-v", 4)]
)
def test_dualpipe_idle_and_peak(name, p, F, W, FB):
    stages = p if name == "dualpipe" else 2 * p
    idle = (stages / 2 - 1) * (FB + F + W - 3 * W)
    for m in (2 * p, 2 * p + 2, 4 * p):
        schedule = build_schedule(name, p, SCHEDULES[name].chunks or 1, m)
        timeline = simulate(schedule, Costs.equal(stages, F, F, W, pair_seconds=FB))
        assert barrier(timeline) == pytest.approx(idle)
        if FB == 2 * F + W:
            assert chained(timeline) == pytest.approx(idle)
        assert chained(timeline) <= idle + 1e-9
        assert set(timeline.peak_live_chunks) == {stages + 1}


def assert_above_lower_bounds(schedule, costs):
    """Assert lower bounds on the length of a step.

    They are the way of one microbatch through the pipeline and back, and the work of the busiest rank.
    """
    timeline = simulate(schedule, costs)
    back = Op.I if Op.I in schedule.ops else Op.B
    way = sum(
        costs.seconds[s, Op.F] + costs.seconds[s, min(Op.B, back, key=lambda op: costs.seconds[s, op])]
        for s in range(schedule.num_stages)
    )
    work = max(sum(costs.seconds[a.stage, a.op] for a in row if a.op in COMPUTE_OPS) for row in schedule.rows)
    assert timeline.makespan_seconds >= max(way, work) * (1 - 1e-12)
    assert all(idle >= -1e-9 * work for idle in timeline.chained_idle_seconds + timeline.barrier_idle_seconds)


@given(family_schedules(), st.integers(0, 3), st.data())
@settings(max_examples=40)
def test_every_family_validates_lowers_runs_and_stays_above_the_lower_bounds(schedule, depth, data):
    costs = data.draw(uneven_costs(schedule.num_stages))
    lowered = lower(schedule, depth)
    validate(lowered)
    assert runs_as_planned(lowered)
    assert simulate(lowered, costs).makespan_seconds == simulate(schedule, costs).makespan_seconds
    assert from_csv(to_csv(lowered), schedule.name, schedule.placement) == lowered
    assert_above_lower_bounds(schedule, costs)


def runs_as_planned(lowered):
    """Run the naive executor, which executes one action per turn: use small schedules only."""
    return sum(map(len, lowered.rows)) > 1500 or runs(lowered)


@given(family_schedules(max_p=4, max_m=8), st.integers(0, 10**6))
@settings(max_examples=60)
def test_mutated_families_are_rejected_or_still_run(schedule, seed):
    random = Random(seed)
    rows = [list(row) for row in lower(schedule).rows]
    row = random.choice(rows)
    i, j = random.randrange(len(row)), random.randrange(len(row))
    row[i], row[j] = row[j], row[i]
    mutated = Schedule(schedule.name, schedule.placement, schedule.num_microbatches, tuple(map(tuple, rows)))
    try:
        validate(mutated)
        is_accepted = True
    except ScheduleError:
        is_accepted = False
    if is_accepted or len(schedule.placement.directions) == 1:  # the naive executor ignores the order of collectives
        assert runs(mutated) is is_accepted


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param(
            "0OVERLAP0,0F0,0B0\n",
            "0OVERLAP0 needs the activation of stage 0, microbatch 0, which this",
            id="feeds itself",
        ),
        pytest.param("0F0,0OVERLAP1,0B0,0F1,0B1\n", "0OVERLAP1 must be followed by 0F1", id="wrong order"),
        pytest.param("0F0,0B0,0OVERLAP1,0F1\n", "0OVERLAP1 must be followed by 0F1 and then a B or I", id="alone"),
        pytest.param("0F0,(0F1;7B0)OVERLAP_F_B,0B0,0B1\n", "7B0 is outside stages 0..0", id="no such stage"),
        pytest.param(
            "0F0,0F1,0B0,0UPDATE1,0B1\n",
            "0UPDATE1 needs the weight gradient of stage 0, microbatch 1",
            id="early update",
        ),
    ],
)
def test_faults_of_pairs_and_updates_are_named(text, complaint):
    with pytest.raises(ScheduleError, match=complaint):
        validate(
            from_csv(text, num_microbatches=text.count("F") - text.count("OVERLAP_F") if "UPDATE" not in text else 2)
        )


def test_the_two_halves_of_a_pair_stay_together_when_lowered():
    for row in lower(build_schedule("dualpipe-v", 3, 2, 8), receive_depth=3).rows:
        for slot, action in enumerate(row):
            if action.op is Op.OVERLAP:
                assert row[slot + 1] == action._replace(op=Op.F)
                assert row[slot + 2].op is Op.B


def test_a_pair_starts_when_both_halves_can_and_ends_as_one():
    schedule = from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n")
    timeline = simulate(schedule, Costs.equal(2, 1.0, 1.0, 1.0, pair_seconds=2.5))
    # rank 1 finishes B0 at 4; the pair runs from 4 to 6.5 and F1 of rank 1 starts after it
    assert timeline.starts[0] == (0, 4, 4, 4, 9.5)
    assert timeline.ends[0] == (1, 6.5, 6.5, 6.5, 11.5)
    assert timeline.work_seconds == (5.5, 6)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        pytest.param(("zb-v", 4, 1, 8), "holds 2 stages per rank, but 1 were given; use 2", id="zb-v chunks"),
        pytest.param(("dualpipe", 3, 1, 8), "use 2 or 4", id="odd ranks"),
        pytest.param(("dualpipe", 4, 1, 6), "use 8", id="few microbatches"),
        pytest.param(("dualpipe", 4, 2, 8), "one chunk per rank in each direction", id="chunks in two directions"),
        pytest.param(("dualpipe", 4, 1, 9), "use 8 or 10", id="odd microbatches"),
        pytest.param(("chimera", 3, 1, 4), "use 2 or 4", id="chimera on odd ranks"),
        pytest.param(("chimera", 4, 1, 1), "either end; 1 were given: use 2", id="chimera with one microbatch"),
        pytest.param(("hanayo", 4, 3, 8), "even number of chunks per rank; 3 were given: use 2 or 4", id="half a wave"),
        pytest.param(("dualpipe-v", 4, 2, 6), "its 8 stages; 6 were given: use 8", id="fewer microbatches than stages"),
        pytest.param(("pipedream-2bw", 4, 1, 8, 4), "has no microbatch groups", id="group"),
        pytest.param(("pipedream", 4, 1, 3), "a microbatch in a step for each.*use 4", id="stream of short steps"),
        pytest.param(("zb-h1", 4, 2, 8), "one chunk per rank", id="chunks"),
    ],
)
def test_unsupported_shapes_are_errors_with_reason_and_remedy(arguments, complaint):
    with pytest.raises(ConfigError, match=complaint):
        build_schedule(*arguments)
