"""Collectives and messages of growing sizes, timed.

Each size takes one warm-up call, which may have to connect, and then as many calls as its time budget allows, the same
number on all its ranks. Times are wall-clock seconds until the result can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from megapipe.comm.collectives import all_gather, all_reduce, barrier, reduce_scatter
from megapipe.comm.groups import Group
from megapipe.comm.round_trips import buffer, receive, reported_errors, send, synchronize

MAX_REPEATS = 9
MAX_BUDGETS = 4  # a size that is expected to take longer than this many time budgets is left out

Times = dict[int, list[float]]  # bytes -> seconds of each repeat


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
                synchronize(device)
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
        send(header, group, peer)
        return buffer(num_bytes, device)

    def send_timed(num_bytes: int, count: int) -> list[float]:
        message, seconds = announce(count, num_bytes), []
        for _ in range(count):
            began = perf_counter()
            send(message, group, peer)
            receive(receipt, group, peer)
            int(receipt[0])  # on a GPU this waits for the receipt
            seconds.append(perf_counter() - began)
        return seconds

    with reported_errors("a timed message", group, peer):
        if group.rank == source:
            times = _time_sizes(sizes, budget_seconds, lambda num_bytes: partial(send_timed, num_bytes))
            announce(0, 0)
            return times
        while True:
            receive(header, group, peer)
            count, num_bytes = header.tolist()
            if not count:
                return {}
            message = buffer(num_bytes, device)
            for _ in range(count):
                receive(message, group, peer)
                synchronize(device)
                send(receipt, group, peer)


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
