"""Hardware work queues and waiting receives: against a literal machine, known hangs, the claims of the docs."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.plan.queues import (
    BY_USE,
    COUNTS,
    CP,
    CURRENT,
    DELIVERY,
    DP,
    EP,
    GATHER,
    MAPPINGS,
    TO_DEVICE,
    TO_HOST,
    TP,
    Enqueued,
    Program,
    QueueRun,
    RankTraffic,
    Stream,
    beside,
    enqueue,
    queue_map,
    slowdown,
    waiting_receives,
    why_it_hangs,
)
from megapipe.schedule.action import Op
from megapipe.schedule.dependencies import ChannelPath, Route, ValueKind
from megapipe.schedule.families import SCHEDULES, build_forward_only, build_lowered
from megapipe.schedule.lifetimes import Moves, StageGroups, plan_moves
from megapipe.schedule.placement import loop
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.sharding import ShardingPolicy, shard
from megapipe.schedule.validate import validate
from tests.schedule.strategies import family_shapes
from tests.tiny import plan_for

CHANNELS = (ChannelPath(ValueKind.ACT, 0), ChannelPath(ValueKind.GRAD, 0), ChannelPath(ValueKind.ACT, 1))
STREAMS = {channel: channel.route(loop(2, 2)) for channel in CHANNELS}  # three


def literal(programs: tuple[Program, ...], connections: int, seed: int) -> bool:
    """Return True if queues that are served in a random order, with kernels that end at random moments, get stuck."""
    draw = random.Random(seed)
    queues: list[tuple[int, list[int]]] = []  # (rank, entries not started)
    for rank, program in enumerate(programs):
        streams = list(dict.fromkeys(work.stream for work in program.works))
        streams.sort(key=lambda stream: (stream != CURRENT, str(CHANNELS.index(stream)) if stream in CHANNELS else "9"))
        queue_of = queue_map(streams, connections, BY_USE, ("pp",))
        for queue in range(connections):
            entries = [index for index, work in enumerate(program.works) if queue_of[work.stream][1] == queue]
            queues.append((rank, entries))
    started: set[tuple[int, int]] = set()
    ended: set[tuple[int, int]] = set()

    def may_start(rank: int, index: int) -> bool:
        works = programs[rank].works
        earlier = [other for other in range(index) if works[other].stream == works[index].stream]
        awaited = [] if works[index].after is None else [works[index].after]
        return all((rank, other) in ended for other in (*earlier, *awaited))

    def may_end(rank: int, index: int) -> bool:
        message = programs[rank].works[index].message
        ends = [
            (r, i) for r, p in enumerate(programs) for i, w in enumerate(p.works) if message and w.message == message
        ]
        return message is None or (len(ends) == 2 and all(end in started for end in ends))

    while True:
        steps: list[tuple[str, int, int]] = [("end", *each) for each in started - ended if may_end(*each)]
        heads = [(number, rank, entries[0]) for number, (rank, entries) in enumerate(queues) if entries]
        steps += [("start", number, 0) for number, rank, index in heads if may_start(rank, index)]
        if not steps:
            return any(entries for _, entries in queues)
        kind, first, second = draw.choice(sorted(steps))
        if kind == "end":
            ended.add((first, second))
        else:
            rank, entries = queues[first]
            started.add((rank, entries.pop(0)))


@st.composite
def random_programs(draw: st.DrawFn) -> tuple[Program, ...]:
    """Draw two ranks that exchange messages on three channels in any order, with kernels and waits between them."""
    programs = (Program(), Program())
    numbers: dict[tuple[int, ChannelPath], int] = {}
    for rank, program in enumerate(programs):
        for channel in draw(st.permutations(CHANNELS * 2)):
            if draw(st.booleans()):
                program.add(Enqueued(CURRENT, "kernel"))
            number = numbers[rank, channel] = numbers.get((rank, channel), -1) + 1
            posted = program.communicate(Enqueued(STREAMS[channel], f"{channel.boundary}", message=(channel, number)))
            if draw(st.booleans()):
                program.wait(CURRENT, draw(st.integers(0, posted)), "wait")
    return programs


@settings(max_examples=80)
@given(random_programs(), st.sampled_from((1, 2, 3, 4)), st.integers(0, 3))
def test_random_programs_hang_where_a_literal_machine_does(
    programs: tuple[Program, ...], connections: int, seed: int
) -> None:
    expected = literal(programs, connections, seed)
    assert bool(QueueRun(programs, connections, high_priority=("pp",)).blocked) == expected


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_schedules_hang_where_a_literal_machine_does(name: str, depth: int) -> None:
    """On two ranks: the literal machine is slow."""
    programs = enqueue(build_lowered(name, 2, 1, 4, None, depth))
    for connections in (1, 2, 3):
        expected = literal(programs, connections, seed=0)
        assert bool(QueueRun(programs, connections, high_priority=("pp",)).blocked) == expected


def test_a_planted_hang_is_found_and_named() -> None:
    """Each rank enqueues a send behind the wait for the peer's message: only a queue of its own lets the send start."""
    programs = (Program(), Program())
    for rank, program in enumerate(programs):
        mine, other = CHANNELS[rank], CHANNELS[1 - rank]
        received = program.communicate(Enqueued(STREAMS[other], "receive", message=(other, 0), is_receive=True))
        program.wait(CURRENT, received, "forward")
        program.add(Enqueued(STREAMS[mine], "send", message=(mine, 0)))
    (first, _) = QueueRun(programs, 1).blocked
    assert first == "rank 0: forward waits for receive, with 1 entries behind it in its queue"
    assert why_it_hangs(programs, 1) == first
    assert not why_it_hangs(programs, 8)


