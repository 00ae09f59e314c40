"""The predicted time of a schedule: Costs in, Timeline out.

Idle time ("bubble") is measured in two ways and reported in two forms, in docs and reports alike:
    chained   idle time per step when steps follow one another without a barrier
    barrier   idle time from the first action of any rank to the last action of any rank
    share     idle / (idle + work)
    ratio     idle / work
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.action import BUSY_OPS, COMPUTE_OPS, SEND_OPS, Op
from megapipe.schedule.costs import Costs, Seconds, seconds_of_stages
from megapipe.schedule.dependencies import ChannelPath, channel_of
from megapipe.schedule.lifetimes import peak_live_chunks
from megapipe.schedule.machine import ScheduleWalk
from megapipe.schedule.schedule import Schedule, gc_paused

Times = tuple[tuple[float, ...], ...]  # [rank][slot], seconds


class Bubble(NamedTuple):
    """Idle and work seconds of a step."""

    idle_seconds: float
    work_seconds: float

    @property
    def share(self) -> float:
        """idle / (idle + work)."""
        return self.idle_seconds / (self.idle_seconds + self.work_seconds)

    @property
    def ratio(self) -> float:
        """idle / work."""
        return self.idle_seconds / self.work_seconds


@dataclass(frozen=True)
class Timeline:
    """The start and end of every action: starts[rank][slot], ends[rank][slot], in seconds from the step's first action.

    Both halves of an overlapped pair take the whole time of the pair. A SEND starts when it is issued and a RECV when
    it is posted; both end when the message can be used. Neither messages nor reductions occupy the rank, unless the
    costs say that nothing overlaps. Gathers and reductions start when the network of the rank is free for them; a
    computation waits for the gather of its weights.
    """

    schedule: Schedule
    costs: Costs
    starts: Times = field(repr=False)
    ends: Times = field(repr=False)

    @cached_property
    def makespan_seconds(self) -> float:
        """Seconds from the first action of any rank to the last end of any."""
        return max((max(ends) for ends in self.ends if ends), default=0.0)

    @cached_property
    def work_seconds(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        totals, network = [], self.costs.network
        for row, starts, ends in zip(self.schedule.rows, self.starts, self.ends, strict=True):
            total = last = 0.0
            for (stage, op, _), start, end in zip(row, starts, ends, strict=True):
                if op in BUSY_OPS and stage not in network:
                    total += end - (start if start > last else last)  # the second half of a pair adds nothing
                    last = end
            totals.append(total)
        return tuple(totals)

    @cached_property
    def chained_idle_seconds(self) -> tuple[float, ...]:
        """Seconds from the first start to the last end of each rank's computation, minus its work."""
        return chained_idle(self.schedule, self.starts, self.ends, self.work_seconds)

    @cached_property
    def barrier_idle_seconds(self) -> tuple[float, ...]:
        """The makespan minus the work of each rank."""
        return tuple(self.makespan_seconds - work for work in self.work_seconds)

    @property
    def chained_bubble(self) -> Bubble:
        """The bubble of the rank with the largest chained idle time, as papers report it."""
        rank = max(range(self.schedule.num_ranks), key=self.chained_idle_seconds.__getitem__)
        return Bubble(self.chained_idle_seconds[rank], self.work_seconds[rank])

    @property
    def barrier_bubble(self) -> Bubble:
        """The mean over ranks: the bubble of a step with a global norm.

        Uneven stages count as idle time, as they do in a run.
        """
        ranks = self.schedule.num_ranks
        return Bubble(sum(self.barrier_idle_seconds) / ranks, sum(self.work_seconds) / ranks)

    @cached_property
    def peak_live_chunks(self) -> tuple[int, ...]:
        """The most (stage, microbatch) pairs that each rank keeps at once, from the start of F to the end of B or W."""
        return peak_live_chunks(self.schedule)


def chained_idle(schedule: Schedule, starts: Times, ends: Times, work: Sequence[float]) -> tuple[float, ...]:
    """Return each rank's seconds between the start of its first and the end of its last computation less its work."""
    idle = []
    for row, row_starts, row_ends, busy in zip(schedule.rows, starts, ends, work, strict=True):
        slots = [slot for slot, action in enumerate(row) if action[1] in BUSY_OPS]
        span = row_ends[slots[-1]] - row_starts[slots[0]] if slots else 0.0
        idle.append(span - busy)
    return tuple(idle)


@gc_paused()
def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Predict the timeline of a valid schedule.

    In a compute-only schedule every value is sent as soon as it is made; a lowered schedule takes exactly as long at
    zero latency and transfer time. Raises ScheduleError if a cost is missing, if the schedule deadlocks, or for costs
    without overlap and a schedule without messages.
    """
    wanted = {(stage, op) for row in schedule.rows for stage, op, _ in row if op in COMPUTE_OPS}
    missing = min(((stage, op.value) for stage, op in wanted - costs.seconds.keys()), default=None)
    if missing:
        raise ScheduleError(
            f"the costs of schedule {schedule} lack (stage {missing[0]}, {missing[1]}); name every stage and op"
        )
    if not costs.overlap and costs.network:
        raise ScheduleError(
            "costs without overlap cannot have stages on the network, which overlap with the computation"
        )
    if not costs.overlap and not schedule.is_lowered:
        raise ScheduleError(f"costs without overlap need messages, schedule {schedule} has none: lower it first")
    if not costs.overlap and Op.UNSHARD in schedule.ops and len(schedule.placement.directions) > 1:
        raise ScheduleError(
            f"costs without overlap cannot time the gathers of schedule {schedule}, which two ranks issue together"
        )
    if costs.rank_speeds and len(costs.rank_speeds) != schedule.num_ranks:
        raise ScheduleError(
            f"the costs name the speeds of {len(costs.rank_speeds)} ranks, schedule {schedule} has {schedule.num_ranks}"
        )
    machine = ScheduleWalk(schedule, costs)
    if not machine.run():
        raise ScheduleError(f"schedule {schedule} deadlocks; validate(schedule) shows where")
    return Timeline(schedule, costs, tuple(map(tuple, machine.starts)), tuple(map(tuple, machine.ends)))


def unhindered_send_depth(schedule: Schedule, num_units: Sequence[int] = ()) -> int:
    """Return the most messages in flight on one channel if no sender waits, in a lowered schedule where F = I = W.

    num_units: of stages that are split, whose units together take as long as another stage.

    With as many sends in flight the schedule runs to its end (any depth that lets one order of events through lets all
    through) and no sender blocks. Breadth-first needs nearly all its messages: a rank runs ahead of the one that uses
    its last chunk but one.
    """
    whole = math.lcm(*num_units)
    units = [whole / count for count in num_units for _ in range(count)] or [1.0] * schedule.num_stages
    timeline = simulate(schedule, Costs(seconds_of_stages([Seconds(each, each, each) for each in units], 0.0)))
    # (seconds, order at the same time, change)
    changes: defaultdict[ChannelPath, list[tuple[float, int, int]]] = defaultdict(list)
    for row, starts, ends in zip(schedule.rows, timeline.starts, timeline.ends, strict=True):
        for action, start, end in zip(row, starts, ends, strict=True):
            if action.op in SEND_OPS:  # a send that starts as another ends counts as concurrent
                changes[channel_of(action, len(schedule.placement.directions))] += [(start, 0, 1), (end, 1, -1)]
    return max((max(accumulate(change for *_, change in sorted(each))) for each in changes.values()), default=0)
