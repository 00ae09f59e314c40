"""A profile in numbers: means over the profiled steps of one pipeline, and the text printed after profiling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megapipe.formatting import milliseconds, range_text
from megapipe.profile.difference import (
    CAUSES,
    PREDICTED,
    Cause,
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

PHASES_AFTER_ROW = ("gradient-reduce", "optimizer")  # phases of a step after its last action


@dataclass(frozen=True)
class Summary:
    """Means over the profiled steps of one pipeline, in seconds per step.

    causes: they sum to measured_idle, those up to 'messages' to predicted_idle. work_seconds: mean of the ranks.
    chained_work: (predicted, measured) work of the rank with the most chained idle time. phases: seconds of each phase,
    of the rank where it took longest. all_shares: the measured bubble share, with a barrier, of every recorded
    pipeline.
    """

    pipeline: PipelineSteps
    comparisons: tuple[Comparison, ...]
    causes: tuple[Cause, ...]
    work_seconds: float
    chained_work: tuple[float, float]
    phases: dict[str, float]
    op_times: tuple[OpTime, ...]
    all_shares: tuple[float, ...]

    @property
    def measured_idle(self) -> Idle:
        return total_idle(self.causes)

    @property
    def predicted_idle(self) -> Idle:
        return predicted_idle(self.causes)

    @property
    def predicted_share(self) -> Idle:
        """Predicted bubble shares, idle / (idle + work)."""
        idle = self.predicted_idle
        return Idle(_share(idle.barrier, self.work_seconds), _share(idle.chained, self.chained_work[0]))

    @property
    def measured_share(self) -> Idle:
        """Measured bubble shares, idle / (idle + work)."""
        idle = self.measured_idle
        return Idle(_share(idle.barrier, self.work_seconds), _share(idle.chained, self.chained_work[1]))

    @property
    def typical(self) -> Comparison:
        """The step of median makespan: the one to draw."""
        ordered = sorted(self.comparisons, key=lambda comparison: comparison.measured.makespan_seconds)
        return ordered[(len(ordered) - 1) // 2]


def summarize(profile: Profile, index: int = 0) -> Summary:
    """Return the summary of pipeline number `index` of the profile."""
    pipeline = profile.pipelines[index]
    comparisons = tuple(compare(profile, step) for step in pipeline.steps)
    causes = []
    for name, same in zip(CAUSES, zip(*(comparison.causes for comparison in comparisons), strict=True), strict=True):
        barrier = fmean(cause.seconds.barrier for cause in same)
        causes.append(Cause(name, Idle(barrier, fmean(cause.seconds.chained for cause in same))))
    chained_work = (
        fmean(_work_of_idlest(each.plan.chained_idle_seconds, each.plan.work_seconds) for each in comparisons),
        fmean(_work_of_idlest(each.measured.chained_idle_seconds, each.measured.work_seconds) for each in comparisons),
    )
    all_shares = []
    for other in profile.pipelines:
        measured = [MeasuredTimeline(profile.schedules[step.num_microbatches], step) for step in other.steps]
        work = fmean(fmean(each.work_seconds) for each in measured)
        all_shares.append(_share(fmean(each.idle.barrier for each in measured), work))
    return Summary(
        pipeline,
        comparisons,
        tuple(causes),
        fmean(fmean(comparison.measured.work_seconds) for comparison in comparisons),
        chained_work,
        _phases(pipeline),
        tuple(op_times(comparisons)),
        tuple(all_shares),
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
    for cause in summary.causes:
        lines.append(_cause_line("+" if cause.name != "equal stages" else " ", CAUSES[cause.name], cause.seconds))
        if cause.name == PREDICTED:
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
    error = milliseconds(profile.clock_error_seconds)
    unshared = [clock for clock in profile.clocks if not clock.is_shared]
    if unshared:
        return (
            f"clocks of {len(unshared)} of {len(profile.clocks)} ranks synchronized by messages, "
            f"with an error of at most {error}"
        )
    gpu_events = f", with an error of at most {error} in GPU times" if profile.clock_error_seconds else ""
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


def _work_of_idlest(idles: Sequence[float], work: Sequence[float]) -> float:
    return work[max(range(len(idles)), key=idles.__getitem__)]


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
