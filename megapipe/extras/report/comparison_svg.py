"""SVG drawing that compares the plan of one step with its measurement, on a common time axis.

Each rank has two lanes: the planned one above the measured one. The drawing brings its own style, which follows the
reader's light or dark setting, so the report and a separate SVG file show the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from megapipe.formatting import milliseconds
from megapipe.profile.difference import Comparison
from megapipe.schedule.action import COMPUTE_OPS, Action, Op
from megapipe.schedule.placement import Placement

PLAN_LANE, MEASURED_LANE, INNER, BETWEEN = 17, 21, 2, 11  # px: lanes, gap within a rank, gap between ranks
LABELS, TOP, BOTTOM, RIGHT = 104, 30, 58, 24
DIGITS = 6.2  # width in px of one digit of a microbatch number
NARROWEST, WIDEST = 1184, 9000
LARGE = 12_000  # with more boxes, a lane draws all boxes of a colour as one path, without numbers and tooltips
SHADES = {  # op -> fill of the first and of the last chunk, ink
    Op.F: ((98, 152, 212), (178, 209, 240), "#0b2239"),
    Op.B: ((98, 180, 138), (186, 226, 204), "#0c2b1c"),
    Op.I: ((224, 163, 63), (244, 216, 162), "#3a2705"),
    Op.W: ((150, 118, 184), (211, 193, 229), "#241236"),
    Op.UPDATE: ((196, 92, 84), (196, 92, 84), "#ffffff"),
}
NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "input gradient", Op.W: "weight gradient", Op.UPDATE: "update"}
PHASES = {"gradient-reduce": "reduction", "optimizer": "optimizer"}
STYLE = """
.mp-step{--ink:#1d242c;--soft:#616c78;--rule:#d7dce2;--lane:#f1f3f5;--wait:#c3cad2;
--end:#c0392b;--paper:#fff;--red:#c45c54}
@media(prefers-color-scheme:dark){.mp-step{--ink:#e4e8ec;--soft:#98a3af;--rule:#3a424b;--lane:#222830;--wait:#515c68;
--end:#ff8a7a;--paper:#171b20;--red:#c45c54} .mp-step .plan{opacity:.82!important}}
.mp-step{font:11px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:var(--ink)}
.mp-step text{font-size:11px} .mp-step .soft{fill:var(--soft)}
.mp-step .lane{fill:var(--lane)} .mp-step .wait{fill:url(#mp-wait)}
.mp-step .rule{stroke:var(--rule)}
.mp-step .end{stroke:var(--end);stroke-dasharray:4 3} .mp-step .endtext{fill:var(--end)}
.mp-step text.n{text-anchor:middle;pointer-events:none;font-size:10px} .mp-step .plan{opacity:.62}
.mp-step .after{fill:var(--red)} .mp-step .paper{fill:var(--paper)}
.mp-step rect.b{stroke:var(--paper);stroke-width:.6}
"""


class _Box(NamedTuple):
    """One computation as planned and as measured, in seconds."""

    action: Action
    plan: tuple[float, float]
    measured: tuple[float, float]
    waited: float
    parameters: float


class _Frame(NamedTuple):
    """The layout in px."""

    left: int
    width: float
    scale: float  # px per second
    first: float  # seconds at the left edge
    is_large: bool

    def x(self, seconds: float) -> float:
        return self.left + (seconds - self.first) * self.scale


def comparison_svg(
    comparison: Comparison, ranks: Sequence[int], width: int | None = None, with_labels: bool = True
) -> str:
    """Return the drawing as SVG, `width` px wide (None: wide enough for the microbatch numbers, at least NARROWEST).

    ranks: global rank of each pp_rank. with_labels: include the column of rank names; the report draws it separately
    with `labels`, so that the names stay in place while the drawing scrolls.
    """
    boxes = [_boxes(comparison, rank) for rank in range(len(ranks))]
    frame = _frame(comparison, boxes, width, LABELS if with_labels else 6)
    height = height_of(len(ranks))
    total = round(frame.left + frame.width + RIGHT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mp-step" width="{total}" height="{height}" '
        f'viewBox="0 0 {total} {height}" role="img" aria-label="{escape(_spoken(comparison))}">',
        f"<style>{STYLE}</style>",
        '<defs><pattern id="mp-wait" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="5" height="5" fill="var(--lane)"/><rect width="1.6" height="5" fill="var(--wait)"/>'
        "</pattern></defs>",
        f'<rect class="paper" width="{total}" height="{height}"/>',
    ]
    parts += _axis(comparison, frame, len(ranks))
    for rank, row in enumerate(boxes):
        parts += _lanes(comparison, rank, row, frame)
    if with_labels:
        parts += _labels(ranks, frame.left)
    parts += _ends(comparison, frame, len(ranks))
    parts += _legend(comparison, frame.left, height - 12)
    return "\n".join([*parts, "</svg>\n"])


def labels(ranks: Sequence[int]) -> str:
    """Return the column of rank names as an SVG of the same height as the drawing."""
    height = height_of(len(ranks))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mp-step" width="{LABELS}" height="{height}" '
        f'viewBox="0 0 {LABELS} {height}">'
    )
    return "\n".join([head, *_labels(ranks, LABELS), "</svg>\n"])


def height_of(num_ranks: int) -> int:
    """Return the height of the drawing in px."""
    return _top(num_ranks) - BETWEEN + BOTTOM


def _top(rank: int) -> int:
    return TOP + rank * (PLAN_LANE + INNER + MEASURED_LANE + BETWEEN)


def _boxes(comparison: Comparison, rank: int) -> list[_Box]:
    measured, plan = comparison.measured, comparison.plan
    found = []
    for slot, action in enumerate(measured.schedule.rows[rank]):
        if action.op in COMPUTE_OPS or action.op is Op.UPDATE:
            own = (measured.compute_starts[rank][slot], measured.ends[rank][slot])
            waits = measured.message_waits[rank][slot], measured.parameter_waits[rank][slot]
            found.append(_Box(action, (plan.starts[rank][slot], plan.ends[rank][slot]), own, *waits))
    return found


def _frame(comparison: Comparison, boxes: Sequence[Sequence[_Box]], width: int | None, left: int) -> _Frame:
    last = max(comparison.measured.makespan_seconds, comparison.plan.makespan_seconds)
    last = max([last, *(stop for rank in range(len(boxes)) for _, _, stop in _phases(comparison, rank))])
    span = (last or 1e-9) * 1.004
    widths = sorted(box.plan[1] - box.plan[0] for row in boxes for box in row if box.plan[1] > box.plan[0])
    is_large = 2 * len(widths) > LARGE
    if width is None:
        digits = len(str(max((box.action.microbatch or 0 for row in boxes for box in row), default=0)))
        needed = 0.0
        if widths and not is_large:  # the narrowest twentieth of the boxes stays without a number
            needed = (digits * DIGITS + 2) / widths[len(widths) // 20] * span
        width = round(min(max(needed + left + RIGHT, NARROWEST - (LABELS + 3 if left < LABELS else 0)), WIDEST))
    inner = float(width - left - RIGHT)
    return _Frame(left, inner, inner / span, 0.0, is_large)


def _lanes(comparison: Comparison, rank: int, boxes: Sequence[_Box], frame: _Frame) -> Iterator[str]:
    top, placement = _top(rank), comparison.plan.schedule.placement
    below = top + PLAN_LANE + INNER
    plan_end, measured_end = comparison.plan.makespan_seconds, comparison.measured.makespan_seconds
    for y, height, end in ((top, PLAN_LANE, plan_end), (below, MEASURED_LANE, measured_end)):
        yield f'<rect class="lane" x="{frame.left}" y="{y}" width="{end * frame.scale:.2f}" height="{height}"/>'
    waits = [(box.measured[0] - box.waited, box.measured[0]) for box in boxes if box.waited * frame.scale > 0.4]
    path = "".join(f"M{frame.x(a):.2f} {below}H{frame.x(b):.2f}v{MEASURED_LANE}H{frame.x(a):.2f}z" for a, b in waits)
    if path:
        yield f'<path class="wait" d="{path}"><title>waiting for a message</title></path>'
    if frame.is_large:
        yield from _paths(placement, rank, boxes, frame)
    else:
        for box in boxes:
            yield _drawn(placement, rank, box, box.plan, top, PLAN_LANE, " plan", frame)
            yield _drawn(placement, rank, box, box.measured, below, MEASURED_LANE, "", frame)
    for name, start, stop in _phases(comparison, rank):
        x, w = frame.x(start), (stop - start) * frame.scale
        title = f"<title>{PHASES[name]}: {milliseconds(stop - start)}</title>"
        place = f'x="{x:.2f}" y="{below + 4}" width="{w:.2f}" height="{MEASURED_LANE - 8}"'
        yield f'<rect class="b after" {place}>{title}</rect>'


def _phases(comparison: Comparison, rank: int) -> Iterator[tuple[str, float, float]]:
    """Yield (name, start, stop) of the phases after the rank's last action, in seconds on the drawing's axis."""
    for name, start, stop in comparison.measured.step.rows[rank].phases:
        if name in PHASES:
            yield name, comparison.measured.seconds(start), comparison.measured.seconds(stop)


def _drawn(
    placement: Placement,
    rank: int,
    box: _Box,
    span: tuple[float, float],
    y: float,
    height: float,
    kind: str,
    frame: _Frame,
) -> str:
    x, w = frame.x(span[0]), (span[1] - span[0]) * frame.scale
    place = f'x="{x:.2f}" y="{y:g}" width="{max(w, 0.3):.2f}" height="{height:g}"'
    drawn = (
        f'<rect class="b{kind}" fill="{_fill(placement, rank, box.action)}" {place}><title>{_title(box)}</title></rect>'
    )
    number = "" if box.action.microbatch is None else str(box.action.microbatch)
    if not number or w < DIGITS * len(number):
        return drawn
    ink = SHADES[box.action.op][2]
    return (
        drawn
        + f'<text class="n{kind}" style="fill:{ink}" x="{x + w / 2:.2f}" y="{y + height / 2 + 3.6:g}">{number}</text>'
    )


def _paths(placement: Placement, rank: int, boxes: Sequence[_Box], frame: _Frame) -> Iterator[str]:
    top = _top(rank)
    for kind, y, height in ((" plan", top, PLAN_LANE), ("", top + PLAN_LANE + INNER, MEASURED_LANE)):
        paths: dict[str, list[str]] = {}
        for box in boxes:
            start, end = box.plan if kind else box.measured
            w = (end - start) * frame.scale
            paths.setdefault(_fill(placement, rank, box.action), []).append(
                f"M{frame.x(start):.1f} {y}h{w:.1f}v{height}h{-w:.1f}z"
            )
        for fill, steps in paths.items():
            yield f'<path class="b{kind}" fill="{fill}" d="{"".join(steps)}"/>'


def _title(box: _Box) -> str:
    (plan_start, plan_end), (start, end) = box.plan, box.measured
    lines = [
        f"{box.action}: stage {box.action.stage}, {NAMES[box.action.op]} of microbatch {box.action.microbatch}",
        f"measured {_span(start, end)}, planned {_span(plan_start, plan_end)}",
    ]
    if box.waited:
        lines.append(f"waited {milliseconds(box.waited)} for its input message")
    if box.parameters:
        lines.append(f"measured time includes a wait of {milliseconds(box.parameters)} for parameters")
    return escape("\n".join(lines))


def _span(start: float, end: float) -> str:
    return f"{start * 1e3:.2f} to {end * 1e3:.2f} ms ({milliseconds(end - start)})"


def _fill(placement: Placement, rank: int, action: Action) -> str:
    stages = placement.stages_of(rank)
    first, last, _ = SHADES[action.op]
    part = stages.index(action.stage) / max(1, len(stages) - 1)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(first, last, strict=True))


def _labels(ranks: Sequence[int], right: int) -> Iterator[str]:
    for pp_rank, rank in enumerate(ranks):
        top = _top(pp_rank)
        yield f'<text x="4" y="{top + 13}" font-weight="600">rank {rank}</text>'
        if rank != pp_rank:
            yield f'<text class="soft" x="4" y="{top + PLAN_LANE + INNER + 15}">pp {pp_rank}</text>'
        yield f'<text class="soft" x="{right - 8}" y="{top + 13}" text-anchor="end">plan</text>'
        yield f'<text x="{right - 8}" y="{top + PLAN_LANE + INNER + 15}" text-anchor="end">measured</text>'


def _axis(comparison: Comparison, frame: _Frame, num_ranks: int) -> Iterator[str]:
    seconds = frame.width / frame.scale
    step = round_step(seconds / max(2.0, frame.width / 110))
    bottom = _top(num_ranks) - BETWEEN + 6
    for tick in range(int(seconds / step) + 1):
        x = frame.x(tick * step)
        yield f'<line class="rule" x1="{x:.2f}" y1="{TOP - 4}" x2="{x:.2f}" y2="{bottom}"/>'
        text = f"{tick * step * 1e3:g}" + (" ms" if tick == 0 else "")
        anchor = "middle" if tick else "start"
        yield f'<text class="soft" x="{x:.2f}" y="{bottom + 12}" text-anchor="{anchor}">{text}</text>'


def _ends(comparison: Comparison, frame: _Frame, num_ranks: int) -> Iterator[str]:
    """Yield the vertical lines where the plan and the measurement end, with their labels."""
    ends = sorted(((comparison.plan.makespan_seconds, "plan"), (comparison.measured.makespan_seconds, "measured")))
    bottom = _top(num_ranks) - BETWEEN + 4
    close = (ends[1][0] - ends[0][0]) * frame.scale < 130
    for index, (seconds, name) in enumerate(ends):
        x = frame.x(seconds)
        yield f'<line class="end" x1="{x:.2f}" y1="{TOP - 6}" x2="{x:.2f}" y2="{bottom}"/>'
        before = (close and index == 0) or x > frame.left + frame.width - 150
        y = 22 if not (close and index == 1 and before) else 11
        anchor, shift = ("end", -4) if before else ("start", 4)
        text = f"{name} ends, {milliseconds(seconds)}"
        yield f'<text class="endtext" x="{x + shift:.2f}" y="{y}" text-anchor="{anchor}">{text}</text>'


def _legend(comparison: Comparison, x: float, y: int) -> Iterator[str]:
    placement, chunks = comparison.plan.schedule.placement, comparison.plan.schedule.placement.num_chunks
    x = max(x, 6)
    for op in (op for op in SHADES if op in comparison.plan.schedule.ops):
        for chunk in range(chunks):
            stage = placement.stages_of(0)[min(chunk, len(placement.stages_of(0)) - 1)]
            fill = _fill(placement, 0, Action(stage, op, 0))
            yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{fill}"/>'
            x += 14
        name = NAMES[op] + (f", chunk 0 .. {chunks - 1}" if chunks > 1 else "")
        yield f'<text x="{x + 3}" y="{y}">{name}</text>'
        x += 24 + 6.1 * len(name)
    yield f'<rect class="wait" x="{x}" y="{y - 10}" width="18" height="12"/>'
    yield f'<text x="{x + 23}" y="{y}">waiting for a message</text>'
    x += 150
    yield f'<rect class="after" x="{x}" y="{y - 8}" width="14" height="8"/>'
    yield f'<text x="{x + 19}" y="{y}">reduction, optimizer</text>'
    x += 150
    yield f'<text class="soft" x="{x}" y="{y}">numbers: microbatches</text>'


def round_step(value: float) -> float:
    """Return the smallest of 1, 2, 5 x 10^n that is at least `value`, which is positive."""
    power = 1e-12
    while power * 10 < value:
        power *= 10
    return next(float(f"{step * power:.6g}") for step in (1, 2, 5, 10, 20) if step * power >= value * (1 - 1e-9))


def _spoken(comparison: Comparison) -> str:
    measured, plan = comparison.measured, comparison.plan
    return (
        f"{plan.schedule}, step {measured.step.step}: planned {milliseconds(plan.makespan_seconds)}, "
        f"measured {milliseconds(measured.makespan_seconds)} from the first action to the last computation"
    )
