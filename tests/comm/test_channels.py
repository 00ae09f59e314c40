"""Channels never mix messages, keep them in order, carry tensors of any kind, and explain failures."""

from __future__ import annotations

import gc
import os
import random
import time
from collections import Counter

import pytest
import torch
from torch import Tensor

from megapipe.comm import channels as channels_module
from megapipe.comm.channels import (
    NUMBER_BITS,
    Channel,
    ChannelKey,
    Channels,
    MessageSpec,
    PendingReceive,
    PendingSend,
)
from megapipe.comm.groups import Group
from megapipe.comm.trace import Tracer
from megapipe.errors import CommunicationError, ScheduleError
from megapipe.schedule.placement import Placement, linear, loop, two_directions, v_shape
from megapipe.topology import Topology
from tests.comm.ranks import groups_of
from tests.harness import RankPool, run_ranks

FEW = (MessageSpec((2, 3), torch.float32),)


def content(boundary: int, kind: str, direction: int, number: int) -> float:
    return 1000.0 * boundary + 100 * (kind == "gradient") + 50 * direction + number


def interleave(rank: int, world_size: int, placement: Placement, seed: int, messages: int, elements: int) -> int:
    """Send and receive `messages` messages on every channel in an order drawn by this rank alone.

    Return the number of received messages that were checked.
    """
    channels = Channels.build(placement, groups_of(rank, Topology(pp=world_size)).pp)
    draw = random.Random(100 * seed + rank)
    todo = [key for key in channels for _ in range(messages)]
    draw.shuffle(todo)
    number = dict.fromkeys(channels, 0)
    posted: list[tuple[ChannelKey, int, PendingReceive]] = []
    sends: list[PendingSend] = []
    for key in todo:
        value = content(*key, number[key])
        if channels[key].sends:
            sends.append(channels[key].send((torch.full((elements,), value), torch.full((3, 1), -value))))
        else:
            specs = (MessageSpec((elements,), torch.float32), MessageSpec((3, 1), torch.float32))
            posted.append((key, number[key], channels[key].post_receive(specs)))
        number[key] += 1
    draw.shuffle(posted)
    for key, index, pending in posted:
        for _ in range(2):
            first, second = pending.wait()
            assert first.unique().tolist() == [content(*key, index)], (key, index)
            assert second.unique().tolist() == [-content(*key, index)], (key, index)
    for send in sends:
        send.wait()
        send.wait()
        assert send.done()
    return len(posted)


def test_channels_of_the_same_two_ranks_never_mix_messages() -> None:
    """With pp = 2 and two chunks the previous and the next rank are the same one: three boundaries, six channels."""
    with RankPool(2) as pool:
        for seed in range(6):
            assert pool.run(interleave, loop(2, 2), seed, 8, 5) == [24, 24]


def test_channels_of_a_longer_pipeline_never_mix_messages() -> None:
    assert sum(run_ranks(interleave, 3, loop(3, 3), 0, 5, 7)) == 8 * 2 * 5


def test_channels_in_two_directions_never_mix_messages() -> None:
    """Two ranks hold both stages.

    Over the one boundary each rank sends activations of one direction and gradients of the other.
    """
    with RankPool(2) as pool:
        for seed in range(6):
            assert pool.run(interleave, two_directions(2), seed, 8, 5) == [16, 16]
    assert sum(run_ranks(interleave, 4, two_directions(4), 0, 5, 7)) == 3 * 2 * 2 * 5


def test_large_messages_in_any_interleaving_arrive_whole() -> None:
    assert run_ranks(interleave, 2, loop(2, 2), 1, 3, 300_000) == [9, 9]


def many_in_order(rank: int, world_size: int, count: int) -> list[float]:
    """Send messages whose running number exceeds what a tag can hold."""
    channel = Channels.build(linear(2), groups_of(rank, Topology(pp=2)).pp, max_in_flight=4)[0, "activation", 0]
    channel._number = (1 << NUMBER_BITS) - count // 2
    if rank == 0:
        for number in range(count):
            channel.send((torch.tensor([float(number)]),))
        channel.drain()
        return []
    return [channel.post_receive((MessageSpec((1,), torch.float32),)).wait()[0].item() for _ in range(count)]


