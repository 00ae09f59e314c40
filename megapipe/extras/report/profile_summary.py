"""Plan and measurement of a profiled step, and the means over the steps of a profile.

The plan is simulate() on the schedule that was run, with the mean time that each op of each stage took in this step,
and the latency and bandwidth of messages between idle ranks. Planned and measured step do the same work, so their
makespans differ by idle time alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import add
from statistics import fmean
from typing import NamedTuple

from megapipe.formatting import milliseconds, range_text
from megapipe.profile.profile import LinkTime, MeasuredStep, PipelineSteps, Profile
from megapipe.schedule.action import BUSY_OPS, COMPUTE_OPS, Action, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.simulate import Timeline, Times, chained_idle, simulate

OCCUPYING_OPS = BUSY_OPS | {Op.OVERLAP}  # ops that occupy their rank; an OVERLAP counts as its pair
StageKey = tuple[int, ...]  # (stage,), or (forward's stage, backward's stage) of an overlapped pair


class Idle(NamedTuple):
    """Idle seconds of a step in two measures."""

    barrier: float  # makespan of the pipeline less the mean work of its ranks
    chained: float  # between a rank's own first and last computation, of the rank with the most


@dataclass(frozen=True)
class MeasuredTimeline:
    """A measured step on the axis of its plan: seconds from the first action of any rank."""

    schedule: Schedule
    step: MeasuredStep

    @cached_property
    def origin_ns(self) -> int:
        """Start of the first action on the profile's clock."""
        return min(row.starts_ns[0] for row in self.step.rows if row.starts_ns)

    @cached_property
    def starts(self) -> Times:
        """Start of every slot, before any wait for a message."""
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
    def compute_starts(self) -> Times:
        """When each slot continues after its message has arrived."""
        return tuple(tuple(map(add, *times)) for times in zip(self.starts, self.message_waits, strict=True))

    @cached_property
    def own_seconds(self) -> Times:
        """Time of every slot without waits. An overlapped pair has its time at its OVERLAP, its halves have none."""
        found = []
        measured = zip(self.ends, self.starts, self.message_waits, self.parameter_waits, strict=True)
        for row, times in zip(self.schedule.rows, measured, strict=True):
            own = [end - start - message - parameter for end, start, message, parameter in zip(*times, strict=True)]
            for slot in _halves(row):
                own[slot] = 0.0
            found.append(tuple(own))
        return tuple(found)

    @cached_property
    def work_seconds(self) -> tuple[float, ...]:
        """Computing time of each rank."""
        return tuple(
            sum(own for (_, op, _), own in zip(row, owns, strict=True) if op in OCCUPYING_OPS)
            for row, owns in zip(self.schedule.rows, self.own_seconds, strict=True)
        )

    @cached_property
    def makespan_seconds(self) -> float:
        """Time from the first action of any rank to the end of the last computation of any."""
        actions = zip(chain.from_iterable(self.schedule.rows), chain.from_iterable(self.ends), strict=True)
        return max((end for (_, op, _), end in actions if op in BUSY_OPS), default=0.0)

    @cached_property
    def chained_idle_seconds(self) -> tuple[float, ...]:
        """Idle time of each rank between its first and its last computation."""
        return chained_idle(self.schedule, self.compute_starts, self.ends, self.work_seconds)

    @cached_property
    def idle(self) -> Idle:
        return Idle(self.makespan_seconds - fmean(self.work_seconds), max(self.chained_idle_seconds))

    def seconds(self, time_ns: int) -> float:
        """Return a time of the profile's clock on this axis."""
        return (time_ns - self.origin_ns) / 1e9


@dataclass(frozen=True)
class Comparison:
    """One profiled step of one pipeline and its plan."""

    measured: MeasuredTimeline
    plan: Timeline

    @property
    def planned_idle(self) -> Idle:
        idle = self.plan.barrier_idle_seconds
        return Idle(sum(idle) / len(idle), max(self.plan.chained_idle_seconds))


def compare(profile: Profile, step: MeasuredStep) -> Comparison:
    """Compare a step with its plan."""
    measured = MeasuredTimeline(profile.schedules[step.num_microbatches], step)
    schedule = measured.schedule
    messages = message_costs(schedule, profile.links)
    means = {key: fmean(values) for key, values in op_samples(measured).items()}
    costs = replace(_costs(schedule, means, messages), slice_shares=_slice_shares(measured))
    return Comparison(measured, simulate(schedule, costs))


def message_costs(schedule: Schedule, links: Sequence[LinkTime]) -> Costs:
    """Return costs of the messages alone.

    There is one latency for all links, the smallest; the excess of a slower link is added to its transfer time.
    """
    latency = min((link.latency_seconds for link in links), default=0.0)
    seconds = {frozenset(link.pp_ranks): link.latency_seconds - latency + link.transfer_seconds for link in links}
    transfer: dict[tuple[int, Op], float] = {}
    for ranks in schedule.placement.directions:
        for boundary in range(len(ranks) - 1):
            found = seconds.get(frozenset(ranks[boundary : boundary + 2]))
            if found is not None:
                transfer[boundary, Op.SEND_F] = transfer[boundary + 1, Op.SEND_B] = found
    return Costs(transfer, latency)