@pytest.mark.parametrize(
    ("name", "chunks", "depth", "unsafe"),
    [
        ("1f1b", 1, 1, ()),
        ("1f1b", 1, 2, ()),
        ("gpipe", 1, 1, ()),
        ("gpipe", 1, 2, (1, 2)),
        ("breadth-first", 4, 1, (1, 2)),
    ],
)
def test_known_hangs(name: str, chunks: int, depth: int, unsafe: tuple[int, ...]) -> None:
    programs = enqueue(build_lowered(name, 4, chunks, 16, None, depth), RankTraffic(dp=True))
    assert tuple(c for c in (1, 2, 8, 32) if why_it_hangs(programs, c, mappings=(BY_USE,))) == unsafe


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("name", [name for name, family in SCHEDULES.items() if not family.is_automatic])
def test_shared_communicators_need_no_more_sends_in_flight_than_validate_proves(name: str, depth: int) -> None:
    for p, v, m in ((2, 4, 6), (4, 3, 9)):
        training = build_lowered(*family_shapes(name, p, v, m), receive_depth=depth)
        for schedule in (training, build_forward_only(training.placement, training.num_microbatches, depth)):
            traffic = RankTraffic(send_depth=max(1, validate(schedule).send_depth))
            assert not QueueRun(enqueue(schedule, traffic), None).blocked


@pytest.mark.parametrize("connections", [1, 2, 8])
def test_a_tensor_parallel_group_hangs_where_one_of_its_ranks_does(connections: int) -> None:
    """The sums over tp are rendezvous of the copies of a rank; their names differ, so that each is a message."""
    for name, depth in (("1f1b", 2), ("1f1b", 3), ("gpipe", 2), ("interleaved", 3)):
        programs = enqueue(build_lowered(name, 2, 2 if name == "interleaved" else 1, 4, None, depth), RankTraffic(1))
        twice = []
        for rank, program in enumerate(programs):
            for copy in range(2):
                sums = 0
                works = []
                for work in program.works:
                    if work.message is not None:
                        channel, number = work.message
                        work = work._replace(message=(channel._replace(direction=10 + copy), number))
                    elif work.stream == TP and work.after is None:
                        work = work._replace(message=(ChannelPath(ValueKind.WGRAD, rank), sums))
                        sums += 1
                    works.append(work)
                twice.append(dataclasses.replace(program, works=works))
        for mapping in MAPPINGS:
            alone = QueueRun(programs, connections, mapping).blocked
            assert bool(QueueRun(tuple(twice), connections, mapping).blocked) == bool(alone)


def test_more_communicators_than_streams_in_torchs_pool_share_streams() -> None:
    streams: list[Stream] = [CURRENT, *(Route(0, receiver, ValueKind.ACT) for receiver in range(1, 35))]
    numbers = [number for number, _ in queue_map(streams, None, BY_USE, ("pp",)).values()]
    assert len(set(numbers)) == 33 and numbers[1:3] == numbers[33:]


