"""`megapipe compare`: several runs side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megapipe.extras.cli.frame import command, option, painted, write_file
from megapipe.extras.report.compare import compare_page, compare_text, read_named
from megapipe.extras.report.folder import read_run

FILE_NAME = "compare.html"
OPTIONS = (
    option("runs", "the runs' folders", type=Path, nargs="+", metavar="RUN"),
    option("--output", "where to write the page", type=Path, default=Path(FILE_NAME)),
)


@command("megapipe compare", OPTIONS)
def main(own: argparse.Namespace) -> None:
    """Compare runs: print the settings that differ and the results, and write an HTML page with their curves.

    RUN is the folder given as --save (or that of --metrics-file). Works during the runs. Needs no torch.
    """
    runs = read_named(own.runs, read_run)
    write_file(own.output, compare_page(runs), "--output")
    text = compare_text(runs, lambda title: painted(title, "bold", sys.stdout))
    print(f"{text}\n\n{own.output}: the curves over each other; open it in any browser")
