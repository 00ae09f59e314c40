"""A plan of a run whose batch ramps up: exact for every size, though it builds the schedules of few."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ConfigError
from megapipe.plan.memory import SliceBytes, all_rank_memory, peak_of_row, step_memory
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import decisive_counts
from megapipe.schedule.action import Op
from megapipe.schedule.families import SCHEDULES, build_forward_only, build_lowered, build_stream
from megapipe.schedule.lifetimes import assign_slots, num_slots
from megapipe.schedule.simulate import unhindered_send_depth
from megapipe.schedule.stream import weight_versions
from tests.tiny import small_config

FAMILIES = [name for name, family in SCHEDULES.items() if not family.is_automatic]
SIZES = ((100, 60, 10), (7, 7, 100))  # bytes kept from F to B or I and from I to W, and of a message


@cache
def needs(name: str, pp: int, chunks: int, count: int, group_size: int | None) -> dict[tuple, int] | None:
    """Return what a step needs: sends in flight, slots, weight versions, peaks of memory with some sizes."""
    try:
        schedule = build_lowered(name, pp, chunks, count, group_size)
    except ConfigError:
        return None
    forward_only = build_forward_only(schedule.placement, count)
    found: dict[tuple, int] = {("sends",): unhindered_send_depth(schedule)}
    found["forward-only sends",] = unhindered_send_depth(forward_only)
    for rank, row in enumerate(schedule.rows):
        stages = schedule.placement.stages_of(rank)
        found |= {("slots", rank, stage): number for stage, number in num_slots(assign_slots(row)).items()}
        for sends in (1, 3):
            for kept, waiting, message in SIZES:
                of_stage = {stage: kept * (1 + 2 * (stage == stages[0])) for stage in stages}
                inside = {(stage, op): 40 + 30 * (op is Op.B) for stage in stages for op in (Op.F, Op.B, Op.I, Op.W)}
                size = SliceBytes(of_stage, dict.fromkeys(stages, waiting), inside, message)
                peak = peak_of_row(row, rank, schedule.placement, [size], sends)
                found["bytes", rank, sends, kept] = peak.total
        if rule := SCHEDULES[name].versions:
            stretch = build_stream(name, pp, count).stretch
            found["versions", rank] = weight_versions(stretch, rank, rule).num_held
    assert (Op.W in schedule.ops) == SCHEDULES[name].splits_backward
    return found


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=4)
@given(data=st.data())
def test_no_step_of_a_ramp_needs_more_than_the_decisive_ones(name: str, data: st.DataObject) -> None:
    family, pp = SCHEDULES[name], data.draw(st.integers(1, 4))
    chunks = family.num_chunks(data.draw(st.integers(2, 3)))
    group_size = data.draw(st.integers(pp, 2 * pp)) if family.takes_group_size else None
    start, increment = data.draw(st.integers(1, 2 * pp + 2)), data.draw(st.integers(1, pp + 1))
    found = {
        count: needs(name, pp, chunks, count, group_size)
        for count in range(start, 5 * (group_size or pp) + 4, increment)
    }
    counts = [count for count, need in found.items() if need is not None]
    if not counts:
        return
    decisive = decisive_counts(family, pp, group_size, counts)
    assert max(counts) in decisive
    assert set(decisive.values()) <= set(counts)
    of_decisive = [needs(name, pp, chunks, count, group_size) or {} for count in decisive]
    for count in counts:
        for what, need in (found[count] or {}).items():
            assert need <= max(of_one.get(what, 0) for of_one in of_decisive), (count, what)


def test_the_planned_memory_is_that_of_the_largest_step_of_a_ramp() -> None:
    """Seven microbatches on four ranks are one group of seven in each chunk; sixteen are groups of four."""
    grid = {"pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 2, "micro_batch_size": 1}
    ramp = {"rampup_batch_size": (7, 3, 30), "train_iters": None, "train_samples": 200}
    plan = resolve(small_config(**grid, **ramp, global_batch_size=16), 4)
    assert plan.decisive_counts == {7: 7, 10: 10, 13: 13, 16: 16}
    for rank in all_rank_memory(plan):
        steps = [step_memory(plan, rank.pp_rank, count) for count in (7, 10, 13, 16)]
        assert rank.total == max(step.total for step in steps)
    assert all_rank_memory(plan)[0].total > step_memory(plan, 0, 16).total


def test_few_schedules_are_built_for_many_sizes() -> None:
    sizes = list(range(16, 16 * 97, 16))
    assert decisive_counts(SCHEDULES["interleaved"], 16, 16, sizes) == {1536: 1536}
    assert decisive_counts(SCHEDULES["1f1b"], 16, None, sizes) == {1536: 1536}
    assert decisive_counts(SCHEDULES["zb-v"], 16, None, sizes) == {16: 16, 32: 32, 1536: 1536}
    assert len(decisive_counts(SCHEDULES["interleaved"], 16, 16, range(1, 97))) == 16
    assert decisive_counts(SCHEDULES["zb-auto"], 16, None, sizes) == {size: size for size in sizes}
