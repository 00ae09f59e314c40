"""Merge several token files into one, in the order given; a directory means all of its token files, sorted by name.

megapipe merge --input data/part1 data/part2 --output-prefix data/all
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megapipe.data.indexed_file import merge, prefixes_in
from megapipe.errors import MegapipeError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megapipe merge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--input", nargs="+", required=True, help="file prefixes (without .bin/.idx), or directories")
    parser.add_argument("--output-prefix", "--output_prefix", required=True, help="prefix of the merged .bin/.idx")
    return parser


def main(argv: Sequence[str]) -> int:
    """Merge the files and return the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        prefixes = [
            prefix for name in arguments.input for prefix in (prefixes_in(name) if Path(name).is_dir() else [name])
        ]
        merged = merge(prefixes, arguments.output_prefix)
    except MegapipeError as error:
        print(f"merge_datasets: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nmerge_datasets: interrupted; no file was written", file=sys.stderr)
        return 130
    print(
        f"wrote {arguments.output_prefix}.bin/.idx: {merged.num_documents:,} documents, {merged.num_tokens:,} tokens "
        f"as {merged.dtype}"
    )
    return 0
