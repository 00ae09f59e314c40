"""Copies that run as late as the waits between streams allow, or, to the host, as early as possible.

Code with a missing wait reads wrong data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megapipe.gpu.streams import StreamCopies
from tests.pipeline.current_stream import CurrentStream


class Stream:
    """A stream whose work runs only when something waits for it, or at once if it is early.

    Work on the compute stream always runs at once.
    """

    def __init__(self, cuda: LateCuda, name: str) -> None:
        self._cuda, self.name = cuda, name
        self.is_early = False
        self._queue: list[Callable[[], None]] = []
        self._done = 0

    def add(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        if self.is_early:
            self.synchronize()

    def record_event(self) -> tuple[Stream, int]:
        return self, len(self._queue)

    def wait_event(self, event: tuple[Stream, int]) -> None:
        other, count = event
        self._cuda.log.append((self.name, "waits for", other.name))
        if self is self._cuda.compute:
            other.catch_up(count)
        else:
            self.add(lambda: other.catch_up(count))

    def wait_stream(self, other: Stream) -> None:
        self._cuda.log.append((self.name, "waits for", other.name))
        assert other is self._cuda.compute, "copies wait for what computes"

    def synchronize(self) -> None:
        self.catch_up(len(self._queue))

    def catch_up(self, count: int) -> None:
        while self._done < count:
            self._done += 1
            self._queue[self._done - 1]()


class LateCuda(CurrentStream[Stream]):
    """The stream functions of torch.cuda."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, str]] = []
        self.compute = Stream(self, "compute")
        super().__init__(self.compute)
        self._names = iter(("out", "in"))

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, next(self._names))


class LateCopies(StreamCopies):
    """Copies of a GPU on streams that run late.

    early: copies to the host run as soon as they are issued.
    """

    def __init__(self, early: bool = False) -> None:
        self.cuda = LateCuda()
        super().__init__(torch.device("cpu"), self.cuda)
        self._out.is_early = early

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def _run(self, stream: Any, copy: Callable[[], None]) -> Any:
        def run() -> None:
            self.cuda.log.append((stream.name, "copies", ""))
            copy()

        stream.add(run)
        return stream.record_event()
