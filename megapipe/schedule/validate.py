"""The proof that a schedule can be run: complete, placed, ordered, first-in first-out, no deadlock.

Sharded weights are there when they are read; gathers and reductions come in one order on all ranks that hold a stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import NoReturn

from megapipe.errors import ScheduleError
from megapipe.schedule.action import (
    COMPLETES_OPS,
    COMPUTE_OPS,
    OFFLOAD_OPS,
    RECV_OPS,
    SEND_OPS,
    SHARDING_OPS,
    Action,
    Op,
    with_slices,
)
from megapipe.schedule.costs import Costs
from megapipe.schedule.dependencies import MAKES, NEEDS, SLICE_NEEDS, TRAVELS, ChannelPath, Route, Value, channel_of
from megapipe.schedule.lifetimes import Held, peak_held
from megapipe.schedule.lower import sends_of
from megapipe.schedule.machine import ScheduleWalk
from megapipe.schedule.schedule import Schedule, gc_paused, rows_text

Place = tuple[int, int]  # (rank, slot)
# SEND or RECV -> (sender, receiver) -> (stage of the sender, microbatch) in the order of the row
_Orders = dict[Op, defaultdict[tuple[int, int], list[tuple[int, int]]]]


@dataclass(frozen=True)
class ValidationReport:
    """The result of the proof."""

    schedule: Schedule
    # for each channel of a lowered schedule, the sends that must be allowed in flight without a posted receive; 0:
    # blocking sends suffice. The largest is the least depth that suffices if all channels get the same.
    least_send_depth: Mapping[ChannelPath, int]

    @property
    def num_actions(self) -> int:
        return sum(map(len, self.schedule.rows))

    @cached_property
    def most_posted(self) -> Mapping[ChannelPath, int]:
        """The most receives of each channel that are posted and not yet used."""
        if not self.schedule.is_lowered:
            return {}
        num_directions = len(self.schedule.placement.directions)
        brought_by = {MAKES[receive][0]: receive for receive in RECV_OPS}
        uses = {op: [brought_by[need] for need in NEEDS[op] if need in brought_by] for op in COMPUTE_OPS}
        most: Counter[Action] = Counter()  # by the RECV, with its direction in place of its microbatch
        posted: Counter[Action] = Counter()
        for stage, op, microbatch in chain.from_iterable(self.schedule.rows):
            direction = (microbatch or 0) % num_directions
            if op in RECV_OPS:
                receive = Action(stage, op, direction)
                posted[receive] += 1
                most[receive] = max(most[receive], posted[receive])
            for used in uses.get(op, ()):
                posted[Action(stage, used, direction)] -= 1
        return {channel_of(receive, num_directions): count for receive, count in most.items()}

    @cached_property
    def most_gathered(self) -> tuple[int, ...]:
        """The most stages of each rank whose weights are gathered at once; 0 where weights are not sharded."""
        if Op.UNSHARD not in self.schedule.ops:
            return (0,) * self.schedule.num_ranks
        return tuple(int(peak_held(row, {Held.WEIGHTS: 1})) for row in self.schedule.rows)

    @property
    def send_depth(self) -> int:
        """The least send depth that suffices on every channel."""
        return max(self.least_send_depth.values(), default=0)

    def __str__(self) -> str:
        text = f"{self.schedule}: {self.num_actions} actions, valid"
        if not self.schedule.is_lowered:
            return text
        posted = max(self.most_posted.values(), default=0)
        if any(self.most_gathered):
            text += f"; at most {max(self.most_gathered)} stages of a rank gathered at once"
        return (
            f"{text}; {len(self.least_send_depth)} channels, send depth {self.send_depth} suffices, "
            f"at most {posted} receives posted on one"
        )


@gc_paused()
def validate(schedule: Schedule, send_depth: int | None = None, max_gathered: int | None = None) -> ValidationReport:
    """Prove that `schedule` can run, or raise ScheduleError with the rank x slot grid and the faulty action marked.

    - Every stage and microbatch has one forward and one full or split backward (none in a forward-only schedule), on
      the right rank.
    - The inputs of every action are made earlier on its rank or sent there.
    - A RECOMPUTE comes between the F and the B or I of its stage and microbatch; weights are not updated meanwhile.
    - On every stage the slices of a microbatch run forwards in order and backwards in reverse.
    - Every rank posts receives of one kind from another rank in the order in which that one sends, whatever the stage.
    - All ranks finish with asynchronous sends, with at most `send_depth` in flight per channel if given.
    - Every weight gradient is reduced once: no reduction has nothing to reduce, and the last follows all gradients.
    - With gathers (UNSHARD), the weights of a stage are gathered before every computation that reads them, also a W
      of `reading_in_w`, freed only after it and by the end of the row; at most `max_gathered` stages of a rank at once,
      if given.
    - Every OFFLOAD follows the forward of its stage and microbatch; one RELOAD follows it, before the backward.
    - All ranks that hold a stage issue its gathers and reductions in the same order, and equally many.
    """
    seen, orders = _check_each_action(schedule)
    _check_computation(schedule, seen)
    if Op.RECOMPUTE in schedule.ops:
        _check_replays(schedule)
    if schedule.num_slices > 1:
        _check_slices(schedule)
    if schedule.ops & OFFLOAD_OPS:
        _check_offloads(schedule)
    if schedule.is_lowered:
        _check_messages(schedule, seen, orders)
        if schedule.has_backward and schedule.is_synchronous:
            _check_reductions(schedule)
        if schedule.ops & SHARDING_OPS:
            _check_weights(schedule, max_gathered)
        _check_order_of_collectives(schedule)
    machine = ScheduleWalk(schedule, Costs({}), send_depth=send_depth or 0, raise_depth=send_depth is None)
    if not machine.run():
        _explain_standstill(schedule, machine, send_depth)
    by_channel = zip(machine.channels, machine.depths, machine.sent, strict=True)
    return ValidationReport(schedule, {channel: depth for channel, depth, sent in by_channel if sent})


def _fail(schedule: Schedule, message: str, *marks: Place) -> NoReturn:
    where = f"rank {marks[0][0]}, slot {marks[0][1]}: " if marks else ""
    rows = rows_text(schedule.rows, marks, num_slices=schedule.num_slices)
    raise ScheduleError(f"schedule {schedule}: {where}{with_slices(message, schedule.num_slices)}\n{rows}")


def _check_each_action(schedule: Schedule) -> tuple[dict[Op, bytearray], _Orders]:
    """Check range, rank and duplicates; return [op][stage x num_microbatches + microbatch] -> done, and the orders."""
    offsets = {op: step for send, receive, step in TRAVELS.values() for op, step in ((send, step), (receive, -step))}
    stages, count, directions = schedule.num_stages, schedule.num_units, schedule.placement.directions
    seen = {op: bytearray(stages * count) for op in Op}
    num_directions, reduction = len(directions), Op.REDUCE_GRAD
    orders: _Orders = {op: defaultdict(list) for op in SEND_OPS | RECV_OPS}
    for rank, row in enumerate(schedule.rows):
        if Op.OVERLAP in schedule.ops or Op.UPDATE in schedule.ops:
            _check_pairs_and_updates(schedule, rank)
        reduced: set[int] = set()
        for slot, action in enumerate(row):
            stage, op, microbatch = action
            if microbatch is None or op in SHARDING_OPS:
                if microbatch is not None or (op is not reduction and op not in SHARDING_OPS):
                    rule = "UNSHARD, RESHARD and the last REDUCE_GRAD of a stage have no microbatch, other ops have one"
                    _fail(schedule, f"{action}: {rule}", (rank, slot))
                if stage not in schedule.placement.stages_of(rank):
                    _fail(schedule, f"{action} is on a rank that does not hold stage {stage}", (rank, slot))
                if op is reduction and stage in reduced:
                    _fail(schedule, f"{action} was already done", (rank, slot))
                if op is reduction:
                    reduced.add(stage)
                continue
            if not (0 <= stage < stages and 0 <= microbatch < count):
                message = f"{action} is outside stages 0..{stages - 1} and microbatches 0..{count - 1}"
                _fail(schedule, message, (rank, slot))
            if directions[microbatch % num_directions][stage] != rank:
                right = schedule.placement.rank_of(stage, microbatch)
                _fail(schedule, f"{action} belongs on rank {right}", (rank, slot))
            flags = seen[op]
            if flags[stage * count + microbatch]:
                _fail(schedule, f"{action} was already done at slot {row.index(action)}", (rank, slot))
            flags[stage * count + microbatch] = 1
            if op in orders and 0 <= stage + offsets[op] < stages:
                peer = directions[microbatch % num_directions][stage + offsets[op]]
                if op in SEND_OPS:
                    orders[op][rank, peer].append((stage, microbatch))
                else:
                    orders[op][peer, rank].append((stage + offsets[op], microbatch))
    return seen, orders


def _check_pairs_and_updates(schedule: Schedule, rank: int) -> None:
    """Check that a forward and a backward follow each OVERLAP, and each UPDATE the weight gradients it needs."""
    row, directions = schedule.rows[rank], len(schedule.placement.directions)
    done: dict[int, set[int | None]] = {stage: set() for stage in schedule.placement.stages_of(rank)}
    for slot, (stage, op, microbatch) in enumerate(row):
        if op is Op.OVERLAP:
            halves = row[slot + 1 : slot + 3]
            if len(halves) < 2 or halves[0] != Action(stage, Op.F, microbatch) or halves[1][1] not in (Op.B, Op.I):
                message = f"{row[slot]} must be followed by {stage}F{microbatch} and then a B or I"
                _fail(schedule, message, (rank, slot))
            if not 0 <= halves[1][0] < schedule.num_stages:  # checked here because the stage is used as an index below
                _fail(schedule, f"{halves[1]} is outside stages 0..{schedule.num_stages - 1}", (rank, slot + 2))
        elif op in (Op.B, Op.W) and stage in done:
            done[stage].add(microbatch)
        elif op is Op.UPDATE and microbatch is not None and stage in done:
            wanted = (m for m in range(microbatch + 1) if m % directions == microbatch % directions)
            missing = next((m for m in wanted if m not in done[stage]), None)
            if missing is not None:
                needed = f"the weight gradient of stage {stage}, microbatch {missing}, before it"
                _fail(schedule, f"{row[slot]} needs {needed}", (rank, slot))


def _check_computation(schedule: Schedule, seen: Mapping[Op, bytearray]) -> None:
    """Check that every stage and microbatch has one F, and no backward, B, or I and W."""
    everything = bytearray(b"\1") * (schedule.num_stages * schedule.num_units)
    whole, inputs, weights = (seen[op] for op in (Op.B, Op.I, Op.W))
    wanted = everything if schedule.has_backward else bytes(len(everything))
    if seen[Op.F] == everything and inputs == weights and bytes(map(int.__add__, whole, inputs)) == wanted:
        return
    for index, (f, b, i, w) in enumerate(zip(seen[Op.F], whole, inputs, weights, strict=True)):
        stage, microbatch = divmod(index, schedule.num_units)
        name = f"stage {stage}, microbatch {microbatch}"
        rank = schedule.placement.rank_of(stage, microbatch)
        fault = ""
        if not f:
            fault = f"the forward of {name} is missing on rank {rank}"
        elif b and (i or w):
            fault = f"{name} has both a full and a split backward"
        elif i != w:
            fault = f"the backward of {name} is split, but its {'W' if i else 'I'} is missing on rank {rank}"
        elif b + i != wanted[index]:
            fault = f"the backward of {name} is missing on rank {rank}"
        if fault:
            row = schedule.rows[rank]
            slots = [slot for slot, (s, op, m) in enumerate(row) if (s, m) == (stage, microbatch) and op in COMPUTE_OPS]
            _fail(schedule, fault, *((rank, slot) for slot in slots[-1:]))


def _check_replays(schedule: Schedule) -> None:
    """Check that every RECOMPUTE precedes the backward that it is for; the walk proves that it follows the F."""
    if not schedule.is_synchronous:
        _fail(schedule, "RECOMPUTE needs the weights of its forward, which an UPDATE would change")
    for rank, row in enumerate(schedule.rows):
        ended: set[tuple[int, int | None]] = set()
        for slot, (stage, op, microbatch) in enumerate(row):
            if op in (Op.B, Op.I):
                ended.add((stage, microbatch))
            elif op is Op.RECOMPUTE and (not schedule.has_backward or (stage, microbatch) in ended):
                _fail(schedule, f"{row[slot]} must precede the backward of its stage and microbatch", (rank, slot))


def _check_slices(schedule: Schedule) -> None:
    """Check what slices need of one another, which is on their own rank: the order of its row decides.

    Pairs, updates and two directions do not go with slices.
    """
    refused = {op.value for op in schedule.ops & {Op.OVERLAP, Op.UPDATE}}
    if refused or schedule.placement.second_direction is not None:
        what = " and ".join(sorted(refused)) or "a placement in two directions"
        _fail(schedule, f"slices of a sequence do not go with {what}")
    for rank, row in enumerate(schedule.rows):
        done: set[Value] = set()
        for slot, (stage, op, number) in enumerate(row):
            if op not in SLICE_NEEDS:
                continue
            assert number is not None
            kind, step = SLICE_NEEDS[op]
            if 0 <= number % schedule.num_slices + step < schedule.num_slices:
                needed = Value(kind, stage, number + step)
                if needed not in done:
                    order = "forwards run from the first slice to the last, backwards from the last to the first"
                    _fail(schedule, f"{row[slot]} needs {needed}, which comes later on its rank: {order}", (rank, slot))
            done.add(Value(kind, stage, number))


def _check_messages(schedule: Schedule, seen: Mapping[Op, bytearray], orders: _Orders) -> None:
    """Check that just the values that change rank have a SEND and a RECV, and that routes are first-in first-out."""
    stages, count, rank_of = schedule.num_stages, schedule.num_units, schedule.placement.rank_of
    expected = {op: bytearray(stages * count) for op in SEND_OPS | RECV_OPS}
    sends, num_directions = sends_of(schedule), len(schedule.placement.directions)
    pair = {send: (receive, step) for send, receive, step in TRAVELS.values()}
    for op in (Op.F, Op.B) if schedule.has_backward else (Op.F,):  # I sends what B sends
        for direction, by_stage in enumerate(sends[op]):
            flags = b"\1" * len(range(direction, count, num_directions))
            for stage, send in enumerate(by_stage):
                if send is not None:
                    receive, step = pair[send]
                    for target, row in ((send, stage), (receive, stage + step)):
                        expected[target][row * count + direction : (row + 1) * count : num_directions] = flags
    for op, wanted in expected.items():
        if seen[op] != wanted:
            index = next(i for i, (is_there, want) in enumerate(zip(seen[op], wanted, strict=True)) if is_there != want)
            action = Action(index // count, op, index % count)
            rank = rank_of(action.stage, index % count)
            slots = schedule.rows[rank]
            if wanted[index]:
                _fail(schedule, f"{action} is missing on rank {rank}", (rank, len(slots)))
            _fail(schedule, f"{action} has no peer: nothing crosses to another rank there", (rank, slots.index(action)))
    for kind, (send, receive, step) in TRAVELS.items():
        for (sender, receiver), sent in orders[send].items():
            received = orders[receive][sender, receiver]
            if sent == received:
                continue
            first, other = next(each for each in zip(sent, received, strict=True) if each[0] != each[1])
            ends = Action(other[0] + step, receive, other[1]), Action(first[0], send, first[1])
            marks = [(rank, schedule.rows[rank].index(end)) for rank, end in zip((receiver, sender), ends, strict=True)]
            order = f"{ends[1]} comes where {ends[0]} is posted; post receives in the order of the sends"
            _fail(schedule, f"{Route(sender, receiver, kind)} are first-in first-out: {order}", *marks)


def _check_reductions(schedule: Schedule) -> None:
    """Check that every rank reduces all weight gradients of each of its stages, and none of them twice.

    The walk proves that the last reduction of a stage follows its last weight gradient.
    """
    reduction = Op.REDUCE_GRAD  # reading a member from the enum costs more than the comparison
    for rank, row in enumerate(schedule.rows):
        reductions = [action for action in row if action[1] is reduction]
        missing = set(schedule.placement.stages_of(rank)) - {stage for stage, _, m in reductions if m is None}
        if missing:
            action = Action(min(missing), reduction, None)
            _fail(schedule, f"{action} is missing on rank {rank}", (rank, len(row)))
        if all(microbatch is None for *_, microbatch in reductions):
            continue
        unreduced: dict[int, int | None] = {}  # stage -> the last microbatch whose weight gradient is not reduced yet
        for slot, action in enumerate(row):
            stage, op, microbatch = action
            if op in COMPLETES_OPS:
                unreduced[stage] = microbatch
            elif op is reduction and unreduced.pop(stage, None) != microbatch and microbatch is not None:
                rule = "must follow the weight gradient of its microbatch, with no other of the stage between"
                _fail(schedule, f"{action} {rule}", (rank, slot))


def _check_weights(schedule: Schedule, max_gathered: int | None) -> None:
    """Check that weights are gathered when they are read, and freed by the end of the row."""
    for rank, row in enumerate(schedule.rows):
        gathered: dict[int, int] = {}  # stage -> slot of its gather
        for slot, action in enumerate(row):
            stage, op, _ = action
            fault = ""
            if op is Op.UNSHARD:
                if stage in gathered:
                    fault = f"the weights of stage {stage} are already gathered"
                gathered[stage] = slot
                if max_gathered is not None and len(gathered) > max_gathered:
                    stages = ", ".join(map(str, gathered))
                    fault = f"the weights of stages {stages} are gathered at once, at most {max_gathered} may be"
            elif op is Op.RESHARD and gathered.pop(stage, None) is None:
                fault = f"the weights of stage {stage} are not gathered"
            elif stage not in gathered and schedule.reads_weights(action):
                fault = f"needs the weights of stage {stage}, which are not gathered"
            if fault:
                _fail(schedule, f"{action}: {fault}", (rank, slot))
        if gathered:  # they would be those of the step before in the next step
            stage = min(gathered)
            _fail(schedule, f"{Action(stage, Op.RESHARD, None)} is missing on rank {rank}", (rank, gathered[stage]))


def _check_offloads(schedule: Schedule) -> None:
    """Check that activations leave the device after their forward and are back for their backward."""
    before = {Op.OFFLOAD: Op.F, Op.RELOAD: Op.OFFLOAD}
    for rank, row in enumerate(schedule.rows):
        last: dict[tuple[int, int | None], Op] = {}  # (stage, microbatch) -> the latest of these ops
        for slot, action in enumerate(row):
            stage, op, microbatch = action
            if op not in (Op.F, *OFFLOAD_OPS, Op.RECOMPUTE, Op.B, Op.I):
                continue
            found, wanted = last.get((stage, microbatch)), before.get(op)
            if wanted is not None and found is not wanted:
                rule = f"must follow {Action(stage, wanted, microbatch)}, with neither a copy nor the backward between"
                _fail(schedule, f"{action} {rule}", (rank, slot))
            if wanted is None and found is Op.OFFLOAD:
                missing = f"in host memory: {Action(stage, Op.RELOAD, microbatch)} is missing"
                _fail(schedule, f"{action} needs activations that are {missing}", (rank, slot))
            last[stage, microbatch] = op
        for (stage, microbatch), op in last.items():
            if op in OFFLOAD_OPS:  # in a schedule without backwards
                _fail(schedule, f"{Action(stage, op, microbatch)} has no backward", (rank, len(row)))


def _check_order_of_collectives(schedule: Schedule) -> None:
    """Check that the ranks that hold a stage issue as many gathers and reductions of it, in orders that agree.

    The members of a data-parallel group have the same pp_rank and thus the same row, except where two pp_ranks hold a
    stage (DualPipe). Experts are gathered and reduced by the same actions.
    """
    if len(schedule.placement.directions) == 1:
        return
    collectives = frozenset({Op.REDUCE_GRAD, Op.UNSHARD})
    # (stage, op, how many of them before) -> those that some rank issues just before it, and where
    follows: dict[tuple[int, Op, int], dict[tuple[int, Op, int], Place]] = {}
    counts: list[Counter[tuple[int, Op]]] = []
    for rank, row in enumerate(schedule.rows):
        issued: Counter[tuple[int, Op]] = Counter()
        last = None
        for slot, (stage, op, _) in enumerate(row):
            if op in collectives and len(schedule.placement.ranks_of(stage)) > 1:
                name = stage, op, issued[stage, op]
                issued[stage, op] += 1
                follows.setdefault(name, {})
                if last is not None:
                    follows[name][last] = (rank, slot)
                last = name
        counts.append(issued)
    for stage in range(schedule.num_stages):
        for op in collectives:
            ranks = schedule.placement.ranks_of(stage)
            if len({counts[rank][stage, op] for rank in ranks}) > 1:
                numbers = " and ".join(f"{counts[rank][stage, op]} on rank {rank}" for rank in ranks)
                where = ranks[0], len(schedule.rows[ranks[0]])
                message = f"stage {stage} has {numbers} of {op.value}; members of a group must issue equally many"
                _fail(schedule, message, where)
    try:  # with orders that are not compatible, two members of a group would wait in different collectives
        TopologicalSorter(follows).prepare()
    except CycleError as error:
        before, after = error.args[1][:2]
        names = " and ".join(f"{Action(stage, op, None)}" for stage, op, _ in (before, after))
        _fail(
            schedule,
            f"{names} are issued in this order here and in another order on another rank; members of a group must "
            "issue its collectives in one order",
            follows[after][before],
        )


def _explain_standstill(schedule: Schedule, machine: ScheduleWalk, send_depth: int | None) -> NoReturn:
    """Report an action whose input no rank can provide, or else the ring of ranks that wait for one another."""
    rows, positions = schedule.rows, machine.positions
    waits: dict[int, Value] = {rank: machine.value_of(identity) for identity, rank in machine.waiting_for.items()}
    makers: dict[Value, set[int]] = {value: set() for value in waits.values()}
    for rank, row in enumerate(rows):
        for stage, op, microbatch in (action for action in row if action.op in COMPUTE_OPS):
            for kind, offset in MAKES[op]:
                value = Value(kind, stage + offset, microbatch)  # type: ignore[arg-type]
                if value in makers:
                    makers[value].add(rank)
    for rank, value in sorted(waits.items()):
        slot, fate = positions[rank], ""
        if not makers[value]:
            fate = "no rank makes"
        elif rank in makers[value]:
            fate = "this rank makes only later"
        else:
            _, receive, step = TRAVELS[value.kind]
            if Action(value.stage + step, receive, value.microbatch) in rows[rank][slot:]:
                fate = "this rank receives only later"
        if fate:
            _fail(schedule, f"{rows[rank][slot]} needs {value}, which {fate}", (rank, slot))
    waits_for = {rank: min(makers[value]) for rank, value in waits.items()}
    reasons = {rank: f"{rows[rank][positions[rank]]} needs {value}" for rank, value in waits.items()}
    for rank, stage in machine.without_weights.items():
        action = rows[rank][positions[rank]]
        waits_for[rank] = next(other for other in schedule.placement.ranks_of(stage) if other != rank)
        reasons[rank] = f"{action} needs the weights of stage {stage}, whose gather rank {waits_for[rank]} joins later"
    for channel, rank in machine.blocked_on.items():
        action = rows[rank][positions[rank]]
        receiver = action.stage - 1 if action.op is Op.SEND_B else action.stage + 1
        waits_for[rank] = schedule.placement.rank_of(receiver, action.microbatch or 0)
        where = f"{machine.channels[channel]}, send depth {send_depth}"
        reasons[rank] = f"{action} waits until an earlier message is received ({where})"

    ring: list[int] = []
    rank = next(iter(waits_for))
    while rank not in ring:
        ring.append(rank)
        rank = waits_for[rank]
    ring = ring[ring.index(rank) :]
    message = "deadlock: " + "; ".join(f"rank {rank}, slot {positions[rank]}: {reasons[rank]}" for rank in ring)
    _fail(schedule, message, *((rank, positions[rank]) for rank in ring))
