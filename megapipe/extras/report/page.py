"""The HTML report of a run: a single file that loads nothing over the network and is readable without JavaScript.

And the comparison of several runs: results, curves over each other, settings in which they differ.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from itertools import count
from statistics import fmean, median
from typing import Any

from megapipe.config.config import Config, fields_by_key
from megapipe.config.load import from_yaml
from megapipe.errors import ConfigError
from megapipe.extras.report.charts import (
    NUM_COLOURS,
    Chart,
    Curve,
    Point,
    charts_html,
    curve_of,
    expert_maps_html,
    figure_html,
    number,
)
from megapipe.extras.report.comparison import pipeline_html, trace_html
from megapipe.extras.report.drawing import element, table_html, table_row, tiles_html
from megapipe.extras.report.folder import METRICS, RUN, Record, Run, Segment, Used, changed_settings, values_used
from megapipe.formatting import bytes_text, count_text, duration_text, grid_text, seconds_text, text_table
from megapipe.version import __version__

STATES = {"ended": "finished", "stopped": "stopped early", "unknown": "no end recorded"}  # Segment.ending -> text
MACHINE = ("device", "cores", "threads_per_rank", "backend", "system")  # keys of a start's record


def page(run: Run) -> str:
    """Return the report as HTML."""
    now = time.time()
    title = f"{run.folder.resolve().parent.name}/{run.folder.resolve().name}"
    problems, plan = _problems(run), "\n".join(_plan(run))
    sections = {
        "Warnings": problems,
        "Training curves": charts_html(run),
        "Load of experts": expert_maps_html(run.steps, _config(run)),
        "Pipeline: plan and measurement" if run.has_pipeline else "Profile": _pipeline(run),
        "Grid and stages": _folded("plan, as printed at the start", plan, is_open=True) if plan else "",
        "Configuration": _configuration(run),
        "Starts of the run": _starts(run) + ("" if problems else '<p class="soft">No warnings.</p>'),
        "Versions and machine": _versions(run),
    }
    sources = [name for name in (METRICS, RUN) if (run.folder / name).is_file()]
    sources += [run.profile_path.name] if run.profile_path else []
    footer = f"Written {moment(now)} by megapipe report {__version__} from {', '.join(sources)}."
    ending = run.last.ending
    state = STATES.get(ending, ending)
    if ending in ("running", "unknown") and run.last.times:
        state += f", last record {duration_text(max(0.0, now - max(run.last.times)))} ago"
    about = [_grid(run.started["grid"])] if run.started.get("grid") else []
    about += [line.strip()[len("model") :].strip() for line in _plan(run) if line.strip().startswith("model ")][:1]
    lines = " \N{MIDDLE DOT} ".join(map(escape, filter(None, about)))
    below = f'<div class="soft">{lines}</div>' if lines else ""
    header = f'<header><h1>{escape(title)}</h1><span class="state {ending}">{state}</span>{below}</header>'
    return html_page(title, [header, _tiles(run)], sections, footer)


def html_page(title: str, top: Sequence[str], sections: Mapping[str, str], footer: str) -> str:
    """Return a whole HTML file. sections: heading -> content, which is left out if it is empty.

    Its policy lets a browser run no other script than its own, and load nothing.
    """
    style, script = (
        files("megapipe.extras.report").joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} - megapipe</title><style>{style}</style></head>"
    )
    parts = [head, "<body>", *top]
    parts += [f"<section><h2>{name}</h2>\n{content}\n</section>" for name, content in sections.items() if content]
    parts += [f'<footer class="soft">{escape(footer)}</footer>', f"<script>{script}</script>", "</body></html>\n"]
    return "\n".join(parts)


def _tiles(run: Run) -> str:
    steps = run.steps
    if not steps:
        return "<p>No step has been logged yet (a step is logged every <code>--log-interval</code> steps).</p>"
    last = steps[-1]

    def values(key: str) -> list[float]:
        return [record[key] for record in steps if record.get(key) is not None]

    about = f"{number(last['consumed_tokens'])} tokens, global batch {last['global_batch_size']:,}"
    tiles: list[tuple[str, ...]] = [("steps", f"{last['step']:,}", about, f"of {last['train_iters']:,}")]
    loss = "NaN or infinite" if last["loss"] is None else f"{last['loss']:.4f}"
    tiles.append(("training loss", loss, f"nats per token after step {last['step']:,}"))
    for split in ("validation", "test"):
        found = run.evaluations(split)
        if found and found[-1]["loss"] is not None:
            loss, perplexity = found[-1]["loss"], math.exp(min(found[-1]["loss"], 50.0))
            about = f"perplexity {number(perplexity)}, after step {found[-1]['step']:,}"
            tiles.append((f"{split} loss", f"{loss:.4f}", about))
    about = f"tokens/s, {seconds_text(median(values('step_seconds')))} per step (medians)"
    tiles.append(("speed", f"{median(values('tokens_per_second')):,.0f}", about))
    if last.get("mfu") is not None:
        tiles.append(("MFU", f"{median(values('mfu')):.1%}", "model FLOPs as a share of the device's peak"))
    if values("bubble"):
        about = f"median over all steps; planned {last['predicted_bubble']:.1%}"
        tiles.append(("bubble", f"{median(values('bubble')):.1%}", about))
    if last.get("memory_bytes"):
        tiles.append(("memory", bytes_text(max(values("memory_bytes"))), "maximum over ranks"))
    seconds = sum(max(segment.times) - min(segment.times) for segment in run.segments if segment.times)
    if seconds:
        tiles.append(("time", duration_text(seconds), count_text(len(run.segments), "start")))
    return tiles_html(tiles)


def _problems(run: Run) -> str:
    """Return the warnings and failures; '' if the run has neither."""
    items = []
    for segment in run.segments:
        ranks: dict[str, list[str]] = {}  # an error that several ranks report is shown once
        for record in segment.of("failure"):
            ranks.setdefault(f"{record['error']}: {record['text']}", []).append(str(record["rank"]))
        items += [f"rank{'s' * (len(who) > 1)} {' '.join(who)}: {text}" for text, who in ranks.items()]
        items += [record["text"] for record in segment.of("warning")]
    items += run.oddities
    nonfinite = [record["step"] for record in run.steps if record["loss"] is None]
    items += [f"the loss of step {step:,} is NaN or infinite" for step in nonfinite[:5]]
    if run.last.ending == "unknown" and run.last.last("start"):
        items.append("no end was recorded: the run is still going on another machine, or it was killed")
    elif run.last.ending == "unknown":
        items.append(f"this run wrote no {RUN}, so how it ended is unknown")
    return _list(dict.fromkeys(items), "warnings") if items else ""


def _config(run: Run) -> Config | None:
    """Return the run's configuration; None if it was not recorded or cannot be read."""
    try:
        return from_yaml(run.config_text) if run.config_text else None
    except ConfigError:
        return None


