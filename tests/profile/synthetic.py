"""Profiles with known answers: made-up timelines in the form in which a tracer would have recorded them."""

from __future__ import annotations

from collections.abc import Callable

from megapipe.profile.difference import replay
from megapipe.profile.profile import ClockOffset, LinkTime, MeasuredRow, MeasuredStep, PipelineSteps, Profile
from megapipe.schedule.action import COMPUTE_OPS, Action, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.families import build_lowered
from megapipe.schedule.schedule import Schedule

MS = 1_000_000  # ns
Seconds = Callable[[int, Action], float]  # (rank, action) -> seconds

COSTS = {Op.F: 0.010, Op.B: 0.020, Op.I: 0.010, Op.W: 0.010, Op.OVERLAP: 0.030}


def even(rank: int, action: Action) -> float:
    """Return 10 ms for a forward and 20 ms for a backward; messages and reductions take no time."""
    return COSTS.get(action.op, 0.0)


def nothing(rank: int, action: Action) -> float:
    return 0.0


def step_of(
    schedule: Schedule,
    seconds: Seconds = even,
    gap: Seconds = nothing,
    late: Callable[[int], float] = lambda rank: 0.0,
    parameter_wait: Seconds = nothing,
    latency_seconds: float = 0.0,
    number: int = 11,
    origin_ns: int = 5 * MS,
) -> MeasuredStep:
    """Build a step in which each action takes `seconds`, starts `gap` after the previous one, and a message takes
    `latency_seconds`.
    """
    durations = tuple(tuple(seconds(r, a) + parameter_wait(r, a) for a in row) for r, row in enumerate(schedule.rows))
    gaps = tuple(
        tuple(gap(r, a) if slot else late(r) for slot, a in enumerate(row)) for r, row in enumerate(schedule.rows)
    )
    starts, ends = replay(schedule, durations, gaps, Costs({}, latency_seconds))
    rows = []
    for rank, row in enumerate(schedule.rows):
        began, waits = _began(row, starts[rank], ends[rank], gaps[rank])
        ns = [tuple(origin_ns + round(t * 1e9) for t in times) for times in (began, ends[rank])]
        parameters = tuple(round(parameter_wait(rank, action) * 1e9) for action in row)
        rows.append(MeasuredRow(ns[0], ns[1], tuple(round(w * 1e9) for w in waits), parameters))
    return MeasuredStep(number, schedule.num_microbatches, tuple(rows))


def _began(
    row: tuple[Action, ...], starts: tuple[float, ...], ends: tuple[float, ...], gaps: tuple[float, ...]
) -> tuple[list[float], list[float]]:
    """Return the start and the wait of each action.

    A compute action starts at once and then waits for its message. The whole wait of an overlapped pair is recorded
    at its OVERLAP action.
    """
    clock, began, waits, halves = 0.0, [], [], 0
    for action, start, end, gap in zip(row, starts, ends, gaps, strict=True):
        begin = clock + gap if action.op in COMPUTE_OPS | {Op.OVERLAP} else start
        if halves:
            begin, halves = began[-1], halves - 1
            waits.append(0.0)
        else:
            waits.append(start - begin)
            halves = 2 if action.op is Op.OVERLAP else 0
        began.append(begin)
        clock = end
    return began, waits


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
