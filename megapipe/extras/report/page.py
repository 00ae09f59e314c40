"""The HTML report: a single file that loads nothing over the network and is readable without JavaScript."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from statistics import median

from megapipe import __version__
from megapipe.extras.report.about import (
    configuration_html,
    grid_html,
    grid_words,
    plan_lines,
    starts_html,
    versions_html,
)
from megapipe.extras.report.charts import charts_html
from megapipe.extras.report.folder import METRICS, RUN, Record, Run
from megapipe.extras.report.messages import STATES, bytes_text, duration, loss_text, moment, number
from megapipe.extras.report.pipeline import pipeline_html


def page(run: Run, now: float | None = None) -> str:
    """Return the report as HTML. now: time of writing in Unix seconds."""
    now = time.time() if now is None else now
    title = f"{run.folder.resolve().parent.name}/{run.folder.resolve().name}"
    problems = _problems(run)
    parts = [
        _header(run, title, now),
        _tiles(run),
        problems,
        _section("Training curves", charts_html(run)),
        _section("Pipeline: plan and measurement", _pipeline(run)),
        _section("Grid and stages", grid_html(run)),
        _section("Configuration", configuration_html(run)),
        _section("Starts of the run", starts_html(run) + ("" if problems else '<p class="soft">No warnings.</p>')),
        _section("Versions and machine", versions_html(run)),
        f'<footer class="soft">Written {moment(now)} by megapipe report {__version__} from {_sources(run)}.</footer>',
    ]
    script = files("megapipe.extras.report").joinpath("page.js").read_text(encoding="utf-8")
    style = files("megapipe.extras.report").joinpath("page.css").read_text(encoding="utf-8")
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} - megapipe run</title><style>{style}</style></head>"
    )
    return "\n".join([head, "<body>", *filter(None, parts), f"<script>{script}</script>", "</body></html>\n"])


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>\n{content}\n</section>" if content else ""


def _header(run: Run, title: str, now: float) -> str:
    ending = run.last.ending
    grid = run.started.get("grid", {})
    what = grid_words(grid) if grid else ""
    model = next(
        (line.strip().removeprefix("model").strip() for line in plan_lines(run) if line.strip().startswith("model ")),
        "",
    )
    lines = " \N{MIDDLE DOT} ".join(escape(text) for text in (what, model) if text)
    about = f'<div class="soft">{lines}</div>' if lines else ""
    return f'<header><h1>{escape(title)}</h1><span class="state {ending}">{_state(run, now)}</span>{about}</header>'


def _state(run: Run, now: float) -> str:
    text = STATES[run.last.ending]
    if run.last.ending in ("running", "unknown") and run.last.last_time is not None:
        text += f", last record {duration(max(0.0, now - run.last.last_time))} ago"
    return text


def _tiles(run: Run) -> str:
    steps = run.steps
    if not steps:
        return "<p>No step has been logged yet (a step is logged every <code>--log-interval</code> steps).</p>"
    last = steps[-1]
    tiles = [
        (
            "steps",
            f"{last['step']:,} of {last['train_iters']:,}",
            f"{number(last['consumed_tokens'])} tokens, global batch {last['global_batch_size']:,}",
        ),
        ("training loss", loss_text(last["loss"]), f"nats per token after step {last['step']:,}"),
        *_validation_tiles(run),
        (
            "speed",
            f"{median(record['tokens_per_second'] for record in steps):,.0f}",
            f"tokens/s, {_step_time(steps)} per step (medians)",
        ),
    ]
    if last.get("mfu") is not None:
        tiles.append(
            (
                "MFU",
                f"{median(record['mfu'] for record in steps if record.get('mfu') is not None):.1%}",
                "model FLOPs as a share of the device's peak",
            )
        )
    bubbles = [record["bubble"] for record in steps if record.get("bubble") is not None]
    if bubbles:
        tiles.append(
            (
                "bubble",
                f"{median(bubbles):.1%}",
                f"median over all steps; planned {last['predicted_bubble']:.1%}",
            )
        )
    if last.get("memory_bytes"):
        tiles.append(("memory", bytes_text(max(record["memory_bytes"] or 0 for record in steps)), "maximum over ranks"))
    seconds = sum((segment.last_time or 0.0) - (segment.first_time or 0.0) for segment in run.segments)
    if seconds:
        tiles.append(("time", duration(seconds), f"{len(run.segments)} start{'s' * (len(run.segments) > 1)}"))
    drawn = "".join(
        f'<div class="tile"><b>{name}</b><span class="big">{value}</span><small>{meaning}</small></div>'
        for name, value, meaning in tiles
    )
    return f'<div class="tiles">{drawn}</div>'


def _step_time(steps: Sequence[Record]) -> str:
    seconds = median(record["step_seconds"] for record in steps)
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.3g} s"


def _validation_tiles(run: Run) -> Iterator[tuple[str, str, str]]:
    for split in ("validation", "test"):
        found = run.evaluations(split)
        if found and found[-1]["loss"] is not None:
            loss = found[-1]["loss"]
            yield (
                f"{split} loss",
                loss_text(loss),
                f"perplexity {number(math.exp(min(loss, 50.0)))}, after step {found[-1]['step']:,}",
            )


def _problems(run: Run) -> str:
    """Return the section of warnings and failures; '' if the run has neither."""
    items = []
    for segment in run.segments:
        ranks: dict[str, list[str]] = {}  # an error that several ranks report is shown once
        for record in segment.failures:
            ranks.setdefault(f"{record['error']}: {record['text']}", []).append(str(record["rank"]))
        items += [f"rank{'s' * (len(who) > 1)} {' '.join(who)}: {text}" for text, who in ranks.items()]
        items += [record["text"] for record in segment.warnings]
    items += run.oddities
    items += [
        f"the loss of step {record['step']:,} is NaN or infinite" for record in run.steps if record["loss"] is None
    ][:5]
    if run.last.ending == "unknown":
        items.append(
            "no end was recorded: the run is still going on another machine, or it was killed"
            if run.last.start
            else f"this run wrote no {RUN}, so how it ended is unknown"
        )
    if not items:
        return ""
    listed = "".join(f"<li>{escape(item)}</li>" for item in dict.fromkeys(items))
    return f'<section><h2>Warnings</h2><ul class="warnings">{listed}</ul></section>'


def _pipeline(run: Run) -> str:
    if run.profile is not None and run.profile_path is not None:
        return pipeline_html(run.profile, run.profile_path, run.num_profiles)
    last = run.steps[-1]["step"] if run.steps else 0
    start = last if run.last.ending != "running" else last + 50
    return (
        "<p>No step of this run was profiled. Profiling two steps is enough: "
        "add these flags to the command that starts or resumes the run.</p>"
        f"<pre>--profile-pipeline --profile-step-start {start} --profile-step-end {start + 2}</pre>"
        '<p class="soft">This section then compares the planned and the measured timeline and their bubbles, '
        "and lists the causes of the difference.</p>"
    )


def _sources(run: Run) -> str:
    names = [name for name in (METRICS, RUN) if (run.folder / name).is_file()]
    return ", ".join([*names, *([run.profile_path.name] if run.profile_path else [])])