def test_a_middle_rank_of_1f1b_waits_with_one_receive_on_average_and_two_at_most() -> None:
    """F = 1, B = 2, as in docs/gpu_queues.md."""
    traffic = RankTraffic(message_seconds=0.05)
    held = waiting_receives(build_lowered("1f1b", 4, 1, 16, None, 1), traffic)
    assert held[1].peak == held[2].peak == 2
    assert 0.8 < held[1].mean < 1.0
    deeper = waiting_receives(build_lowered("1f1b", 4, 1, 16, None, 2), traffic)
    assert all(two.mean > one.mean and two.bound >= one.bound for one, two in zip(held[:3], deeper[:3], strict=True))


def test_the_bound_holds_for_any_durations() -> None:
    schedule = build_lowered("dualpipe-v", 4, 2, 8, None, 1)
    for seconds in (0.0, 0.1, 5.0):
        for held in waiting_receives(schedule, RankTraffic(message_seconds=seconds)):
            assert held.peak <= held.bound


def test_both_halves_of_a_pair_have_streams_of_their_own() -> None:
    schedule = build_lowered("dualpipe-v", 2, 2, 4, None, 1)
    assert Op.OVERLAP in schedule.ops
    streams = {work.stream for work in enqueue(schedule, RankTraffic(tp_collectives=1))[0].works}
    assert {0, 3, f"{TP} 0", f"{TP} 3"} <= streams


def moves_of(schedule: Schedule, layers: int) -> tuple[Moves, ...]:
    last = schedule.placement.num_stages - 1
    groups = {stage: StageGroups(layers, layers, stage == last) for stage in range(last + 1)}
    return tuple(plan_moves(row, groups) for row in schedule.rows)


def test_every_offloaded_group_is_copied_out_and_back_in_the_order_of_the_runtime() -> None:
    schedule = build_lowered("1f1b", 4, 1, 8, None, 1)
    moves = moves_of(schedule, 2)
    for program, of_rank in zip(enqueue(schedule, RankTraffic(moves=moves)), moves, strict=True):
        out, back = (
            [index for index, work in enumerate(program.works) if work.stream == stream and work.after is None]
            for stream in (TO_HOST, TO_DEVICE)
        )
        assert len(out) == len(back) == len(of_rank.moved) > 0
        waits = {work.after for work in program.works if work.stream == CURRENT}
        assert waits >= {*out, *back}  # memory is reused after the copy out, and read after the copy back
        # a host buffer is written again after the last copy out of it
        assert {work.after for work in program.works if work.stream == TO_HOST} & set(back)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe-v", "gpipe"])
def test_offloading_neither_hangs_with_queues_of_their_own_nor_changes_the_time_if_copies_take_none(name: str) -> None:
    schedule = build_lowered(name, 4, 2 if "v" in name else 1, 8, None, 1)
    plain, moved = (QueueRun(enqueue(schedule, RankTraffic(moves=each)), None) for each in ((), moves_of(schedule, 2)))
    assert not moved.blocked
    assert max(map(max, moved.ends)) == pytest.approx(max(map(max, plain.ends)))
    slow = QueueRun(enqueue(schedule, RankTraffic(moves=moves_of(schedule, 2), copy_seconds=3.0)), None)
    assert max(map(max, slow.ends)) > max(map(max, plain.ends)) and not slow.blocked


def test_a_graph_is_one_entry_that_takes_as_long() -> None:
    schedule = build_lowered("1f1b", 2, 1, 4, None, 1)
    eager, graphs = (enqueue(schedule, RankTraffic(tp_collectives=2, graphs=each)) for each in (False, True))
    assert {work.stream for work in eager[0].works} - {work.stream for work in graphs[0].works} == {TP}
    ends = [max(map(max, QueueRun(each, None).ends)) for each in (eager, graphs)]
    assert ends[0] == pytest.approx(ends[1])


