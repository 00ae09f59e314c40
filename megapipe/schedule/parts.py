"""Schedules of parts: every action of a stage cut into the attention, all-to-alls, MLP and head of its layers.

A part is scheduled like a small stage: `expand` turns a schedule of stages into one of parts, whose placement puts the
parts of a stage on the rank of the stage, so that `lower`, `validate`, `lifetimes` and `simulate` apply as they are.
Attention, MLP and head have F, I and W, or F and B. Dispatch and combine, the all-to-alls of expert parallelism, have
no weights: F and B. They occupy the network of a rank and overlap with its computation (`Costs.network`).

The row of a rank is the order in which it issues parts. Each of its two resources runs them in that order, and a part
starts when its resource is free and its input is there. All members of an expert-parallel group have the same pp_rank
and thus the same row, so that they issue their collectives in one order.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from megapipe.errors import ConfigError, ScheduleError
from megapipe.schedule.action import RECV_OPS, SEND_OPS, SHARDING_OPS, Action, Op, parse_action
from megapipe.schedule.lifetimes import Held, peak_held
from megapipe.schedule.partition import Partition
from megapipe.schedule.placement import Placement
from megapipe.schedule.schedule import Row, Schedule, gc_paused
from megapipe.schedule.validate import ValidationReport, validate


class Part(enum.Enum):
    """A part of a layer, or the end of the model."""

    ATTENTION = "A"  # with the norm before it, for experts also the router; on the first layer with the embedding
    DISPATCH = "D"  # tokens to the ranks of their experts
    MLP = "M"
    COMBINE = "C"  # the results back
    HEAD = "H"  # last norm, output layer and loss

    __hash__ = object.__hash__


NETWORK_PARTS = frozenset({Part.DISPATCH, Part.COMBINE})
# Schedules in which a backward and the forward after it can be merged: in the others the next rank's forward would have
# to wait for a backward that needs it (naive), or no forward follows a backward.
MERGED = frozenset({"1f1b", "interleaved"})


class Site(NamedTuple):
    """One part of the model. layer: its index in the model; the head's is the number of layers."""

    stage: int
    layer: int
    part: Part


@dataclass(frozen=True)
class Parts:
    """All parts of a model in order; `stage` of an action in a schedule of parts is an index into `sites`."""

    sites: tuple[Site, ...]

    @cached_property
    def of_stage(self) -> tuple[range, ...]:
        """The indices of each stage's parts."""
        stages = [site.stage for site in self.sites]
        return tuple(range(stages.index(s), stages.index(s) + stages.count(s)) for s in range(stages[-1] + 1))

    @cached_property
    def network(self) -> frozenset[int]:
        """The indices of the all-to-alls."""
        return frozenset(index for index, site in enumerate(self.sites) if site.part in NETWORK_PARTS)

    def stage_row(self, row: Row) -> Row:
        """Return what each action of a row of parts is to its stage, or OVERLAP, which does nothing, where another part
        stands for it: gathers, and reductions in parts, are those of the first part of the stage, the last reduction
        that of the last part in the row.
        """
        final = [slot for slot, (_, op, m) in enumerate(row) if op is Op.REDUCE_GRAD and m is None]
        last = {self.sites[row[slot].stage].stage: slot for slot in final}
        found = []
        for slot, (site, op, microbatch) in enumerate(row):
            stage, stands = self.sites[site].stage, True
            if op is Op.REDUCE_GRAD and microbatch is None:
                stands = slot == last[stage]
            elif op in SHARDING_OPS or op is Op.REDUCE_GRAD:
                stands = site == self.of_stage[stage][0]
            found.append(Action(stage, op if stands else Op.OVERLAP, microbatch))
        return tuple(found)

    def text(self, action: Action) -> str:
        """Return an action of a schedule of parts as text: "2F0.5A" is the attention of layer 5 in 2F0."""
        stage, layer, part = self.sites[action.stage]
        return f"{action._replace(stage=stage)}.{'' if part is Part.HEAD else layer}{part.value}"


