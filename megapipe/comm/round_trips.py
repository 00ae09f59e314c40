"""Blocking messages between two ranks outside a pipeline, and their round trips, by which clocks are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.comm.channels import FINGERPRINT_BITS, HEADER_BITS, NUMBER_BITS
from megapipe.comm.groups import Group, communication_error

# that of channel 1,023, which only pipelines of more than 500 stages have
TAG = ((1 << 10) - 1) << FINGERPRINT_BITS + HEADER_BITS + NUMBER_BITS


def round_trips(
    group: Group,
    asker: int,
    answerer: int,
    count: int,
    device: torch.device,
    num_bytes: int = 8,
    now: Callable[[], int] = perf_counter_ns,
) -> list[tuple[int, int, int]]:
    """Send `count` messages of num_bytes each way between two ranks of the group, after one for warm-up.

    Returns on the asker (sent, read on the answerer's clock, back) of each, in nanoseconds; [] on the other ranks. now:
    this rank's clock. Raises CommunicationError.
    """
    if group.rank not in (asker, answerer):
        return []
    peer = answerer if group.rank == asker else asker
    message = buffer(num_bytes, device)
    trips = []
    with reported_errors("a round trip", group, peer):
        for _ in range(count + 1):
            if group.rank == asker:
                sent = now()
                send(message, group, peer)
                receive(message, group, peer)
                answered = int(message[0])  # on a GPU this waits for the message
                trips.append((sent, answered, now()))
            else:
                receive(message, group, peer)
                synchronize(device)
                message[0] = now()
                send(message, group, peer)
    return trips[1:]


def buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Return a message of num_bytes, as integers of 8 bytes."""
    return torch.zeros(max(1, num_bytes // 8), dtype=torch.int64, device=device)


def send(tensor: Tensor, group: Group, peer: int) -> None:
    """Send to a rank of the group."""
    dist.send(tensor, group=group.handle, group_dst=peer, tag=TAG)


def receive(tensor: Tensor, group: Group, peer: int) -> None:
    """Receive from a rank of the group."""
    dist.recv(tensor, group=group.handle, group_src=peer, tag=TAG)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def reported_errors(what: str, group: Group, peer: int) -> Iterator[None]:
    """Raise the errors of torch's messages as CommunicationError."""
    start_ns = perf_counter_ns()
    try:
        yield
    except RuntimeError as error:
        raise communication_error(group, what, error, start_ns, f" with global rank {group.ranks[peer]}") from error
