"""Predicted and measured bubble of a profiled step, and where the difference went.

The prediction is simulate() on the schedule that was run, with the mean time that each op of each stage took in this step and with the
latency and bandwidth that messages had between idle ranks. Predicted and measured step do the same work, so their walls differ by idle
time alone. It is divided by adding one cause after the other and asking each time what the step would have taken; the parts add up to the
whole exactly, and what a cause costs is told with those before it in place:

    equal stages     every op takes the mean of its stages, messages take no time: the bubble of the formula
    unequal stages   + each stage its own mean
    messages         + latency and transfer between idle ranks                                    = predicted
    noise            + each action its own time
    engine           + the time between actions
    optimizer        + ranks that start late, launching reductions, waiting for parameters
    communication    + posting messages, and waiting for them longer than so far               = measured
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, pstdev
from typing import NamedTuple

from megapipe.profile.profile import Link, MeasuredStep, PipelineSteps, Profile
from megapipe.profile.replay import Times, replay
from megapipe.schedule.action import BUSY_OPS, COMPUTE_OPS, Action, Op
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.simulate import Costs, Timeline, simulate

PREDICTED = "messages"  # the cause after which the prediction stands

CAUSES = {
    "equal stages": "equal stages, messages that take no time",
    "unequal stages": "stages of unequal time",
    "messages": "messages, at the latency and bandwidth between idle ranks",
    "noise": "imbalance: an op takes longer for one microbatch than for another",
    "engine": "engine: time between actions",
    "optimizer": "optimizer and reduction: late starts, launching reductions, waiting for parameters",
    "communication": "communication: posting messages and waiting for them",
}


class Idle(NamedTuple):
    """Idle seconds of a step on the two clocks: the mean over ranks with a barrier, that of the rank with most of it chained."""

    barrier: float
    chained: float


class Cause(NamedTuple):
    """One cause of idle time: name (a key of CAUSES) and what it adds; negative where it takes away."""

    name: str
    seconds: Idle


@dataclass(frozen=True)
class MeasuredTimeline:
    """A measured step on the axis of its plan: seconds from the first action of any rank.

    starts, ends: of every slot, a wait for the message at the head of an action included; message_waits, parameter_waits: within it.
    """

    schedule: Schedule
    step: MeasuredStep

    @cached_property
    def origin_ns(self) -> int:
        """The first action's start on the profile's clock."""
        return min(row.starts_ns[0] for row in self.step.rows if row.starts_ns)

    def seconds(self, time_ns: int) -> float:
        """A time of the profile's clock on this axis."""
        return (time_ns - self.origin_ns) / 1e9

    @cached_property
    def starts(self) -> Times:
        return tuple(tuple(map(self.seconds, row.starts_ns)) for row in self.step.rows)

    @cached_property
    def ends(self) -> Times:
        return tuple(tuple(map(self.seconds, row.ends_ns)) for row in self.step.rows)

    @cached_property
    def message_waits(self) -> Times:
        return tuple(tuple(wait / 1e9 for wait in row.message_waits_ns) for row in self.step.rows)

    @cached_property
    def parameter_waits(self) -> Times:
        return tuple(tuple(wait / 1e9 for wait in row.parameter_waits_ns) for row in self.step.rows)

    @cached_property
    def own_seconds(self) -> Times:
        """Of every slot: its time without waits. That of an overlapped pair stands at its OVERLAP, its halves have none."""
        return tuple(
            tuple(
                0.0 if slot in halves else end - start - message - parameter
                for slot, (start, end, message, parameter) in enumerate(zip(*times, strict=True))
            )
            for halves, *times in zip(
                map(_halves, self.schedule.rows),
                self.starts,
                self.ends,
                self.message_waits,
                self.parameter_waits,
                strict=True,
            )
        )

    @cached_property
    def work_seconds(self) -> tuple[float, ...]:
        """Of each rank: the time it computed."""
        return tuple(
            sum(own for (_, op, _), own in zip(row, owns, strict=True) if op in BUSY_OPS or op is Op.OVERLAP)
            for row, owns in zip(self.schedule.rows, self.own_seconds, strict=True)
        )

    @cached_property
    def makespan_seconds(self) -> float:
        """From the first action of any rank to the end of the last computation of any."""
        return _wall(self.schedule, self.ends)

    @cached_property
    def begins(self) -> Times:
        """Of every slot: when it goes on after its message has come."""
        return tuple(
            tuple(map(sum, zip(*times, strict=True))) for times in zip(self.starts, self.message_waits, strict=True)
        )

    @cached_property
    def chained_idle_seconds(self) -> tuple[float, ...]:
        """Of each rank: between its first and its last computation."""
        return _chained(self.schedule, self.begins, self.ends, self.work_seconds)

    @cached_property
    def idle(self) -> Idle:
        return _idle(self.schedule, self.begins, self.ends, self.work_seconds)


