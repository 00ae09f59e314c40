"""A timeline of a schedule of parts as SVG: two lanes per rank, its computation and below it its all-to-alls."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from megapipe.extras.report.timeline import COLOURS, LEFT, NAMES, RIGHT, TOP, box, paths_by_fill, round_step, shade
from megapipe.schedule.action import COMPUTE_OPS
from megapipe.schedule.experts import exposures
from megapipe.schedule.parts import Part, Parts
from megapipe.schedule.simulate import Timeline

COMPUTING, EXCHANGING, GAP = 24, 14, 10  # px: heights of the two lanes of a rank, and below them
SHADES = {Part.ATTENTION: 0.0, Part.MLP: 0.7, Part.HEAD: 1.0, Part.DISPATCH: 0.0, Part.COMBINE: 0.7}
LARGE = 12_000  # boxes; more are drawn as one path of each colour, without numbers and tooltips


def parts_svg(timeline: Timeline, parts: Parts, width: int | None = None) -> str:
    """Return the drawing, `width` px wide (default: 1600). Numbers are microbatches."""
    schedule, makespan = timeline.schedule, timeline.makespan_seconds or 1.0
    width = width or 1600
    scale = (width - LEFT - RIGHT) / makespan
    bottom = TOP + schedule.num_ranks * (COMPUTING + EXCHANGING + GAP)
    exchanging, exposed = map(sum, zip(*exposures(timeline), strict=True))
    hidden = f"{1 - exposed / exchanging:.1%} of the all-to-alls hidden" if exchanging else "no all-to-alls"
    title = f"{schedule.name} ({schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches), parts of layers"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 48}" '
        f'viewBox="0 0 {width} {bottom + 48}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{bottom + 48}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="{LEFT}" y="34" fill="#555555">step {timeline.makespan_seconds:.4g}, {hidden}</text>',
    ]
    for rank in range(schedule.num_ranks):
        lines += _lanes(timeline, parts, rank, scale)
    step = round_step(makespan / 10)
    for tick in range(int(makespan / step) + 1):
        place = f'x="{LEFT + tick * step * scale:.2f}" y="{bottom + 8}"'
        lines.append(f'<text {place} text-anchor="middle" fill="#555555">{tick * step:.4g}</text>')
    x, y = LEFT, bottom + 34
    for op in (op for op in COLOURS if op in COMPUTE_OPS and op in schedule.ops):
        lines += (
            f'<rect x="{x + 14 * i}" y="{y - 10}" width="12" height="12" fill="{shade(op, part)}"/>'
            for i, part in enumerate((0.0, 0.7))
        )
        lines.append(f'<text x="{x + 32}" y="{y}">{NAMES[op]}</text>')
        x += 150
    legend = "dark: attention, dispatch; light: MLP, combine, head; thin lane: all-to-alls; numbers: microbatches"
    return "\n".join([*lines, f'<text x="{x}" y="{y}" fill="#555555">{legend}</text>', "</svg>\n"])


def _lanes(timeline: Timeline, parts: Parts, rank: int, scale: float) -> Iterator[str]:
    """Yield a rank's name, its two grey lanes and their boxes."""
    top = TOP + rank * (COMPUTING + EXCHANGING + GAP)
    yield f'<text x="{LEFT - 8}" y="{top + COMPUTING / 2 + 4}" text-anchor="end">rank {rank}</text>'
    for y, height in ((top, COMPUTING), (top + COMPUTING, EXCHANGING)):
        lane = f'width="{timeline.makespan_seconds * scale:.2f}" height="{height}"'
        yield f'<rect x="{LEFT}" y="{y}" {lane} fill="{"#f1f1f1" if y == top else "#e4e4ea"}"/>'
    merged = []
    row = zip(timeline.schedule.rows[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
    for action, start, end in ((action, start, end) for action, start, end in row if action.op in COMPUTE_OPS):
        is_exchange = action.stage in parts.network
        y, height = (top + COMPUTING, EXCHANGING) if is_exchange else (top, COMPUTING)
        x, w = LEFT + start * scale, (end - start) * scale
        colour = shade(action.op, SHADES[parts.sites[action.stage].part])
        if sum(map(len, timeline.schedule.rows)) > LARGE:
            merged.append((colour, x, float(y), w, float(height)))
            continue
        title = f"{parts.text(action)}: {start:.6g} .. {end:.6g}"
        yield box((x, y, w, height), colour, action.op, str(action.microbatch), title)
    for colour, path in paths_by_fill(merged).items():
        yield f'<path fill="{colour}" stroke="#ffffff" stroke-width="0.2" d="{path}"/>'
