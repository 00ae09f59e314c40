"""All schedule families side by side: time and memory for the same model on the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from megapipe.errors import ConfigError, ScheduleError
from megapipe.extras.report.curves import peak_waiting_messages
from megapipe.formatting import text_table
from megapipe.schedule.action import SEND_OPS, Op
from megapipe.schedule.costs import AutoGoal, Costs, Seconds, seconds_of_stages
from megapipe.schedule.experts import ExpertMeasures, ExpertModel
from megapipe.schedule.families import SCHEDULES, build_schedule, schedule_family
from megapipe.schedule.lifetimes import peak_live_chunks
from megapipe.schedule.lower import lower
from megapipe.schedule.recompute import replay_ahead
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.sharding import ShardingPolicy, shard, split_stages
from megapipe.schedule.simulate import Timeline, simulate
from megapipe.schedule.stream import STRETCH, steady, weight_versions
from megapipe.schedule.validate import ValidationReport, validate


@dataclass(frozen=True)
class ShardingTimes:
    """Sharded gradients, or weights too: when they are gathered and reduced, and how long that takes."""

    policy: ShardingPolicy
    units: int = 1  # into which every stage is split
    gather_seconds: float = 0.0  # of the weights of all stages, one after the other
    reduce_seconds: float = 0.0  # of their gradients


@dataclass(frozen=True)
class Model:
    """A model that can be cut into any number of stages."""

    num_ranks: int
    seconds: Seconds  # of all the layers of one rank
    replay_seconds: float = 0.0  # of the forward that a backward runs again besides
    replays_ahead: bool = False  # before the backward, where the rank waits for a gradient
    transfer_seconds: float = 0.0  # the time that a message occupies its channel
    latency_seconds: float = 0.0  # from then to its use
    pair_share: float = 1.0  # the time of an overlapped forward and backward relative to their sum
    optimizer_seconds: float = 0.0  # norm, update and gather after the last action
    activation_bytes: float = 0.0  # of one microbatch in the layers of one rank
    kept_for_weights: float = 1.0  # the part of it that stays from I to W
    sharding: ShardingTimes | None = None

    def costs(self, num_stages: int) -> Costs:
        """Return the costs of equal stages."""
        stages = [Seconds(*(value * (self.num_ranks / num_stages) for value in self.seconds))] * num_stages
        seconds = seconds_of_stages(stages, self.transfer_seconds)
        replay = self.replay_seconds * self.num_ranks / num_stages
        for stage, op in product(range(num_stages), (Op.B, Op.I, Op.RECOMPUTE)):
            seconds[stage, op] += replay
        if self.sharding is not None:
            shares = (Op.UNSHARD, self.sharding.gather_seconds), (Op.REDUCE_GRAD, self.sharding.reduce_seconds)
            seconds |= {(stage, op): whole / num_stages for stage in range(num_stages) for op, whole in shares}
        pairs = {
            (f, b): self.pair_share * (seconds[f, Op.F] + seconds[b, Op.B])
            for f, b in product(range(num_stages), range(num_stages))
            if self.pair_share != 1.0
        }
        return Costs(seconds, self.latency_seconds, pair_seconds=pairs)

    def with_replays(self, schedule: Schedule) -> Schedule:
        """Return a compute-only schedule with the replays that run ahead, if any do. Raises ScheduleError for an
        asynchronous schedule, which can have none.
        """
        return replay_ahead(schedule, self.costs(schedule.num_stages)) if self.replays_ahead else schedule

    def measure(self, schedule: Schedule) -> Measures:
        """Return the measures of a compute-only schedule."""
        return measure(schedule, self)[0]


@dataclass(frozen=True)
class Measures:
    """Time and memory of a step; of an asynchronous schedule one in the middle of a stream.

    Peaks and idle are those of the worst rank; peak_bytes is 0 without activation_bytes.
    """

    schedule: str
    num_ranks: int
    stages_per_rank: int
    num_microbatches: int
    is_synchronous: bool
    makespan_seconds: float
    step_seconds: float  # with the optimizer
    work_seconds: float
    barrier_share: float
    barrier_ratio: float
    chained_share: float
    chained_ratio: float
    peak_microbatches: float  # until W; a microbatch of 1 / num_ranks of the model
    peak_until_input_gradient: float
    peak_bytes: float
    inputs_held: int
    messages_sent: int  # by all ranks
    send_depth: int
    num_actions: int
    weight_versions: int = 1
    # of sharded gradients and weights, the most of any rank
    gathers: int = 0
    reductions: int = 0
    most_gathered: int = 0  # stages at once


@dataclass(frozen=True)
class Unmeasured:
    """A family that cannot run the given shape, and the reason."""

    schedule: str
    refused: str


def in_units(schedule: Schedule, sharding: ShardingTimes | None) -> Schedule:
    """Return a compute-only schedule whose stages are the units that are gathered and reduced one by one."""
    if sharding is None or sharding.units == 1:
        return schedule
    return split_stages(schedule, (sharding.units,) * schedule.num_stages)


def lowered(schedule: Schedule, sharding: ShardingTimes | None, receive_depth: int = 2) -> Schedule:
    """Return a schedule of `in_units` with its messages and, if it is sharded, its gathers and reductions."""
    schedule = lower(schedule, receive_depth)
    return schedule if sharding is None else shard(schedule, sharding.policy)


def measure(schedule: Schedule, model: Model, receive_depth: int = 2) -> tuple[Measures, Timeline]:
    """Validate, lower and simulate a compute-only schedule, with its gathers and reductions if the model has any."""
    schedule = in_units(schedule, model.sharding)
    whole = lowered(schedule, model.sharding, receive_depth)
    proof = validate(whole)
    timeline = simulate(whole, model.costs(schedule.num_stages))
    barrier, chained, makespan = timeline.barrier_bubble, timeline.chained_bubble, timeline.makespan_seconds
    if schedule.num_steps > 1:
        middle = steady(whole, model.costs(schedule.num_stages))
        barrier = chained = middle.bubble
        makespan = middle.seconds
    # of the layers of a rank that holds each parameter once, and of the microbatch if it has slices
    chunk = schedule.num_ranks / schedule.num_stages / schedule.num_slices
    measures = Measures(
        schedule=schedule.name,
        num_ranks=schedule.num_ranks,
        stages_per_rank=schedule.placement.num_chunks,
        num_microbatches=schedule.step_size,
        is_synchronous=schedule.is_synchronous,
        makespan_seconds=makespan,
        step_seconds=makespan + model.optimizer_seconds,
        work_seconds=max(timeline.work_seconds) / schedule.num_steps,
        barrier_share=barrier.share,
        barrier_ratio=barrier.ratio,
        chained_share=chained.share,
        chained_ratio=chained.ratio,
        peak_microbatches=max(timeline.peak_live_chunks) * chunk,
        peak_until_input_gradient=max(peak_live_chunks(schedule, until_input_gradient=True)) * chunk,
        peak_bytes=max(timeline.peak_live_chunks) * chunk * model.activation_bytes,
        inputs_held=max(peak_waiting_messages(timeline)),
        messages_sent=sum(op in SEND_OPS for row in whole.rows for _, op, _ in row) // schedule.num_steps,
        send_depth=proof.send_depth,
        num_actions=proof.num_actions,
        weight_versions=_most_versions(whole),
        gathers=max(sum(op is Op.UNSHARD for _, op, _ in row) for row in whole.rows),
        reductions=max(sum(op is Op.REDUCE_GRAD for _, op, _ in row) for row in whole.rows),
        most_gathered=max(proof.most_gathered),
    )
    return measures, timeline


def _most_versions(schedule: Schedule) -> int:
    """Return the most versions of its weights that a rank holds at once."""
    versions = SCHEDULES[schedule.name].versions if schedule.name in SCHEDULES else None
    if versions is None:
        return 1
    return max(weight_versions(schedule, rank, versions).num_held for rank in range(schedule.num_ranks))


def compare(
    model: Model | ExpertModel,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    group_size: int | None = None,
    memory_limits: Sequence[float] = (),
    names: Sequence[str] = (),
    num_slices: int = 1,
) -> list[Measures | ExpertMeasures | Unmeasured]:
    """Measure all families of the table (or `names`) for the same model, in the order of the table.

    num_chunks: for the families that take any number. memory_limits: of zb-auto, in microbatches, one row each
    (default: p and 2 p). num_slices: of each microbatch.
    """
    rows: list[Measures | ExpertMeasures | Unmeasured] = []
    for name in names or SCHEDULES:
        limits: Sequence[float | None] = (None,)
        if name in SCHEDULES and SCHEDULES[name].is_automatic:
            limits = memory_limits or (num_ranks, 2 * num_ranks)
        for limit in limits:
            label = name if limit is None else f"{name} {limit:g}"
            try:
                family = schedule_family(name)
                goal = None if limit is None else AutoGoal(model.costs(num_ranks), limit, model.kept_for_weights)
                group = group_size if family.takes_group_size else None
                chunks = family.num_chunks(num_chunks)
                steps = 1 if family.is_synchronous else STRETCH
                schedule = build_schedule(name, num_ranks, chunks, num_microbatches, group, goal, num_slices, steps)
                if isinstance(model, Model) and family.is_synchronous:
                    schedule = model.with_replays(schedule)
                rows.append(model.measure(replace(schedule, name=label)))
            except (ConfigError, ScheduleError) as error:
                rows.append(Unmeasured(label, str(error).splitlines()[0]))
    return rows


# --------------------------------------------------------------------------------------------------------------- tables

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
    "weights": lambda row: str(row.weight_versions),
    "inputs": lambda row: str(row.inputs_held),
    "messages": lambda row: str(row.messages_sent),
    "depth": lambda row: str(row.send_depth),
    "gathers": lambda row: str(row.gathers),
    "reductions": lambda row: str(row.reductions),
    "gathered": lambda row: str(row.most_gathered),
}
_SHARDING_LEGEND = """
gathers, reductions: of the rank with the most; gathered: stages of a rank whose weights are there at once, at most"""
_LEGEND = """
barrier, chained: idle share of the step, with the barrier after each step that runs have, and as if there were none
peak: microbatches alive until W (to I: until I) on the worst rank, each 1/p of the model; inputs: received, waiting
depth: sends that a channel must be able to have in flight without a posted receive"""
NOT_SYNCHRONOUS = "NOT synchronous: weights change while microbatches are in flight"


_EXPERT_COLUMNS: dict[str, Callable[[ExpertMeasures], str]] = {
    "schedule": lambda row: row.schedule + ("" if row.is_synchronous else " *"),
    "stages": lambda row: str(row.num_stages // row.num_ranks),
    "serial": lambda row: f"{row.serial_seconds:.5g}",
    "weights": lambda row: f"{row.weights_seconds:.5g}",
    "pairs": lambda row: "-" if row.pairs_seconds is None else f"{row.pairs_seconds:.5g}",
    "bound": lambda row: f"{row.bound_seconds:.5g}",
    "all-to-all": lambda row: f"{row.exchange_seconds:.5g}",
    "exposed": lambda row: f"{row.exposed_seconds:.5g}",
    "hidden": lambda row: f"{row.hidden_share:.1%}",
    "peak": lambda row: f"{row.peak_microbatches:.4g}",
}
_EXPERT_LEGEND = """
serial: step whose all-to-alls block the computation; weights: they overlap with weight gradients of the same backward
pairs: forwards and backwards are merged; bound: no order on these stages is faster; peak: with the pairs
all-to-all: on the busiest rank; exposed: of that, while the rank computes nothing, in the faster of weights and pairs
hidden: the part of all all-to-alls that is not exposed"""


def row_data(row: Measures | ExpertMeasures | Unmeasured, is_sharded: bool) -> dict[str, Any]:
    """Return a row as JSON data; only with sharded gradients it has the numbers of gathers and reductions, and only an
    asynchronous schedule that of its versions of the weights.
    """
    unread = () if is_sharded else ("gathers", "reductions", "most_gathered")
    if isinstance(row, Measures) and row.is_synchronous:
        unread = (*unread, "weight_versions")
    return {key: value for key, value in asdict(row).items() if key not in unread}


def table_text(rows: Sequence[Measures | ExpertMeasures | Unmeasured], is_sharded: bool = False) -> str:
    """Return the table for a terminal, with a legend. is_sharded: gradients, or weights too, are sharded."""
    measured = [row for row in rows if not isinstance(row, Unmeasured)]
    columns: dict[str, Callable[[Any], str]] = dict(_COLUMNS)
    legend = _LEGEND
    if any(isinstance(row, ExpertMeasures) for row in rows):
        columns, legend = dict(_EXPERT_COLUMNS), _EXPERT_LEGEND
    else:
        if not any(row.peak_bytes for row in measured if isinstance(row, Measures)):
            del columns["bytes"]
        if any(row.gathers for row in measured if isinstance(row, Measures)):
            legend += _SHARDING_LEGEND
        else:
            for name in ("gathers", "gathered", *(() if is_sharded else ("reductions",))):
                del columns[name]
        if all(row.weight_versions == 1 for row in measured if isinstance(row, Measures)):
            del columns["weights"]
        if all(row.step_seconds == row.makespan_seconds for row in measured if isinstance(row, Measures)):
            del columns["step"]
    cells = [list(columns), *([cell(row) for cell in columns.values()] for row in measured)]
    width = max(len(line[0]) for line in cells)
    lines = list(text_table(cells, left=(0,), indent=0))
    lines += [f"{row.schedule.ljust(width)}  refused: {row.refused}" for row in rows if isinstance(row, Unmeasured)]
    lines.append(legend)
    if any(not row.is_synchronous for row in measured):
        lines.append(f"*: {NOT_SYNCHRONOUS}; a step in the middle of a stream, which does not drain")
        lines.append("weights: versions of them on the worst rank")
    return "\n".join(lines)


def channels_data(report: ValidationReport) -> list[dict[str, Any]]:
    """Return the depths of every channel of a schedule that was proven, as JSON data."""
    least = report.least_send_depth
    order = sorted(least, key=lambda channel: (channel.boundary, channel.kind.value, channel.direction))
    return [
        {"channel": str(each), "least_send_depth": least[each], "most_posted": report.most_posted.get(each, 0)}
        for each in order
    ]


def channels_text(channels: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each channel of `channels_data`."""
    width = max((len(each["channel"]) for each in channels), default=0)
    for each in channels:
        depths = f"send depth {each['least_send_depth']}, receives posted {each['most_posted']}"
        yield f"  {each['channel'].ljust(width)}  {depths}"
