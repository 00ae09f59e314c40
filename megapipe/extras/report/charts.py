"""SVG charts of a quantity over the steps: loss, speed, memory, learning rate, gradient norm, bubble.

Colours come from the report's style sheet. Ticks are at round numbers. Each chart carries its points as JSON in
<metadata>, from which the report's script shows the values under the pointer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from megapipe.extras.report.drawing import round_step
from megapipe.extras.report.folder import Record, Run

LEFT, RIGHT, TOP, BOTTOM = 58, 16, 12, 30
MAX_POINTS = 1500  # per curve; of longer curves only the local minima and maxima are drawn
NUM_COLOURS = 8  # of the style sheet
MOST_TICKS = 8  # of a y axis
SIZES = {"large": (1120, 320), "medium": (540, 220), "small": (350, 220)}  # class in the style sheet -> width, height

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """One curve of a chart. kind: 'line', 'dots' (a line with a dot at each point) or 'lost' (a faint line)."""

    name: str
    points: Sequence[Point]
    kind: str = "line"
    colour: int = 0  # index in the palette of the style sheet


@dataclass(frozen=True)
class Chart:
    """A chart over steps, or `axis`. marks: (step, text) of vertical lines. is_logarithmic: the y axis."""

    title: str
    curves: Sequence[Curve]
    unit: str = ""
    note: str = ""
    marks: Sequence[tuple[float, str]] = ()
    is_logarithmic: bool = False
    from_zero: bool = False
    axis: str = "step"
    is_wide: bool = False
    width: int = 540
    height: int = 220


def number(value: float) -> str:
    """Return a number in short form: 12,300; 0.0042; 1.2M."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e9:.3g}G" if size >= 1e9 else f"{value / 1e6:.3g}M"
    if size >= 1000:
        return f"{value:,.0f}"
    if size and size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


