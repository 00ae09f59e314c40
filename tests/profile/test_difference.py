"""Predicted and measured bubbles of made-up steps with known answers."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.profile.difference import (
    CAUSES,
    Comparison,
    Idle,
    compare,
    predicted_idle,
    profile_text,
    replay,
    summarize,
    total_idle,
)
from megapipe.schedule.action import Action, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.simulate import simulate
from tests.profile.synthetic import Seconds, even, lowered, profile_of, step_of

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


def compared(schedule: Schedule, latency: float = 0.0, known_latency: float = 0.0, **changes: Seconds) -> Comparison:
    step = step_of(schedule, latency_seconds=latency, **changes)  # type: ignore[arg-type]
    profile = profile_of(schedule, (step,), known_latency)
    return compare(profile, step)


def parts(comparison: Comparison) -> dict[str, float]:
    return {name: round(idle.barrier, 9) for name, idle in comparison.causes.items()}


def test_a_step_as_planned_has_the_bubble_of_the_formula_and_no_difference() -> None:
    comparison = compared(lowered("1f1b", 4, 8))
    assert comparison.measured.makespan_seconds == pytest.approx(11 * 0.030)  # (m + p - 1)(F + B)
    assert parts(comparison) == {name: 0.09 if name == "equal stages" else 0.0 for name in CAUSES}  # (p - 1)(F + B)
    assert comparison.measured.idle.chained == pytest.approx(0.09)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_time_between_actions_is_the_engines(name: str, chunks: int) -> None:
    comparison = compared(lowered(name, 4, 8, chunks), gap=lambda rank, action: 0.001)
    found = parts(comparison)
    assert found.pop("engine") > 0.008
    assert {key for key, value in found.items() if abs(value) > 1e-9} == {"equal stages"}


def test_slower_messages_than_between_idle_ranks_are_communication_and_known_ones_are_planned() -> None:
    comparison = compared(lowered("gpipe", 4, 8), latency=0.005, known_latency=0.002)
    found = parts(comparison)
    assert found["messages"] == pytest.approx(2 * 3 * 0.002)  # down the pipeline and back up
    assert found["communication"] == pytest.approx(2 * 3 * 0.003)
    assert {key for key, value in found.items() if abs(value) > 1e-9} == {"equal stages", "messages", "communication"}


def test_a_slow_stage_is_unequal_stages_and_a_slow_microbatch_is_noise() -> None:
    slow_stage = parts(
        compared(
            lowered("1f1b", 4, 8), seconds=lambda rank, action: even(rank, action) * (1.5 if action.stage == 2 else 1.0)
        )
    )
    assert slow_stage["unequal stages"] > 0.05 and abs(slow_stage["noise"]) < 1e-9

    def once_slow(rank: int, action: Action) -> float:
        return even(rank, action) + (0.040 if (action.stage, action.op, action.microbatch) == (0, Op.F, 0) else 0.0)

    slow_once = parts(compared(lowered("1f1b", 4, 8), seconds=once_slow))
    assert slow_once["noise"] > 0.01 and slow_once["engine"] == slow_once["communication"] == 0.0


def test_a_rank_that_starts_late_and_waits_for_parameters_is_the_optimizers() -> None:
    late = parts(
        compared(
            lowered("1f1b", 4, 8),
            late=lambda rank: 0.007 if rank == 0 else 0.0,  # type: ignore[arg-type, return-value]
        )
    )
    assert late["optimizer"] == pytest.approx(0.007) and late["communication"] == 0.0

    def first_of_rank_0(rank: int, action: Action) -> float:
        return 0.004 if (rank, action.op, action.microbatch) == (0, Op.F, 0) else 0.0

    waiting = parts(compared(lowered("1f1b", 4, 8), parameter_wait=first_of_rank_0))
    assert waiting["optimizer"] == pytest.approx(0.004) and waiting["noise"] == 0.0


@pytest.mark.parametrize(("name", "chunks"), FAMILIES, ids=[name for name, _ in FAMILIES])
@settings(max_examples=10, deadline=None)
@given(p=st.integers(1, 4), extra=st.integers(0, 3), seed=st.randoms(use_true_random=False))
def test_the_parts_add_up_to_the_difference_whatever_happened(
    name: str, chunks: int, p: int, extra: int, seed: object
) -> None:
    if p == 1 and name != "gpipe":
        p = 2
    schedule = lowered(name, p, 2 * p * chunks + 2 * extra, chunks)
    noise = {}

    def drawn(rank: int, action: Action, scale: float) -> float:
        return noise.setdefault((rank, action, scale), scale * seed.random())  # type: ignore[attr-defined]

    comparison = compared(
        schedule,
        latency=0.002,
        known_latency=0.001,
        seconds=lambda rank, action: even(rank, action) + (drawn(rank, action, 0.01) if even(rank, action) else 0.0),
        gap=lambda rank, action: drawn(rank, action, 0.002),
        late=lambda rank: 0.003 * rank,  # type: ignore[misc, arg-type]
    )
    total, wall = total_idle(comparison.causes.values()), comparison.measured.makespan_seconds
    assert total.barrier == pytest.approx(wall - fmean(comparison.measured.work_seconds), abs=1e-9)
    assert total == pytest.approx(comparison.measured.idle, abs=1e-9)
    assert predicted_idle(comparison.causes).barrier == pytest.approx(
        sum(comparison.plan.barrier_idle_seconds) / p, abs=1e-9
    )
    assert comparison.plan.work_seconds == pytest.approx(
        comparison.measured.work_seconds, abs=1e-9
    )  # the same work in both steps


@pytest.mark.parametrize(("name", "chunks"), FAMILIES, ids=[name for name, _ in FAMILIES])
@pytest.mark.parametrize(("transfer", "latency"), [(0.0, 0.0), (0.003, 0.001)], ids=["free", "messages"])
def test_a_replay_with_the_costs_of_a_simulation_is_that_simulation(
    name: str, chunks: int, transfer: float, latency: float
) -> None:
    schedule = lowered(name, 4, 16, chunks)
    stages = range(schedule.num_stages)
    seconds = {(stage, op): 0.01 * (1 + stage % 3) for stage in stages for op in (Op.F, Op.B, Op.I, Op.W)}
    wires = {(stage, op): transfer for stage in stages for op in (Op.SEND_F, Op.SEND_B)}
    plan = simulate(schedule, Costs(seconds | wires, latency))
    durations = []
    for row in schedule.rows:
        own = [seconds.get((action.stage, action.op), 0.0) for action in row]
        for slot, action in enumerate(row):
            if action.op is Op.OVERLAP:
                own[slot] = own[slot + 1] + own[slot + 2]
        durations.append(tuple(own))
    none = tuple(tuple(0.0 for _ in row) for row in schedule.rows)
    starts, ends = replay(schedule, tuple(durations), none, Costs(wires, latency))
    for rank, row in enumerate(schedule.rows):
        slots = [slot for slot, action in enumerate(row) if action.op in (Op.F, Op.B, Op.I, Op.W)]
        assert [starts[rank][slot] for slot in slots] == pytest.approx([plan.starts[rank][slot] for slot in slots])
        assert [ends[rank][slot] for slot in slots] == pytest.approx([plan.ends[rank][slot] for slot in slots])


def test_the_summary_is_the_mean_of_its_steps_and_names_both_clocks() -> None:
    schedule = lowered("1f1b", 4, 8)
    quiet, slow = step_of(schedule, number=11), step_of(schedule, gap=lambda rank, action: 0.002, number=12)
    profile = profile_of(schedule, (quiet, slow))
    summary = summarize(profile)
    each = [compare(profile, step).measured.idle for step in (quiet, slow)]
    assert summary.measured_idle == pytest.approx(Idle(*(sum(pair) / 2 for pair in zip(*each, strict=True))))
    text = profile_text(profile, summary)
    assert (
        "profile of steps 11 to 12: 1f1b (4 ranks, 4 stages, 8 microbatches), ranks 0 1 2 3; all ranks read one clock"
        in text
    )
    assert f"{summary.measured_share.barrier:.1%}" in text and f"{summary.predicted_share.chained:.1%}" in text
    assert summary.predicted_share == pytest.approx((3 / 11, 3 / 11))


def test_a_pipeline_of_one_rank_has_no_differences() -> None:
    comparison = compared(lowered("1f1b", 1, 4))
    assert parts(comparison) == dict.fromkeys(CAUSES, 0.0)


def test_a_whole_step_lasts_from_the_first_rank_that_starts_to_the_last_that_ends() -> None:
    schedule = lowered("1f1b", 2, 4)
    step = step_of(schedule)
    phases = ((("step", 0, 80), ("optimizer", 60, 80)), (("step", 20, 100), ("optimizer", 90, 100)))
    rows = tuple(replace(row, phases=each) for row, each in zip(step.rows, phases, strict=True))
    summary = summarize(profile_of(schedule, (replace(step, rows=rows),)))
    assert summary.phases == pytest.approx({"step": 100e-9, "optimizer": 20e-9})
