"""Plan and measurement of one step: an SVG drawing on a common time axis, and the report's section on the pipeline.

In the drawing each rank has two lanes: the planned one above the measured one. It brings its own style, comparison.css,
which follows the reader's light or dark setting, so the report and a separate SVG file show the same. The section adds
step time and bubbles, planned and measured, and the time of each stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import fmean, pstdev
from typing import NamedTuple

from megapipe.extras.report.drawing import (
    document,
    element,
    entry,
    legend,
    line,
    merged,
    rect,
    round_step,
    table_html,
    table_row,
    text,
)
from megapipe.extras.report.profile_summary import (
    PHASES,
    Comparison,
    StageKey,
    Summary,
    clocks_text,
    op_samples,
    oversubscription_text,
    summarize,
)
from megapipe.extras.report.timeline import LARGE, STYLES, fill, op_entries
from megapipe.formatting import milliseconds
from megapipe.profile.profile import Profile, trace_path
from megapipe.schedule.action import COMPUTE_OPS, Action, Op

PLAN_LANE, MEASURED_LANE, INNER, BETWEEN = 17, 21, 2, 11  # px: lanes, gap within a rank, gap between ranks
LABELS, TOP, BOTTOM, RIGHT = 104, 30, 58, 24
DIGITS = 6.2  # width in px of one digit of a microbatch number
NARROWEST, WIDEST = 1184, 9000
WAIT_PATTERN = (
    '<defs><pattern id="mp-wait" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="5" height="5" fill="var(--lane)"/><rect width="1.6" height="5" fill="var(--wait)"/></pattern></defs>'
)
OPS = {**{op: style.name for op, style in STYLES.items()}, Op.OVERLAP: "overlapped pair"}
MOST_STAGES = 24


class _Box(NamedTuple):
    """One computation as planned and as measured, in seconds."""

    action: Action
    plan: tuple[float, float]
    measured: tuple[float, float]
    waited: float
    parameters: float  # part of `measured` that is a wait for parameters

    @property
    def title(self) -> str:
        planned, measured = (
            f"{start * 1e3:.2f} to {end * 1e3:.2f} ms ({milliseconds(end - start)})"
            for start, end in (self.plan, self.measured)
        )
        stage, op, microbatch = self.action
        lines = [f"{self.action}: stage {stage}, {OPS[op]} of microbatch {microbatch}"]
        lines.append(f"measured {measured}, planned {planned}")
        if self.waited:
            lines.append(f"waited {milliseconds(self.waited)} for its input message")
        if self.parameters:
            lines.append(f"measured time includes a wait of {milliseconds(self.parameters)} for parameters")
        return "\n".join(lines)


class _Drawing:
    """A comparison with the layout of its picture in px."""

    def __init__(self, comparison: Comparison, num_ranks: int, left: int) -> None:
        plan, measured = comparison.plan, comparison.measured
        self.plan, self.measured, self.left = plan, measured, left
        self.boxes = []
        for rank in range(num_ranks):
            planned = zip(plan.starts[rank], plan.ends[rank], strict=True)
            ran = zip(measured.compute_starts[rank], measured.ends[rank], strict=True)
            waits = measured.message_waits[rank], measured.parameter_waits[rank]
            boxes = map(_Box, measured.schedule.rows[rank], planned, ran, *waits)
            self.boxes.append([box for box in boxes if box.action.op in {*COMPUTE_OPS, Op.UPDATE}])
        seconds = measured.seconds
        self.phases = [  # of each rank, in seconds on the drawing's axis
            [(name, seconds(start), seconds(stop)) for name, start, stop in row.phases if name in PHASES]
            for row in measured.step.rows[:num_ranks]
        ]
        stops = [stop for row in self.phases for _, _, stop in row]
        last = max(measured.makespan_seconds, plan.makespan_seconds, *stops)
        self.seconds = (last or 1e-9) * 1.004
        spans = sorted(end - start for row in self.boxes for _, (start, end), *_ in row if end > start)
        self.is_large = 2 * len(spans) > LARGE
        digits = len(str(max((box.action.microbatch or 0 for row in self.boxes for box in row), default=0)))
        needed = 0.0
        if spans and not self.is_large:  # the narrowest twentieth of the boxes stays without a number
            needed = (digits * DIGITS + 2) / spans[len(spans) // 20] * self.seconds
        width = round(min(max(needed + left + RIGHT, NARROWEST - (LABELS + 3 if left < LABELS else 0)), WIDEST))
        self.width = width - left - RIGHT  # of the time axis
        self.scale = self.width / self.seconds
        self.bottom = _top(num_ranks) - BETWEEN

    def x(self, seconds: float) -> float:
        return self.left + seconds * self.scale


def comparison_svg(comparison: Comparison, ranks: Sequence[int], with_labels: bool = True) -> str:
    """Return the drawing as SVG, wide enough for the microbatch numbers, at least NARROWEST px.

    ranks: global rank of each pp_rank. with_labels: include the column of rank names; the report draws it separately
    with `labels`, so that the names stay in place while the drawing scrolls.
    """
    style = files("megapipe.extras.report").joinpath("comparison.css").read_text(encoding="utf-8")
    drawing = _Drawing(comparison, len(ranks), LABELS if with_labels else 6)
    plan, measured = comparison.plan, comparison.measured
    height, width = drawing.bottom + BOTTOM, drawing.left + drawing.width + RIGHT
    spoken = (
        f"{plan.schedule}, step {measured.step.step}: planned {milliseconds(plan.makespan_seconds)}, "
        f"measured {milliseconds(measured.makespan_seconds)} from the first action to the last computation"
    )
    paper = element("rect", class_="paper", width=width, height=height)
    parts = [element("style", f"\n{style}"), WAIT_PATTERN, paper]
    step = round_step(drawing.seconds / max(2.0, drawing.width / 110))
    for tick in range(int(drawing.seconds / step) + 1):
        x, y = drawing.x(tick * step), drawing.bottom + 6
        label, anchor = (f"{tick * step * 1e3:g}", "middle") if tick else ("0 ms", "start")
        parts.append(line(x, TOP - 4, x, y, class_="rule"))
        parts.append(text(x, y + 12, label, class_="soft", text_anchor=anchor))
    for rank in range(len(ranks)):
        parts += _lanes(drawing, rank)
    if with_labels:
        parts += _labels(ranks)
    parts += _ends(drawing)
    ops = [op for op in STYLES if op in plan.schedule.ops and op is not Op.REDUCE_GRAD]
    entries = [
        *op_entries(ops, plan.schedule.placement.num_chunks),
        entry("waiting for a message", rect(0, -10, 18, 12, class_="wait"), 18),
        entry("reduction, optimizer", rect(0, -8, 14, 8, class_="after"), 14),
        entry("numbers: microbatches", class_="soft"),
    ]
    parts += legend(entries, drawing.left, width, height - 12)[0]
    return document(width, height, parts, class_="mp-step", role="img", aria_label=spoken)


def labels(ranks: Sequence[int]) -> str:
    """Return the column of rank names as an SVG of the same height as the drawing."""
    return document(LABELS, _top(len(ranks)) - BETWEEN + BOTTOM, _labels(ranks), class_="mp-step")


def _labels(ranks: Sequence[int]) -> Iterator[str]:
    for pp_rank, rank in enumerate(ranks):
        planned, measured = _top(pp_rank) + 13, _top(pp_rank) + PLAN_LANE + INNER + 15
        yield text(4, planned, f"rank {rank}", font_weight=600)
        if rank != pp_rank:
            yield text(4, measured, f"pp {pp_rank}", class_="soft")
        yield text(LABELS - 8, planned, "plan", class_="soft", text_anchor="end")
        yield text(LABELS - 8, measured, "measured", text_anchor="end")


def _top(rank: int) -> int:
    return TOP + rank * (PLAN_LANE + INNER + MEASURED_LANE + BETWEEN)


def _lanes(drawing: _Drawing, rank: int) -> Iterator[str]:
    """Yield a rank's two lanes: waits, boxes, and the phases after the last action."""
    top, boxes = _top(rank), drawing.boxes[rank]
    below = top + PLAN_LANE + INNER
    for y, height, timeline in ((top, PLAN_LANE, drawing.plan), (below, MEASURED_LANE, drawing.measured)):
        yield rect(drawing.left, y, timeline.makespan_seconds * drawing.scale, height, class_="lane")
    path = ""
    for box in boxes:
        if box.waited * drawing.scale > 0.4:
            begun, over = drawing.x(box.measured[0] - box.waited), drawing.x(box.measured[0])
            path += f"M{begun:.2f} {below}H{over:.2f}v{MEASURED_LANE}H{begun:.2f}z"
    if path:
        yield element("path", element("title", "waiting for a message"), class_="wait", d=path)
    for kind, y, height in ((" plan", top, PLAN_LANE), ("", below, MEASURED_LANE)):
        large = []
        for box in boxes:
            start, end = box.plan if kind else box.measured
            x, width = drawing.x(start), (end - start) * drawing.scale
            colour = fill(drawing.plan.schedule.placement, rank, box.action)
            if drawing.is_large:
                large.append((colour, x, y, width, height))
                continue
            yield rect(x, y, max(width, 0.3), height, box.title, class_=f"b{kind}", fill=colour)
            number = "" if box.action.microbatch is None else str(box.action.microbatch)
            if number and width >= DIGITS * len(number):
                style = {"class_": f"n{kind}", "style": f"fill:{STYLES[box.action.op].ink}"}
                yield text(x + width / 2, f"{y + height / 2 + 3.6:g}", number, **style)
        yield from merged(large, class_=f"b{kind}")
    for name, start, stop in drawing.phases[rank]:
        title, width = f"{PHASES[name]}: {milliseconds(stop - start)}", (stop - start) * drawing.scale
        yield rect(drawing.x(start), below + 4, width, MEASURED_LANE - 8, title, class_="b after")


