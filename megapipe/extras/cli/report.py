"""`megapipe report`: write an HTML report of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from megapipe.errors import ConfigError
from megapipe.extras.cli.frame import Command, option, write_file
from megapipe.extras.report.comparison_svg import comparison_svg
from megapipe.extras.report.folder import read_run
from megapipe.extras.report.page import page
from megapipe.profile.summary import summarize

FILE_NAME = "report.html"
OPTIONS = (
    option("run", metavar="RUN", type=Path, help="the run's folder"),
    option("--output", metavar="FILE", type=Path, help=f"where to write it (default: RUN/{FILE_NAME})"),
    option("--svg", metavar="FILE", type=Path, help="also write only the drawing of plan and measurement, as SVG"),
)


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the report and return its path. Raises ConfigError if the folder is not a run or cannot be written to."""
    path = output or run / FILE_NAME
    write_file(path, page(read_run(run)), "--output")
    return path


def _report(own: argparse.Namespace) -> None:
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


main = Command("megapipe report", OPTIONS, _report)
