"""Messages to and fro between two ranks, timed: for clocks that are to be compared, and for the time that a message takes by itself."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

import torch
import torch.distributed as dist

from megapipe.comm.channels import FINGERPRINT_BITS, HEADER_BITS, NUMBER_BITS
from megapipe.comm.failures import communication_error
from megapipe.comm.groups import Group

TAG = (
    (1 << 10) - 1
) << FINGERPRINT_BITS + HEADER_BITS + NUMBER_BITS  # the last boundary's: no channel of a pipeline this long is in use


def round_trips(
    group: Group,
    asker: int,
    answerer: int,
    count: int,
    device: torch.device,
    num_bytes: int = 8,
    now: Callable[[], int] = perf_counter_ns,
) -> list[tuple[int, int, int]]:
    """(sent, read on the answerer's clock, back) of `count` messages of num_bytes each way, nanoseconds; [] on every rank but the asker.

    asker, answerer: ranks of the group; others return at once. now: this rank's clock. One more message goes first, which may have to
    connect the two. Raises CommunicationError.
    """
    if group.rank not in (asker, answerer):
        return []
    peer = answerer if group.rank == asker else asker
    message = torch.zeros(max(1, num_bytes // 8), dtype=torch.int64, device=device)
    trips = []
    started = perf_counter_ns()
    try:
        for _ in range(count + 1):
            if group.rank == asker:
                sent = now()
                dist.send(message, group=group.handle, group_dst=peer, tag=TAG)
                dist.recv(message, group=group.handle, group_src=peer, tag=TAG)
                there = int(message[0])  # on a GPU this waits for the message
                trips.append((sent, there, now()))
            else:
                dist.recv(message, group=group.handle, group_src=peer, tag=TAG)
                if message.is_cuda:
                    torch.cuda.synchronize(device)
                message[0] = now()
                dist.send(message, group=group.handle, group_dst=peer, tag=TAG)
    except RuntimeError as error:
        who = f"global rank {group.global_rank} with global rank {group.ranks[peer]} in group {group}"
        raise communication_error(
            "a ping-pong", who, error, (perf_counter_ns() - started) / 1e9, group.timeout_seconds
        ) from error
    return trips[1:]