def op_samples(measured: MeasuredTimeline) -> dict[tuple[StageKey, Op], list[float]]:
    """Return the seconds of every computation of the step, by its stages and op; those of a B or I, or of a pair with
    one, include the replay that a RECOMPUTE has run ahead, as costs do.
    """
    samples: dict[tuple[StageKey, Op], list[float]] = {}
    for row, owns in zip(measured.schedule.rows, measured.own_seconds, strict=True):
        halves, replays = _halves(row), dict[Action, float]()  # by the RECOMPUTE
        for slot, (action, own) in enumerate(zip(row, owns, strict=True)):
            stages: StageKey = (action.stage,)
            backward = action
            if action.op is Op.OVERLAP:
                backward = row[slot + 2]
                stages = action.stage, backward.stage
            elif action.op is Op.RECOMPUTE:
                replays[action] = own
            if action.op in OCCUPYING_OPS and slot not in halves:
                ahead = replays.get(backward._replace(op=Op.RECOMPUTE), 0.0) if backward.op in (Op.B, Op.I) else 0.0
                samples.setdefault((stages, action.op), []).append(own + ahead)
    return samples


def _slice_shares(measured: MeasuredTimeline) -> dict[tuple[int, Op], tuple[float, ...]]:
    """Return the share of each slice in the seconds of every op of every stage; {} without slices."""
    count, totals = measured.schedule.num_slices, dict[tuple[int, Op], list[float]]()
    if count == 1:
        return {}
    for row, owns in zip(measured.schedule.rows, measured.own_seconds, strict=True):
        for (stage, op, number), own in zip(row, owns, strict=True):
            if op in COMPUTE_OPS:
                totals.setdefault((stage, op), [0.0] * count)[(number or 0) % count] += own
    return {key: tuple(one / sum(each) for one in each) for key, each in totals.items() if sum(each)}


def _costs(schedule: Schedule, means: Mapping[tuple[StageKey, Op], float], messages: Costs) -> Costs:
    # of whole microbatches, the sum of their slices
    seconds = {(stages[0], op): mean * schedule.num_slices for (stages, op), mean in means.items() if len(stages) == 1}
    pairs = {(stages[0], stages[1]): mean for (stages, _), mean in means.items() if len(stages) == 2}
    # an op that occurs only in pairs has no time outside them, and simulate does not use one
    only_paired = {(stage, op): 0.0 for row in schedule.rows for stage, op, _ in row if op in COMPUTE_OPS}
    return Costs(only_paired | seconds | dict(messages.seconds), messages.latency_seconds, pair_seconds=pairs)


def _halves(row: Sequence[Action]) -> set[int]:
    """Return the slots of the halves of overlapped pairs."""
    return {slot + half for slot, action in enumerate(row) if action.op is Op.OVERLAP for half in (1, 2)}


class Row(NamedTuple):
    """One line of the table of planned beside measured, as text."""

    name: str
    planned: str
    measured: str
    meaning: str


PHASES = {"gradient-reduce": "reduction", "optimizer": "optimizer"}  # phases of a step after its last action


@dataclass(frozen=True)
class Summary:
    """Means over the profiled steps of one pipeline, in seconds per step. Shares are idle / (idle + work)."""

    pipeline: PipelineSteps
    comparisons: tuple[Comparison, ...]
    planned_idle: Idle
    measured_idle: Idle
    planned_share: Idle  # chained: with the work of the rank that has the most chained idle time
    measured_share: Idle
    work_seconds: float  # mean of the ranks
    phases: dict[str, float]  # of the rank where a phase took longest
    all_shares: tuple[float, ...]  # the measured share, with a barrier, of every recorded pipeline

    @property
    def typical(self) -> Comparison:
        """The step of median makespan: the one to draw."""
        ordered = sorted(self.comparisons, key=lambda comparison: comparison.measured.makespan_seconds)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def table(self) -> list[Row]:
        """The table of planned beside measured."""
        planned, measured, work = self.planned_idle, self.measured_idle, self.work_seconds
        meanings = ("first action of any rank to last of any", "first to last action of the idlest rank")
        idles = zip(Idle._fields, planned, measured, self.planned_share, self.measured_share, meanings, strict=True)
        first, second = (milliseconds(idle.barrier + work) for idle in (planned, measured))
        rows = [Row("pipeline time of a step", first, second, f"computation {milliseconds(work)} (mean of the ranks)")]
        for name, plan, found, plan_share, found_share, meaning in idles:
            rows.append(Row(f"idle time, {name}", milliseconds(plan), milliseconds(found), meaning))
            rows.append(Row(f"bubble, {name}", f"{plan_share:.1%}", f"{found_share:.1%}", "idle / (idle + work)"))
        if self.phases.get("step"):
            after = [
                f"{text} {milliseconds(self.phases[name])}" for name, text in PHASES.items() if name in self.phases
            ]
            last = f"after the last action: {', '.join(after) or 'nothing'}"
            rows.append(Row("whole step", "", milliseconds(self.phases["step"]), last))
        return rows


