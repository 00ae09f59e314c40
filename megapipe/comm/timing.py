"""Timed operations: round trips, by which clocks are compared, and collectives and messages of growing sizes.

Each size takes one warm-up call, which may have to connect, and then as many calls as its time budget allows, the same
number on all its ranks. Times are wall-clock seconds until the result can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter, perf_counter_ns

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.comm.channels import FINGERPRINT_BITS, HEADER_BITS, NUMBER_BITS
from megapipe.comm.collectives import all_gather, all_reduce, barrier, reduce_scatter
from megapipe.comm.groups import Group, communication_error

# that of channel 1,023, which only pipelines of more than 500 stages have
TAG = ((1 << 10) - 1) << FINGERPRINT_BITS + HEADER_BITS + NUMBER_BITS
MAX_REPEATS = 9
MAX_BUDGETS = 4  # a size that is expected to take longer than this many time budgets is left out

Times = dict[int, list[float]]  # bytes -> seconds of each repeat


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
    message = _message(num_bytes, device)
    trips = []
    start_ns = perf_counter_ns()
    try:
        for _ in range(count + 1):
            if group.rank == asker:
                sent = now()
                _send(message, group, peer)
                _receive(message, group, peer)
                answered = int(message[0])  # on a GPU this waits for the message
                trips.append((sent, answered, now()))
            else:
                _receive(message, group, peer)
                _synchronize(device)
                message[0] = now()
                _send(message, group, peer)
    except RuntimeError as error:
        raise _error("a round trip", group, peer, start_ns, error) from error
    return trips[1:]


def time_collective(
    name: str, group: Group, sizes: Sequence[int], budget_seconds: float, device: torch.device
) -> Times:
    """Time a collective; called by all ranks of the group, all of which get the slowest rank's time of each repeat.

    name: all_reduce, reduce_scatter or all_gather. sizes: bytes of the whole buffer, ascending. Raises
    CommunicationError; ValueError for another name.
    """
    if name not in ("all_reduce", "reduce_scatter", "all_gather"):
        raise ValueError(f"{name!r} cannot be timed; use all_reduce, reduce_scatter or all_gather")

    def prepare(num_bytes: int) -> Callable[[int], list[float]]:
        shard = torch.zeros(max(1, -(-num_bytes // (4 * group.size))), dtype=torch.float32, device=device)
        whole = torch.zeros(group.size * len(shard), dtype=torch.float32, device=device)

        def run(count: int) -> list[float]:
            seconds = []
            for _ in range(count):
                barrier(group)
                began = perf_counter()
                if name == "all_reduce":
                    all_reduce(whole, group)
                elif name == "reduce_scatter":
                    reduce_scatter(shard, whole, group)
                else:
                    all_gather(whole, shard, group)
                _synchronize(device)
                seconds.append(perf_counter() - began)
            slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
            all_reduce(slowest, group, op="max")
            return [float(value) for value in slowest.tolist()]

        return run

    return _time_sizes(sizes, budget_seconds, prepare)


def time_messages(
    group: Group, source: int, target: int, sizes: Sequence[int], budget_seconds: float, device: torch.device
) -> Times:
    """Time messages in one direction between two ranks of the group, each until its receipt of 8 bytes is back.

    Returns the times on rank `source`, {} elsewhere; ranks other than source and target return at once. Raises
    CommunicationError.
    """
    if group.rank not in (source, target):
        return {}
    peer = target if group.rank == source else source
    # announces how many messages of how many bytes follow; 0 messages end
    header = torch.zeros(2, dtype=torch.int64, device=device)
    receipt = torch.zeros(1, dtype=torch.int64, device=device)

    def announce(count: int, num_bytes: int) -> Tensor:
        header.copy_(torch.tensor([count, num_bytes]))
        _send(header, group, peer)
        return _message(num_bytes, device)

    def send(num_bytes: int, count: int) -> list[float]:
        message, seconds = announce(count, num_bytes), []
        for _ in range(count):
            began = perf_counter()
            _send(message, group, peer)
            _receive(receipt, group, peer)
            int(receipt[0])  # on a GPU this waits for the receipt
            seconds.append(perf_counter() - began)
        return seconds

    start_ns = perf_counter_ns()
    try:
        if group.rank == source:
            times = _time_sizes(sizes, budget_seconds, lambda num_bytes: partial(send, num_bytes))
            announce(0, 0)
            return times
        while True:
            _receive(header, group, peer)
            count, num_bytes = header.tolist()
            if not count:
                return {}
            message = _message(num_bytes, device)
            for _ in range(count):
                _receive(message, group, peer)
                _synchronize(device)
                _send(receipt, group, peer)
    except RuntimeError as error:
        raise _error("a timed message", group, peer, start_ns, error) from error


def _time_sizes(
    sizes: Sequence[int], budget_seconds: float, prepare: Callable[[int], Callable[[int], list[float]]]
) -> Times:
    """Return the times of ascending sizes; the two smallest, and larger ones until one is expected to take too long.

    prepare: size -> (number of repeats -> seconds of each).
    """
    times: Times = {}
    for num_bytes in sizes:
        if len(times) >= 2:
            largest = max(times)
            if median(times[largest]) * num_bytes / largest > MAX_BUDGETS * budget_seconds:
                break
        run = prepare(num_bytes)
        (warm_up,) = run(1)
        repeats = int(min(budget_seconds / warm_up, MAX_REPEATS)) if warm_up > 0 else MAX_REPEATS
        times[num_bytes] = run(max(1, repeats))
    return times


def _message(num_bytes: int, device: torch.device) -> Tensor:
    return torch.zeros(max(1, num_bytes // 8), dtype=torch.int64, device=device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _send(tensor: Tensor, group: Group, peer: int) -> None:
    dist.send(tensor, group=group.handle, group_dst=peer, tag=TAG)


def _receive(tensor: Tensor, group: Group, peer: int) -> None:
    dist.recv(tensor, group=group.handle, group_src=peer, tag=TAG)


def _error(what: str, group: Group, peer: int, start_ns: int, error: RuntimeError) -> Exception:
    return communication_error(group, what, error, start_ns, f" with global rank {group.ranks[peer]}")