def test_an_evaluation_has_the_streams_of_training() -> None:
    """Its forwards use half of the channels; the others keep their places among the hardware queues."""
    training = build_lowered("1f1b", 4, 1, 8, None, 2)
    forward = build_forward_only(training.placement, 8, 2)
    programs = enqueue(training, RankTraffic(dp=True))
    alone = enqueue(forward)
    both = beside(alone, programs)
    assert all(set(program.streams) < set(other.streams) for program, other in zip(alone, both, strict=True))
    assert all(program.streams == other.streams for program, other in zip(both, programs, strict=True))
    assert DP in both[0].streams and both[0].works == alone[0].works
    assert not QueueRun(both, 32).blocked


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_evaluations_hang_where_a_literal_machine_does(depth: int) -> None:
    programs = enqueue(build_forward_only(build_lowered("1f1b", 2, 1, 4).placement, 4, depth))
    for connections in (1, 2, 3):
        expected = literal(programs, connections, seed=0)
        assert bool(QueueRun(programs, connections, high_priority=("pp",)).blocked) == expected


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v", "dualpipe", "dualpipe-v"])
def test_experts_and_context_parallelism_do_not_hang_with_eight_queues(name: str) -> None:
    schedule = build_lowered(name, 4, 2 if name in ("interleaved", "breadth-first") or "v" in name else 1, 16, None, 1)
    traffic = RankTraffic(cp_messages=2, ep_collectives=2, host_waits=True, dp=True)
    streams = {str(work.stream) for work in enqueue(schedule, traffic)[0].works}
    assert {kind for kind in (CP, EP, DP) if any(stream.startswith(kind) for stream in streams)} == {CP, EP, DP}
    assert not why_it_hangs(enqueue(schedule, traffic), 8, mappings=(BY_USE,))


def test_what_the_host_enqueues_after_it_has_waited_starts_later() -> None:
    program = Program()
    first = program.add(Enqueued(CURRENT, "counts", seconds=2.0))
    before = program.add(Enqueued(EP, "before"))
    program.host = first
    after = program.add(Enqueued(EP, "after"))
    run = QueueRun((program,), None)
    assert (run.starts[0][before], run.starts[0][after]) == (0.0, 2.0)


def test_the_host_waits_once_in_each_forward_for_the_numbers_of_rows() -> None:
    schedule = build_lowered("1f1b", 2, 1, 4, None, 1)
    for program in enqueue(schedule, RankTraffic(ep_collectives=2, host_waits=True)):
        assert len({work.host for work in program.works} - {None}) == 4
        exchanged = [work for work in program.works if work.stream == EP and work.after is None]
        assert len(exchanged) == 4 * (3 + 2)


def test_messages_of_a_ring_travel_under_computation() -> None:
    schedule = build_lowered("1f1b", 2, 1, 4, None, 1)
    ends = []
    for traffic in (RankTraffic(cp_messages=2), RankTraffic(tp_collectives=2)):
        run = QueueRun(enqueue(schedule, dataclasses.replace(traffic, collective_seconds=0.2)), None)
        ends.append(max(map(max, run.ends)))
    assert ends[0] < ends[1]


def test_sharded_weights_are_waited_for_before_their_stage_computes() -> None:
    schedule = shard(build_lowered("interleaved", 2, 2, 4, None, 1), ShardingPolicy(True, "microbatch"))
    for program, row in zip(enqueue(schedule, RankTraffic(sharded=True, dp=True)), schedule.rows, strict=True):
        gathers = [index for index, work in enumerate(program.works) if work.stream == GATHER and work.after is None]
        assert len(gathers) == sum(action.op is Op.UNSHARD for action in row) > 2
        assert {work.after for work in program.works if work.stream == CURRENT} >= set(gathers)
    programs = enqueue(schedule, RankTraffic(sharded=True, dp=True, buckets=3, collective_seconds=1.0))
    assert slowdown(programs, 1) > slowdown(programs, 2) > slowdown(programs, 8) == 1.0


def test_results_of_all_to_alls_are_sent_from_the_stream_of_deliveries() -> None:
    flags = (
        "--num-layers 4 --vocab-size 256 --global-batch-size 16 --num-experts 8 --expert-model-parallel-size 4"
        " --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
        " --overlap-moe-expert-parallel-comm"
    )
    plan = plan_for(flags.split(), 8)
    assert plan.parts is not None
    schedule = plan.part_schedule(4)
    traffic = RankTraffic(parts=plan.parts, host_waits=True, send_depth=plan.send_depth)
    for program, row in zip(enqueue(schedule, traffic), schedule.rows, strict=True):
        works = program.works
        exchanges = [index for index, work in enumerate(works) if work.stream == EP and work.after is None]
        network = [a for a in row if a.stage in plan.parts.network and a.op in (Op.F, Op.B)]
        assert len(exchanges) == len(network)
        assert sum(work.stream == COUNTS and work.after is None for work in works) * 4 == len(network)
        awaited = {work.after for work in works if work.stream in (CURRENT, DELIVERY)}
        assert awaited >= set(exchanges), "each is waited for by a computation or a delivery"
        assert any(work.stream == DELIVERY and work.after in exchanges for work in works)
    assert not why_it_hangs(enqueue(schedule, traffic), 32)
