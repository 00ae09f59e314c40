"""A schedule run again with a time of its own for every action, and with what happened between them: what would the step have taken if ...

The rules are those of `simulate` (a test holds the two together); there an op of a stage has one cost for all microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megapipe.errors import ScheduleError
from megapipe.schedule.action import RECV_OPS, SEND_OPS, Action, Op
from megapipe.schedule.dependencies import Channel, Value, channel_of, is_given, makes, needs
from megapipe.schedule.schedule import Schedule

Times = tuple[tuple[float, ...], ...]  # [rank][slot], seconds
TAKES_ITS_INPUTS = frozenset({Op.F, Op.B, Op.I, Op.W, Op.UPDATE})


@dataclass
class _State:
    positions: list[int]
    clocks: list[float]
    values: dict[tuple[int, Value], float] = field(default_factory=dict)  # (rank, value) -> when it can be used there
    unmatched: dict[tuple[Channel, int | None], tuple[float, int]] = field(
        default_factory=dict
    )  # half a message -> (time, rank)
    free_at: dict[Channel, float] = field(default_factory=dict)


def replay(
    schedule: Schedule,
    seconds: Times,
    gaps: Times,
    transfer_seconds: Mapping[tuple[int, Op], float],
    latency_seconds: float,
) -> tuple[Times, Times]:
    """(starts, ends) of every slot of a lowered schedule, or of a pipeline of one rank.

    seconds: what each slot takes its rank, waits for messages left out; of an overlapped pair the OVERLAP's entry is the pair. gaps: time
    that the rank passes before each slot. transfer_seconds: by (stage, SEND_F | SEND_B), how long a message occupies its channel;
    latency_seconds: from there to its use. A message leaves when its SEND ends.
    Raises ScheduleError for rows that come to a standstill.
    """
    state = _State([0] * schedule.num_ranks, [0.0] * schedule.num_ranks)
    starts = [[0.0] * len(row) for row in schedule.rows]
    ends = [[0.0] * len(row) for row in schedule.rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while state.positions[rank] < len(row):
                slot = state.positions[rank]
                size = 3 if row[slot].op is Op.OVERLAP else 1
                actions = row[slot : slot + size]
                ready = _ready(schedule, state, rank, actions)
                if ready is None:
                    break
                moved = True
                start = max(state.clocks[rank] + gaps[rank][slot], ready)
                end = state.clocks[rank] = start + seconds[rank][slot]
                starts[rank][slot : slot + size], ends[rank][slot : slot + size] = [start] * size, [end] * size
                state.positions[rank] += size
                for action in actions:
                    _made(schedule, state, rank, action, end, transfer_seconds, latency_seconds)
    if any(position < len(row) for position, row in zip(state.positions, schedule.rows, strict=True)):
        raise ScheduleError(f"schedule {schedule} comes to a standstill; validate(schedule) says where")
    return tuple(map(tuple, starts)), tuple(map(tuple, ends))


def _ready(schedule: Schedule, state: _State, rank: int, actions: Sequence[Action]) -> float | None:
    """When what the actions need is there; None if somebody has still to make it."""
    latest = 0.0
    for action in actions:
        for value in needs(action) if action.op in TAKES_ITS_INPUTS else ():
            if not is_given(value, schedule.num_stages):
                time = state.values.get((rank, value))
                if time is None:
                    return None
                latest = max(latest, time)
    return latest


def _made(
    schedule: Schedule,
    state: _State,
    rank: int,
    action: Action,
    end: float,
    transfer_seconds: Mapping[tuple[int, Op], float],
    latency_seconds: float,
) -> None:
    if action.op not in SEND_OPS | RECV_OPS:
        for value in makes(action):
            state.values[rank, value] = end
        return
    channel = channel_of(action, len(schedule.placement.directions))
    other = state.unmatched.pop((channel, action.microbatch), None)
    if other is None:
        state.unmatched[channel, action.microbatch] = end, rank
        return
    send_op = Op.SEND_F if action.op in (Op.SEND_F, Op.RECV_F) else Op.SEND_B
    sender = channel.boundary if send_op is Op.SEND_F else channel.boundary + 1
    wire = transfer_seconds.get((sender, send_op), 0.0)
    # it travels once both ends are there, and the message before it on the channel is through
    start = max(end, other[0])
    if wire:
        start = state.free_at[channel] = max(start, state.free_at.get(channel, 0.0)) + wire
    receiver = rank if action.op in RECV_OPS else other[1]
    received = action if action.op in RECV_OPS else Action(*_receive_of(action))
    for value in makes(received):
        state.values[receiver, value] = start + latency_seconds


def _receive_of(send: Action) -> tuple[int, Op, int | None]:
    if send.op is Op.SEND_F:
        return send.stage + 1, Op.RECV_F, send.microbatch
    return send.stage - 1, Op.RECV_B, send.microbatch
