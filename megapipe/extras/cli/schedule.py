"""`megapipe schedule`: draw, compare, check and simulate pipeline schedules on a laptop, without torch."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from megapipe.errors import ConfigError
from megapipe.extras.cli.frame import command, option
from megapipe.extras.report.timeline import grid_text, svg
from megapipe.formatting import text_table
from megapipe.profile.trace import chrome_trace
from megapipe.schedule.compare import Measures, Model, Refusal, Seconds, compare, measure
from megapipe.schedule.costs import AutoGoal
from megapipe.schedule.families import SCHEDULES, build_schedule, schedule_family
from megapipe.schedule.lower import lower
from megapipe.schedule.placement import Placement, linear, loop, two_directions, v_shape
from megapipe.schedule.schedule import Schedule, from_csv, to_csv
from megapipe.schedule.validate import validate

HELP = """\
usage: megapipe schedule COMMAND [arguments]      (each has --help)

  draw       text for a terminal, SVG with a memory curve, Chrome/Perfetto trace, CSV
  compare    one table over all schedules: megapipe schedule compare -p 8 -m 32 -v 2
  check      prove a schedule, by name or from a CSV file (torch.distributed.pipelining's too);
             prints the send depth of every channel
  simulate   makespan, idle, peaks and messages of one schedule, rank by rank

schedules:
"""
PLACEMENTS: dict[str, Callable[[int, int], Placement]] = {
    "linear": lambda p, v: linear(p),
    "loop": loop,
    "v": lambda p, v: v_shape(p),
    "two-directions": lambda p, v: two_directions(p),
}
NAME = (
    option("name", f"one of {', '.join(SCHEDULES)}; or give --csv", nargs="?", metavar="NAME"),
    option("--csv", "read the schedule from this file instead, one line per rank: 0F0,0F1,...", type=Path),
    option("--placement", "of the CSV file's stages (default: taken from its forwards)", choices=tuple(PLACEMENTS)),
)
NAMES = option("names", "which schedules (default: all)", nargs="*", metavar="NAME")
MODEL = (
    "shape",
    option("-p --ranks", "pipeline ranks", default=4),
    option("-m --microbatches", "default: twice the ranks", type=int),
    option("-v --chunks", "stages a rank (default: 2 where a schedule has several)", type=int),
    option("-g --group-size", "microbatches that run through a chunk before the next, at least the ranks", type=int),
    "costs, in seconds (or any unit), of all the layers of one rank",
    option("--forward", default=1.0, at_least=0),
    option("--input-grad", default=1.0, at_least=0),
    option("--weight-grad", default=1.0, at_least=0),
    option("--costs", "CSV of forward,input_grad,weight_grad: one line per slice of the model, in order", type=Path),
    option("--rank-speeds", "speed of each rank relative to the given seconds (mixed GPUs)", type=float, nargs="+"),
    option("--p2p", "latency of a message: from an action's end to its use on the next rank", default=0.0, at_least=0),
    option("--transfer", "time that a message occupies its channel, before --p2p", default=0.0, at_least=0),
    option("--no-overlap", "a rank is idle while it sends (for --transfer)", action="store_true"),
    option("--pair-share", "time of an overlapped F and B relative to their sum (DualPipe)", default=1.0, at_least=0),
    option("--optimizer", "norm, update and gather after the last action", default=0.0, at_least=0),
    option("--activation-bytes", "of one microbatch in the layers of one rank", default=0.0, at_least=0),
    option("--kept-for-weights", "fraction of it that is kept between I and W, 0 to 1", default=1.0, at_least=0),
    option("--memory-limit", "of zb-auto, in microbatches (compare: may be repeated)", type=float, action="append"),
    option("--json", "machine-readable output", action="store_true"),
)
DRAWINGS = (
    option("--svg", "write a drawing", type=Path),
    option("--trace", "write a trace for ui.perfetto.dev", type=Path),
    option("--csv-out", "write the rows as CSV", type=Path),
    option("--lowered", "CSV with messages and reductions", action="store_true"),
    option("--width", "pixels of the drawing, columns of the text (default: as needed, 160)", type=int),
)
DEPTHS = (
    option("--send-depth", "sends that a channel may have in flight (default: the smallest number)", type=int),
    option("--receive-depth", "actions by which a receive is posted ahead", default=2),
)


def main(arguments: Sequence[str]) -> int:
    """Run a command and return the exit code."""
    words = list(arguments)
    if not words or words[0] in ("-h", "--help"):
        schedules = "".join(f"  {name.ljust(15)}{family.summary}\n" for name, family in SCHEDULES.items())
        print(HELP + schedules, end="")
        return 0 if words else 2
    if words[0] not in COMMANDS:
        print(f"megapipe schedule {words[0]}: unknown command; use {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return COMMANDS[words[0]](words[1:])


def _model(own: argparse.Namespace) -> Model:
    if own.kept_for_weights > 1:
        raise ConfigError(f"--kept-for-weights {own.kept_for_weights}: expected a fraction between 0 and 1")
    speeds = tuple(own.rank_speeds or ())
    if speeds and (len(speeds) != own.ranks or min(speeds) <= 0):
        given = " ".join(map(str, speeds))
        raise ConfigError(f"--rank-speeds {given}: give a number above 0 for each of the {own.ranks} ranks")
    seconds = Seconds(own.forward, own.input_grad, own.weight_grad)
    return Model(
        (seconds,) * max(1, own.ranks) if own.costs is None else _read_slices(own.costs),
        transfer_seconds=own.transfer,
        latency_seconds=own.p2p,
        pair_share=own.pair_share,
        optimizer_seconds=own.optimizer,
        activation_bytes=own.activation_bytes,
        kept_for_weights=own.kept_for_weights,
        overlap=not own.no_overlap,
        rank_speeds=speeds,
    )


def _read_slices(path: Path) -> tuple[Seconds, ...]:
    columns = ("forward", "input_grad", "weight_grad")
    heading = f"the heading {','.join(columns)}"
    slices = []
    with path.open(newline="", encoding="utf-8") as file:
        for number, line in enumerate(csv.DictReader(file), 2):
            try:
                slices.append(Seconds(*(float(line[column]) for column in columns)))
            except (KeyError, TypeError, ValueError):
                raise ConfigError(f"{path}, line {number}: expected three numbers under {heading}") from None
    if not slices:
        raise ConfigError(f"{path} holds no costs; expected {heading} and one line per slice of the model")
    return tuple(slices)


def _schedule(own: argparse.Namespace, model: Model) -> Schedule:
    """Return the compute-only schedule by name or from the file."""
    if own.csv is not None:
        if own.name is not None:
            raise ConfigError(f"both the name {own.name} and --csv {own.csv} were given; use one")
        text = own.csv.read_text(encoding="utf-8")
        place = PLACEMENTS.get(own.placement)
        return from_csv(text, own.csv.stem, place(len(text.splitlines()), own.chunks or 2) if place else None)
    if own.name is None:
        raise ConfigError(f"no schedule given; give a name ({', '.join(SCHEDULES)}) or --csv FILE")
    p, family = own.ranks, schedule_family(own.name)
    goal = None
    if family.is_automatic and p >= 1:
        goal = AutoGoal(model.costs(p), (own.memory_limit or [p])[0], model.kept_for_weights)
    return build_schedule(own.name, p, own.chunks or family.num_chunks(2), _microbatches(own), own.group_size, goal)


def _microbatches(own: argparse.Namespace) -> int:
    return 2 * own.ranks if own.microbatches is None else int(own.microbatches)


@command("megapipe schedule draw", (*NAME, *MODEL, *DRAWINGS), needs_words=False)
def _draw(own: argparse.Namespace) -> None:
    """Draw one schedule: text for a terminal, SVG with a memory curve, Chrome/Perfetto trace, CSV."""
    model = _model(own)
    schedule = _schedule(own, model)
    measures, timeline = measure(schedule.compute_only(), model)
    written = []
    for path, text in (
        (own.svg, lambda: svg(timeline, own.width)),
        (own.trace, lambda: chrome_trace(timeline)),
        (own.csv_out, lambda: to_csv(timeline.schedule if own.lowered else schedule)),
    ):
        if path is not None:
            path.write_text(text(), encoding="utf-8")
            written.append(str(path))
    if own.json:
        print(json.dumps({**asdict(measures), "written": written}))
    elif written:
        print("wrote " + ", ".join(written))
    else:
        print(grid_text(timeline, own.width or 160))


@command("megapipe schedule compare", (NAMES, *MODEL), needs_words=False)
def _compare(own: argparse.Namespace) -> int:
    """Print one table over all schedules, or those named."""
    chunks = 2 if own.chunks is None else own.chunks
    limits = own.memory_limit or ()
    rows = compare(_model(own), own.ranks, chunks, _microbatches(own), own.group_size, limits, own.names)
    print(json.dumps([asdict(row) for row in rows]) if own.json else table_text(rows))
    return 0 if any(isinstance(row, Measures) for row in rows) else ConfigError.exit_code


_COLUMNS: dict[str, Callable[[Measures], str]] = {
    "schedule": lambda row: row.schedule + ("" if row.is_synchronous else " *"),
    "stages": lambda row: str(row.stages_per_rank),
    "makespan": lambda row: f"{row.makespan_seconds:.5g}",
    "step": lambda row: f"{row.step_seconds:.5g}",
    "barrier": lambda row: f"{row.barrier_share:.2%}",
    "chained": lambda row: f"{row.chained_share:.2%}",
    "peak": lambda row: f"{row.peak_microbatches:.4g}",
    "to I": lambda row: f"{row.peak_until_input_gradient:.4g}",
    "bytes": lambda row: f"{row.peak_bytes:.4g}",
    "inputs": lambda row: str(row.inputs_held),
    "messages": lambda row: str(row.messages_sent),
    "depth": lambda row: str(row.send_depth),
}
_LEGEND = """
barrier, chained: idle share of the step, with a barrier after each step, and in consecutive steps without one
peak: microbatches alive until W (to I: until I) on the worst rank, each 1/p of the model; inputs: received, waiting
depth: sends that a channel must be able to have in flight without a posted receive"""
_NOT_SYNCHRONOUS = "NOT synchronous: weights change while microbatches are in flight"


def table_text(rows: Sequence[Measures | Refusal]) -> str:
    """Return the table for a terminal, with a legend."""
    measured = [row for row in rows if isinstance(row, Measures)]
    columns = dict(_COLUMNS)
    if not any(row.peak_bytes for row in measured):
        del columns["bytes"]
    if all(row.step_seconds == row.makespan_seconds for row in measured):
        del columns["step"]
    cells = [list(columns), *([cell(row) for cell in columns.values()] for row in measured)]
    width = max(len(line[0]) for line in cells)
    lines = list(text_table(cells, left=(0,), indent=0))
    lines += [f"{row.schedule.ljust(width)}  refused: {row.refused}" for row in rows if isinstance(row, Refusal)]
    lines.append(_LEGEND)
    if any(not row.is_synchronous for row in measured):
        lines.append(f"*: {_NOT_SYNCHRONOUS}; part of an endless stream, including its ends")
    return "\n".join(lines)


@command("megapipe schedule check", (*NAME, *MODEL, *DEPTHS), needs_words=False)
def _check(own: argparse.Namespace) -> None:
    """Prove a schedule, by name or from a CSV file, and print the send depth of every channel."""
    schedule = _schedule(own, _model(own))
    if not schedule.is_lowered:
        validate(schedule)
        schedule = lower(schedule, own.receive_depth)
    report = validate(schedule, own.send_depth)
    channels = [
        {"channel": str(channel), "least_send_depth": depth, "most_posted": report.most_posted.get(channel, 0)}
        for channel, depth in sorted(
            report.least_send_depth.items(), key=lambda item: (item[0].boundary, item[0].kind.value, item[0].direction)
        )
    ]
    if own.json:
        summary = {
            "schedule": str(report.schedule),
            "valid": True,
            "num_actions": report.num_actions,
            "send_depth": report.send_depth,
            "is_synchronous": schedule.is_synchronous,
            "channels": channels,
        }
        print(json.dumps(summary))
        return
    print(report)
    if not schedule.is_synchronous:
        print(_NOT_SYNCHRONOUS)
    width = max((len(str(entry["channel"])) for entry in channels), default=0)
    for entry in channels:
        depths = f"send depth {entry['least_send_depth']}, receives posted {entry['most_posted']}"
        print(f"  {str(entry['channel']).ljust(width)}  {depths}")


@command("megapipe schedule simulate", (*NAME, *MODEL), needs_words=False)
def _simulate(own: argparse.Namespace) -> None:
    """Print makespan, idle, peaks and messages of one schedule, rank by rank."""
    model = _model(own)
    measures, timeline = measure(_schedule(own, model).compute_only(), model)
    keys = ("work_seconds", "chained_idle_seconds", "barrier_idle_seconds", "peak_live_chunks")
    rows = list(zip(*(getattr(timeline, key) for key in keys), strict=True))
    if own.json:
        ranks = [{"pp_rank": rank, **dict(zip(keys, row, strict=True))} for rank, row in enumerate(rows)]
        print(json.dumps({**asdict(measures), "ranks": ranks}))
        return
    print(table_text([measures]))
    print("\nrank      work  chained idle  barrier idle  peak chunks")
    for rank, row in enumerate(rows):
        print("{:4d}  {:8.5g}  {:12.5g}  {:12.5g}  {:11d}".format(rank, *row))


COMMANDS = {"draw": _draw, "compare": _compare, "check": _check, "simulate": _simulate}
