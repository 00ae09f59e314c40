"""What a rank holds as a step goes by: live (stage, microbatch) pairs, and inputs that have come but are not yet used."""

from __future__ import annotations

from collections.abc import Iterable

from megapipe.schedule.action import COMPUTE_OPS, Op
from megapipe.schedule.dependencies import MAKES, NEEDS, TRAVELS, ValueKind
from megapipe.schedule.simulate import Timeline


def live_curve(timeline: Timeline, rank: int, kept_for_weights: float = 1.0) -> list[tuple[float, float]]:
    """(seconds, chunks alive from then on): a chunk lives from the start of F to the end of B or W.

    kept_for_weights: the part of it that stays from the end of I to the end of W.
    """
    if not timeline.schedule.has_backward:
        return []
    change = {Op.B: -1.0, Op.I: kept_for_weights - 1.0, Op.W: -kept_for_weights}
    steps: list[tuple[float, int, float]] = []
    for (_, op, _), start, end in zip(
        timeline.schedule.rows[rank], timeline.starts[rank], timeline.ends[rank], strict=True
    ):
        if op is Op.F:
            steps.append((start, 1, 1.0))  # after what ends in the same moment
        elif change.get(op):
            steps.append((end, 0, change[op]))
    return _accumulated(steps)


def inputs_held_curves(timeline: Timeline) -> list[list[tuple[float, float]]]:
    """Of each rank (seconds, activations and gradients that came from another rank and wait for their use from then on)."""
    arrivals = _arrivals(timeline)
    curves = []
    for rank in range(timeline.schedule.num_ranks):
        steps: list[tuple[float, int, float]] = []
        for arrived, used in _waits(timeline, rank, arrivals):
            if used > arrived:
                steps += ((arrived, 1, 1.0), (used, 0, -1.0))
        curves.append(_accumulated(steps))
    return curves


def inputs_held(timeline: Timeline) -> tuple[int, ...]:
    """Of each rank the most of inputs_held_curves: memory that no count of live microbatches shows (breadth-first: m - p on rank 0)."""
    return tuple(round(max((count for _, count in curve), default=0.0)) for curve in inputs_held_curves(timeline))


def _accumulated(steps: list[tuple[float, int, float]]) -> list[tuple[float, float]]:
    curve: list[tuple[float, float]] = []
    level = 0.0
    for time, _, step in sorted(steps):
        level += step
        if curve and curve[-1][0] == time:
            curve[-1] = (time, level)
        else:
            curve.append((time, level))
    return curve


_Arrivals = dict[tuple[ValueKind, int, int], float]


def _waits(timeline: Timeline, rank: int, arrivals: _Arrivals) -> Iterable[tuple[float, float]]:
    """(came, used) of every message to `rank`."""
    schedule, costs = timeline.schedule, timeline.costs
    directions = schedule.placement.directions
    for (stage, op, microbatch), start in zip(schedule.rows[rank], timeline.starts[rank], strict=True):
        if op not in COMPUTE_OPS or microbatch is None:
            continue
        ranks = directions[microbatch % len(directions)]
        for kind, offset in NEEDS[op]:
            maker = stage + offset
            if kind in TRAVELS and 0 <= maker < len(ranks) and ranks[maker] != rank:
                delay = costs.seconds.get((maker, TRAVELS[kind][0]), 0.0) + costs.latency_seconds
                yield arrivals[kind, maker, microbatch] + delay, start


def _arrivals(timeline: Timeline) -> _Arrivals:
    """(kind, stage, microbatch) -> when it was made."""
    made = {op: [kind for kind, _ in MAKES[op] if kind in TRAVELS] for op in COMPUTE_OPS}
    times: _Arrivals = {}
    for row, ends in zip(timeline.schedule.rows, timeline.ends, strict=True):
        for (stage, op, microbatch), end in zip(row, ends, strict=True):
            for kind in made.get(op, ()):
                times[kind, stage, microbatch] = end  # type: ignore[index]
    return times
