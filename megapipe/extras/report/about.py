"""Sections of the report about the run: grid, configuration, starts and ends, versions."""

from __future__ import annotations

from html import escape
from typing import Any

from megapipe.extras.report.folder import RUN, Run, Segment
from megapipe.extras.report.messages import STATES, duration, moment
from megapipe.extras.report.settings import Setting, changed_settings
from megapipe.formatting import count_text
from megapipe.topology import Topology

MAX_RANKS_SHOWN = 64


def grid_html(run: Run) -> str:
    """Return the section on the grid of ranks, with the printed plan."""
    grid, plan = run.started.get("grid"), "\n".join(plan_lines(run))
    parts = []
    if grid:
        parts.append(f"<p>{escape(grid_words(grid))}, schedule {escape(str(grid['schedule']))}.</p>")
        if 1 < grid["world_size"] <= MAX_RANKS_SHOWN:
            parts.append(_grid_table(grid))
    if plan:
        parts.append(
            f"<details open><summary>plan, as printed at the start</summary><pre>{escape(plan)}</pre></details>"
        )
    return "".join(parts)


def grid_words(grid: dict[str, Any]) -> str:
    """Return a description of the grid such as '8 ranks = tp 2 x pp 2 x 2 chunks x dp 2'."""
    chunks = f" x {grid['chunks']} chunks" if grid["chunks"] > 1 else ""
    cp = f" x cp {grid['cp']}" if grid["cp"] > 1 else ""
    ranks = count_text(grid["world_size"], "rank")
    return f"{ranks} = tp {grid['tp']}{cp} x pp {grid['pp']}{chunks} x dp {grid['dp']}"


def _grid_table(grid: dict[str, Any]) -> str:
    t = Topology(grid["tp"], grid["cp"], grid["pp"], grid["dp"], grid["order"])
    cells: dict[tuple[int, int], list[str]] = {}
    for ranks in t.groups("tp"):
        place = t.coordinates(ranks[0])
        cells.setdefault((place.pp_rank, place.dp_rank), []).append(" ".join(map(str, ranks)))
    head = "<tr><th></th>" + "".join(f"<th>dp {dp}</th>" for dp in range(t.dp)) + "</tr>"
    rows = ""
    for pp in range(t.pp):
        rows += (
            f"<tr><th>pp {pp}</th>" + "".join(f"<td>{'<br/>'.join(cells[pp, dp])}</td>" for dp in range(t.dp)) + "</tr>"
        )
    together = (
        '<p class="soft">Global ranks; the ranks in one cell are a tensor-parallel group.</p>' if t.tp > 1 else ""
    )
    return f'<table class="grid">{head}{rows}</table>{together}'


def configuration_html(run: Run) -> str:
    """Return the settings that differ from the defaults; the command and the whole configuration are folded away."""
    changed, why_none = changed_settings(run.config_text)
    if changed:
        head = "<tr><th>section</th><th>setting</th><th>value</th><th>default</th><th>from</th></tr>"
        parts = [f'<table class="settings">{head}{"".join(map(_setting_row, changed))}</table>']
    else:
        parts = [f"<p>{escape(why_none)}.</p>"]
    remarks = run.started.get("remarks")
    if remarks:
        parts.append("<ul>" + "".join(f"<li>{escape(remark)}</li>" for remark in remarks) + "</ul>")
    command = run.started.get("command")
    if command:
        summary = "command line of the last start"
        parts.append(f"<details><summary>{summary}</summary><pre>{escape(' '.join(command))}</pre></details>")
    if run.config_text:
        summary = "whole configuration as YAML, for --config"
        parts.append(f"<details><summary>{summary}</summary><pre>{escape(run.config_text)}</pre></details>")
    return "".join(parts)


def _setting_row(setting: Setting) -> str:
    return (
        f'<tr><td class="section soft">{setting.section}</td><td><code>{setting.flag}</code></td>'
        f'<td class="v"><b>{escape(setting.value)}</b></td><td class="soft v">{escape(setting.default)}</td>'
        f'<td class="soft v" title="{escape(setting.origin)}">{escape(_short(setting.origin))}</td></tr>'
    )


def _short(origin: str) -> str:
    """Return the origin of a value with the path shortened to the file name."""
    kind, _, rest = origin.partition(" ")
    return f"{kind} {rest.rpartition('/')[2]}" if kind == "yaml" else origin


def starts_html(run: Run) -> str:
    """Return a table of the starts of the run and how each ended, with the other log messages folded away."""
    head = "<tr><th>start</th><th>time</th><th>duration</th><th>steps logged</th><th>started</th><th>ended</th></tr>"
    rows = "".join(_segment_row(index, segment) for index, segment in enumerate(run.segments, start=1))
    notes = [record for segment in run.segments for record in segment.notes]
    lines = "".join(f"{moment(record['time'])}  {escape(record['text'])}\n" for record in notes)
    more = f"<details><summary>other log messages ({len(notes)})</summary><pre>{lines}</pre></details>" if notes else ""
    return f'<div class="scroll"><table>{head}{rows}</table></div>{more}'


def _segment_row(index: int, segment: Segment) -> str:
    begun, ended = segment.first_time, segment.last_time
    span = f"{segment.steps[0]['step']:,} to {segment.steps[-1]['step']:,}" if segment.steps else "none"
    lasted = duration(ended - begun) if begun is not None and ended is not None else ""
    source = f"from {segment.resumed['path']}" if segment.resumed else "from the beginning" if segment.start else ""
    cells = [
        str(index),
        moment(begun) if begun is not None else "",
        lasted,
        span,
        escape(source),
        escape(_ended(segment)),
    ]
    return "<tr>" + "".join(f'<td class="v">{cell}</td>' for cell in cells) + "</tr>"


def _ended(segment: Segment) -> str:
    if segment.end is not None:
        return f"after step {segment.end['step']:,}: {segment.end['reason']}"
    if segment.failures:
        return f"{segment.failures[0]['error']} on rank {segment.failures[0]['rank']}"
    return STATES[segment.ending]


def versions_html(run: Run) -> str:
    """Return the section on the software versions and the machine of the last start."""
    if not run.started:
        return f"<p>This run wrote no {RUN}, so its versions and its machine are unknown.</p>"
    words = {
        "device": "device",
        "cores": "cores",
        "threads_per_rank": "threads per rank",
        "backend": "backend",
        "system": "system",
    }
    machine = {words[key]: value for key, value in run.started["machine"].items() if key in words}
    named = {**run.started["versions"], "host of rank 0": run.started["host"], **machine}
    rows = "".join(
        f'<tr><th>{escape(name)}</th><td class="v">{escape(str(value))}</td></tr>' for name, value in named.items()
    )
    return f'<table class="narrow">{rows}</table>'


def plan_lines(run: Run) -> list[str]:
    """Return the plan that the last start printed."""
    return str(run.started.get("plan", "")).splitlines()
