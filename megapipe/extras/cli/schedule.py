"""`megapipe schedule`: draw, compare, check and simulate pipeline schedules."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megapipe.errors import ConfigError
from megapipe.extras.cli.frame import command, each_with, option, switch
from megapipe.extras.cli.group import CommandGroup
from megapipe.extras.report.schedule_csv import from_csv, parts_from_csv, parts_to_csv
from megapipe.extras.report.schedules import (
    NOT_SYNCHRONOUS,
    Measures,
    Model,
    ShardingTimes,
    Unmeasured,
    channels_data,
    channels_text,
    compare,
    in_units,
    lowered,
    measure,
    row_data,
    table_text,
)
from megapipe.extras.report.timeline import parts_svg, svg, timeline_text
from megapipe.extras.report.trace import chrome_trace
from megapipe.formatting import count_text
from megapipe.schedule.action import Op
from megapipe.schedule.costs import AutoGoal, Seconds
from megapipe.schedule.experts import ExpertMeasures, ExpertModel, measure_experts
from megapipe.schedule.families import SCHEDULES, build_schedule, build_stream, schedule_family
from megapipe.schedule.lower import lower
from megapipe.schedule.parts import expand, pair_up, prove
from megapipe.schedule.placement import Placement, linear, loop, two_directions, v_shape
from megapipe.schedule.schedule import Schedule, to_csv
from megapipe.schedule.sharding import GRANULARITIES, ShardingPolicy
from megapipe.schedule.stream import STRETCH, weight_versions
from megapipe.schedule.validate import ValidationReport, validate

main = CommandGroup(
    "megapipe schedule",
    {
        "draw": ("schedule", "draw_one", "text for a terminal, SVG with a memory curve, Chrome/Perfetto trace, CSV"),
        "compare": (
            "schedule",
            "compare_all",
            "one table over all schedules; --experts: what they hide of all-to-alls",
        ),
        "check": (
            "schedule",
            "check_one",
            "prove a schedule, by name or CSV (torch.distributed.pipelining's too)",
        ),
        "simulate": ("schedule", "simulate_one", "makespan, idle, peaks and messages of one schedule, rank by rank"),
    },
    lambda: "\nschedules:\n" + "".join(f"  {name.ljust(15)}{each.summary}\n" for name, each in SCHEDULES.items()),
)
PLACEMENTS: dict[str, Callable[[int, int], Placement]] = {
    "linear": lambda p, v: linear(p),
    "loop": loop,
    "v": v_shape,
    "two-directions": lambda p, v: two_directions(p),
}
GATHERS = {"optim_grads": False, "optim_grads_params": True}  # strategy -> weights are sharded, too
NAME = (
    option("name", f"one of {', '.join(SCHEDULES)}; or give --csv", nargs="?", metavar="NAME"),
    option("--csv", "read the schedule from this file instead, one line per rank: 0F0,0F1,...", type=Path),
    option(
        "--placement",
        "of the CSV file's stages (default: taken from its forwards)",
        needs="--csv",
        choices=tuple(PLACEMENTS),
    ),
)
_HALVES: dict[str, Any] = {"type": float, "nargs": 3, "metavar": ("F", "I", "W")}
_WAYS: dict[str, Any] = {"type": float, "nargs": 2, "metavar": ("F", "B")}
EXPERTS = (
    "mixture of experts; times in milliseconds (or any unit) of a layer and microbatch, defaults like DeepSeek-V3's",
    switch("--experts", "cut stages into attention, dispatch, MLP and combine, with the times below; overlap"),
    *each_with(
        option("--layers", "of the model", default=61, at_least=1),
        option("--dense-layers", "the first of them, which have no experts", default=3, at_least=0),
        option("--attention", "with norms and router: forward, I and W", default=(5.5, 7.5, 3.5), **_HALVES),
        option("--expert-mlp", "routed and shared experts", default=(4.6, 4.6, 4.6), **_HALVES),
        option("--dense-mlp", "of the dense layers", default=(4.6, 4.6, 4.6), **_HALVES),
        option("--head", "output layer and loss", default=(19.0, 19.0, 19.0), **_HALVES),
        option("--dispatch", "all-to-all to the experts: forward and backward", default=(2.3, 4.7), **_WAYS),
        option("--combine", "all-to-all back", default=(4.7, 2.3), **_WAYS),
        needs="--experts",
    ),
)
NAMES = option("names", "which schedules (default: all)", nargs="*", metavar="NAME")
MODEL = (
    "shape",
    option("-p --ranks", "pipeline ranks", default=4, above=0),
    option("-m --microbatches", "default: twice the ranks", type=int, above=0),
    option("-v --chunks", "stages a rank (default: 2 where a schedule has several)", type=int, above=0),
    option("-g --group-size", "microbatches that run through a chunk before the next, at least the ranks", type=int),
    *each_with(  # with experts a stage has the times of its parts
        option("-k --slices", "cut a microbatch into so many slices along its sequence (Seq1F1B)", default=1, above=0),
        "costs, in seconds (or any unit), of all the layers of one rank",
        option("--forward", default=1.0, at_least=0),
        option("--input-grad", default=1.0, at_least=0),
        option("--weight-grad", default=1.0, at_least=0),
        option("--replay", "of a forward that the backward runs again (full recompute)", default=0.0, at_least=0),
        excludes="--experts",
    ),
    *each_with(
        switch("--recompute-in-bubbles", "run it ahead of the backward while the rank waits for a gradient"),
        needs="--replay",
    ),
    option("--p2p", "latency of a message: from an action's end to its use on the next rank", default=0.0, at_least=0),
    option("--transfer", "time that a message occupies its channel, before --p2p", default=0.0, at_least=0),
    *each_with(
        option(
            "--pair-share", "time of an overlapped F and B as a part of their sum (DualPipe)", default=1.0, at_least=0
        ),
        option("--optimizer", "norm, update and gather after the last action", default=0.0, at_least=0),
        option("--activation-bytes", "of one microbatch in the layers of one rank", default=0.0, at_least=0),
        excludes="--experts",
    ),
    option("--kept-for-weights", "fraction of it kept between I and W, 0 to 1", default=1.0, at_least=0, at_most=1),
    option("--memory-limit", "of zb-auto, in microbatches (compare: may be repeated)", type=float, action="append"),
    switch("--json", "machine-readable output"),
)
_SHARDING = "data-parallel-sharding-"
_MAX_GATHERED = "stages (or units) of a rank gathered at once, at most"
_STRATEGY = (
    "sharded gradients and weights (docs/memory.md); times are those of all the layers of one rank",
    option(
        f"--{_SHARDING}strategy", "what is sharded besides the optimizer", excludes="--experts", choices=tuple(GATHERS)
    ),
    *each_with(
        option(f"--{_SHARDING}granularity", "gather and reduce for each", choices=GRANULARITIES, default="run"),
        option(f"--{_SHARDING}prefetch", "computations that a gather starts ahead of its use", default=1),
        option(f"--{_SHARDING}units", "of every stage, gathered and reduced one by one", default=1, above=0),
        switch("--reshard-after-forward", "also where the backward of a stage follows at once"),
        option("--gather", "of the weights, once", default=0.0, at_least=0),
        option("--reduce", "of the gradients, once", default=0.0, at_least=0),
        needs=f"--{_SHARDING}strategy",
    ),
)
SHARDING = (*_STRATEGY, option("--max-gathered", _MAX_GATHERED, type=int, needs=f"--{_SHARDING}strategy"))
# a file may have gathers without a strategy
CHECKED_SHARDING = (*_STRATEGY, option("--max-gathered", _MAX_GATHERED, type=int, excludes="--experts"))
DRAWINGS = (
    option("--svg", "write a drawing", type=Path),
    option("--trace", "write a trace for ui.perfetto.dev; of stages, not of parts", type=Path, excludes="--experts"),
    option("--csv-out", "write the rows as CSV", type=Path),
    switch("--lowered", "CSV with messages and reductions"),
    option("--width", "pixels of the drawing, columns of the text (default: as needed, 160)", type=int),
)
DEPTHS = (
    option("--send-depth", "sends that a channel may have in flight (default: the smallest number)", type=int),
    option("--receive-depth", "actions by which a receive is posted ahead", default=2),
)
PARTS = option(
    "--parts", "with --experts: prove these rows, as draw --experts --csv-out writes them", type=Path, needs="--experts"
)


def _model(own: argparse.Namespace) -> Model:
    return Model(
        own.ranks,
        Seconds(own.forward, own.input_grad, own.weight_grad),
        own.replay,
        own.recompute_in_bubbles,
        transfer_seconds=own.transfer,
        latency_seconds=own.p2p,
        pair_share=own.pair_share,
        optimizer_seconds=own.optimizer,
        activation_bytes=own.activation_bytes,
        kept_for_weights=own.kept_for_weights,
        sharding=_sharding(own),
    )


def _sharding(own: argparse.Namespace) -> ShardingTimes | None:
    """Return the sharding that is asked for."""
    strategy = own.data_parallel_sharding_strategy
    if strategy is None:
        return None
    policy = ShardingPolicy(
        GATHERS[strategy],
        own.data_parallel_sharding_granularity,
        own.data_parallel_sharding_prefetch,
        own.reshard_after_forward,
        own.max_gathered,
    )
    return ShardingTimes(policy, own.data_parallel_sharding_units, own.ranks * own.gather, own.ranks * own.reduce)


def _is_sharded(own: argparse.Namespace) -> bool:
    return own.data_parallel_sharding_strategy is not None


def _expert_model(own: argparse.Namespace) -> ExpertModel | None:
    """Return the model of --experts, None without it. Raises ConfigError."""
    if not own.experts:
        return None
    if own.dense_layers > own.layers:
        raise ConfigError(f"--dense-layers {own.dense_layers} must be at most --layers {own.layers}")
    flags = ("attention", "dense-mlp", "expert-mlp", "head", "dispatch", "combine")
    times = [getattr(own, flag.replace("-", "_")) for flag in flags]
    for flag, values in zip(flags, times, strict=True):
        if not all(0 <= value < math.inf for value in values):
            raise ConfigError(f"--{flag} {' '.join(f'{value:g}' for value in values)}: every time must be 0 or more")
    attention, dense, expert, head = (Seconds(*each) for each in times[:4])
    dispatch, combine = ((forward, backward) for forward, backward in times[4:])
    has_experts = tuple(layer >= own.dense_layers for layer in range(own.layers))
    costs = own.transfer, own.p2p, own.kept_for_weights
    return ExpertModel(has_experts, attention, dense, expert, head, dispatch, combine, *costs)


def _schedule(own: argparse.Namespace, model: Model | ExpertModel) -> Schedule:
    """Return the compute-only schedule by name or from the file."""
    if own.csv is not None:
        if own.name is not None:
            raise ConfigError(f"both the name {own.name} and --csv {own.csv} were given; use one")
        text = own.csv.read_text(encoding="utf-8")
        place = PLACEMENTS.get(own.placement)
        read = from_csv(text, own.csv.stem, place(len(text.splitlines()), own.chunks or 2) if place else None)
        return model.with_replays(read) if isinstance(model, Model) else read
    if own.name is None:
        raise ConfigError(f"no schedule given; give a name ({', '.join(SCHEDULES)}) or --csv FILE")
    p, family = own.ranks, schedule_family(own.name)
    goal = None
    if family.is_automatic and p >= 1:
        goal = AutoGoal(model.costs(p), (own.memory_limit or [p])[0], model.kept_for_weights)
    chunks = own.chunks or family.num_chunks(2)
    steps = 1 if family.is_synchronous else STRETCH
    schedule = build_schedule(own.name, p, chunks, _microbatches(own), own.group_size, goal, own.slices, steps)
    return model.with_replays(schedule) if isinstance(model, Model) else schedule


def _microbatches(own: argparse.Namespace) -> int:
    return 2 * own.ranks if own.microbatches is None else int(own.microbatches)


@command("megapipe schedule draw", (*NAME, *MODEL, *SHARDING, *EXPERTS, *DRAWINGS), needs_words=False)
def draw_one(own: argparse.Namespace) -> None:
    """Draw one schedule: text for a terminal, SVG with a memory curve, Chrome/Perfetto trace, CSV.

    With --experts the drawing has two lanes per rank, computation and all-to-alls, and text and CSV hold the parts of
    layers in the order of issue: 2F0.5A is the attention of layer 5 in 2F0.
    """
    model = _expert_model(own) or _model(own)
    schedule = _schedule(own, model)
    measures: Measures | ExpertMeasures
    if isinstance(model, Model):
        measures, timeline = measure(schedule.compute_only(), model)
        text, picture = partial(timeline_text, timeline, own.width or 160), partial(svg, timeline, own.width)
        rows = partial(to_csv, timeline.schedule if own.lowered else schedule)
    else:
        measures, timeline = measure_experts(schedule.compute_only(), model)
        parts = model.parts(schedule.num_stages)
        text = rows = partial(
            parts_to_csv, parts, timeline.schedule if own.lowered else timeline.schedule.compute_only()
        )
        picture = partial(parts_svg, timeline, parts, own.width)
    written = []
    for path, content in ((own.svg, picture), (own.trace, partial(chrome_trace, timeline)), (own.csv_out, rows)):
        if path is not None:
            path.write_text(content(), encoding="utf-8")
            written.append(str(path))
    if own.json:
        print(json.dumps({**row_data(measures, _is_sharded(own)), "written": written}))
    else:
        print("wrote " + ", ".join(written) if written else text())


@command("megapipe schedule compare", (NAMES, *MODEL, *SHARDING, *EXPERTS), needs_words=False)
def compare_all(own: argparse.Namespace) -> int:
    """Print one table over all schedules, or those named; with --experts, what they hide of the all-to-alls."""
    chunks = 2 if own.chunks is None else own.chunks
    sizes = own.ranks, chunks, _microbatches(own), own.group_size, own.memory_limit or (), own.names
    experts = _expert_model(own)
    rows = compare(_model(own), *sizes, own.slices) if experts is None else compare(experts, *sizes)
    is_sharded = _is_sharded(own)
    print(json.dumps([row_data(row, is_sharded) for row in rows]) if own.json else table_text(rows, is_sharded))
    return ConfigError.exit_code if all(isinstance(row, Unmeasured) for row in rows) else 0


@command("megapipe schedule check", (*NAME, *MODEL, *CHECKED_SHARDING, *EXPERTS, *DEPTHS, PARTS), needs_words=False)
def check_one(own: argparse.Namespace) -> None:
    """Prove a schedule, by name or from a CSV file, and print the send depth of every channel.

    With --experts the parts of its layers are proven, in megapipe's order or in that of --parts.
    """
    experts = _expert_model(own)
    schedule = _schedule(own, experts or _model(own))
    if own.max_gathered is not None and not _is_sharded(own) and Op.UNSHARD not in schedule.ops:
        raise ConfigError(f"--max-gathered {own.max_gathered}: schedule {schedule} gathers nothing; omit it")
    if experts is not None:
        _check_parts(own, schedule.compute_only(), experts)
        return
    if not schedule.is_lowered:
        validate(schedule)
        sharding = _sharding(own)
        schedule = lowered(in_units(schedule, sharding), sharding, own.receive_depth)
    elif _is_sharded(own):
        raise ConfigError(f"--{_SHARDING}strategy is only read with rows without messages; omit it")
    report = validate(schedule, own.send_depth, own.max_gathered)
    channels = channels_data(report)
    _print_proof(own, report, is_synchronous=schedule.is_synchronous, channels=channels)
    if not own.json:
        print("\n".join([*_stream_text(schedule, own.receive_depth), *channels_text(channels)]))


def _stream_text(schedule: Schedule, receive_depth: int) -> Iterator[str]:
    """Prove the stream of an asynchronous schedule, and say what its microbatches meet. Raises ScheduleError."""
    if schedule.is_synchronous:
        return
    yield NOT_SYNCHRONOUS
    if schedule.num_steps == 1:  # from a file
        return
    versions = schedule_family(schedule.name).versions
    assert versions is not None
    stream = build_stream(schedule.name, schedule.num_ranks, schedule.step_size, receive_depth)
    depth = max(stream.send_depth.values(), default=0)
    yield f"proven for any number of steps of {count_text(schedule.step_size, 'microbatch')}, with send depth {depth}"
    found = [weight_versions(stream.stretch, rank, versions) for rank in range(schedule.num_ranks)]
    yield f"versions of the weights by rank: {' '.join(str(each.num_held) for each in found)}"
    crossed = " ".join(str(each.num_crossed) for each in found)
    yield f"updates between the forward and the backward of a microbatch, at most, by rank: {crossed}"


def _check_parts(own: argparse.Namespace, schedule: Schedule, model: ExpertModel) -> None:
    """Prove and print a schedule of parts, expanded or read from --parts."""
    parts, paired = model.parts(schedule.num_stages), pair_up(schedule)
    expanded = expand(paired, parts)
    if own.parts is not None:
        expanded = parts_from_csv(parts, own.parts.read_text(encoding="utf-8"), expanded)
    rows = expanded if expanded.is_lowered else lower(expanded, own.receive_depth)
    report = prove(rows, paired, parts, own.send_depth)
    _print_proof(own, report)


def _print_proof(own: argparse.Namespace, report: ValidationReport, **more: Any) -> None:
    """Print what a proof found, with --json and as JSON also `more`."""
    summary = {"schedule": str(report.schedule), "valid": True, "num_actions": report.num_actions}
    print(json.dumps({**summary, "send_depth": report.send_depth, **more}) if own.json else report)


@command("megapipe schedule simulate", (*NAME, *MODEL, *SHARDING), needs_words=False)
def simulate_one(own: argparse.Namespace) -> None:
    """Print makespan, idle, peaks and messages of one schedule, rank by rank."""
    model = _model(own)
    measures, timeline = measure(_schedule(own, model).compute_only(), model)
    keys = ("work_seconds", "chained_idle_seconds", "barrier_idle_seconds", "peak_live_chunks")
    rows = list(zip(*(getattr(timeline, key) for key in keys), strict=True))
    if own.json:
        ranks = [{"pp_rank": rank, **dict(zip(keys, row, strict=True))} for rank, row in enumerate(rows)]
        print(json.dumps({**row_data(measures, _is_sharded(own)), "ranks": ranks}))
        return
    print(table_text([measures], _is_sharded(own)))
    print("\nrank      work  chained idle  barrier idle  peak chunks")
    for rank, row in enumerate(rows):
        print("{:4d}  {:8.5g}  {:12.5g}  {:12.5g}  {:11d}".format(rank, *row))
