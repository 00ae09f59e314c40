"""Sharded weights: the lowering pass, its proof, its counts and its times, for every synchronous schedule."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.errors import ConfigError, ScheduleError
from megapipe.extras.report.schedule_csv import from_csv
from megapipe.schedule.action import Action, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.families import SCHEDULES, build_forward_only, build_schedule
from megapipe.schedule.lower import lower
from megapipe.schedule.partition import from_counts
from megapipe.schedule.placement import loop
from megapipe.schedule.schedule import Row, Schedule, to_csv
from megapipe.schedule.sharding import (
    GRANULARITIES,
    ShardingPolicy,
    divided,
    joined_units,
    shard,
    split_placement,
    split_stages,
)
from megapipe.schedule.simulate import simulate
from megapipe.schedule.validate import validate
from tests.schedule.strategies import family_shapes, random_schedules

# zb-auto is searched for given times
SYNCHRONOUS = [name for name, family in SCHEDULES.items() if family.is_synchronous and not family.is_automatic]
ZERO_2, ZERO_3 = ShardingPolicy(gathers=False), ShardingPolicy(gathers=True)


@st.composite
def policies(draw: st.DrawFn) -> ShardingPolicy:
    granularity = draw(st.sampled_from(GRANULARITIES))
    return ShardingPolicy(
        gathers=draw(st.booleans()),
        granularity=granularity,
        prefetch=draw(st.integers(0, 3)),
        reshard_after_forward=granularity != "step" and draw(st.booleans()),
    )


@st.composite
def synchronous_schedules(draw: st.DrawFn) -> Schedule:
    """Draw compute-only schedules of every family, some with units, some with a W that reads weights at the end of the
    model or everywhere.
    """
    name = draw(st.sampled_from(SYNCHRONOUS))
    shape = family_shapes(name, draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 10)))
    schedule = build_schedule(*shape)
    units = draw(st.lists(st.integers(1, 3), min_size=schedule.num_stages, max_size=schedule.num_stages))
    split, stages = split_stages(schedule, units), range(sum(units))
    return replace(split, reading_in_w=frozenset(draw(st.sampled_from([stages[:0], stages[-1:], stages]))))


def without_sharding(row: Row) -> Row:
    dropped = {Op.UNSHARD, Op.RESHARD}
    return tuple(a for a in row if a.op not in dropped and not (a.op is Op.REDUCE_GRAD and a.microbatch is not None))


def counts(schedule: Schedule, rank: int) -> Counter[Op]:
    return Counter(action.op for action in schedule.rows[rank])


def breadth_first(chunks: int, microbatches: int = 8, ranks: int = 2) -> Schedule:
    return lower(build_schedule("breadth-first", ranks, chunks, microbatches))


@given(synchronous_schedules(), policies())
def test_every_sharded_schedule_is_valid_and_computes_the_same(schedule: Schedule, policy: ShardingPolicy) -> None:
    lowered = lower(schedule)
    sharded = shard(lowered, policy)
    validate(sharded)
    assert tuple(map(without_sharding, sharded.rows)) == lowered.rows
    assert sharded.compute_only() == schedule


@pytest.mark.parametrize("granularity", ["run", "microbatch"])
def test_a_w_that_reads_weights_is_given_them_and_rejected_without(granularity: str) -> None:
    """A W that is far from the I of its microbatch finds them freed, unless it is known to read them."""
    lowered = lower(build_schedule("zb-v", 2, 2, 6))
    reading = replace(lowered, reading_in_w=frozenset({3}))
    policy = ShardingPolicy(True, granularity)
    unaware = shard(lowered, policy)
    validate(unaware)
    with pytest.raises(ScheduleError, match=r"rank 0, slot \d+: 3W\d: .*stage 3"):
        validate(replace(unaware, reading_in_w=reading.reading_in_w))
    validate(shard(reading, policy))


def test_units_of_a_stage_read_weights_in_w_like_the_stage() -> None:
    schedule = replace(build_schedule("zb-h1", 2, 1, 2), reading_in_w=frozenset({1}))
    assert split_stages(schedule, (2, 3)).reading_in_w == {2, 3, 4}


@given(random_schedules(), policies())
def test_schedules_in_any_order_can_be_sharded(schedule: Schedule, policy: ShardingPolicy) -> None:
    if len(schedule.placement.directions) == 1:  # in any order the two ranks of a stage do not agree
        validate(shard(lower(schedule), policy))


@given(synchronous_schedules(), policies(), st.integers(1, 4))
def test_the_limit_of_gathered_stages_is_kept_or_refused(schedule: Schedule, policy: ShardingPolicy, most: int) -> None:
    try:
        sharded = shard(lower(schedule), replace(policy, gathers=True, max_gathered=most))
    except ConfigError:
        unlimited = shard(lower(schedule), replace(policy, gathers=True, prefetch=0))
        assert max(validate(unlimited).most_gathered) > most
        return
    assert max(validate(sharded, max_gathered=most).most_gathered) <= most


@given(synchronous_schedules(), policies())
def test_gathers_that_take_no_time_do_not_change_the_timeline(schedule: Schedule, policy: ShardingPolicy) -> None:
    lowered = lower(schedule)
    costs = Costs.equal(schedule.num_stages, latency_seconds=0.25)
    assert simulate(shard(lowered, policy), costs).makespan_seconds == simulate(lowered, costs).makespan_seconds


@given(synchronous_schedules(), policies(), st.randoms(use_true_random=False))
def test_a_row_without_one_of_its_sharding_actions_is_rejected(
    schedule: Schedule, policy: ShardingPolicy, random: object
) -> None:
    sharded = shard(lower(schedule), replace(policy, gathers=True))
    rank = random.randrange(sharded.num_ranks)  # type: ignore[attr-defined]
    row = sharded.rows[rank]
    slots = [slot for slot, action in enumerate(row) if action.op in (Op.UNSHARD, Op.RESHARD)]
    slot = random.choice(slots)  # type: ignore[attr-defined]
    rows = list(sharded.rows)
    rows[rank] = row[:slot] + row[slot + 1 :]
    with pytest.raises(ScheduleError, match=r"gathered|is missing|equally many"):
        validate(replace(sharded, rows=tuple(rows)))


@given(synchronous_schedules(), policies())
def test_csv_keeps_the_sharding_actions(schedule: Schedule, policy: ShardingPolicy) -> None:
    sharded = shard(lower(schedule), policy)
    read = from_csv(to_csv(sharded), schedule.name, schedule.placement, schedule.num_microbatches)
    assert replace(read, reading_in_w=sharded.reading_in_w) == sharded  # a property of the model, not of rows


@pytest.mark.parametrize("chunks", [1, 2, 4], ids=lambda v: f"v{v}")
def test_breadth_first_gathers_2v_minus_1_or_2v_and_reduces_v_times(chunks: int) -> None:
    lowered = breadth_first(chunks)
    for rank in range(2):
        found = counts(shard(lowered, ZERO_3), rank)
        assert (found[Op.UNSHARD], found[Op.REDUCE_GRAD]) == (2 * chunks - 1, chunks)
        resharded = counts(shard(lowered, replace(ZERO_3, reshard_after_forward=True)), rank)
        assert (resharded[Op.UNSHARD], resharded[Op.REDUCE_GRAD]) == (2 * chunks, chunks)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_per_microbatch_gathers_2m_and_reduces_m_times(name: str) -> None:
    lowered, m = lower(build_schedule(name, 4, 1, 8)), 8
    policy = ShardingPolicy(True, "microbatch", reshard_after_forward=True)
    for rank in range(4):
        found = counts(shard(lowered, policy), rank)
        assert (found[Op.UNSHARD], found[Op.REDUCE_GRAD]) == (2 * m, m)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_once_a_step_gathers_and_reduces_each_stage_once(name: str) -> None:
    lowered = lower(build_schedule(*family_shapes(name, 4, 2, 8)))
    sharded = shard(lowered, ShardingPolicy(True, "step"))
    for rank in range(4):
        stages = len(lowered.placement.stages_of(rank))
        assert (counts(sharded, rank)[Op.UNSHARD], counts(sharded, rank)[Op.REDUCE_GRAD]) == (stages, stages)


def test_interleaved_gathers_each_group_of_a_chunk_once_in_each_direction() -> None:
    p, v, m = 4, 3, 16
    sharded = shard(lower(build_schedule("interleaved", p, v, m)), replace(ZERO_3, reshard_after_forward=True))
    last = counts(sharded, p - 1)  # its forward of the last chunk overlaps the backward of it
    assert last[Op.UNSHARD] <= 2 * v * m // p
    assert last[Op.REDUCE_GRAD] == v * m // p


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 8), (4, 3, 16), (4, 4, 8), (8, 2, 64)])
def test_interleaved_keeps_the_weights_that_the_next_computation_reads(p: int, v: int, m: int) -> None:
    """Freed after every run in both directions, the last rank would gather each of v m / p runs twice. The last chunk
    turns m / p times; the first chunk's backward is followed by its own next forward, but for the last m / p - 2.
    """
    sharded = shard(lower(build_schedule("interleaved", p, v, m)), ZERO_3)
    gathers = counts(sharded, p - 1)[Op.UNSHARD]
    assert gathers == 2 * v * m // p - (m // p) - (m // p - 1)


@pytest.mark.parametrize("units", [2, 4, 16])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_1f1b_in_units_keeps_the_units_at_which_it_turns(ranks: int, units: int) -> None:
    """A rank turns with the last unit from F to B and with the first from B to F, once it has filled the pipeline."""
    m = 8
    sharded = shard(lower(split_stages(build_schedule("1f1b", ranks, 1, m), (units,) * ranks)), ZERO_3)
    for rank in range(ranks):
        turns = m - (ranks - 1 - rank)
        assert counts(sharded, rank)[Op.UNSHARD] == 2 * units * m - turns - (turns - 1)


@given(synchronous_schedules(), st.integers(0, 3))
def test_no_stage_is_freed_and_gathered_again_for_the_next_computation(schedule: Schedule, prefetch: int) -> None:
    for row in shard(lower(schedule), ShardingPolicy(True, prefetch=prefetch)).rows:
        uses: list[set[int]] = []  # the stages that each computation reads, an overlapped pair as one
        frees: list[tuple[int, int]] = []  # (stage, computations before it)
        second_half = -1
        for slot, action in enumerate(row):
            if action.op is Op.OVERLAP:
                uses.append({half.stage for half in row[slot + 1 : slot + 3]})
                second_half = slot + 2
            elif slot > second_half and schedule.reads_weights(action):
                uses.append({action.stage})
            elif action.op is Op.RESHARD:
                frees.append((action.stage, len(uses)))
        assert not [stage for stage, number in frees if number < len(uses) and stage in uses[number]]


def test_a_pair_of_dualpipe_gathers_two_stages() -> None:
    lowered = lower(build_schedule("dualpipe", 4, 1, 8))
    sharded = shard(lowered, ShardingPolicy(True, "microbatch", prefetch=0, reshard_after_forward=True))
    assert validate(sharded, max_gathered=2).most_gathered == (2, 2, 2, 2)
    with pytest.raises(ConfigError, match="2 at once"):
        shard(lowered, ShardingPolicy(True, "microbatch", max_gathered=1))


def test_ranks_of_a_stage_that_gather_in_different_orders_are_rejected() -> None:
    sharded = shard(lower(build_schedule("dualpipe", 2, 1, 4)), ShardingPolicy(True, "step"))
    row = sharded.rows[1]
    places = [slot for slot, action in enumerate(row) if action.op is Op.UNSHARD]
    swapped = list(row)
    first, second = places[:2]
    swapped.insert(first, swapped.pop(second))
    with pytest.raises(ScheduleError, match="in one order"):
        validate(replace(sharded, rows=(sharded.rows[0], tuple(swapped))))


def test_prefetched_gathers_run_under_computation() -> None:
    """Three chunks of one microbatch on one rank, F = B = 1, gathers of 0.5: only what cannot be ahead is exposed."""
    schedule = lower(build_schedule("breadth-first", 1, 3, 1))
    seconds = {(stage, op): 1.0 for stage in range(3) for op in (Op.F, Op.B)}
    costs = Costs(seconds | {(stage, Op.UNSHARD): 0.5 for stage in range(3)})
    policy = replace(ZERO_3, granularity="microbatch")
    assert simulate(shard(schedule, policy), costs).makespan_seconds == 6.5
    assert simulate(shard(schedule, replace(policy, prefetch=0)), costs).makespan_seconds == 6 + 5 * 0.5
    blocked = replace(costs, overlap=False)
    assert simulate(shard(schedule, policy), blocked).makespan_seconds == 6 + 5 * 0.5


def test_gathers_and_reductions_of_a_rank_take_turns_on_its_network() -> None:
    schedule = lower(build_schedule("1f1b", 1, 1, 2))
    costs = Costs({(0, Op.F): 1.0, (0, Op.B): 1.0, (0, Op.UNSHARD): 3.0, (0, Op.REDUCE_GRAD): 4.0})
    timeline = simulate(shard(schedule, ShardingPolicy(True, "microbatch")), costs)
    row = [str(action) for action in timeline.schedule.rows[0]]
    assert row == [
        "0UNSHARD",
        "0F0",
        "0B0",
        "0RESHARD",
        "0UNSHARD",
        "0REDUCE_GRAD0",
        "0F1",
        "0B1",
        "0RESHARD",
        "0REDUCE_GRAD",
    ]
    times = dict(zip(row, zip(timeline.starts[0], timeline.ends[0], strict=True), strict=True))
    assert times["0UNSHARD"] == (5.0, 8.0)  # the second
    assert times["0REDUCE_GRAD0"] == (8.0, 12.0)
    assert times["0F1"] == (8.0, 9.0)
    assert times["0REDUCE_GRAD"] == (12.0, 16.0)


def test_weights_of_a_deferred_weight_gradient_are_not_gathered() -> None:
    sharded = shard(lower(build_schedule("zb-h2", 4, 1, 8)), ShardingPolicy(True, "microbatch", prefetch=0))
    gathered, without = False, 0
    for action in sharded.rows[0]:
        gathered = action.op is Op.UNSHARD or (gathered and action.op is not Op.RESHARD)
        without += action.op is Op.W and not gathered
    assert without


def test_reductions_cover_every_microbatch_once() -> None:
    for row in shard(lower(build_schedule("zb-v", 4, 2, 12)), ZERO_2).rows:
        waiting: Counter[int] = Counter()
        for stage, op, microbatch in row:
            waiting[stage] += op in (Op.B, Op.W)
            if op is Op.REDUCE_GRAD:
                assert waiting.pop(stage), (stage, microbatch)
        assert not +waiting


def test_a_reduction_of_nothing_is_rejected() -> None:
    sharded = shard(lower(build_schedule("1f1b", 2, 1, 4)), replace(ZERO_2, granularity="microbatch"))
    row = list(sharded.rows[0])
    row.remove(Action(0, Op.REDUCE_GRAD, 1))
    row.insert(row.index(Action(0, Op.REDUCE_GRAD, 2)), Action(0, Op.REDUCE_GRAD, 1))
    with pytest.raises(ScheduleError, match="0REDUCE_GRAD1"):
        validate(replace(sharded, rows=(tuple(row), sharded.rows[1])))


def test_forward_only_rows_of_evaluation_gather_too() -> None:
    placement = build_schedule("interleaved", 2, 2, 4).placement
    sharded = shard(build_forward_only(placement, 4), ZERO_3)
    validate(sharded, max_gathered=2)
    assert counts(sharded, 0)[Op.UNSHARD] == 4 and not counts(sharded, 0)[Op.REDUCE_GRAD]


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_asynchronous_schedules_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match="cannot be sharded"):
        shard(lower(build_schedule(name, 2, 1, 4)), ZERO_2)


def test_units_share_the_layers_of_their_stage() -> None:
    layers, placement = [5, 4, 0, 7], loop(2, 2)
    of_stages = [divided(count, 3) for count in layers]
    assert of_stages == [[2, 2, 1], [2, 1, 1], [0], [3, 2, 2]]
    units, split = [len(each) for each in of_stages], from_counts([each for stage in of_stages for each in stage], 16)
    assert joined_units(split_placement(placement, units), split, units) == (placement, from_counts(layers, 16))


def test_units_of_a_pair_are_paired_in_opposite_order() -> None:
    schedule = build_schedule("dualpipe", 2, 1, 4)
    split = split_stages(schedule, (2, 2))
    validate(lower(split))
    pairs = [(split.rows[0][i + 1], split.rows[0][i + 2]) for i, a in enumerate(split.rows[0]) if a.op is Op.OVERLAP]
    assert [(forward.stage % 2, backward.stage % 2) for forward, backward in pairs[:2]] == [(0, 1), (1, 0)]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_units_keep_the_slices_of_microbatches(name: str) -> None:
    schedule = build_schedule(name, 2, SCHEDULES[name].num_chunks(1), 4, num_slices=2)
    units = [2] * schedule.num_stages
    split = lower(split_stages(schedule, units))
    assert split.num_slices == 2
    validate(split)
    validate(shard(split, ShardingPolicy(gathers=True)))
