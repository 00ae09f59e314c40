"""One in-order connection carries all messages of one kind from one rank to another, and no step takes longer for it.

Orders are read off the rows, and an own machine runs the rows over connections that block: neither uses `validate`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.schedule.action import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.dependencies import MAKES, NEEDS, TRAVELS, ChannelPath, ValueKind, channel_of
from megapipe.schedule.families import SCHEDULES, build_forward_only, build_lowered
from megapipe.schedule.lower import lower
from megapipe.schedule.placement import Placement
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.sharding import ShardingPolicy, shard
from megapipe.schedule.simulate import simulate
from megapipe.schedule.validate import validate
from tests.schedule.strategies import exchange_receives, family_schedules, family_shapes, random_schedules

TAKES_SLICES = tuple(name for name, family in SCHEDULES.items() if family.takes_slices)
GENERATED = tuple(name for name, family in SCHEDULES.items() if not family.is_automatic)
SYNCHRONOUS = tuple(name for name in GENERATED if SCHEDULES[name].is_synchronous)
Messages = dict[Hashable, list[tuple[ChannelPath, int]]]  # connection -> (channel, microbatch), in order


def own_route(placement: Placement, channel: ChannelPath) -> Hashable:
    before, after = (placement.directions[channel.direction][channel.boundary + step] for step in (0, 1))
    return (before, after, "F") if channel.kind is ValueKind.ACT else (after, before, "B")


def messages(schedule: Schedule) -> Iterator[tuple[int, Action, ChannelPath]]:
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if action.op in SEND_OPS | RECV_OPS:
                yield rank, action, channel_of(action, len(schedule.placement.directions))


def assert_both_ends_agree(schedule: Schedule) -> None:
    ends: tuple[Messages, Messages] = defaultdict(list), defaultdict(list)
    for rank, action, channel in messages(schedule):
        is_receive = action.op in RECV_OPS
        sender, receiver, _ = route = own_route(schedule.placement, channel)
        assert rank == (receiver if is_receive else sender)
        ends[is_receive][route].append((channel, action.microbatch))
    assert ends[0] == ends[1]


@st.composite
def large_shapes(draw: st.DrawFn) -> tuple[str, int, int, int, int]:
    """Draw (name, p 2..16, v 1..8, m p..4p, slices), of at most 1,024 forwards."""
    slices = draw(st.sampled_from((1, 1, 2, 3)))
    name = draw(st.sampled_from(TAKES_SLICES if slices > 1 else GENERATED))
    p, v, m = draw(st.integers(2, 16)), draw(st.integers(1, 8)), draw(st.integers(1, 4))
    name, p, v, m, _ = family_shapes(name, p, v, draw(st.integers(p, m * p)))
    v = max(1, min(v, 1024 // (p * m * slices))) if SCHEDULES[name].chunks is None else v
    return name, p, v, m, slices


@settings(max_examples=40)
@given(large_shapes(), st.integers(0, 4))
def test_every_schedule_receives_in_the_order_of_its_sends(shape: tuple[str, int, int, int, int], depth: int) -> None:
    name, p, v, m, slices = shape
    schedule = build_lowered(name, p, v, m, None, depth, num_slices=slices)
    assert_both_ends_agree(schedule)
    assert_both_ends_agree(build_forward_only(schedule.placement, m, depth, slices))


@settings(max_examples=60)
@given(st.one_of(random_schedules(), family_schedules(4, 12)), st.integers(0, 4))
def test_any_order_of_computation_receives_in_the_order_of_its_sends(schedule: Schedule, depth: int) -> None:
    assert_both_ends_agree(lower(schedule, depth))


@pytest.mark.parametrize("name", ["interleaved", "breadth-first", "dualpipe", "zb-v"])
def test_gathers_of_weights_change_no_order_of_messages(name: str) -> None:
    schedule = build_lowered(*family_shapes(name, 4, 2, 8))
    assert_both_ends_agree(shard(schedule, ShardingPolicy(True, "microbatch")))


def test_rows_with_receives_in_another_order_are_refused() -> None:
    schedule = build_lowered("interleaved", 2, 2, 2, None, 4, num_slices=3)
    first, second = schedule.rows
    swapped = replace(schedule, rows=(exchange_receives(first, Op.RECV_B), second))
    with pytest.raises(AssertionError):
        assert_both_ends_agree(swapped)
    with pytest.raises(ScheduleError, match=r"gradients from pp_rank 1 to 0 "):
        validate(swapped)


def run(schedule: Schedule, wire: float, connection: Callable[[Placement, ChannelPath], Hashable]) -> float:
    """Return the seconds of a step with F = I = W = 1 over connections that are strictly in order and block.

    A message holds its connection from the moment its receive is posted, or its send issued, to its arrival. A posted
    receive or send starts when its rank has come so far. Raises AssertionError if ranks wait for each other.
    """
    placement, directions = schedule.placement, len(schedule.placement.directions)
    queues: dict[tuple[Hashable, bool], list[tuple[float, ChannelPath, int]]] = defaultdict(list)
    through: dict[Hashable, tuple[int, float]] = defaultdict(lambda: (0, 0.0))  # messages, time of the last
    there: dict[tuple[ValueKind, int, int, bool], float] = {}  # value -> when; by_message
    clocks, positions = [0.0] * schedule.num_ranks, [0] * schedule.num_ranks

    def transfer() -> bool:
        moved = False
        for route in {route for route, _ in queues}:
            count, time = through[route]
            for sent, posted in list(zip(queues[route, False], queues[route, True], strict=False))[count:]:
                assert sent[1:] == posted[1:], "the wrong message is delivered"
                time = max(time, sent[0], posted[0]) + wire
                count, moved = count + 1, True
                _, channel, microbatch = sent
                maker = channel.boundary if channel.kind is ValueKind.ACT else channel.boundary + 1
                there[channel.kind, maker, microbatch, True] = time
            through[route] = count, time
        return moved

    def time_of(kind: ValueKind, stage: int, user: int, microbatch: int) -> float | None:
        if kind not in TRAVELS or not 0 <= stage < schedule.num_stages:
            return there.get((kind, stage, microbatch, False), None if kind not in TRAVELS else 0.0)
        ranks = placement.directions[microbatch % directions]
        return there.get((kind, stage, microbatch, ranks[stage] != ranks[user]))

    def step(rank: int, action: Action) -> bool:
        stage, op, number = action
        microbatch = number or 0
        if op in SEND_OPS | RECV_OPS:
            channel = channel_of(action, directions)
            queues[connection(placement, channel), op in RECV_OPS].append((clocks[rank], channel, microbatch))
        elif op in COMPUTE_OPS:
            times = [time_of(kind, stage + offset, stage, microbatch) for kind, offset in NEEDS[op]]
            if any(time is None for time in times):
                return False
            clocks[rank] = max([clocks[rank], *(time for time in times if time is not None)])
            clocks[rank] += 2 if op is Op.B else 1
            for kind, offset in MAKES[op]:
                there[kind, stage + offset, microbatch, False] = clocks[rank]
        return True

    has_moved = True
    while has_moved:
        has_moved = transfer()
        for rank, row in enumerate(schedule.rows):
            while positions[rank] < len(row) and step(rank, row[positions[rank]]):
                positions[rank] += 1
                has_moved = True
    assert all(position == len(row) for position, row in zip(positions, schedule.rows, strict=True)), "a deadlock"
    return max(clocks)


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_sharing_connections_lengthens_no_step(name: str, depth: int) -> None:
    """At no cost of a message, at a tenth, and at three tenths of a forward."""
    for p, v, m in ((2, 2, 4), (4, 2, 8), (4, 4, 10), (4, 8, 8), (8, 2, 16)):
        schedule = build_lowered(*family_shapes(name, p, v, m), receive_depth=depth)
        for wire in (0.0, 0.1, 0.3):
            shared = run(schedule, wire, own_route)
            assert shared <= run(schedule, wire, lambda placement, channel: channel) + 1e-9
            if Op.OVERLAP not in schedule.ops:  # which starts both halves of a pair together
                costs = Costs.equal(schedule.num_stages, 1.0, 1.0, 1.0, transfer_seconds=wire)
                ends = simulate(schedule, costs).ends
                computed = [
                    end
                    for row, of_rank in zip(schedule.rows, ends, strict=True)
                    for action, end in zip(row, of_rank, strict=True)
                    if action.op in COMPUTE_OPS
                ]
                assert max(computed) == pytest.approx(shared)


def test_a_wrong_order_does_not_run_over_blocking_connections() -> None:
    schedule = build_lowered("breadth-first", 2, 2, 2)
    first, second = schedule.rows
    with pytest.raises(AssertionError, match="the wrong message is delivered"):
        run(replace(schedule, rows=(first, exchange_receives(second, Op.RECV_F))), 0.0, own_route)
