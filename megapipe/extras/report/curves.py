"""Live chunks of each rank over a simulated timeline, and messages that wait for their use."""

from __future__ import annotations

from megapipe.schedule.action import COMPUTE_OPS, Op
from megapipe.schedule.lifetimes import Held, lifetimes
from megapipe.schedule.simulate import Timeline


def live_curve(timeline: Timeline, rank: int) -> list[tuple[float, float]]:
    """Return (seconds, chunks live from then on) of a rank: a chunk lives from the start of F to the end of B or W."""
    if not timeline.schedule.has_backward:
        return []
    weights = {Held.ACTIVATIONS: 1.0, Held.DEFERRED: 1.0}
    steps: list[tuple[float, int, float]] = []
    row = lifetimes(timeline.schedule.rows[rank])
    for (_, changes), start, end in zip(row, timeline.starts[rank], timeline.ends[rank], strict=True):
        at_start, at_end = changes.steps(weights)
        steps += ((start, 1, at_start), (end, 0, at_end))  # a start comes after what ends at the same time
    return _accumulated(steps)


def waiting_message_curves(timeline: Timeline) -> list[list[tuple[float, float]]]:
    """Return for each rank (seconds, activations and gradients received and not yet used from then on)."""
    schedule, costs = timeline.schedule, timeline.costs
    sent_at: dict[tuple[Op, int, int | None], float] = {}  # by the SEND, whether or not the schedule holds it
    for row, ends in zip(schedule.rows, timeline.ends, strict=True):
        for (stage, op, microbatch), end in zip(row, ends, strict=True):
            if op in COMPUTE_OPS and op is not Op.W:
                sent_at[Op.SEND_F if op is Op.F else Op.SEND_B, stage, microbatch] = end
    curves = []
    for rank, row in enumerate(schedule.rows):
        steps: list[tuple[float, int, float]] = []
        items = lifetimes(row, schedule.placement, rank)
        for ((stage, _, microbatch), changes), used in zip(items, timeline.starts[rank], strict=True):
            for kind, _ in (*changes.takes, *changes.frees):
                if kind in (Held.RECEIVED_INPUT, Held.RECEIVED_GRADIENT):
                    maker, send = (stage - 1, Op.SEND_F) if kind is Held.RECEIVED_INPUT else (stage + 1, Op.SEND_B)
                    wire_seconds = costs.latency_seconds + costs.of_slice(
                        maker, send, (microbatch or 0) % schedule.num_slices, schedule.num_slices
                    )
                    arrived = sent_at[send, maker, microbatch] + wire_seconds
                    if used > arrived:
                        steps += ((arrived, 1, 1.0), (used, 0, -1.0))
        curves.append(_accumulated(steps))
    return curves


def peak_waiting_messages(timeline: Timeline) -> tuple[int, ...]:
    """Return the peak of each curve of `waiting_message_curves`.

    No count of live microbatches shows this memory: with breadth-first it is m - p messages on rank 0.
    """
    return tuple(round(max((count for _, count in curve), default=0.0)) for curve in waiting_message_curves(timeline))


def _accumulated(steps: list[tuple[float, int, float]]) -> list[tuple[float, float]]:
    """Sum (seconds, order at the same time, change) up to (seconds, level)."""
    curve: list[tuple[float, float]] = []
    level = 0.0
    for time, _, step in sorted(step for step in steps if step[2]):
        level += step
        if curve and curve[-1][0] == time:
            curve[-1] = (time, level)
        else:
            curve.append((time, level))
    return curve