def _ends(drawing: _Drawing) -> Iterator[str]:
    """Yield the vertical lines where the plan and the measurement end, with their labels."""
    ends = sorted(((drawing.plan.makespan_seconds, "plan"), (drawing.measured.makespan_seconds, "measured")))
    close = (ends[1][0] - ends[0][0]) * drawing.scale < 300  # labels of both would meet
    for index, (seconds, name) in enumerate(ends):
        x = drawing.x(seconds)
        yield line(x, TOP - 6, x, drawing.bottom + 4, class_="end")
        before = (close and index == 0) or x > drawing.left + drawing.width - 150
        y = 11 if close and index == 1 and before else 22
        anchor, shift = ("end", -4) if before else ("start", 4)
        yield text(x + shift, y, f"{name} ends, {milliseconds(seconds)}", class_="endtext", text_anchor=anchor)


def pipeline_html(profile: Profile, path: Path, num_profiles: int) -> str:
    """Return the section for one profile: drawing, planned and measured, times of the stages."""
    summary = summarize(profile)
    ranks = summary.pipeline.global_ranks
    drawn = comparison_svg(summary.typical, ranks, with_labels=False)
    is_wide = int(drawn.split('width="', 1)[1].split('"', 1)[0]) > NARROWEST
    parts = [
        element("p", " ".join(_notes(profile, summary, path, num_profiles)), class_="soft"),
        trace_html(path),
        f'<div class="timeline"><div class="ranks">{labels(ranks)}</div>'
        f'<div class="scroll" tabindex="0">{drawn}</div></div>',
        f'<p class="soft{"" if is_wide else " cut"}">Scroll sideways to see the whole drawing.</p>',
        '<div class="two">',
        f"<div><h3>Planned and measured</h3>{_table(summary)}</div>",
        f"<div><h3>Time of each stage</h3>{_stages(summary)}</div>",
        "</div>",
    ]
    return "\n".join(filter(None, parts))


