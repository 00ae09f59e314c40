"""A timeline as text for a terminal, or as SVG: one lane per rank, one box per action with its microbatch.

Boxes are coloured by op and shaded by chunk. The two halves of an overlapped pair share one box, the forward on top. A
filled curve under each lane shows the number of live chunks, and a line the number of inputs that have arrived but are
not used yet. With more than LARGE boxes, a lane is thinner and draws all boxes of a colour as one path without
tooltips, so that a browser can still show 64 ranks with 512 microbatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from textwrap import wrap
from typing import NamedTuple

from megapipe.extras.report.curves import live_curve, waiting_message_curves
from megapipe.extras.report.drawing import (
    LETTER,
    SOFT,
    element,
    entry,
    legend,
    line,
    merged,
    paper,
    rect,
    round_step,
    squares,
    text,
)
from megapipe.schedule.action import COMPUTE_OPS, SEND_OPS, Action, Op
from megapipe.schedule.experts import exposures
from megapipe.schedule.lifetimes import Held, peak_held
from megapipe.schedule.parts import Part, Parts
from megapipe.schedule.placement import Placement
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.simulate import Timeline
from megapipe.schedule.stream import steady


class OpStyle(NamedTuple):
    """Name and colours of an op: fills of the first and last chunk, between which others are interpolated; text."""

    name: str
    first: str
    last: str
    ink: str


STYLES = {
    Op.F: OpStyle("forward", "#4c86c6", "#b9d3ee", "#0b2239"),
    Op.B: OpStyle("backward", "#4fa37a", "#bfe3cf", "#0c2b1c"),
    Op.I: OpStyle("input gradient", "#e0a33f", "#f6dfb3", "#3a2705"),
    Op.W: OpStyle("weight gradient", "#8f6bb3", "#d9c9e8", "#241236"),
    Op.RECOMPUTE: OpStyle("recomputed forward", "#7c8796", "#bcc6d2", "#1a2027"),
    Op.REDUCE_GRAD: OpStyle("gradient reduction", "#b9534c", "#b9534c", "#ffffff"),
    Op.UPDATE: OpStyle("update", "#b9534c", "#b9534c", "#ffffff"),
    Op.UNSHARD: OpStyle("gather of weights", "#2f8f9d", "#2f8f9d", "#ffffff"),
}
LEFT, RIGHT, TOP, STRIP = 64, 72, 44, 5  # px: margins, title, strip under a lane for gathers and reductions
CAPTION_LINE = 15  # px: from one line of a caption to the next
ON_NETWORK = {Op.UNSHARD: "U", Op.REDUCE_GRAD: "R"}  # in the strip, and in the second line of a rank as text
LARGE = 12_000  # boxes
LIVE, WAITING = "#c9ccd6", "#7a4a1e"
# shades of parts of layers, from the first to the last colour of their op
SHADES = {Part.ATTENTION: 0.0, Part.MLP: 0.7, Part.HEAD: 1.0, Part.DISPATCH: 0.0, Part.COMBINE: 0.7}

Curve = Sequence[tuple[float, float]]  # (seconds, level from then on)


def timeline_text(timeline: Timeline, max_columns: int = 160) -> str:
    """Return one line per rank, its computation drawn to scale.

    A cell is as long as the shortest action, or longer if the text would exceed max_columns; actions that share a cell
    then hide each other, which the last line says. A cell shows op and microbatch (F3, B0; with several stages per rank
    also a letter for the chunk: F3a, F3b; with slices also their number: F3.1; R3 for a RECOMPUTE), "=" where an action
    continues, or "." where the rank is idle. Where gathers or reductions take time, a second line shows them: U and R
    with the stage.
    """
    schedule = timeline.schedule
    several = schedule.placement.num_chunks > 1
    rows: list[tuple[str, list[tuple[str, float, float]]]] = []  # name, (label, start, end) of each box
    seconds = []
    for rank in range(schedule.num_ranks):
        stages = schedule.placement.stages_of(rank)
        computed, sent = [], []
        for action, start, end in spans(timeline, rank):
            if action.op in COMPUTE_OPS:
                letter = chr(ord("a") + stages.index(action.stage) % 26) if several else ""
                op = "R" if action.op is Op.RECOMPUTE else action.op.value
                computed.append((f"{op}{number_text(schedule, action)}{letter}", start, end))
                seconds += [end - start] if end > start else []
            elif action.op in ON_NETWORK and end > start:
                sent.append((f"{ON_NETWORK[action.op]}{action.stage}", start, end))
        rows += [(f"rank {rank}", computed), *([("network", sent)] if sent else [])]
    if not seconds:
        return "\n".join(f"rank {rank}:" for rank in range(schedule.num_ranks))
    width = 1 + max(len(label) for _, row in rows for label, _, _ in row)
    title = 1 + max(len(name) for name, _ in rows)
    unit = max(min(seconds), timeline.makespan_seconds / max(1, (max_columns - title) // width))
    lines = []
    for name, labelled in rows:
        cells = ["."] * max(round(timeline.makespan_seconds / unit), 1)
        for label, begin, end in labelled:
            first, after = min(round(begin / unit), len(cells) - 1), min(round(end / unit), len(cells))
            cells[first:after] = [label] + ["="] * (after - first - 1) if after > first else []
        lines.append(name.ljust(title) + "".join(cell.ljust(width) for cell in cells).rstrip())
    missing = "; shorter actions may be missing" if unit > min(seconds) else ""
    return "\n".join([*lines, f"one cell: {unit:.4g} s{missing}"])


def spans(timeline: Timeline, rank: int) -> Iterator[tuple[Action, float, float]]:
    """Return every action of a rank with its start and end."""
    return zip(timeline.schedule.rows[rank], timeline.starts[rank], timeline.ends[rank], strict=True)


def number_text(schedule: Schedule, action: Action) -> str:
    """Return the microbatch of an action, and its slice if microbatches have slices: 3, or 3.1."""
    return schedule.text(action).partition(f"{action.stage}{action.op.value}")[2]


class _Box(NamedTuple):
    """The box of an action, of which the time axis gives the width."""

    action: Action
    start: float
    end: float
    y: int
    height: int
    colour: str


class _Drawing:
    """A timeline with the layout of its picture in px.

    caption: below the title, in as many lines as it needs. heights: of a rank's lane, of what stands below it, and of
    the gap to the next rank. name: an action in its title.
    """

    def __init__(
        self,
        timeline: Timeline,
        width: int,
        caption: str,
        heights: tuple[int, int, int],
        is_large: bool,
        name: Callable[[Action], str],
        unit: str = "",
    ) -> None:
        self.timeline, self.schedule, self.width, self.is_large = timeline, timeline.schedule, width, is_large
        self.caption = wrap(caption, round((width - LEFT) / LETTER))
        self.lane, self.below, _ = heights
        self.pitch, self.first = sum(heights), TOP + CAPTION_LINE * (len(self.caption) - 1)
        self.bottom = self.top(self.schedule.num_ranks)
        self.scale = (width - LEFT - RIGHT) / timeline.makespan_seconds  # px per second
        self.name, self.unit = name, unit

    def top(self, rank: int) -> int:
        return self.first + rank * self.pitch

    def x(self, seconds: float) -> float:
        return LEFT + seconds * self.scale

    def takes_time(self, op: Op) -> bool:
        """Return True if the op has a cost on any stage."""
        return any(self.timeline.costs.seconds.get((stage, op)) for stage in range(self.schedule.num_stages))

    def page(self, title: str, parts: Iterable[str], entries: Iterable[tuple[float, str]]) -> str:
        """Return the SVG file with its title and caption, the time axis, and the entries of its legend."""
        shown, last = legend(entries, LEFT, self.width, self.bottom + 38)
        heading = [text(LEFT, 18, title, font_size=14, font_weight="bold")]
        heading += (text(LEFT, 34 + CAPTION_LINE * i, words, fill=SOFT) for i, words in enumerate(self.caption))
        return paper(self.width, last + 14, [*heading, *parts, *self.ticks(self.bottom + 10), *shown])

    def ticks(self, y: int) -> Iterator[str]:
        """Yield about ten round times."""
        step = round_step(self.timeline.makespan_seconds / 10)
        for tick in range(int(self.timeline.makespan_seconds / step) + 1):
            label = f"{tick * step:.4g}" + ("" if tick else self.unit)
            yield text(self.x(tick * step), y, label, text_anchor="middle", fill=SOFT)

    def lanes(self, rank: int, lanes: Sequence[tuple[int, str]], boxes: Iterable[_Box]) -> Iterator[str]:
        """Yield a rank's name, its grey lanes from the top down, and its boxes. lanes: (height, colour)."""
        y, size = self.top(rank), 9 if self.lane < 12 else None
        yield text(LEFT - 8, f"{y + self.lane / 2 + 4}", f"rank {rank}", text_anchor="end", font_size=size)
        for height, colour in lanes:
            yield rect(LEFT, y, self.timeline.makespan_seconds * self.scale, height, fill=colour)
            y += height
        if self.is_large:
            places = ((box.colour, self.x(box.start), box.y, self.width_of(box), box.height) for box in boxes)
            yield from merged(places, stroke="#ffffff", stroke_width="0.2")
        else:
            yield from map(self.box, boxes)

    def width_of(self, box: _Box) -> float:
        return (box.end - box.start) * self.scale

    def box(self, box: _Box) -> str:
        """Return a box with its title, and with the number of its microbatch if that fits."""
        action, x, width = box.action, self.x(box.start), self.width_of(box)
        title = f"{self.name(action)}: {box.start:.6g} .. {box.end:.6g}{self.unit}"
        drawn = rect(x, box.y, width, box.height, title, fill=box.colour, stroke="#ffffff", stroke_width="0.6")
        label = number_text(self.schedule, action)
        if label and width >= 6.5 * len(label) + 1 and box.height > STRIP:
            y, style = f"{box.y + box.height / 2 + 4:g}", {"fill": STYLES[action.op].ink, "pointer_events": "none"}
            drawn += text(x + width / 2, y, label, text_anchor="middle", **style)
        return drawn