def summarize(profile: Profile) -> Summary:
    """Return the summary of the first pipeline of the profile."""
    pipeline = profile.pipelines[0]
    comparisons = tuple(compare(profile, step) for step in pipeline.steps)
    planned = Idle(*map(fmean, zip(*(each.planned_idle for each in comparisons), strict=True)))
    measured = Idle(*map(fmean, zip(*(each.measured.idle for each in comparisons), strict=True)))
    work = fmean(fmean(each.measured.work_seconds) for each in comparisons)
    planned_work = fmean(_work_of_idlest(each.plan) for each in comparisons)
    measured_work = fmean(_work_of_idlest(each.measured) for each in comparisons)
    all_shares = []
    for other in profile.pipelines:
        timelines = [MeasuredTimeline(profile.schedules[step.num_microbatches], step) for step in other.steps]
        mean_work = fmean(fmean(each.work_seconds) for each in timelines)
        all_shares.append(_share(fmean(each.idle.barrier for each in timelines), mean_work))
    return Summary(
        pipeline=pipeline,
        comparisons=comparisons,
        planned_idle=planned,
        measured_idle=measured,
        planned_share=Idle(_share(planned.barrier, work), _share(planned.chained, planned_work)),
        measured_share=Idle(_share(measured.barrier, work), _share(measured.chained, measured_work)),
        work_seconds=work,
        phases=_phases(pipeline),
        all_shares=tuple(all_shares),
    )


def profile_text(profile: Profile, summary: Summary) -> str:
    """Return the text that is printed when a profile has been taken."""
    steps = [step.step for step in summary.pipeline.steps]
    schedule = summary.typical.measured.schedule
    ranks = " ".join(map(str, summary.pipeline.global_ranks))
    note = oversubscription_text(profile)
    lines = [
        f"profile of {'step' if len(steps) == 1 else 'steps'} {range_text(steps)}: {schedule}, ranks {ranks}; "
        f"{clocks_text(profile)}",
        *([f"  {note}"] if note else []),
        f"  {'':<25} {'planned':>10} {'measured':>10}",
        *(f"  {row.name:<25} {row.planned:>10} {row.measured:>10}   {row.meaning}" for row in summary.table),
    ]
    if len(summary.all_shares) > 1:
        low, high = min(summary.all_shares), max(summary.all_shares)
        lines.append(
            f"  all {len(summary.all_shares)} recorded pipelines: {low:.1%} to {high:.1%} measured with a barrier"
        )
    return "\n".join(lines)


def clocks_text(profile: Profile) -> str:
    """Return how well the times of different ranks can be compared."""
    error_ns = max((clock.error_ns for clock in profile.clocks), default=0)
    error = milliseconds(error_ns / 1e9)
    unshared = [clock for clock in profile.clocks if not clock.is_shared]
    if unshared:
        return (
            f"clocks of {len(unshared)} of {len(profile.clocks)} ranks synchronized by messages, "
            f"with an error of at most {error}"
        )
    gpu_events = f", with an error of at most {error} in GPU times" if error_ns else ""
    return f"all ranks read one clock{gpu_events}"


def oversubscription_text(profile: Profile) -> str:
    """Return a note on times measured with more ranks than CPU cores, or ""."""
    ranks, cores = profile.about.get("ranks_per_node") or 0, profile.about.get("cores") or 0
    if profile.about.get("device") != "cpu" or ranks <= cores:
        return ""
    return f"{ranks} ranks share {cores} cores: times include waiting for a core"


def _share(idle: float, work: float) -> float:
    return idle / (idle + work) if idle + work else 0.0


def _work_of_idlest(timeline: MeasuredTimeline | Timeline) -> float:
    idle = timeline.chained_idle_seconds
    return timeline.work_seconds[max(range(len(idle)), key=idle.__getitem__)]


def _phases(pipeline: PipelineSteps) -> dict[str, float]:
    """Return mean seconds per step: a phase's on its slowest rank; of 'step', from the first start to the last end."""
    samples: dict[str, list[float]] = {}
    for step in pipeline.steps:
        phases = [phase for row in step.rows for phase in row.phases]
        for name in dict.fromkeys(name for name, _, _ in phases):
            spans = [(start, end) for other, start, end in phases if other == name]
            whole = max(end for _, end in spans) - min(start for start, _ in spans)
            # a phase may have several parts, as the optimizer has before and after the norm is known
            longest = max(sum(end - start for other, start, end in row.phases if other == name) for row in step.rows)
            samples.setdefault(name, []).append((whole if name == "step" else longest) / 1e9)
    return {name: fmean(values) for name, values in samples.items()}
