"""Curves over steps as SVG that takes its colours from the page, with axes in round numbers and every point given to the page's script."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from megapipe.extras.report.beside import round_step
from megapipe.extras.report.words import number

LEFT, RIGHT, TOP, BOTTOM = 58, 16, 12, 30
MOST_POINTS = 1500  # of a curve in the page; more are thinned to the extremes of their neighbourhood

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """name: in the legend and under the pointer. kind: 'line', 'dots' (line with a dot at each point) or 'lost' (faint)."""

    name: str
    points: Sequence[Point]
    kind: str = "line"
    colour: int = 0  # of the page's palette


@dataclass(frozen=True)
class Chart:
    """unit: behind the numbers. marks: (step, text) of vertical lines. logarithmic: a y axis in powers of ten."""

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
    """The drawing; '' if no curve has a point."""
    points = [point for curve in chart.curves for point in curve.points]
    if not points:
        return ""
    frame = _Frame.of(chart, points)
    head = (
        f'<svg class="chart" viewBox="0 0 {chart.width} {chart.height}" role="img" aria-label="{escape(chart.title)}" '
        f'data-frame="{frame.x(0):.4f} {frame.x(1) - frame.x(0):.9g} {TOP} {chart.height - BOTTOM}" data-unit="{escape(chart.unit)}">'
    )
    parts = [head, *_grid(chart, frame)]
    for step, text in chart.marks:
        x = frame.x(step)
        parts.append(
            f'<line class="mark" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{chart.height - BOTTOM}"><title>{escape(text)}</title></line>'
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
        yield f'<text class="tick" x="{x:.1f}" y="{chart.height - BOTTOM + 16}" text-anchor="middle">{number(value)}</text>'
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


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """The points, or where there are many the lowest and highest of each neighbourhood, so that no spike is lost."""
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
