"""RECOMPUTE in rows: a backward's replay of its forward, run ahead while the rank waits for the gradient.

With recompute a rank keeps little of a forward and runs it again in the backward, on the way of the gradient from stage
to stage. A replay needs no gradient, so that a rank that would be idle can run it before: in 1F1B the bubble is then
(p - 1) (F + B) in place of (p - 1) (F + R + B), where R is the replay (Liu et al. 2025, Mario, PPoPP 2025, has the
idea). Between the replay and its backward, the rank holds all that the stage computes again for one microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megapipe.errors import ScheduleError
from megapipe.schedule.action import Action, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.machine import ScheduleWalk
from megapipe.schedule.schedule import Row, Schedule, gc_paused


@gc_paused()
def replay_ahead(schedule: Schedule, costs: Costs) -> Schedule:
    """Add RECOMPUTE to a compute-only, synchronous schedule: directly before each B or I, or overlapped pair with one,
    before which its rank is idle, or whose gradient comes from another rank just in time. (A message, which is free
    here, will then let it wait.)

    costs: with those of (stage, RECOMPUTE); stages without replay nothing. No action ends later than before. Raises
    ScheduleError for a schedule that is lowered, asynchronous or has replays already.
    """
    if schedule.is_lowered or not schedule.is_synchronous or Op.RECOMPUTE in schedule.ops:
        raise ScheduleError(
            f"schedule {schedule} cannot replay forwards ahead of backwards: it must have no messages, no updates and "
            "no replays; give the computations alone of a synchronous schedule"
        )
    possible = replace(schedule, rows=tuple(tuple(_with_replays(row, costs)) for row in schedule.rows))
    walk = _ReplayWalk(possible, costs)
    if not walk.run():
        raise ScheduleError(f"schedule {schedule} deadlocks; validate(schedule) shows where")
    rows = (tuple(each for each in row if each.op is not Op.RECOMPUTE or each in walk.chosen) for row in possible.rows)
    return replace(schedule, rows=tuple(rows))


def _with_replays(row: Row, costs: Costs) -> Iterator[Action]:
    """Yield a row with a replay before every backward of a stage that has one, or before the pair of the backward."""
    in_pair = 0
    for slot, action in enumerate(row):
        backward = row[slot + 2] if action.op is Op.OVERLAP else action
        if backward.op in (Op.B, Op.I) and not in_pair and costs.seconds.get((backward.stage, Op.RECOMPUTE), 0.0) > 0.0:
            yield Action(backward.stage, Op.RECOMPUTE, backward.microbatch)
        yield action
        in_pair = 2 if action.op is Op.OVERLAP else max(0, in_pair - 1)


class _ReplayWalk(ScheduleWalk):
    """A walk that runs a replay only if what it is for is not there before the rank is free."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        super().__init__(schedule, costs)
        self.chosen: set[Action] = set()
        self._tables = self.work
        self.work = {op: table for op, table in self.work.items() if op is not Op.RECOMPUTE}
        self.others[Op.RECOMPUTE] = self._replay

    def _replay(self, rank: int, action: Action) -> int:
        slot, row, clock = self.positions[rank], self.schedule.rows[rank], self.clocks[rank]
        is_pair = row[slot + 1].op is Op.OVERLAP
        following = row[slot + 2 : slot + 4] if is_pair else row[slot + 1 : slot + 2]
        works = [self.resolved(self.work, each) for each in following]
        start = self.ready_at(rank, works, clock)
        if start is None:
            return 0
        (_, gradient), backward_key = works[-1][0].needs, works[-1][1]
        is_message = self._is_far(action.stage, +1, (action.microbatch or 0) % self._num_directions)
        end, rounding = clock, 1e-9 * start
        if start - clock > rounding or (is_message and self.times[gradient + backward_key] >= clock - rounding):
            self.chosen.add(action)
            work, key = self.resolved(self._tables, action)
            end = clock + work.seconds
            self.finish([(work, key)], end)
        self.starts[rank][slot], self.ends[rank][slot], self.clocks[rank] = clock, end, end
        return 1