def test_messages_stay_in_order_beyond_the_numbers_of_a_tag() -> None:
    assert run_ranks(many_in_order, 2, 60)[1] == [float(number) for number in range(60)]


def bounded(rank: int, world_size: int) -> list[bool]:
    """With one message in flight, the second send waits until the first one has arrived."""
    groups = groups_of(rank, Topology(pp=2))
    channel = Channels.build(linear(2), groups.pp, max_in_flight=1)[0, "activation", 0]
    if rank == 0:
        first = channel.send((torch.zeros(2, 3),))
        before = first.done()
        channel.send((torch.ones(2, 3),))
        after = first.done()
        channel.drain()
        return [before, after]
    time.sleep(0.1)
    return [channel.post_receive(FEW).wait()[0].eq(value).all().item() for value in (0, 1)]


def test_bounded_channel_waits_for_the_oldest_message() -> None:
    assert run_ranks(bounded, 2) == [[False, True], [True, True]]


def every_dtype(rank: int, world_size: int) -> list[tuple[Tensor, ...]]:
    channels = Channels.build(linear(2), groups_of(rank, Topology(pp=2)).pp)
    x = torch.arange(6.0).view(2, 3)
    messages = [
        (x.double() / 3, x.bfloat16()),
        (x.t(),),  # not contiguous; arrives with shape [3, 2]
        (x.half(), x.long(), torch.empty(0, 4)),
        (torch.tensor(2.5),),
    ]
    if rank == 0:
        for message in messages:
            channels[0, "activation", 0].send(message)
        channels.drain()
        return messages
    return [
        channels[0, "activation", 0].post_receive(tuple(map(MessageSpec.of, message))).wait() for message in messages
    ]


def test_tuples_of_any_shape_and_dtype_are_received_unchanged() -> None:
    sent, received = run_ranks(every_dtype, 2)
    for left, right in zip(sent, received, strict=True):
        assert [x.dtype for x in left] == [x.dtype for x in right]
        assert all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


def send_and_forget(rank: int, world_size: int) -> list[float]:
    channel = Channels.build(linear(2), groups_of(rank, Topology(pp=2)).pp)[0, "activation", 0]
    size = 500_000
    if rank == 0:
        for number in range(4):
            channel.send((torch.full((size,), float(number)),))  # only the channel holds a reference
        gc.collect()
        rubbish = [torch.full((size,), -1.0) for _ in range(8)]  # would reuse freed memory of a message
        channel.drain()
        return [rubbish[0][0].item()]
    time.sleep(0.1)
    received = [channel.post_receive((MessageSpec((size,), torch.float32),)).wait()[0] for _ in range(4)]
    return [x.unique().item() for x in received]


def test_sent_tensors_live_until_they_have_arrived() -> None:
    assert run_ranks(send_and_forget, 2)[1] == [0.0, 1.0, 2.0, 3.0]


def disagree_at_first(rank: int, world_size: int) -> str:
    channels = Channels.build(linear(2), groups_of(rank, Topology(pp=2), timeout_seconds=10).pp)
    if rank == 0:
        channels[0, "activation", 0].send((torch.ones(4, 8),))
        return ""
    with pytest.raises(CommunicationError) as caught:
        channels[0, "activation", 0].post_receive(FEW).wait()
    return str(caught.value)


def test_longer_message_than_expected_is_an_error_and_not_a_crash() -> None:
    message = run_ranks(disagree_at_first, 2)[1]
    assert (
        message
        == "activation from stage 0 to 1: global rank 0 sends (float32[4, 8]), global rank 1 expects (float32[2, 3])"
    )


def disagree_and_wait_for_the_second(rank: int, world_size: int) -> str:
    channel = Channels.build(linear(2), groups_of(rank, Topology(pp=2), timeout_seconds=10).pp)[0, "activation", 0]
    if rank == 0:
        for _ in range(2):
            channel.send((torch.ones(2, 3, dtype=torch.int64),))
        return ""
    _, second = channel.post_receive(FEW), channel.post_receive(FEW)
    with pytest.raises(CommunicationError) as caught:
        second.wait()
    return str(caught.value)