class _Frame:
    """The axes of a chart; with a logarithmic y axis, low and high are powers of ten."""

    def __init__(self, chart: Chart, points: Sequence[Point]) -> None:
        self.chart = chart
        xs, ys = [x for x, _ in points], [y for _, y in points]
        self.is_logarithmic = chart.is_logarithmic and min(ys) > 0
        low, high = (0.0 if chart.from_zero else min(ys)), max(ys)
        if self.is_logarithmic:
            low, high = math.log10(min(ys)), math.log10(max(ys))
        if high - low <= 1e-5 * max(abs(low), abs(high)):  # a constant, up to rounding
            if chart.from_zero and high:
                low, high = 0.0, high * 1.2
            else:
                low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
        pad = 0.06 * (high - low)
        self.low, self.high = low if chart.from_zero else low - pad, high + pad
        self.low_x, self.high_x = min(xs), max(xs)
        if self.high_x == self.low_x:
            self.low_x, self.high_x = self.low_x - 1, self.high_x + 1

    def x(self, value: float) -> float:
        return LEFT + (value - self.low_x) / (self.high_x - self.low_x) * (self.chart.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = ((math.log10(value) if self.is_logarithmic else value) - self.low) / (self.high - self.low)
        return self.chart.height - BOTTOM - share * (self.chart.height - TOP - BOTTOM)

    def ticks(self) -> Iterator[float]:
        """Yield the values at the y axis."""
        low, high = self.low, self.high
        if self.is_logarithmic:
            if high - low > 0.9:
                factors = (1, 2, 5) if high - low < 3 else (1,)
                values = (
                    factor * 10.0**power for power in range(math.floor(low), math.ceil(high)) for factor in factors
                )
                yield from (value for value in (*values, 10.0 ** math.ceil(high)) if low <= math.log10(value) <= high)
                return
            low, high = 10**low, 10**high
        step = round_step((high - low) / MOST_TICKS)
        for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
            if not self.is_logarithmic or index > 0:
                yield index * step


def chart_svg(chart: Chart) -> str:
    """Return the chart as SVG; '' if no curve has a point."""
    points = [point for curve in chart.curves for point in curve.points]
    if not points:
        return ""
    frame = _Frame(chart, points)
    right, bottom = chart.width - RIGHT, chart.height - BOTTOM
    parts = [
        f'<svg class="chart" viewBox="0 0 {chart.width} {chart.height}" role="img" aria-label="{escape(chart.title)}" '
        f'data-frame="{frame.x(0):.4f} {frame.x(1) - frame.x(0):.9g} {TOP} {bottom}" '
        f'data-unit="{escape(chart.unit)}" data-axis="{escape(chart.axis)}">'
    ]
    values = list(frame.ticks())
    labels = [number(value) for value in values]
    if len(set(labels)) < len(labels):  # a narrow range needs more digits
        labels = [f"{value:.7g}" for value in values]
    for value, label in zip(values, labels, strict=True):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    step = max(1.0, round_step((frame.high_x - frame.low_x) / (chart.width // 48)))
    first = math.ceil(frame.low_x / step) * step
    for index in range(int((frame.high_x - first) / step + 1e-9) + 1):
        value = first + index * step
        place = f'x="{frame.x(value):.1f}" y="{bottom + 16}"'
        parts.append(f'<text class="tick" {place} text-anchor="middle">{number(value)}</text>')
    parts.append(f'<text class="tick" x="{right}" y="{chart.height - 2}" text-anchor="end">{escape(chart.axis)}</text>')
    for mark, text in chart.marks:
        place = f'x1="{frame.x(mark):.1f}" y1="{TOP}" x2="{frame.x(mark):.1f}" y2="{bottom}"'
        parts.append(f'<line class="mark" {place}><title>{escape(text)}</title></line>')
    data = []
    for curve in chart.curves:
        kept = thinned(curve.points, min(MAX_POINTS, 3 * chart.width))
        if curve.kind != "lost":
            rounded = [[x, float(f"{y:.5g}")] for x, y in kept]
            data.append({"name": curve.name, "colour": curve.colour, "points": rounded})
        if kept:
            places = [(f"{frame.x(step):.1f}", f"{frame.y(value):.1f}") for step, value in kept]
            path = "M" + "L".join(f"{left} {top}" for left, top in places)
            parts.append(f'<path class="curve c{curve.colour} {curve.kind}" d="{path}"/>')
            if curve.kind == "dots" or len(places) == 1:
                dot = f'<circle class="dot c{curve.colour}"'
                parts += [f'{dot} cx="{left}" cy="{top}" r="3.8"/>' for left, top in places]
    parts.append('<g class="hover" visibility="hidden"><line/></g>')
    parts.append(f"<metadata>{escape(json.dumps(data, separators=(',', ':')), quote=False)}</metadata></svg>")
    return "".join(parts)


def thinned(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Return at most about `most` points: the lowest and the highest of each interval, so that spikes stay visible."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return sorted({points[0], points[-1], *kept})


PALETTE = ("#2463a6", "#c2571a", "#1f7a4d")  # of a drawing without the report's style sheet
STANDALONE = (
    "text{font:11px 'DejaVu Sans',Helvetica,Arial,sans-serif;fill:#616c78}.grid{stroke:#dfe3e8}"
    ".mark{stroke:#616c78;stroke-dasharray:2 3}"
    ".curve{fill:none;stroke-width:1.7;stroke-linejoin:round}.lost{opacity:.35;stroke-dasharray:3 3}"
    + "".join(f".c{i}{{stroke:{colour}}}circle.c{i}{{fill:{colour}}}" for i, colour in enumerate(PALETTE))
)


def loss_chart(run: Run) -> Chart:
    """Return the chart of training, validation and test loss."""
    losses = [
        _curve("training", run.steps, "loss"),
        *(_curve("lost", lost, "loss", kind="lost") for lost in run.lost_steps),
        _curve("validation", run.evaluations("validation"), "loss", 1, kind="dots"),
        _curve("test", run.evaluations("test"), "loss", 2, kind="dots"),
    ]
    repeated = "dashed: steps repeated after a restart" if any(run.lost_steps) else ""
    return Chart("Loss", losses, "nats per token", repeated, _starts(run), is_wide=True)


def loss_svg(run: Run) -> str:
    """Return the chart of losses as an SVG file of its own; '' if no step was logged."""
    width, height = 860, 320
    drawn = chart_svg(replace(loss_chart(run), width=width, height=height))
    legend = "".join(
        f'<text x="{LEFT + 14 + 90 * i}" y="{TOP + 8}" style="fill:{PALETTE[i]}">{name}</text>'
        for i, name in enumerate(("training", *(each for each in ("validation", "test") if run.evaluations(each))))
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    style = f'<style>{STANDALONE}</style><rect width="{width}" height="{height}" fill="#ffffff" stroke="none"/>{legend}'
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn)
    return drawn.replace("<svg", head, 1).replace(">", f">{style}", 1) + "\n" if drawn else ""


def _starts(run: Run) -> list[tuple[float, str]]:
    """Return the marks of the second and later starts of a run."""
    begun = enumerate(run.segments, start=1)
    return [(float(each.steps[0]["step"]), f"start {i}") for i, each in begun if i > 1 and each.steps]


def charts_html(run: Run) -> str:
    """Return the charts of a run; '' if nothing was logged."""
    marks = _starts(run)
    speed = _curve("speed", run.steps, "tokens_per_second", 2)
    memory = _curve("memory", run.steps, "memory_bytes", 3, factor=2**-20)
    norm = _curve("gradient norm", run.steps, "grad_norm", 1)
    norms = [value for _, value in norm.points]
    spans_decades = bool(norms) and min(norms) > 0 and max(norms) / min(norms) > 30
    measured = _curve("measured", run.steps, "bubble", 1, factor=100)
    planned = _curve("planned", run.steps, "predicted_bubble", factor=100)
    charts = [
        loss_chart(run),
        Chart("Speed", [speed], "tokens/s", marks=marks, from_zero=True),
        Chart("Memory", [memory], "MiB", "maximum over ranks", marks, from_zero=True),
        Chart("Learning rate", [_curve("learning rate", run.steps, "lr")], marks=marks, from_zero=True),
        Chart("Gradient norm", [norm], marks=marks, is_logarithmic=spans_decades),
        Chart("Busiest expert", [_curve("load", run.steps, "expert_imbalance", 4)], "x mean", "worst layer", marks),
        Chart("Dropped rows", [_curve("dropped", run.steps, "dropped_share", 5, factor=100)], "%", "of experts", marks),
        Chart("Bubble of each step", [measured, planned], "%", marks=marks, from_zero=True),
    ]
    drawn = "".join(map(figure_html, charts))
    note = next((record["bubble_note"] for record in reversed(run.steps) if record.get("bubble_note")), "")
    note_html = f'<p class="soft">Bubble of each step: {escape(note)}.</p>' if note else ""
    return f'<div class="charts">{drawn}</div>{note_html}' if drawn else ""


def _curve(
    name: str, records: Sequence[Record], key: str, colour: int = 0, factor: float = 1.0, kind: str = "line"
) -> Curve:
    """Return the curve of a key times `factor`; records without a value of the key are left out."""
    points = [(float(record["step"]), record[key] * factor) for record in records if record.get(key) is not None]
    return Curve(name, points, kind, colour)


def figure_html(chart: Chart) -> str:
    """Return a chart with its caption, drawn once for each width of window; '' if no curve has a point."""
    if not chart_svg(chart):
        return ""
    sizes = SIZES.items() if chart.is_wide else list(SIZES.items())[1:]
    drawn = ""
    for name, (width, height) in sizes:
        drawn += f'<div class="{name}">{chart_svg(replace(chart, width=width, height=height))}</div>'
    legend = ""
    for curve in chart.curves:
        if curve.points and curve.kind != "lost":
            value = curve.points[-1][1]
            last = f"{value:.4f}" if 0.1 <= abs(value) < 100 and chart.unit != "%" else number(value)
            legend += f'<span><i class="c{curve.colour}"></i>{escape(curve.name)}, last {last}</span>'
    unit = f" <span>{escape(chart.unit)}</span>" if chart.unit else ""
    note = f"<span>{escape(chart.note)}</span>" if chart.note else ""
    caption = f'<figcaption>{escape(chart.title)}{unit}{legend}{note}<span class="readout"></span></figcaption>'
    return f'<figure class="{"wide" if chart.is_wide else "half"}">{caption}{drawn}</figure>'
