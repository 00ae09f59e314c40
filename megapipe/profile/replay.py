"""A schedule run again with its own time for every action and gap: what would the step have taken if ...

The rules are those of `simulate`, where an op of a stage has one cost for all microbatches; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megapipe.errors import ScheduleError
from megapipe.schedule.action import RECV_OPS, SEND_OPS, Action, Op
from megapipe.schedule.dependencies import Channel, Value, channel_of, is_given, makes, needs
from megapipe.schedule.schedule import Schedule

Times = tuple[tuple[float, ...], ...]  # [rank][slot], seconds
WAITS_FOR_INPUTS = frozenset({Op.F, Op.B, Op.I, Op.W, Op.UPDATE})


def replay(
    schedule: Schedule,
    seconds: Times,
    gaps: Times,
    transfer_seconds: Mapping[tuple[int, Op], float],
    latency_seconds: float,
) -> tuple[Times, Times]:
    """Return (starts, ends) of every slot of a lowered schedule, or of a pipeline of one rank.

    seconds: how long each slot occupies its rank, without waits for messages; an overlapped pair has its time at the
    OVERLAP. gaps: time that the rank loses before each slot. transfer_seconds: by (stage, SEND_F | SEND_B), how long a
    message occupies its channel. latency_seconds: from then until it can be used. A message leaves when its SEND ends.
    Raises ScheduleError for a schedule that deadlocks.
    """
    values = _Values(schedule, transfer_seconds, latency_seconds)
    positions = [0] * schedule.num_ranks
    clocks = [0.0] * schedule.num_ranks
    starts = [[0.0] * len(row) for row in schedule.rows]
    ends = [[0.0] * len(row) for row in schedule.rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while positions[rank] < len(row):
                slot = positions[rank]
                size = 3 if row[slot].op is Op.OVERLAP else 1
                actions = row[slot : slot + size]
                ready = values.ready_at(rank, actions)
                if ready is None:
                    break
                moved = True
                start = max(clocks[rank] + gaps[rank][slot], ready)
                end = clocks[rank] = start + seconds[rank][slot]
                starts[rank][slot : slot + size], ends[rank][slot : slot + size] = [start] * size, [end] * size
                positions[rank] += size
                for action in actions:
                    values.add(rank, action, end)
    if any(position < len(row) for position, row in zip(positions, schedule.rows, strict=True)):
        raise ScheduleError(f"schedule {schedule} deadlocks; validate(schedule) shows where")
    return tuple(map(tuple, starts)), tuple(map(tuple, ends))


class _Values:
    """When each activation and gradient can be used on each rank."""

    def __init__(
        self, schedule: Schedule, transfer_seconds: Mapping[tuple[int, Op], float], latency_seconds: float
    ) -> None:
        self._num_stages = schedule.num_stages
        self._num_directions = len(schedule.placement.directions)
        self._transfer_seconds, self._latency_seconds = transfer_seconds, latency_seconds
        self._usable_at: dict[tuple[int, Value], float] = {}
        self._first_ends: dict[tuple[Channel, int | None], tuple[float, int]] = {}  # of SEND or RECV -> (time, rank)
        self._channel_free_at: dict[Channel, float] = {}

    def ready_at(self, rank: int, actions: Sequence[Action]) -> float | None:
        """Return when all inputs of the actions are usable; None if one has not been produced yet."""
        latest = 0.0
        for action in actions:
            for value in needs(action) if action.op in WAITS_FOR_INPUTS else ():
                if not is_given(value, self._num_stages):
                    time = self._usable_at.get((rank, value))
                    if time is None:
                        return None
                    latest = max(latest, time)
        return latest

    def add(self, rank: int, action: Action, end: float) -> None:
        """Add what an action that ends at `end` produces; a message once both its SEND and its RECV have run."""
        if action.op not in SEND_OPS | RECV_OPS:
            for value in makes(action):
                self._usable_at[rank, value] = end
            return
        channel = channel_of(action, self._num_directions)
        other = self._first_ends.pop((channel, action.microbatch), None)
        if other is None:
            self._first_ends[channel, action.microbatch] = end, rank
            return
        is_forward = action.op in (Op.SEND_F, Op.RECV_F)
        sender, receiver = channel.boundary, channel.boundary + 1  # stages
        if not is_forward:
            sender, receiver = receiver, sender
        transfer = self._transfer_seconds.get((sender, Op.SEND_F if is_forward else Op.SEND_B), 0.0)
        # a message starts when both ends are ready and the one before it has left the channel
        arrival = max(end, other[0])
        if transfer:
            arrival = max(arrival, self._channel_free_at.get(channel, 0.0)) + transfer
            self._channel_free_at[channel] = arrival
        receiving_rank = rank if action.op in RECV_OPS else other[1]
        for value in makes(Action(receiver, Op.RECV_F if is_forward else Op.RECV_B, action.microbatch)):
            self._usable_at[receiving_rank, value] = arrival + self._latency_seconds