def test_declarations_are_compared_by_whichever_message_is_waited_for_first() -> None:
    assert (
        "sends (int64[2, 3]), global rank 1 expects (float32[2, 3])"
        in run_ranks(disagree_and_wait_for_the_second, 2)[1]
    )


def disagree_later(rank: int, world_size: int) -> str:
    channels = Channels.build(linear(2), groups_of(rank, Topology(pp=2), timeout_seconds=1).pp)
    channel = channels[0, "activation", 0]
    if rank == 0:
        channel.send((torch.ones(2, 3),)).wait()
        channel.send((torch.ones(4, 8),))
        return ""
    channel.post_receive(FEW).wait()
    with pytest.raises(CommunicationError) as caught:
        channel.post_receive(FEW).wait()
    return str(caught.value)


def test_sender_that_alone_changes_its_shapes_is_an_error_and_not_a_crash() -> None:
    message = run_ranks(disagree_later, 2)[1]
    assert message.startswith(
        "receiving activation from stage 0 to 1 (float32[2, 3]) failed on global rank 1 from global rank 0 in "
        "group pp (ranks 0 1) after"
    )
    assert "no answer within the timeout of 1 s" in message


def lose_the_sender(rank: int, world_size: int) -> str:
    channels = Channels.build(linear(2), groups_of(rank, Topology(pp=2)).pp)
    channel = channels[0, "gradient", 0]
    if rank == 1:
        channel.send((torch.ones(2, 3),)).wait()
        os._exit(1)
    channel.post_receive(FEW).wait()
    with pytest.raises(CommunicationError) as caught:
        channel.post_receive(FEW).wait()
    return str(caught.value)


def test_dead_sender_is_named_at_once() -> None:
    message = run_ranks(lose_the_sender, 2, timeout=20, may_die=(1,))[0]
    assert message.startswith(
        "receiving gradient from stage 1 to 0 (float32[2, 3]) failed on global rank 0 from global rank 1"
    )
    assert "a peer process has exited" in message


def traced(rank: int, world_size: int) -> list[tuple[str, str]]:
    tracer = Tracer()
    channel = Channels.build(linear(2), groups_of(rank, Topology(pp=2), tracer=tracer).pp)[0, "activation", 0]
    pending = channel.send((torch.ones(2, 3),)) if rank == 0 else channel.post_receive(FEW)
    pending.wait()
    pending.wait()
    return [(event.name, event.kind) for event in tracer.of_kind("send", "receive")]


def test_tracer_sees_each_message_once() -> None:
    assert run_ranks(traced, 2) == [[("boundary 0 activation", "send")], [("boundary 0 activation", "receive")]]


def ends_of(rank: int, world_size: int, placement: Placement) -> dict[ChannelKey, tuple[bool, int]]:
    pp = groups_of(rank, Topology(tp=2, pp=2)).pp
    return {key: (channel.sends, channel.peer) for key, channel in Channels.build(placement, pp).items()}


def test_peers_are_those_of_the_own_pipeline() -> None:
    seen = run_ranks(ends_of, 4, loop(2, 2))
    assert seen[1] == {
        (0, "activation", 0): (True, 3),
        (0, "gradient", 0): (False, 3),
        (1, "activation", 0): (False, 3),
        (1, "gradient", 0): (True, 3),
        (2, "activation", 0): (True, 3),
        (2, "gradient", 0): (False, 3),
    }
    assert seen[2] == {key: (not sends, 0) for key, (sends, _) in seen[0].items()}


def test_the_second_direction_runs_the_other_way_between_the_same_ranks() -> None:
    assert run_ranks(ends_of, 4, two_directions(2))[1] == {
        (0, "activation", 0): (True, 3),
        (0, "gradient", 0): (False, 3),
        (0, "activation", 1): (False, 3),
        (0, "gradient", 1): (True, 3),
    }