@dataclass(frozen=True)
class Comparison:
    """One profiled step of one pipeline beside its plan. causes: from the ideal to the measured step; their sum is `measured.idle`."""

    measured: MeasuredTimeline
    plan: Timeline
    causes: tuple[Cause, ...]

    @property
    def predicted_idle(self) -> Idle:
        """Of the plan."""
        names = [cause.name for cause in self.causes]
        return add(self.causes[: names.index(PREDICTED) + 1])

    @property
    def mean_work_seconds(self) -> float:
        """Of a rank; the same in plan and measurement."""
        return fmean(self.measured.work_seconds)


def add(causes: Sequence[Cause]) -> Idle:
    """What some causes add up to."""
    return Idle(sum(cause.seconds.barrier for cause in causes), sum(cause.seconds.chained for cause in causes))


def compare(profile: Profile, pipeline: PipelineSteps, step: MeasuredStep) -> Comparison:
    """The step beside its plan."""
    measured = MeasuredTimeline(profile.schedules[step.num_microbatches], step)
    schedule, own = measured.schedule, measured.own_seconds
    transfer, latency = message_costs(schedule, profile.links)
    means = mean_seconds(measured)
    ideal = simulate(schedule, _costs(schedule, _equal_stages(means), {}, 0.0))
    unequal = simulate(schedule, _costs(schedule, means, {}, 0.0))
    plan = simulate(schedule, _costs(schedule, means, transfer, latency))
    idles = [
        Idle(sum(each.barrier_idle_seconds) / schedule.num_ranks, max(each.chained_idle_seconds))
        for each in (ideal, unequal, plan)
    ]
    optimizer = frozenset({Op.REDUCE_GRAD})
    for with_engine, with_optimizer in ((False, False), (True, False), (True, True)):
        ops = BUSY_OPS | {Op.OVERLAP} | (optimizer if with_optimizer else frozenset())
        parameters = measured.parameter_waits if with_optimizer else None
        seconds = tuple(
            tuple(
                (value + (parameters[rank][slot] if parameters else 0.0)) if row[slot].op in ops else 0.0
                for slot, value in enumerate(own[rank])
            )
            for rank, row in enumerate(schedule.rows)
        )
        gaps = tuple(
            _gaps(row, with_engine, with_optimizer) for row in zip(measured.starts, measured.ends, strict=True)
        )
        starts, ends = replay(schedule, seconds, gaps, transfer, latency)
        idles.append(_idle(schedule, starts, ends, measured.work_seconds))
    idles.append(measured.idle)
    before = [Idle(0.0, 0.0), *idles]
    causes = tuple(
        Cause(name, Idle(idle.barrier - last.barrier, idle.chained - last.chained))
        for name, idle, last in zip(CAUSES, idles, before, strict=False)
    )
    return Comparison(measured, plan, causes)


def mean_seconds(measured: MeasuredTimeline) -> dict[tuple[int, ...], dict[Op, float]]:
    """(stage,) -> op -> mean seconds; (forward's stage, backward's stage) -> OVERLAP -> mean seconds of the pair."""
    samples: dict[tuple[tuple[int, ...], Op], list[float]] = {}
    for key, op, seconds in timed(measured):
        samples.setdefault((key, op), []).append(seconds)
    means: dict[tuple[int, ...], dict[Op, float]] = {}
    for (key, op), values in samples.items():
        means.setdefault(key, {})[op] = fmean(values)
    return means


def timed(measured: MeasuredTimeline) -> list[tuple[tuple[int, ...], Op, float]]:
    """Every computation of the step: ((stage,) or the stages of a pair, op, seconds)."""
    found: list[tuple[tuple[int, ...], Op, float]] = []
    for row, owns in zip(measured.schedule.rows, measured.own_seconds, strict=True):
        halves = _halves(row)
        for slot, (action, own) in enumerate(zip(row, owns, strict=True)):
            if action.op is Op.OVERLAP:
                found.append(((row[slot + 1].stage, row[slot + 2].stage), action.op, own))
            elif action.op in BUSY_OPS and slot not in halves:
                found.append(((action.stage,), action.op, own))
    return found


