"""A profile in numbers: means over the profiled steps of one pipeline, and the text printed after profiling."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from megapipe.formatting import milliseconds, range_text
from megapipe.profile.difference import (
    CAUSES,
    PREDICTED,
    Comparison,
    Idle,
    MeasuredTimeline,
    OpTime,
    compare,
    op_times,
    predicted_idle,
    total_idle,
)
from megapipe.profile.profile import PipelineSteps, Profile
from megapipe.schedule.simulate import Timeline

PHASES_AFTER_ROW = ("gradient-reduce", "optimizer")  # phases of a step after its last action


@dataclass(frozen=True)
class Summary:
    """Means over the profiled steps of one pipeline, in seconds per step. Shares are idle / (idle + work)."""

    pipeline: PipelineSteps
    comparisons: tuple[Comparison, ...]
    causes: dict[str, Idle]  # by the names of CAUSES
    predicted_idle: Idle  # the sum of the causes up to 'messages'
    measured_idle: Idle  # the sum of all causes
    predicted_share: Idle  # chained: with the work of the rank that has the most chained idle time
    measured_share: Idle
    work_seconds: float  # mean of the ranks
    phases: dict[str, float]  # of the rank where a phase took longest
    op_times: tuple[OpTime, ...]
    all_shares: tuple[float, ...]  # the measured share, with a barrier, of every recorded pipeline

    @property
    def typical(self) -> Comparison:
        """The step of median makespan: the one to draw."""
        ordered = sorted(self.comparisons, key=lambda comparison: comparison.measured.makespan_seconds)
        return ordered[(len(ordered) - 1) // 2]


def summarize(profile: Profile) -> Summary:
    """Return the summary of the first pipeline of the profile."""
    pipeline = profile.pipelines[0]
    comparisons = tuple(compare(profile, step) for step in pipeline.steps)
    causes = {}
    for name in CAUSES:
        barrier, chained = zip(*(comparison.causes[name] for comparison in comparisons), strict=True)
        causes[name] = Idle(fmean(barrier), fmean(chained))
    planned, measured = predicted_idle(causes), total_idle(causes.values())
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
        causes=causes,
        predicted_idle=planned,
        measured_idle=measured,
        predicted_share=Idle(_share(planned.barrier, work), _share(planned.chained, planned_work)),
        measured_share=Idle(_share(measured.barrier, work), _share(measured.chained, measured_work)),
        work_seconds=work,
        phases=_phases(pipeline),
        op_times=tuple(op_times(comparisons)),
        all_shares=tuple(all_shares),
    )


def profile_text(profile: Profile, summary: Summary) -> str:
    """Return the text that is printed when a profile has been taken."""
    steps = [step.step for step in summary.pipeline.steps]
    schedule = summary.typical.measured.schedule
    ranks = " ".join(map(str, summary.pipeline.global_ranks))
    planned, measured, work = summary.predicted_idle, summary.measured_idle, summary.work_seconds
    planned_share, measured_share = summary.predicted_share, summary.measured_share
    note = oversubscription_text(profile)
    lines = [
        f"profile of {'step' if len(steps) == 1 else 'steps'} {range_text(steps)}: {schedule}, ranks {ranks}; "
        f"{clocks_text(profile)}",
        *([f"  {note}"] if note else []),
        f"  step time {milliseconds(measured.barrier + work)}, predicted {milliseconds(planned.barrier + work)}; "
        f"computation {milliseconds(work)} (mean of the ranks)",
        "  bubble, idle / (idle + work)  predicted  measured",
        f"    {'barrier':<25} {planned_share.barrier:>10.1%} {measured_share.barrier:>9.1%}   "
        "first action of any rank to last of any",
        f"    {'chained':<25} {planned_share.chained:>10.1%} {measured_share.chained:>9.1%}   "
        "first to last action of the idlest rank",
        "  idle per step, ms      barrier    chained",
    ]
    for name, idle in summary.causes.items():
        lines.append(_cause_line("+" if name != "equal stages" else " ", CAUSES[name], idle))
        if name == PREDICTED:
            lines.append(_cause_line("=", "predicted", planned))
    lines.append(_cause_line("=", "measured", measured))
    if summary.phases:
        after = [f"{name} {milliseconds(s)}" for name, s in summary.phases.items() if name in PHASES_AFTER_ROW]
        whole = milliseconds(summary.phases.get("step", 0.0))
        lines.append(f"  after the last action: {', '.join(after) or 'nothing'}; the whole step {whole}")
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


def _cause_line(sign: str, text: str, idle: Idle) -> str:
    return f"  {sign} {idle.barrier * 1e3:>20.2f} {idle.chained * 1e3:>10.2f}   {text}"


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