def parts_of(partition: Partition, has_experts: Sequence[bool]) -> Parts:
    """Return the parts of a model. has_experts: for each layer, whether its MLP consists of experts.

    Raises ConfigError if a stage has neither layers nor the head.
    """
    if len(has_experts) != partition.num_layers:
        raise ConfigError(
            f"{len(has_experts)} kinds of layers were given for {partition.num_layers} layers; give one each"
        )
    sites: list[Site] = []
    for stage, (first, end, _, has_head) in enumerate(partition.stages):
        if first == end and not has_head:
            raise ConfigError(
                f"stage {stage} of {len(partition.stages)} would have no layer; use at most {partition.num_layers}"
            )
        for layer in range(first, end):
            absent = {Part.HEAD} if has_experts[layer] else {Part.HEAD, *NETWORK_PARTS}
            sites += (Site(stage, layer, part) for part in Part if part not in absent)
        if has_head:
            sites.append(Site(stage, end, Part.HEAD))
    return Parts(tuple(sites))


def pair_up(schedule: Schedule) -> Schedule:
    """Merge each backward of a compute-only schedule in MERGED with the forward that follows it into a pair.

    That is what Megatron's `--overlap-moe-expert-parallel-comm` runs: one more forward before the first backward. Other
    schedules are returned as they are, with the pairs that they have.
    """
    if schedule.name not in MERGED:
        return schedule
    rows = []
    for row in schedule.rows:
        merged: list[Action] = []
        for action in row:
            if action.op is Op.F and merged and merged[-1].op in (Op.B, Op.I):
                merged[-1:] = [action._replace(op=Op.OVERLAP), action, merged[-1]]
            else:
                merged.append(action)
        rows.append(tuple(merged))
    return replace(schedule, rows=tuple(rows))


@gc_paused()
def expand(schedule: Schedule, parts: Parts, delay_weights: bool = True) -> Schedule:
    """Return a compute-only schedule of stages as the schedule of their parts, compute-only too.

    The parts of an action follow one another; those of an overlapped pair are merged by `merge`. delay_weights: full
    backwards are cut into I and W, and each W is issued behind the all-to-all that needs its I, so that it overlaps
    with it (Megatron's `--delay-wgrad-compute`); otherwise they stay whole. Gathers and reductions of a stage
    (`schedule.sharding`) become those of its parts, of which the first one stands for all. Raises ScheduleError if the
    schedule has messages or another number of stages.
    """
    if schedule.num_slices > 1:
        raise ScheduleError(f"schedule {schedule} has slices of microbatches, whose stages do not run in parts")
    if schedule.ops & (SEND_OPS | RECV_OPS) or schedule.num_stages != len(parts.of_stage):
        raise ScheduleError(
            f"schedule {schedule} cannot be cut into the parts of {len(parts.of_stage)} stages: it must have as many, "
            "and no messages"
        )
    rows = [tuple(expand_row(row, parts, delay_weights)) for row in schedule.rows]
    ranks = [tuple(ranks[site.stage] for site in parts.sites) for ranks in schedule.placement.directions]
    placement = Placement(schedule.num_ranks, *ranks)
    reading = frozenset(site for stage in schedule.reading_in_w for site in parts.of_stage[stage])
    return Schedule(schedule.name, placement, schedule.num_microbatches, tuple(rows), reading_in_w=reading)


def expand_row(row: Row, parts: Parts, delay_weights: bool) -> list[Action]:
    """Return one row of a schedule of stages as the row of their parts, as `expand` does."""
    actions, expanded = iter(row), list[Action]()
    for action in actions:
        if action.op is Op.OVERLAP:
            forward, backward = (_cut(next(actions), parts, not delay_weights) for _ in range(2))
            expanded += merge(forward, backward, parts.network)
        else:
            expanded += _cut(action, parts, not delay_weights)
    return expanded


