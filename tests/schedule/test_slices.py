"""Slices of a microbatch along its sequence: order, time, memory and text of the schedules that have them."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ConfigError, ScheduleError
from megapipe.extras.cli.schedule import main
from megapipe.extras.report.schedule_csv import from_csv, parse_part, parse_slice
from megapipe.extras.report.timeline import svg, timeline_text
from megapipe.extras.report.trace import chrome_trace
from megapipe.schedule.action import Action, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.families import SCHEDULES, build_forward_only, build_lowered, build_schedule
from megapipe.schedule.lifetimes import Held, lifetimes, peak_live_chunks
from megapipe.schedule.lower import lower
from megapipe.schedule.parts import Part, Parts, Site
from megapipe.schedule.schedule import Schedule, to_csv
from megapipe.schedule.simulate import simulate
from megapipe.schedule.validate import validate

SLICED = [name for name, family in SCHEDULES.items() if family.takes_slices]
BACKWARDS = (Op.B, Op.I)


@st.composite
def sliced_schedules(draw: st.DrawFn) -> Schedule:
    """Draw a family with slices, p 1..6, v 1..3, m 1..6, k 1..6 and any group size."""
    name, p = draw(st.sampled_from(SLICED)), draw(st.integers(1, 6))
    family = SCHEDULES[name]
    group = draw(st.none() | st.integers(p, p + 9)) if family.takes_group_size else None
    chunks = family.num_chunks(draw(st.integers(1, 3)))
    sizes = draw(st.integers(1, 6)), group
    return build_schedule(name, p, chunks, *sizes, num_slices=draw(st.integers(1, 6)))


def test_the_families_with_slices():
    assert SLICED == ["1f1b", "interleaved", "zb-h1", "zb-v"]


@given(sliced_schedules())
@settings(max_examples=80)
def test_every_schedule_with_slices_runs_to_its_end_with_and_without_messages(schedule):
    lowered = lower(schedule)
    validate(lowered)
    costs = Costs.equal(schedule.num_stages, 1.0, 0.7, 0.4)
    assert simulate(lowered, costs).makespan_seconds == pytest.approx(simulate(schedule, costs).makespan_seconds)
    for each in (schedule, lowered):
        assert from_csv(to_csv(each), each.name, each.placement) == each


@given(sliced_schedules())
@settings(max_examples=40)
def test_slices_run_forwards_in_order_and_backwards_in_reverse_on_every_stage(schedule):
    k = schedule.num_slices
    for row in schedule.rows:
        for stage in {action.stage for action in row}:
            forwards = [a.microbatch for a in row if a.stage == stage and a.op is Op.F]
            backwards = [a.microbatch for a in row if a.stage == stage and a.op in BACKWARDS]
            assert forwards == list(range(schedule.num_units))
            assert backwards == [m * k + j for m in range(schedule.num_microbatches) for j in reversed(range(k))]


@pytest.mark.parametrize("name", SLICED)
def test_one_slice_is_the_whole_microbatch(name):
    family = SCHEDULES[name]
    whole = build_schedule(name, 3, family.num_chunks(2), 5)
    assert build_schedule(name, 3, family.num_chunks(2), 5, num_slices=1) == whole


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 20), st.floats(0.2, 3.0))
@settings(max_examples=40)
def test_1f1b_with_equal_costs_idles_for_a_kth_and_holds_p_plus_k_minus_1_slices(p, k, m, backward):
    schedule = build_schedule("1f1b", p, 1, m, num_slices=k)
    timeline = simulate(schedule, Costs.equal(p, 1.0, backward / 2, backward / 2))
    for idle in timeline.chained_idle_seconds[:1] + timeline.barrier_idle_seconds:
        assert idle == pytest.approx((p - 1) * (1 + backward) / k, abs=1e-9)
    assert peak_live_chunks(schedule) == tuple(min(m * k, p + k - 1 - rank) for rank in range(p))


def test_with_8_slices_8_ranks_hold_less_than_two_microbatches():
    assert max(peak_live_chunks(build_schedule("1f1b", 8, 1, 32, num_slices=8))) / 8 == 1.875


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_zero_bubble_schedules_keep_their_idle_time_and_peak_in_slices(p, k):
    m = -(-(3 * p + k) // k)  # enough slices to fill the pipeline
    h1 = build_schedule("zb-h1", p, 1, m, num_slices=k)
    assert simulate(h1, Costs.equal(p, 1.0, 1.0, 1.0)).chained_bubble.idle_seconds == pytest.approx((p - 1) / k)
    assert max(peak_live_chunks(h1)) == min(m * k, p + k - 1)
    v = build_schedule("zb-v", p, 2, m, num_slices=k)
    assert simulate(v, Costs.equal(2 * p, 0.5, 0.5, 0.5)).chained_bubble.idle_seconds == pytest.approx(0, abs=1e-9)
    assert max(peak_live_chunks(v)) <= 2 * (p + k - 1)


@pytest.mark.parametrize(("p", "v", "k"), [(4, 2, 2), (4, 2, 8), (4, 3, 3), (8, 2, 4)])
def test_interleaving_divides_the_idle_time_by_chunks_and_slices(p, v, k):
    schedule = build_schedule("interleaved", p, v, 2 * p, num_slices=k)
    timeline = simulate(schedule, Costs.equal(p * v, 1 / v, 1 / v, 1 / v))
    assert timeline.chained_bubble.idle_seconds == pytest.approx(3 * (p - 1) / v / k)
    whole = build_schedule("interleaved", p, v, 2 * p)
    assert max(peak_live_chunks(schedule)) / k < max(peak_live_chunks(whole))


def equal_lengths(k: int, attention: Fraction) -> tuple[float, ...]:
    """Return the shares of slices of equal length in a cost of which attention is a part; slice j sees j + 1/2."""
    return tuple(float((1 - attention) / k + attention * (2 * j + 1) / k**2) for j in range(k))


@pytest.mark.parametrize(("k", "idle"), [(2, 24.4), (4, 24.1), (8, 23.5)])
def test_slices_of_equal_length_idle_longer_than_whole_microbatches(k, idle):
    shares = equal_lengths(k, Fraction(1, 2))
    costs = Costs.equal(8, 1.0, 1.0, 1.0)
    uneven = Costs(costs.seconds, slice_shares=dict.fromkeys(costs.seconds, shares))
    schedule = build_schedule("1f1b", 8, 1, 16, num_slices=k)
    assert simulate(build_schedule("1f1b", 8, 1, 16), costs).chained_bubble.idle_seconds == pytest.approx(21)
    assert simulate(schedule, uneven).chained_bubble.idle_seconds == pytest.approx(idle, abs=0.05)
    assert simulate(schedule, costs).chained_bubble.idle_seconds == pytest.approx(21 / k)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 4), st.data())
@settings(max_examples=40)
def test_a_step_with_uneven_slices_takes_as_long_as_the_longest_chain_of_actions(p, m, k, data):
    name = data.draw(st.sampled_from(["1f1b", "zb-h1"]))
    schedule, cost = build_schedule(name, p, 1, m, num_slices=k), st.floats(0.1, 2.0)
    shares = {(s, op): tuple(data.draw(cost) for _ in range(k)) for s in range(p) for op in (Op.F, Op.B, Op.I, Op.W)}
    timeline = simulate(schedule, Costs(dict.fromkeys(shares, 1.0), slice_shares=shares))
    ends: dict[Action, float] = {}
    waiting = [list(row) for row in schedule.rows]
    clocks = [0.0] * p
    while any(waiting):
        for rank, row in enumerate(waiting):
            while row:
                stage, op, number = row[0]
                inputs = [Action(stage - 1, op, number)] if op is Op.F and stage else []
                if op in BACKWARDS and stage < p - 1:
                    inputs = [Action(stage + 1, op, number)]
                if not ends.keys() >= set(inputs):
                    break
                start = max([clocks[rank], *(ends[each] for each in inputs)])
                clocks[rank] = ends[row.pop(0)] = start + shares[stage, op][number % k]
    assert timeline.makespan_seconds == pytest.approx(max(clocks))


def test_messages_of_slices_take_their_share_of_the_channel():
    seconds = {(0, op): 1.0 for op in (Op.F, Op.B)} | {(1, op): 1.0 for op in (Op.F, Op.B)} | {(0, Op.SEND_F): 10.0}
    costs = Costs(seconds, slice_shares={(0, Op.SEND_F): (0.9, 0.1)})
    lowered = build_lowered("1f1b", 2, 1, 1, num_slices=2)
    timeline = simulate(lowered, costs)
    ends = [timeline.ends[0][lowered.rows[0].index(Action(0, Op.SEND_F, number))] for number in (0, 1)]
    assert ends == pytest.approx([0.5 + 9, 0.5 + 9 + 1])


@given(sliced_schedules())
@settings(max_examples=40)
def test_keys_are_held_from_the_first_forward_to_the_backward_of_the_first_slice(schedule):
    k = schedule.num_slices
    for row in schedule.rows:
        held: dict[tuple[Held, int], int] = {}
        for action, changes in lifetimes(row, num_slices=k):
            for item in (*changes.takes, *changes.frees):
                if item[0] in (Held.KEYS, Held.KEY_GRADIENTS):
                    assert held.pop((item, action.microbatch // k))
            for item in changes.creates:
                if item[0] in (Held.KEYS, Held.KEY_GRADIENTS):
                    assert (item, action.microbatch // k) not in held
                    held[item, action.microbatch // k] = True
            if k > 1 and action.op in (Op.F, *BACKWARDS) and action.microbatch % k:
                assert ((Held.KEYS, action.stage), action.microbatch // k) in held
            if k > 1 and action.op in BACKWARDS and action.microbatch % k:
                assert ((Held.KEY_GRADIENTS, action.stage), action.microbatch // k) in held
        assert not held


def swapped(schedule: Schedule, first: Action, second: Action) -> Schedule:
    exchange = {first: second, second: first}
    rows = tuple(tuple(exchange.get(action, action) for action in row) for row in schedule.rows)
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, rows, schedule.num_slices)


@pytest.mark.parametrize(
    ("first", "second", "complaint"),
    [
        pytest.param(Action(0, Op.F, 0), Action(0, Op.F, 1), r"0F0\.1 needs the activation of stage 0", id="forwards"),
        pytest.param(Action(1, Op.B, 0), Action(1, Op.B, 1), r"1B0\.0 needs the gradient of stage 1", id="backwards"),
    ],
)
def test_slices_in_another_order_are_refused(first, second, complaint):
    schedule = swapped(build_schedule("1f1b", 2, 1, 2, num_slices=2), first, second)
    with pytest.raises(ScheduleError, match=complaint) as caught:
        validate(schedule)
    assert "slice" in str(caught.value).splitlines()[0] and ">" in str(caught.value)


def test_messages_of_faults_name_microbatch_and_slice():
    schedule = build_lowered("1f1b", 2, 1, 2, num_slices=3)
    rows = tuple(tuple(a for a in row if a != Action(0, Op.SEND_F, 4)) for row in schedule.rows)
    with pytest.raises(ScheduleError, match=r"0SEND_F1\.1 is missing on rank 0"):
        validate(Schedule("cut", schedule.placement, 2, rows, 3))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in SLICED and name != "zb-auto"])
def test_other_families_are_refused(name):
    family = SCHEDULES[name]
    with pytest.raises(ConfigError, match="1f1b, interleaved, zb-h1, zb-v"):
        build_schedule(name, 2, family.num_chunks(1), 8, num_slices=2)


def test_text_of_slices_and_of_parts_differ():
    assert parse_slice("2F0.3") == (Action(2, Op.F, 0), 3)
    assert parse_slice("2F0") == (Action(2, Op.F, 0), None)
    parts = Parts((Site(0, 5, Part.ATTENTION), Site(0, 6, Part.HEAD)))
    for index in range(2):
        text = parts.text(Action(index, Op.F, 0))
        with pytest.raises(ScheduleError, match=r"a slice is written as in 2F0\.3"):
            parse_slice(text)
    with pytest.raises(ScheduleError, match="is not a part"):
        parse_part(parts, "0F0.5")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param("0F0.0,0F0\n", r"0F0 has no slice, other actions have; write 0F0\.0", id="mixed"),
        pytest.param("0F0.0,0F0.x\n", "line 1, cell 2.*0F0.x", id="no number"),
        pytest.param("0F0.4000000000\n", "slice 4000000000 among 1 actions", id="absurd slice"),
    ],
)
def test_unreadable_csv_of_slices_names_the_place(text, complaint):
    with pytest.raises(ScheduleError, match=complaint):
        from_csv(text)


def test_drawings_show_microbatch_and_slice():
    timeline = simulate(build_lowered("1f1b", 2, 1, 1, num_slices=2), Costs.equal(2))
    assert "F0.0" in timeline_text(timeline) and "B0.1" in timeline_text(timeline)
    assert "0F0.1:" in svg(timeline) and "microbatches and their slices" in svg(timeline)
    assert '"name": "0F0.1"' in chrome_trace(timeline) and '"slice": 1' in chrome_trace(timeline)


def test_forward_only_schedules_have_slices():
    placement = build_schedule("zb-v", 3, 2, 2).placement
    schedule = build_forward_only(placement, 2, num_slices=4)
    assert schedule.num_units == 8 and schedule.num_microbatches == 2


def test_the_command_line_draws_writes_and_checks_slices(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    assert main(["draw", "zb-h1", "-p", "2", "-m", "2", "-k", "3", "--csv-out", str(path)]) == 0
    assert "0F1.2" in path.read_text()
    assert main(["draw", "1f1b", "-p", "2", "-m", "1", "-k", "2"]) == 0
    assert "F0.1" in capsys.readouterr().out
    assert main(["check", "--csv", str(path)]) == 0
    assert "2 microbatches of 3 slices" in capsys.readouterr().out
    assert main(["simulate", "gpipe", "-k", "2"]) != 0
    assert "no order for 2 slices" in capsys.readouterr().err
