"""A timeline as text for a terminal, or as SVG: one lane per rank, one box per action with its microbatch.

Boxes are coloured by op and shaded by chunk. The two halves of an overlapped pair share one box, the forward on top. A
filled curve under each lane shows the number of live chunks, and a line the number of inputs that have arrived but are
not used yet. With more than LARGE boxes, a lane is thinner and draws all boxes of a colour as one path without
tooltips, so that a browser can still show 64 ranks with 512 microbatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise

from megapipe.schedule.action import COMPUTE_OPS, SEND_OPS, Action, Op
from megapipe.schedule.lifetimes import Held, peak_held
from megapipe.schedule.placement import Placement
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.simulate import Timeline, live_curve, waiting_message_curves

# op -> (fill of the first chunk, fill of the last chunk, text colour); fills of other chunks are interpolated
COLOURS: dict[Op, tuple[str, str, str]] = {
    Op.F: ("#4c86c6", "#b9d3ee", "#0b2239"),
    Op.B: ("#4fa37a", "#bfe3cf", "#0c2b1c"),
    Op.I: ("#e0a33f", "#f6dfb3", "#3a2705"),
    Op.W: ("#8f6bb3", "#d9c9e8", "#241236"),
    Op.REDUCE_GRAD: ("#b9534c", "#b9534c", "#ffffff"),
    Op.UPDATE: ("#b9534c", "#b9534c", "#ffffff"),
    Op.UNSHARD: ("#2f8f9d", "#2f8f9d", "#ffffff"),
}
NAMES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.REDUCE_GRAD: "gradient reduction",
    Op.UPDATE: "update",
    Op.UNSHARD: "gather of weights",
}
LEFT, RIGHT, TOP, STRIP = 64, 72, 44, 5  # px: margins, title, strip under a lane for gathers and reductions
ON_NETWORK = {Op.UNSHARD: "U", Op.REDUCE_GRAD: "R"}  # in the strip, and in the second line of a rank as text
LARGE = 12_000  # boxes
LIVE, WAITING = "#c9ccd6", "#7a4a1e"

Curve = Sequence[tuple[float, float]]  # (seconds, level from then on)


def grid_text(timeline: Timeline, max_columns: int = 160) -> str:
    """Return one line per rank, its computation drawn to scale.

    A cell is as long as the shortest action, or longer if the text would exceed max_columns; actions that share a cell
    then hide each other, which the last line says. A cell shows op and microbatch (F3, B0; with several stages per rank
    also a letter for the chunk: F3a, F3b; with slices also their number: F3.1), "=" where an action continues, or "."
    where the rank is idle. Where gathers or reductions take time, a second line shows them: U and R with the stage.
    """
    schedule = timeline.schedule
    boxes: list[list[tuple[str, float, float]]] = [[] for _ in schedule.rows]
    network: list[list[tuple[str, float, float]]] = [[] for _ in schedule.rows]
    for rank, row in enumerate(schedule.rows):
        stages = schedule.placement.stages_of(rank)
        for action, start, end in zip(row, timeline.starts[rank], timeline.ends[rank], strict=True):
            if action.op in COMPUTE_OPS:
                several = schedule.placement.num_chunks > 1
                letter = chr(ord("a") + stages.index(action.stage) % 26) if several else ""
                boxes[rank].append((f"{action.op.value}{number_text(schedule, action)}{letter}", start, end))
            elif action.op in ON_NETWORK and end > start:
                network[rank].append((f"{ON_NETWORK[action.op]}{action.stage}", start, end))
    seconds = [end - start for row in boxes for _, start, end in row if end > start]
    if not seconds:
        return "\n".join(f"rank {rank}:" for rank in range(len(boxes)))
    width = 1 + max(len(label) for row in (*boxes, *network) for label, _, _ in row)
    title = max(len(f"rank {len(boxes) - 1} "), len("network ") * any(network))
    unit = max(min(seconds), timeline.makespan_seconds / max(1, (max_columns - title) // width))
    lines = []
    for name, labelled in (
        (name, row)
        for rank, (computed, sent) in enumerate(zip(boxes, network, strict=True))
        for name, row in ((f"rank {rank}", computed), ("network", sent))
        if row or row is computed
    ):
        cells = ["."] * max(round(timeline.makespan_seconds / unit), 1)
        for label, begin, end in labelled:
            first, after = min(round(begin / unit), len(cells) - 1), min(round(end / unit), len(cells))
            cells[first:after] = [label] + ["="] * (after - first - 1) if after > first else []
        lines.append(name.ljust(title) + "".join(cell.ljust(width) for cell in cells).rstrip())
    missing = "; shorter actions may be missing" if unit > min(seconds) else ""
    return "\n".join([*lines, f"one cell: {unit:.4g} s{missing}"])


def number_text(schedule: Schedule, action: Action) -> str:
    """Return the microbatch of an action, and its slice if microbatches have slices: 3, or 3.1."""
    return schedule.text(action).partition(f"{action.stage}{action.op.value}")[2]


class _Drawing:
    """A timeline with the layout of its picture in px."""

    def __init__(self, timeline: Timeline, width: int | None) -> None:
        self.timeline, self.schedule = timeline, timeline.schedule
        self.boxes = [
            [
                (action, start, end)
                for action, start, end in zip(row, timeline.starts[rank], timeline.ends[rank], strict=True)
                if action.op in COMPUTE_OPS or (action.op in COLOURS and end > start)
            ]
            for rank, row in enumerate(timeline.schedule.rows)
        ]
        spans = sorted(end - start for row in self.boxes for _, start, end in row if end > start)
        makespan = timeline.makespan_seconds or 1.0
        if width is None:  # two digits fit into three of four boxes
            narrow = spans[len(spans) // 4] if spans else makespan
            width = min(max(1200, LEFT + RIGHT + round(15 * makespan / narrow)), 6000)
        self.width = width
        self.scale = (width - LEFT - RIGHT) / makespan  # px per second
        self.is_large = len(spans) > LARGE
        self.lane, self.curve, self.gap = (10, 7, 1) if self.is_large else (26, 14, 6)

    def top(self, rank: int) -> int:
        return TOP + rank * (self.lane + self.curve + self.gap)

    def x(self, seconds: float) -> float:
        return LEFT + seconds * self.scale

    def takes_time(self, op: Op) -> bool:
        """Return True if the op has a cost on any stage."""
        return any(self.timeline.costs.seconds.get((stage, op)) for stage in range(self.schedule.num_stages))


def svg(timeline: Timeline, width: int | None = None) -> str:
    """Return the drawing, `width` px wide (None: wide enough for the microbatch numbers).

    Messages that take time are lines, boxes have tooltips with action, start and end; large timelines have neither.
    """
    drawing, makespan = _Drawing(timeline, width), timeline.makespan_seconds
    bottom = drawing.top(drawing.schedule.num_ranks)
    height = bottom + 52
    caption = (
        f"step {makespan:.4g} s, bubble share {timeline.barrier_bubble.share:.2%} with a barrier, "
        f"{timeline.chained_bubble.share:.2%} chained, peak of live chunks {max(timeline.peak_live_chunks)}"
        + (f", each of one slice of {drawing.schedule.num_slices}" if drawing.schedule.num_slices > 1 else "")
        + _sharding(drawing.schedule)
        + ("" if drawing.schedule.is_synchronous else ", NOT synchronous")
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{drawing.width}" height="{height}" '
        f'viewBox="0 0 {drawing.width} {height}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{drawing.width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="bold">{escape(str(drawing.schedule))}</text>',
        f'<text x="{LEFT}" y="34" fill="#555555">{escape(caption)}</text>',
    ]
    for rank, waiting in enumerate(waiting_message_curves(timeline)):
        parts += [*_lane(drawing, rank), *_curves(drawing, rank, waiting)]
    if not drawing.is_large:
        parts += _messages(drawing)
    if makespan > 0:
        step = round_step(makespan / 10)
        for tick in range(int(makespan / step) + 1):
            place = f'x="{drawing.x(tick * step):.2f}" y="{bottom + 10}"'
            label = f"{tick * step:.4g}" + ("" if tick else " s")
            parts.append(f'<text {place} text-anchor="middle" fill="#555555">{label}</text>')
    y = height - 14
    ops = [op for op in COLOURS if op in drawing.schedule.ops and (op in COMPUTE_OPS or drawing.takes_time(op))]
    shown, x = legend(ops, drawing.schedule.placement.num_chunks, LEFT, y)
    parts += shown
    if drawing.schedule.has_backward:
        parts.append(f'<rect x="{x:g}" y="{y - 10}" width="12" height="12" fill="{LIVE}"/>')
        parts.append(f'<path stroke="{WAITING}" d="M{x + 90:g} {y - 4}h12"/>')
        parts.append(
            f'<text x="{x + 16:g}" y="{y}">live chunks</text><text x="{x + 106:g}" y="{y}">inputs waiting</text>'
        )
        x += 210
    numbers = "microbatches and their slices" if drawing.schedule.num_slices > 1 else "microbatches"
    note, place = f"numbers: {numbers}; grey: idle", f'x="{x:g}" y="{y}"'
    if x + 6 * len(note) > drawing.width:  # no room after the legend: beside the title
        place = f'x="{drawing.width - RIGHT:g}" y="18" text-anchor="end"'
    parts.append(f'<text {place} fill="#555555">{note}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _sharding(schedule: Schedule) -> str:
    """Return the gathers and reductions of the rank with the most, as text; nothing without gathers."""
    if Op.UNSHARD not in schedule.ops:
        return ""
    counts = [Counter(op for _, op, _ in row) for row in schedule.rows]
    gathers, reductions = (max(of_rank[op] for of_rank in counts) for op in ON_NETWORK)
    gathered = max(int(peak_held(row, {Held.WEIGHTS: 1})) for row in schedule.rows)
    return f", {gathers} gathers and {reductions} reductions a rank, at most {gathered} stages gathered"


def _lane(drawing: _Drawing, rank: int) -> Iterator[str]:
    """Yield a rank's name, its grey lane and its boxes."""
    top, lane, row = drawing.top(rank), drawing.lane, drawing.schedule.rows[rank]
    width = drawing.timeline.makespan_seconds * drawing.scale
    size = ' font-size="9"' if drawing.is_large else ""
    yield f'<text x="{LEFT - 8}" y="{top + lane / 2 + 4}" text-anchor="end"{size}>rank {rank}</text>'
    yield f'<rect x="{LEFT}" y="{top}" width="{width:.2f}" height="{lane}" fill="#f1f1f1"/>'
    # 0 for the forward of each overlapped pair, 1 for its backward
    halves = {row[slot + half + 1]: half for slot, pair in enumerate(row) if pair.op is Op.OVERLAP for half in (0, 1)}
    merged = []
    for action, start, end in drawing.boxes[rank]:
        y, height = float(top), float(lane)
        if action.op in ON_NETWORK:
            y, height = top + lane, STRIP
        elif action in halves:
            y, height = top + halves[action] * lane / 2, lane / 2
        x, w = drawing.x(start), (end - start) * drawing.scale
        colour = fill(drawing.schedule.placement, rank, action)
        if drawing.is_large:
            merged.append((colour, x, y, w, height))
            continue
        schedule = drawing.schedule
        label, title = number_text(schedule, action), f"{schedule.text(action)}: {start:.6g} .. {end:.6g} s"
        yield box((x, y, w, height), colour, action.op, label, title)
    for colour, path in paths_by_fill(merged).items():
        yield f'<path fill="{colour}" stroke="#ffffff" stroke-width="0.2" d="{path}"/>'


