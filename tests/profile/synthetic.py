"""Profiles with known answers: made-up timelines in the form in which a tracer would have recorded them."""

from __future__ import annotations

from collections.abc import Callable

from megapipe.profile.profile import ClockOffset, LinkTime, MeasuredRow, MeasuredStep, PipelineSteps, Profile
from megapipe.schedule.action import BUSY_OPS, Action, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.families import build_lowered
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.simulate import simulate

MS = 1_000_000  # ns
COSTS = {Op.F: 0.010, Op.B: 0.020, Op.I: 0.010, Op.W: 0.010}


def even(action: Action) -> float:
    """Return 10 ms for a forward and 20 ms for a backward; messages and reductions take no time."""
    return COSTS.get(action.op, 0.0)


def step_of(
    schedule: Schedule,
    seconds: Callable[[Action], float] = even,  # of a stage's op
    latency_seconds: float = 0.0,
    number: int = 11,
    origin_ns: int = 5 * MS,
) -> MeasuredStep:
    """Build a step as simulated: a computation starts when the last one has ended, and waits for its message."""
    costs = {(action.stage, action.op): seconds(action) for row in schedule.rows for action in row}
    timeline = simulate(schedule, Costs(costs, latency_seconds))
    rows = []
    for row, starts, ends in zip(schedule.rows, timeline.starts, timeline.ends, strict=True):
        clock, half, slots = 0.0, 0, []  # of each slot: begin, end, wait
        for action, start, end in zip(row, starts, ends, strict=True):
            if half:  # of an overlapped pair, whose wait is recorded at its OVERLAP
                slots.append((*slots[-1][:2], 0.0))
                half -= 1
            elif action.op in BUSY_OPS | {Op.OVERLAP}:
                slots.append((clock, end, start - clock))
                clock, half = end, 2 * (action.op is Op.OVERLAP)
            else:
                slots.append((clock, clock, 0.0))
        begins, stops, waits = (tuple(round(each * 1e9) for each in column) for column in zip(*slots, strict=True))
        begins, stops = (tuple(origin_ns + each for each in column) for column in (begins, stops))
        rows.append(MeasuredRow(begins, stops, waits, (0,) * len(row)))
    return MeasuredStep(number, schedule.num_microbatches, tuple(rows))


def profile_of(
    schedule: Schedule, steps: tuple[MeasuredStep, ...], latency_seconds: float = 0.0, transfer_seconds: float = 0.0
) -> Profile:
    """Build the profile of one pipeline, with the given message times between idle ranks."""
    ranks = tuple(range(schedule.num_ranks))
    links = tuple(
        LinkTime((rank, (rank + 1) % len(ranks)), latency_seconds, transfer_seconds) for rank in ranks if len(ranks) > 1
    )
    clocks = tuple(ClockOffset(rank, 0, 0, True) for rank in ranks)
    about = {"schedule": schedule.name, "device": "cpu"}
    return Profile(
        about, {schedule.num_microbatches: schedule}, 1024, links, clocks, (PipelineSteps(0, 0, ranks, steps),)
    )


def lowered(name: str = "1f1b", p: int = 4, m: int = 8, v: int = 1) -> Schedule:
    return build_lowered(name, p, v, m)
