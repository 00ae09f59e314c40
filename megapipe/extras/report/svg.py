"""A timeline as SVG: one lane per rank, one box per action with its microbatch, coloured by op and shaded by chunk.

The two halves of an overlapped pair share one box, the forward on top. A filled curve under each lane shows the number
of live chunks, and a line the number of inputs that have arrived but are not used yet. With more than LARGE boxes, a
lane is thinner and draws all boxes of a colour as one path without tooltips, so that a browser can still show 64 ranks
with 512 microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from megapipe.schedule.action import COMPUTE_OPS, SEND_OPS, Action, Op
from megapipe.schedule.simulate import Timeline, live_curve, waiting_message_curves

# op -> (fill of the first chunk, fill of the last chunk, text colour); fills of other chunks are interpolated
COLOURS: dict[Op, tuple[str, str, str]] = {
    Op.F: ("#4c86c6", "#b9d3ee", "#0b2239"),
    Op.B: ("#4fa37a", "#bfe3cf", "#0c2b1c"),
    Op.I: ("#e0a33f", "#f6dfb3", "#3a2705"),
    Op.W: ("#8f6bb3", "#d9c9e8", "#241236"),
    Op.REDUCE_GRAD: ("#b9534c", "#b9534c", "#ffffff"),
    Op.UPDATE: ("#b9534c", "#b9534c", "#ffffff"),
}
NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "input gradient", Op.W: "weight gradient"} | {
    Op.REDUCE_GRAD: "gradient reduction",
    Op.UPDATE: "update",
}
_STROKE = (
    'stroke="#666666" stroke-width="0.7"',  # message to the lane above or below
    'stroke="#666666" stroke-width="0.7" stroke-opacity="0.3"',  # message that crosses other lanes
)
LEFT, RIGHT, TOP, STRIP = 64, 72, 44, 5  # px: margins, title, strip under a lane for reductions
LARGE = 12_000  # boxes
LIVE, WAITING = "#c9ccd6", "#7a4a1e"


@dataclass(frozen=True)
class _Layout:
    """The layout in px."""

    width: int
    lane: int
    curve: int
    gap: int
    scale: float  # px per second
    is_large: bool

    @staticmethod
    def of(timeline: Timeline, width: int | None) -> _Layout:
        boxes = [(end - start) for _, start, end in _all_boxes(timeline) if end > start]
        is_large = len(boxes) > LARGE
        span = timeline.makespan_seconds or 1.0
        if width is None:  # two digits fit into three of four boxes
            narrow = sorted(boxes)[len(boxes) // 4] if boxes else span
            width = min(max(1200, LEFT + RIGHT + round(15 * span / narrow)), 6000)
        lane, curve, gap = (10, 7, 1) if is_large else (26, 14, 6)
        return _Layout(width, lane, curve, gap, (width - LEFT - RIGHT) / span, is_large)

    def top(self, rank: int) -> int:
        return TOP + rank * (self.lane + self.curve + self.gap)

    def x(self, seconds: float) -> float:
        return LEFT + seconds * self.scale


def svg(timeline: Timeline, width: int | None = None) -> str:
    """Return the drawing, `width` px wide (None: wide enough for the microbatch numbers).

    Messages that take time are drawn as lines. Boxes have tooltips with action, start and end. Large timelines have
    neither.
    """
    schedule = timeline.schedule
    layout = _Layout.of(timeline, width)
    height = layout.top(schedule.num_ranks) + 52
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{layout.width}" height="{height}" '
        f'viewBox="0 0 {layout.width} {height}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{layout.width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="bold">{escape(str(schedule))}</text>',
        f'<text x="{LEFT}" y="34" fill="#555555">{escape(_caption(timeline))}</text>',
    ]
    most = max(timeline.peak_live_chunks, default=0)
    for rank, waiting in enumerate(waiting_message_curves(timeline)):
        parts += _lane(timeline, rank, layout)
        parts += _curves(timeline, rank, waiting, layout, most)
    if not layout.is_large:
        parts += _messages(timeline, layout)
    parts += _axis(timeline, layout, layout.top(schedule.num_ranks))
    parts += _legend(timeline, height - 14)
    return "\n".join([*parts, "</svg>\n"])


def _caption(timeline: Timeline) -> str:
    return (
        f"step {timeline.makespan_seconds:.4g} s, bubble share {timeline.barrier_bubble.share:.2%} with a barrier, "
        f"{timeline.chained_bubble.share:.2%} chained, peak of live chunks {max(timeline.peak_live_chunks)}"
        + ("" if timeline.schedule.is_synchronous else ", NOT synchronous")
    )


def _all_boxes(timeline: Timeline) -> Iterator[tuple[Action, float, float]]:
    for rank in range(timeline.schedule.num_ranks):
        yield from _boxes(timeline, rank)


def _boxes(timeline: Timeline, rank: int) -> Iterator[tuple[Action, float, float]]:
    for action, start, end in zip(
        timeline.schedule.rows[rank], timeline.starts[rank], timeline.ends[rank], strict=True
    ):
        if action.op in COMPUTE_OPS or (action.op in COLOURS and end > start):
            yield action, start, end


def _lane(timeline: Timeline, rank: int, layout: _Layout) -> list[str]:
    top = layout.top(rank)
    right = LEFT + timeline.makespan_seconds * layout.scale
    size = ' font-size="9"' if layout.is_large else ""
    parts = [
        f'<text x="{LEFT - 8}" y="{top + layout.lane / 2 + 4}" text-anchor="end"{size}>rank {rank}</text>',
        f'<rect x="{LEFT}" y="{top}" width="{right - LEFT:.2f}" height="{layout.lane}" fill="#f1f1f1"/>',
    ]
    pairs = _pair_halves(timeline, rank)
    paths: dict[str, list[str]] = {}
    for action, start, end in _boxes(timeline, rank):
        y, height = _place(action, top, layout.lane, pairs)
        fill = _fill(timeline, rank, action)
        if layout.is_large:
            w = (end - start) * layout.scale
            paths.setdefault(fill, []).append(f"M{layout.x(start):.1f} {y:g}h{w:.1f}v{height:g}h{-w:.1f}z")
        else:
            parts.append(_box(action, start, end, y, height, fill, layout))
    parts += [
        f'<path fill="{fill}" stroke="#ffffff" stroke-width="0.2" d="{"".join(steps)}"/>'
        for fill, steps in paths.items()
    ]
    return parts


def _pair_halves(timeline: Timeline, rank: int) -> dict[Action, int]:
    """Return 0 for the forward of each overlapped pair and 1 for its backward; other actions are missing."""
    row = timeline.schedule.rows[rank]
    return {row[slot + half + 1]: half for slot, action in enumerate(row) if action.op is Op.OVERLAP for half in (0, 1)}


def _place(action: Action, top: int, lane: int, pairs: dict[Action, int]) -> tuple[float, float]:
    """Return y and height of a box."""
    if action.op is Op.REDUCE_GRAD:
        return top + lane, STRIP
    if action in pairs:
        return top + pairs[action] * lane / 2, lane / 2
    return top, lane


def _fill(timeline: Timeline, rank: int, action: Action) -> str:
    stages = timeline.schedule.placement.stages_of(rank)
    return _between(*COLOURS[action.op][:2], stages.index(action.stage) / max(1, len(stages) - 1))


def _box(action: Action, start: float, end: float, y: float, height: float, fill: str, layout: _Layout) -> str:
    x, w = layout.x(start), (end - start) * layout.scale
    title = f"<title>{action}: {start:.6g} .. {end:.6g} s</title>"
    box = (
        f'<rect x="{x:.2f}" y="{y:g}" width="{w:.2f}" height="{height:g}" fill="{fill}" '
        f'stroke="#ffffff" stroke-width="0.6">{title}</rect>'
    )
    label = "" if action.microbatch is None else str(action.microbatch)
    if not label or w < 6.5 * len(label) + 1:
        return box
    style = f'text-anchor="middle" fill="{COLOURS[action.op][2]}" pointer-events="none"'
    return box + f'<text x="{x + w / 2:.2f}" y="{y + height / 2 + 4:g}" {style}>{label}</text>'


def _curves(
    timeline: Timeline, rank: int, waiting: Sequence[tuple[float, float]], layout: _Layout, most: int
) -> list[str]:
    """Return a filled curve of live chunks with its peak, and a line of waiting inputs; all ranks share one scale."""
    live = live_curve(timeline, rank)
    if not live or not most:
        return []
    base = (
        layout.top(rank)
        + layout.lane
        + layout.curve
        + (STRIP if _has_reductions(timeline) and not layout.is_large else 0)
    )
    unit = (layout.curve - 1) / max(most, *(count for _, count in waiting), 1)
    parts = [f'<path fill="{LIVE}" d="{_steps(live, base, unit, layout)}V{base}Z"/>']
    if any(count for _, count in waiting):
        parts.append(
            f'<path fill="none" stroke="{WAITING}" stroke-width="0.8" d="{_steps(waiting, base, unit, layout)}"/>'
        )
    peak = max(count for _, count in live)
    x, size = LEFT + timeline.makespan_seconds * layout.scale + 5, 8 if layout.is_large else 10
    return [*parts, f'<text x="{x:.1f}" y="{base}" font-size="{size}" fill="#555555">peak {peak:g}</text>']


def _has_reductions(timeline: Timeline) -> bool:
    return any(timeline.costs.seconds.get((stage, Op.REDUCE_GRAD)) for stage in range(timeline.schedule.num_stages))


def _steps(curve: Sequence[tuple[float, float]], base: int, unit: float, layout: _Layout) -> str:
    """Return a step curve as a path; steps narrower than half a pixel are merged at their highest level."""
    parts = [f"M{layout.x(curve[0][0]):.1f} {base}"]
    highest, drawn = 0.0, layout.x(curve[0][0])
    for (time, level), (following, _) in pairwise([*curve, (curve[-1][0] + 1.0 / layout.scale, 0.0)]):
        highest = max(highest, level)
        if layout.x(following) - drawn >= 0.5 or following > curve[-1][0]:
            parts.append(f"H{max(drawn, min(layout.x(time), layout.x(following))):.1f}V{base - highest * unit:.1f}")
            drawn, highest = layout.x(following), 0.0
    return "".join([*parts, f"H{layout.x(curve[-1][0]):.1f}"])


def _between(first: str, last: str, part: float) -> str:
    channels = ((int(first[i : i + 2], 16), int(last[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in channels)


def _messages(timeline: Timeline, layout: _Layout) -> list[str]:
    """Return a line from the sender's lane to the receiver's for every message that takes time."""
    lines = []
    placement = timeline.schedule.placement
    for rank, row in enumerate(timeline.schedule.rows):
        for action, start, end in zip(row, timeline.starts[rank], timeline.ends[rank], strict=True):
            if action.op in SEND_OPS and end > start:
                peer = placement.rank_of(action.stage + (1 if action.op is Op.SEND_F else -1), action.microbatch or 0)
                lane = layout.lane
                ends = (
                    (layout.top(rank) + lane, layout.top(peer))
                    if peer > rank
                    else (layout.top(rank), layout.top(peer) + lane)
                )
                x1, x2 = layout.x(start), layout.x(end)
                lines.append(
                    f'<line x1="{x1:.2f}" y1="{ends[0]}" x2="{x2:.2f}" y2="{ends[1]}" {_STROKE[abs(peer - rank) > 1]}/>'
                )
    return lines


def _axis(timeline: Timeline, layout: _Layout, y: int) -> list[str]:
    step = _round_step(timeline.makespan_seconds / 10)
    ticks = range(int(timeline.makespan_seconds / step) + 1) if step else range(0)
    labels = [(layout.x(tick * step), f"{tick * step:.4g}" + ("" if tick else " s")) for tick in ticks]
    return [f'<text x="{x:.2f}" y="{y + 10}" text-anchor="middle" fill="#555555">{label}</text>' for x, label in labels]


def _round_step(seconds: float) -> float:
    """Return the smallest of 1, 2, 5 x 10^n that is at least `seconds`."""
    if seconds <= 0:
        return 0.0
    power = 10.0 ** (len(f"{seconds:.0f}") - 1 if seconds >= 1 else -len(f"{1 / seconds:.0f}"))
    return next(step * power for step in (1, 2, 5, 10, 20, 50) if step * power >= seconds)


def _legend(timeline: Timeline, y: int) -> list[str]:
    parts, x = [], LEFT
    chunks = timeline.schedule.placement.num_chunks
    for op in (op for op in COLOURS if op in timeline.schedule.ops):
        if op not in COMPUTE_OPS and not any(
            timeline.costs.seconds.get((s, op)) for s in range(timeline.schedule.num_stages)
        ):
            continue
        shades = chunks if op in COMPUTE_OPS else 1
        for chunk in range(shades):
            fill = _between(*COLOURS[op][:2], chunk / max(1, chunks - 1))
            parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{fill}"/>')
            x += 14
        name = NAMES[op] + (f", chunk 0 .. {chunks - 1}" if shades > 1 else "")
        parts.append(f'<text x="{x + 4}" y="{y}">{name}</text>')
        x += 30 + 7 * len(name)
    if timeline.schedule.has_backward:
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{LIVE}"/>')
        parts.append(f'<path stroke="{WAITING}" d="M{x + 90} {y - 4}h12"/>')
        parts.append(f'<text x="{x + 16}" y="{y}">live chunks</text><text x="{x + 106}" y="{y}">inputs waiting</text>')
        x += 210
    parts.append(f'<text x="{x}" y="{y}" fill="#555555">numbers: microbatches; grey: idle</text>')
    return parts