def box(place: tuple[float, float, float, float], colour: str, op: Op, label: str, title: str) -> str:
    """Return the box of one action at (x, y, width, height), with its label if that fits. title: shown on hovering."""
    x, y, width, height = place
    text = ""
    if label and width >= 6.5 * len(label) + 1 and height > STRIP:
        style = f'text-anchor="middle" fill="{COLOURS[op][2]}" pointer-events="none"'
        text = f'<text x="{x + width / 2:.2f}" y="{y + height / 2 + 4:g}" {style}>{label}</text>'
    return (
        f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{colour}" '
        f'stroke="#ffffff" stroke-width="0.6"><title>{title}</title></rect>{text}'
    )


def _curves(drawing: _Drawing, rank: int, waiting: Curve) -> list[str]:
    """Return a filled curve of live chunks with its peak, and a line of waiting inputs; all ranks share one scale."""
    live = live_curve(drawing.timeline, rank)
    most = max(drawing.timeline.peak_live_chunks, default=0)
    if not live or not most:
        return []
    base = drawing.top(rank) + drawing.lane + drawing.curve
    if not drawing.is_large and any(map(drawing.takes_time, ON_NETWORK)):
        base += STRIP
    unit = (drawing.curve - 1) / max(most, *(count for _, count in waiting), 1)
    parts = [f'<path fill="{LIVE}" d="{_steps(drawing, live, base, unit)}V{base}Z"/>']
    if any(count for _, count in waiting):
        path = _steps(drawing, waiting, base, unit)
        parts.append(f'<path fill="none" stroke="{WAITING}" stroke-width="0.8" d="{path}"/>')
    peak = max(count for _, count in live)
    x, size = drawing.x(drawing.timeline.makespan_seconds) + 5, 8 if drawing.is_large else 10
    return [*parts, f'<text x="{x:.1f}" y="{base}" font-size="{size}" fill="#555555">peak {peak:g}</text>']


