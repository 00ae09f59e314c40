"""SVG charts of a quantity over the steps: loss, speed, memory, learning rate, gradient norm, bubble.

Colours come from the report's style sheet. Ticks are at round numbers. Each chart carries its points as JSON in
<metadata>, from which the report's script shows the values under the pointer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from megapipe.extras.report.comparison_svg import round_step
from megapipe.extras.report.folder import Record, Run
from megapipe.extras.report.messages import number

LEFT, RIGHT, TOP, BOTTOM = 58, 16, 12, 30
MAX_POINTS = 1500  # per curve; of longer curves only the local minima and maxima are drawn

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
    """A chart over steps. marks: (step, text) of vertical lines. is_logarithmic: a y axis in powers of ten."""

    title: str
    curves: Sequence[Curve]
    unit: str = ""
    note: str = ""
    marks: Sequence[tuple[float, str]] = ()
    is_logarithmic: bool = False
    from_zero: bool = False
    width: int = 540
    height: int = 220


def chart_svg(chart: Chart) -> str:
    """Return the chart as SVG; '' if no curve has a point."""
    points = [point for curve in chart.curves for point in curve.points]
    if not points:
        return ""
    frame = _Frame.of(chart, points)
    head = (
        f'<svg class="chart" viewBox="0 0 {chart.width} {chart.height}" role="img" aria-label="{escape(chart.title)}" '
        f'data-frame="{frame.x(0):.4f} {frame.x(1) - frame.x(0):.9g} {TOP} {chart.height - BOTTOM}" '
        f'data-unit="{escape(chart.unit)}">'
    )
    parts = [head, *_grid(chart, frame)]
    for step, text in chart.marks:
        x = frame.x(step)
        parts.append(
            f'<line class="mark" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{chart.height - BOTTOM}">'
            f"<title>{escape(text)}</title></line>"
        )
    parts += [_curve(curve, frame) for curve in chart.curves if curve.points]
    parts.append('<g class="hover" visibility="hidden"><line/></g>')
    data = [
        {"name": curve.name, "colour": curve.colour, "points": _rounded(thinned(curve.points))}
        for curve in chart.curves
        if curve.kind != "lost"
    ]
    parts.append(f"<metadata>{escape(json.dumps(data, separators=(',', ':')), quote=False)}</metadata></svg>")
    return "".join(parts)


@dataclass(frozen=True)
class _Frame:
    chart: Chart
    low_x: float
    high_x: float
    low: float
    high: float

    @staticmethod
    def of(chart: Chart, points: Sequence[Point]) -> _Frame:
        xs, ys = [x for x, _ in points], [y for _, y in points]
        if chart.is_logarithmic and min(ys) > 0:
            low, high = math.log10(min(ys)), math.log10(max(ys))
        else:
            low, high = (0.0 if chart.from_zero else min(ys)), max(ys)
        if high - low < 1e-12 * max(1.0, abs(high)):
            low, high = (
                (0.0, high * 1.2)
                if chart.from_zero and high
                else (low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1))
            )
        pad = 0.06 * (high - low)
        low_x, high_x = min(xs), max(xs)
        if high_x == low_x:
            low_x, high_x = low_x - 1, high_x + 1
        return _Frame(chart, low_x, high_x, low if chart.from_zero else low - pad, high + pad)

    def x(self, value: float) -> float:
        return LEFT + (value - self.low_x) / (self.high_x - self.low_x) * (self.chart.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        place = math.log10(value) if self.is_logarithmic else value
        return (
            self.chart.height
            - BOTTOM
            - (place - self.low) / (self.high - self.low) * (self.chart.height - TOP - BOTTOM)
        )

    @property
    def is_logarithmic(self) -> bool:
        return self.chart.is_logarithmic and all(value > 0 for curve in self.chart.curves for _, value in curve.points)


def _grid(chart: Chart, frame: _Frame) -> Iterator[str]:
    for value in _ticks(frame):
        y = frame.y(value)
        yield f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{chart.width - RIGHT}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>'
    step = max(1.0, round_step((frame.high_x - frame.low_x) / max(2, chart.width // 110)))
    first = math.ceil(frame.low_x / step) * step
    for index in range(int((frame.high_x - first) / step + 1e-9) + 1):
        value = first + index * step
        x = frame.x(value)
        place = f'x="{x:.1f}" y="{chart.height - BOTTOM + 16}"'
        yield f'<text class="tick" {place} text-anchor="middle">{number(value)}</text>'
    yield f'<text class="tick" x="{chart.width - RIGHT}" y="{chart.height - 2}" text-anchor="end">step</text>'


def _ticks(frame: _Frame) -> Iterator[float]:
    if frame.is_logarithmic and frame.high - frame.low > 0.9:
        for power in range(math.ceil(frame.low), math.floor(frame.high) + 1):
            yield 10.0**power
        return
    low, high = (10**frame.low, 10**frame.high) if frame.is_logarithmic else (frame.low, frame.high)
    step = round_step((high - low) / 4)
    for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
        if not frame.is_logarithmic or index > 0:
            yield index * step


def _curve(curve: Curve, frame: _Frame) -> str:
    points = [(frame.x(x), frame.y(y)) for x, y in thinned(curve.points)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    drawn = f'<path class="curve c{curve.colour} {curve.kind}" d="{path}"/>'
    if curve.kind == "dots" or len(points) == 1:
        drawn += "".join(f'<circle class="dot c{curve.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.8"/>' for x, y in points)
    return drawn


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


def _rounded(points: Sequence[Point]) -> list[list[float]]:
    return [[x, float(f"{y:.5g}")] for x, y in points]


def charts_html(run: Run) -> str:
    """Return the charts of a run; '' if nothing was logged."""
    marks = [
        (float(segment.steps[0]["step"]), f"start {i + 1}")
        for i, segment in enumerate(run.segments)
        if i and segment.steps
    ]
    charts = [_loss_chart(run, marks), *_step_charts(run.steps, marks)]
    drawn = "".join(_figure(chart, wide=index == 0) for index, chart in enumerate(charts))
    note = next((record["bubble_note"] for record in reversed(run.steps) if record.get("bubble_note")), "")
    note_html = f'<p class="soft">Bubble of each step: {escape(note)}.</p>' if note else ""
    return f'<div class="charts">{drawn}</div>{note_html}' if drawn else ""


def _loss_chart(run: Run, marks: Sequence[tuple[float, str]]) -> Chart:
    curves = [
        Curve("training", _points(run.steps, "loss"), "line", 0),
        *(Curve("lost", _points(lost, "loss"), "lost", 0) for lost in run.lost_steps),
        Curve("validation", _points(run.evaluations("validation"), "loss"), "dots", 1),
        Curve("test", _points(run.evaluations("test"), "loss"), "dots", 2),
    ]
    note = "dashed: steps repeated after a restart" if any(run.lost_steps) else ""
    return Chart("Loss", curves, "nats per token", note, marks, width=1120, height=320)


def _step_charts(steps: Sequence[Record], marks: Sequence[tuple[float, str]]) -> list[Chart]:
    speed = Curve("speed", _points(steps, "tokens_per_second"), "line", 2)
    memory = Curve("memory", _scaled(_points(steps, "memory_bytes"), 2**-20), "line", 3)
    rate = Curve("learning rate", _points(steps, "lr"), "line", 0)
    norm = Curve("gradient norm", _points(steps, "grad_norm"), "line", 1)
    bubbles = [
        Curve("measured", _scaled(_points(steps, "bubble"), 100), "line", 1),
        Curve("planned", _scaled(_points(steps, "predicted_bubble"), 100), "line", 0),
    ]
    return [
        Chart("Speed", [speed], "tokens/s", marks=marks, from_zero=True),
        Chart("Memory", [memory], "MiB", "maximum over ranks", marks, from_zero=True),
        Chart("Learning rate", [rate], "", marks=marks, from_zero=True),
        Chart("Gradient norm", [norm], "", marks=marks, is_logarithmic=_spans(steps, "grad_norm")),
        Chart("Bubble of each step", bubbles, "%", marks=marks, from_zero=True),
    ]


def _figure(chart: Chart, wide: bool = False) -> str:
    drawn = chart_svg(chart)
    if not drawn:
        return ""
    if wide:  # a second, narrow version for small windows, where the wide one would be too small to read
        narrow = chart_svg(replace(chart, width=540, height=260))
        drawn = f'<div class="broad">{drawn}</div><div class="narrow">{narrow}</div>'
    named = [curve for curve in chart.curves if curve.points and curve.kind != "lost"]
    legend = "".join(f'<span><i class="c{curve.colour}"></i>{curve.name}{_last(curve)}</span>' for curve in named)
    unit = f" <span>{escape(chart.unit)}</span>" if chart.unit else ""
    note = f"<span>{escape(chart.note)}</span>" if chart.note else ""
    caption = f'<figcaption>{chart.title}{unit}{legend}{note}<span class="readout"></span></figcaption>'
    return f'<figure class="{"wide" if wide else "half"}">{caption}{drawn}</figure>'


def _last(curve: Curve) -> str:
    value = curve.points[-1][1]
    return f", last {value:.4f}" if 0.1 <= abs(value) < 100 else f", last {number(value)}"


def _points(records: Sequence[Record], key: str) -> list[Point]:
    return [(float(record["step"]), float(record[key])) for record in records if record.get(key) is not None]


def _scaled(points: Sequence[Point], factor: float) -> list[Point]:
    return [(x, y * factor) for x, y in points]


def _spans(records: Sequence[Record], key: str) -> bool:
    """Return True if the values span more than a factor of 30, so that a logarithmic axis shows them better."""
    values = [value for _, value in _points(records, key)]
    return bool(values) and min(values) > 0 and max(values) / min(values) > 30