def _pipeline(run: Run) -> str:
    """Return the section on the pipeline; of a single pipeline rank only where its trace is, '' without a profile."""
    if not run.has_pipeline:
        return trace_html(run.profile_path) if run.profile_path else ""
    if run.profile is not None and run.profile_path is not None:
        return pipeline_html(run.profile, run.profile_path, run.num_profiles)
    last = run.steps[-1]["step"] if run.steps else 0
    start = last if run.last.ending != "running" else last + 50
    return (
        "<p>No step of this run was profiled. Profiling two steps is enough: "
        "add these flags to the command that starts or resumes the run.</p>"
        f"<pre>--profile-pipeline --profile-step-start {start} --profile-step-end {start + 2}</pre>"
        '<p class="soft">This section then compares the planned and the measured timeline and their bubbles.</p>'
    )


def _grid(recorded: Mapping[str, Any]) -> str:
    """Return a description of a recorded grid such as '8 ranks = tp 2 x pp 2 x 2 chunks x dp 2'."""
    sizes = {name: recorded[name] for name in ("tp", "pp", "dp", "cp", "chunks")}
    return f"{count_text(recorded['world_size'], 'rank')} = {grid_text(**sizes)}"


def _plan(run: Run) -> list[str]:
    """Return the lines of the plan that the last start printed."""
    return str(run.started.get("plan", "")).splitlines()


def _configuration(run: Run) -> str:
    """Return the settings that differ from the defaults; the command and the whole configuration are folded away."""
    changed, why_none = changed_settings(run.config_text)
    rows = [table_row(["section", "setting", "value", "default", "from"], tag="th")]
    for setting in changed:
        short = re.sub(r"\S*/", "", setting.origin).removesuffix(f" {setting.flag}")
        cells = [
            element("td", setting.section, class_="section soft"),
            element("code", setting.flag),
            element("td", element("b", escape(setting.value)), class_="v"),
            element("td", escape(setting.default), class_="soft v"),
            element("td", escape(short), class_="soft v", title=setting.origin),
        ]
        rows.append(table_row(cells))
    parts = [table_html(rows, "settings") if changed else f"<p>{escape(why_none)}.</p>"]
    remarks, command = run.started.get("remarks"), run.started.get("command")
    if remarks:
        parts.append(_list(remarks))
    if command:
        parts.append(_folded("command line of the last start", " ".join(command)))
    if run.config_text:
        parts.append(_folded("whole configuration as YAML, for --config", run.config_text))
    return "".join(parts)


