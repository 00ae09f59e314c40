"""The time of a schedule before it runs: Costs in, Timeline out.

The words for "bubble" and the two clocks, chained and barrier, are those of docs and reports alike:
    chained   the idle per step when steps follow one another without a barrier
    barrier   one wall for the whole job: from the first action of any rank to the last of any
    share     idle / (idle + work)
    ratio     idle / work
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.action import BUSY_OPS, COMPUTE_OPS, SEND_OPS, Op
from megapipe.schedule.collector import without_collector
from megapipe.schedule.lower import sends_of
from megapipe.schedule.machine import Machine
from megapipe.schedule.schedule import Schedule


@dataclass(frozen=True)
class Costs:
    """Seconds of each op of each stage.

    seconds: for (stage, F | B | I | W) the computation; for (stage, SEND_F | SEND_B) the time a message of that stage occupies its
    channel; for (stage, REDUCE_GRAD) the reduction. Messages and reductions that are not named take no time.
    latency_seconds: from the end of a message's transfer to its use.
    overlap: messages and reductions run beside the computation; otherwise a rank stands still while it sends or reduces.
    pair_seconds: for (stage of the forward, stage of the backward) an overlapped pair; as long as its halves in sequence if not named.
    rank_speeds: how fast each pp_rank computes, 1: in the seconds given; empty: all do. Messages and reductions are not slowed.
    """

    seconds: Mapping[tuple[int, Op], float]
    latency_seconds: float = 0.0
    overlap: bool = True
    pair_seconds: Mapping[tuple[int, int], float] = field(default_factory=dict)
    rank_speeds: tuple[float, ...] = ()

    def on_linear_ranks(self) -> Costs:
        """The same for stage s on rank s, with the speeds of the ranks in the seconds of the stages."""
        if not self.rank_speeds:
            return self
        seconds = {
            (stage, op): value / self.rank_speeds[stage] if op in COMPUTE_OPS or op is Op.UPDATE else value
            for (stage, op), value in self.seconds.items()
        }
        return replace(self, seconds=seconds, rank_speeds=())

    @staticmethod
    def equal(
        num_stages: int,
        forward_seconds: float = 1.0,
        input_gradient_seconds: float = 0.5,
        weight_gradient_seconds: float = 0.5,
        transfer_seconds: float = 0.0,
        latency_seconds: float = 0.0,
        overlap: bool = True,
        pair_seconds: float | None = None,
    ) -> Costs:
        """The same costs for every stage; a full backward takes as long as its two halves, and so does an overlapped pair if not given."""
        of_op = {
            Op.F: forward_seconds,
            Op.B: input_gradient_seconds + weight_gradient_seconds,
            Op.I: input_gradient_seconds,
            Op.W: weight_gradient_seconds,
            Op.SEND_F: transfer_seconds,
            Op.SEND_B: transfer_seconds,
        }
        stages = range(num_stages)
        pairs = (
            {}
            if pair_seconds is None
            else {(forward, backward): pair_seconds for forward in stages for backward in stages}
        )
        return Costs(
            {(stage, op): value for stage in stages for op, value in of_op.items()}, latency_seconds, overlap, pairs
        )


class Bubble(NamedTuple):
    """Idle and work seconds of a step."""

    idle_seconds: float
    work_seconds: float

    @property
    def share(self) -> float:
        """idle / (idle + work), of total."""
        return self.idle_seconds / (self.idle_seconds + self.work_seconds)

    @property
    def ratio(self) -> float:
        """idle / work, to ideal."""
        return self.idle_seconds / self.work_seconds


@dataclass(frozen=True)
class Timeline:
    """When every action of `schedule` starts and ends: starts[rank][slot], ends[rank][slot], in seconds from the step's first action.

    Both halves of an overlapped pair take the whole time of the pair.

    A SEND starts when it is issued and a RECV when it is posted; both end when the message can be used. Neither they nor a reduction
    occupy the rank, unless the costs say that nothing overlaps.
    """

    schedule: Schedule
    costs: Costs
    starts: tuple[tuple[float, ...], ...] = field(repr=False)
    ends: tuple[tuple[float, ...], ...] = field(repr=False)

    @cached_property
    def makespan_seconds(self) -> float:
        """From the first action of any rank to the last end of any."""
        return max((max(ends) for ends in self.ends if ends), default=0.0)

    @cached_property
    def work_seconds(self) -> tuple[float, ...]:
        """Of each rank: the time it computes."""
        totals = []
        for row, starts, ends in zip(self.schedule.rows, self.starts, self.ends, strict=True):
            total = last = 0.0
            for (_, op, _), start, end in zip(row, starts, ends, strict=True):
                if op in BUSY_OPS:
                    total += end - (start if start > last else last)  # the second half of a pair adds nothing
                    last = end
            totals.append(total)
        return tuple(totals)

    @cached_property
    def chained_idle_seconds(self) -> tuple[float, ...]:
        """Of each rank: last end - first start of its computation, less its work."""
        spans = []
        for row, starts, ends in zip(self.schedule.rows, self.starts, self.ends, strict=True):
            slots = [slot for slot, action in enumerate(row) if action[1] in BUSY_OPS]
            spans.append(ends[slots[-1]] - starts[slots[0]] if slots else 0.0)
        return tuple(span - work for span, work in zip(spans, self.work_seconds, strict=True))

    @cached_property
    def barrier_idle_seconds(self) -> tuple[float, ...]:
        """Of each rank: the makespan of the job less the rank's work."""
        return tuple(self.makespan_seconds - work for work in self.work_seconds)

    @property
    def chained_bubble(self) -> Bubble:
        """That of the rank with the largest chained idle: what papers print."""
        rank = max(range(self.schedule.num_ranks), key=self.chained_idle_seconds.__getitem__)
        return Bubble(self.chained_idle_seconds[rank], self.work_seconds[rank])

    @property
    def barrier_bubble(self) -> Bubble:
        """The mean over ranks: what a step with one global norm has. Uneven stages count as idle here, as they do on the clock."""
        ranks = self.schedule.num_ranks
        return Bubble(sum(self.barrier_idle_seconds) / ranks, sum(self.work_seconds) / ranks)

    @cached_property
    def peak_live_chunks(self) -> tuple[int, ...]:
        """Of each rank: the most (stage, microbatch) pairs live at once, from the start of F to the end of B or W."""
        return peak_live_chunks(self.schedule)

    @property
    def peak_live_microbatches(self) -> tuple[float, ...]:
        """peak_live_chunks in microbatches of all the layers of the rank."""
        stages_of = self.schedule.placement.stages_of
        return tuple(peak / len(stages_of(rank)) for rank, peak in enumerate(self.peak_live_chunks))

    @cached_property
    def messages_sent(self) -> tuple[int, ...]:
        """Of each rank, in a compute-only schedule those that lowering will add."""
        return messages_sent(self.schedule)