def svg(timeline: Timeline, width: int | None = None) -> str:
    """Return the drawing, `width` px wide (None: wide enough for the microbatch numbers).

    Messages that take time are lines, boxes have tooltips with action, start and end; large timelines have neither.
    """
    schedule, makespan = timeline.schedule, timeline.makespan_seconds
    taken = (span for rank in range(schedule.num_ranks) for span in spans(timeline, rank))
    lengths = sorted(end - start for action, start, end in taken if action.op in STYLES and end > start)
    if width is None:  # two digits fit into three of four boxes
        narrow = lengths[len(lengths) // 4] if lengths else makespan
        width = min(max(1200, LEFT + RIGHT + round(15 * makespan / narrow)), 6000)
    is_large = len(lengths) > LARGE
    heights = (10, 7, 1) if is_large else (26, 14, 6)
    drawing = _Drawing(timeline, width, _caption(timeline), heights, is_large, schedule.text, " s")
    parts: list[str] = []
    for rank, waiting in enumerate(waiting_message_curves(timeline)):
        parts += drawing.lanes(rank, ((drawing.lane, "#f1f1f1"),), _boxes(drawing, rank))
        parts += _curves(drawing, rank, waiting)
    if not is_large:
        parts += _messages(drawing)
    ops = [op for op in STYLES if op in schedule.ops and (op in COMPUTE_OPS or drawing.takes_time(op))]
    entries = op_entries(ops, schedule.placement.num_chunks)
    if schedule.has_backward:
        waiting_line = element("path", stroke=WAITING, d="M0 -4h12")
        entries += [entry("live chunks", *squares(LIVE)), entry("inputs waiting", waiting_line, 14)]
    numbers = "microbatches and their slices" if schedule.num_slices > 1 else "microbatches"
    return drawing.page(str(schedule), parts, [*entries, entry(f"numbers: {numbers}; grey: idle", fill=SOFT)])


def _caption(timeline: Timeline) -> str:
    """Return step, bubbles and peak, and the gathers and reductions of the rank with the most."""
    schedule = timeline.schedule
    if schedule.num_steps > 1:
        period = steady(schedule, timeline.costs)
        sentences = [
            f"{schedule.num_steps} steps of a stream, each of {schedule.step_size} microbatches and "
            f"{period.seconds:.4g} s in the middle",
            f"bubble share there {period.bubble.share:.2%}",
        ]
    else:
        sentences = [
            f"step {timeline.makespan_seconds:.4g} s",
            f"bubble share {timeline.barrier_bubble.share:.2%} with a barrier",
            f"{timeline.chained_bubble.share:.2%} chained",
        ]
    sentences.append(f"peak of live chunks {max(timeline.peak_live_chunks)}")
    if schedule.num_slices > 1:
        sentences.append(f"each of one slice of {schedule.num_slices}")
    if Op.UNSHARD in schedule.ops:
        counts = [Counter(op for _, op, _ in row) for row in schedule.rows]
        gathers, reductions = (max(of_rank[op] for of_rank in counts) for op in ON_NETWORK)
        gathered = max(int(peak_held(row, {Held.WEIGHTS: 1})) for row in schedule.rows)
        sentences += [f"{gathers} gathers and {reductions} reductions a rank", f"at most {gathered} stages gathered"]
    if not schedule.is_synchronous:
        sentences.append("NOT synchronous")
    return ", ".join(sentences)


def _boxes(drawing: _Drawing, rank: int) -> Iterator[_Box]:
    """Yield the boxes of a rank: whole, a half of an overlapped pair, or in the strip below the lane."""
    top, lane, row = drawing.top(rank), drawing.lane, drawing.schedule.rows[rank]
    # 0 for the forward of each overlapped pair, 1 for its backward
    halves = {row[slot + half + 1]: half for slot, pair in enumerate(row) if pair.op is Op.OVERLAP for half in (0, 1)}
    for action, start, end in spans(drawing.timeline, rank):
        if action.op not in COMPUTE_OPS and (action.op not in STYLES or end <= start):
            continue
        y, height = top, lane
        if action.op in ON_NETWORK:
            y, height = top + lane, STRIP
        elif action in halves:
            y, height = top + halves[action] * lane // 2, lane // 2
        yield _Box(action, start, end, y, height, fill(drawing.schedule.placement, rank, action))


def _curves(drawing: _Drawing, rank: int, waiting: Curve) -> Iterator[str]:
    """Yield a filled curve of live chunks with its peak, and a line of waiting inputs; all ranks share one scale."""
    live = live_curve(drawing.timeline, rank)
    most = max(drawing.timeline.peak_live_chunks, default=0)
    if not live or not most:
        return
    base = drawing.top(rank) + drawing.lane + drawing.below
    if not drawing.is_large and any(map(drawing.takes_time, ON_NETWORK)):
        base += STRIP
    unit = (drawing.below - 1) / max(most, *(count for _, count in waiting), 1)
    yield element("path", fill=LIVE, d=f"{_steps(drawing, live, base, unit)}V{base}Z")
    if any(count for _, count in waiting):
        path = _steps(drawing, waiting, base, unit)
        yield element("path", fill="none", stroke=WAITING, stroke_width="0.8", d=path)
    x, peak = drawing.x(drawing.timeline.makespan_seconds) + 5, max(count for _, count in live)
    yield text(f"{x:.1f}", base, f"peak {peak:g}", font_size=8 if drawing.is_large else 10, fill=SOFT)


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
    for rank in range(drawing.schedule.num_ranks):
        for action, start, end in spans(drawing.timeline, rank):
            if action.op in SEND_OPS and end > start:
                stage = action.stage + (1 if action.op is Op.SEND_F else -1)
                peer = drawing.schedule.placement.rank_of(stage, action.microbatch or 0)
                y1 = drawing.top(rank) + drawing.lane * (peer > rank)
                y2 = drawing.top(peer) + drawing.lane * (peer <= rank)
                faint = "0.3" if abs(peer - rank) > 1 else None  # it crosses other lanes
                style = {"stroke": "#666666", "stroke_width": "0.7", "stroke_opacity": faint}
                yield line(drawing.x(start), y1, drawing.x(end), y2, **style)


def parts_svg(timeline: Timeline, parts: Parts, width: int | None = None) -> str:
    """Return the drawing of a schedule of parts, `width` px wide (default: 1600).

    Two lanes per rank: its computation, and below it its all-to-alls. Numbers are microbatches.
    """
    schedule = timeline.schedule
    is_large = sum(map(len, schedule.rows)) > LARGE
    exchanging, exposed = map(sum, zip(*exposures(timeline), strict=True))
    hidden = f"{1 - exposed / exchanging:.1%} of the all-to-alls hidden" if exchanging else "no all-to-alls"
    caption = f"step {timeline.makespan_seconds:.4g}, {hidden}"
    drawing = _Drawing(timeline, width or 1600, caption, (24, 14, 10), is_large, parts.text)
    drawn: list[str] = []
    for rank in range(schedule.num_ranks):
        boxes = []
        for action, start, end in spans(timeline, rank):
            if action.op in COMPUTE_OPS:
                is_exchange = action.stage in parts.network
                y, height = drawing.top(rank) + drawing.lane * is_exchange, (drawing.lane, drawing.below)[is_exchange]
                colour = shade(action.op, SHADES[parts.sites[action.stage].part])
                boxes.append(_Box(action, start, end, y, height, colour))
        drawn += drawing.lanes(rank, ((drawing.lane, "#f1f1f1"), (drawing.below, "#e4e4ea")), boxes)
    ops = (op for op in STYLES if op in COMPUTE_OPS and op in schedule.ops)
    entries = [entry(STYLES[op].name, *squares(shade(op, 0.0), shade(op, 0.7))) for op in ops]
    notes = "dark: attention, dispatch; light: MLP, combine, head", "thin lane: all-to-alls; numbers: microbatches"
    title = f"{schedule.name} ({schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches), parts of layers"
    return drawing.page(title, drawn, [*entries, *(entry(note, fill=SOFT) for note in notes)])


def fill(placement: Placement, rank: int, action: Action) -> str:
    """Return the colour of an action's box, by its op and by the chunk that its stage is on the rank."""
    stages = placement.stages_of(rank)
    return shade(action.op, stages.index(action.stage) / max(1, len(stages) - 1))


def shade(op: Op, part: float) -> str:
    """Return the op's colour at a part from 0 (first chunk) to 1 (last chunk)."""
    first, last = STYLES[op].first, STYLES[op].last
    channels = ((int(first[i : i + 2], 16), int(last[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in channels)


def op_entries(ops: Iterable[Op], num_chunks: int) -> list[tuple[float, str]]:
    """Return the entries of a legend with the name of each op, and its colour for each chunk."""
    entries = []
    for op in ops:
        chunks = num_chunks if op in COMPUTE_OPS else 1
        colours = (shade(op, chunk / max(1, chunks - 1)) for chunk in range(chunks))
        name = STYLES[op].name + (f", chunk 0 .. {chunks - 1}" if chunks > 1 else "")
        entries.append(entry(name, *squares(*colours)))
    return entries