def _starts(run: Run) -> str:
    """Return a table of the starts of the run and how each ended, with the other log messages folded away."""
    head = ["start", "time", "duration", "steps logged", "started", "ended"]
    rows = [table_row(head, tag="th")]
    for index, segment in enumerate(run.segments, start=1):
        rows.append(table_row(_labelled(head, map(escape, (str(index), *_start(segment))))))
    notes = [record for segment in run.segments for record in segment.of("note")]
    lines = "".join(f"{moment(record['time'])}  {record['text']}\n" for record in notes)
    more = _folded(f"other log messages ({len(notes)})", lines) if notes else ""
    return f"{table_html(rows, 'cards')}{more}"


def _start(segment: Segment) -> Iterator[str]:
    """Yield time, duration, steps, beginning and end of a start."""
    times, steps, end, failures = segment.times, segment.steps, segment.last("end"), segment.of("failure")
    yield moment(min(times)) if times else ""
    yield duration_text(max(times) - min(times)) if times else ""
    yield f"{steps[0]['step']:,} to {steps[-1]['step']:,}" if steps else "none"
    resumed = segment.last("resumed")
    if resumed is not None:
        yield f"from {resumed['path']}"
    else:
        yield "from the beginning" if segment.last("start") else ""
    if end is not None:
        yield f"after step {end['step']:,}: {end['reason']}"
    elif failures:
        yield f"{failures[0]['error']} on rank {failures[0]['rank']}"
    else:
        yield STATES.get(segment.ending, segment.ending)


def _versions(run: Run) -> str:
    """Return the software versions and the machine of the last start."""
    start = run.started
    if not start:
        return f"<p>This run wrote no {RUN}, so its versions and its machine are unknown.</p>"
    machine = {key.replace("_", " "): value for key, value in start["machine"].items() if key in MACHINE}
    rows = {**start["versions"], "host of rank 0": start["host"], **machine}.items()
    cells = ((element("th", escape(name)), element("td", escape(str(value)), class_="v")) for name, value in rows)
    return table_html(map(table_row, cells), "narrow")


def _labelled(names: Iterable[str], contents: Iterable[str]) -> Iterator[str]:
    """Return the cells of a row of a table of class 'cards', whose columns a narrow page writes below each other."""
    cells = zip(names, contents, strict=True)
    return (element("td", content, class_="v", data_label=name) for name, content in cells)


def _list(items: Iterable[str], kind: str | None = None) -> str:
    return element("ul", "".join(element("li", escape(item)) for item in items), class_=kind)


def _folded(summary: str, text: str, is_open: bool = False) -> str:
    """Return text that a click on its summary unfolds."""
    tag = "<details open>" if is_open else "<details>"
    return f"{tag}<summary>{summary}</summary><pre>{escape(text)}</pre></details>"


