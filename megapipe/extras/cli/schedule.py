"""`megapipe schedule`: draw, compare, check and simulate pipeline schedules on a laptop, without torch."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megapipe.errors import ConfigError, MegapipeError
from megapipe.extras.report.timeline import grid_text, svg
from megapipe.formatting import text_table
from megapipe.profile.trace import chrome_trace
from megapipe.schedule.compare import Measures, Model, Refusal, Seconds, compare, measure
from megapipe.schedule.families import SCHEDULES, build_schedule, schedule_family
from megapipe.schedule.generate.shape import AutoGoal
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

"""


def main(arguments: Sequence[str]) -> int:
    """Run a command and return the exit code."""
    words = list(arguments)
    if not words or words[0] in ("-h", "--help"):
        schedules = "".join(f"  {name.ljust(15)}{family.summary}\n" for name, family in SCHEDULES.items())
        print(f"{HELP}schedules:\n{schedules}", end="")
        return 0 if words else 2
    if words[0] not in COMMANDS:
        print(f"megapipe schedule {words[0]}: unknown command; use {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    parser = _parser(words[0])
    try:
        return COMMANDS[words[0]](parser.parse_args(words[1:]))
    except (MegapipeError, OSError) as error:
        print(f"megapipe schedule {words[0]}: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, MegapipeError) else 1


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"megapipe schedule {command}", allow_abbrev=False)
    if command == "compare":
        parser.add_argument("names", nargs="*", metavar="NAME", help="which schedules (default: all)")
    else:
        parser.add_argument("name", nargs="?", metavar="NAME", help=f"one of {', '.join(SCHEDULES)}; or give --csv")
        parser.add_argument(
            "--csv", type=Path, help="read the schedule from this file instead, one line per rank: 0F0,0F1,..."
        )
        parser.add_argument(
            "--placement",
            choices=tuple(_PLACEMENTS),
            help="of the stages in the CSV file (default: taken from its forwards)",
        )
    shape = parser.add_argument_group("shape")
    shape.add_argument("-p", "--ranks", type=int, default=4, help="pipeline ranks (default: 4)")
    shape.add_argument("-m", "--microbatches", type=int, help="default: twice the ranks")
    shape.add_argument("-v", "--chunks", type=int, help="stages a rank (default: 2 where a schedule has several)")
    shape.add_argument(
        "-g",
        "--group-size",
        type=int,
        help="microbatches that run through a chunk before the next chunk, at least the ranks",
    )
    _add_costs(parser)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    if command == "draw":
        parser.add_argument("--svg", type=Path, help="write a drawing")
        parser.add_argument("--trace", type=Path, help="write a trace for ui.perfetto.dev")
        parser.add_argument("--csv-out", type=Path, help="write the rows as CSV")
        parser.add_argument("--lowered", action="store_true", help="CSV with messages and reductions")
        parser.add_argument(
            "--width", type=int, help="pixels of the drawing, columns of the text (default: as needed, 160)"
        )
    if command == "check":
        parser.add_argument(
            "--send-depth", type=int, help="sends that a channel may have in flight (default: find the smallest number)"
        )
        parser.add_argument(
            "--receive-depth",
            type=int,
            default=2,
            help="compute actions by which a receive is posted ahead (default: 2)",
        )
    return parser


def _add_costs(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_argument_group("costs", "in seconds (or any unit), of all the layers of one rank")
    costs.add_argument("--forward", type=float, default=1.0)
    costs.add_argument("--input-grad", type=float, default=1.0)
    costs.add_argument("--weight-grad", type=float, default=1.0)
    costs.add_argument(
        "--costs",
        type=Path,
        help="CSV with columns forward,input_grad,weight_grad: one line per slice of the model, in order",
    )
    costs.add_argument(
        "--rank-speeds",
        type=float,
        nargs="+",
        help="relative speed of each rank; 1: as fast as the given seconds (mixed GPUs)",
    )
    costs.add_argument(
        "--p2p",
        type=float,
        default=0.0,
        help="latency of a message, from the end of an action to its use on the next rank",
    )
    costs.add_argument(
        "--transfer", type=float, default=0.0, help="time that a message occupies its channel, before --p2p"
    )
    costs.add_argument("--no-overlap", action="store_true", help="a rank is idle while it sends (for --transfer)")
    costs.add_argument(
        "--pair-share",
        type=float,
        default=1.0,
        help="time of an overlapped forward and backward, relative to their sum (DualPipe)",
    )
    costs.add_argument("--optimizer", type=float, default=0.0, help="norm, update and gather after the last action")
    costs.add_argument(
        "--activation-bytes", type=float, default=0.0, help="of one microbatch in the layers of one rank"
    )
    costs.add_argument(
        "--kept-for-weights", type=float, default=1.0, help="fraction of it that is kept between I and W, 0 to 1"
    )
    costs.add_argument(
        "--memory-limit", type=float, action="append", help="of zb-auto, in microbatches (compare: may be repeated)"
    )


def _rank_speeds(arguments: argparse.Namespace) -> tuple[float, ...]:
    speeds = tuple(arguments.rank_speeds or ())
    if speeds and (len(speeds) != arguments.ranks or min(speeds) <= 0):
        raise ConfigError(
            f"--rank-speeds {' '.join(map(str, speeds))}: give a number above 0 for each of the {arguments.ranks} ranks"
        )
    return speeds


def _model(arguments: argparse.Namespace) -> Model:
    rest = {
        "transfer_seconds": arguments.transfer,
        "latency_seconds": arguments.p2p,
        "pair_share": arguments.pair_share,
        "optimizer_seconds": arguments.optimizer,
        "activation_bytes": arguments.activation_bytes,
        "kept_for_weights": arguments.kept_for_weights,
    }
    seconds = Seconds(arguments.forward, arguments.input_grad, arguments.weight_grad)
    for name, value in (*rest.items(), *seconds._asdict().items()):
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{name} {value}: expected a number of at least 0")
    if not 0 <= arguments.kept_for_weights <= 1:
        raise ConfigError(f"--kept-for-weights {arguments.kept_for_weights}: expected a fraction between 0 and 1")
    slices = (seconds,) * max(1, arguments.ranks) if arguments.costs is None else _read_slices(arguments.costs)
    return Model(slices, **rest, overlap=not arguments.no_overlap, rank_speeds=_rank_speeds(arguments))


def _read_slices(path: Path) -> tuple[Seconds, ...]:
    columns = ("forward", "input_grad", "weight_grad")
    slices = []
    with path.open(newline="", encoding="utf-8") as file:
        for number, line in enumerate(csv.DictReader(file), 2):
            try:
                slices.append(Seconds(*(float(line[column]) for column in columns)))
            except (KeyError, TypeError, ValueError):
                raise ConfigError(
                    f"{path}, line {number}: expected three numbers under the heading {','.join(columns)}"
                ) from None
    if not slices:
        raise ConfigError(
            f"{path} holds no costs; expected the heading {','.join(columns)} and one line per slice of the model"
        )
    return tuple(slices)


_PLACEMENTS: dict[str, Callable[[int, int], Placement]] = {
    "linear": lambda p, v: linear(p),
    "loop": loop,
    "v": lambda p, v: v_shape(p),
    "two-directions": lambda p, v: two_directions(p),
}


def _schedule(arguments: argparse.Namespace, model: Model) -> Schedule:
    """Return the compute-only schedule by name or from the file."""
    if arguments.csv is not None:
        if arguments.name is not None:
            raise ConfigError(f"both the name {arguments.name} and --csv {arguments.csv} were given; use one")
        text = arguments.csv.read_text(encoding="utf-8")
        placement = (
            _PLACEMENTS[arguments.placement](len(text.splitlines()), arguments.chunks or 2)
            if arguments.placement
            else None
        )
        return from_csv(text, arguments.csv.stem, placement)
    if arguments.name is None:
        raise ConfigError(f"no schedule given; give a name ({', '.join(SCHEDULES)}) or --csv FILE")
    p = arguments.ranks
    family = schedule_family(arguments.name)
    chunks = arguments.chunks or family.num_chunks(2)
    goal = None
    if family.is_automatic and p >= 1:
        goal = AutoGoal(model.costs(p), (arguments.memory_limit or [p])[0], model.kept_for_weights)
    return build_schedule(arguments.name, p, chunks, _microbatches(arguments), arguments.group_size, goal)


def _microbatches(arguments: argparse.Namespace) -> int:
    return 2 * arguments.ranks if arguments.microbatches is None else int(arguments.microbatches)


def _draw(arguments: argparse.Namespace) -> int:
    model = _model(arguments)
    schedule = _schedule(arguments, model)
    measures, timeline = measure(schedule.compute_only(), model)
    written = []
    for path, text in (
        (arguments.svg, lambda: svg(timeline, arguments.width)),
        (arguments.trace, lambda: chrome_trace(timeline)),
        (arguments.csv_out, lambda: to_csv(timeline.schedule if arguments.lowered else schedule)),
    ):
        if path is not None:
            path.write_text(text(), encoding="utf-8")
            written.append(str(path))
    if arguments.json:
        print(json.dumps({**measures.as_json(), "written": written}))
    elif written:
        print("wrote " + ", ".join(written))
    else:
        print(grid_text(timeline, arguments.width or 160))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    rows = compare(
        _model(arguments),
        arguments.ranks,
        2 if arguments.chunks is None else arguments.chunks,
        _microbatches(arguments),
        arguments.group_size,
        arguments.memory_limit or (),
        arguments.names,
    )
    if arguments.json:
        print(json.dumps([row.as_json() for row in rows]))
    else:
        print(table_text(rows))
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


def table_text(rows: Sequence[Measures | Refusal]) -> str:
    """Return the table for a terminal, with a legend."""
    measured = [row for row in rows if isinstance(row, Measures)]
    columns = {
        title: cell
        for title, cell in _COLUMNS.items()
        if not (title == "bytes" and not any(row.peak_bytes for row in measured))
        and not (title == "step" and all(row.step_seconds == row.makespan_seconds for row in measured))
    }
    cells = [list(columns), *([cell(row) for cell in columns.values()] for row in measured)]
    lines = list(text_table(cells, left=(0,), indent=0))
    width = max(len(line[0]) for line in cells)
    lines += [f"{row.schedule.ljust(width)}  refused: {row.reason}" for row in rows if isinstance(row, Refusal)]
    lines += [
        "",
        (
            "barrier, chained: idle share of the step, with a barrier after each step, and in consecutive steps "
            "without one"
        ),
        (
            "peak: microbatches alive until W (to I: until I) on the worst rank, each of 1/p of the model; inputs: "
            "received and waiting"
        ),
        "depth: sends that a channel must be able to have in flight without a posted receive",
    ]
    if any(not row.is_synchronous for row in measured):
        lines.append(
            "*: NOT synchronous: weights change while microbatches are in flight; part of an endless stream, "
            "including its ends",
        )
    return "\n".join(lines)


def _check(arguments: argparse.Namespace) -> int:
    from megapipe.schedule.lower import lower

    schedule = _schedule(arguments, _model(arguments))
    if not schedule.is_lowered:
        validate(schedule)
        schedule = lower(schedule, arguments.receive_depth)
    report = validate(schedule, arguments.send_depth)
    channels = [
        {"channel": str(channel), "least_send_depth": depth, "most_posted": report.most_posted.get(channel, 0)}
        for channel, depth in sorted(
            report.least_send_depth.items(), key=lambda item: (item[0].boundary, item[0].kind.value, item[0].direction)
        )
    ]
    if arguments.json:
        summary = {
            "schedule": str(report.schedule),
            "valid": True,
            "num_actions": report.num_actions,
            "send_depth": report.send_depth,
        }
        print(json.dumps({**summary, "is_synchronous": schedule.is_synchronous, "channels": channels}))
        return 0
    print(report)
    if not schedule.is_synchronous:
        print("NOT synchronous: weights change while microbatches are in flight")
    width = max((len(str(entry["channel"])) for entry in channels), default=0)
    for entry in channels:
        print(
            f"  {str(entry['channel']).ljust(width)}  send depth {entry['least_send_depth']}, receives posted "
            f"{entry['most_posted']}"
        )
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    model = _model(arguments)
    measures, timeline = measure(_schedule(arguments, model).compute_only(), model)
    ranks = [
        {
            "pp_rank": rank,
            "work_seconds": work,
            "chained_idle_seconds": chained,
            "barrier_idle_seconds": barrier,
            "peak_live_chunks": peak,
        }
        for rank, (work, chained, barrier, peak) in enumerate(
            zip(
                timeline.work_seconds,
                timeline.chained_idle_seconds,
                timeline.barrier_idle_seconds,
                timeline.peak_live_chunks,
                strict=True,
            )
        )
    ]
    if arguments.json:
        print(json.dumps({**measures.as_json(), "ranks": ranks}))
        return 0
    print(table_text([measures]))
    print("\nrank      work  chained idle  barrier idle  peak chunks")
    for rank, peak in enumerate(timeline.peak_live_chunks):
        figures = timeline.work_seconds[rank], timeline.chained_idle_seconds[rank], timeline.barrier_idle_seconds[rank]
        print("{:4d}  {:8.5g}  {:12.5g}  {:12.5g}  {:11d}".format(rank, *figures, peak))
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "draw": _draw,
    "compare": _compare,
    "check": _check,
    "simulate": _simulate,
}
