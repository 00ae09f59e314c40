"""A timeline as SVG: one lane a rank, one box an action with its microbatch number, coloured by op and shaded by chunk."""

from __future__ import annotations

from html import escape

from megapipe.schedule.action import COMPUTE_OPS, SEND_OPS, Action, Op
from megapipe.schedule.simulate import Timeline

# op -> (fill of the first chunk, fill of the last chunk, text colour); chunks between lie between
COLOURS: dict[Op, tuple[str, str, str]] = {
    Op.F: ("#4c86c6", "#b9d3ee", "#0b2239"),
    Op.B: ("#4fa37a", "#bfe3cf", "#0c2b1c"),
    Op.I: ("#e0a33f", "#f6dfb3", "#3a2705"),
    Op.W: ("#8f6bb3", "#d9c9e8", "#241236"),
    Op.REDUCE_GRAD: ("#b9534c", "#b9534c", "#ffffff"),
}
NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "input gradient", Op.W: "weight gradient", Op.REDUCE_GRAD: "gradient reduction"}
_STROKE = (
    'stroke="#666666" stroke-width="0.7"',
    'stroke="#666666" stroke-width="0.7" stroke-opacity="0.3"',
)  # to a neighbour, across lanes
LANE, GAP, LEFT, TOP, STRIP = 26, 8, 64, 44, 5  # heights, left margin, title, strip under a lane for reductions; all in px


def svg(timeline: Timeline, width: int = 1200) -> str:
    """The drawing as text, `width` px wide. Every box has a tooltip with action, start and end; messages are lines if they take time."""
    schedule = timeline.schedule
    scale = (width - LEFT - 16) / (timeline.makespan_seconds or 1.0)
    height = TOP + schedule.num_ranks * (LANE + GAP) + 52
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="bold">{escape(str(schedule))}</text>',
        f'<text x="{LEFT}" y="34" fill="#555555">{escape(_caption(timeline))}</text>',
    ]
    for rank in range(schedule.num_ranks):
        parts += _lane(timeline, rank, scale, width)
    parts += _messages(timeline, scale)
    parts += _axis(timeline, scale, TOP + schedule.num_ranks * (LANE + GAP))
    parts += _legend(timeline, height - 14)
    return "\n".join([*parts, "</svg>\n"])


def _caption(timeline: Timeline) -> str:
    return (
        f"step {timeline.makespan_seconds:.4g} s, bubble share {timeline.barrier_bubble.share:.2%} with a barrier, "
        f"{timeline.chained_bubble.share:.2%} chained, peak of live chunks {max(timeline.peak_live_chunks)}"
    )


def _top(rank: int) -> int:
    return TOP + rank * (LANE + GAP)


def _lane(timeline: Timeline, rank: int, scale: float, width: int) -> list[str]:
    top = _top(rank)
    parts = [
        f'<text x="{LEFT - 8}" y="{top + LANE / 2 + 4}" text-anchor="end">rank {rank}</text>',
        f'<rect x="{LEFT}" y="{top}" width="{width - LEFT - 16}" height="{LANE}" fill="#f1f1f1"/>',
    ]
    row = zip(timeline.schedule.rows[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
    for action, start, end in row:
        if action.op in COMPUTE_OPS or (action.op is Op.REDUCE_GRAD and end > start):
            parts.append(_box(timeline, rank, action, start, end, scale))
    return parts


def _box(timeline: Timeline, rank: int, action: Action, start: float, end: float, scale: float) -> str:
    top, height = (_top(rank) + LANE, STRIP) if action.op is Op.REDUCE_GRAD else (_top(rank), LANE)
    x, w = LEFT + start * scale, (end - start) * scale
    stages = timeline.schedule.placement.stages_of(rank)
    first, last, ink = COLOURS[action.op]
    fill = _between(first, last, stages.index(action.stage) / max(1, len(stages) - 1))
    title = f"<title>{action}: {start:.6g} .. {end:.6g} s</title>"
    box = f'<rect x="{x:.2f}" y="{top}" width="{w:.2f}" height="{height}" fill="{fill}" stroke="#ffffff" stroke-width="0.6">{title}</rect>'
    label = "" if action.microbatch is None else str(action.microbatch)
    if not label or w < 6.5 * len(label) + 1:
        return box
    return (
        box + f'<text x="{x + w / 2:.2f}" y="{top + LANE / 2 + 4}" text-anchor="middle" fill="{ink}" pointer-events="none">{label}</text>'
    )


def _between(first: str, last: str, part: float) -> str:
    channels = ((int(first[i : i + 2], 16), int(last[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in channels)


def _messages(timeline: Timeline, scale: float) -> list[str]:
    """A line from the sender's lane to the receiver's for every message that takes time."""
    lines = []
    placement = timeline.schedule.placement
    for rank, row in enumerate(timeline.schedule.rows):
        for action, start, end in zip(row, timeline.starts[rank], timeline.ends[rank], strict=True):
            if action.op in SEND_OPS and end > start:
                peer = placement.rank_of(action.stage + (1 if action.op is Op.SEND_F else -1), action.microbatch or 0)
                ends = (_top(rank) + LANE, _top(peer)) if peer > rank else (_top(rank), _top(peer) + LANE)
                x1, x2 = LEFT + start * scale, LEFT + end * scale
                lines.append(f'<line x1="{x1:.2f}" y1="{ends[0]}" x2="{x2:.2f}" y2="{ends[1]}" {_STROKE[abs(peer - rank) > 1]}/>')
    return lines


def _axis(timeline: Timeline, scale: float, y: int) -> list[str]:
    step = _round_step(timeline.makespan_seconds / 10)
    ticks = range(int(timeline.makespan_seconds / step) + 1) if step else range(0)
    labels = [(LEFT + tick * step * scale, f"{tick * step:.4g}" + ("" if tick else " s")) for tick in ticks]
    return [f'<text x="{x:.2f}" y="{y + 10}" text-anchor="middle" fill="#555555">{label}</text>' for x, label in labels]


def _round_step(seconds: float) -> float:
    """The smallest of 1, 2, 5 x 10^n that is not below `seconds`."""
    if seconds <= 0:
        return 0.0
    power = 10.0 ** (len(f"{seconds:.0f}") - 1 if seconds >= 1 else -len(f"{1 / seconds:.0f}"))
    return next(step * power for step in (1, 2, 5, 10, 20, 50) if step * power >= seconds)


def _legend(timeline: Timeline, y: int) -> list[str]:
    parts, x = [], LEFT
    chunks = timeline.schedule.placement.num_chunks
    for op in (op for op in COLOURS if op in timeline.schedule.ops):
        if op is Op.REDUCE_GRAD and not any(timeline.costs.seconds.get((s, op)) for s in range(timeline.schedule.num_stages)):
            continue
        shades = 1 if op is Op.REDUCE_GRAD else chunks
        for chunk in range(shades):
            fill = _between(*COLOURS[op][:2], chunk / max(1, chunks - 1))
            parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{fill}"/>')
            x += 14
        name = NAMES[op] + (f", chunk 0 .. {chunks - 1}" if shades > 1 else "")
        parts.append(f'<text x="{x + 4}" y="{y}">{name}</text>')
        x += 30 + 7 * len(name)
    parts.append(f'<text x="{x}" y="{y}" fill="#555555">numbers: microbatches; grey: idle</text>')
    return parts
