"""SVG drawing that compares the plan of one step with its measurement, on a common time axis.

Each rank has two lanes: the planned one above the measured one. The drawing brings its own style, comparison.css, which
follows the reader's light or dark setting, so the report and a separate SVG file show the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from typing import NamedTuple

from megapipe.extras.report.drawing import merged, round_step
from megapipe.extras.report.timeline import COLOURS, LARGE, NAMES, fill, legend
from megapipe.formatting import milliseconds
from megapipe.profile.difference import Comparison
from megapipe.schedule.action import COMPUTE_OPS, Action, Op

PLAN_LANE, MEASURED_LANE, INNER, BETWEEN = 17, 21, 2, 11  # px: lanes, gap within a rank, gap between ranks
LABELS, TOP, BOTTOM, RIGHT = 104, 30, 58, 24
DIGITS = 6.2  # width in px of one digit of a microbatch number
NARROWEST, WIDEST = 1184, 9000
PHASES = {"gradient-reduce": "reduction", "optimizer": "optimizer"}  # phases after a rank's last action that are drawn
WAIT_PATTERN = (
    '<defs><pattern id="mp-wait" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="5" height="5" fill="var(--lane)"/><rect width="1.6" height="5" fill="var(--wait)"/></pattern></defs>'
)


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
        lines = [
            f"{self.action}: stage {stage}, {NAMES[op]} of microbatch {microbatch}",
            f"measured {measured}, planned {planned}",
        ]
        if self.waited:
            lines.append(f"waited {milliseconds(self.waited)} for its input message")
        if self.parameters:
            lines.append(f"measured time includes a wait of {milliseconds(self.parameters)} for parameters")
        return escape("\n".join(lines))


class _Drawing:
    """A comparison with the layout of its picture in px."""

    def __init__(self, comparison: Comparison, num_ranks: int, left: int) -> None:
        plan, measured = comparison.plan, comparison.measured
        self.plan, self.measured, self.left = plan, measured, left
        self.boxes = [
            [
                _Box(
                    action,
                    (plan.starts[rank][slot], plan.ends[rank][slot]),
                    (measured.compute_starts[rank][slot], measured.ends[rank][slot]),
                    measured.message_waits[rank][slot],
                    measured.parameter_waits[rank][slot],
                )
                for slot, action in enumerate(measured.schedule.rows[rank])
                if action.op in COMPUTE_OPS or action.op is Op.UPDATE
            ]
            for rank in range(num_ranks)
        ]
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
        self.width = float(width - left - RIGHT)  # of the time axis
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
    height = drawing.bottom + BOTTOM
    total = round(drawing.left + drawing.width + RIGHT)
    spoken = (
        f"{plan.schedule}, step {measured.step.step}: planned {milliseconds(plan.makespan_seconds)}, "
        f"measured {milliseconds(measured.makespan_seconds)} from the first action to the last computation"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mp-step" width="{total}" height="{height}" '
        f'viewBox="0 0 {total} {height}" role="img" aria-label="{escape(spoken)}">',
        f"<style>\n{style}</style>",
        WAIT_PATTERN,
        f'<rect class="paper" width="{total}" height="{height}"/>',
    ]
    step = round_step(drawing.seconds / max(2.0, drawing.width / 110))
    for tick in range(int(drawing.seconds / step) + 1):
        x, y = drawing.x(tick * step), drawing.bottom + 6
        text, anchor = (f"{tick * step * 1e3:g}", "middle") if tick else ("0 ms", "start")
        parts.append(f'<line class="rule" x1="{x:.2f}" y1="{TOP - 4}" x2="{x:.2f}" y2="{y}"/>')
        parts.append(f'<text class="soft" x="{x:.2f}" y="{y + 12}" text-anchor="{anchor}">{text}</text>')
    for rank in range(len(ranks)):
        parts += _lanes(drawing, rank)
    if with_labels:
        parts += _labels(ranks, drawing.left)
    parts += _ends(drawing)
    y = height - 12
    ops = [op for op in COLOURS if op in plan.schedule.ops and op is not Op.REDUCE_GRAD]
    shown, x = legend(ops, plan.schedule.placement.num_chunks, drawing.left, y, letter=6.1)
    parts += [
        *shown,
        f'<rect class="wait" x="{x:g}" y="{y - 10}" width="18" height="12"/>',
        f'<text x="{x + 23:g}" y="{y}">waiting for a message</text>',
        f'<rect class="after" x="{x + 160:g}" y="{y - 8}" width="14" height="8"/>',
        f'<text x="{x + 179:g}" y="{y}">reduction, optimizer</text>',
        f'<text class="soft" x="{x + 310:g}" y="{y}">numbers: microbatches</text>',
    ]
    return "\n".join([*parts, "</svg>\n"])


def labels(ranks: Sequence[int]) -> str:
    """Return the column of rank names as an SVG of the same height as the drawing."""
    height = _top(len(ranks)) - BETWEEN + BOTTOM
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mp-step" width="{LABELS}" height="{height}" '
        f'viewBox="0 0 {LABELS} {height}">'
    )
    return "\n".join([head, *_labels(ranks, LABELS), "</svg>\n"])


def _labels(ranks: Sequence[int], right: int) -> Iterator[str]:
    for pp_rank, rank in enumerate(ranks):
        top = _top(pp_rank)
        yield f'<text x="4" y="{top + 13}" font-weight="600">rank {rank}</text>'
        if rank != pp_rank:
            yield f'<text class="soft" x="4" y="{top + PLAN_LANE + INNER + 15}">pp {pp_rank}</text>'
        yield f'<text class="soft" x="{right - 8}" y="{top + 13}" text-anchor="end">plan</text>'
        yield f'<text x="{right - 8}" y="{top + PLAN_LANE + INNER + 15}" text-anchor="end">measured</text>'


def _top(rank: int) -> int:
    return TOP + rank * (PLAN_LANE + INNER + MEASURED_LANE + BETWEEN)


def _lanes(drawing: _Drawing, rank: int) -> Iterator[str]:
    """Yield a rank's two lanes: waits, boxes, and the phases after the last action."""
    top, boxes = _top(rank), drawing.boxes[rank]
    below = top + PLAN_LANE + INNER
    for y, height, timeline in ((top, PLAN_LANE, drawing.plan), (below, MEASURED_LANE, drawing.measured)):
        width = timeline.makespan_seconds * drawing.scale
        yield f'<rect class="lane" x="{drawing.left}" y="{y}" width="{width:.2f}" height="{height}"/>'
    path = ""
    for box in boxes:
        if box.waited * drawing.scale > 0.4:
            begun, over = drawing.x(box.measured[0] - box.waited), drawing.x(box.measured[0])
            path += f"M{begun:.2f} {below}H{over:.2f}v{MEASURED_LANE}H{begun:.2f}z"
    if path:
        yield f'<path class="wait" d="{path}"><title>waiting for a message</title></path>'
    for kind, y, height in ((" plan", top, PLAN_LANE), ("", below, MEASURED_LANE)):
        large = []
        for box in boxes:
            start, end = box.plan if kind else box.measured
            x, w = drawing.x(start), (end - start) * drawing.scale
            colour = fill(drawing.plan.schedule.placement, rank, box.action)
            if drawing.is_large:
                large.append((colour, x, y, w, height))
                continue
            place = f'x="{x:.2f}" y="{y:g}" width="{max(w, 0.3):.2f}" height="{height:g}"'
            yield f'<rect class="b{kind}" fill="{colour}" {place}><title>{box.title}</title></rect>'
            number = "" if box.action.microbatch is None else str(box.action.microbatch)
            if number and w >= DIGITS * len(number):
                place = f'x="{x + w / 2:.2f}" y="{y + height / 2 + 3.6:g}"'
                yield f'<text class="n{kind}" style="fill:{COLOURS[box.action.op][2]}" {place}>{number}</text>'
        yield from merged(large, class_=f"b{kind}")
    for name, start, stop in drawing.phases[rank]:
        w = (stop - start) * drawing.scale
        place = f'x="{drawing.x(start):.2f}" y="{below + 4}" width="{w:.2f}" height="{MEASURED_LANE - 8}"'
        yield f'<rect class="b after" {place}><title>{PHASES[name]}: {milliseconds(stop - start)}</title></rect>'


def _ends(drawing: _Drawing) -> Iterator[str]:
    """Yield the vertical lines where the plan and the measurement end, with their labels."""
    ends = sorted(((drawing.plan.makespan_seconds, "plan"), (drawing.measured.makespan_seconds, "measured")))
    close = (ends[1][0] - ends[0][0]) * drawing.scale < 130
    for index, (seconds, name) in enumerate(ends):
        x = drawing.x(seconds)
        yield f'<line class="end" x1="{x:.2f}" y1="{TOP - 6}" x2="{x:.2f}" y2="{drawing.bottom + 4}"/>'
        before = (close and index == 0) or x > drawing.left + drawing.width - 150
        y = 11 if close and index == 1 and before else 22
        anchor, shift = ("end", -4) if before else ("start", 4)
        text = f"{name} ends, {milliseconds(seconds)}"
        yield f'<text class="endtext" x="{x + shift:.2f}" y="{y}" text-anchor="{anchor}">{text}</text>'
