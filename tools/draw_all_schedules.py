#!/usr/bin/env python3
"""Write the pictures of docs/schedules.md: every family of the table at one small size, F = I = W.

python tools/draw_all_schedules.py [--output docs/schedules]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megapipe.extras.report.schedules import Model, measure
from megapipe.extras.report.timeline import svg
from megapipe.schedule.costs import Seconds
from megapipe.schedule.families import SCHEDULES, build_schedule

RANKS, MICROBATCHES, WIDTH = 4, 8, 600
STREAM = 3, 5  # steps, and microbatches of each, of schedules that do not drain
SHORT = {"naive": 2}  # microbatches: more would add nothing new


def pictures() -> dict[str, str]:
    """Return the SVG of every picture by file name."""
    drawn = {}
    for name, family in SCHEDULES.items():
        chunks = family.chunks or (2 if family.takes_chunks else 1)
        steps, count = (1, SHORT.get(name, MICROBATCHES)) if family.is_synchronous else STREAM
        schedule = build_schedule(name, RANKS, chunks, count, num_steps=steps)
        # no messages: transfers take no time in these pictures
        _, timeline = measure(schedule, Model(RANKS, Seconds(1.0, 1.0, 1.0)), receive_depth=MICROBATCHES)
        drawn[f"{name}.svg"] = svg(timeline, WIDTH)
    return drawn


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).resolve().parent.parent / "docs" / "schedules", help="folder"
    )
    arguments = parser.parse_args(argv)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, text in pictures().items():
        (arguments.output / name).write_text(text, encoding="utf-8")
    print(f"wrote {len(SCHEDULES)} pictures to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
