#!/usr/bin/env python3
"""Compare the step times that `megapipe plan` predicts from a hardware file with measured ones, for the model of
tools/bench/bench_cpu.py.

megapipe launch --nproc-per-node 2 -m megapipe calibrate --output here.yaml
    python tools/bench/step_accuracy.py --hardware here.yaml --rows one pp2 tp2 dp2

Needs an otherwise idle machine with a core for each rank, as the measurement of the file did.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bench_cpu import GRIDS, Turn, measure, title
from bench_job import make_plan
from bench_processes import BenchError, num_cores, processor
from plain_loop import Shape

from megapipe.errors import MegapipeError
from megapipe.plan.hardware import Hardware, read_hardware
from megapipe.plan.step_time import predict_step


def row(name: str, shape: Shape, hardware: Hardware, turns: Sequence[Turn]) -> str:
    """Return predicted and measured milliseconds of a step, their ratio, and the predicted parts."""
    predicted = predict_step(make_plan(shape, GRIDS[name]), hardware)
    measured = statistics.median(turn.step_seconds for turn in turns)
    parts = ", ".join(f"{part} {1000 * seconds:.0f}" for part, seconds in predicted.parts.items() if seconds >= 0.0005)
    ratio = predicted.seconds / measured
    return f"| {title(name, shape)} | {1000 * predicted.seconds:.0f} | {1000 * measured:.0f} | {ratio:.2f} | {parts} |"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--hardware", type=Path, required=True, metavar="FILE", help="written by megapipe calibrate on this machine"
    )
    parser.add_argument("--rows", nargs="+", choices=tuple(GRIDS), default=["one"], help="grids (default: one)")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="steps of each row that are measured (default: 5)"
    )
    for name in ("layers", "hidden", "heads", "seq", "vocab", "micro-batch", "microbatches"):
        default = getattr(Shape(), name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"default: {default}")
    return parser


def main(argv: Sequence[str]) -> int:
    own = vars(build_parser().parse_args(argv))
    path, names, rounds = own.pop("hardware"), own.pop("rows"), own.pop("rounds")
    shape = Shape(**own)
    try:
        hardware = read_hardware(path)
        turns = measure(shape, names, rounds, 1)
    except (BenchError, MegapipeError) as error:
        print(f"step_accuracy: {error}", file=sys.stderr)
        return 2
    print("| | predicted ms | measured ms | ratio | predicted parts, ms |\n|---|---|---|---|---|")
    print("\n".join(row(name, shape, hardware, turns[name]) for name in names))
    print(f"\n{processor()}, {num_cores()} cores, one thread a rank; load of the last minute {os.getloadavg()[0]:.1f}")
    for name in names:
        on_core = statistics.median(turn.cpu_seconds / turn.step_seconds / GRIDS[name].world for turn in turns[name])
        if on_core < 0.98:
            print(
                f"{name}: its ranks were on a core for {on_core:.0%} of the time; on an idle machine only waits "
                "make that less than all"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
