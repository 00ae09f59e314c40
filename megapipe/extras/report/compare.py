"""Comparison of several runs: the settings in which they differ, their results, their curves over each other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import count
from statistics import fmean, median

from megapipe.config.config import Config, fields_by_key, value_of
from megapipe.config.fields import ConfigField, value_text
from megapipe.config.load import from_yaml
from megapipe.errors import ConfigError
from megapipe.extras.report.charts import NUM_COLOURS, Chart, Curve, Point, curve_of, figure_html, number
from megapipe.extras.report.drawing import element, table_html, table_row
from megapipe.extras.report.folder import Record, Run
from megapipe.extras.report.page import STATES, grid_text, html_page, moment
from megapipe.formatting import duration_text, seconds_text, text_table
from megapipe.version import __version__

MOST_COLUMNS = 40  # of a value at the terminal
CURVE_POINTS = 100  # smoothed curves average over so many parts of a run
PLACES = {  # fields that say where a run writes, which differ between any two runs
    "checkpoint.save",
    "checkpoint.load",
    *(f"logging.{name}" for name in ("metrics_file", "tensorboard_dir", "wandb_exp_name", "wandb_save_dir")),
}
MACHINE = ("device", "cores", "threads_per_rank", "backend")  # keys of a start's record
Table = list[list[str]]  # a header, then rows


def named(runs: Sequence[Run]) -> dict[str, Run]:
    """Return the runs by a short name: the last parts of their paths that tell them apart. Raises ConfigError."""
    folders = [run.folder.resolve() for run in runs]
    for index, folder in enumerate(folders):
        if folder in folders[:index]:
            raise ConfigError(f"{runs[index].folder} is given twice; compare different runs")
    if len(runs) > NUM_COLOURS:
        raise ConfigError(f"{len(runs)} runs are too many for one chart; compare at most {NUM_COLOURS} at a time")
    parts = [folder.parts for folder in folders]
    while len(parts) > 1 and len({each[-1] for each in parts}) == 1:  # a/checkpoints and b/checkpoints are a and b
        parts = [each[:-1] for each in parts]
    depth = next(depth for depth in count(1) if len({each[-depth:] for each in parts}) == len(parts))
    return {"/".join(each[-depth:]): run for each, run in zip(parts, runs, strict=True)}


def differences(runs: Mapping[str, Run]) -> tuple[Table, list[str]]:
    """Return the settings whose values differ, with a column for each run, and the reasons why some are unknown.

    Besides the configuration: the grid, the versions and the machine. Fields that only say where a run writes are left
    out. The table is empty if nothing differs.
    """
    configs: dict[str, Config] = {}
    problems = []
    for name, run in runs.items():
        try:
            if not run.config_text:
                raise ConfigError("it recorded none")
            configs[name] = from_yaml(run.config_text)
        except ConfigError as error:
            problems.append(f"the configuration of {name} is unknown: {error}")
    rows = []
    for key, field in fields_by_key().items():
        texts = [_value(configs[name], field) if name in configs else "unknown" for name in runs]
        if key not in PLACES and len({texts[index] for index, name in enumerate(runs) if name in configs}) > 1:
            rows.append([field.main_flag, *texts])
    versions = dict.fromkeys(name for run in runs.values() for name in run.started.get("versions", ()))
    recorded = [_recorded(run.started) if run.started else {} for run in runs.values()]
    for label in ("grid", *versions, *(name.replace("_", " ") for name in MACHINE)):
        texts = [each.get(label, "unknown") for each in recorded]
        if len(set(texts) - {"unknown"}) > 1:
            rows.append([label, *texts])
    return ([["setting", *runs], *rows] if rows else []), problems


def _recorded(start: Record) -> dict[str, str]:
    """Return grid, versions and machine of the record of a start."""
    machine = {key.replace("_", " "): str(value) for key, value in start["machine"].items() if key in MACHINE}
    versions = {name: str(version) for name, version in start["versions"].items()}
    return {"grid": grid_text(start["grid"]), **versions, **machine}


def _value(config: Config, field: ConfigField) -> str:
    value = value_of(config, field)
    return field.option.derived or "none" if value is None else value_text(value)


def results(runs: Mapping[str, Run]) -> Table:
    """Return a table with a row for each run: how far it got, its losses, speed and time."""
    common = common_step(runs)
    at_common = [] if common is None else [f"at step {common:,}"]
    rows = [["run", "steps", "tokens", "training loss", "validation loss", *at_common, "tokens/s", "step", "time", ""]]
    for name, run in runs.items():
        steps, evaluated = run.steps, _losses(run.evaluations("validation"))
        last = steps[-1] if steps else None
        recent = [loss for _, loss in _losses(steps)][-max(1, len(steps) // 20) :]
        seconds = sum(max(segment.times) - min(segment.times) for segment in run.segments if segment.times)
        values = dict(evaluated)
        rows.append(
            [
                name,
                f"{last['step']:,} of {last['train_iters']:,}" if last else "none",
                number(last["consumed_tokens"]) if last else "",
                f"{fmean(recent):.4f}" if recent else "",
                f"{evaluated[-1][1]:.4f}" if evaluated else "",
                *([] if common is None else [f"{values[common]:.4f}"]),
                f"{median(step['tokens_per_second'] for step in steps):,.0f}" if steps else "",
                seconds_text(median(step["step_seconds"] for step in steps)) if steps else "",
                duration_text(seconds) if seconds else "",
                STATES.get(run.last.ending, run.last.ending),
            ]
        )
    return rows


def common_step(runs: Mapping[str, Run]) -> int | None:
    """Return the last step after which all runs were validated, None if there is none or it is the last of each."""
    steps = [[int(step) for step, _ in _losses(run.evaluations("validation"))] for run in runs.values()]
    common = set.intersection(*map(set, steps))
    if not common or all(each[-1] == max(common) for each in steps):
        return None
    return max(common)


def _losses(records: Sequence[Record]) -> list[Point]:
    return [(record["step"], record["loss"]) for record in records if record["loss"] is not None]


EXPLAINED = (
    "training loss: mean of the last twentieth of the logged steps; tokens/s and step: medians of the logged steps"
)


def compare_text(runs: Mapping[str, Run], heading: Callable[[str], str] = str) -> str:
    """Return the comparison for a terminal: settings that differ, then results. heading: formats the two titles."""
    table, problems = differences(runs)
    half = MOST_COLUMNS // 2 - 2
    shortened = [
        [text if len(text) <= MOST_COLUMNS else f"{text[:half]}...{text[-half:]}" for text in row] for row in table
    ]
    lines = (
        [heading("settings that differ"), *text_table(shortened, left=range(len(runs) + 1))]
        if table
        else ["no setting differs"]
    )
    lines += [*problems, "", heading("results"), *text_table(results(runs), left=(0, -1)), f"  {EXPLAINED}"]
    return "\n".join(lines)


def compare_page(runs: Mapping[str, Run]) -> str:
    """Return the comparison as HTML: settings that differ, results, curves."""
    table, problems = differences(runs)
    names = [element("span", escape(name), class_=f"run c{index}") for index, name in enumerate(runs)]
    settings = "".join(f"<p>{escape(problem)}.</p>" for problem in problems)
    rows = [table_row(["setting", *names], tag="th")]
    for setting, *values in table[1:]:
        pairs = zip(runs, values, strict=True)
        cells = (element("td", escape(value), class_="v", data_run=name) for name, value in pairs)
        rows.append(table_row([element("code", escape(setting)), *cells]))
    settings = (table_html(rows, "differ") if table else "<p>No setting differs.</p>") + settings
    head, *shown = results(runs)
    rows = [table_row(head, tag="th")]
    rows += (table_row([name, *map(escape, values)]) for name, (_, *values) in zip(names, shown, strict=True))
    charts = "".join(map(figure_html, charts_of(runs)))
    sections = {
        "Settings that differ": settings,
        "Results": f'<div class="scroll">{table_html(rows)}</div><p class="soft">{EXPLAINED}</p>',
        "Curves": f'<div class="charts">{charts}</div>' if charts else "<p>No step has been logged yet.</p>",
    }
    title = " and ".join(runs) if len(runs) == 2 else f"{len(runs)} runs"
    folders = ", ".join(str(run.folder) for run in runs.values())
    footer = f"Written {moment(time.time())} by megapipe compare {__version__} from {folders}."
    return html_page(title, [f"<header><h1>{escape(title)}</h1></header>"], sections, footer)


def charts_of(runs: Mapping[str, Run]) -> list[Chart]:
    """Return the charts: losses, also over tokens if steps differ in size, then norm, rate, speed, memory."""
    sizes = {(step["step"], step["consumed_tokens"]) for run in runs.values() for step in run.steps}
    steps_differ = len(sizes) > len({step for step, _ in sizes})
    spans = {name: max(1, len(run.steps) // CURVE_POINTS) for name, run in runs.items()}
    smoothed = (
        f"means of {min(spans.values())} to {max(spans.values())} logged steps" if max(spans.values()) > 1 else ""
    )

    def curves(key: str, axis: str = "step", factor: float = 1.0, is_smooth: bool = False) -> list[Curve]:
        found = [
            curve_of(name, run.steps, key, factor, axis, colour=index) for index, (name, run) in enumerate(runs.items())
        ]
        return [replace(each, points=averaged(each.points, spans[each.name])) for each in found] if is_smooth else found

    validated = [
        Curve(name, _losses(run.evaluations("validation")), "dots", index)
        for index, (name, run) in enumerate(runs.items())
    ]
    charts = [
        Chart("Training loss", curves("loss", is_smooth=True), "nats per token", smoothed, is_wide=True),
        Chart("Validation loss", validated, "nats per token", is_wide=True),
    ]
    if steps_differ:
        over_tokens = curves("loss", "consumed_tokens", is_smooth=True)
        charts.insert(
            1, Chart("Training loss over tokens", over_tokens, "nats per token", smoothed, axis="tokens", is_wide=True)
        )
    return [
        *charts,
        Chart("Gradient norm", curves("grad_norm", is_smooth=True), note=smoothed),
        Chart("Learning rate", curves("lr"), from_zero=True),
        Chart("Speed", curves("tokens_per_second"), "tokens/s", from_zero=True),
        Chart("Memory", curves("memory_bytes", factor=2**-20), "MiB", "maximum over ranks", from_zero=True),
    ]


def averaged(points: Sequence[Point], span: int) -> list[Point]:
    """Return the running mean of `span` points, each at the last of its points; fewer at the beginning."""
    kept = []
    for index, (x, _) in enumerate(points):
        values = [y for _, y in points[max(0, index - span + 1) : index + 1]]
        kept.append((x, math.fsum(values) / len(values)))
    return kept
