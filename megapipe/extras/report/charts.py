"""SVG charts of a quantity over the steps: loss, speed, memory, learning rate, gradient norm, bubble; and heat maps of
the load of every expert, layer by layer, at some of the logged steps (--moe-per-layer-logging).

Colours come from the report's style sheet. Ticks are at round numbers. Each drawing carries its values as JSON in
<metadata>, from which the report's script shows the one under the pointer; titles show some of them without the script.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from statistics import NormalDist
from typing import Any

from megapipe.config.config import Config
from megapipe.extras.report.drawing import element, line, merged, rect, round_step, text, titled
from megapipe.extras.report.folder import Record, Run

LEFT, RIGHT, TOP, BOTTOM = 58, 16, 12, 30
MAX_POINTS = 1500  # per curve; of longer curves only the local minima and maxima are drawn
NUM_COLOURS = 8  # of the style sheet
MOST_TICKS = 8  # of a y axis
RESTART = "restart of the run"
SIZES = {"large": (1120, 320), "medium": (540, 220), "small": (350, 220)}  # class in the style sheet -> width, height
MOST_MAPS, MOST_CELLS = 6, 30_000
MAP_WIDTH, CELL, ROW, MAP_LEFT, MAP_TOP = 1100, 20, 13, 30, 18  # px: all cells, the widest cell, margins
LEVELS = 9  # colours from no load over the mean, in the middle, to twice the mean and more
LITTLE, MEAN, MUCH = (43, 108, 176), (245, 245, 245), (192, 57, 43)

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

    def __init__(self, chart: Chart, points: Sequence[Point], right: int, bottom: int) -> None:
        self.right, self.bottom = right, bottom
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
        return LEFT + (value - self.low_x) / (self.high_x - self.low_x) * (self.right - LEFT)

    def y(self, value: float) -> float:
        share = ((math.log10(value) if self.is_logarithmic else value) - self.low) / (self.high - self.low)
        return self.bottom - share * (self.bottom - TOP)

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


def chart_svg(chart: Chart, size: tuple[int, int] = SIZES["medium"]) -> str:
    """Return the chart as SVG, with its points for the report's script; '' if no curve has a point."""
    points = [point for curve in chart.curves for point in curve.points]
    if not points:
        return ""
    (width, height), right, bottom = size, size[0] - RIGHT, size[1] - BOTTOM
    frame = _Frame(chart, points, right, bottom)
    parts = []
    values = list(frame.ticks())
    labels = [number(value) for value in values]
    if len(set(labels)) < len(labels):  # a narrow range needs more digits
        labels = [f"{value:.7g}" for value in values]
    for value, label in zip(values, labels, strict=True):
        y = frame.y(value)
        parts.append(line(LEFT, f"{y:.1f}", right, f"{y:.1f}", class_="grid"))
        parts.append(text(LEFT - 7, f"{y + 4:.1f}", label, class_="tick", text_anchor="end"))
    step = max(1.0, round_step((frame.high_x - frame.low_x) / (width // 48)))
    first = math.ceil(frame.low_x / step) * step
    for index in range(int((frame.high_x - first) / step + 1e-9) + 1):
        x = f"{frame.x(first + index * step):.1f}"
        parts.append(text(x, bottom + 16, number(first + index * step), class_="tick", text_anchor="middle"))
    parts.append(text(right, height - 2, chart.axis, class_="tick", text_anchor="end"))
    for mark, title in chart.marks:
        x = f"{frame.x(mark):.1f}"
        parts.append(line(x, TOP, x, bottom, title, class_="mark"))
    data = []
    for curve in chart.curves:
        kept = thinned(curve.points, min(MAX_POINTS, 3 * width))
        if curve.kind != "lost":
            rounded = [[x, float(f"{y:.5g}")] for x, y in kept]
            data.append({"name": curve.name, "colour": curve.colour, "points": rounded})
        if kept:
            places = [(f"{frame.x(step):.1f}", f"{frame.y(value):.1f}") for step, value in kept]
            path = "M" + "L".join(f"{left} {top}" for left, top in places)
            parts.append(element("path", titled(curve.name), class_=f"curve c{curve.colour} {curve.kind}", d=path))
            if curve.kind == "dots" or len(places) == 1:
                dot = {"class_": f"dot c{curve.colour}", "r": "3.8"}
                for (step, value), (left, top) in zip(kept, places, strict=True):
                    title = titled(f"{curve.name}, {chart.axis} {number(step)}: {number(value)}")
                    parts.append(element("circle", title, cx=left, cy=top, **dot))
    parts.append(element("line", class_="hover", visibility="hidden"))
    parts.append(_data(data))
    words = {"role": "img", "aria_label": chart.title, "data_unit": chart.unit, "data_axis": chart.axis}
    scale = f"{frame.x(0):.4f} {frame.x(1) - frame.x(0):.9g} {TOP} {bottom}"
    view = f"0 0 {width} {height}"
    return element("svg", "".join(parts), class_="chart", viewBox=view, data_frame=scale, **words)


def _data(values: object) -> str:
    """Return the values of a drawing for the report's script."""
    return element("metadata", escape(json.dumps(values, separators=(",", ":")), quote=False))


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


def loss_chart(run: Run) -> Chart:
    """Return the chart of training, validation and test loss."""
    losses = [
        curve_of("training", run.steps, "loss"),
        *(curve_of("lost", lost, "loss", kind="lost") for lost in run.lost_steps),
        curve_of("validation", run.evaluations("validation"), "loss", colour=1, kind="dots"),
        curve_of("test", run.evaluations("test"), "loss", colour=2, kind="dots"),
    ]
    repeated = "dashed: steps repeated after a restart" if any(run.lost_steps) else ""
    return Chart("Loss", losses, "nats per token", repeated, _starts(run), is_wide=True)


def _starts(run: Run) -> list[tuple[float, str]]:
    """Return the marks of the second and later starts of a run."""
    begun = enumerate(run.segments, start=1)
    return [(float(each.steps[0]["step"]), f"start {i}") for i, each in begun if i > 1 and each.steps]


# title, unit, note, if the y axis begins at zero, and the curves: name, key of a step's record, factor, colour
CHARTS: tuple[tuple[str, str, str, bool, Sequence[tuple[str, str, float, int]]], ...] = (
    ("Speed", "tokens/s", "", True, [("speed", "tokens_per_second", 1.0, 2)]),
    ("Memory", "MiB", "maximum over ranks", True, [("memory", "memory_bytes", 2**-20, 3)]),
    ("Learning rate", "", "", True, [("learning rate", "lr", 1.0, 0)]),
    ("Gradient norm", "", "", False, [("gradient norm", "grad_norm", 1.0, 1)]),
    ("Busiest expert", "x mean", "worst layer", False, [("load", "expert_imbalance", 1.0, 4)]),
    ("Dropped rows", "%", "of experts", False, [("dropped", "dropped_share", 100.0, 5)]),
    (
        "Bubble of each step",
        "%",
        "",
        True,
        [("measured", "bubble", 100.0, 1), ("planned", "predicted_bubble", 100.0, 0)],
    ),
)


def charts_html(run: Run) -> str:
    """Return the charts of a run; '' if nothing was logged."""
    charts = [loss_chart(run)]
    for title, unit, note, from_zero, rows in CHARTS:
        curves = [curve_of(name, run.steps, key, factor, colour=colour) for name, key, factor, colour in rows]
        values = [value for _, value in curves[0].points] if title == "Gradient norm" else []
        spans_decades = bool(values) and min(values) > 0 and max(values) / min(values) > 30
        charts.append(Chart(title, curves, unit, note, _starts(run), spans_decades, from_zero))
    drawn = "".join(map(figure_html, charts))
    note = next((record["bubble_note"] for record in reversed(run.steps) if record.get("bubble_note")), "")
    note_html = f'<p class="soft">Bubble of each step: {escape(note)}.</p>' if note and run.has_pipeline else ""
    return f'<div class="charts">{drawn}</div>{note_html}' if drawn else ""


def curve_of(
    name: str, records: Sequence[Record], key: str, factor: float = 1.0, axis: str = "step", **style: Any
) -> Curve:
    """Return the curve of a key times `factor`; records without a value of the key are left out."""
    points = [(float(record[axis]), record[key] * factor) for record in records if record.get(key) is not None]
    return Curve(name, points, **style)


def figure_html(chart: Chart) -> str:
    """Return a chart with its caption, drawn once for each width of window; '' if no curve has a point."""
    sizes = SIZES.items() if chart.is_wide else list(SIZES.items())[1:]
    drawn = {name: chart_svg(chart, size) for name, size in sizes}
    if not any(drawn.values()):
        return ""
    caption = escape(chart.title) + (" " + element("span", escape(chart.unit)) if chart.unit else "")
    for curve in chart.curves:
        if curve.points and curve.kind != "lost":
            value = curve.points[-1][1]
            last = f"{value:.4f}" if 0.1 <= abs(value) < 100 and chart.unit != "%" else number(value)
            caption += f'<span><i class="c{curve.colour}"></i>{escape(curve.name)}, last {last}</span>'
    caption += element("span", escape(chart.note)) if chart.note else ""
    caption += f'<span><i class="restart"></i>{RESTART}</span>' if chart.marks else ""
    drawings = "".join(element("div", svg, class_=name) for name, svg in drawn.items())
    return element("figure", element("figcaption", caption) + drawings, class_="wide" if chart.is_wide else "half")


def expert_maps_html(steps: Sequence[Record], config: Config | None = None) -> str:
    """Return the heat maps of a run's step records; '' if none has the load of its experts.

    config: that of the run, if known: with it, the expert-parallel ranks are marked, and the load that chance alone
    gives at balanced routing is shown.
    """
    found = [record for record in steps if record.get("expert_load")]
    if not found:
        return ""
    cells = sum(map(len, found[-1]["expert_load"].values()))
    count = max(1, min(MOST_MAPS, MOST_CELLS // cells, len(found)))
    chosen = [found[-1 - round(index * (len(found) - 1) / max(count - 1, 1))] for index in reversed(range(count))]
    legend = " ".join(element("i", "", style=f"background:{heat(level)}") for level in range(LEVELS))
    ep = 1 if config is None else config.parallel.expert_model_parallel_size
    axes = "Rows: layers; columns: experts" + (f" of {ep} expert-parallel ranks." if ep > 1 else ".")
    note = f"Load of each expert over the mean of its layer: <span>0 {legend} 2 and more.</span> {axes}"
    maps = "".join(_map(record, ep) for record in chosen)
    chance = "" if config is None else _chance(found[-1], config)
    return f'<p class="soft key">{note}</p>{chance}<div class="maps">{maps}</div>'


def _chance(record: Record, config: Config) -> str:
    """Return a paragraph with the largest load that a step's tokens give at balanced routing, and the measured one."""
    loads, topk = list(record["expert_load"].values()), config.model.moe_router_topk
    experts, tokens = len(loads[0]), record["global_batch_size"] * config.model.seq_length
    if not 0 < topk <= experts or tokens < 1:
        return ""
    most, expected = [max(of_layer) for of_layer in loads], expected_imbalance(experts, tokens, topk)
    return (
        f'<p class="soft">Busiest expert of a layer over the mean, at step {record["step"]:,}: expected for balanced '
        f"routing {expected:.2f} (chance alone, {tokens:,} tokens, top {topk} of {experts}), measured "
        f"{sum(most) / len(most):.2f} in the mean of the layers, {max(most):.2f} in the worst.</p>"
    )


def expected_imbalance(experts: int, tokens: int, topk: int) -> float:
    """Return the load of the fullest expert over the mean that chance alone gives at balanced routing.

    Every token draws topk of the experts. Their loads are taken to be normal, with a sum that is fixed: what one expert
    has more, the others have less. That is exact in the limit of many tokens.
    """
    if experts == 1:
        return 1.0
    mean = tokens * topk / experts
    width = math.sqrt(mean * (1.0 - topk / experts) * experts / (experts - 1)) or 1e-9
    normal, steps, low, high = NormalDist(), 400, mean - 8.0 * width, mean + 8.0 * width
    grid = (low + (high - low) * (step + 0.5) / steps for step in range(steps))
    largest = low + (high - low) / steps * sum(1.0 - normal.cdf((load - mean) / width) ** experts for load in grid)
    return min(float(tokens), largest) / mean


def heat(level: int) -> str:
    """Return a colour of the heat maps, level 0 .. LEVELS - 1."""
    middle = (LEVELS - 1) / 2
    end, share = (LITTLE, 1 - level / middle) if level < middle else (MUCH, level / middle - 1)
    mixed = (round(mean + (other - mean) * share) for mean, other in zip(MEAN, end, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _map(record: Record, ep: int) -> str:
    """Return the heat map of a step: a row per layer, a column per expert, lines between expert-parallel ranks."""
    load: dict[str, list[float]] = record["expert_load"]
    columns = max(map(len, load.values()))
    cell, per_rank, bottom = min(CELL, MAP_WIDTH / columns), max(1, columns // ep), MAP_TOP + ROW * len(load)
    parts = [*_numbers(columns, cell, bottom + 12, ""), rect(0, 0, cell, ROW, class_="hover", visibility="hidden")]
    for row, (layer, loads) in enumerate(load.items()):
        y, worst = MAP_TOP + row * ROW, max(range(len(loads)), key=loads.__getitem__)
        levels = sorted((min(LEVELS - 1, round(value * (LEVELS - 1) / 2)), x) for x, value in enumerate(loads))
        cells = merged((heat(level), MAP_LEFT + x * cell, y, cell, ROW) for level, x in levels)
        label = text(MAP_LEFT - 5, y + ROW - 3, layer, text_anchor="end", class_="tick")
        title = titled(f"layer {layer}: expert {worst} has {loads[worst]:.2f} times the mean")
        parts.append(element("g", title + label + "".join(cells)))
    if ep > 1:
        parts += _numbers(columns // per_rank, per_rank * cell, MAP_TOP - 5, "ep ")
        borders = (MAP_LEFT + at * cell for at in range(per_rank, columns, per_rank))
        parts += (line(x, 4, x, bottom, class_="border") for x in borders)
    parts.append(_data({"layers": list(load), "load": list(load.values()), "per_rank": per_rank, "ep": ep}))
    width, height, name = MAP_LEFT + math.ceil(columns * cell) + 8, bottom + 16, f"step {record['step']:,}"
    size = {"width": width, "height": height, "viewBox": f"0 0 {width} {height}", "role": "img", "aria_label": name}
    drawn = element("svg", "".join(parts), class_="heat", data_frame=f"{MAP_LEFT} {cell:.4f} {MAP_TOP} {ROW}", **size)
    caption = name + element("span", f"at most {max(map(max, load.values())):.2f} times the mean")
    return element("figure", element("figcaption", caption) + element("div", drawn, class_="scroll", tabindex=0))


def _numbers(count: int, width: float, y: float, before: str) -> Iterator[str]:
    """Yield the numbers of columns, of all or of every so many for which there is room. width: of a column in px."""
    step = max(1, int(round_step((7 * len(f"{before}{count - 1}") + 4) / width)))
    for index in range(0, count, step):
        yield text(MAP_LEFT + (index + 0.5) * width, y, f"{before}{index}", text_anchor="middle", class_="tick")
