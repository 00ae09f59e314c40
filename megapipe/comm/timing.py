"""Collectives and messages of growing sizes, timed: what a group, or one direction between two ranks, reaches now.

Each size takes one call more than it counts, which comes first and may have to connect, and as many as its budget allows, the same number
on all its ranks. Times are wall clock until the result can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from megapipe.comm.collectives import all_gather, all_reduce, barrier, reduce_scatter
from megapipe.comm.failures import communication_error
from megapipe.comm.groups import Group
from megapipe.comm.ping import TAG

MOST_REPEATS = 9
MOST_BUDGETS = 4  # that a size may be expected to take for one call; a larger one is left out

Times = dict[int, list[float]]  # bytes -> seconds of each repeat


def repeats_within(budget_seconds: float, once_seconds: float) -> int:
    """1 to MOST_REPEATS."""
    return max(1, min(MOST_REPEATS, int(budget_seconds / once_seconds))) if once_seconds > 0 else MOST_REPEATS


def is_too_long(num_bytes: int, measured: Times, budget_seconds: float) -> bool:
    """Whether a size would take too long, by the time of the largest so far; the smallest two are always measured."""
    if len(measured) < 2:
        return False
    largest = max(measured)
    return median(measured[largest]) * num_bytes / largest > MOST_BUDGETS * budget_seconds


def time_collective(
    name: str, group: Group, sizes: Sequence[int], budget_seconds: float, device: torch.device
) -> Times:
    """Of the slowest rank, for each repeat. name: all_reduce, reduce_scatter or all_gather. sizes: ascending, bytes of the whole buffer.

    Called by all ranks of the group, all of which get the same. Raises CommunicationError.
    """
    found: Times = {}
    for num_bytes in sizes:
        if is_too_long(num_bytes, found, budget_seconds):
            break
        call = _collective(name, group, num_bytes, device)
        count = repeats_within(budget_seconds, _slowest([_once(call, group, device)], group, device)[0])
        found[num_bytes] = _slowest([_once(call, group, device) for _ in range(count)], group, device)
    return found


def time_messages(
    group: Group, source: int, target: int, sizes: Sequence[int], budget_seconds: float, device: torch.device
) -> Times:
    """Of messages in one direction, each until its receipt of 8 bytes is back; on rank `source` of the group, {} elsewhere.

    source, target: ranks of the group; others return at once. Raises CommunicationError.
    """
    if group.rank not in (source, target):
        return {}
    line = _Line(group, target if group.rank == source else source, device)
    began = perf_counter()
    try:
        return line.send_all(sizes, budget_seconds) if group.rank == source else line.answer_all()
    except RuntimeError as error:
        who = f"global rank {group.global_rank} with global rank {group.ranks[line.peer]} in group {group}"
        raise communication_error(
            "a timed message", who, error, perf_counter() - began, group.timeout_seconds
        ) from error


class _Line:
    """One direction between two ranks. A header of two numbers says how many messages of how many bytes follow; 0: it is over."""

    def __init__(self, group: Group, peer: int, device: torch.device) -> None:
        self.peer = peer
        self._group, self._device = group, device
        self._header = torch.zeros(2, dtype=torch.int64, device=device)
        self._receipt = torch.zeros(1, dtype=torch.int64, device=device)

    def send_all(self, sizes: Sequence[int], budget_seconds: float) -> Times:
        found: Times = {}
        for num_bytes in sizes:
            if is_too_long(num_bytes, found, budget_seconds):
                break
            once = self._send_some(1, num_bytes)[0]
            found[num_bytes] = self._send_some(repeats_within(budget_seconds, once), num_bytes)
        self._say(0, 0)
        return found

    def answer_all(self) -> Times:
        while True:
            self._receive(self._header)
            count, num_bytes = self._header.tolist()
            if not count:
                return {}
            message = self._message(num_bytes)
            for _ in range(count):
                self._receive(message)
                if message.is_cuda:
                    torch.cuda.synchronize(self._device)
                self._send(self._receipt)

    def _send_some(self, count: int, num_bytes: int) -> list[float]:
        self._say(count, num_bytes)
        message, seconds = self._message(num_bytes), []
        for _ in range(count):
            began = perf_counter()
            self._send(message)
            self._receive(self._receipt)
            int(self._receipt[0])  # on a GPU this waits for it
            seconds.append(perf_counter() - began)
        return seconds

    def _say(self, count: int, num_bytes: int) -> None:
        self._header.copy_(torch.tensor([count, num_bytes]))
        self._send(self._header)

    def _message(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(max(1, num_bytes // 8), dtype=torch.int64, device=self._device)

    def _send(self, tensor: torch.Tensor) -> None:
        dist.send(tensor, group=self._group.handle, group_dst=self.peer, tag=TAG)

    def _receive(self, tensor: torch.Tensor) -> None:
        dist.recv(tensor, group=self._group.handle, group_src=self.peer, tag=TAG)


def _collective(name: str, group: Group, num_bytes: int, device: torch.device) -> Callable[[], object]:
    shard = torch.zeros(max(1, -(-num_bytes // (4 * group.size))), dtype=torch.float32, device=device)
    whole = torch.zeros(group.size * len(shard), dtype=torch.float32, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: all_reduce(whole, group),
        "reduce_scatter": lambda: reduce_scatter(shard, whole, group),
        "all_gather": lambda: all_gather(whole, shard, group),
    }
    return calls[name]


def _once(call: Callable[[], object], group: Group, device: torch.device) -> float:
    barrier(group)
    began = perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - began


def _slowest(seconds: list[float], group: Group, device: torch.device) -> list[float]:
    """Each of the slowest rank's."""
    tensor = torch.tensor(seconds, dtype=torch.float64, device=device)
    all_reduce(tensor, group, op="max")
    return [float(value) for value in tensor.tolist()]