def _notes(profile: Profile, summary: Summary, path: Path, num_profiles: int) -> Iterator[str]:
    """Yield sentences about the profile."""
    steps, shares = [step.step for step in summary.pipeline.steps], summary.all_shares
    measured = summary.typical.measured
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}, means over {len(steps)}"
    yield f"Profile of {span}: {escape(str(measured.schedule))}. The drawing shows step {measured.step.step}."
    yield f"{clocks_text(profile).capitalize()}."
    if note := oversubscription_text(profile):
        yield f"{note}."
    if len(shares) > 1:
        yield (
            f"This is the pipeline of tp {summary.pipeline.tp_rank}, dp {summary.pipeline.dp_rank}. The measured bubble"
            f" with a barrier is {min(shares):.1%} to {max(shares):.1%} over all {len(shares)} recorded pipelines."
        )
    if profile.links:
        size = f"{profile.message_bytes / 2**10:,.0f} KiB"
        link = max(profile.links, key=lambda each: each.latency_seconds + each.transfer_seconds)
        seconds = link.latency_seconds + link.transfer_seconds
        has_latency = link.transfer_seconds >= 1e-6
        latency = f", including {milliseconds(link.latency_seconds)} of latency" if has_latency else ""
        yield f"Between idle ranks a message of {size} takes {milliseconds(seconds)}{latency}."
    more = f" (the newest of {num_profiles} profiles)" if num_profiles > 1 else ""
    yield f"Data: <code>{escape(path.name)}</code>{more}."


