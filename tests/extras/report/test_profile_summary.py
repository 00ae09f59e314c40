"""Planned and measured bubbles of made-up steps with known answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megapipe.extras.report.profile_summary import Idle, compare, profile_text, summarize
from megapipe.schedule.action import Action, Op
from tests.profile.synthetic import even, lowered, profile_of, step_of

FAMILIES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("breadth-first", 2),
    ("zb-h1", 1),
    ("zb-h2", 1),
    ("zb-v", 2),
    ("dualpipe-v", 2),
]


def of_stage(action: Action) -> float:
    return even(action) * (1 + action.stage % 3)


@pytest.mark.parametrize(("name", "chunks"), FAMILIES, ids=[name for name, _ in FAMILIES])
@pytest.mark.parametrize("latency", [0.0, 0.001], ids=["free", "messages"])
def test_a_step_as_planned_has_no_difference(name: str, chunks: int, latency: float) -> None:
    schedule = lowered(name, 4, 16, chunks)
    step = step_of(schedule, of_stage, latency)
    comparison = compare(profile_of(schedule, (step,), latency), step)
    measured, plan = comparison.measured, comparison.plan
    assert comparison.planned_idle == pytest.approx(measured.idle)
    assert plan.work_seconds == pytest.approx(measured.work_seconds)
    for rank, row in enumerate(schedule.rows):
        slots = [slot for slot, action in enumerate(row) if action.op in (Op.F, Op.B, Op.I, Op.W)]
        assert [measured.ends[rank][slot] for slot in slots] == pytest.approx([plan.ends[rank][slot] for slot in slots])


def test_the_bubble_of_equal_stages_is_that_of_the_formula() -> None:
    schedule = lowered("1f1b", 4, 8)
    comparison = compare(profile_of(schedule, (step_of(schedule),)), step_of(schedule))
    assert comparison.measured.makespan_seconds == pytest.approx(11 * 0.030)  # (m + p - 1)(F + B)
    assert comparison.measured.idle == pytest.approx((0.09, 0.09))  # (p - 1)(F + B)


def test_messages_slower_than_between_idle_ranks_are_idle_time_beyond_the_plan() -> None:
    schedule = lowered("gpipe", 4, 8)
    step = step_of(schedule, latency_seconds=0.005)
    comparison = compare(profile_of(schedule, (step,), 0.002), step)
    assert comparison.planned_idle.barrier == pytest.approx(0.09 + 2 * 3 * 0.002)  # down the pipeline and back up
    assert comparison.measured.idle.barrier == pytest.approx(0.09 + 2 * 3 * 0.005)


def test_the_summary_is_the_mean_of_its_steps_and_its_table_is_printed() -> None:
    schedule = lowered("1f1b", 4, 8)
    quiet, slow = step_of(schedule, number=11), step_of(schedule, latency_seconds=0.002, number=12)
    profile = profile_of(schedule, (quiet, slow))
    summary = summarize(profile)
    each = [compare(profile, step).measured.idle for step in (quiet, slow)]
    assert summary.measured_idle == pytest.approx(Idle(*(sum(pair) / 2 for pair in zip(*each, strict=True))))
    assert summary.planned_share == pytest.approx((3 / 11, 3 / 11))
    text = profile_text(profile, summary)
    assert f"steps 11 to 12: {schedule}, ranks 0 1 2 3; all ranks read one clock" in text
    assert {row.name: (row.planned, row.measured) for row in summary.table}["bubble, barrier"] == (
        "27.3%",
        f"{summary.measured_share.barrier:.1%}",
    )
    assert all(f"{row.planned:>10} {row.measured:>10}" in text for row in summary.table)


def test_a_pipeline_of_one_rank_has_no_bubble() -> None:
    schedule = lowered("1f1b", 1, 4)
    comparison = compare(profile_of(schedule, (step_of(schedule),)), step_of(schedule))
    assert comparison.planned_idle == comparison.measured.idle == pytest.approx((0.0, 0.0))


def test_a_whole_step_lasts_from_the_first_rank_that_starts_to_the_last_that_ends() -> None:
    schedule = lowered("1f1b", 2, 4)
    step = step_of(schedule)
    phases = ((("step", 0, 80), ("optimizer", 60, 80)), (("step", 20, 100), ("optimizer", 90, 100)))
    rows = tuple(replace(row, phases=each) for row, each in zip(step.rows, phases, strict=True))
    summary = summarize(profile_of(schedule, (replace(step, rows=rows),)))
    assert summary.phases == pytest.approx({"step": 100e-9, "optimizer": 20e-9})
