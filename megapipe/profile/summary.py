"""A profile in numbers: the mean over its steps of one pipeline, and the same as text for the console."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megapipe.profile.difference import (
    CAUSES,
    PREDICTED,
    Cause,
    Comparison,
    Idle,
    MeasuredTimeline,
    OpTime,
    add,
    compare,
    op_times,
)
from megapipe.profile.profile import PipelineSteps, Profile

AFTER = ("gradient-reduce", "optimizer")  # phases of a step behind its last action


@dataclass(frozen=True)
class Summary:
    """Means over the profiled steps of one pipeline, in seconds a step.

    causes: their sum is measured_idle, up to and with 'messages' predicted_idle. other_shares: the measured bubble share, with a barrier,
    of every pipeline recorded, this one included. phases: seconds of each phase, of the rank where it took longest.
    """

    pipeline: PipelineSteps
    comparisons: tuple[Comparison, ...]
    causes: tuple[Cause, ...]
    work_seconds: float
    chained_work: Idle  # work of the rank with the most chained idle: (predicted, measured)
    phases: dict[str, float]
    op_times: tuple[OpTime, ...]
    other_shares: tuple[float, ...]

    @property
    def measured_idle(self) -> Idle:
        return add(self.causes)

    @property
    def predicted_idle(self) -> Idle:
        names = [cause.name for cause in self.causes]
        return add(self.causes[: names.index(PREDICTED) + 1])

    @property
    def predicted_share(self) -> Idle:
        """Bubble shares, idle / (idle + work), on the two clocks."""
        idle = self.predicted_idle
        return Idle(_share(idle.barrier, self.work_seconds), _share(idle.chained, self.chained_work[0]))

    @property
    def measured_share(self) -> Idle:
        idle = self.measured_idle
        return Idle(_share(idle.barrier, self.work_seconds), _share(idle.chained, self.chained_work[1]))

    @property
    def typical(self) -> Comparison:
        """The step whose wall is the median: the one to draw."""
        ordered = sorted(self.comparisons, key=lambda comparison: comparison.measured.makespan_seconds)
        return ordered[(len(ordered) - 1) // 2]


def summarize(profile: Profile, index: int = 0) -> Summary:
    """The summary of the pipeline `index` of the profile."""
    pipeline = profile.pipelines[index]
    comparisons = tuple(compare(profile, pipeline, step) for step in pipeline.steps)
    causes = tuple(
        Cause(
            name, Idle(fmean(cause.seconds.barrier for cause in same), fmean(cause.seconds.chained for cause in same))
        )
        for name, same in zip(CAUSES, zip(*(comparison.causes for comparison in comparisons), strict=True), strict=True)
    )
    chained_work = Idle(
        fmean(_work_of_most_idle(c.plan.chained_idle_seconds, c.plan.work_seconds) for c in comparisons),
        fmean(_work_of_most_idle(c.measured.chained_idle_seconds, c.measured.work_seconds) for c in comparisons),
    )
    work = fmean(comparison.mean_work_seconds for comparison in comparisons)
    shares = tuple(_measured_share(profile, other) for other in profile.pipelines)
    return Summary(
        pipeline, comparisons, causes, work, chained_work, _phases(pipeline), tuple(op_times(comparisons)), shares
    )


def profile_text(profile: Profile, summary: Summary) -> str:
    """What is printed when a profile has been taken."""
    steps = [step.step for step in summary.pipeline.steps]
    schedule = summary.typical.measured.schedule
    ranks = " ".join(map(str, summary.pipeline.global_ranks))
    planned, measured = summary.predicted_idle, summary.measured_idle
    work = summary.work_seconds
    lines = [
        f"profile of {'step' if len(steps) == 1 else 'steps'} {_span(steps)}: {schedule}, ranks {ranks}; {clock_text(profile)}",
        *(f"  {note}" for note in [crowd_text(profile)] if note),
        f"  a step took {milliseconds(measured.barrier + work)}, predicted were {milliseconds(planned.barrier + work)}; "
        f"{milliseconds(work)} of it are computation (mean of the ranks)",
        "  bubble, idle / (idle + work)  predicted  measured",
        _share_line(
            "barrier",
            summary.predicted_share.barrier,
            summary.measured_share.barrier,
            "first action of any rank to last of any",
        ),
        _share_line(
            "chained",
            summary.predicted_share.chained,
            summary.measured_share.chained,
            "the idlest rank's own first to last action",
        ),
        "  idle a step, ms        barrier    chained",
    ]
    for cause in summary.causes:
        lines.append(_cause_line("+" if cause.name != "equal stages" else " ", CAUSES[cause.name], cause.seconds))
        if cause.name == PREDICTED:
            lines.append(_cause_line("=", "predicted", planned))
    lines.append(_cause_line("=", "measured", measured))
    if summary.phases:
        after = ", ".join(
            f"{name} {milliseconds(seconds)}" for name, seconds in summary.phases.items() if name in AFTER
        )
        lines.append(
            f"  after the last action: {after or 'nothing'}; the whole step {milliseconds(summary.phases.get('step', 0.0))}"
        )
    if len(summary.other_shares) > 1:
        low, high = min(summary.other_shares), max(summary.other_shares)
        lines.append(
            f"  all {len(summary.other_shares)} pipelines recorded: {low:.1%} to {high:.1%} measured with a barrier"
        )
    return "\n".join(lines)


def clock_text(profile: Profile) -> str:
    """How far the times of different ranks can be compared."""
    error = milliseconds(profile.clock_error_seconds)
    if all(note.is_shared for note in profile.clocks):
        by_events = f", on which times of GPUs are at most {error} wrong" if profile.clock_error_seconds else ""
        return f"all ranks read one clock{by_events}"
    apart = [note for note in profile.clocks if not note.is_shared]
    return f"clocks of {len(apart)} of {len(profile.clocks)} ranks set by ping-pong, to at most {error} wrong"


def crowd_text(profile: Profile) -> str:
    """What to know of times measured with more ranks than cores; empty elsewhere."""
    ranks, cores = profile.about.get("ranks_per_node") or 0, profile.about.get("cores") or 0
    if profile.about.get("device") != "cpu" or ranks <= cores:
        return ""
    return f"{ranks} ranks share {cores} cores: a rank also waits for its core, and times hold that wait"


def milliseconds(seconds: float) -> str:
    """12.3 ms."""
    return f"{seconds * 1e3:,.{_digits(seconds * 1e3)}f} ms"


def _digits(value: float) -> int:
    return 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3


def _share_line(clock: str, predicted: float, measured: float, meaning: str) -> str:
    return f"    {clock:<25} {predicted:>10.1%} {measured:>9.1%}   {meaning}"


def _cause_line(sign: str, text: str, idle: Idle) -> str:
    return f"  {sign} {idle.barrier * 1e3:>20.2f} {idle.chained * 1e3:>10.2f}   {text}"


def _span(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _share(idle: float, work: float) -> float:
    return idle / (idle + work) if idle + work else 0.0


def _work_of_most_idle(idles: Sequence[float], work: Sequence[float]) -> float:
    return work[max(range(len(idles)), key=idles.__getitem__)]


def _measured_share(profile: Profile, pipeline: PipelineSteps) -> float:
    measured = [MeasuredTimeline(profile.schedules[step.num_microbatches], step) for step in pipeline.steps]
    return _share(fmean(each.idle.barrier for each in measured), fmean(fmean(each.work_seconds) for each in measured))


def _phases(pipeline: PipelineSteps) -> dict[str, float]:
    """Mean seconds a step: of a phase where it took longest, of 'step' from the first rank's start to the last's end."""
    samples: dict[str, list[float]] = {}
    for step in pipeline.steps:
        phases = [phase for row in step.rows for phase in row.phases]
        for name in dict.fromkeys(name for name, _, _ in phases):
            spans = [(start, end) for other, start, end in phases if other == name]
            whole = max(end for _, end in spans) - min(start for start, _ in spans)
            # a phase may have several parts: the optimizer's before the norm is known and after it
            longest = max(sum(end - start for other, start, end in row.phases if other == name) for row in step.rows)
            samples.setdefault(name, []).append((whole if name == "step" else longest) / 1e9)
    return {name: fmean(values) for name, values in samples.items()}