def trace_html(path: Path) -> str:
    """Return how to see a profile in Perfetto."""
    name = escape(trace_path(path).name)
    return f'<p class="soft">All actions of all ranks: open <code>{name}</code> at ui.perfetto.dev.</p>'


def _table(summary: Summary) -> str:
    """Return the table of planned beside measured."""
    rows = [table_row(["per step", "planned", "measured"], tag="th")]
    for row in summary.table:
        numbers = (element("td", each, class_="n") for each in (row.planned, row.measured))
        rows.append(table_row([f"{row.name}<small>{row.meaning}</small>", *numbers]))
    return table_html(rows, "planned") + '<p class="soft">Plan and measurement do the same work.</p>'


def _stages(summary: Summary) -> str:
    """Return a table of the mean and standard deviation of each op, one row per stage."""
    times = {(each.stage, each.op): each for each in op_times(summary.comparisons)}
    ops = [op for op in OPS if any(op is other for _, other in times)]
    stages = list(dict.fromkeys(stage for stage, _ in times))
    placement = summary.typical.measured.schedule.placement
    longest = max((each.mean_seconds for each in times.values()), default=0.0) or 1.0
    rows = [table_row(["stage", "rank", *(element("th", OPS[op], colspan=2) for op in ops)], tag="th")]
    for stage in stages[:MOST_STAGES]:
        ranks = placement.ranks_of(int(stage)) if stage.isdigit() else ()
        cells = [stage, " ".join(str(summary.pipeline.global_ranks[rank]) for rank in ranks)]
        for op in ops:
            time = times.get((stage, op))
            if time is None:
                cells += ["", ""]
                continue
            bar = element(
                "div", "", class_=f"bar {op.value}", style=f"left:0;width:{100 * time.mean_seconds / longest:.1f}%"
            )
            numbers = f"{time.mean_seconds * 1e3:,.2f} \N{PLUS-MINUS SIGN} {time.deviation_seconds * 1e3:,.2f}"
            cells += [element("td", bar, class_="track small"), element("td", numbers, class_="n")]
        rows.append(table_row(cells))
    rest = f"<p class='soft'>and {len(stages) - MOST_STAGES} more stages</p>" if len(stages) > MOST_STAGES else ""
    foot = (
        '<p class="soft">In milliseconds: mean \N{PLUS-MINUS SIGN} standard deviation over microbatches and steps, '
        "without waits.</p>"
    )
    return table_html(rows, "ops") + rest + foot


class OpTime(NamedTuple):
    """Time of an op of a stage: mean and standard deviation over microbatches and steps."""

    stage: str  # "2", or "1+6" for an overlapped pair
    op: Op
    mean_seconds: float
    deviation_seconds: float


def op_times(comparisons: Sequence[Comparison]) -> list[OpTime]:
    """Return the times of all ops, sorted by stage."""
    samples: dict[tuple[StageKey, Op], list[float]] = {}
    for comparison in comparisons:
        for key, values in op_samples(comparison.measured).items():
            samples.setdefault(key, []).extend(values)
    ordered = sorted(samples.items(), key=lambda item: (item[0][0], item[0][1].value))
    return [OpTime("+".join(map(str, stages)), op, fmean(values), pstdev(values)) for (stages, op), values in ordered]
