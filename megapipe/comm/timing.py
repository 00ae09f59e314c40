"""Timed operations: round trips, and collectives and messages of growing sizes.

Round trips serve to compare clocks and to measure the time of one message. The others measure what a group, or one
direction between two ranks, achieves: each size takes one warm-up call, which may have to connect, and then as many
calls as its time budget allows, the same number on all its ranks. Times are wall-clock seconds until the result can be
read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Send `count` messages of num_bytes each way between two ranks of the group; other ranks return at once.

    Returns on the asker (sent, read on the answerer's clock, back) of each, in nanoseconds; [] on the other ranks. now:
    this rank's clock. A warm-up message, which may have to connect, is left out. Raises CommunicationError.
    """
    if group.rank not in (asker, answerer):
        return []
    peer = answerer if group.rank == asker else asker
    message = torch.zeros(max(1, num_bytes // 8), dtype=torch.int64, device=device)
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
                if message.is_cuda:
                    torch.cuda.synchronize(device)
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
    CommunicationError.
    """
    times: Times = {}
    for num_bytes in sizes:
        if _takes_too_long(num_bytes, times, budget_seconds):
            break
        call = _collective(name, group, num_bytes, device)
        warm_up = _slowest([_time_once(call, group, device)], group, device)[0]
        repeats = _repeats_within(budget_seconds, warm_up)
        times[num_bytes] = _slowest([_time_once(call, group, device) for _ in range(repeats)], group, device)
    return times


def time_messages(
    group: Group, source: int, target: int, sizes: Sequence[int], budget_seconds: float, device: torch.device
) -> Times:
    """Time messages in one direction between two ranks of the group, each until its receipt of 8 bytes is back.

    Returns the times on rank `source`, {} elsewhere; ranks other than source and target return at once. Raises
    CommunicationError.
    """
    if group.rank not in (source, target):
        return {}
    connection = _Connection(group, target if group.rank == source else source, device)
    start_ns = perf_counter_ns()
    try:
        return connection.send_all(sizes, budget_seconds) if group.rank == source else connection.answer_all()
    except RuntimeError as error:
        raise _error("a timed message", group, connection.peer, start_ns, error) from error


class _Connection:
    """One direction between two ranks.

    A header of two numbers announces how many messages of how many bytes follow; 0 ends.
    """

    def __init__(self, group: Group, peer: int, device: torch.device) -> None:
        self.peer = peer
        self._group, self._device = group, device
        self._header = torch.zeros(2, dtype=torch.int64, device=device)
        self._receipt = torch.zeros(1, dtype=torch.int64, device=device)

    def send_all(self, sizes: Sequence[int], budget_seconds: float) -> Times:
        times: Times = {}
        for num_bytes in sizes:
            if _takes_too_long(num_bytes, times, budget_seconds):
                break
            warm_up = self._send_some(1, num_bytes)[0]
            times[num_bytes] = self._send_some(_repeats_within(budget_seconds, warm_up), num_bytes)
        self._announce(0, 0)
        return times

    def answer_all(self) -> Times:
        while True:
            _receive(self._header, self._group, self.peer)
            count, num_bytes = self._header.tolist()
            if not count:
                return {}
            message = self._message(num_bytes)
            for _ in range(count):
                _receive(message, self._group, self.peer)
                if message.is_cuda:
                    torch.cuda.synchronize(self._device)
                _send(self._receipt, self._group, self.peer)

    def _send_some(self, count: int, num_bytes: int) -> list[float]:
        self._announce(count, num_bytes)
        message, seconds = self._message(num_bytes), []
        for _ in range(count):
            began = perf_counter()
            _send(message, self._group, self.peer)
            _receive(self._receipt, self._group, self.peer)
            int(self._receipt[0])  # on a GPU this waits for the receipt
            seconds.append(perf_counter() - began)
        return seconds

    def _announce(self, count: int, num_bytes: int) -> None:
        self._header.copy_(torch.tensor([count, num_bytes]))
        _send(self._header, self._group, self.peer)

    def _message(self, num_bytes: int) -> Tensor:
        return torch.zeros(max(1, num_bytes // 8), dtype=torch.int64, device=self._device)


def _repeats_within(budget_seconds: float, once_seconds: float) -> int:
    return max(1, min(MAX_REPEATS, int(budget_seconds / once_seconds))) if once_seconds > 0 else MAX_REPEATS


def _takes_too_long(num_bytes: int, times: Times, budget_seconds: float) -> bool:
    """Return True if a size would take too long, judged by the largest so far; the two smallest are always timed."""
    if len(times) < 2:
        return False
    largest = max(times)
    return median(times[largest]) * num_bytes / largest > MAX_BUDGETS * budget_seconds


def _collective(name: str, group: Group, num_bytes: int, device: torch.device) -> Callable[[], object]:
    shard = torch.zeros(max(1, -(-num_bytes // (4 * group.size))), dtype=torch.float32, device=device)
    whole = torch.zeros(group.size * len(shard), dtype=torch.float32, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: all_reduce(whole, group),
        "reduce_scatter": lambda: reduce_scatter(shard, whole, group),
        "all_gather": lambda: all_gather(whole, shard, group),
    }
    return calls[name]


def _time_once(call: Callable[[], object], group: Group, device: torch.device) -> float:
    barrier(group)
    began = perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - began


def _slowest(seconds: list[float], group: Group, device: torch.device) -> list[float]:
    """Return, for each repeat, the time of the slowest rank."""
    tensor = torch.tensor(seconds, dtype=torch.float64, device=device)
    all_reduce(tensor, group, op="max")
    return [float(value) for value in tensor.tolist()]


def _send(tensor: Tensor, group: Group, peer: int) -> None:
    dist.send(tensor, group=group.handle, group_dst=peer, tag=TAG)


def _receive(tensor: Tensor, group: Group, peer: int) -> None:
    dist.recv(tensor, group=group.handle, group_src=peer, tag=TAG)


def _error(what: str, group: Group, peer: int, start_ns: int, error: RuntimeError) -> Exception:
    return communication_error(group, what, error, start_ns, f" with global rank {group.ranks[peer]}")
