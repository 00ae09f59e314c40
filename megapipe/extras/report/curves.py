"""The page's curves: loss, speed, memory, learning rate, gradient norm, bubble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from megapipe.extras.report.chart import Chart, Curve, Point, chart_svg
from megapipe.extras.report.folder import Record, Run
from megapipe.extras.report.words import number


def charts_html(run: Run) -> str:
    """All of them; '' where nothing was logged."""
    steps = run.steps
    marks = [
        (float(segment.steps[0]["step"]), f"start {i + 1}")
        for i, segment in enumerate(run.segments)
        if i and segment.steps
    ]
    charts = [
        Chart(
            "Loss",
            [
                Curve("training", _points(steps, "loss"), "line", 0),
                *(Curve("lost", _points(lost, "loss"), "lost", 0) for lost in run.lost_steps),
                Curve("validation", _points(run.evaluations("validation"), "loss"), "dots", 1),
                Curve("test", _points(run.evaluations("test"), "loss"), "dots", 2),
            ],
            "nats a token",
            "steps taken again after a restart: dashed" if any(run.lost_steps) else "",
            marks,
            width=1120,
            height=320,
        ),
        Chart(
            "Speed",
            [Curve("speed", _points(steps, "tokens_per_second"), "line", 2)],
            "tokens/s",
            marks=marks,
            from_zero=True,
        ),
        Chart(
            "Memory",
            [Curve("memory", _scaled(_points(steps, "memory_bytes"), 2**-20), "line", 3)],
            "MiB",
            "the most of any rank",
            marks,
            from_zero=True,
        ),
        Chart(
            "Learning rate", [Curve("learning rate", _points(steps, "lr"), "line", 0)], "", marks=marks, from_zero=True
        ),
        Chart(
            "Gradient norm",
            [Curve("gradient norm", _points(steps, "grad_norm"), "line", 1)],
            "",
            marks=marks,
            is_logarithmic=_spans(steps, "grad_norm"),
        ),
        Chart(
            "Bubble share of each step",
            [
                Curve("measured", _scaled(_points(steps, "bubble"), 100), "line", 1),
                Curve("planned", _scaled(_points(steps, "predicted_bubble"), 100), "line", 0),
            ],
            "%",
            marks=marks,
            from_zero=True,
        ),
    ]
    drawn = "".join(_figure(chart, wide=index == 0) for index, chart in enumerate(charts))
    note = next((record["bubble_note"] for record in reversed(steps) if record.get("bubble_note")), "")
    told = f'<p class="soft">Bubble of each step: {escape(note)}.</p>' if note else ""
    return f'<div class="charts">{drawn}</div>{told}' if drawn else ""


def _figure(chart: Chart, wide: bool = False) -> str:
    drawn = chart_svg(chart)
    if not drawn:
        return ""
    if wide:  # and once more for narrow windows, where it would shrink beyond reading
        drawn = f'<div class="broad">{drawn}</div><div class="narrow">{chart_svg(replace(chart, width=540, height=260))}</div>'
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
    """More than a factor of 30: a logarithmic axis shows it better."""
    values = [value for _, value in _points(records, key)]
    return bool(values) and min(values) > 0 and max(values) / min(values) > 30
