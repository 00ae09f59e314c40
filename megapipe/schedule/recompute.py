"""RECOMPUTE in rows: a backward's replay of its forward, run ahead while the rank waits for the gradient.

With recompute a rank keeps little of a forward and runs it again in the backward, on the way of the gradient from stage
to stage. A replay needs no gradient, so that a rank that would be idle can run it before: in 1F1B the bubble is then
(p - 1) (F + B) in place of (p - 1) (F + R + B), where R is the replay (Liu et al. 2025, Mario, PPoPP 2025, has the
idea). Between the replay and its backward, the rank holds all that the stage computes again for one microbatch.
"""

from __future__ import annotations

from dataclasses import replace

from megapipe.errors import ScheduleError
from megapipe.schedule.action import Action, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.schedule import Row, Schedule, gc_paused
from megapipe.schedule.simulate import simulate


@gc_paused()
def replay_ahead(schedule: Schedule, costs: Costs) -> Schedule:
    """Add RECOMPUTE to a compute-only, synchronous schedule: directly before each B or I, or overlapped pair with one,
    before which its rank is idle.

    costs: with those of (stage, RECOMPUTE); stages without replay nothing. No action starts later than before. Raises
    ScheduleError for a lowered or asynchronous schedule.
    """
    if schedule.is_lowered or not schedule.is_synchronous:
        raise ScheduleError(
            f"schedule {schedule} cannot replay forwards ahead of backwards: it must have no messages and no updates"
        )
    while True:  # a replay that runs ahead lets other ranks wait elsewhere
        timeline = simulate(schedule, costs)
        least = 1e-9 * timeline.makespan_seconds  # less is rounding
        rows = tuple(
            _with_replays(row, starts, ends, costs, least)
            for row, starts, ends in zip(schedule.rows, timeline.starts, timeline.ends, strict=True)
        )
        if rows == schedule.rows:
            return schedule
        schedule = replace(schedule, rows=rows)


def _with_replays(row: Row, starts: tuple[float, ...], ends: tuple[float, ...], costs: Costs, least: float) -> Row:
    """Return a row with a replay in each wait of more than `least` before a backward that has none yet."""
    replayed = {(action.stage, action.microbatch) for action in row if action.op is Op.RECOMPUTE}
    result: list[Action] = []
    end = 0.0  # of the last action
    for slot, action in enumerate(row):
        backward = row[slot + 2] if action.op is Op.OVERLAP else action
        waits = starts[slot] - end > least  # never a half of a pair, whose OVERLAP has ended with it
        has_replay = costs.seconds.get((backward.stage, Op.RECOMPUTE), 0.0) > 0.0
        key = backward.stage, backward.microbatch
        if backward.op in (Op.B, Op.I) and waits and has_replay and key not in replayed:
            result.append(Action(backward.stage, Op.RECOMPUTE, backward.microbatch))
        result.append(action)
        end = ends[slot]
    return tuple(result)
