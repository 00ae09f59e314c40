#!/usr/bin/env python3
"""Draw the pipeline schedule of a configuration as SVG, to the scale of its stages' FLOPs (a forward of the cheapest
stage takes 1 s).

python tools/draw_schedule.py --world-size 8 --output schedule.svg --config configs/quickstart.yaml --vocab-size 2048

`megapipe schedule draw NAME --svg FILE` draws a schedule by its name, without a configuration.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from megapipe.api.config import Config
from megapipe.api.planning import make_plan
from megapipe.errors import MegapipeError
from megapipe.extras.report.timeline import svg
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Op
from megapipe.schedule.simulate import simulate


def drawing(plan: RunPlan, width: int) -> str:
    """Return the step of a full batch as SVG."""
    costs = plan.stage_costs
    unit = min(seconds for (_, op), seconds in costs.seconds.items() if op is Op.F)
    scaled = dataclasses.replace(costs, seconds={key: seconds / unit for key, seconds in costs.seconds.items()})
    return svg(simulate(plan.schedule(plan.batch.full // plan.batch.samples_per_microbatch), scaled), width)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--world-size", type=int, required=True, help="number of ranks to plan for")
    parser.add_argument("--ranks-per-node", type=int, help="default: all on one node")
    parser.add_argument("--output", type=Path, required=True, help="the SVG file to write")
    parser.add_argument("--width", type=int, default=1200, help="in pixels (default: 1200)")
    arguments, flags = parser.parse_known_args(argv)
    try:
        text = drawing(
            make_plan(Config.from_flags(flags), arguments.world_size, arguments.ranks_per_node), arguments.width
        )
        arguments.output.write_text(text, encoding="utf-8")
    except (MegapipeError, OSError) as error:
        print(f"draw_schedule: {error}", file=sys.stderr)
        return 2
    print(f"wrote {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
