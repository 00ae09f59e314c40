"""Schedules of parts: expansion, merged pairs, proof, text, and the times of two resources per rank."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ConfigError, ScheduleError
from megapipe.extras.report.schedule_csv import parse_part, parts_from_csv, parts_to_csv
from megapipe.extras.report.schedules import Unmeasured, compare
from megapipe.schedule.action import Action, Op
from megapipe.schedule.costs import Costs, Seconds
from megapipe.schedule.experts import ExpertModel, exposures, least_seconds, measure_experts
from megapipe.schedule.families import build_schedule
from megapipe.schedule.lower import lower, without_pairs
from megapipe.schedule.partition import from_counts
from megapipe.schedule.parts import Part, exchange_digest, expand, merge, pair_up, parts_of, prove
from megapipe.schedule.simulate import simulate
from tests.schedule.strategies import family_schedules

F, I, W, B = Op.F, Op.I, Op.W, Op.B  # noqa: E741


def layers_of(num_stages, kinds):
    """Return the parts of stages whose layers repeat `kinds`, True with experts."""
    counts = [1 + stage % 2 for stage in range(num_stages)]
    return parts_of(from_counts(counts, sum(counts)), [kinds[layer % len(kinds)] for layer in range(sum(counts))])


def part_costs(parts, seconds, network=frozenset()):
    """Return the costs of parts from seconds by (part, op)."""
    return Costs(
        {(index, op): seconds[site.part, op] for index, site in enumerate(parts.sites) for op in (F, I, W, B)},
        network=network,
    )


@st.composite
def part_seconds(draw):
    """Draw whole seconds for each part and op; a full backward takes as long as its halves."""
    seconds = {(part, op): draw(st.integers(1, 6)) for part in Part for op in (F, I, W)}
    for part in Part:
        if part in (Part.DISPATCH, Part.COMBINE):
            seconds[part, W] = 0
        seconds[part, B] = seconds[part, I] + seconds[part, W]
    return seconds


kinds = st.lists(st.booleans(), min_size=1, max_size=3)


@given(family_schedules(max_p=4, max_m=8), kinds, part_seconds(), st.booleans())
@settings(max_examples=25)
def test_every_schedule_of_parts_is_proven_and_no_faster_than_the_bound(schedule, kinds, seconds, delays):
    parts, paired = layers_of(schedule.num_stages, kinds), pair_up(schedule)
    rows = lower(expand(paired, parts, delays), 3)
    report = prove(rows, paired, parts)
    timeline = simulate(rows, part_costs(parts, seconds, parts.network))
    assert report.num_actions == sum(map(len, rows.rows))
    assert timeline.makespan_seconds >= least_seconds(timeline)
    for rank, (exchanging, exposed) in enumerate(exposures(timeline)):
        assert -1e-9 <= exposed <= exchanging
        done = [a for a in rows.rows[rank] if a.stage in parts.network and a.op in (F, B)]
        assert exchanging == sum(seconds[parts.sites[a.stage].part, a.op] for a in done)
        # every microbatch passes every all-to-all of the rank once forward and once back
        assert len(done) == len(set(done))
        assert {a[::2] for a in done if a.op is F} == {a[::2] for a in done if a.op is B}


@given(family_schedules(max_p=4, max_m=8), kinds, part_seconds())
@settings(max_examples=20)
def test_serial_parts_take_as_long_as_their_stages(schedule, kinds, seconds):
    parts = layers_of(schedule.num_stages, kinds)
    serial = replace(schedule, rows=tuple(map(without_pairs, schedule.rows)))
    costs = part_costs(parts, seconds)
    stages: dict[tuple[int, Op], float] = {}
    for (index, op), value in costs.seconds.items():
        stage = parts.sites[index].stage
        stages[stage, op] = stages.get((stage, op), 0) + value
    expected = simulate(serial, Costs(stages)).makespan_seconds
    assert simulate(expand(serial, parts, delay_weights=False), costs).makespan_seconds == expected


@given(family_schedules(max_p=4, max_m=8), kinds)
@settings(max_examples=10)
def test_text_is_read_back(schedule, kinds):
    parts = layers_of(schedule.num_stages, kinds)
    rows = lower(expand(pair_up(schedule), parts), 2)
    assert parts_from_csv(parts, parts_to_csv(parts, rows), rows) == rows


def test_the_text_names_stage_op_microbatch_layer_and_part():
    parts = parts_of(from_counts([1, 2], 3), [False, True, True])
    assert [parts.text(Action(site, F, 7)) for site in range(len(parts.sites))] == [
        "0F7.0A", "0F7.0M", "1F7.1A", "1F7.1D", "1F7.1M", "1F7.1C", "1F7.2A", "1F7.2D", "1F7.2M", "1F7.2C", "1F7.H",
    ]  # fmt: skip
    for wrong in ("1F7.0A", "0F7.0D", "1F7", "1F7.3A", "F7.1A"):
        with pytest.raises(ScheduleError, match="not a"):
            parse_part(parts, wrong)


def merged_texts(has_experts):
    """Return the merged pair of a forward of stage 0 and a backward of stage 1, by resource; stage 2 has the head."""
    parts = parts_of(from_counts([len(has_experts)] * 3, 3 * len(has_experts)), has_experts * 3)
    pair = Action(0, Op.OVERLAP, 1), Action(0, F, 1), Action(1, B, 0)
    row = expand(replace(build_schedule("gpipe", 3, 1, 1), rows=(pair, (), ())), parts).rows[0]
    texts = [(action.stage in parts.network, parts.text(action)) for action in row]
    return tuple(" ".join(text for is_exchange, text in texts if is_exchange is lane) for lane in (False, True))


def test_a_pair_runs_in_the_order_of_deepseek_v3():
    """Compare with figure 4 of arXiv:2412.19437, whose boundaries of layers are not aligned."""
    computing, exchanging = merged_texts([True, True])
    assert computing == ("0F1.0A 1I0.3M 1W0.3M 0F1.0M 1I0.3A 1W0.3A 0F1.1A 1I0.2M 1W0.2M 0F1.1M 1I0.2A 1W0.2A")
    assert exchanging == "1B0.3C 0F1.0D 1B0.3D 0F1.0C 1B0.2C 0F1.1D 1B0.2D 0F1.1C"


# the shortest time of a pair over every order of its parts, by an own search


def shortest(forward, backward, seconds, network):
    """Return the least time in which two resources run both chains: dynamic programming over all orders of issue.

    The state after some parts of each chain and some weight gradients: when each resource is free and when the next
    part of each chain may start; states that are no better in any of them are dropped.
    """
    chains = forward, [a for a in backward if a.op is not W]
    weights = [a for a in backward if a.op is W]
    follows = [chains[1].index(a._replace(op=I)) for a in weights]
    front = {(0, 0, 0): [(0, 0, 0, 0)]}  # free at: computation, network; ready at: forward, backward
    for _ in range(len(forward) + len(backward)):
        reached = {}
        for done, states in front.items():
            for state in states:
                for which in (0, 1, 2):
                    chain = weights if which == 2 else chains[which]
                    if done[which] == len(chain) or (which == 2 and follows[done[2]] >= done[1]):
                        continue
                    action = chain[done[which]]
                    lane = int(action.stage in network)
                    after = list(state)
                    ready = 0 if which == 2 else state[2 + which]
                    after[lane] = max(state[lane], ready) + seconds[action.stage, action.op]
                    if which < 2:
                        after[2 + which] = after[lane]
                    counts = tuple(count + (index == which) for index, count in enumerate(done))
                    reached.setdefault(counts, set()).add(tuple(after))
        front = {}
        for counts, states in reached.items():
            kept = []
            for state in sorted(states):
                if not any(all(a <= b for a, b in zip(other, state, strict=True)) for other in kept):
                    kept.append(state)
            front[counts] = kept
    (states,) = front.values()
    return min(map(max, states))


def pair_times(has_experts_forward, has_experts_backward, seconds):
    """Return the seconds of the merged pair, of the shortest order, and of one chain after the other."""
    counts = [len(has_experts_forward), len(has_experts_backward)]
    parts = parts_of(from_counts(counts, sum(counts)), [*has_experts_forward, *has_experts_backward])
    costs = part_costs(parts, seconds, parts.network)
    schedule = build_schedule("gpipe", 2, 1, 1)
    cut = [
        expand(replace(schedule, rows=((action,), ())), parts).rows[0] for action in (Action(0, F, 1), Action(1, B, 0))
    ]
    forward, backward = cut
    ends: dict[Action, float] = {}

    def run(row):
        clocks = [0.0, 0.0]
        ends.clear()
        for action in row:
            stage, op, m = action
            before = {F: [(stage - 1, F, m)], W: [(stage, I, m)]}.get(op, [(stage + 1, I, m), (stage + 1, B, m)])
            lane = stage in parts.network
            start = max([clocks[lane], *(ends[key] for key in before if key in ends)])
            clocks[lane] = ends[action] = start + costs.seconds[stage, op]
        return max(clocks)

    best = shortest(forward, backward, costs.seconds, parts.network)
    return run(merge(forward, backward, parts.network)), best, run([*forward, *backward])


EQUAL = {(part, op): 0 if op is W and part in (Part.DISPATCH, Part.COMBINE) else 1 for part in Part for op in (F, I, W)}
EQUAL |= {(part, B): EQUAL[part, I] + EQUAL[part, W] for part in Part}
V3 = dict(EQUAL) | {
    (Part.ATTENTION, F): 5.5, (Part.ATTENTION, I): 7.5, (Part.ATTENTION, W): 3.5,
    **{(Part.MLP, op): 4.6 for op in (F, I, W)},
    (Part.DISPATCH, F): 2.3, (Part.DISPATCH, B): 4.7, (Part.COMBINE, F): 4.7, (Part.COMBINE, B): 2.3,
}  # fmt: skip
E, D = True, False


@pytest.mark.parametrize(
    ("forward", "backward"),
    [([E], [E]), ([E, E], [E, E]), ([D, E], [D, E]), ([D, D], [E]), ([E, E], [D, D])],
    ids=lambda kinds: "".join("DE"[each] for each in kinds),
)
@pytest.mark.parametrize("seconds", [EQUAL, V3], ids=["equal", "deepseek-v3"])
def test_the_merged_order_is_the_shortest_of_all(forward, backward, seconds):
    merged, best, serial = pair_times(forward, backward, seconds)
    assert merged == pytest.approx(best, rel=1e-9)
    assert merged <= serial


def test_with_drawn_times_the_merged_order_is_near_the_shortest():
    rng = random.Random(1)
    ratios = []
    for _ in range(20):
        forward, backward = ([rng.random() < 0.6 for _ in range(rng.randint(1, 3))] for _ in range(2))
        seconds = {(part, op): rng.randint(1, 6) * EQUAL[part, op] for part in Part for op in (F, I, W)}
        seconds |= {(part, B): seconds[part, I] + seconds[part, W] for part in Part}
        merged, best, serial = pair_times(forward, backward, seconds)
        assert best <= serial
        ratios.append(merged / best)
    assert min(ratios) >= 1
    assert max(ratios) < 1.25
    assert sum(ratios) / len(ratios) < 1.05


def planted(name, change):
    """Return a schedule of parts whose first row was changed, and what it was expanded from."""
    schedule = pair_up(build_schedule(name, 2, 1, 4))
    parts = layers_of(schedule.num_stages, [True])
    expanded = expand(schedule, parts)
    row = list(expanded.rows[0])
    change(row, parts)
    return replace(expanded, rows=(tuple(row), *expanded.rows[1:])), schedule, parts


def swap(first, second):
    """Return a change that exchanges two parts."""

    def change(row, parts):
        i, j = (row.index(parse_part(parts, text)) for text in (first, second))
        row[i], row[j] = row[j], row[i]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap("0F0.0A", "0F0.0D"), r"0F0.0D needs the activation of stage 0, layer 0, attention, microbatch 0"),
        (swap("0I0.0M", "0B0.0D"), r"0B0.0D needs the gradient of stage 0, layer 0, mlp, microbatch 0"),
        (swap("0I1.0A", "0W1.0A"), r"0W1.0A needs the saved inputs and output gradients of stage 0, layer 0"),
        (lambda row, parts: row.remove(parse_part(parts, "0B2.0C")), "the backward of stage 0, layer 0, combine"),
        (lambda row, parts: row.append(parse_part(parts, "0F1.0M")), "0F1.0M was already done"),
    ],
    ids=["dispatch first", "backward dispatch first", "weights first", "missing", "twice"],
)
def test_a_planted_wrong_order_is_refused(change, message):
    rows, schedule, parts = planted("1f1b", change)
    with pytest.raises(ScheduleError, match=message):
        prove(rows, schedule, parts)


def test_members_of_a_group_issue_their_all_to_alls_in_one_order():
    """The digest tells a member whose row runs alone but swaps a dispatch with the combine of another microbatch."""
    other, schedule, parts = planted("1f1b", lambda row, parts: None)
    dispatch, combine = parse_part(parts, "0F2.0D"), parse_part(parts, "0B0.0C")
    row = list(other.rows[0])
    row.remove(combine)
    row.insert(row.index(dispatch) + 1, combine)
    member = replace(other, rows=(tuple(row), *other.rows[1:]))
    prove(member, schedule, parts)
    assert exchange_digest(row, parts) != exchange_digest(other.rows[0], parts)


def test_parts_that_stay_alive_longer_than_their_stages_are_refused():
    schedule = build_schedule("1f1b", 1, 1, 3)
    parts = layers_of(1, [True])
    rows = expand(schedule, parts)
    late = tuple(sorted(rows.rows[0], key=lambda action: action.op is W))
    with pytest.raises(ScheduleError, match=r"rank 0 .*11 .*5"):
        prove(replace(rows, rows=(late,)), schedule, parts)


def test_stages_and_layers_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="stage 0 of 2 would have no layer"):
        parts_of(from_counts([0, 1], 1), [True])
    with pytest.raises(ConfigError, match="1 kinds of layers were given for 2"):
        parts_of(from_counts([1, 1], 2), [True])
    with pytest.raises(ScheduleError, match="parts of 2 stages"):
        expand(build_schedule("1f1b", 3, 1, 2), layers_of(2, [True]))
    parts = layers_of(1, [True])
    rows = lower(expand(build_schedule("1f1b", 1, 1, 1), parts))
    blocking = replace(part_costs(parts, EQUAL, parts.network), overlap=False)
    with pytest.raises(ScheduleError, match="without overlap"):
        simulate(rows, blocking)


MODEL = ExpertModel(
    (False, *[True] * 15),
    Seconds(5.5, 7.5, 3.5), Seconds(4.6, 4.6, 4.6), Seconds(4.6, 4.6, 4.6), Seconds(19.0, 19.0, 19.0),
    (2.3, 4.7), (4.7, 2.3),
)  # fmt: skip


def test_a_pair_by_hand():
    """One layer, F of microbatch 1 merged with B of microbatch 0; all parts take one second, the head none."""
    one = Seconds(1.0, 1.0, 1.0)
    model = ExpertModel((True,), one, one, one, Seconds(0.0, 0.0, 0.0), (1.0, 1.0), (1.0, 1.0))
    measures, timeline = measure_experts(build_schedule("1f1b", 1, 1, 2), model)
    # serial: 2 x (4 + 6); merged: F alone 4, the pair 6 (all of its computation), B alone 5 (one W beside D)
    assert measures.serial_seconds == 20
    assert measures.pairs_seconds == timeline.makespan_seconds == 15
    assert measures.bound_seconds == 12  # the computation of the rank
    assert (measures.exchange_seconds, measures.num_pairs, measures.peak_microbatches) == (8, 1, 2)


def test_the_table_of_4_ranks_and_16_microbatches():
    rows = {
        row.schedule: row
        for row in compare(MODEL, 4, 2, 16, names=["1f1b", "interleaved", "zb-h1", "dualpipe", "dualpipe-v"])
    }
    assert not any(isinstance(row, Unmeasured) for row in rows.values())
    assert rows["zb-h1"].pairs_seconds is None
    # with messages to every next rank in a pair, 1F1B has too short a warm-up; one more loop of it (v = 1) suffices
    assert rows["1f1b"].pairs_seconds > rows["1f1b"].weights_seconds
    for name in ("interleaved", "dualpipe", "dualpipe-v"):
        row = rows[name]
        assert row.bound_seconds <= row.pairs_seconds < row.weights_seconds < row.serial_seconds
        assert row.hidden_share > 0.6
