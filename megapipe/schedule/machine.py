"""The walk over all rows of a schedule: each rank in its order, every action as soon as its inputs are on the rank.

Times come out exact although ranks are walked one after another: a row is sequential and a value has one maker, so the
start of an action is a function of earlier starts alone. `simulate` reads the times; `validate` reads whether the walk
came to its end, and with how many unfinished sends per channel. The walk takes a schedule whose actions have been
checked one by one (range, rank, no duplicates).
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import islice, product
from typing import NamedTuple, TypeVar

from megapipe.schedule.action import COMPUTE_OPS, OFFLOAD_OPS, SEND_OPS, SHARDING_OPS, Action, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.dependencies import MAKES, NEEDS, TRAVELS, ChannelPath, Route, Value, ValueKind, channel_of
from megapipe.schedule.schedule import Schedule

NEVER = -1.0
_KINDS = tuple(ValueKind)
Entry = TypeVar("Entry")


class _Work(NamedTuple):
    """A compute op of one stage and variant, resolved. Value ids are these bases + stage * count + microbatch."""

    needs: tuple[int, ...]
    makes: tuple[int, ...]
    arrives: tuple[tuple[int, float], ...]  # sent to another rank, and their delay, in a compute-only schedule
    seconds: float
    replay: float  # of these the seconds that a RECOMPUTE before it saves; 0 in a schedule without


class _Hop(NamedTuple):
    """A SEND or RECV of one stage and variant with its table entries resolved; ids as in _Work."""

    value: int  # the value on the sender's rank
    message: int  # the same value once it has been received
    channel: int  # index into ScheduleWalk.channels
    route: int  # index into ScheduleWalk.free_at
    wire_seconds: float


class ScheduleWalk:
    """The state of one walk.

    After `run`: starts and ends of every executed action, positions, and the depths that sends needed.

    send_depth: the most sends of a channel that may be in flight without a posted receive; None: no limit. With
    `raise_depth` a walk that is stuck continues with one more send on the blocked channels of least depth, so that the
    greatest depth in the end is the least that suffices if every channel gets the same.
    """

    def __init__(
        self, schedule: Schedule, costs: Costs, send_depth: int | None = None, raise_depth: bool = False
    ) -> None:
        num_ranks, num_stages = schedule.num_ranks, schedule.num_stages
        self.schedule, self.costs = schedule, costs
        self.count = schedule.num_units
        # microbatches that differ in their ranks, or slices, which differ in their costs; never both
        self._num_directions = len(schedule.placement.directions)
        self._num_variants = max(self._num_directions, schedule.num_slices)
        self._rank_speeds = costs.rank_speeds or (1.0,) * num_ranks
        self.raise_depth = raise_depth
        self.positions = [0] * num_ranks
        self.starts = [[NEVER] * len(row) for row in schedule.rows]
        self.ends = [[NEVER] * len(row) for row in schedule.rows]
        self.clocks = [0.0] * num_ranks
        self.network_clocks = [0.0] * num_ranks  # all-to-alls run one after another, overlapped with computation
        self.reduce_clocks = [0.0] * num_ranks  # so do gathers and reductions
        self.copy_clocks = {op: [0.0] * num_ranks for op in OFFLOAD_OPS}  # and copies to the host, and those back
        # [rank][stage] -> when its gathered weights are there; None: weights are not sharded
        self.weights_at = [[NEVER] * num_stages for _ in range(num_ranks)] if Op.UNSHARD in schedule.ops else None
        # (stage, op, how many of them before) -> rank, slot and time of those who issued such a collective, until all
        # holders of the stage have
        self.joining: dict[tuple[int, Op, int], list[tuple[int, int, float]]] = {}
        self.issued: Counter[tuple[int, int, Op]] = Counter()  # by rank, stage and op
        self.without_weights: dict[int, int] = {}  # stuck rank -> stage whose gather another rank has not issued
        # per channel
        self.channels: list[ChannelPath] = []
        self.hops = self._resolve_hops()
        self.depths = [sys.maxsize if send_depth is None else send_depth] * len(self.channels)
        self.sent = [0] * len(self.channels)
        self.posted = [0] * len(self.channels)
        self.free_at = [0.0] * len(self.channels)  # by route
        # message id -> (time, ends of the rank, slot) of whichever of send and receive was first
        self.unmatched: dict[int, tuple[float, list[float], int]] = {}
        # stuck ranks, and what they wait for
        self.waiting_for: dict[int, int] = {}  # value id -> rank
        self.blocked_on: dict[int, int] = {}  # channel -> rank
        self.times = [NEVER] * (2 * len(_KINDS) * (num_stages + 2) * self.count)  # value id -> when it is there
        for kind, stage in ((ValueKind.ACT, -1), (ValueKind.GRAD, num_stages)):  # the data, the gradient of the loss
            base = self._base(kind, stage, False)
            self.times[base : base + self.count] = [0.0] * self.count
        self.others = {Op.OVERLAP: self._overlap, **dict.fromkeys(COMPUTE_OPS, self._exchange)}
        self.others |= dict.fromkeys(OFFLOAD_OPS, self._copy)
        self.replays = self._base(ValueKind.REPLAY, 0, False)
        self.work = self._resolve_work()

    # value ids: [made here or received][kind][stage -1 .. num_stages][microbatch], flattened

    def _base(self, kind: ValueKind, offset: int, by_message: bool) -> int:
        region = _KINDS.index(kind) + (len(_KINDS) if by_message else 0)
        return (region * (self.schedule.num_stages + 2) + offset + 1) * self.count

    def value_of(self, identity: int) -> Value:
        """Return the value of an id."""
        rest, microbatch = divmod(identity, self.count)
        region, stage = divmod(rest, self.schedule.num_stages + 2)
        return Value(_KINDS[region % len(_KINDS)], stage - 1, microbatch)

    def _is_far(self, stage: int, offset: int, direction: int) -> bool:
        ranks = self.schedule.placement.directions[direction]
        return 0 <= stage + offset < len(ranks) and ranks[stage + offset] != ranks[stage]

    def _resolve_work(self) -> dict[Op, list[list[_Work]]]:
        """Resolve the table entries of all compute ops: [op][variant][stage]."""
        table: dict[Op, list[list[_Work]]] = {op: [[] for _ in range(self._num_variants)] for op in COMPUTE_OPS}
        travelling = () if self.schedule.is_lowered else TRAVELS
        for op, variant in product(table, range(self._num_variants)):
            direction = variant % self._num_directions
            for stage, rank in enumerate(self.schedule.placement.directions[direction]):
                needs = tuple(
                    self._base(kind, offset, self._is_far(stage, offset, direction)) for kind, offset in NEEDS[op]
                )
                makes = tuple(self._base(kind, offset, False) for kind, offset in MAKES[op])
                arrives = []
                for kind in (kind for kind, _ in MAKES[op] if kind in travelling):
                    send, _, step = TRAVELS[kind]
                    if self._is_far(stage, step, direction):
                        delay = self._cost(stage, send, variant) + self.costs.latency_seconds
                        arrives.append((self._base(kind, 0, True), delay))
                speed = 1.0 if stage in self.costs.network else self._rank_speeds[rank]
                seconds, replay = self._cost(stage, op, variant) / speed, 0.0
                if op in (Op.B, Op.I) and Op.RECOMPUTE in self.schedule.ops:
                    replay = self._cost(stage, Op.RECOMPUTE, variant) / speed
                table[op][variant].append(_Work(needs, makes, tuple(arrives), seconds, replay))
        return table

    def _cost(self, stage: int, op: Op, variant: int) -> float:
        """Return the cost of an op of a stage, for one slice where microbatches have slices."""
        if self.schedule.num_slices == 1:
            return self.costs.seconds.get((stage, op), 0.0)
        return self.costs.of_slice(stage, op, variant, self.schedule.num_slices)

    def _resolve_hops(self) -> dict[Op, list[list[_Hop]]]:
        """Number the channels and return [op][variant][stage].

        The first and last stages have entries that no checked schedule uses.
        """
        placement = self.schedule.placement
        index: dict[ChannelPath, int] = {}
        routes: dict[Route | None, int] = {}
        hops: dict[Op, list[list[_Hop]]] = {}
        for kind, (send, receive, _) in TRAVELS.items():
            for op, ((_, offset),) in ((send, NEEDS[send]), (receive, MAKES[receive])):
                hops[op] = [[] for _ in range(self._num_variants)]
                value, message = self._base(kind, offset, False), self._base(kind, offset, True)
                for variant, stage in product(range(self._num_variants), range(self.schedule.num_stages)):
                    channel = channel_of(Action(stage, op, variant), self._num_directions)
                    wire_seconds = self._cost(stage + offset, send, variant)
                    number = index.setdefault(channel, len(index))
                    is_there = 0 <= channel.boundary < self.schedule.num_stages - 1
                    route = routes.setdefault(channel.route(placement) if is_there else None, len(routes))
                    hops[op][variant].append(_Hop(value, message, number, route, wire_seconds))
        self.channels = list(index)
        return hops

    def run(self) -> bool:
        """Walk until every row is at its end (True) or all ranks are stuck (False)."""
        self.ready = list(range(self.schedule.num_ranks))[::-1]
        while self.ready:
            self.advance(self.ready.pop())
            if not self.ready and self.raise_depth and self.blocked_on:
                # stuck: allow one more send on the blocked channels of least depth
                least = min(self.depths[channel] for channel in self.blocked_on)
                for channel in [channel for channel in self.blocked_on if self.depths[channel] == least]:
                    self.depths[channel] += 1
                    self._unblock(channel, 0.0)
        return all(position == len(row) for position, row in zip(self.positions, self.schedule.rows, strict=True))

    def advance(self, rank: int) -> None:
        """Execute the row of `rank` up to its end or to an action that cannot run yet: the hot loop of a walk."""
        row, starts, ends, clock = self.schedule.rows[rank], self.starts[rank], self.ends[rank], self.clocks[rank]
        times, waiting_for, count, overlap = self.times, self.waiting_for, self.count, self.costs.overlap
        work, hops, variants, network = self.work, self.hops, self._num_variants, self.costs.network
        sent, posted, depths, replays = self.sent, self.posted, self.depths, self.replays
        slots = iter(range(self.positions[rank], len(row)))
        for position in slots:
            stage, op, microbatch = row[position]
            key = stage * count + (microbatch or 0)
            if op in work and stage not in network:
                needs, makes, arrives, seconds, again = work[op][microbatch % variants][stage]  # type: ignore[operator]
                start = clock if self.weights_at is None else self._weights_ready(rank, row[position], clock)
                if start < 0:
                    break
                for base in needs:
                    there = times[base + key]
                    if there > start:
                        start = there
                    elif there < 0:
                        waiting_for[base + key] = rank
                        break
                else:
                    if again and times[replays + key] >= 0:
                        seconds -= again
                    clock = start + seconds if seconds else start
                    starts[position], ends[position] = start, clock
                    for base in makes:
                        times[base + key] = clock
                    for base, delay in arrives:
                        self._arrive(base + key, clock + delay)
                    continue
                break
            if op in hops:
                value, message, channel, route, wire_seconds = hops[op][(microbatch or 0) % variants][stage]
                if op in SEND_OPS:
                    if (at := times[value + key]) < 0:
                        waiting_for[value + key] = rank
                        break
                    if sent[channel] - posted[channel] >= depths[channel]:
                        self.blocked_on[channel] = rank
                        break
                    sent[channel] += 1
                    clock += 0.0 if overlap else wire_seconds
                else:
                    at = clock
                    posted[channel] += 1
                    if channel in self.blocked_on:
                        self._unblock(channel, clock)
                starts[position] = at = clock if clock > at else at  # an all-to-all may end after the computation
                self.meet(message + key, route, wire_seconds, (at, ends, position))
                continue
            self.positions[rank], self.clocks[rank] = position, clock
            if not (num_done := self.others.get(op, self._update_or_collect)(rank, row[position])):
                break
            clock = self.clocks[rank]
            deque(islice(slots, num_done - 1), maxlen=0)  # both halves of a pair are done
        else:
            position = len(row)
        self.positions[rank], self.clocks[rank] = position, clock

    def _weights_ready(self, rank: int, action: Action, clock: float) -> float:
        """Return when a computation has the weights that it reads; NEVER, and note the wait, if it cannot yet."""
        if self.weights_at is None or not self.schedule.reads_weights(action):
            return clock
        there = self.weights_at[rank][action.stage]
        if there < 0:
            self.without_weights[rank] = action.stage
            return NEVER
        return max(clock, there)

    def _unblock(self, channel: int, clock: float) -> None:
        """Wake the sender that waited for a receive of the channel to be posted; it continues at `clock` or later."""
        sender = self.blocked_on.pop(channel)
        self.clocks[sender] = max(self.clocks[sender], clock)
        self.ready.append(sender)

    def meet(self, message: int, route: int, wire_seconds: float, half: tuple[float, list[float], int]) -> None:
        """Note the send or receive of a message, or end the message if its other half is noted in `unmatched`.

        A message starts once both are there and the one before it on the route is through. half: its time, ends of its
        rank, and slot.
        """
        other = self.unmatched.pop(message, None)
        if other is None:
            self.unmatched[message] = half
            return
        start = half[0] if half[0] > other[0] else other[0]
        if self.costs.overlap:
            start = self.free_at[route] = max(start, self.free_at[route]) + wire_seconds
        self.times[message] = end = start + self.costs.latency_seconds
        for _, ends, slot in (half, other):
            ends[slot] = end
        if message in self.waiting_for:
            self.ready.append(self.waiting_for.pop(message))

    def _arrive(self, value: int, time: float) -> None:
        self.times[value] = time
        if value in self.waiting_for:
            self.ready.append(self.waiting_for.pop(value))

    def resolved(self, table: Mapping[Op, Sequence[Sequence[Entry]]], action: Action) -> tuple[Entry, int]:
        """Return an action's entry of `work` or `hops`, and what its value ids add to their bases."""
        stage, op, microbatch = action[0], action[1], action[2] or 0
        return table[op][microbatch % self._num_variants][stage], stage * self.count + microbatch

    def ready_at(self, rank: int, works: Sequence[tuple[_Work, int]], clock: float) -> float | None:
        """Return when computations that start together have what they need; None, and note the wait, if they cannot."""
        for work, key in works:
            for base in work.needs:
                if self.times[base + key] < 0:
                    self.waiting_for[base + key] = rank
                    return None
                clock = max(clock, self.times[base + key])
        return clock

    def finish(self, works: Sequence[tuple[_Work, int]], end: float) -> None:
        """Add what computations that end together make."""
        for work, key in works:
            for base in work.makes:
                self.times[base + key] = end
            for base, delay in work.arrives:
                self._arrive(base + key, end + delay)

    # all-to-alls, pairs, copies, updates, gathers and reductions: the methods return how many slots they executed, 0 if
    # an input is missing

    def _exchange(self, rank: int, action: Action) -> int:
        """Run an all-to-all on the network of the rank, concurrently with its computation."""
        slot, work = self.positions[rank], self.resolved(self.work, action)
        start = self.ready_at(rank, [work], self.network_clocks[rank])
        if start is None:
            return 0
        self.network_clocks[rank] = end = start + work[0].seconds
        self.starts[rank][slot], self.ends[rank][slot] = start, end
        self.finish([work], end)
        return 1

    def _overlap(self, rank: int, head: Action) -> int:
        """Run a forward and a backward side by side: both start when both have what they need and end with the pair."""
        slot = self.positions[rank]
        forward, backward = self.schedule.rows[rank][slot + 1 : slot + 3]
        works = [self.resolved(self.work, half) for half in (forward, backward)]
        start = self.ready_at(rank, works, self.clocks[rank])
        if start is None:
            return 0
        for half in (forward, backward):
            start = self._weights_ready(rank, half, start)
            if start < 0:
                return 0
        in_sequence = sum(work.seconds for work, _ in works)
        pair = self.costs.pair_seconds.get((head.stage, backward.stage))
        replayed = sum(work.replay for work, key in works if self.times[self.replays + key] >= 0)
        end = start + (in_sequence if pair is None else pair / self._rank_speeds[rank]) - replayed
        self.starts[rank][slot : slot + 3] = [start] * 3
        self.ends[rank][slot : slot + 3] = [end] * 3
        self.clocks[rank] = end
        self.finish(works, end)
        return 3

    def _copy(self, rank: int, action: Action) -> int:
        """Run a copy to the host, which starts after the forward and for which the rank waits, or a copy back, which
        starts here and for which the backward waits. Copies of one direction run one after another.
        """
        stage, op, microbatch = action
        assert microbatch is not None
        slot, value = self.positions[rank], self._base(ValueKind.ACT, stage, False) + microbatch
        if self.times[value] < 0:
            self.waiting_for[value] = rank
            return 0
        begin = self.times[value] if op is Op.OFFLOAD else self.clocks[rank]
        start = max(begin, self.copy_clocks[op][rank])
        end = start + self._cost(stage, op, microbatch % self._num_variants)
        self.starts[rank][slot], self.ends[rank][slot] = start, end
        self.copy_clocks[op][rank] = end
        if op is Op.OFFLOAD:
            self.clocks[rank] = max(self.clocks[rank], end)
        else:
            self.times[value] = end
        return 1

    def _update_or_collect(self, rank: int, action: Action) -> int:
        """Run an optimizer step on the clock of the rank, or a gather or reduction, overlapped unless nothing is."""
        stage, op, microbatch = action
        slot, base = self.positions[rank], self._base(ValueKind.WGRAD, 0, False) + stage * self.count
        rank_of, clock = self.schedule.placement.rank_of, self.clocks[rank]
        needed: Sequence[int] = range(self.count) if microbatch is None else (microbatch,)
        for wanted in () if op in SHARDING_OPS else needed:
            if self.times[base + wanted] < 0 and (microbatch is not None or rank_of(stage, wanted) == rank):
                self.waiting_for[base + wanted] = rank
                return 0
        seconds = self.costs.seconds.get((stage, op), 0.0)
        self.starts[rank][slot] = self.ends[rank][slot] = clock
        if op is Op.UPDATE:
            self.ends[rank][slot] = self.clocks[rank] = clock + seconds / self._rank_speeds[rank]
        elif op not in (Op.RESHARD, Op.NORM):  # these take no time here
            self._collect(rank, action, slot)
        return 1

    def _collect(self, rank: int, action: Action, slot: int) -> None:
        """Issue a gather or reduction: it starts when the network of the rank is free.

        With sharded weights one of a stage on two ranks starts when both have issued it.
        """
        stage, op, _ = action
        key = stage, op, self.issued[rank, stage, op]
        self.issued[rank, stage, op] += 1
        holders = 1 if self.weights_at is None else len(self.schedule.placement.ranks_of(stage))
        members = [*self.joining.pop(key, ()), (rank, slot, self.clocks[rank])]
        if len(members) < holders:
            self.joining[key] = members
            if op is Op.UNSHARD and self.weights_at is not None:
                self.weights_at[rank][stage] = NEVER
            return
        start = max(max(issued, self.reduce_clocks[member]) for member, _, issued in members)
        end = start + self.costs.seconds.get((stage, op), 0.0)
        for member, place, _ in members:
            self.starts[member][place], self.ends[member][place] = start, end
            self.reduce_clocks[member] = end
            if not self.costs.overlap:
                self.clocks[member] = max(self.clocks[member], end)
            if op is Op.UNSHARD and self.weights_at is not None:
                self.weights_at[member][stage] = end
                if self.without_weights.get(member) == stage:
                    del self.without_weights[member]
                    self.ready.append(member)
