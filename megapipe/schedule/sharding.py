"""Sharded weights: where a lowered schedule gathers and frees the weights of its stages, and reduces their gradients.

With ZeRO-3 (FSDP) a rank keeps only its shard of every weight. UNSHARD gathers the weights of a stage before they are
read, RESHARD frees them, and REDUCE_GRAD reduces gradients to shards; with ZeRO-2 there are only the reductions. The
weights of a stage are read by F, B and I, also where a backward recomputes the forward. A W reads them where it
computes again what was not kept, on the stages of `Schedule.reading_in_w`; elsewhere inputs and output gradients of
linears suffice. A word embedding that two stages share (a tied one) belongs to the weights of both.

`shard` is a lowering pass: it takes a lowered schedule and a policy and places the actions. A stage is gathered as a
whole. `split_stages` makes the units smaller: it turns every stage into several on the same rank, each of a few layers,
before messages are added; everything that handles stages then handles units.

The number of gathers and reductions depends on the schedule. Breadth-first runs all microbatches of a chunk in one run:
a step with v chunks gathers 2 v - 1 times (the last chunk's backward follows its forward), or 2 v times if it is
resharded in between, and reduces v times (Lamy-Poirier 2022, arXiv:2211.05953). 1F1B takes a microbatch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from megapipe.errors import ConfigError, ScheduleError
from megapipe.schedule.action import COMPLETES_OPS, PLANNED_OPS, SEND_OPS, Action, Op
from megapipe.schedule.partition import Partition, from_counts
from megapipe.schedule.placement import Placement
from megapipe.schedule.schedule import Row, Schedule, gc_paused

GRANULARITIES = ("microbatch", "run", "step")


@dataclass(frozen=True)
class ShardingPolicy:
    """When weights are gathered and freed, and gradients reduced. Raises ConfigError for what contradicts itself."""

    gathers: bool  # ZeRO-3: weights are sharded, too; False (ZeRO-2): gradients only
    # microbatch: weights are gathered for each computation, gradients reduced after each backward; run: for all
    # consecutive microbatches of a stage among the forwards of its rank, and among its backwards; step: once a step,
    # from the first forward to the last backward
    granularity: str = "run"
    prefetch: int = 1  # computations on the rank (pairs of DualPipe count once) that a gather starts ahead of its use
    # whether weights are freed and gathered again where the backward of a stage directly follows its forward
    reshard_after_forward: bool = False
    max_gathered: int | None = None  # the most stages of a rank whose weights are gathered at once; None: no limit

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise ConfigError(f"unknown granularity {self.granularity!r}; use one of {', '.join(GRANULARITIES)}")
        if self.prefetch < 0:
            raise ConfigError(f"a prefetch of {self.prefetch} computations; use 0 or more")
        if self.max_gathered is not None and self.max_gathered < 1:
            raise ConfigError(f"at most {self.max_gathered} gathered stages; use 1 or more")
        if self.reshard_after_forward and self.granularity == "step":
            raise ConfigError(
                "weights that are gathered once a step are kept from forward to backward; use granularity run or "
                "microbatch to free them after the forward"
            )


class _Use(NamedTuple):
    """A computation that reads weights, or an overlapped pair of two: slots first .. last of the row."""

    first: int
    last: int
    reads: tuple[tuple[int, bool], ...]  # (stage, whether it is a forward) of each


class _Span(NamedTuple):
    """Consecutive uses of one stage, numbered along the row, through which its weights stay gathered."""

    first: int
    last: int
    starts_forward: bool
    ends_forward: bool


@gc_paused()
def shard(schedule: Schedule, policy: ShardingPolicy) -> Schedule:
    """Add UNSHARD, RESHARD and further REDUCE_GRAD to a lowered schedule; the computation and its messages stay.

    - UNSHARD follows the computation `policy.prefetch` computations ahead of the first that needs it, or a later one
      where more than `policy.max_gathered` stages would be gathered, or the stage itself still is.
    - RESHARD follows the last computation that needs the gathered weights.
    - REDUCE_GRAD with a microbatch follows the weight gradient of that microbatch; the one without, which `lower` has
      placed after the last weight gradient of the stage, reduces the rest.
    All three follow the messages that the computation sends; the gather for a coming computation goes before a
    reduction. Raises ScheduleError if the schedule is not lowered or updates weights while it runs, and ConfigError if
    a computation needs more than `policy.max_gathered` stages.
    """
    if not schedule.is_synchronous:
        raise ScheduleError(
            f"schedule {schedule} updates weights while microbatches are in flight, so that they cannot be sharded: a "
            "backward needs the weights of its forward; use a synchronous schedule"
        )
    if schedule.num_ranks > 1 and not schedule.is_lowered:
        raise ScheduleError(f"schedule {schedule} has no messages: lower it first (schedule.lower)")
    if Op.UNSHARD in schedule.ops:
        raise ScheduleError(f"schedule {schedule} already gathers weights; shard it once")
    rows = []
    for row in schedule.rows:
        after: dict[int, list[Action]] = {}  # slot of a computation, or -1 -> actions that follow it and its sends
        if policy.gathers:
            after = _plan_gathers(list(_uses(schedule, row)), policy, schedule.name)
        for slot, action in _plan_reductions(row, policy.granularity):
            after.setdefault(slot, []).append(action)
        rows.append(inserted(row, after))
    return replace(schedule, rows=tuple(rows))


def inserted(row: Row, after: dict[int, list[Action]]) -> Row:
    """Return the row with actions added after slots, each time behind the sends that follow there."""
    result: list[Action] = list(after.get(-1, ()))
    waiting: list[Action] = []
    for slot, action in enumerate(row):
        if action[1] not in SEND_OPS:
            result += waiting
            waiting = []
        result.append(action)
        if slot in after:
            waiting = after[slot]
    return (*result, *waiting)


def carry(planned: Schedule, lowered: Schedule) -> Schedule:
    """Return a lowered schedule with the gathers and reductions that stand between its computations in `planned`."""
    rows = []
    for row, target in zip(planned.rows, lowered.rows, strict=True):
        slots = [-1, *(slot for slot, action in enumerate(target) if action.op in PLANNED_OPS)]
        after: dict[int, list[Action]] = {}
        computed = 0
        for action in row:
            if action.op in PLANNED_OPS:
                computed += 1
            else:
                after.setdefault(slots[computed], []).append(action)
        rows.append(inserted(target, after))
    return replace(lowered, rows=tuple(rows))


def _uses(schedule: Schedule, row: Row) -> Iterator[_Use]:
    """Yield the computations of a row that read weights, the two halves of an overlapped pair as one."""
    pair_end = -1
    for slot, (_, op, _) in enumerate(row):
        if op is Op.OVERLAP:
            pair_end = slot + 2
            reads = tuple((half.stage, half.op is Op.F) for half in row[slot + 1 : slot + 3])
            yield _Use(slot, pair_end, reads)
        elif slot > pair_end and schedule.reads_weights(row[slot]):
            yield _Use(slot, slot, ((row[slot].stage, op is Op.F),))


def _spans(uses: Sequence[_Use], policy: ShardingPolicy) -> dict[int, list[_Span]]:
    """Return for each stage the spans through which its weights stay gathered, in order."""
    found: dict[int, list[_Span]] = {}
    for is_forward in (True, False):
        before = -1  # the stage of the last use in this direction
        for number, use in enumerate(uses):
            for stage in (stage for stage, forward in use.reads if forward is is_forward):
                spans = found.setdefault(stage, [])
                continues = policy.granularity == "run" and before == stage
                if spans and spans[-1].ends_forward is is_forward and (continues or policy.granularity == "step"):
                    spans[-1] = spans[-1]._replace(last=number)
                else:
                    spans.append(_Span(number, number, is_forward, is_forward))
                before = stage
    return {stage: _merged(spans, policy) for stage, spans in found.items()}


def _merged(spans: list[_Span], policy: ShardingPolicy) -> list[_Span]:
    """Join spans of one stage that overlap, and those that follow each other directly.

    Between a forward and its backward `reshard_after_forward` decides; between a backward and the next forward, weights
    that are gathered for each computation are freed.
    """
    result: list[_Span] = []
    for span in sorted(spans):
        before = result[-1] if result else None
        joins = policy.granularity == "run"
        if before is not None and before.ends_forward and not span.starts_forward:
            joins = not policy.reshard_after_forward
        if before is not None and (policy.granularity == "step" or span.first <= before.last + joins):
            ends_forward = span.ends_forward if span.last >= before.last else before.ends_forward
            result[-1] = before._replace(last=max(before.last, span.last), ends_forward=ends_forward)
        else:
            result.append(span)
    return result


def _plan_gathers(uses: Sequence[_Use], policy: ShardingPolicy, name: str) -> dict[int, list[Action]]:
    """Return slot of a computation, or -1 for the start of the row -> the RESHARD and UNSHARD that follow it."""
    limit = len(uses) + 1 if policy.max_gathered is None else policy.max_gathered
    gathered = [0] * len(uses)  # stages, at each use
    ended: dict[int, int] = {}  # stage -> the last use of its last span
    frees: dict[int, list[Action]] = {}  # number of a use -> actions behind it
    gathers: dict[int, list[Action]] = {}
    earliest = 0
    spans = [(span, stage) for stage, each in _spans(uses, policy).items() for span in each]
    for (first, last, *_), stage in sorted(spans, key=lambda item: (item[0].first, item[1])):
        if gathered[first] >= limit:
            needed = max(len({stage for stage, _ in use.reads}) for use in uses)
            reason = "a pair of this schedule needs" if needed > 1 else "this policy keeps"
            raise ConfigError(
                f"schedule {name}: at most {limit} gathered stages, but {reason} {gathered[first] + 1} at once; allow "
                f"{gathered[first] + 1} or more, or a finer granularity than {policy.granularity}"
            )
        at = first
        # the gathers of a rank come in the order of their uses; a stage is not gathered twice
        while at > max(earliest, first - policy.prefetch, ended.get(stage, -1) + 1) and gathered[at - 1] < limit:
            at -= 1
        earliest, ended[stage] = at, last
        for use in range(at, last + 1):
            gathered[use] += 1
        gathers.setdefault(at - 1, []).append(Action(stage, Op.UNSHARD, None))
        frees.setdefault(last, []).append(Action(stage, Op.RESHARD, None))
    slots = {-1: -1} | {number: use.last for number, use in enumerate(uses)}
    return {slots[n]: [*frees.get(n, ()), *gathers.get(n, ())] for n in sorted({*frees, *gathers})}


def _plan_reductions(row: Row, granularity: str) -> Iterator[tuple[int, Action]]:
    """Yield slots of weight gradients and the reductions that follow them, without the last one of each stage."""
    completed = [(slot, stage, m) for slot, (stage, op, m) in enumerate(row) if op in COMPLETES_OPS]
    last = {stage: slot for slot, stage, _ in completed}
    for (slot, stage, microbatch), (_, following, _) in pairwise(completed):
        if slot == last[stage] or granularity == "step" or (granularity == "run" and following == stage):
            continue
        yield slot, Action(stage, Op.REDUCE_GRAD, microbatch)


def split_stages(schedule: Schedule, num_units: Sequence[int]) -> Schedule:
    """Return a compute-only schedule in which stage s is num_units[s] consecutive stages on the same rank.

    Forwards and replays run the units of a stage in order, backwards in reverse. The units of an overlapped pair are
    paired one by one: the first of the forward with the last of the backward. Raises ScheduleError for a lowered or
    asynchronous schedule, and for another number of stages.
    """
    if schedule.is_lowered or not schedule.is_synchronous or len(num_units) != schedule.num_stages:
        raise ScheduleError(
            f"schedule {schedule} cannot be split into the units of {len(num_units)} stages: it must have as many, no "
            "messages and no updates"
        )
    starts = list(accumulate(num_units, initial=0))

    def units(action: Action) -> list[Action]:
        stage, op, microbatch = action
        forward = [Action(unit, op, microbatch) for unit in range(starts[stage], starts[stage + 1])]
        return forward if op in (Op.F, Op.RECOMPUTE) else forward[::-1]

    rows = []
    for row in schedule.rows:
        actions, split = iter(row), list[Action]()
        for action in actions:
            if action.op is not Op.OVERLAP:
                split += units(action)
                continue
            forward, backward = units(next(actions)), units(next(actions))
            paired = min(len(forward), len(backward))
            for pair in zip(forward, backward, strict=False):
                split += (pair[0]._replace(op=Op.OVERLAP), *pair)
            split += forward[paired:] + backward[paired:]
        rows.append(tuple(split))
    reading = frozenset(unit for stage in schedule.reading_in_w for unit in range(starts[stage], starts[stage + 1]))
    placement = split_placement(schedule.placement, num_units)
    return replace(schedule, placement=placement, rows=tuple(rows), reading_in_w=reading)


def split_placement(placement: Placement, num_units: Sequence[int]) -> Placement:
    """Return the placement in which all units of a stage are on its rank."""
    ranks = [
        tuple(rank for rank, count in zip(of_stage, num_units, strict=True) for _ in range(count))
        for of_stage in placement.directions
    ]
    return Placement(placement.num_ranks, *ranks)


def divided(num_layers: int, wanted: int) -> list[int]:
    """Return the layers of the units of a stage, as many as wanted and as even as possible, more in the first ones.

    None is without a layer, but for the only one of a stage without layers.
    """
    count = max(1, min(wanted, num_layers))
    return [num_layers // count + (unit < num_layers % count) for unit in range(count)]


def joined_units(placement: Placement, partition: Partition, num_units: Sequence[int]) -> tuple[Placement, Partition]:
    """Return the placement and partition of whole stages: the inverse of `split_placement`."""
    starts = list(accumulate(num_units, initial=0))[:-1]
    ranks = [tuple(of_unit[start] for start in starts) for of_unit in placement.directions]
    counts = partition.layer_counts
    layers = [sum(counts[start : start + count]) for start, count in zip(starts, num_units, strict=True)]
    return Placement(placement.num_ranks, *ranks), from_counts(layers, partition.num_layers)
