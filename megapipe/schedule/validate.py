"""The proof that a schedule can be run: complete, placed, ordered, first-in first-out, free of deadlock, collectives in
one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NoReturn

from megapipe.errors import ScheduleError
from megapipe.schedule.action import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op
from megapipe.schedule.dependencies import MAKES, NEEDS, TRAVELS, Channel, Value, channel_of, makes
from megapipe.schedule.gc_pause import gc_paused
from megapipe.schedule.lower import sends_of
from megapipe.schedule.machine import Machine
from megapipe.schedule.schedule import Schedule, rows_text

Place = tuple[int, int]  # (rank, slot)
_Orders = dict[Op, list[list[list[int]]]]  # [SEND or RECV][direction][stage] -> microbatches in the order of the row


@dataclass(frozen=True)
class ValidationReport:
    """The result of the proof.

    least_send_depth: for each channel of a lowered schedule, the number of sends that must be allowed in flight without
    a posted receive; 0 means that blocking sends suffice. The largest is the least depth that suffices if all channels
    get the same.
    """

    schedule: Schedule
    least_send_depth: Mapping[Channel, int]

    @property
    def num_actions(self) -> int:
        return sum(map(len, self.schedule.rows))

    @cached_property
    def most_posted(self) -> Mapping[Channel, int]:
        """The most receives of each channel that are posted and not yet used."""
        return _most_posted(self.schedule)

    @property
    def send_depth(self) -> int:
        """The least send depth that suffices on every channel."""
        return max(self.least_send_depth.values(), default=0)

    def __str__(self) -> str:
        text = f"{self.schedule}: {self.num_actions} actions, valid"
        if not self.schedule.is_lowered:
            return text
        posted = max(self.most_posted.values(), default=0)
        return (
            f"{text}; {len(self.least_send_depth)} channels, send depth {self.send_depth} suffices, "
            f"at most {posted} receives posted on one"
        )


@gc_paused()
def validate(schedule: Schedule, send_depth: int | None = None) -> ValidationReport:
    """Prove that `schedule` can run, or raise ScheduleError with the rank x slot grid and the faulty action marked.

    - Every stage and microbatch has one forward and one full or split backward (none in a forward-only schedule), on
      the right rank.
    - The inputs of every action are made earlier on its rank or sent there.
    - Every channel receives in the order in which it sends.
    - All ranks finish with asynchronous sends, with at most `send_depth` in flight per channel if given.
    - All ranks that hold a stage issue its reductions in the same order.
    """
    seen, orders = _check_each_action(schedule)
    _check_computation(schedule, seen)
    if schedule.is_lowered:
        _check_messages(schedule, seen, orders)
        _check_reductions(schedule)
    machine = Machine(
        schedule, {}, send_depth=send_depth if send_depth is not None else 0, raise_depth=send_depth is None
    )
    if not machine.run():
        _explain_standstill(schedule, machine, send_depth)
    used = {
        channel: depth
        for channel, depth, sent in zip(machine.channels, machine.depths, machine.sent, strict=True)
        if sent
    }
    return ValidationReport(schedule, used)


def _fail(schedule: Schedule, message: str, marks: Sequence[Place] = ()) -> NoReturn:
    where = ""
    if marks:
        rank, slot = marks[0]
        where = f"rank {rank}, slot {slot}: "
    raise ScheduleError(f"schedule {schedule}: {where}{message}\n{rows_text(schedule.rows, marks)}")


def _check_each_action(schedule: Schedule) -> tuple[dict[Op, bytearray], _Orders]:
    """Check range, rank and duplicates; return [op][stage x num_microbatches + microbatch] -> done, and the order of
    messages.
    """
    stages, count, directions = schedule.num_stages, schedule.num_microbatches, schedule.placement.directions
    seen = {op: bytearray(stages * count) for op in Op}
    num_directions, reduction = len(directions), Op.REDUCE_GRAD
    orders: _Orders = {op: [[[] for _ in range(stages)] for _ in directions] for op in SEND_OPS | RECV_OPS}
    for rank, row in enumerate(schedule.rows):
        if Op.OVERLAP in schedule.ops or Op.UPDATE in schedule.ops:
            _check_pairs_and_updates(schedule, rank)
        reduced: set[int] = set()
        for slot, (stage, op, microbatch) in enumerate(row):
            if microbatch is None or op is reduction:
                _check_whole_step(schedule, rank, slot, reduced)
                continue
            if not (0 <= stage < stages and 0 <= microbatch < count):
                _fail(
                    schedule,
                    f"{row[slot]} is outside stages 0..{stages - 1} and microbatches 0..{count - 1}",
                    [(rank, slot)],
                )
            if directions[microbatch % num_directions][stage] != rank:
                _fail(
                    schedule,
                    f"{row[slot]} belongs on rank {schedule.placement.rank_of(stage, microbatch)}",
                    [(rank, slot)],
                )
            flags = seen[op]
            if flags[stage * count + microbatch]:
                first = row.index(row[slot])
                _fail(schedule, f"{row[slot]} was already done at slot {first}", [(rank, slot)])
            flags[stage * count + microbatch] = 1
            if op in orders:
                orders[op][microbatch % num_directions][stage].append(microbatch)
    return seen, orders


def _check_whole_step(schedule: Schedule, rank: int, slot: int, reduced: set[int]) -> None:
    action = schedule.rows[rank][slot]
    if action.op is not Op.REDUCE_GRAD or action.microbatch is not None:
        _fail(schedule, f"{action}: REDUCE_GRAD has no microbatch, every other op has one", [(rank, slot)])
    if action.stage not in schedule.placement.stages_of(rank):
        _fail(schedule, f"{action} is on a rank that does not hold stage {action.stage}", [(rank, slot)])
    if action.stage in reduced:
        _fail(schedule, f"{action} was already done", [(rank, slot)])
    reduced.add(action.stage)


def _check_pairs_and_updates(schedule: Schedule, rank: int) -> None:
    """Check that a forward and a backward follow each OVERLAP, and that each UPDATE follows the weight gradients it
    needs.
    """
    row, directions = schedule.rows[rank], len(schedule.placement.directions)
    done: dict[int, set[int | None]] = {}
    for slot, (stage, op, microbatch) in enumerate(row):
        if op is Op.OVERLAP:
            halves = row[slot + 1 : slot + 3]
            if len(halves) < 2 or halves[0] != Action(stage, Op.F, microbatch) or halves[1][1] not in (Op.B, Op.I):
                _fail(
                    schedule, f"{row[slot]} must be followed by {stage}F{microbatch} and then a B or I", [(rank, slot)]
                )
            if not 0 <= halves[1][0] < schedule.num_stages:  # checked here because the stage is used as an index below
                _fail(schedule, f"{halves[1]} is outside stages 0..{schedule.num_stages - 1}", [(rank, slot + 2)])
        elif op is Op.B or op is Op.W:
            done.setdefault(stage, set()).add(microbatch)
        elif op is Op.UPDATE and microbatch is not None and stage in schedule.placement.stages_of(rank):
            wanted = (m for m in range(microbatch + 1) if m % directions == microbatch % directions)
            missing = next((m for m in wanted if m not in done.get(stage, ())), None)
            if missing is not None:
                _fail(
                    schedule,
                    f"{row[slot]} needs the weight gradient of stage {stage}, microbatch {missing}, before it",
                    [(rank, slot)],
                )


def _check_computation(schedule: Schedule, seen: Mapping[Op, bytearray]) -> None:
    """Check that every stage and microbatch has one F, and no backward, B, or I and W."""
    everything = bytearray(b"\1") * (schedule.num_stages * schedule.num_microbatches)
    whole, inputs, weights = (seen[op] for op in (Op.B, Op.I, Op.W))
    wanted = everything if schedule.has_backward else bytes(len(everything))
    if seen[Op.F] == everything and inputs == weights and bytes(map(int.__add__, whole, inputs)) == wanted:
        return
    for index, (f, b, i, w) in enumerate(zip(seen[Op.F], whole, inputs, weights, strict=True)):
        stage, microbatch = divmod(index, schedule.num_microbatches)
        name = f"stage {stage}, microbatch {microbatch}"
        rank = schedule.placement.rank_of(stage, microbatch)
        marks = [
            (rank, slot)
            for slot, a in enumerate(schedule.rows[rank])
            if a[0] == stage and a[2] == microbatch and a[1] in COMPUTE_OPS
        ][-1:]
        if not f:
            _fail(schedule, f"the forward of {name} is missing on rank {rank}", marks)
        if b and (i or w):
            _fail(schedule, f"{name} has both a full and a split backward", marks)
        if i != w:
            _fail(
                schedule,
                f"the backward of {name} is split, but its {'W' if i else 'I'} is missing on rank {rank}",
                marks,
            )
        if b + i != wanted[index]:
            _fail(schedule, f"the backward of {name} is missing on rank {rank}", marks)


def _check_messages(schedule: Schedule, seen: Mapping[Op, bytearray], orders: _Orders) -> None:
    """Check that every value that changes rank has one SEND and one RECV, no other has any, and channels are first-in
    first-out.
    """
    for op, expected in _expected_messages(schedule, seen).items():
        if seen[op] == expected:
            continue
        index = next(
            i for i, (is_there, wanted) in enumerate(zip(seen[op], expected, strict=True)) if is_there != wanted
        )
        action = Action(index // schedule.num_microbatches, op, index % schedule.num_microbatches)
        rank = schedule.placement.rank_of(action.stage, action.microbatch or 0)
        if expected[index]:
            _fail(schedule, f"{action} is missing on rank {rank}", [(rank, len(schedule.rows[rank]))])
        _fail(
            schedule,
            f"{action} has no peer: nothing crosses to another rank there",
            [(rank, schedule.rows[rank].index(action))],
        )
    for send, receive, step in TRAVELS.values():
        for direction, sent in enumerate(orders[send]):
            for stage in range(max(0, -step), schedule.num_stages - max(0, step)):
                if sent[stage] != orders[receive][direction][stage + step]:
                    _fail_fifo(
                        schedule, Action(stage, send, direction), sent[stage], orders[receive][direction][stage + step]
                    )


def _fail_fifo(schedule: Schedule, send: Action, sent: list[int], received: list[int]) -> NoReturn:
    """Report the first message received out of order; `send` is any send of the channel."""
    channel = channel_of(send, len(schedule.placement.directions))
    _, receive_op, step = TRAVELS[channel.kind]
    first, other = next(pair for pair in zip(sent, received, strict=True) if pair[0] != pair[1])
    marks = []
    for action in (Action(send.stage + step, receive_op, other), Action(send.stage, send.op, first)):
        rank = schedule.placement.rank_of(action.stage, action.microbatch or 0)
        marks.append((rank, schedule.rows[rank].index(action)))
    _fail(schedule, f"the channel ({channel}) is first-in first-out: {first} is sent where {other} is received", marks)


def _expected_messages(schedule: Schedule, seen: Mapping[Op, bytearray]) -> dict[Op, bytearray]:
    stages, count = schedule.num_stages, schedule.num_microbatches
    expected = {op: bytearray(stages * count) for op in SEND_OPS | RECV_OPS}
    sends, num_directions = sends_of(schedule), len(schedule.placement.directions)
    pair = {send: (receive, step) for send, receive, step in TRAVELS.values()}
    for op in (Op.F, Op.B) if schedule.has_backward else (Op.F,):  # I sends what B sends
        for direction, by_stage in enumerate(sends[op]):
            pattern = bytearray(microbatch % num_directions == direction for microbatch in range(count))
            for stage, send in enumerate(by_stage):
                if send is not None:
                    receive, step = pair[send]
                    for target, row in ((send, stage), (receive, stage + step)):
                        place = slice(row * count, (row + 1) * count)
                        expected[target][place] = bytes(map(int.__or__, expected[target][place], pattern))
    return expected


def _most_posted(schedule: Schedule) -> dict[Channel, int]:
    """Return for each channel the most receives posted and not yet used."""
    if not schedule.is_lowered:
        return {}
    num_directions = len(schedule.placement.directions)
    brought_by = {MAKES[receive][0]: receive for receive in RECV_OPS}
    uses = {op: [brought_by[need] for need in NEEDS[op] if need in brought_by] for op in COMPUTE_OPS}
    most, posted = (
        {op: [[0] * schedule.num_stages for _ in range(num_directions)] for op in RECV_OPS} for _ in range(2)
    )
    for stage, op, microbatch in chain.from_iterable(schedule.rows):
        if op in RECV_OPS:
            counts = posted[op][microbatch % num_directions]  # type: ignore[operator]
            counts[stage] = now = counts[stage] + 1
            if now > most[op][microbatch % num_directions][stage]:  # type: ignore[operator]
                most[op][microbatch % num_directions][stage] = now  # type: ignore[operator]
        elif op in uses:
            for receive in uses[op]:
                posted[receive][microbatch % num_directions][stage] -= 1  # type: ignore[operator]
    return {
        channel_of(Action(stage, op, direction), num_directions): count
        for op in RECV_OPS
        for direction in range(num_directions)
        for stage, count in enumerate(most[op][direction])
        if count
    }


def _check_reductions(schedule: Schedule) -> None:
    """Check that every rank reduces each of its stages once, in an order that all its holders share.

    The walk proves that a reduction follows the last weight gradient.
    """
    if not schedule.has_backward or not schedule.is_synchronous:
        return
    reduction = Op.REDUCE_GRAD
    follows: dict[int, dict[int, Place]] = {}  # stage -> stages that some rank reduces later, and where
    for rank, row in enumerate(schedule.rows):
        order = [(stage, slot) for slot, (stage, op, _) in enumerate(row) if op is reduction]
        missing = set(schedule.placement.stages_of(rank)) - {stage for stage, _ in order}
        if missing:
            _fail(
                schedule, f"{Action(min(missing), Op.REDUCE_GRAD, None)} is missing on rank {rank}", [(rank, len(row))]
            )
        shared = [(stage, slot) for stage, slot in order if len(schedule.placement.ranks_of(stage)) > 1]
        for (before, _), (after, slot) in pairwise(shared):
            follows.setdefault(before, {})[after] = (rank, slot)
    _check_no_cycle(schedule, follows)


def _check_no_cycle(schedule: Schedule, follows: Mapping[int, Mapping[int, Place]]) -> None:
    """Check that the orders of all ranks are compatible: otherwise two members of a group wait in different
    collectives.
    """
    state: dict[int, bool] = {}  # False: on the path being walked, True: done
    for root in follows:
        path = [(root, iter(follows[root].items()))] if root not in state else []
        state.setdefault(root, False)
        while path:
            stage, later = path[-1]
            step = next(later, None)
            if step is None:
                state[stage] = True
                path.pop()
            elif step[0] not in state:
                state[step[0]] = False
                path.append((step[0], iter(follows.get(step[0], {}).items())))
            elif not state[step[0]]:
                message = (
                    f"stages {stage} and {step[0]} are reduced in this order here and in another order on another rank"
                )
                _fail(schedule, f"{message}; members of a group must issue its collectives in one order", [step[1]])


def _explain_standstill(schedule: Schedule, machine: Machine, send_depth: int | None) -> NoReturn:
    """Report an action whose input no rank can provide, or else the ring of ranks that wait for one another."""
    waits: dict[int, Value] = {rank: machine.value_of(identity) for identity, rank in machine.waiting_for.items()}
    maker = _makers(schedule, set(waits.values()))
    for rank, value in sorted(waits.items()):
        slot = machine.positions[rank]
        fate = _own_fault(schedule, rank, slot, value, maker.get(value, {}))
        if fate:
            _fail(schedule, f"{schedule.rows[rank][slot]} needs {value}, which {fate}", [(rank, slot)])
    waits_for = {rank: next(iter(maker[value])) for rank, value in waits.items()}
    reasons = {rank: f"{schedule.rows[rank][machine.positions[rank]]} needs {value}" for rank, value in waits.items()}
    for channel, rank in machine.blocked_on.items():
        action = schedule.rows[rank][machine.positions[rank]]
        waits_for[rank] = _receiver(schedule, action)
        reasons[rank] = (
            f"{action} waits until an earlier message is received ({machine.channels[channel]}, send depth "
            f"{send_depth})"
        )
    ring = _ring(waits_for)
    message = "deadlock: " + "; ".join(f"rank {rank}, slot {machine.positions[rank]}: {reasons[rank]}" for rank in ring)
    _fail(schedule, message, [(rank, machine.positions[rank]) for rank in ring])


def _own_fault(schedule: Schedule, rank: int, slot: int, value: Value, makers: Mapping[int, int]) -> str:
    """Return why `value` cannot be available at `slot` whatever the other ranks do; empty if another rank has to
    provide it.
    """
    if not makers:
        return "no rank makes"
    if rank in makers:
        return "this rank makes only later"
    _, receive, step = TRAVELS[value.kind]
    if Action(value.stage + step, receive, value.microbatch) in schedule.rows[rank][slot:]:
        return "this rank receives only later"
    return ""


def _makers(schedule: Schedule, values: set[Value]) -> dict[Value, dict[int, int]]:
    """Return value -> rank that computes it -> slot."""
    found: dict[Value, dict[int, int]] = {}
    for rank, row in enumerate(schedule.rows):
        for slot, action in enumerate(row):
            if action.op in COMPUTE_OPS:
                for value in makes(action):
                    if value in values:
                        found.setdefault(value, {})[rank] = slot
    return found


def _receiver(schedule: Schedule, send: Action) -> int:
    channel = channel_of(send)
    stage = channel.boundary if send.op is Op.SEND_B else channel.boundary + 1
    return schedule.placement.rank_of(stage, send.microbatch or 0)


def _ring(waits_for: Mapping[int, int]) -> list[int]:
    """Return ranks that wait for one another in a ring."""
    rank = next(iter(waits_for))
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = waits_for[rank]
    return seen[seen.index(rank) :]
