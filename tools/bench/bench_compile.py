#!/usr/bin/env python3
"""Measure compiled blocks on a CPU, one process with one thread: megapipe and the plain loop, eager and compiled.

python tools/bench/bench_compile.py --hidden 128               10 rounds; a cold compile takes minutes
python tools/bench/bench_compile.py --hidden 512 --markdown    a table to paste

The four loops train the same model (tools/bench/plain_loop.py), stay alive and take turns, in the opposite order every
second round; ratios are formed within a round. The plain loop is compiled by model.compile(). Needs an idle
machine for figures that mean something. docs/compile.md has the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
from bench_job import Grid, Measured, MegapipeJob, PlainJob
from bench_processes import BenchError, answer, free_port, num_cores, processor, spawn
from bench_table import Quartiles, as_markdown
from plain_loop import Shape

from megapipe.train.compiled_blocks import compiler_of, use

LOOPS = {
    "megapipe": "megapipe",
    "compiled": "megapipe, compiled blocks",
    "plain": "plain loop",
    "compiled-plain": "plain loop, model.compile()",
}
RATIOS = (("compiled", "megapipe"), ("compiled", "compiled-plain"), ("compiled-plain", "plain"))
COMPILE_SECONDS = 600.0


def serve(orders: Connection, shape: Shape, name: str) -> None:
    """Build a loop and answer each number of steps with its measurement, until 0."""
    torch.set_num_threads(1)
    job: PlainJob | MegapipeJob
    if name.endswith("plain"):
        job = PlainJob(shape)
        if name == "compiled-plain":
            job.loop.model.compile()
    else:
        job = MegapipeJob(shape, Grid(), 0, free_port())
        if name == "compiled":
            use(job.runtime, compiler_of(job.runtime))
    while steps := orders.recv():
        orders.send(job.turn(steps))


def measure(shape: Shape, rounds: int, steps: int) -> dict[str, list[Measured]]:
    """Return the turns of every loop, [round]; the first turns, which compile, are not counted."""
    jobs = {name: spawn(serve, shape, name) for name in LOOPS}
    turns: dict[str, list[Measured]] = {name: [] for name in LOOPS}
    try:
        for number in range(-1, rounds):
            for name in LOOPS if number % 2 == 0 else reversed(LOOPS):
                jobs[name][1].send(2 if number < 0 else steps)
                turn: Measured = answer(jobs[name][1], LOOPS[name], COMPILE_SECONDS)
                if number >= 0:
                    turns[name].append(turn)
    finally:
        for process, _ in jobs.values():
            process.kill()
    return turns


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="turns of every loop (default: 10)")
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="steps in a turn (default: 1)")
    for field in dataclasses.fields(Shape):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=field.default, metavar="N", help=f"default: {field.default}")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    shape = Shape(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Shape)})
    try:
        turns = measure(shape, arguments.rounds, arguments.steps)
    except BenchError as error:
        print(f"bench_compile: {error}", file=sys.stderr)
        return 2
    # CPU seconds: other processes on the machine disturb them less than wall time
    wall = {name: [turn.end - turn.start for turn in found] for name, found in turns.items()}
    cpu = {name: [turn.cpu_seconds for turn in found] for name, found in turns.items()}
    tokens = shape.step_tokens * arguments.steps
    rows: list[tuple[str, ...]] = [("loop", "tokens/s", "CPU s a step")]
    for name, title in LOOPS.items():
        speed, seconds = ([tokens / value for value in wall[name]], [value / arguments.steps for value in cpu[name]])
        rows.append((title, Quartiles.of(speed).text(",.0f"), Quartiles.of(seconds).text(".3f")))
    rows.append(("ratio of speeds", "by wall time", "by CPU time"))
    for one, other in RATIOS:
        by = [Quartiles.of([b / a for a, b in zip(t[one], t[other], strict=True)]).text(".3f") for t in (wall, cpu)]
        rows.append((f"{LOOPS[one]} : {LOOPS[other]}", *by))
    print(as_markdown(rows) if arguments.markdown else "\n".join("  ".join(row) for row in rows))
    print(
        f"\n- {shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads, sequence {shape.seq}, vocabulary "
        f"{shape.vocab}, fp32; {shape.microbatches} microbatches of {shape.micro_batch} sequences a step; median "
        f"[quartiles] of {arguments.rounds} rounds\n- {processor()}, {num_cores()} cores, one thread; torch "
        f"{torch.__version__}"
    )
    on_core = Quartiles.of([c / w for name in LOOPS for c, w in zip(cpu[name], wall[name], strict=True)]).median
    if on_core < 0.98:
        print(f"- on a core for only {on_core:.0%} of the time: the machine was busy")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
