"""gloo sends GPU tensors through copies in host memory; the tests take the same path with CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from megapipe.comm import channels, collectives
from megapipe.comm.channels import Channels, MessageSpec
from megapipe.schedule.placement import linear
from megapipe.topology import Topology
from tests.comm.ranks import groups_of
from tests.comm.test_collectives import every_collective, in_place
from tests.harness import RankPool, run_ranks


def through_host(rank: int, world_size: int, job: str) -> object:
    """Run the job with every tensor copied to the host first, as for a device that gloo cannot send from."""
    kept = collectives.needs_host_copies, channels.needs_host_copies
    collectives.needs_host_copies = channels.needs_host_copies = lambda handle, tensor: True
    try:
        if job == "in place":
            return in_place(rank, world_size)
        return (
            messages(rank, world_size)
            if job == "messages"
            else every_collective(rank, world_size, job == "asynchronous")
        )
    finally:
        collectives.needs_host_copies, channels.needs_host_copies = kept


def directly(rank: int, world_size: int, job: str) -> object:
    if job == "in place":
        return in_place(rank, world_size)
    return (
        messages(rank, world_size) if job == "messages" else every_collective(rank, world_size, job == "asynchronous")
    )


def messages(rank: int, world_size: int) -> list[Tensor]:
    """Send three messages each way over one boundary and return the received tensors."""
    pp = groups_of(rank, Topology(pp=world_size)).pp
    built = Channels.build(linear(world_size), pp)
    spec = (MessageSpec((4, 2), torch.float32), MessageSpec((3,), torch.int64))
    there, back = built[0, "activation", 0], built[0, "gradient", 0]
    outgoing, incoming = (there, back) if rank == 0 else (back, there)
    sent = [(torch.full((4, 2), 10.0 * rank + n), torch.arange(3) + n) for n in range(3)]
    pending = [incoming.post_receive(spec) for _ in range(3)]
    for message in sent:
        outgoing.send(message)
    received = [tensor for one in pending for tensor in one.wait()]
    built.drain()
    return received


def test_results_are_those_of_tensors_sent_directly() -> None:
    with RankPool(2) as pool:
        for job in ("blocking", "asynchronous", "in place", "messages"):
            for there, here in zip(pool.run(through_host, job), pool.run(directly, job), strict=True):
                assert flat(there) and all(map(torch.equal, flat(there), flat(here))), job


def flat(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    assert isinstance(parts, (list, tuple)) or isinstance(value, dict)
    return [tensor for part in parts for tensor in flat(part)]


def test_messages_arrive_in_order() -> None:
    first, second = run_ranks(through_host, 2, "messages")
    assert isinstance(first, list) and isinstance(second, list)
    assert [float(tensor[0, 0]) for tensor in first[::2]] == [10.0, 11.0, 12.0]
    assert [float(tensor[0, 0]) for tensor in second[::2]] == [0.0, 1.0, 2.0]
