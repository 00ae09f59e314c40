#!/usr/bin/env python3
"""Measure training speed on CPUs, one thread a rank: megapipe against a plain PyTorch loop, and a pipeline against the
simulation of its schedule.

    python tools/bench/bench_cpu.py                                 the two rows with a bar, about 3 minutes
    python tools/bench/bench_cpu.py --rows one pp2 tp2 pp2x2 dp2    all rows
    python tools/bench/bench_cpu.py --hardware here.yaml            also the steps that `megapipe plan` predicts from a
                                                                    file that `megapipe calibrate` wrote here
    python tools/bench/bench_cpu.py --json figures.json             also a file with every number

All rows stay alive and take turns, in the opposite order every second round. Ratios are formed within a round, so that
a machine that slows down slows both sides. Needs an otherwise idle machine with a core for each rank.
docs/performance.md explains the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench_job import TIMEOUT_SECONDS, Grid, check, make_plan, serve
from bench_processes import BenchError, Ranks, exit_code, machine_text, make_parser
from bench_table import Quartiles, as_markdown
from card_bench.agreement import Agreement
from plain_loop import Shape
from schedule_bench.figures import StepFigures

from megapipe.extras.calibrate.hardware_reader import read_hardware
from megapipe.extras.doctor.host import resources
from megapipe.plan.hardware import Hardware
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import predict_step

GRIDS = {
    "one": Grid(),
    "pp2": Grid(pp=2),
    "tp2": Grid(tp=2),
    "pp2x2": Grid(pp=2, chunks=2),
    "dp2": Grid(dp=2),
}
BARS = (  # row, ratio, the least that is required, and what it is
    ("one", "speed_to_plain", 0.97, "one process to the plain loop"),
    ("pp2", "simulated_to_measured", 0.93, "pp 2, simulated to measured step"),
)


def start(name: str, shape: Shape) -> Ranks:
    """Start the processes of a row."""
    grid = GRIDS.get(name)
    return Ranks(f"row {name}", 1 if grid is None else grid.world, serve, shape, grid)


def check_agreement(shape: Shape) -> Agreement:
    """Check that both loops train the same model. Raises BenchError."""
    small = dataclasses.replace(shape, microbatches=min(2, shape.microbatches))
    found: Agreement = Ranks("check", 1, check, small).answers(TIMEOUT_SECONDS)[0]
    if not found.holds:
        raise BenchError(f"they do not train the same model: {found}")
    return found


def measure(shape: Shape, names: Sequence[str], pairs: int) -> dict[str, list[StepFigures]]:
    """Return the steps of every row, [round]."""
    plans = {name: make_plan(shape, GRIDS.get(name, Grid())) for name in names}
    return take_turns({name: (partial(start, name, shape), plans[name]) for name in names}, pairs, 2)


def take_turns(
    starts: Mapping[str, tuple[Callable[[], Ranks], RunPlan]], rounds: int, warm_ups: int
) -> dict[str, list[StepFigures]]:
    """Start rows and let them take turns, in the opposite order every second round, while all others wait.

    starts: of each row what starts it, and its plan. warm_ups: steps of each before, which are not counted. Returns the
    steps of each row, [round].
    """
    turns: dict[str, list[StepFigures]] = {name: [] for name in starts}
    schedules = {name: plan.schedule(plan.batch.num_microbatches) for name, (_, plan) in starts.items()}
    with ExitStack() as stack:
        rows = {name: stack.enter_context(begin()) for name, (begin, _) in starts.items()}
        for row in rows.values():
            row.answers(TIMEOUT_SECONDS)
        for row in rows.values():
            for _ in range(warm_ups):
                row.order("step", TIMEOUT_SECONDS)
        for number in range(rounds):
            for name in rows if number % 2 == 0 else reversed(rows):
                ranks = rows[name].order("step", TIMEOUT_SECONDS)
                turns[name].append(StepFigures.of(ranks, schedules[name]))
            if sys.stderr.isatty():
                end = "\n" if number + 1 == rounds else ""
                print(f"\rround {number + 1} of {rounds}", end=end, file=sys.stderr, flush=True)
    return turns


def ratios(above: Sequence[float], below: Sequence[float]) -> Quartiles:
    """Return the quartiles of the ratios of each round."""
    return Quartiles.of([a / b for a, b in zip(above, below, strict=True)])


def figures(shape: Shape, turns: dict[str, list[StepFigures]]) -> dict[str, dict[str, Quartiles]]:
    """Return tokens/s, CPU seconds a step and the ratios of each round, by row."""
    found: dict[str, dict[str, Quartiles]] = {}
    seconds = {name: [turn.measured_seconds for turn in row] for name, row in turns.items()}
    for name, row in turns.items():
        cpu = [turn.cpu_seconds for turn in row]
        mine = {
            "tokens_per_second": Quartiles.of([shape.step_tokens / value for value in seconds[name]]),
            "cpu_seconds": Quartiles.of(cpu),
            "on_core": ratios(cpu, seconds[name]),
        }
        if name == "one" and "plain" in turns:
            mine["speed_to_plain"] = ratios(seconds["plain"], seconds["one"])
        if name not in ("plain", "one") and "one" in turns:
            mine["speed_to_one"] = ratios(seconds["one"], seconds[name])
        if row[0].replay_seconds:
            mine["simulated_to_measured"] = ratios([turn.replay_seconds for turn in row], seconds[name])
        found[name] = mine
    return found


def title(name: str, shape: Shape) -> str:
    """Return the title of a row."""
    if name == "plain":
        return "plain PyTorch loop"
    grid = GRIDS[name]
    sizes = (("tp", grid.tp), ("pp", grid.pp), ("x", grid.chunks), ("dp", grid.dp))
    words = " ".join(f"{axis} {size}" + " chunks" * (axis == "x") for axis, size in sizes if size > 1)
    if grid.pp > 1:
        words += " cut " + "|".join(str(count) for count in make_plan(shape, grid).partition.layer_counts)
    return f"megapipe, {words or 'one process'}" + ", ZeRO-1" * (grid.dp > 1)


HEADINGS = ("row", "ranks", "tokens/s", "CPU s a step", "ratio of tokens/s", "simulated / measured")


def table(shape: Shape, found: dict[str, dict[str, Quartiles]]) -> list[tuple[str, ...]]:
    """Return the cells, headings first."""
    rows: list[tuple[str, ...]] = [HEADINGS]
    for name, mine in found.items():
        against = {"speed_to_plain": "plain", "speed_to_one": "one process"}
        ratio = [f"{mine[key].text('.3f')} to {other}" for key, other in against.items() if key in mine]
        simulated = mine["simulated_to_measured"].text(".3f") if "simulated_to_measured" in mine else ""
        ranks = str(1 if name == "plain" else GRIDS[name].world)
        speed, cpu = mine["tokens_per_second"].text(",.0f"), mine["cpu_seconds"].text(".3f")
        rows.append((title(name, shape), ranks, speed, cpu, "".join(ratio), simulated))
    return rows


def predictions(shape: Shape, turns: dict[str, list[StepFigures]], hardware: Hardware) -> list[tuple[str, ...]]:
    """Return predicted and measured milliseconds of a step, their ratio, and the predicted parts, headings first."""
    rows: list[tuple[str, ...]] = [("row", "predicted ms", "measured ms", "ratio", "predicted parts, ms")]
    for name in (name for name in turns if name in GRIDS):
        predicted = predict_step(make_plan(shape, GRIDS[name]), hardware)
        measured = Quartiles.of([turn.measured_seconds for turn in turns[name]]).median
        parts = [f"{part} {1e3 * seconds:.0f}" for part, seconds in predicted.parts.items() if seconds >= 0.0005]
        times = f"{1e3 * predicted.seconds:.0f}", f"{1e3 * measured:.0f}", f"{predicted.seconds / measured:.2f}"
        rows.append((title(name, shape), *times, ", ".join(parts)))
    return rows


def verdicts(found: dict[str, dict[str, Quartiles]]) -> list[tuple[str, bool]]:
    """Return the results of the two bars, if their rows were measured."""
    said = []
    for name, key, bar, words in BARS:
        if key in found.get(name, {}):
            median = found[name][key].median
            is_met = median >= bar
            said.append((f"{words}: {median:.3f}, at least {bar} required: {'met' if is_met else 'NOT MET'}", is_met))
    return said


def remarks(shape: Shape, found: dict[str, dict[str, Quartiles]], pairs: int, same: Agreement) -> list[str]:
    """Return the machine and its load, and warnings if it was not idle."""
    import torch

    cores = resources().cores
    said = [
        f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads, sequence {shape.seq}, vocabulary "
        f"{shape.vocab}, fp32, tied; "
        f"{shape.microbatches} microbatches of {shape.micro_batch} sequences a step; AdamW and clipping included",
        f"median [quartiles] of {pairs} rounds of a step of each row; one thread a rank; {machine_text()}; torch "
        f"{torch.__version__}",
        f"three steps of both loops: {same}",
    ]
    for name, mine in found.items():
        ranks = 1 if name == "plain" else GRIDS[name].world
        if ranks > cores:
            said.append(f"{name}: {ranks} ranks share {cores} cores: wall times are not meaningful")
        elif ranks == 1 and mine["on_core"].median < 0.98:
            said.append(
                f"{name}: on a core for only {mine['on_core'].median:.0%} of the time: the machine was busy, "
                "these figures are not valid"
            )
    return said


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--rows", nargs="+", choices=tuple(GRIDS), default=["one", "pp2"], help="grids of megapipe (default: one pp2)"
    )
    parser.add_argument("--pairs", type=int, default=10, metavar="N", help="rounds of turns of all rows (default: 10)")
    for field in dataclasses.fields(Shape):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=field.default, metavar="N", help=f"default: {field.default}")
    parser.add_argument("--hardware", type=Path, metavar="FILE", help="also print the steps predicted from this file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every turn's numbers")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is not met")
    return parser


def main(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_args(argv)
    shape = Shape(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Shape)})
    names = ["plain", *(name for name in GRIDS if name in arguments.rows)]
    hardware = None if arguments.hardware is None else read_hardware(arguments.hardware)
    same = check_agreement(shape)
    turns = measure(shape, names, arguments.pairs)
    found = figures(shape, turns)
    print(as_markdown(table(shape, found)))
    if hardware is not None:
        print("\n" + as_markdown(predictions(shape, turns, hardware)))
    print("\n" + "\n".join(f"- {line}" for line in remarks(shape, found, arguments.pairs, same)))
    said = verdicts(found)
    print("\n".join(f"- {line}" for line, _ in said))
    if arguments.json is not None:
        data = {
            "shape": dataclasses.asdict(shape),
            "turns": {name: [dataclasses.asdict(t) for t in row] for name, row in turns.items()},
        }
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")
    return int(arguments.check and not all(met for _, met in said))


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