class OpTime(NamedTuple):
    """How long an op of a stage takes: mean and standard deviation over microbatches and steps."""

    stage: str  # "2", or "1+6" for an overlapped pair
    op: Op
    mean_seconds: float
    deviation_seconds: float
    num_samples: int


def op_times(comparisons: Sequence[Comparison]) -> list[OpTime]:
    """The table of a profile, by stage."""
    samples: dict[tuple[tuple[int, ...], Op], list[float]] = {}
    for comparison in comparisons:
        for key, op, seconds in timed(comparison.measured):
            samples.setdefault((key, op), []).append(seconds)
    ordered = sorted(samples.items(), key=lambda item: (item[0][0], item[0][1].value))
    return [
        OpTime("+".join(map(str, key)), op, fmean(values), pstdev(values), len(values)) for (key, op), values in ordered
    ]


def message_costs(schedule: Schedule, links: Sequence[Link]) -> tuple[dict[tuple[int, Op], float], float]:
    """(seconds that a message of (stage, SEND) occupies its channel, latency of all): what simulate and replay take.

    There is one latency, the least; what a slower link has beyond it counts as transfer.
    """
    latency = min((link.latency_seconds for link in links), default=0.0)
    seconds = {frozenset(link.pp_ranks): link.latency_seconds - latency + link.transfer_seconds for link in links}
    transfer: dict[tuple[int, Op], float] = {}
    for ranks in schedule.placement.directions:
        for boundary in range(len(ranks) - 1):
            found = seconds.get(frozenset(ranks[boundary : boundary + 2]))
            if found is not None:
                transfer[boundary, Op.SEND_F] = transfer[boundary + 1, Op.SEND_B] = found
    return transfer, latency


def _costs(
    schedule: Schedule,
    means: Mapping[tuple[int, ...], Mapping[Op, float]],
    transfer: Mapping[tuple[int, Op], float],
    latency: float,
) -> Costs:
    seconds = {(key[0], op): mean for key, ops in means.items() if len(key) == 1 for op, mean in ops.items()}
    pairs = {(key[0], key[1]): ops[Op.OVERLAP] for key, ops in means.items() if len(key) == 2}
    # an op that occurs in pairs only has no time of its own, and none is asked for
    only_paired = {(stage, op): 0.0 for row in schedule.rows for stage, op, _ in row if op in COMPUTE_OPS}
    return Costs(only_paired | seconds | dict(transfer), latency, pair_seconds=pairs)


def _equal_stages(means: Mapping[tuple[int, ...], Mapping[Op, float]]) -> dict[tuple[int, ...], dict[Op, float]]:
    """Every stage as long as the mean of all."""
    samples: dict[tuple[int, Op], list[float]] = {}
    for key, ops in means.items():
        for op, mean in ops.items():
            samples.setdefault((len(key), op), []).append(mean)
    return {key: {op: fmean(samples[len(key), op]) for op in ops} for key, ops in means.items()}


def _halves(row: Sequence[Action]) -> set[int]:
    """Slots of the halves of overlapped pairs."""
    return {slot + half for slot, action in enumerate(row) if action.op is Op.OVERLAP for half in (1, 2)}


def _gaps(times: tuple[Sequence[float], Sequence[float]], with_engine: bool, with_lateness: bool) -> tuple[float, ...]:
    starts, ends = times
    between = [max(0.0, start - end) if with_engine else 0.0 for start, end in zip(starts[1:], ends, strict=False)]
    return (starts[0] if with_lateness else 0.0, *between) if starts else ()


def _wall(schedule: Schedule, ends: Times) -> float:
    """The last end of a computation."""
    return max(
        (
            end
            for row, times in zip(schedule.rows, ends, strict=True)
            for (_, op, _), end in zip(row, times, strict=True)
            if op in BUSY_OPS
        ),
        default=0.0,
    )


def _idle(schedule: Schedule, starts: Times, ends: Times, work: Sequence[float]) -> Idle:
    return Idle(_wall(schedule, ends) - fmean(work), max(_chained(schedule, starts, ends, work)))


def _chained(schedule: Schedule, starts: Times, ends: Times, work: Sequence[float]) -> tuple[float, ...]:
    spans = []
    for row, begins, stops in zip(schedule.rows, starts, ends, strict=True):
        slots = [slot for slot, action in enumerate(row) if action.op in BUSY_OPS]
        spans.append(stops[slots[-1]] - begins[slots[0]] if slots else 0.0)
    return tuple(span - busy for span, busy in zip(spans, work, strict=True))
