#!/usr/bin/env python3
"""Pipeline schedules on emulated and on real devices: megapipe's engine, torch.distributed.pipelining, and a bare gloo
loop.

    python tools/bench/bench_schedules.py                             all tables of docs/performance.md
    python tools/bench/bench_schedules.py --part p4-m8 --part zero    some of them
    python tools/bench/bench_schedules.py --page docs/performance.md --check   put them into the page; exit code 1 if a
                                                                      bar is missed
    python tools/bench/bench_schedules.py --part p8-m16 --no-real-time    eight ranks, with a core for each

docs/performance.md explains what is emulated and the results. Needs an otherwise idle machine, and root for SCHED_FIFO.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench_processes import exit_code, make_parser
from schedule_bench.cases import NOT_BY_DEFAULT, PARTS, QUICK
from schedule_bench.page import as_json, bars, insert, line_of, machine, tables
from schedule_bench.run import Result, run_cases


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--part",
        action="append",
        choices=tuple(PARTS),
        help=f"only this table; may be repeated (default: all but {NOT_BY_DEFAULT})",
    )
    parser.add_argument(
        "--schedule", action="append", metavar="NAME", help="only this schedule; may be repeated (default: all)"
    )
    parser.add_argument(
        "--steps", type=int, default=10, metavar="N", help="counted steps of each contender (default: 10)"
    )
    parser.add_argument("--no-real-time", action="store_true", help="do not use SCHED_FIFO")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two tiny ranks for a few seconds: a smoke test, whose times are not meaningful",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every step's numbers")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="replace the tables between the markers of this Markdown page"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is not met")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    parts = arguments.part or PARTS.keys() - {NOT_BY_DEFAULT}
    cases = list(QUICK) if arguments.quick else [case for name in PARTS if name in parts for case in PARTS[name]]
    if arguments.schedule:
        cases = [case for case in cases if case.schedule in arguments.schedule]
    steps = 2 if arguments.quick else arguments.steps

    so_far: list[Result] = []

    def report(result: Result) -> None:
        so_far.append(result)
        print(line_of(result), flush=True)
        if arguments.page is not None:
            insert(arguments.page, tables(so_far), machine(so_far, steps))

    results = run_cases(cases, steps, not arguments.no_real_time, report)
    text = tables(results)
    verdicts = bars(results)
    print("\n".join(["", *text.values(), "", machine(results, steps), *(f"- {line}" for line, _ in verdicts)]))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(results), indent=1) + "\n")
    return int(arguments.check and not all(met for _, met in verdicts))


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