def _steps(drawing: _Drawing, curve: Curve, base: int, unit: float) -> str:
    """Return a step curve as a path; steps narrower than half a pixel are merged at their highest level."""
    x, last = drawing.x, curve[-1][0]
    parts = [f"M{x(curve[0][0]):.1f} {base}"]
    highest, drawn = 0.0, x(curve[0][0])
    for (time, level), (following, _) in pairwise([*curve, (last + 1.0 / drawing.scale, 0.0)]):
        highest = max(highest, level)
        if x(following) - drawn >= 0.5 or following > last:
            parts.append(f"H{max(drawn, min(x(time), x(following))):.1f}V{base - highest * unit:.1f}")
            drawn, highest = x(following), 0.0
    return "".join([*parts, f"H{x(last):.1f}"])


def _messages(drawing: _Drawing) -> Iterator[str]:
    """Yield a line from the sender's lane to the receiver's for every message that takes time."""
    timeline, lane = drawing.timeline, drawing.lane
    for rank, row in enumerate(drawing.schedule.rows):
        for action, start, end in zip(row, timeline.starts[rank], timeline.ends[rank], strict=True):
            if action.op in SEND_OPS and end > start:
                stage = action.stage + (1 if action.op is Op.SEND_F else -1)
                peer = drawing.schedule.placement.rank_of(stage, action.microbatch or 0)
                y1, y2 = drawing.top(rank), drawing.top(peer)
                y1, y2 = (y1 + lane, y2) if peer > rank else (y1, y2 + lane)
                place = f'x1="{drawing.x(start):.2f}" y1="{y1}" x2="{drawing.x(end):.2f}" y2="{y2}"'
                faint = ' stroke-opacity="0.3"' if abs(peer - rank) > 1 else ""  # it crosses other lanes
                yield f'<line {place} stroke="#666666" stroke-width="0.7"{faint}/>'


