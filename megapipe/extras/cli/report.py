"""`megapipe report`: write an HTML report of a run from its folder.

Needs no torch. The run may be in progress, or have crashed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megapipe.errors import ConfigError, MegapipeError
from megapipe.extras.report.comparison_svg import comparison_svg
from megapipe.extras.report.folder import read_run
from megapipe.extras.report.page import page
from megapipe.profile.summary import summarize

FILE_NAME = "report.html"


def main(arguments: Sequence[str]) -> int:
    """Write the report and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="megapipe report",
        description="Write an HTML report of a run: curves, plan and measured timeline, configuration, grid, versions, "
        "warnings. RUN is the folder given as --save (or that of --metrics-file). Works during the run, and "
        "after a crash.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("--output", metavar="FILE", type=Path, help=f"where to write it (default: RUN/{FILE_NAME})")
    parser.add_argument(
        "--svg", metavar="FILE", type=Path, help="also write only the drawing of plan and measurement, as SVG"
    )
    options = parser.parse_args(list(arguments))
    try:
        path = write_report(options.run, options.output)
        if options.svg is not None:
            write_drawing(options.run, options.svg)
    except MegapipeError as error:
        print(f"report: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{path} ({path.stat().st_size / 2**10:,.0f} KiB): open it in any browser")
    return 0


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the report and return its path. Raises ConfigError if the folder is not a run or cannot be written to."""
    text = page(read_run(run))
    path = output or run / FILE_NAME
    _write(path, text, "--output")
    return path


def write_drawing(run: Path, path: Path) -> None:
    """Write plan and measurement of the newest profile as SVG. Raises ConfigError if no step was profiled."""
    profile = read_run(run).profile
    if profile is None:
        raise ConfigError(f"--svg {path}: no step of {run} was profiled; run it with --profile-pipeline")
    summary = summarize(profile)
    _write(path, comparison_svg(summary.typical, summary.pipeline.global_ranks), "--svg")


def _write(path: Path, text: str, flag: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written to: {error.strerror}; say where with {flag} FILE") from None
