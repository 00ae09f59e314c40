"""`megapipe report` and `compare`: HTML pages of one run, and of several side by side; `status`: what its ranks do."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from megapipe.errors import ConfigError
from megapipe.extras.cli.frame import command, option, painted, switch, write_file
from megapipe.extras.report.comparison import comparison_svg
from megapipe.extras.report.folder import read_run
from megapipe.extras.report.page import compare_page, compare_text, named, page
from megapipe.extras.report.profile_summary import summarize
from megapipe.extras.report.status import newest_run, read_folder, summary, table
from megapipe.monitor.diagnosis import doing, waits_for

FILE_NAME = "report.html"
OPTIONS = (
    option("run", "the run's folder", type=Path, metavar="RUN"),
    option("--output", f"where to write it (default: RUN/{FILE_NAME})", type=Path),
    option("--svg", "also write only the drawing of plan and measurement, as SVG", type=Path),
)
COMPARE_OPTIONS = (
    option("runs", "the runs' folders", type=Path, nargs="+", metavar="RUN"),
    option("--output", "where to write the page", type=Path, default=Path("compare.html")),
)


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the report and return its path. Raises ConfigError if the folder is not a run or cannot be written to."""
    path = output or run / FILE_NAME
    write_file(path, page(read_run(run)), "--output")
    return path


@command("megapipe report", OPTIONS)
def main(own: argparse.Namespace) -> None:
    """Write an HTML report of a run: curves, plan and measured timeline, configuration, grid, versions, warnings.

    RUN is the folder given as --save (or that of --metrics-file). Works during the run, and after a crash. Needs no
    torch.
    """
    path = write_report(own.run, own.output)
    if own.svg is not None:
        profile = read_run(own.run).profile
        if profile is None:
            raise ConfigError(f"--svg {own.svg}: no step of {own.run} was profiled; run it with --profile-pipeline")
        summary = summarize(profile)
        write_file(own.svg, comparison_svg(summary.typical, summary.pipeline.global_ranks), "--svg")
    print(f"{path} ({path.stat().st_size / 2**10:,.0f} KiB): open it in any browser")


@command("megapipe compare", COMPARE_OPTIONS)
def compare(own: argparse.Namespace) -> None:
    """Compare runs: print their results and the settings that differ, and write an HTML page, also with their curves.

    RUN is the folder given as --save (or that of --metrics-file). Works during the runs. Needs no torch.
    """
    if len(own.runs) < 2:
        raise ConfigError(f"only {own.runs[0]} is given; name at least two runs to compare")
    runs = named([read_run(folder) for folder in own.runs])
    write_file(own.output, compare_page(runs), "--output")
    text = compare_text(runs, lambda title: painted(title, "bold", sys.stdout))
    print(f"{text}\n\n{own.output}: the curves over each other; open it in any browser")


STATUS_OPTIONS = (
    option("run", "the run's folder (default: the newest run)", type=Path, metavar="RUN", nargs="?"),
    switch("--json", "one JSON object instead of a table"),
    option("--watch", "repeat every SECONDS seconds, until Ctrl-C", type=float, above=0.0, metavar="SECONDS"),
)


@command("megapipe status", STATUS_OPTIONS, needs_words=False)
def status(own: argparse.Namespace) -> None:
    """Show what every rank of a run does now: step, action, which ranks it waits for, and for how long.

    RUN is the folder given as --save (or that of --metrics-file). Without it, the run that was started last is shown,
    of those below the current folder and of yours on this host. Ranks of this host are read live, those of other hosts
    from a copy that is about a second old. After a crash it shows the last records. Changes nothing and needs no torch.
    """
    run = own.run or newest_run(Path())
    if own.run is None and not own.json:
        print(f"the newest run is {run}")
    try:
        show(run, own.json)
        while own.watch:
            time.sleep(own.watch)
            print()
            show(run, own.json)
    except KeyboardInterrupt:  # the usual end of --watch
        pass


def show(run: Path, as_json: bool) -> None:
    """Print the state of all ranks. Raises ConfigError, DataError."""
    roster, sightings = read_folder(run)
    edges = {sighting.member.rank: waits_for(sighting, sightings, roster) for sighting in sightings if sighting.waits}
    if as_json:
        ranks = []
        for sighting in sightings:
            member, record, snapshot = sighting.member, sighting.record, sighting.snapshot
            process = None if sighting.process is None else str(sighting.process)
            found: dict[str, Any] = {key: getattr(member, key) for key in ("rank", "host", "pid", "place", "stages")}
            found |= {"process": process, "answers": sighting.answers}
            if record is not None:
                found |= {
                    "step": record.step,
                    "phase": record.phase,
                    "action": record.action,
                    "does": doing(record),
                    "seconds": round(sighting.age_seconds, 3),
                    "wait": record.wait.name.lower(),
                    "what": record.what,
                    "step_seconds": snapshot.elapsed_ns / 1e9 if snapshot else None,
                    "computing_seconds": snapshot.computing_ns / 1e9 if snapshot else None,
                    "number": record.number,
                    "waits_for": list(edges.get(member.rank, ())),
                }
            ranks.append(found)
        print(json.dumps({"run": str(run), "time": time.time(), "ranks": ranks}))
    else:
        print("\n".join([summary(run.name, sightings), *table(sightings, edges)]), flush=True)