def wrong_end(rank: int, world_size: int) -> str:
    channel = Channels.build(linear(2), groups_of(rank, Topology(pp=2)).pp)[0, "activation", 0]
    with pytest.raises(ScheduleError) as caught:
        channel.post_receive(FEW) if rank == 0 else channel.send((torch.ones(1),))
    return str(caught.value)


def test_using_the_other_end_of_a_channel_is_refused() -> None:
    assert run_ranks(wrong_end, 2) == [
        "global rank 0 cannot post_receive activation from stage 0 to 1: it is the other end of that channel",
        "global rank 1 cannot send activation from stage 0 to 1: it is the other end of that channel",
    ]


def test_hops_inside_a_rank_have_no_channel() -> None:
    assert len(Channels.build(Placement(1, (0, 0, 0)), Group.alone("pp"))) == 0


def test_placement_for_another_pipeline_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"2 pipeline ranks, .*pp \(ranks 0\) .*1"):
        Channels.build(linear(2), Group.alone("pp"))


@pytest.mark.parametrize(
    ("placement", "most"),
    [
        pytest.param(linear(8), 4, id="one chunk"),
        pytest.param(loop(2, 8), 4, id="pp 2, 8 chunks: previous and next rank are one"),
        pytest.param(loop(8, 2), 4, id="2 chunks"),
        pytest.param(loop(8, 8), 4, id="8 chunks"),
        pytest.param(v_shape(8), 8, id="a V"),
        pytest.param(two_directions(8), 8, id="two directions"),
    ],
)
def test_channels_of_a_kind_to_a_rank_share_a_communicator(
    placement: Placement, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks create the communicators in one order, also those of other pipelines."""
    created: list[tuple[tuple[int, ...], str]] = []

    def create(ranks: tuple[int, ...], name: str, *_: object) -> object:
        created.append((ranks, name))
        return object()

    monkeypatch.setattr(channels_module, "backend_of", lambda group: "nccl")
    monkeypatch.setattr(channels_module, "new_handle", create)
    monkeypatch.setattr(Channel, "connect", lambda self: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    first = tuple(range(placement.num_ranks))
    pipelines = first, tuple(rank + placement.num_ranks for rank in first)
    orders, counts = set(), []
    for rank in first:
        created.clear()
        channels = Channels.build(placement, Group("pp", first, rank, siblings=pipelines))
        counts.append(len({id(channel.handle) for channel in channels.values()}))
        assert len({(channel.peer, channel.kind, channel.sends) for channel in channels.values()}) == counts[-1]
        assert sum(rank in ranks for ranks, _ in created) == counts[-1]
        orders.add(tuple(created))
    assert len(orders) == 1 and max(counts) == most


@pytest.mark.parametrize(
    ("placement", "longest"),
    [
        pytest.param(loop(16, 8), 4, id="pp 16, 8 chunks"),
        pytest.param(loop(5, 2), 6, id="an odd ring"),
        pytest.param(two_directions(8), 8, id="two directions"),
    ],
)
def test_pairs_of_ranks_connect_in_parallel(
    placement: Placement, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[int, str, int]] = []
    monkeypatch.setattr(channels_module, "backend_of", lambda group: "nccl")
    monkeypatch.setattr(channels_module, "new_handle", lambda *_: None)
    monkeypatch.setattr(Channel, "connect", lambda self: order.append((self.boundary, self.kind, self.direction)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ranks = tuple(range(placement.num_ranks))
    waiting = []
    for rank in ranks:
        order.clear()
        Channels.build(placement, Group("pp", ranks, rank, siblings=(ranks,)))
        waiting.append(list(order))
    rounds = 0
    while any(waiting):  # in a round all pairs connect whose two ranks wait for the same channel
        heads = Counter(order[0] for order in waiting if order)
        ready = {key for key, ends in heads.items() if ends == 2}
        assert ready, "the ranks wait for each other"
        waiting = [order[1:] if order and order[0] in ready else order for order in waiting]
        rounds += 1
    assert rounds == longest