def _cut(action: Action, parts: Parts, whole: bool) -> list[Action]:
    """Return the parts of an action in order; if full backwards do not stay `whole`, W follows the next all-to-all."""
    stage, op, microbatch = action
    sites, network = parts.of_stage[stage], parts.network
    if op is Op.F or op in SHARDING_OPS:
        return [Action(site, op, microbatch) for site in sites]
    if op in (Op.W, Op.UPDATE, Op.REDUCE_GRAD):
        return [Action(site, op, microbatch) for site in reversed(sites) if op is Op.UPDATE or site not in network]
    row: list[Action] = []
    weights: list[Action] = []
    for site in reversed(sites):
        if site not in network and op is Op.B and not whole:
            row += weights
            row.append(Action(site, Op.I, microbatch))
            weights = [Action(site, Op.W, microbatch)]
        else:
            row += (Action(site, Op.B if site in network else op, microbatch), *weights)
            weights = []
    return row + weights


def merge(forward: Sequence[Action], backward: Sequence[Action], network: frozenset[int]) -> list[Action]:
    """Merge the parts of a forward and of a backward that do not depend on each other, in DualPipe's order.

    The two take turns, first the backward if it has an all-to-all near its start. A turn issues computation and then an
    all-to-all, which overlaps with the computation of the other's turn; the weight gradients behind it belong to the
    turn. Layer by layer that gives the order of DeepSeek-V3 (arXiv:2412.19437, figure 4):

        computation   A.F  M.I  M.W  M.F  A.I  A.W
        network       C.B  D.F  D.B       C.F  C.B of the layer before

    Where layers differ (dense layers, the head, stages of unequal length) a turn takes at most an even share of the
    computation that is left, so that every all-to-all of the other has some to overlap with.
    """
    chains = deque(backward), deque(forward)
    row: list[Action] = []
    turn = int(all(action.stage not in network for action in backward[:2]))
    exchanges = [sum(action.stage in network for action in each) for each in chains]  # that are left
    computations = [len(each) - count for each, count in zip(chains, exchanges, strict=True)]
    while all(chains):
        own, issued = chains[turn], False
        share = -(-computations[turn] // (1 + exchanges[1 - turn]))
        while own and not (issued and own[0].op is not Op.W) and (share > 0 or own[0].stage in network):
            row.append(own.popleft())
            is_exchange = row[-1].stage in network
            issued |= is_exchange
            share -= not is_exchange
            (exchanges if is_exchange else computations)[turn] -= 1
        turn = 1 - turn
    return row + list(chain(*chains))


def prove(schedule: Schedule, stages: Schedule, parts: Parts, send_depth: int | None = None) -> ValidationReport:
    """Prove a schedule of parts, lowered or not, or raise ScheduleError with the faulty part marked.

    - It can run (`validate`), also if a rank waits for each part's input before it issues the next one.
    - No rank keeps more parts alive than the rows of `stages`, the schedule that was expanded.
    """
    try:
        report = validate(schedule, send_depth)
    except ScheduleError as error:
        raise ScheduleError(_with_names(str(error), parts)) from None
    sizes = [len(sites) for sites in parts.of_stage]
    for rank, (row, whole) in enumerate(zip(schedule.rows, stages.rows, strict=True)):
        peak, most = peak_held(row, {Held.MICROBATCH: 1}), peak_held(whole, {Held.MICROBATCH: 1}, sizes)
        if schedule.has_backward and peak > most:
            raise ScheduleError(
                f"schedule {schedule}: rank {rank} keeps {peak:g} parts alive, the stages of {stages} only {most:g}"
            )
    return report


def exchange_digest(row: Iterable[Action], parts: Parts) -> str:
    """Return a short digest of a row's all-to-alls, equal on ranks that issue the same ones in the same order."""
    exchanges = [parts.text(action) for action in row if action.stage in parts.network and action.op in (Op.F, Op.B)]
    return hashlib.sha256(" ".join(exchanges).encode()).hexdigest()[:16]


def _with_names(message: str, parts: Parts) -> str:
    """Return a message of `validate` with the text of each part instead of its number."""

    def place(found: re.Match[str]) -> str:
        stage, layer, part = parts.sites[int(found[1])]
        return f"stage {stage}, layer {layer}, {part.name.lower()}"

    ops = "|".join(op.value for op in Op)
    named = re.sub(r"\bstage (\d+)\b", place, message)
    return re.sub(rf"\b\d+({ops})\d*\b", lambda found: parts.text(parse_action(found[0])), named)