@without_collector
def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run a valid schedule on paper. At zero latency and transfer time a lowered schedule takes exactly as long as its compute-only one.

    In a compute-only schedule every value travels the moment it is made. ScheduleError if a cost is missing, if the schedule deadlocks,
    or if costs without overlap are asked of a schedule that has no messages to put on the clock.
    """
    missing = _missing_cost(schedule, costs)
    if missing:
        raise ScheduleError(
            f"the costs of schedule {schedule} lack (stage {missing[0]}, {missing[1].value}); give the seconds of every stage and op"
        )
    if not costs.overlap and not schedule.is_lowered:
        raise ScheduleError(
            f"schedule {schedule} has no messages that could stand beside or on the clock of a rank: lower it first"
        )
    if costs.rank_speeds and len(costs.rank_speeds) != schedule.num_ranks:
        raise ScheduleError(
            f"the costs name the speeds of {len(costs.rank_speeds)} ranks, schedule {schedule} has {schedule.num_ranks}"
        )
    machine = Machine(
        schedule,
        costs.seconds,
        costs.latency_seconds,
        costs.overlap,
        pair_seconds=costs.pair_seconds,
        rank_speeds=costs.rank_speeds,
    )
    if not machine.run():
        raise ScheduleError(f"schedule {schedule} comes to a standstill; validate(schedule) says where")
    return Timeline(schedule, costs, tuple(map(tuple, machine.starts)), tuple(map(tuple, machine.ends)))


def peak_live_chunks(schedule: Schedule, until_input_gradient: bool = False) -> tuple[int, ...]:
    """Of each rank: the most (stage, microbatch) pairs live at once, counted from F to B or W (or already to I).

    A forward-only schedule keeps nothing beyond the forward that runs.
    """
    if not schedule.has_backward:
        return tuple(int(any(op is Op.F for _, op, _ in row)) for row in schedule.rows)
    ends = {Op.B, Op.I} if until_input_gradient else {Op.B, Op.W}
    peaks, forward = [], Op.F
    for row in schedule.rows:
        live = peak = 0
        for _, op, _ in row:
            if op is forward:
                live += 1
                if live > peak:
                    peak = live
            elif op in ends:
                live -= 1
        peaks.append(peak)
    return tuple(peaks)


def messages_sent(schedule: Schedule) -> tuple[int, ...]:
    """Of each rank: its SENDs, or in a compute-only schedule those that lowering will add."""
    if schedule.is_lowered:
        return tuple(sum(op in SEND_OPS for _, op, _ in row) for row in schedule.rows)
    sends, directions = sends_of(schedule), len(schedule.placement.directions)
    return tuple(sum(sends[op][m % directions][stage] is not None for stage, op, m in row) for row in schedule.rows)  # type: ignore[operator]


def _missing_cost(schedule: Schedule, costs: Costs) -> tuple[int, Op] | None:
    wanted = {(stage, op) for row in schedule.rows for stage, op, _ in row if op in COMPUTE_OPS}
    return min(wanted - costs.seconds.keys(), key=lambda pair: (pair[0], pair[1].value), default=None)