def moment(seconds: float) -> str:
    """Return Unix seconds as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


# -------------------------------------------------------------------------------------------------------- several runs

MOST_COLUMNS = 40  # of a value at the terminal
CURVE_POINTS = 100  # smoothed curves average over so many parts of a run
PLACES = {  # fields that say where a run writes, which differ between any two runs
    "checkpoint.save",
    "checkpoint.load",
    *(f"logging.{name}" for name in ("metrics_file", "tensorboard_dir", "wandb_exp_name", "wandb_save_dir")),
}
COMPARED = ("device", "cores", "threads_per_rank", "backend")  # keys of a start's record
Table = list[list[str]]  # a header, then rows


def named(runs: Sequence[Run]) -> dict[str, Run]:
    """Return the runs by name: the fewest last parts of its path, without checkpoints/, that no other run has.

    Raises ConfigError.
    """
    folders = [run.folder.resolve() for run in runs]
    for index, folder in enumerate(folders):
        if folder in folders[:index]:
            raise ConfigError(f"{runs[index].folder} is given twice; compare different runs")
    if len(runs) > NUM_COLOURS:
        raise ConfigError(f"{len(runs)} runs are too many for one chart; compare at most {NUM_COLOURS} at a time")
    trimmed = [(each.parent if each.name == "checkpoints" else each).parts for each in folders]
    parts = trimmed if len(set(trimmed)) == len(folders) else [folder.parts for folder in folders]
    ends = (
        next(each[-depth:] for depth in count(1) if sum(other[-depth:] == each[-depth:] for other in parts) == 1)
        for each in parts
    )
    return {"/".join(end): run for end, run in zip(ends, runs, strict=True)}


def differences(runs: Mapping[str, Run]) -> tuple[Table, list[str]]:
    """Return the settings whose values differ, with a column for each run, and the reasons why some are unknown.

    Besides the configuration: the grid, the versions and the machine. Fields that only say where a run writes are left
    out, and so are those that every run took over from another setting. The table is empty if nothing differs.
    """
    values: dict[str, dict[str, Used]] = {}
    problems = []
    for name, run in runs.items():
        try:
            if not run.config_text:
                raise ConfigError("it recorded none")
            values[name] = values_used(run.config_text)
        except ConfigError as error:
            problems.append(f"the configuration of {name} is unknown: {error}")
    rows = []
    for key, field in fields_by_key().items():
        used = [each[key] for each in values.values()]
        chosen = any(each.has_effect and not each.follows for each in used)
        if key not in PLACES and chosen and len({each.text for each in used}) > 1:
            shown = {name: each[key].text if each[key].has_effect else "not used" for name, each in values.items()}
            rows.append([field.main_flag, *(shown.get(name, "unknown") for name in runs)])
    versions = dict.fromkeys(name for run in runs.values() for name in run.started.get("versions", ()))
    recorded = [_recorded(run.started) if run.started else {} for run in runs.values()]
    for label in ("grid", *versions, *(name.replace("_", " ") for name in COMPARED)):
        texts = [each.get(label, "unknown") for each in recorded]
        if len(set(texts) - {"unknown"}) > 1:
            rows.append([label, *texts])
    return ([["setting", *runs], *rows] if rows else []), problems


def _recorded(start: Record) -> dict[str, str]:
    """Return grid, versions and machine of the record of a start."""
    machine = {key.replace("_", " "): str(value) for key, value in start["machine"].items() if key in COMPARED}
    versions = {name: str(version) for name, version in start["versions"].items()}
    return {"grid": _grid(start["grid"]), **versions, **machine}


def results(runs: Mapping[str, Run]) -> Table:
    """Return a table with a row for each run: how far it got, its losses, speed and time."""
    common = common_step(runs)
    extra = [] if common is None else [f"at step {common:,}"]
    rows = [["run", "steps", "tokens", "training loss", "validation loss", *extra, "tokens/s", "step", "time", "state"]]
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
    """Return the comparison for a terminal: results, then settings that differ. heading: formats the two titles."""
    table, problems = differences(runs)
    half = MOST_COLUMNS // 2 - 2
    shortened = [
        [text if len(text) <= MOST_COLUMNS else f"{text[:half]}...{text[-half:]}" for text in row] for row in table
    ]
    lines = [heading("results"), *text_table(results(runs), left=(0, -1)), f"  {EXPLAINED}", ""]
    lines.append(heading("settings that differ") if table else "no setting differs")
    lines += text_table(shortened, left=range(len(runs) + 1)) if table else ()
    return "\n".join([*lines, *problems])


def compare_page(runs: Mapping[str, Run]) -> str:
    """Return the comparison as HTML: results, curves, settings that differ."""
    table, problems = differences(runs)
    names = [element("span", escape(name), class_=f"run c{index}") for index, name in enumerate(runs)]
    settings = "".join(f"<p>{escape(problem)}.</p>" for problem in problems)
    rows = [table_row(["setting", *names], tag="th")]
    for setting, *values in table[1:]:
        rows.append(table_row([element("code", escape(setting)), *_labelled(runs, map(escape, values))]))
    settings = (table_html(rows, "cards") if table else "<p>No setting differs.</p>") + settings
    head, *shown = results(runs)
    rows = [table_row(head, tag="th")]
    for name, (_, *values) in zip(names, shown, strict=True):
        rows.append(table_row([name, *_labelled(head[1:], map(escape, values))]))
    charts = "".join(map(figure_html, charts_of(runs)))
    sections = {
        "Results": f'<div class="scroll">{table_html(rows, "cards results")}</div><p class="soft">{EXPLAINED}</p>',
        "Curves": f'<div class="charts">{charts}</div>' if charts else "<p>No step has been logged yet.</p>",
        "Settings that differ": settings,
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
    means = (fmean(y for _, y in points[max(0, index - span + 1) : index + 1]) for index in range(len(points)))
    return [(x, mean) for (x, _), mean in zip(points, means, strict=True)]