def fill(placement: Placement, rank: int, action: Action) -> str:
    """Return the colour of an action's box, by its op and by the chunk that its stage is on the rank."""
    stages = placement.stages_of(rank)
    return shade(action.op, stages.index(action.stage) / max(1, len(stages) - 1))


def shade(op: Op, part: float) -> str:
    """Return the op's colour at a part from 0 (first chunk) to 1 (last chunk)."""
    first, last, _ = COLOURS[op]
    channels = ((int(first[i : i + 2], 16), int(last[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in channels)


def paths_by_fill(boxes: Iterable[tuple[str, float, float, float, float]]) -> dict[str, str]:
    """Return all boxes of a colour as one path, by colour. boxes: (colour, x, y, width, height)."""
    paths: dict[str, list[str]] = {}
    for colour, x, y, width, height in boxes:
        paths.setdefault(colour, []).append(f"M{x:.1f} {y:g}h{width:.1f}v{height:g}h{-width:.1f}z")
    return {colour: "".join(parts) for colour, parts in paths.items()}


def legend(ops: Iterable[Op], num_chunks: int, x: float, y: int, letter: float = 7) -> tuple[list[str], float]:
    """Return the colours and names of the ops from x at baseline y, and the x after them. letter: its width in px."""
    parts = []
    for op in ops:
        shades = num_chunks if op in COMPUTE_OPS else 1
        for chunk in range(shades):
            colour = shade(op, chunk / max(1, num_chunks - 1))
            parts.append(f'<rect x="{x:g}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
            x += 14
        name = NAMES[op] + (f", chunk 0 .. {num_chunks - 1}" if shades > 1 else "")
        parts.append(f'<text x="{x + 4:g}" y="{y}">{name}</text>')
        x += 30 + letter * len(name)
    return parts, x


def round_step(value: float) -> float:
    """Return the smallest of 1, 2, 5 x 10^n that is at least `value`, which is positive."""
    power = 1e-12
    while power * 10 < value:
        power *= 10
    return next(float(f"{step * power:.6g}") for step in (1, 2, 5, 10, 20) if step * power >= value * (1 - 1e-9))
